# %% 1
def worst_rows():
    return 16384  # a power of two is one of the sizes
# %% 2
def num_sizes(most):
    return 8 * (most.bit_length() - 1)  # up to 16 there are more
