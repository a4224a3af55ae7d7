"""How true the capacity simulator is: recorded runs beside what it says of them.

Two models, the built-in one and a random Qwen3 of 29 M parameters in float32; COUNT requests each at four rates (Poisson;
prompts of 16 to 128 random tokens, outputs of 16 to 64, greedy, without an end token), of which the last is above the
knee. A rate has ROUNDS runs of equally many requests, and all rates take turns, since a machine is not equally
fast at all times. All runs are traced. The costs are fitted on those at the second rate; the others are held out. Per rate
and percentile: the time to the first token, between two tokens (all of them), and to the last, as it was and as predicted.

Run: `python tests/bench/capacity.py [--count 300]`. It writes results/capacity.json, which chapter 83 shows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from cpu import SHAPE, make_checkpoint
from figures import stamp
from report import OtherLoad, machine, print_table
from score import Request, serve

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.instruments.trace import StepRecord
from atom_mini.serving.capacity import Arrival, Engine, fit
from atom_mini.serving.capacity import serve as simulate

RATES = {"built-in": (20.0, 35.0, 50.0, 80.0), "29 M": (4.0, 6.0, 8.0, 14.0)}  # requests a second; the second is fitted
FITTED = 1
ROUNDS = 5
POOL: dict[str, Any] = {"num_kvcache_blocks": 400, "max_num_seqs": 64, "device": "cpu", "max_model_len": 512}
SHARES = (50, 95, 99)
QUIET, TRIES = 0.03, 3  # a run beside which others used more is made again
Seconds = dict[str, list[float]]  # ttft, itl, latency -> of each request, or gap
Run = tuple[list[Request], list[list[float]], list[StepRecord], float]  # its load, its times, its steps, what others used


def make_load(rate: float, count: int, seed: int, vocabulary: int) -> list[Request]:
    """Who comes when, and wants how much."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(9, vocabulary) for _ in range(rng.randint(16, 128))]
        found.append(Request(now, prompt, rng.randint(16, 64)))
    return found


def as_it_was(load: list[Request], times: list[list[float]]) -> Seconds:
    return {
        "ttft": [came[0] - r.arrival for r, came in zip(load, times, strict=True)],
        "itl": [b - a for came in times for a, b in pairwise(came)],
        "latency": [came[-1] - r.arrival for r, came in zip(load, times, strict=True)],
    }


def as_predicted(engine: Engine, load: list[Request]) -> Seconds:
    served = simulate(engine, [Arrival(r.arrival, len(r.prompt), r.output, i) for i, r in enumerate(load)])
    gaps = np.repeat([*engine.gaps], [*engine.gaps.values()]).tolist()
    return {"ttft": [s.ttft for s in served], "itl": gaps, "latency": [s.latency for s in served]}


def at_shares(runs: list[Seconds]) -> Seconds:
    """Percentiles of all runs together."""
    return {name: np.percentile([*chain.from_iterable(run[name] for run in runs)], SHARES).tolist() for name in runs[0]}


def record(folder: str, load: list[Request]) -> Run:
    """A run in a new engine: the quietest of up to TRIES."""
    best: Run | None = None
    for _ in range(TRIES):
        with LLM(folder, trace=True, **POOL) as llm:
            wishes = [SamplingParams(max_tokens=n, ignore_eos=True) for n in range(1, 65)]  # batches of all sizes
            llm.generate([[7] * 2 * n for n in range(1, 65)], wishes, use_tqdm=False)
            warm, other = len(llm.trace.steps), OtherLoad()
            times = serve(llm, load)
            share = other.share() or 0.0
            if best is None or share < best[-1]:
                best = load, times, llm.trace.steps[warm:], share
        if share < QUIET:
            break
    assert best is not None
    return best


def prefill_ms(steps: list[StepRecord]) -> float:
    """Milliseconds of a prefill of 81 to 128 tokens, on average: the same work at each rate."""
    return fmean(s.device + s.host for s in steps if s.kind == "prefill" and 81 <= sum(s.tokens.values()) <= 128)


def run(name: str, folder: str, count: int) -> dict[str, Any]:
    """The recorded runs of a model, the rates in turns; the prediction of each."""
    vocabulary = 500 if folder == "tiny" else SHAPE["vocab_size"]
    runs: list[list[Run]] = [[] for _ in RATES[name]]
    for i in range(ROUNDS):
        for mine, rate in zip(runs, RATES[name], strict=True):
            load = make_load(rate, count // ROUNDS, i, vocabulary)
            mine.append(record(folder, load))
    real = [at_shares([as_it_was(load, times) for load, times, _, _ in mine]) for mine in runs]
    costs = fit([step for _, _, steps, _ in runs[FITTED] for step in steps])
    config = EngineArgs(folder, **POOL)
    told = [
        at_shares([as_predicted(Engine(config, costs, seed=i), load) for i, (load, *_) in enumerate(mine)]) for mine in runs
    ]
    return {
        "rates": RATES[name], "count": count // ROUNDS * ROUNDS, "costs": costs, "real": real, "predicted": told,
        "prefill_ms": [prefill_ms([step for _, _, steps, _ in mine for step in steps]) for mine in runs],
        "other load": max(share for mine in runs for *_, share in mine),
    }  # fmt: skip


def rows(results: dict[str, Any]) -> list[list[Any]]:
    """Model, rate, and per percentile what was, and by how much the prediction is off."""
    found = []
    for name, result in results.items():
        for i, (rate, real, told) in enumerate(zip(result["rates"], result["real"], result["predicted"], strict=True)):
            for what in real:
                cells = [f"{1e3 * a:.1f} ({b / a - 1:+.0%})" for a, b in zip(real[what], told[what], strict=True)]
                found.append([f"{name}, {rate:g}/s{' (fitted)' * (i == FITTED)}", what, *cells])
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
