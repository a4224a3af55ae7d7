# %% 1
def first_token(p, q):
    return np.eye(len(p))[q.argmax()]  # as if every draft were kept
# %% 2
def first_of_two(p, q, rng):
    for _ in range(2):  # the second is tried as if the first had not been rejected
        x = rng.choice(5, p=q)
        if rng.random() < p[x] / q[x]:
            return x, True
    rest = np.maximum(p - q, 0)
    return rng.choice(5, p=rest / rest.sum()), False
