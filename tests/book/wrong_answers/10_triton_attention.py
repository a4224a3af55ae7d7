# %% 1
right = []
# %% 2
parts_and_keys = {8_193: (32, 257), 20_000: (32, 625)}  # not in whole tiles
# %% 3
other_size = SPLIT_KEYS  # no other
