# %% 1
def numbers_read(spec, B, n):
    size, dim = spec.hidden_size, spec.head_dim
    heads = 2 * spec.num_attention_heads + 2 * spec.num_key_value_heads
    layer = heads * dim * size + 3 * spec.intermediate_size * size
    kv = 2 * spec.num_attention_heads * dim * n  # queries share keys and values
    return spec.num_hidden_layers * (layer + B * kv) + (spec.vocab_size + B) * size
# %% 2
def makespan(lens, T):
    free = [0] * T
    for length in sorted(lens, reverse=True):  # they come in their own order
        free[free.index(min(free))] += length
    return max(free)
# %% 3
def rows_for_arithmetic(weights, kv, bytes_per_second, flops_per_second):
    return int(2 * flops_per_second / bytes_per_second) + 1  # each sequence has its own keys and values
