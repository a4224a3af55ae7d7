# %% 1
def slot_of(table: list[int], position: int, size: int) -> int:
    return table[position // size] + position % size
# %% 2
computed_again = len(ids) - 2 * SIZE
# %% 3
seed = next(s for s in range(100) if s != 0)
