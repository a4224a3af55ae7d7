# %% 1
foldable = {"input", "q", "head, untied"}  # the norm of a head would see the weight
# %% 2
def finish(product, x, folded, bias):
    centered = product - x.mean(1, keepdim=True)  # the mean, but not through the matrix
    return centered / x.std(1, correction=0, keepdim=True) + bias
# %% 3
sequences = next(n for n in range(1, 65) if saved(n, "MI300X", LOW, 1000) < 0.1)  # another GPU
