# %% 1
def named(ends: dict[int, float], pause: float) -> list[int]:
    return [rank for rank, at in ends.items() if at <= pause]
# %% 2
def follow(last: int, frame: bytes) -> int:
    return decode(frame, Step).id
