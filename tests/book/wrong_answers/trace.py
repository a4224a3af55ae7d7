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
# %% 30_timeline 3
def first_sentence(llm: LLM, prompt: str) -> str:
    text = llm.generate(prompt, SamplingParams(max_tokens=64))[0].text
    return text[: text.index(".") + 1]
