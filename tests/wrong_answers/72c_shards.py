# %% 1
def uncut(whole: dict, mine: dict) -> int:
    same = [n for n in mine if len(mine[n]) == 1]
    return len(same)
# %% 2
def errors_of_sums(a, b):
    exact = (a.double() * b.double()).sum()
    found = (a * b).sum()
    return (abs(found.double() - exact).item(),) * 2
