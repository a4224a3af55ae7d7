# %% 1
def worst_rows():
    return 16384  # a power of two is one of the sizes
# %% 2
def loads(outs, rows, columns, R):
    return R // outs, columns // rows  # the other way round
