# %% 1
def counts(rows: int, vocab: int) -> tuple[int, int]:
    return 3 * rows * (vocab // SAMPLE_CHUNK), rows * SAMPLE_CHUNK  # the last piece is not full
# %% 2
weights, u_of_row = [3.0, 2.0, 1.0], 0.9
