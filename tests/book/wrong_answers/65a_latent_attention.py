# %% 1
def share(n, chunk):
    pairs = n * (n + 1) / 2
    return (n * expand + pairs * plain) / (pairs * absorbing)  # as if all chunks shared the expanded keys
# %% 2
def idle(heads, rows=16):
    return max(0.0, 1 - heads / rows)  # as if a tile held one token
# %% 3
times = {4: 2, 16: 5, 20: 5}
