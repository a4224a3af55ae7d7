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
        ids, positions, meta, rows = super().prepare_model(batch)
        return ids, positions * 0, meta, rows  # other logits, but not those of the columns

first_length = 23
