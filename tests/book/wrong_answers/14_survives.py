# %% 1
class NoRollback(EngineCore):
    pass  # it rolls back

harmful = 1
# %% 2
def reordered(name: str, known: list[str]) -> list[str]:
    return [k for k in known if set(name.split("_")) <= set(k.split("_"))]  # a part of the words is enough
