# %% 1
class Shortest(Scheduler):
    def add(self, seq):
        super().add(seq)
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda s: -len(s)))  # the longest
# %% 2
def needs_torch(name: str) -> bool:
    return "import torch" in paths[modules.index(name)].read_text()  # not what it imports
