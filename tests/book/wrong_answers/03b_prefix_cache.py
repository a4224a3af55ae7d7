# %% 1
prompt = [1, 2, 3, 4, 5, 6, 7]  # one too few
# %% 2
one, two = [1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 3, 4, 5, 6, 7, 9]  # the second blocks differ, too
