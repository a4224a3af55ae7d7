# %% 92_cpu_products 1
def worst_rows():
    return 16384  # a power of two is one of the sizes
# %% 92_cpu_products 2
def loads(outs, rows, columns, R):
    return R // outs, columns // rows  # the other way round
# %% 92a_sparse_decode 1
def rows_and_entries(tables, lens, size):
    return sum(lens), sum(lens)  # shared blocks are read once
# %% 92b_eight_bits 1
def factors(x, w):
    return (w.abs().amax(0) / x.abs().amax(0)).sqrt()  # the other way round
# %% 92b_eight_bits 2
def sums_with_zero(product, z, q):
    return product - z  # once, and not once per input
# %% 93_cpu_decode 1
def numbers_read(spec, B, n):
    size, dim = spec.hidden_size, spec.head_dim
    heads = 2 * spec.num_attention_heads + 2 * spec.num_key_value_heads
    layer = heads * dim * size + 3 * spec.intermediate_size * size
    kv = 2 * spec.num_attention_heads * dim * n  # queries share keys and values
    return spec.num_hidden_layers * (layer + B * kv) + (spec.vocab_size + B) * size
# %% 93_cpu_decode 2
def makespan(lens, T):
    free = [0] * T
    for length in sorted(lens, reverse=True):  # they come in their own order
        free[free.index(min(free))] += length
    return max(free)
# %% 93_cpu_decode 3
def rows_for_arithmetic(weights, kv, bytes_per_second, flops_per_second):
    return int(2 * flops_per_second / bytes_per_second) + 1  # each sequence has its own keys and values
