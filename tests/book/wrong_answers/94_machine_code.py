# %% 1
holders = [0, 16, 32, 48]
# %% 2
def place_of(lane, n):
    return n + 8 * (lane // 16), lane % 16
