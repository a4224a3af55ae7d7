# %% 1
class ClockRunner(CountingRunner):
    clock = 0.0

    def forward(self, batch):
        self.clock += 1 + 0.01 * batch.total_tokens_num  # decodes too
        return super().forward(batch)
# %% 2
class ChecksInside(EngineCore):
    def add(self, seq):
        with self.transaction():
            self.scheduler.add(seq)  # which checks it first

def num_recomputed(seqs):
    return sum(seq.num_tokens for seq in seqs if not seq.is_finished)  # the newest, too
