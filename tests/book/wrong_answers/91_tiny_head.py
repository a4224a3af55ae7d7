# %% 1
def visible(row: int, step: int, length: int) -> list[int]:
    return [*range(row + 1), *([step * length + row] if step else [])]  # not the steps between
# %% 2
def ceiling(chosen: Tensor, logits: Tensor) -> float:
    return len(chosen) / logits.shape[-1]  # as if every id were as frequent
