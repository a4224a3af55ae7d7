# %% 1
def held_steps(trace: Trace) -> dict[int, int]:
    phases = [item for state in trace.replay() for item in state.phases().items()]
    return Counter(id for id, phase in phases if phase == "waiting")
# %% 2
class Lying(Scheduler):
    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)  # which notes it
