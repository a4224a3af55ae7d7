"""A scheduler of your own, which admits the shortest prompt first: python docs/examples/own_scheduler.py"""

from collections import deque

from atom_mini import LLM, SamplingParams
from atom_mini.scheduler import Scheduler
from atom_mini.sequence import Sequence


class ShortestFirst(Scheduler):
    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.waiting = deque(sorted(self.waiting, key=lambda seq: seq.num_prompt_tokens))


prompts = ["Once upon a time there was a little girl. Her name was", "12 + 7 =", "Mia has a red hen."]
with LLM("tiny", scheduler_cls=ShortestFirst, max_num_seqs=1) as llm:
    ids = {llm.add_request(prompt, SamplingParams(max_tokens=8)): prompt for prompt in prompts}
    while step := llm.step():
        for seq in step.finished:
            print(f"finished: {ids[seq.id]!r}")
