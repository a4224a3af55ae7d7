# %% 1
def place(session: str, replicas: list[str]) -> str:
    # a ring, but nearly all sessions fall behind its last name
    names = sorted(replicas)
    return next((name for name in names if name > session), names[0])


# %% 2
def in_order(source: Path, target: Path) -> list[dict | None]:
    # sorted by name, which is not the order of the requests
    rows = sorted(map(json.loads, target.read_text().splitlines()), key=lambda row: row["custom_id"])
    return [row["response"]["body"] for row in rows]
