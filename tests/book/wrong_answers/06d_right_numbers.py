# %% 1
missed = {"one layer without 1/√D"}  # norms of q and k change only the product, too
# %% 2
def quiet_fault(model):
    model.model.norm.weight *= -1.0  # the likeliest becomes the least likely
