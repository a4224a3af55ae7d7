# %% 1
class ShortestFirst(Scheduler):
    def _admit(self, budget, seqs):
        self.waiting = deque(sorted(self.waiting, key=lambda s: -s.limit))  # the longest first
        super()._admit(budget, seqs)
# %% 2
class FirstIsVictim(Scheduler):
    def _grow(self, seq):
        raise NotImplementedError("it goes wrong, but for no reason of the exercise")
# %% 3
class NoReserve(Scheduler):
    def _can_grow(self, seq):
        return True  # a larger reserve
