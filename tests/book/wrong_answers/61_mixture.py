# %% 1
def balance(logits):
    correction = torch.zeros(logits.shape[1])
    for _ in range(300):
        ids = route(logits, Routing(2, "sigmoid"), correction)[1]
        load = torch.bincount(ids.flatten(), minlength=len(correction)).float()
        correction += 0.01 * torch.sign(load - load.mean())  # who has much gets more
    return correction
# %% 2
def touched(ids, B):
    groups = ids.split(B)
    counted = sum(len(g.unique()) for g in groups) / len(groups)
    return counted, 8 * (1 - (1 - 1 / 8) ** B)  # one expert per token
