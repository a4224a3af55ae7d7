"""How true the capacity simulator is: recorded runs beside what it says of them.

Two models, the built-in one and a random Qwen3 of 29 M parameters in float32; COUNT requests each at three rates (Poisson;
prompts of 16 to 128 random tokens, outputs of 16 to 64, greedy, without an end token). All runs are traced. The costs are
fitted on the run at the middle rate; the other two are held out. Per rate and percentile:
the time to the first token, between two tokens (all of them), and to the last, as it was and as it is predicted.

Run: `python tests/bench/capacity.py [--count 300]`. It writes results/capacity.json, which chapter 83 shows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from cpu import SHAPE, make_checkpoint
from figures import stamp
from report import OtherLoad, machine, print_table
from score import Request, serve

from atom_mini import LLM, Config, SamplingParams
from atom_mini.instruments.trace import StepRecord
from atom_mini.serving.capacity import Arrival, Engine, fit
from atom_mini.serving.capacity import serve as simulate

RATES = {"built-in": (20.0, 40.0, 70.0), "29 M": (4.0, 8.0, 12.0)}  # requests a second; the middle one is fitted
POOL: dict[str, Any] = {"num_kvcache_blocks": 400, "max_num_seqs": 64, "device": "cpu", "max_model_len": 512}
SHARES = (50, 95, 99)
QUIET, TRIES = 0.03, 3  # a run beside which others used more is made again
Figures = dict[str, list[float]]  # ttft, itl, latency -> seconds at SHARES


def make_load(rate: float, count: int, seed: int, vocabulary: int) -> list[Request]:
    """Who comes when, and wants how much."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(9, vocabulary) for _ in range(rng.randint(16, 128))]
        found.append(Request(now, prompt, rng.randint(16, 64)))
    return found


def as_it_was(load: list[Request], times: list[list[float]]) -> Figures:
    gaps = [b - a for came in times for a, b in pairwise(came)]
    first = [came[0] - r.arrival for r, came in zip(load, times, strict=True)]
    last = [came[-1] - r.arrival for r, came in zip(load, times, strict=True)]
    return {name: np.percentile(of, SHARES).tolist() for name, of in (("ttft", first), ("itl", gaps), ("latency", last))}


def as_predicted(engine: Engine, load: list[Request]) -> Figures:
    served = simulate(engine, [Arrival(r.arrival, len(r.prompt), r.output, i) for i, r in enumerate(load)])
    gaps = np.repeat([*engine.gaps], [*engine.gaps.values()])
    columns = {"ttft": [s.ttft for s in served], "itl": gaps, "latency": [s.latency for s in served]}
    return {name: np.percentile(of, SHARES).tolist() for name, of in columns.items()}


def record(folder: str, load: list[Request]) -> tuple[list[list[float]], list[StepRecord], float]:
    """Times and steps of a run, in a new engine; how much others used of the processor. Of the quietest of up to TRIES."""
    best: tuple[list[list[float]], list[StepRecord], float] | None = None
    for _ in range(TRIES):
        with LLM(folder, trace=True, **POOL) as llm:
            wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in range(1, 65)]  # batches of all sizes
            llm.generate([[7] * 2 * n for n in range(1, 65)], wishes, use_tqdm=False)
            warm, other = len(llm.trace.steps), OtherLoad()
            times = serve(llm, load)
            share = other.share() or 0.0
            if best is None or share < best[2]:
                best = times, llm.trace.steps[warm:], share
        if share < QUIET:
            break
    assert best is not None
    return best


def prefill_ms(steps: list[StepRecord]) -> float:
    """Milliseconds of a prefill of 81 to 128 tokens, on average: the same work at each rate."""
    return fmean(s.device + s.host for s in steps if s.kind == "prefill" and 81 <= sum(s.tokens.values()) <= 128)


def run(name: str, folder: str, count: int) -> dict[str, Any]:
    """Three recorded runs of a model, each in a new engine; the prediction of each."""
    vocabulary = 500 if folder == "tiny" else SHAPE["vocab_size"]
    loads = [make_load(rate, count, i, vocabulary) for i, rate in enumerate(RATES[name])]
    runs = [record(folder, load) for load in loads]
    real = [as_it_was(load, times) for load, (times, _, _) in zip(loads, runs, strict=True)]
    others = [other for _, _, other in runs]
    costs = fit(runs[1][1])
    config = Config(folder, **POOL)
    told = [as_predicted(Engine(config, costs), load) for load in loads]
    alike = [prefill_ms(steps) for _, steps, _ in runs]
    about = {"prefill_ms": alike, "count": count}
    return about | {"rates": RATES[name], "costs": costs, "real": real, "predicted": told, "other load": others}


def rows(results: dict[str, Any]) -> list[list[Any]]:
    """Model, rate, and per percentile what was, and by how much the prediction is off."""
    found = []
    for name, result in results.items():
        for i, (rate, real, told) in enumerate(zip(result["rates"], result["real"], result["predicted"], strict=True)):
            for what in real:
                cells = [f"{1e3 * a:.1f} ({b / a - 1:+.0%})" for a, b in zip(real[what], told[what], strict=True)]
                found.append([f"{name}, {rate:g}/s{' (fitted)' * (i == 1)}", what, *cells])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", choices=[*RATES])
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        for name, place in (("built-in", "tiny"), ("29 M", folder)):
            if args.only in (None, name):
                results[name] = run(name, place, args.count)
    print_table(["model and load", "", *(f"p{share}, ms" for share in SHARES)], rows(results))
    print("costs:", {name: result["costs"] for name, result in results.items()})
    if args.only is None:
        path = Path(__file__).with_name("results") / "capacity.json"
        path.write_text(json.dumps(stamp(machine()) | {"models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
