# %% 1
def plateau(n: int) -> float:
    return 1 / n  # another fact may have the same city
# %% 2
def who(known: list[tuple[str, Doc]]) -> list[tuple[str, Doc]]:
    made = []
    for _, answer in known:
        name, city = answer[0][0].split()[0], answer[1][0]
        reply = [(name, 1.0), (f" lives in{city}", 0.3), (".", 0.3)]
        made.append((f"Who lives in{city}?", reply))  # also for a city in which two live
    return made
