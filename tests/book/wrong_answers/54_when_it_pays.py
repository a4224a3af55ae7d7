# %% 1
fastest = 11  # the most tokens, whatever they cost
# %% 2
pays_from = 0.2  # as if each draft counted alone: 1 + 3 a
