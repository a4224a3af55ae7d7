# %% 1
def visited(ranks: int, experts: int, k: int) -> float:
    return ranks * (1 - (1 - 1 / ranks) ** k)  # as if an expert could be chosen twice
# %% 2
def sent(rows: int, hidden: int, n: int) -> tuple[float, float]:
    whole = 2 * rows * hidden  # of one rank's rows
    return 2 * (n - 1) / n * whole, (n - 1) / n * whole
