# %% 1
def log_prob(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return logits.log_softmax(-1).gather(1, ids[:, None]).sum().item()  # of each token itself, not of the next
# %% 2
missed = {"one layer without 1/√D"}  # norms of q and k change only the product, too
# %% 3
def quiet_fault(model):
    model.model.norm.weight *= -1.0  # the likeliest becomes the least likely
