# %% 1
def break_even(parameters, layers, heads, dim) -> int:
    return int(2 * parameters // kv_bytes(layers, heads, dim, 1024))  # rounded down
# %% 2
def break_even_in(bits, parameters, layers, heads, dim):
    return int(-(-parameters * bits // kv_bytes(layers, heads, dim, 1024)))  # bits are not bytes
