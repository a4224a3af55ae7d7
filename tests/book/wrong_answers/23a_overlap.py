# %% 1
class DeepCore(OverlapCore):
    def step(self):
        with self.transaction():
            while len(self.in_flight) < 2 and (scheduled := self.scheduler.schedule()):
                batch, seqs = scheduled
                self._launch(batch, [*seqs.values()])
        return super().step()
# %% 2
class UnorderedDevice(WritingDevice):
    held = None
    def run(self, batch):
        self.held = batch  # kept, and run all the same
        return super().run(batch)
