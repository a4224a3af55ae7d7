# %% 1
def half(E, k):
    return E // (2 * k)  # as if no two tokens chose the same expert
# %% 2
def share(B):
    p = 1 / (np.arange(E) + 10)
    draw = [dice.choice(E, K, replace=False, p=p / p.sum()) for _ in range(B)]
    return len(set(np.concatenate(draw).tolist())) / E  # of all, not of the even case
