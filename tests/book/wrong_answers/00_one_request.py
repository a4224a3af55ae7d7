# %% 1
best_order = sorted(range(16), key=lambda i: i % 2)  # some order
# %% 2
def used_share(i):
    return (len(prompts[i]) + wanted[i]) / 128  # the last token has no slot
