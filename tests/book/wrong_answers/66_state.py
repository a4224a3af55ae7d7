# %% 1
def half_life(A_log, dt_bias, a=0.0):
    return math.log(2) / math.log1p(math.exp(a + dt_bias))  # all heads decay alike
# %% 2
def sort_rows(rows, spec):
    return rows.unflatten(0, (spec.linear_num_key_heads, -1)).mT.flatten()  # the heads take turns
# %% 3
def serve(room, n, token, sequence):
    count = int((room - sequence) // (n * token))  # one state for all
    return count, count * sequence / room
# %% 4
def spacing(token, sequence, block_size):
    return sequence // token // block_size * block_size  # rounded down: too much memory
