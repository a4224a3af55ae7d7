# %% 1
def idle(heads, rows=16):
    return max(0.0, 1 - heads / rows)  # as if a tile held one token
# %% 2
times = {4: 2, 16: 5, 20: 5}
