# %% 1
def biased(logits, bias):
    for token, number in bias.items():
        logits[token] += number
    return logits
# %% 2
def no_second_pair(logits, tokens):
    changed = logits.clone()
    changed[tokens] = float("-inf")
    return changed
