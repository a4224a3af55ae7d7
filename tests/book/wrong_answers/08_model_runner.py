# %% 1
def slots_from_the_end(tables: list[list[int]], lens: list[int], size: int) -> list:
    return [t[-1] * size + (n - 1) % size for t, n in zip(tables, lens)]

reserve_is_safe = True
# %% 2
def blocks_that_fit(peak: int, block_bytes: int) -> int:
    return int((24 * 2**30 - 2**30 - peak) * 0.9) // block_bytes  # 90 % of what is left
