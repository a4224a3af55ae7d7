# %% 1
first, second = list(range(5)), list(range(100, 108))
# %% 2
prompt = [1, 2, 3, 4, 5, 6, 7]  # one too few
# %% 3
found = {256: 256, 16: 300}
