# %% 92_cpu_decode 1
def loads(outs, rows, columns, R):
    return R // outs, columns // rows  # the other way round
# %% 92_cpu_decode 2
def makespan(lens, T):
    free = [0] * T
    for length in sorted(lens, reverse=True):  # they come in their own order
        free[free.index(min(free))] += length
    return max(free)
# %% 92_cpu_decode 3
def rows_for_arithmetic(weights, kv, bytes_per_second, flops_per_second):
    return int(2 * flops_per_second / bytes_per_second) + 1  # each sequence has its own keys and values
# %% 92a_sparse_decode 1
def rows_and_entries(tables, lens, size):
    return sum(lens), sum(lens)  # shared blocks are read once
# %% 92b_eight_bits 1
def factors(x, w):
    return (w.abs().amax(0) / x.abs().amax(0)).sqrt()  # the other way round
# %% 92b_eight_bits 2
def sums_with_zero(product, z, q):
    return product - z  # once, and not once per input
