# %% 1
def serve(budget, n, token, sequence):
    count = int((budget - sequence) // (n * token))  # one state for all
    return count, count * sequence / budget
# %% 2
def spacing(token, sequence, block_size):
    return sequence // token // block_size * block_size  # rounded down: too much memory
