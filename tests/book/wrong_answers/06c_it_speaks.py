# %% 1
def num_steps(max_tokens: list[int]) -> int:
    return 1 + max(max_tokens)  # the step of the prompts gives a token, too
# %% 2
def timid(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]  # the second always
