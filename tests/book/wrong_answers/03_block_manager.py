# %% 1
first, second = list(range(5)), list(range(100, 108))
# %% 2
found = {256: 256, 16: 300}
