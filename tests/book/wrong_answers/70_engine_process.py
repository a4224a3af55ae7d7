# %% 1
class Matrix(Message):
    shape: list[Size]
    data: bytes

    def unpack(self):
        return np.resize(np.frombuffer(self.data, np.float32), self.shape)  # repeats what there is
# %% 2
class Progress(Message):
    waiting: int = 0
    running: Size = 0
# %% 3
def merge(tokens: list[int], row: Row) -> list[int]:
    return tokens if row.start < len(tokens) else row.token_ids
# %% 4
class Loop(EngineCoreProc):
    def _abort_all(self, first: int, last: int) -> int:
        return sum(self.core.abort(i) is not None for i in range(first, last))
