# %% 1
def blocks_that_fit(peak: int, block_bytes: int) -> int:
    return int((24 * 2**30 - 2**30 - peak) * 0.9) // block_bytes  # 90 % of what is left
