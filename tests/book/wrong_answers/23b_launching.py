# %% 1
loaded = 5
# %% 2
def overwritten(places: list[int]) -> list[int]:
    return [n for n in range(len(places)) if places[n] in places[n + 1 :]]
