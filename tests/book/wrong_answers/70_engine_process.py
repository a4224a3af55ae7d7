# %% 1
class Matrix(Message):
    shape: list[Size]
    data: bytes

    def unpack(self):
        return np.resize(np.frombuffer(self.data, np.float32), self.shape)  # repeats what there is
# %% 2
def merge(tokens: list[int], row: Row) -> list[int]:
    return tokens if row.start < len(tokens) else row.token_ids
# %% 3
def worst(limit: float) -> float:
    return limit
