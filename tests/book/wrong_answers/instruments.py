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
# %% 31_command_line 1
def start(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system or ""}]
# %% 31_command_line 2
def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    times = [rng.expovariate(1 / rate)]  # seconds for each, not each second
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(1 / rate))
    return times
