# %% 1
def there_and_back(mask):
    return Array.pack(mask.view(np.uint8)).unpack()
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
