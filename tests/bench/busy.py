"""The same run alone and beside busy loops, with OpenMP's threads as GNU's OpenMP has them wait and as `atom-mini` does.

Each figure is decode tokens per second of `atom-mini bench` in a process of its own, the median of the rounds; all cases
are run in turns; a run that is not done after two minutes counts as 0. The settings are values of GOMP_SPINCOUNT: how
often a thread looks for work before it sleeps. 300000 (3 ms) is GNU's own choice where nobody says anything. Ratios are
to the first setting. Other runtimes, such as LLVM's or Intel's, do not read this variable: their ratios are 1. The
models: the built-in one, where torch decodes too (the default), and the 29 M of `cpu.py`.

Run: `python tests/bench/busy.py [--loops 0 2] [--spins 300000 1000] [--json results.json]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu import make_checkpoint
from report import OtherLoad, busy_loops, machine, print_table, write_json

from atom_mini.options.command_line import SPINS

HOW_TO_WAIT = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
LIMIT = 120


def tokens_per_second(case: tuple[str, int, bool], tokens: int, spins: str, threads: int) -> float:
    """Decode tokens per second of a fresh `atom-mini bench`; 0 if it is not done after `LIMIT` seconds."""
    model, requests, is_compiled = case
    mine = {k: v for k, v in os.environ.items() if k not in HOW_TO_WAIT}
    env = mine | {"GOMP_SPINCOUNT": spins, "OMP_NUM_THREADS": str(threads)}
    size = ["--num-requests", str(requests), "--input-len", "32", "--max-tokens", str(tokens)]
    options = ["--model", model, "--device", "cpu", "--num-kvcache-blocks", "512", "--json"]
    options += ["--compiled" if is_compiled else "--packed"]
    command = [sys.executable, "-m", "atom_mini", "bench", *size, *options]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(json.loads(done.stdout)["decode_tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cores = os.cpu_count() or 2
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores, help="of the engine; default: one per core")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, cores], help="default: 0, one per core")
    parser.add_argument("--spins", nargs="+", default=["300000", SPINS], help="values of GOMP_SPINCOUNT")
    parser.add_argument("--tokens", type=int, default=32, help="per request")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items() if name != "threads"))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        for loops in args.loops:
            others = OtherLoad()
            cases = {"tiny, 1 request, torch": ("tiny", 1, False)}
            for name, model in (("tiny", "tiny"), ("29 M", folder)):
                cases |= {f"{name}, 1 request": (model, 1, True), f"{name}, 32 requests": (model, 32, True)}
            rates: dict[tuple[str, str], list[float]] = {(label, s): [] for label in cases for s in args.spins}
            with busy_loops(loops):
                for _ in range(args.rounds):
                    for (label, spins), samples in rates.items():
                        samples.append(tokens_per_second(cases[label], args.tokens, spins, args.threads))
            share = others.share()
            used = "" if share is None else f"; all others used {share:.0%} of the processors"
            print(f"\n{args.threads} threads beside {loops} busy loops{used}")
            rows = []
            for label in cases:
                medians = [statistics.median(rates[label, spins]) for spins in args.spins]
                rows.append([label, *medians, *(m / medians[0] if medians[0] else "-" for m in medians[1:])])
                results[f"{label}, {loops} loops"] = {s: rates[label, s] for s in args.spins}
            print_table(["decode tokens/s", *args.spins, *(f"{s} / {args.spins[0]}" for s in args.spins[1:])], rows)
    write_json(args.json, {"threads": args.threads} | results)


if __name__ == "__main__":
    main()
