# %% 1
num_sequences = int(24e9 * 0.9 // (2000 * 2 * 36 * 8 * 128 * 2))  # without the weights
# %% 2
num_tokens = 100 + 300  # the last token need not be computed
