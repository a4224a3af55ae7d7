"""A scheduler to play with: one load on the real schedulers, under every setting of some sliders, recorded and drawn."""
# No model runs: the next token of a sequence is its length, and what a step would take is a sum of what it computes.
# Some hundred runs of this kind take seconds, so they are made whenever the site is, and no file of them is kept.

import gzip
import json
import random
import sys
from base64 import b64encode
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

from map import ROOT

sys.path.insert(0, str(ROOT / "nbs" / "_book"))
from show import CountingRunner, Request, check_trace, five_requests

from atom_mini.config import SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.args import EngineArgs
from atom_mini.options.build import make_scheduler
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.scheduling.overlap import OverlapCore
from atom_mini.scheduling.spyre import PaddedBatch
from atom_mini.sequence import Sequence
from atom_mini.trace.trace import COLOURS, Trace, record

SIZE = 4  # tokens of a block
MAX_NUM_SEQS = 8  # max_num_seqs
WEIGHTS = 20.0  # ms of every step
TOKEN = 1.0  # ms for each token that it computes
READ = 0.05  # ms for each token that it attends to
HOST = 6.0  # ms to plan it
POLICIES: dict[str, dict[str, Any]] = {
    "ATOM's": {},
    "interleaved": {"interleave_decode": True},
    "overlapped": {"overlap": True},
    "Spyre's": {"scheduler": "spyre", "chunk_size": 8, "max_batch_tkv_limit": 160},
}
KNOBS = {  # what a slider turns -> its places, as they are named on the page
    "policy": list(POLICIES),
    "blocks": [8, 10, 16, 32],
    "token budget": [8, 16, 48],
    "requests a second": [4, 10, 30, "all at once"],
    "prefix cache": ["off", "on"],
}
START = [0, 2, 0, 2, 0]  # where the sliders stand at first


class Step(NamedTuple):
    """A step under way, and when it ends."""

    runner: "ModelledRunner"
    end: float
    output: ScheduledBatchOutput

    def __call__(self) -> ScheduledBatchOutput:
        """Wait for it."""
        self.runner.now = max(self.runner.now, self.end)
        return self.output


class ModelledRunner(CountingRunner):
    """Runs no model, and knows when each step would have begun and ended, in ms. `now` is the host's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[tuple[float, float]] = []

    def launch(self, batch: ScheduledBatch) -> Step:
        """The host has planned `batch`; the device takes it when it is done with the last one."""
        self.now += HOST
        start = max(self.now, self.spans[-1][1] if self.spans else 0)
        self.spans.append((start, start + milliseconds(batch)))
        return Step(self, self.spans[-1][1], super().forward(batch))

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        return self.launch(batch)()


def milliseconds(batch: ScheduledBatch) -> float:
    """What the device computes: of a rectangle its padding, too."""
    tokens, attended = batch.total_tokens_num, int(batch.context_lens.sum())
    if isinstance(batch, PaddedBatch):
        tokens, attended = batch.total_seqs_num * batch.query_len, batch.block_tables.size * SIZE
    return WEIGHTS + TOKEN * tokens + READ * attended


def load(rate: int | str) -> list[tuple[float, Request]]:
    """When (ms) who comes: the book's five, and the same five again, at random times that come to `rate` a second."""
    rng = random.Random(0)
    gaps = [0.0] + [rng.expovariate(1.0) for _ in range(9)]
    scale = 0.0 if isinstance(rate, str) else 1000 / rate * 9 / sum(gaps)
    again = [r._replace(name=r.name * 2) for r in five_requests()]
    return [(scale * sum(gaps[: i + 1]), r) for i, r in enumerate([*five_requests(), *again])]


class Run(NamedTuple):
    """What a load did under one setting. Times in ms."""

    arrivals: list[float]
    tokens: list[list[float]]  # of each request, when its tokens came
    spans: list[tuple[float, float]]  # of each step
    trace: Trace


def run(policy: str, blocks: int, budget: int, rate: int | str, cache: str) -> Run:
    """Play the load through the real scheduler; its trace is checked."""
    pool = {"kv_cache_block_size": SIZE, "num_kvcache_blocks": blocks, "max_model_len": 32}
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": budget, "enable_prefix_caching": cache == "on"}
    config = EngineArgs(**pool, **limits, **POLICIES[policy])
    runner, requests = ModelledRunner(), load(rate)
    core = (OverlapCore if config.overlap else EngineCore)(config, runner, make_scheduler(config))
    trace, to_come, tokens = record(core), list(enumerate(requests)), [list[float]() for _ in requests]
    while to_come or not core.is_finished():
        if core.is_finished():  # nothing to do until the next one comes
            runner.now = max(runner.now, to_come[0][1][0])
        while to_come and to_come[0][1][0] <= runner.now:
            id, (_, request) = to_come.pop(0)
            core.add(Sequence(request.prompt, SIZE, SamplingParams(max_tokens=request.max_tokens), id=id))
        if step := core.step():
            for id, new in step.output.token_ids.items():
                tokens[id] += [runner.now] * len(new)
    check_trace(trace)
    wrong = [r.name for i, (_, r) in enumerate(requests) if len(tokens[i]) != r.max_tokens]
    assert not wrong, f"{policy}: {wrong} have another number of tokens than they asked for"
    return Run([at for at, _ in requests], tokens, runner.spans, trace)


def compact(made: Run, words: list[str]) -> dict[str, Any]:
    """What the page draws. `words` grows: why the first in the queue waits, each reason once."""
    lanes, steps = ["" for _ in made.tokens], []
    letters = {name: name[0] if name != "preempted" else "x" for name in COLOURS} | {None: " "}
    for step, (start, end) in zip(made.trace.steps, made.spans, strict=True):
        phases, counts = step.phases(), step.pool
        lanes = [lane + letters[phases.get(id)] for id, lane in enumerate(lanes)]
        why = step.why(step.waiting[0]) if step.waiting else ""
        words += [why] if why not in words else []
        many = sorted(step.tokens.items()) if step.kind == "prefill" else []
        facts = [step.kind[0], counts["used"], counts["cached"], words.index(why), many]
        steps.append([round(start), round(end), *facts])
    people = []
    for arrival, came in zip(made.arrivals, made.tokens, strict=True):
        gaps = sorted(after - before for before, after in pairwise(came))
        times = [arrival, came[0] - arrival, gaps[len(gaps) // 2], gaps[-1], came[-1] - arrival]
        people.append([round(ms) for ms in times])
    lost = sum(lane.count("x") for lane in lanes)
    return {"lanes": lanes, "steps": steps, "people": people, "preempted": lost}


def grid() -> Iterator[tuple[Any, ...]]:
    """Every setting of the sliders; the last one moves first."""
    return product(*KNOBS.values())


def recorded() -> dict[str, Any]:
    """What the page has: all runs, made now, in the order of `grid`."""
    words: list[str] = []
    runs = [compact(run(*setting), words) for setting in grid()]
    people = [[r.name, len(r.prompt), r.max_tokens] for _, r in load(4)]
    return {"knobs": KNOBS, "start": START, "people": people, "colours": COLOURS, "words": words, "runs": runs}


def playground(data: dict[str, Any]) -> str:
    """The page's HTML, with all runs in it."""
    text = json.dumps(data, separators=(",", ":"))
    zipped = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return (ROOT / "docs" / "playground.html").read_text().replace("/*DATA*/", zipped)


if __name__ == "__main__":
    page = playground(recorded())
    print(f"{len([*grid()])} runs, {len(page) / 1000:.0f} kB")
