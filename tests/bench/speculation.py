"""Decodes with drafts against decodes without, on a CPU: tokens per step, speed, and what the formula predicts.

Chapter 54 reads results/speculation.json, which `--json` writes. It holds three things.

`steps`: the time of a decode step without drafts by its rows, compiled and in torch: the best and the median of many runs,
in milliseconds. The best is what the machine can do; the median also holds what else the machine did.

`results` (compiled decode) and `torch` (`packed=True`): the built-in model and four kinds of text: questions answered
from the prompt (recall), stories, sums, and a list that is copied (copy), greedy, in batches. Requests end at different
times, so a row is labelled by the mean rows of a step without drafts, too. The drafters: none, lookup, a lookup whose number
of drafts is chosen in each step (adaptive: `enable_adaptive_verification`), a lookup that never finds anything (the cost of
the machinery alone), the model without its last layer, and its EAGLE head, whose target is never compiled. All run in one
process and take turns of some hundredths of a second, so what else the machine does meets all of them. They use
one thread, and times are its processor time. A speed is decode tokens per second; `ratio` is to no drafts in the same
rounds. Prefix caches are off.

The prediction is E / (V + k c), with E the tokens per step and sequence, V a step's seconds with its rows of drafts
against those without, k c the drafter's seconds per step. E and the rows of each step are counted; the time of a step by
rows, at a context as long as the task's, is measured meanwhile in an engine without drafts; the drafter is timed where it
is called. So it tells whether verifying costs what its rows cost and nothing else.

Run: `python tests/bench/speculation.py --json tests/bench/results/speculation.json [--batches 1 4] [--rounds 4]`.
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
from figures import stamp
from report import OtherLoad, machine, print_table, write_json
from safetensors.torch import load_file, save_file

from atom_mini import LLM, SamplingParams
from atom_mini.gpu.graphs import first_decodes
from atom_mini.speculation.verify import SpecStats

K = 4
SLICE = 0.03  # seconds
SIZES: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320)
WARM = 5  # runs of a step, of which the last is timed
MOST_ROWS = 128  # of the recorded step times
now = time.process_time  # of one thread: what else the machine does costs it nothing but caches
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
    with LLM("tiny", **SIZES | {"num_kvcache_blocks": 8, "max_num_seqs": 4}) as llm:
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

    def __init__(self, drafts: dict[str, Any] | None, options: dict[str, Any]) -> None:
        self.llm = LLM("tiny", **SIZES | options, speculative_config=drafts)
        self.drafting, self.has_drafts = 0.0, drafts is not None
        if drafts:
            drafter = self.llm.engine_core.drafter  # type: ignore[attr-defined]
            drafter.propose, drafter.observe = self._timed(drafter.propose), self._timed(drafter.observe)
        self.clear()

    def _timed(self, call: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            start = now()
            result = call(*args)
            self.drafting += now() - start
            return result

        return wrapper

    def clear(self) -> None:
        """Nothing has been measured."""
        self.steps: list[tuple[float, int, int, int, float]] = []  # seconds, tokens, sequences, rows, drafting
        if self.has_drafts:
            self.llm.engine_core.scheduler.spec_stats = SpecStats()  # type: ignore[attr-defined]

    def accepted(self) -> float | None:
        """The share of its drafts that were accepted; None without drafts."""
        stats: Any = getattr(self.llm.engine_core.scheduler, "spec_stats", None)
        if stats is None or not stats.proposed.total():
            return None
        return stats.accepted.total() / stats.proposed.total()

    def begin(self, prompts: Prompts, num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        for prompt in prompts:
            self.llm.add_request(prompt, params)

    def go_on(self, seconds: float) -> bool:
        """Run steps for so long; whether there are more."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.drafting, start = 0.0, now()
            if (step := self.llm.step()) is None:
                return False
            if step.batch.type.name == "DECODE":
                took, count = now() - start, sum(map(len, step.output.token_ids.values()))
                self.steps.append((took, count, step.batch.total_seqs_num, step.batch.total_tokens_num, self.drafting))
        return True

    def summary(self, seconds: Any) -> dict[str, float]:
        """Its speed, what is counted, and how fast it should be if a step of n rows takes `seconds(n)`."""
        took, tokens, seqs, rows, drafting = np.array(self.steps).T
        return {
            "speed": tokens.sum() / took.sum(), "tokens per step": tokens.sum() / seqs.sum(),
            "rows": rows.mean(), "step": took.mean(), "drafting": drafting.mean(),
            "should be": tokens.sum() / (seconds(rows) + drafting).sum(),
        }  # fmt: skip


class StepClock:
    """How long a decode without drafts takes, by its rows, at a context of so many tokens."""

    def __init__(self, context: int, most: int, options: dict[str, Any]) -> None:
        self.context, self.runner = context, LLM("tiny", **SIZES | options).engine_core.runner
        self.found: dict[int, list[float]] = {n: [] for n in ROWS if n < 2 * most}

    def sample(self, sizes: Iterable[int]) -> None:
        """A step of each; of WARM runs the last counts, since those before it find the caches of another size."""
        for rows in sizes:
            plain, width = first_decodes(rows), -(-self.context // 16)
            tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width) % SIZES["num_kvcache_blocks"]
            batch = replace(plain, context_lens=np.full(rows, self.context, np.int32), block_tables=tables)
            for _ in range(WARM - 1):
                self.runner.forward(batch)
            start = now()
            self.runner.forward(batch)
            self.found[rows].append(now() - start)

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        return np.interp(rows, [*self.found], [statistics.median(times) for times in self.found.values()])


