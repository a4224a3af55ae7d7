# %% 1
tied = torch.tensor([[5.0, 5.0] + [0.0] * 22]) + torch.tensor([[0.0, 1e-3] + [0.0] * 22])  # no tie
# %% 2
def draw_sorted(probs: Tensor, u: Tensor) -> Tensor:
    ordered, order = probs.sort(-1)  # from the least likely
    return order.gather(1, draw(ordered, u)[:, None])[:, 0]
