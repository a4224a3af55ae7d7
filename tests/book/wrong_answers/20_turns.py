# %% 1
class ThreeInARow(TurnScheduler):
    in_a_row = 0

    def _choose(self):
        self.last_was_prefill = self.in_a_row >= 2  # after two
        kind, seqs = super()._choose()
        self.in_a_row = self.in_a_row + 1 if kind is SequenceType.PREFILL else 0
        return kind, seqs
# %% 2
best_factor = 4
# %% 3
def largest_budget(limit, step, token):
    return int((limit - step) / token) // 2
