# %% 30_timeline 1
def slices(trace: Trace) -> list[Event]:
    found = []
    for step in trace.steps:
        times = {"ts": step.start, "dur": step.host + step.device}  # milliseconds
        for id, phase in step.phases().items():
            found.append({"ph": "X", "pid": 1, "tid": id, "name": phase, **times})
    return found
# %% 30_timeline 2
class Lying(Scheduler):
    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)  # which notes it
# %% 30_timeline 2
class Lying(Scheduler):
    def preempt(self, seq: Sequence) -> None:
        raise AssertionError(f"step {first}: ")  # instead of the check
