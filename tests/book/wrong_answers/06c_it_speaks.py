# %% 1
def log_prob(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return logits.log_softmax(-1).gather(1, ids[:, None]).sum().item()  # of each token itself, not of the next
# %% 2
def timid(logits: torch.Tensor) -> torch.Tensor:
    return logits.topk(2).indices[:, 1]  # the second always
