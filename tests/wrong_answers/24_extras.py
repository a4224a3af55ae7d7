# %% 1
def presence(logits, tokens, penalty):
    lower = logits.clone()
    for token in tokens:
        lower[token] -= penalty
    return lower
# %% 2
def frequency(logits, tokens, penalty):
    lower = logits.clone()
    lower[tokens] -= penalty
    return lower
