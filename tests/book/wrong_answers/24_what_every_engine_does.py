# %% 1
def no_second_pair(logits, tokens):
    changed = logits.clone()
    changed[tokens] = float("-inf")
    return changed
# %% 2
names = ["b", "<0xC3>", "<0xA9>", "b"]  # a character of two bytes, and nothing that breaks it
# %% 3
rule = (lambda value: isinstance(value, int | float) and 0 < value <= 1, "above 0, at most 1")  # accepts True
