# %% 1
def ranges(size: int, ranks: int, gpus: int) -> list[list[str]]:
    return [[f"cuda:{i * ranks + j}" for j in range(ranks)] for i in range(size)]
# %% 2
def served(p: float, n: int, lockstep: bool) -> float:
    return 1 - p * n if lockstep else 1 - p
# %% 3
def with_texts(value):
    if isinstance(value, dict):
        return {name: with_texts(v) for name, v in value.items()}
    return str(value) if hasattr(value, "__fspath__") else value
