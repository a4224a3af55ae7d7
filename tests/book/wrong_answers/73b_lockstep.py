# %% 1
def wasted(steps: list[int]) -> float:
    return sum(max(steps) - n for n in steps) / sum(steps)
# %% 2
events = [(0, "hears"), (1, "hears"), (0, "sleeps"), (1, "sleeps")]
