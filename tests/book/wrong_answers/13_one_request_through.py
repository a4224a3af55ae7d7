# %% 1
other_prompt = prompt.replace("girl", "hen")  # behind the two blocks that are shared
# %% 2
computed_again = len(ids) - 2 * SIZE
# %% 3
seed = next(s for s in range(100) if s != 0)
