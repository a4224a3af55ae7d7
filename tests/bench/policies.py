"""Three ways to schedule prompts beside decodes, on the scorecard's load: prefill first, turns, mixed steps.

The load, the model of 29 M parameters and the options are those of score.py's rung *chunked*: blocks of 16 tokens, a prefix
cache, 128 tokens to a step. Every step runs in torch, because a mixed step always does. Requests come slower than the engine can
serve them, and then, as in the scorecard, faster; the engine has 32 seats (`max_num_seqs`), and then one for each of the 64
requests. With 32 seats, faster, *turns* is the scorecard's rung.

Of each of the four settings all three engines are made first and serve the load in turns, round by round, each round beginning with
another one, so that what else the machine does meets all of them. A figure is the median over the rounds, with the least and
the most; a ratio is to prefill first in the same round.

Run on a quiet machine: `python tests/bench/policies.py --rounds 7 --json tests/bench/results/policies.json`. It prints a
table for each setting and writes the figures with the machine's facts. `--requests 16`: the first of the load only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # as the command does, before torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from cpu import make_checkpoint  # noqa: E402
from figures import stamp  # noqa: E402
from report import OtherLoad, machine, print_table, write_json  # noqa: E402
from score import RATES, Model, figures, make_load, options_of, serve, warm  # noqa: E402

from atom_mini import LLM  # noqa: E402

POLICIES: dict[str, dict[str, Any]] = {
    "prefill first": {},
    "turns": {"interleave_decode": True},
    "mixed": {"enable_mixed_steps": True},
}
LOADS = {"below": 8.0, "above": RATES[0]}  # requests a second, below and above what the engine can serve
SEATS = 32, 64
FIGURES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tokens per second")
Run = dict[str, dict[str, float]]  # policy -> figure -> value


def engine(folder: str, seats: int, policy: str) -> LLM:
    """The engine of the scorecard's rung *chunked*, with so many seats and this policy."""
    return LLM(folder, **options_of("chunked") | {"interleave_decode": False, "max_num_seqs": seats} | POLICIES[policy])


def measure(about: Model, seats: int, rounds: int, count: int) -> list[Run]:
    """The figures of each round, by policy."""
    load, names, found = make_load(about, count), [*POLICIES], list[Run]()
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(about.folder, seats, name)) for name in names}
        for llm in engines.values():
            serve(llm, warm(load))
        for n in range(rounds):
            order = names[n % 3 :] + names[: n % 3]
            run = {name: figures(about, load, serve(engines[name], load), 0.0) for name in order}
            found.append({name: {figure: run[name][figure] for figure in FIGURES} for name in names})
    return found


def spread(runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """policy -> figure -> the least, the median, and the most over the rounds."""
    every = {name: {f: [run[name][f] for run in runs] for f in FIGURES} for name in POLICIES}
    return {
        name: {f: [min(v), statistics.median(v), max(v)] for f, v in row.items()} for name, row in every.items()
    }  # fmt: skip


def ratios(runs: list[Run]) -> list[Run]:
    """Each figure over that of prefill first in the same round."""
    base = "prefill first"
    return [{name: {f: run[name][f] / run[base][f] for f in FIGURES} for name in POLICIES} for run in runs]


def report(title: str, runs: list[Run]) -> dict[str, Any]:
    """Print a row for each policy, milliseconds and tokens per second; what the file says of a setting."""
    found, rows = spread(runs), []
    for name, row in found.items():
        scaled = {f: [(1 if f == FIGURES[-1] else 1000) * v for v in values] for f, values in row.items()}
        rows.append([name, *(f"{middle:.0f} ({low:.0f} to {high:.0f})" for low, middle, high in scaled.values())])
    print(f"\n{title}")
    print_table(["policy", *(f if f == FIGURES[-1] else f"{f}, ms" for f in FIGURES)], rows)
    return {"rounds": len(runs), "policies": found, "ratio to prefill first": spread(ratios(runs))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    others, settings = OtherLoad(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        for load, rate in LOADS.items():
            about = Model.read(folder, rate, 1.0, 0.1)
            for seats in SEATS:
                title = f"{rate:g} requests a second, {seats} seats"
                found = report(title, measure(about, seats, args.rounds, args.requests))
                settings.append({"load": load, "rate": rate, "seats": seats} | found)
    share = others.share()
    print(f"\nothers used {100 * (share or 0):.0f} % of the processors")
    write_json(args.json, stamp(machine()) | {"requests": args.requests, "settings": settings, "other_load": share})


if __name__ == "__main__":
    main()
