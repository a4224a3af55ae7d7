# %% 1
def place(session: str, replicas: list[str]) -> str:
    # a ring, but nearly all sessions fall behind its last name
    names = sorted(replicas)
    return next((name for name in names if name > session), names[0])


# %% 2
def in_order(source: Path, target: Path) -> list[dict | None]:
    # as their names are sorted, which is not as they were asked for
    told = sorted(map(json.loads, target.read_text().splitlines()), key=lambda one: one["custom_id"])
    return [one["response"]["body"] for one in told]
