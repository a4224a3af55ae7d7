# %% 40_radix_cache 1
prompt = [1, 2, 3, 4]
# %% 40_radix_cache 2
def by_shared_prefix(tree: RadixCache, prompts: list[list[int]]) -> list[list[int]]:
    return sorted(prompts, key=lambda tokens: len(tree.match(tokens)), reverse=False)
# %% 41_spyre 1
computed = 64
# %% 41_spyre 2
load = [(0, 6, 3, 2), (0, 6, 10, 10)]
# %% 41_spyre 3
class ColumnPositions(RectangularRunner):
    def prepare_model(self, batch):
        ids, _, meta, rows = super().prepare_model(batch)
        columns, is_real, _ = self._lay_out(batch)
        return ids, torch.tensor(np.where(is_real, columns, 0).ravel()), meta, rows

first_length = 23
