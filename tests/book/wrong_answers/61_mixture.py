# %% 1
def half(E, k):
    return E // (2 * k)  # as if no two tokens chose the same expert
# %% 2
def share(B):
    p = 1 / (np.arange(E) + 10)
    draw = [rng.choice(E, K, replace=False, p=p / p.sum()) for _ in range(B)]
    return len(set(np.concatenate(draw).tolist())) / E  # of all, not of the even case
# %% 3
def balance(logits):
    correction = torch.zeros(logits.shape[1])
    for _ in range(300):
        ids = route(logits, Routing(2, "sigmoid"), correction)[1]
        load = torch.bincount(ids.flatten(), minlength=len(correction)).float()
        correction += 0.01 * torch.sign(load - load.mean())  # raises the load of busy experts
    return correction
