# %% 1
row = (lambda value: isinstance(value, int | float) and 0 < value <= 1, "above 0, at most 1")  # True goes through
# %% 2
def is_some_end(value):
    return bool(value) and is_end(value)  # 0 is an id
