# %% 1
def worst_rows():
    return 16384  # a power of two is one of the sizes
