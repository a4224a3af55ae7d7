# %% 1
class ClockRunner(CountingRunner):
    clock = 0.0

    def forward(self, batch):
        self.clock += 1 + 0.01 * batch.total_tokens_num  # decodes too
        return super().forward(batch)
# %% 2
class NoRollback(EngineCore):
    def rollback(self, error):
        pass

harmful = next(at for at, ok in plain.items() if ok)
