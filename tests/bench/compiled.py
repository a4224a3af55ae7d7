"""The compiled decode of a CPU (chapter 92): fewer bits beside float32, and what it costs at the start.

Decodes of one, eight and 32 sequences of 64 tokens, of two shapes with random weights: the 29 M of `cpu.py`, and
Qwen3-0.6B's. Steps in float32, in bfloat16 and in int8 (embedding, head and cache in bfloat16) take turns in one
process; figures are medians, tokens per second of `ModelRunner.forward`. Beside them the share of what memory allows: the
bytes of weights, keys and values that a step reads, per second, of those of a sum over 1 GiB.

The start: seconds of a process that completes a prompt with the built-in model: with nothing in the cache of compiled
code, with all of it, without `compiled=True`; in turns, medians.

Run: `python tests/bench/compiled.py [--rounds 15] [--only steps|start] [--json results.json]`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from cpu import make_checkpoint, memory_bandwidth
from report import OtherLoad, machine, print_table, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import QWEN3_06B, random_model

from atom_mini import EngineArgs
from atom_mini.model_runner import made_up_batch
from atom_mini.options.build import make_runner
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType

CONTEXT, SIZE = 64, 16
WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
COUNTS = 1, 8, 32


def decode_of(count: int) -> ScheduledBatch:
    """A decode of so many sequences of `CONTEXT` tokens."""
    tables = np.arange(count * CONTEXT // SIZE, dtype=np.int32).reshape(count, -1)
    return replace(made_up_batch(SequenceType.DECODE, 1, tables), context_lens=np.full(count, CONTEXT, np.int32))


def save_qwen3(folder: Path) -> None:
    """Qwen3-0.6B's shape, random, in bfloat16."""
    random_model("qwen3", torch.bfloat16, **QWEN3_06B).save_pretrained(folder)


def bytes_read(runner: Any, count: int) -> int:
    """Of a step: matrices, and the keys and values of `count` sequences."""
    model = runner.model
    matrices = {w.data_ptr(): w.nbytes for w in model.parameters() if w.ndim > 1}  # tied ones once
    return sum(matrices.values()) + count * CONTEXT // SIZE * runner.block_bytes


def measure_steps(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """count -> way -> tokens per second, with each way's share of the bandwidth."""
    options = {"device": "cpu", "num_kvcache_blocks": max(COUNTS) * CONTEXT // SIZE, "max_model_len": 128}
    runners = {way: make_runner(EngineArgs(str(folder), compiled=True, **each, **options)) for way, each in WAYS.items()}
    found: dict[str, dict[str, float]] = {}
    for count in COUNTS:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        bandwidth = memory_bandwidth()
        for i in range(rounds + 1):
            for way, runner in runners.items():
                start = time.perf_counter()
                runner.forward(decode_of(count))
                if i > 0:
                    times[way].append(time.perf_counter() - start)
        step = {way: statistics.median(samples) for way, samples in times.items()}
        rates = {way: count / seconds for way, seconds in step.items()}
        shares = {f"{way}_share": bytes_read(runners[way], count) / step[way] / bandwidth for way in WAYS}
        found[str(count)] = rates | shares | {"bandwidth": bandwidth}
    for runner in runners.values():
        runner.close()
    return found


def print_steps(name: str, found: dict[str, dict[str, float]]) -> None:
    print(f"\n{name}, decode tokens/s at a context of {CONTEXT}; memory {found['1']['bandwidth'] / 1e9:.0f} GB/s")
    head = ["rows", *WAYS, *(f"{way}: of the memory's rate" for way in WAYS)]
    print_table(head, [[count, *list(row.values())[:-1]] for count, row in found.items()])


def start_seconds(cache: str, *options: str) -> float:
    """A process that completes a prompt."""
    command = [sys.executable, "-m", "atom_mini", "12 + 7 =", "--max-tokens", "8", "--device", "cpu", *options]
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | {"NUMBA_CACHE_DIR": cache}, capture_output=True, check=True)
    return time.perf_counter() - start


def measure_starts(rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"nothing compiled yet": [], "compiled before": [], "not asked for": []}
    for i in range(rounds + 1):
        with tempfile.TemporaryDirectory() as cache:
            row = [start_seconds(cache, "--compiled"), start_seconds(cache, "--compiled"), start_seconds(cache)]
        if i > 0:
            for samples, value in zip(times.values(), row, strict=True):
                samples.append(value)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each; a third as many starts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["steps", "start"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    others, results = OtherLoad(), dict[str, Any]()
    if args.only != "start":
        for name, save in {"29 M": make_checkpoint, "Qwen3-0.6B": save_qwen3}.items():
            with tempfile.TemporaryDirectory() as folder:
                save(Path(folder))
                results[name] = measure_steps(Path(folder), args.rounds)
            print_steps(name, results[name])
    if args.only != "steps":
        results["start"] = measure_starts(max(1, args.rounds // 3))
        print("\nseconds until a prompt is completed, the built-in model")
        print_table(["", "seconds"], [[*row] for row in results["start"].items()])
    if (share := others.share()) is not None:
        print(f"\nother processes used {share:.0%} of the processors meanwhile" + " (too much)" * (share > 0.05))
    write_json(args.json, results)


if __name__ == "__main__":
    main()
