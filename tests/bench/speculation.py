"""Decodes with drafts against decodes without, on a CPU: tokens per step, speed, and what the formula says of it.

The built-in model and four kinds of text of its own: questions answered from what was told (recall), stories, sums, and
a list that is copied (copy). Batches of 1, 4, 16 and 64, greedy. The drafters: none, lookup, a lookup that never finds
anything (what the machinery costs where nothing is drafted), the model without its last layer, its
EAGLE head. All run in one process and take turns of some hundredths of a second, so what else the machine does meets
all of them; on one thread, since two also measure how they wait for each other. Speeds are decode tokens per second
against no drafter's, in all the rounds. Prefix caches are off.

The prediction is E / (V + k c), with E the tokens per step and sequence, V a step's seconds with its rows of drafts
against those without, k c the drafter's seconds per step. E and the rows of each step are counted; how long a step of so
many rows takes, with a context as long as the task's, is measured meanwhile in an engine of its own, that has no drafts;
the drafter is timed where it is called. So it says whether verifying costs what its rows cost and nothing else.

Run: `python tests/bench/speculation.py [--batches 1 4] [--rounds 4] [--threads 1] [--json results.json]`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import OtherLoad, machine, print_table, write_json
from safetensors.torch import load_file, save_file

from atom_mini import LLM, SamplingParams
from atom_mini.graphs import first_decodes

K = 4
SLICE = 0.03  # seconds
ROOM: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320)
sys.path.append(str(Path(__file__).resolve().parents[2] / "nbs" / "_book"))
from script import load  # noqa: E402

tiny = load("90_tiny_model")
Prompts = list[Any]


def tasks(count: int) -> dict[str, tuple[Prompts, int]]:
    """Name -> (prompts, tokens wanted at most)."""
    rng = random.Random(0)
    facts = [tiny.prompt_and_answer(doc)[0] for doc in tiny.recall_test(60, count)]
    sums = [tiny.prompt_and_answer(tiny.sum_doc(rng, chat=False, test=True))[0] for _ in range(count)]
    stories = [f"Once upon a time there was a {rng.choice(['girl', 'boy'])}. {i}" for i in range(count)]
    copies = [rng.sample(range(20, 900), 24) for _ in range(count)]
    return {
        "recall": (facts, 10),
        "story": (stories, 48),
        "sum": (sums, 8),
        "copy": ([row + row[: 4 + i % 9] for i, row in enumerate(copies)], 48),
    }


def without_last_layer(folder: Path) -> str:
    """The built-in model as its own small relative."""
    with LLM("tiny", **ROOM | {"num_kvcache_blocks": 8, "max_num_seqs": 4}) as llm:
        source = llm.config.folder
    assert source is not None
    shutil.copytree(source, folder)
    cfg = json.loads((folder / "config.json").read_text())
    last = cfg["num_hidden_layers"] - 1
    cfg |= {"num_hidden_layers": last, "layer_types": cfg["layer_types"][:last]}
    (folder / "config.json").write_text(json.dumps(cfg))
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if f"layers.{last}." not in name}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


class Engine:
    """An LLM, and what its decode steps took."""

    def __init__(self, wanted: dict[str, Any] | None) -> None:
        self.llm = LLM("tiny", **ROOM, speculative_config=wanted)
        self.drafting = 0.0
        if wanted:
            drafter = self.llm.engine_core.drafter  # type: ignore[attr-defined]
            drafter.propose, drafter.observe = self._timed(drafter.propose), self._timed(drafter.observe)
        self.clear()

    def _timed(self, call: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self.drafting += time.perf_counter() - start
            return result

        return wrapper

    def clear(self) -> None:
        """Nothing has been measured."""
        self.steps: list[tuple[float, int, int, int, float]] = []  # seconds, tokens, sequences, rows, drafting

    def begin(self, prompts: Prompts, num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        for prompt in prompts:
            self.llm.add_request(prompt, params)

    def go_on(self, seconds: float) -> bool:
        """Run steps for so long; whether there are more."""
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            self.drafting = 0.0
            if (step := self.llm.step()) is None:
                return False
            if step.batch.type.name == "DECODE":
                took, count = time.perf_counter() - start, sum(map(len, step.output.token_ids.values()))
                self.steps.append((took, count, step.batch.total_seqs_num, step.batch.total_tokens_num, self.drafting))
        return True

    def summary(self, seconds: Any) -> dict[str, float]:
        """Its speed, what is counted, and how fast it should be if a step of n rows takes `seconds(n)`."""
        took, tokens, seqs, rows, drafting = np.array(self.steps).T
        return {
            "speed": tokens.sum() / took.sum(), "tokens per step": tokens.sum() / seqs.sum(),
            "rows": rows.mean(), "drafting": drafting.mean(),
            "should be": tokens.sum() / (seconds(rows) + drafting).sum(),
        }  # fmt: skip


class StepClock:
    """How long a decode without drafts takes, by its rows, at a context of so many tokens."""

    def __init__(self, context: int, most: int) -> None:
        self.context, self.runner = context, LLM("tiny", **ROOM).engine_core.runner
        self.found: dict[int, list[float]] = {n: [] for n in ROWS if n < 2 * most}

    def sample(self, sizes: Iterable[int]) -> None:
        """A step of each; of two runs the second counts, since the first finds cold caches."""
        for rows in sizes:
            plain, width = first_decodes(rows), -(-self.context // 16)
            tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width) % ROOM["num_kvcache_blocks"]
            batch = replace(plain, context_lens=np.full(rows, self.context, np.int32), block_tables=tables)
            self.runner.forward(batch)
            start = time.perf_counter()
            self.runner.forward(batch)
            self.found[rows].append(time.perf_counter() - start)

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        return np.interp(rows, [*self.found], [statistics.median(times) for times in self.found.values()])


def bench(engines: dict[str, Engine], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row per task, batch and drafter."""
    found = []
    for task, (prompts, num_tokens) in tasks(max(batches)).items():
        tokenizer: Any = engines["none"].llm.tokenizer
        lens = [len(p if isinstance(p, list) else tokenizer(p)["input_ids"]) for p in prompts]
        context, luck = round(statistics.mean(lens) + num_tokens / 2), random.Random(1)
        for batch in batches:
            clock = StepClock(context, (1 + K) * batch)
            for turn in range(1 + rounds * 48 // num_tokens):
                clock.sample(clock.found)
                for engine in engines.values():
                    engine.begin(prompts[:batch], num_tokens)
                running = [*engines.values()]
                while running:
                    running = [engine for engine in running if engine.go_on(SLICE)]
                    clock.sample(luck.sample([*clock.found], 2))
                if turn == 0:  # the first allocates
                    clock.found = {n: [] for n in clock.found}
                    for engine in engines.values():
                        engine.clear()
            plain = engines["none"].summary(clock.seconds)
            for name, engine in engines.items():
                row = {"task": task, "batch": batch, "drafter": name} | engine.summary(clock.seconds)
                row |= {"ratio": row["speed"] / plain["speed"], "predicted": row["should be"] / plain["should be"]}
                found.append(row)
                engine.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=4, help="of 48 tokens; more of shorter answers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    args, load = parser.parse_args(), OtherLoad()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        small = without_last_layer(Path(folder) / "small")
        wanted: dict[str, Any] = {
            "none": None,
            "lookup": {"method": "ngram"},
            "lookup, in vain": {"method": "ngram", "prompt_lookup_min": 99, "prompt_lookup_max": 99},
            "3 of 4 layers": {"method": "draft_model", "model": small},
            "EAGLE head": {"method": "eagle3"},
        }
        engines = {n: Engine(w and {"num_speculative_tokens": K} | w) for n, w in wanted.items()}
        found = bench(engines, args.batches, args.rounds)
    head = ["task", "batch", "drafter", "tokens/step", "x none", "predicted", "error"]
    rows = [
        [r["task"], r["batch"], r["drafter"], r["tokens per step"], r["ratio"], r["predicted"],
         f"{100 * (r['predicted'] / r['ratio'] - 1):+.0f} %"]
        for r in found if r["drafter"] != "none"
    ]  # fmt: skip
    print_table(head, rows)
    other = load.share()
    print(f"others used {0 if other is None else 100 * other:.0f} % of the processors meanwhile")
    if args.json:
        write_json(args.json, {"machine": machine(), "others": other, "results": found})


if __name__ == "__main__":
    main()
