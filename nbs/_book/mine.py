"""`make mine`: the reader's own scheduler, block manager, or sampler in the small engine, beside ours.

`mine.py`, made from a template on the first call, may define `Scheduler`, `BlockManager`, or `sample`. Two loads are served
with them and without: the sixteen requests of chapter 00, all at once, in a pool of 512 tokens; and 64 requests that
come one by one, half of them with the same beginning, in a pool of 1,024. Waits are counted in steps, so they are the same
on every machine.

    python nbs/_book/mine.py [FILE]
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from places import ROOT

sys.path.insert(0, str(ROOT))

from atom_mini import small

TEMPLATE = '''"""Your own parts of the small engine: `make mine` compares them with ours (atom_mini/small.py).

Change what you like. What you delete is taken from the small engine.
"""

import torch

from atom_mini import small


class Scheduler(small.Scheduler):
    """Which sequences run in the next step. See chapter 00d."""


class BlockManager(small.BlockManager):
    """Who owns which block. See chapter 00c."""


our_sample = small.sample


def sample(logits: torch.Tensor, seq: small.Sequence) -> int:
    """The next token of `seq`. See chapter 06c."""
    return our_sample(logits, seq)
'''
MOST_STEPS = 20_000


class Request(NamedTuple):
    """The step before which a prompt comes, and how many tokens it wants."""

    arrival: int
    prompt: list[int]
    output: int


class Served(NamedTuple):
    """How a load went."""

    texts: list[str]
    tokens_per_second: float
    steps: int
    preemptions: int
    mean_wait: float  # steps until the first token
    longest_wait: int


def at_once() -> list[Request]:
    """The load of chapter 00."""
    names = ["Ada", "Ben", "Mia", "Hugo", "Cara", "Otto", "Rosa", "Sam"]
    places = ["Rome", "Oslo", "Lima", "Cairo", "Paris", "Delhi", "Tokyo", "Quito"]
    facts = " ".join(f"{n} lives in {p}." for n, p in zip(names, places, strict=True))
    story, rng, encode = "Once upon a time there was a girl. Her name was", random.Random(4), tokenizer().encode
    texts = [f"{facts} Where does {n} live?" if i % 2 else f"{story} {n}." for i, n in enumerate(names * 2)]
    return [Request(0, encode(text), rng.choice([4, 8, 16, 48])) for text in texts]


def one_by_one(count: int = 64) -> list[Request]:
    """A load like the scorecard's: prompts of 24 to 96 tokens, half of which share their first 48."""
    rng, now, vocab = random.Random(0), 0.0, len(tokenizer())
    shared, found = [rng.randrange(1, vocab) for _ in range(48)], []
    for i in range(count):
        own = [rng.randrange(1, vocab) for _ in range(rng.randint(24, 48))]
        found.append(Request(int(now), (shared if i % 2 else []) + own, rng.randint(12, 36)))
        now += rng.expovariate(1 / 2.5)
    return found


def tokenizer():  # type: ignore[no-untyped-def]
    return small.AutoTokenizer.from_pretrained(small.resolve_model("tiny"))


LOADS = {"sixteen at once, 512 slots": (at_once, 32), "64 one by one, 1,024 slots": (one_by_one, 64)}


def serve(load: list[Request], blocks: int, mine: ModuleType | None) -> Served:
    """Serve a load with the parts of `mine`, or with ours."""

    class Engine(small.LLM):
        scheduler_cls = getattr(mine, "Scheduler", small.Scheduler)
        block_manager_cls = getattr(mine, "BlockManager", small.BlockManager)

    llm, seqs, first, lost, step = Engine("tiny", num_kvcache_blocks=blocks, max_num_batched_tokens=256), [], {}, 0, 0
    start = time.perf_counter()
    with sampling_with(getattr(mine, "sample", small.sample)):
        while len(seqs) < len(load) or not all(seq.finish_reason for seq in seqs):
            for request in load[len(seqs) :]:
                if request.arrival > step:
                    break
                params = small.SamplingParams(temperature=0, max_tokens=request.output, ignore_eos=True)
                seqs += llm.add_requests(request.prompt, params)
            before = [*llm.scheduler.running]
            ran = llm.step()
            lost += sum(seq in llm.scheduler.waiting for seq in before)
            step += 1
            first |= {i: step - load[i].arrival for i, seq in enumerate(seqs)
                      if len(seq) > seq.num_prompt_tokens and i not in first}  # fmt: skip
            if step > MOST_STEPS or not (ran or len(seqs) < len(load)):
                raise SystemExit(f"the engine stands still at step {step}: {len(llm.scheduler.waiting)} sequences wait, "
                                 f"{len(llm.scheduler.running)} run, and nothing was scheduled")  # fmt: skip
    seconds, outs = time.perf_counter() - start, [llm.output(i, seq) for i, seq in enumerate(seqs)]
    tokens, waits = sum(len(out.token_ids) for out in outs), [*first.values()]
    return Served([out.text for out in outs], tokens / seconds, step, lost, sum(waits) / len(waits), max(waits))


@contextmanager
def sampling_with(sample) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """The runner finds `sample` in its module."""
    ours, small.sample = small.sample, sample
    try:
        yield
    finally:
        small.sample = ours


def compare(mine: ModuleType) -> bool:
    """Print the table of both loads; whether every text is the same."""
    same = True
    print(f"{'':30} {'tokens/s':>8} {'steps':>6} {'preempted':>9} {'mean wait':>9} {'longest':>7}   texts")
    for name, (make, blocks) in LOADS.items():
        load = make()
        ours, yours = serve(load, blocks, None), serve(load, blocks, mine)
        for whose, one in (("ours", ours), ("yours", yours)):
            wrong = [i for i, text in enumerate(one.texts) if text != ours.texts[i]]
            verdict = f"{len(load) - len(wrong)} of {len(load)} the same"
            print(f"{name if whose == 'ours' else '':24} {whose:5} {one.tokens_per_second:8.0f} {one.steps:6} "
                  f"{one.preemptions:9} {one.mean_wait:9.1f} {one.longest_wait:7}   {verdict}")  # fmt: skip
            if wrong:
                same = False
                print(f"  request {wrong[0]} is the first that differs:\n    ours  {ours.texts[wrong[0]]!r}\n"
                      f"    yours {one.texts[wrong[0]]!r}")  # fmt: skip
    print("\nWaits are in steps, from a request's arrival to its first token; tokens/s depend on what else runs here.")
    return same


def load_file(file: Path) -> ModuleType:
    """The reader's file as a module."""
    spec = importlib.util.spec_from_file_location("mine", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(file: Path) -> int:
    if not file.exists():
        file.write_text(TEMPLATE)
        print(f"{file} is new: change it, then run `make mine` again. As it is, it does what ours does.\n")
    torch.set_num_threads(1)
    return 0 if compare(load_file(file)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "mine.py"))
