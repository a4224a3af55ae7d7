# %% 1
tokens = (4, 5, 9)  # nothing comes after the end
