# %% 1
def factors(x, w):
    return (w.abs().amax(0) / x.abs().amax(0)).sqrt()  # the other way round
# %% 2
def sums_with_zero(product, z, q):
    return product - z  # once, and not once per input
