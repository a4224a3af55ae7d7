# %% 1
def as_much_as_weights(runner, count):
    weights = sum(m.nbytes for m in runner.weights[4]) + runner.weights[6].nbytes
    return weights // (count * runner.block_bytes) + 1  # a block is not a token
# %% 2
def rows_for_arithmetic(weights, kv, bytes_per_second, flops_per_second):
    return int(2 * flops_per_second / bytes_per_second) + 1  # keys and values are each sequence's own
