# %% 1
def empty_parts(length, window):
    return max(0, length - window) // 256  # as if all parts had one size
# %% 2
def times_counted(length):
    return length // 256  # the last part is a part, too
# %% 3
def blocks_read(length, window, tile):
    return -(-length // 16) - max(0, length - window) // 16  # as if loads began at any block
