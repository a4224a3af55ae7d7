# %% 1
def slots_from_the_end(tables: list[list[int]], lens: list[int], size: int) -> list:
    return [t[-1] * size + (n - 1) % size for t, n in zip(tables, lens)]

reserve_is_safe = True
# %% 2
def last_places(counts: list[int], is_sampled: list[bool]) -> list[int]:
    places, end = [], 0
    for count, samples in zip(counts, is_sampled):
        if samples:  # who does not sample takes places, too
            end += count
            places.append(end - 1)
    return places
# %% 3
def blocks_that_fit(peak: int, block_bytes: int) -> int:
    return int((24 * 2**30 - 2**30 - peak) * 0.9) // block_bytes  # 90 % of what is left
