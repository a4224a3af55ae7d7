# %% 1
best_order = sorted(range(16), key=lambda i: i % 2)  # some order
# %% 2
def break_even(parameters, layers, heads, dim) -> int:
    return int(2 * parameters // kv_bytes(layers, heads, dim, 1024))  # rounded down
