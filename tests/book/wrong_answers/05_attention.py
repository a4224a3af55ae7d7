# %% 1
def window_mask(n: int, length: int, window: int) -> Tensor:
    keys = torch.arange(length)
    return causal_mask(n, length) & (keys >= keys[-n:, None] - window)  # one too many
# %% 2
unharmed = {1, 4, 8, 12}
