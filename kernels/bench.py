"""What a GPU gets out of atom_mini: the device's limits, tokens per second at several loads, each kernel, whole steps,
mixtures of experts, the common benchmark, one request alone, overlap, others on the benchmark.

Every figure stands beside what this device could do, measured in the same run: its copy bandwidth and its matrix rate.
Needs a CUDA or ROCm device and Triton, and nothing that a machine with torch and transformers does not have; weights
are random, made on the device. Planned for under 6 minutes on an H200. `--dry-run` runs toy shapes, all of it, on a
CPU, in Triton's interpreter: its figures mean nothing.

Run: `python kernels/bench.py [--only PART ...] [--nano-vllm CHECKOUT] [--sweep [--limit SECONDS]]`. A run of all parts is
recorded in `kernels/results/`, under the device's name.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("limits", "rates", "kernels", "steps", "mixtures", "common", "single", "overlap", "transformers", "nano_vllm")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here instead")
    parser.add_argument("--check", action="store_true", help="only say whether this machine can run it")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts; limits always run")
    parser.add_argument("--sweep", action="store_true", help="instead: try many launches of the attention kernel")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the sweep; default: until all is tried")
    parser.add_argument("--nano-vllm", type=Path, help="a checkout of nano-vLLM that you have fetched, to run beside")
    parser.add_argument("--dry-run", action="store_true", help="toy shapes on a CPU, to test this program")
    args = parser.parse_args()
    if args.dry_run and args.json and args.json.resolve().is_relative_to(RESULTS):
        parser.error(f"a dry run measures nothing: keep it out of {RESULTS}")
    return args


def missing() -> str | None:
    """What this machine lacks for a real run."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA or ROCm device"


def chosen_parts(args: argparse.Namespace) -> dict[str, Callable[..., None]]:
    """Name -> function(bench, results), in the order in which they run; limits first: the others divide by them."""
    import engines
    import micro
    import peers

    if args.sweep:
        return {"limits": micro.limits, "sweep": partial(micro.sweep, limit=args.limit)}
    functions: tuple[Callable[..., None], ...] = (
        micro.limits, engines.rates, micro.kernels, engines.steps, engines.mixtures, engines.common, engines.single,
        engines.overlap, peers.continuous_batching,
        partial(peers.nano_vllm, checkout=args.nano_vllm),
    )  # fmt: skip
    parts = dict(zip(PARTS, functions, strict=True))
    return {name: run for name, run in parts.items() if name == "limits" or name in args.only}


def run_parts(bench: Any, parts: dict[str, Callable[..., None]], save: Callable[[dict[str, Any]], None]) -> None:
    """Run each part whatever became of the one before, and save after each: a crash keeps what there is."""
    results: dict[str, Any] = {}
    for name, run in parts.items():
        start = time.perf_counter()
        results[name] = {}
        with bench.guarded(name, results[name]):
            run(bench, results[name])
        results[name]["elapsed_seconds"] = time.perf_counter() - start
        print(f"[{name}: {results[name]['elapsed_seconds']:.1f} s]", flush=True)
        save(results)


def main() -> int:
    """Run, print, save; the exit code: 0, 1 if a part failed, 2 without a GPU."""
    args = parse()
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
    elif (lack := missing()) is not None:
        print(f"kernels/bench.py needs a CUDA or ROCm device and Triton: {lack}. --dry-run tests it without.")
        return 2
    if args.check:
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers would look for a faster attention to fetch
    import torch
    from timing import Bench, device_names, show

    if args.dry_run:
        torch.set_num_threads(1)
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, args.dry_run)
    machine = device_names(bench)
    print("DRY RUN: toy shapes in an interpreter, the figures mean nothing\n" * args.dry_run, end="")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))

    complete = tuple(args.only) == PARTS and not args.sweep and not args.dry_run
    own_name = re.sub(r"\W+", "-", machine["device"].lower()) + ".json"
    path = args.json or (RESULTS / own_name if complete else None)

    def save(results: dict[str, Any]) -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            figures = {"machine": machine, "aims": bench.aims, "failures": bench.failures, "parts": results}
            path.write_text(json.dumps(figures, indent=2) + "\n")

    parts = chosen_parts(args)
    gc.freeze()  # what was imported stays: each collection between two figures need not look through it
    run_parts(bench, parts, save)
    words = {None: "not measured", True: "reached", False: "MISSED"}
    rows = [[name, a["value"], a["aim"], a["moonshot"], words[a["reached"]]] for name, a in bench.aims.items()]
    show("Aims", ["", "figure", "aim", "moonshot", ""], rows)
    print(f"\n{len(bench.failures)} failure(s){': ' * bool(bench.failures)}{'; '.join(bench.failures)}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if threading.active_count() > 1:  # another engine's thread that does not end must not keep the process
        os._exit(code)
    sys.exit(code)
