"""Three ways to schedule prompts beside decodes, on the scorecard's load: prefill first, turns, mixed steps.

The load and the models are those of score.py, and so are the options but for the policy: blocks of 16 tokens, a prefix
cache, 128 tokens to a step, the compiled decode (`--rung chunked`: in torch, as mixed steps always are). All three engines
are made first and serve the load in turns, round by round, so that what else the machine does meets all of them. A figure
is the median over the rounds; a ratio is to prefill first in the same round, and again the median.

Run on a quiet machine: `python tests/bench/policies.py --rounds 15 --json tests/bench/results/policies.json`. It prints a
table for each model and writes the figures with the machine's facts. `--requests 16`: the first of the load only.
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
from atom_mini.config import Config  # noqa: E402

POLICIES: dict[str, dict[str, Any]] = {
    "prefill first": {},
    "turns": {"interleave_decode": True},
    "mixed": {"enable_mixed_steps": True},
}
FIGURES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tokens per second")
Run = dict[str, dict[str, float]]  # policy -> figure -> value


def engine(folder: str, rung: str, policy: str) -> LLM:
    """The engine of a rung of the scorecard, with this policy."""
    return LLM(folder, **options_of(rung) | {"interleave_decode": False} | POLICIES[policy])


def measure(about: Model, rung: str, rounds: int, count: int) -> list[Run]:
    """The figures of each round, by policy; the policies run in turns, each round beginning with another one."""
    load, names, found = make_load(about, count), [*POLICIES], list[Run]()
    with ExitStack() as stack:
        engines = {name: stack.enter_context(engine(about.folder, rung, name)) for name in names}
        for llm in engines.values():
            serve(llm, warm(load))
        for n in range(rounds):
            order = names[n % 3 :] + names[: n % 3]
            run = {name: figures(about, load, serve(engines[name], load), 0.0) for name in order}
            found.append({name: {figure: run[name][figure] for figure in FIGURES} for name in names})
    return found


def median(runs: list[Run]) -> Run:
    """Of each figure, over the rounds."""
    return {name: {f: statistics.median(run[name][f] for run in runs) for f in FIGURES} for name in POLICIES}


def ratios(runs: list[Run]) -> list[Run]:
    """Each figure over that of prefill first in the same round."""
    base = "prefill first"
    return [{name: {f: run[name][f] / run[base][f] for f in FIGURES} for name in POLICIES} for run in runs]


def show(title: str, middle: Run, relative: Run) -> None:
    """A row for each policy: milliseconds, tokens per second, and the ratios."""
    print(f"\n{title}")
    head = ["policy", *(f"{f}, ms" if "p" in f.split()[-1] else f for f in FIGURES), *(f"x {f}" for f in FIGURES[:4])]
    rows = []
    for name, found in middle.items():
        values = [found[f] * (1000 if f[:4] in ("TTFT", "ITL ") else 1) for f in FIGURES]
        rows.append([name, *(f"{v:.0f}" for v in values), *(f"{relative[name][f]:.2f}" for f in FIGURES[:4])])
    print_table(head, rows)


def report(title: str, runs: list[Run]) -> dict[str, Any]:
    """Print the table of some rounds; what the file says of them."""
    middle, relative = median(runs), median(ratios(runs))
    show(title, middle, relative)
    return {"rounds": len(runs), "policies": middle, "ratio to prefill first": relative}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rung", choices=("chunked", "compiled"), default="compiled")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked, others = (args.rung, args.rounds, args.requests), OtherLoad()
    result: dict[str, Any] = stamp(machine()) | {"rung": args.rung, "requests": args.requests}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        about = Model.read(folder, RATES[0], 1.0, 0.1)
        result["29 M parameters"] = report(f"29 M parameters, {about.rate:g} requests a second", measure(about, *asked))
    tiny = Model.read(str(Config("tiny").folder), RATES[1], 0.2, 0.02)
    result["built-in"] = report(f"built-in, {tiny.rate:g} requests a second", measure(tiny, *asked))
    result["other_load"] = others.share()
    print(f"\nothers used {100 * (result['other_load'] or 0):.0f} % of the processors")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
