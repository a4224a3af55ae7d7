# %% 1
def start(sink):
    return sink, 0.0  # the key is seen, but has no weight
# %% 2
def empty_parts(length, window):
    return max(0, length - window) // 256  # as if all parts had one size
