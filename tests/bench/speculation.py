"""Decodes with drafts against decodes without, on a CPU: tokens per step, speed, and what the formula says of it.

The built-in model and four kinds of text of its own: questions answered from what was told (recall), stories, sums, and
a list that is copied (copy). Batches of 1, 4, 16 and 64, greedy. All drafters run in turns in one process (none, lookup,
the model without its last layer, its EAGLE head, adaptive lookup); speeds are ratios of decode tokens per second to no
drafter's of the same round, medians of the rounds. Prefix caches are off.

The prediction is E * T(B) / (T(rows) + drafting): E, the tokens per step and sequence, and rows, those of a mean step,
are counted; T, the seconds of a step by its rows, is measured before each round on steps without drafts; drafting, the
seconds per step that the drafter takes, is timed where it is called. It says whether verification costs what its rows
cost and nothing else.

Run: `python tests/bench/speculation.py [--batches 1 4] [--json results.json]`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import OtherLoad, machine, print_table, write_json
from safetensors.torch import load_file, save_file

from atom_mini import LLM, SamplingParams
from atom_mini.appendix.tiny_model import prompt_and_answer, recall_test, sum_doc
from atom_mini.graphs import first_decodes
from atom_mini.speculation.verify import METHODS

K = 4
ROOM = {"device": "cpu", "num_kvcache_blocks": 2048, "max_num_seqs": 64, "enable_prefix_caching": False}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320)
Prompts = list[Any]


def tasks(count: int) -> dict[str, tuple[Prompts, int]]:
    """Name -> (prompts, tokens wanted at most)."""
    rng = random.Random(0)
    facts = [prompt_and_answer(doc)[0] for doc in recall_test(60, count)]
    sums = [prompt_and_answer(sum_doc(rng, chat=False, test=True))[0] for _ in range(count)]
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
    """An LLM and the time that its drafter takes."""

    def __init__(self, wanted: dict[str, Any] | None) -> None:
        self.llm = LLM("tiny", **ROOM, speculative_config=wanted)
        self.scheduler: Any = self.llm.engine_core.scheduler
        self.drafting = 0.0
        if wanted:
            self._time_the_drafter()

    def _time_the_drafter(self) -> None:
        drafter = self.scheduler.drafter

        def timed(call: Any) -> Any:
            def wrapper(*args: Any) -> Any:
                start = time.perf_counter()
                result = call(*args)
                self.drafting += time.perf_counter() - start
                return result

            return wrapper

        drafter.propose, drafter.observe = timed(drafter.propose), timed(drafter.observe)

    def run(self, prompts: Prompts, num_tokens: int) -> dict[str, float]:
        """Decode tokens per second, and what the prediction needs."""
        m, before = self.llm.metrics, vars(self.llm.metrics).copy()
        stats = self.scheduler.__dict__.get("spec_stats")
        if stats is not None:
            stats = self.scheduler.spec_stats = type(stats)()
        steps = []
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        for prompt in prompts:
            self.llm.add_request(prompt, params)
        while step := self.llm.step():
            if step.batch.type.name == "DECODE":
                steps.append((step.batch.total_seqs_num, step.batch.total_tokens_num))
            else:
                self.drafting = 0.0  # of decodes alone
        tokens = m.num_decode_tokens - before["num_decode_tokens"]
        seqs, rows = np.array(steps).T if steps else np.ones((2, 1))
        return {
            "speed": tokens / (m.decode_seconds - before["decode_seconds"]),
            "tokens per step": tokens / seqs.sum(),
            "sequences": seqs.mean(),
            "rows": rows.mean(),
            "drafting": self.drafting / len(seqs),
        }


def step_seconds(llm: LLM) -> list[float]:
    """Of a step of `ROWS` rows without drafts: the median of five."""
    runner, found = llm.engine_core.runner, []
    for rows in ROWS:
        batch, times = first_decodes(rows), []
        for _ in range(6):
            start = time.perf_counter()
            runner.forward(batch)
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times[1:]))
    return found


def bench(engines: dict[str, Engine], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row per task, batch and drafter."""
    found = []
    for task, (prompts, num_tokens) in tasks(max(batches)).items():
        for batch in batches:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for turn in range(rounds + 1):
                T = step_seconds(engines["none"].llm)
                for name, engine in engines.items():
                    run = engine.run(prompts[:batch], num_tokens)
                    plain, now = np.interp([run["sequences"], run["rows"]], ROWS, T)
                    run["predicted"] = run["tokens per step"] * plain / (now + run["drafting"])
                    if turn:  # the first allocates
                        runs[name].append(run)
            for name, mine in runs.items():
                ratios = [a["speed"] / b["speed"] for a, b in zip(mine, runs["none"], strict=True)]
                row: dict[str, Any] = {"task": task, "batch": batch, "drafter": name}
                row |= {key: statistics.median(r[key] for r in mine) for key in mine[0]}
                found.append(row | {"ratio": statistics.median(ratios)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args, load = parser.parse_args(), OtherLoad()
    with tempfile.TemporaryDirectory() as folder:
        small = without_last_layer(Path(folder) / "small")
        wanted: dict[str, Any] = {
            "none": None,
            "lookup": {"method": "ngram"},
            "adaptive lookup": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": True},
            "3 of 4 layers": {"method": "draft_model", "model": small},
        }
        if "eagle3" in METHODS:
            wanted["EAGLE head"] = {"method": "eagle3"}
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
