# %% 1
tokens = (4, 5, 9)  # nothing comes after the end
# %% 2
def may_overtake(n: int) -> bool:
    return n < 100  # c waits for most of them
# %% 3
class FirstIsVictim(Scheduler):
    def _grow(self, seq):
        raise NotImplementedError("it goes wrong, but for no reason of the exercise")
