# %% 1
def blocks_that_fit(peak: int, block_bytes: int) -> int:
    return int((24 * 2**30 - 2**30 - peak) * 0.9) // block_bytes  # 90 % of what is left
# %% 2
def num_sequences(blocks: int, size: int, n: int, shared: int = 0) -> int:
    return blocks // (-(-n // size) - shared // size)  # nobody holds the shared ones
