# %% 1
def serve(room, n, token, sequence):
    count = int((room - sequence) // (n * token))  # one state for all
    return count, count * sequence / room
# %% 2
def spacing(token, sequence, block_size):
    return sequence // token // block_size * block_size  # rounded down: too much memory