def step_times(options: dict[str, Any], rounds: int, context: int = 64) -> dict[str, dict[str, float]]:
    """Rows -> the best and the median milliseconds of a decode step without drafts; all sizes in turns."""
    clock = StepClock(context, MOST_ROWS // 2 + 1, options)
    for _ in range(rounds):
        clock.sample(clock.found)
    return {str(n): {"best": 1e3 * min(t), "median": 1e3 * statistics.median(t)} for n, t in clock.found.items()}


def not_compiled(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "compiled"}


def bench(
    engines: dict[str, Engine], batches: list[int], rounds: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row per task, batch and drafter."""
    found = []
    in_torch = not_compiled(options)
    for task, (prompts, num_tokens) in tasks(SIZES["max_num_seqs"]).items():
        tokenizer: Any = engines["none"].llm.tokenizer
        lens = [len(p if isinstance(p, list) else tokenizer(p)["input_ids"]) for p in prompts]
        context, luck = round(statistics.mean(lens) + num_tokens / 2), random.Random(1)
        for batch in batches:
            # a head needs inner states, so its target is never compiled
            kinds = {name: bool(engine.llm.config.compiled) for name, engine in engines.items()}
            clocks = {
                kind: StepClock(context, (1 + K) * batch, options if kind else in_torch)
                for kind in {*kinds.values()}
            }
            for turn in range(1 + rounds * 48 // num_tokens):
                for clock in clocks.values():
                    clock.sample(clock.found)
                for engine in engines.values():
                    engine.begin(prompts[:batch], num_tokens)
                running = [*engines.values()]
                while running:
                    running = [engine for engine in running if engine.go_on(SLICE)]
                    for clock in clocks.values():
                        clock.sample(luck.sample([*clock.found], 2))
                if turn == 0:  # the first allocates
                    for clock in clocks.values():
                        clock.found = {n: [] for n in clock.found}
                    for engine in engines.values():
                        engine.clear()
            plain = engines["none"].summary(clocks[kinds["none"]].seconds)
            for name, engine in engines.items():
                row: dict[str, Any] = {"task": task, "batch": batch, "drafter": name}
                row |= engine.summary(clocks[kinds[name]].seconds)
                row |= {"ratio": row["speed"] / plain["speed"], "predicted": row["should be"] / plain["should be"]}
                row["accepted"] = engine.accepted()
                found.append(row)
                engine.clear()
    return found


def compare(small: str, batches: list[int], rounds: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all drafters with these options of the engine; print a table."""
    drafts: dict[str, Any] = {
        "none": None,
        "lookup": {"method": "ngram"},
        "adaptive": {"method": "ngram", "enable_adaptive_verification": True},
        "lookup, in vain": {"method": "ngram", "prompt_lookup_min": 99, "prompt_lookup_max": 99},
        "3 of 4 layers": {"method": "draft_model", "model": small},
        "EAGLE head": {"method": "eagle3"},
    }
    in_torch = not_compiled(options)  # a head reads inner states
    engines = {
        n: Engine(d and {"num_speculative_tokens": K} | d, in_torch if n == "EAGLE head" else options)
        for n, d in drafts.items()
    }
    found = bench(engines, batches, rounds, options)
    alone = {(r["task"], r["batch"]): r["rows"] for r in found if r["drafter"] == "none"}
    head = ["task", "requests", "rows alone", "drafter", "tokens/step", "x none", "predicted", "error"]
    rows = [
        [r["task"], r["batch"], alone[r["task"], r["batch"]], r["drafter"], r["tokens per step"], r["ratio"], r["predicted"],
         f"{100 * (r['predicted'] / r['ratio'] - 1):+.0f} %"]
        for r in found if r["drafter"] != "none"
    ]  # fmt: skip
    print_table(head, rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--torch-batches", type=int, nargs="*", default=[1, 4, 16], help="none: leave out torch")
    parser.add_argument("--rounds", type=int, default=4, help="of 48 tokens; more of shorter answers")
    parser.add_argument("--step-rounds", type=int, default=100, help="runs of a step of each number of rows")
    parser.add_argument("--json", type=Path)
    args, load = parser.parse_args(), OtherLoad()
    torch.set_num_threads(1)
    kinds: dict[str, dict[str, Any]] = {"compiled": {"compiled": True}, "torch": {"packed": True}}
    steps = {name: step_times(options, args.step_rounds) for name, options in kinds.items()}
    for name, times in steps.items():
        print(f"ms of a step by rows, {name}:", {rows: round(found["best"], 2) for rows, found in times.items()})
    with tempfile.TemporaryDirectory() as folder:
        small = without_last_layer(Path(folder) / "small")
        compiled = compare(small, args.batches, args.rounds, kinds["compiled"])
        with_torch = compare(small, args.torch_batches, args.rounds, kinds["torch"]) if args.torch_batches else []
    other = load.share()
    print(f"others used {0 if other is None else 100 * other:.0f} % of the processors meanwhile")
    recorded = {"drafts": K, "steps": steps, "results": compiled, "torch": with_torch, "others": other}
    where = machine()
    write_json(args.json, stamp(where) | recorded | {"machine": where})


if __name__ == "__main__":
    main()
