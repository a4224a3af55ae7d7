"""Where a step's time goes on a GPU, kernel by kernel: decode steps at batch 1, 32 and 256 and one prefill of Qwen3-0.6B's
shape with random weights.

Of each step: the wall time, as the scheduler waits for it; the time of a replay between two events of the device, which is
the step without its host; how long the device was busy, and the kernels by their time. What is missing between the kernels'
sum and the replay is gaps between launches; between replay and wall, the host.

Run: `python kernels/profile_step.py OUT [--dry-run]`. It writes OUT/profile.json and, where matplotlib is, OUT/profile.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SHOWN = 12  # kernels of a step in the table; the rest is one row


def short(name: str) -> str:
    """A kernel's name without its template arguments, at most 60 characters."""
    return name.split("<")[0].removeprefix("void ")[:60]


def kernels_of(bench: Any, step: Callable[[], Any], number: int = 5) -> tuple[dict[str, list[float]], float]:
    """(kernel -> [microseconds, launches] of a step, microseconds in which any of them ran), from torch's profiler."""
    from engines import covered_length
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    wanted = DeviceType.CPU if bench.dry else DeviceType.CUDA
    with profile(activities=[ProfilerActivity.CPU] + ([] if bench.dry else [ProfilerActivity.CUDA])) as record:
        for _ in range(number):
            step()
        bench.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    spans = []
    for event in record.events() or []:
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            begin, end = event.time_range.start, event.time_range.end
            found[short(event.name)][0] += (end - begin) / number
            found[short(event.name)][1] += 1 / number
            spans.append((begin, end))
    return dict(found), covered_length(spans) / number


def replay_seconds(bench: Any, step: Callable[[], Any], number: int = 20) -> float:
    """Seconds of a step on the device's own clock, the steps launched one behind another without a wait: the median."""
    import torch

    if bench.dry:
        from engines import wall_seconds

        return wall_seconds(bench, step, 1, warm_up=0)
    times = []
    for _ in range(number):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def device_part(runner: Any, scheduled: Any) -> Callable[[], Any]:
    """The graph that replays a decode step; the whole step where there is none for it."""
    is_decode = int(scheduled.num_scheduled_tokens.max()) == 1
    sizes = [size for size in getattr(runner, "graphs", {}) if size >= len(scheduled.req_ids)] if is_decode else []
    return runner.graphs[min(sizes)].replay if sizes else partial(runner.forward, scheduled)


def profile_step(bench: Any, runner: Any, query_lens: list[int], context: int) -> dict[str, Any]:
    """The figures of one step; {"skipped": why} where the pool is too small for it."""
    from engines import make_batch, wall_seconds

    scheduled = make_batch(runner, query_lens, context)
    if scheduled is None:
        return {"skipped": "K/V does not fit"}
    step = partial(runner.forward, scheduled)
    wall = wall_seconds(bench, step, 1 if bench.dry else 20, warm_up=1 if bench.dry else 3)
    replay = replay_seconds(bench, device_part(runner, scheduled))
    kernels, busy = kernels_of(bench, step, 1 if bench.dry else 5)
    return {
        "wall_us": wall * 1e6, "replay_us": replay * 1e6, "busy_us": busy,
        "launches": sum(count for _, count in kernels.values()),
        "kernels": dict(sorted(kernels.items(), key=lambda entry: -entry[1][0])),
    }  # fmt: skip


def print_step(name: str, found: dict[str, Any]) -> None:
    """One table: the kernels that take longest, the rest, the sums."""
    from timing import show

    if "kernels" not in found:
        print(f"\n{name}: {found}")
        return
    entries = list(found["kernels"].items())
    rows: list[list[Any]] = [[kernel, us, count, us / count] for kernel, (us, count) in entries[:SHOWN]]
    rest = entries[SHOWN:]
    rows.append([f"{len(rest)} others", sum(us for _, (us, _) in rest), sum(n for _, (_, n) in rest), None])
    rows += [[f"= {what}", found[f"{what}_us"], found["launches"] if what == "busy" else None, None]
             for what in ("busy", "replay", "wall")]  # fmt: skip
    show(name, ["kernel", "us a step", "launches", "us each"], rows)


def draw(results: dict[str, dict[str, Any]], file: Path) -> None:
    """A bar for each step: kernels, gaps between them, the host's rest, in shares of the wall time."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    steps = {name: found for name, found in results.items() if "kernels" in found}
    names = sorted({k for f in steps.values() for k in [*f["kernels"]][:6]})
    fig, ax = plt.subplots(figsize=(10, 1 + 0.8 * len(steps)), layout="constrained")
    left = dict.fromkeys(steps, 0.0)
    for kernel in names:
        widths = [f["kernels"].get(kernel, [0.0])[0] / f["wall_us"] for f in steps.values()]
        ax.barh([*steps], widths, left=[*left.values()], label=kernel)
        left = {name: left[name] + width for name, width in zip(steps, widths, strict=True)}
    ends = {"other kernels": "busy_us", "between kernels": "replay_us", "host": "wall_us"}
    for (label, key), color in zip(ends.items(), ("#bcc6d2", "#e6b43c", "#5b6570"), strict=True):
        widths = [max(0.0, f[key] / f["wall_us"] - left[name]) for name, f in steps.items()]
        ax.barh([*steps], widths, left=[*left.values()], label=label, color=color)
        left = {name: left[name] + width for name, width in zip(steps, widths, strict=True)}
    ax.set(xlabel="share of the step's wall time", xlim=(0, 1))
    ax.invert_yaxis()
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    fig.savefig(file, dpi=120)


def main() -> int:
    """Profile all steps; the exit code: 0, 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for profile.json and profile.png")
    parser.add_argument("--dry-run", action="store_true", help="toy shapes on a CPU, to test this program")
    args = parser.parse_args()
    import bench as program

    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
    elif (lack := program.missing()) is not None:
        print(f"kernels/profile_step.py needs a CUDA or ROCm device and Triton: {lack}. --dry-run tests it without.")
        return 2
    import torch
    from timing import Bench, device_names

    bench = Bench(torch.device("cpu" if args.dry_run else "cuda"), args.dry_run)
    from engines import MODELS, TOY, random_runner  # behind timing, which knows where it is

    kind, shape = TOY["toy"] if bench.dry else MODELS["Qwen3-0.6B"]
    room = {"max_num_seqs": 4, "max_model_len": 256, "num_kvcache_blocks": 64} if bench.dry else {
        "max_num_seqs": 256, "max_model_len": 16384}  # fmt: skip
    runner = random_runner(bench, kind, shape, **room)
    decodes = ((1, 16), (2, 48)) if bench.dry else ((1, 512), (32, 1024), (256, 1024))
    asked = {f"decode {batch} x {context}": ([1] * batch, context) for batch, context in decodes}
    asked["prefill"] = ([20] * 2, 20) if bench.dry else ([1024] * 16, 1024)
    results: dict[str, dict[str, Any]] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (query_lens, context) in asked.items():
        results[name] = {}
        with bench.guarded(name, results[name]):
            results[name] |= profile_step(bench, runner, query_lens, context)
        print_step(name, results[name])
        file = {"machine": device_names(bench), "failures": bench.failures, "steps": results}
        (args.out / "profile.json").write_text(json.dumps(file, indent=1) + "\n")
    if find_spec("matplotlib"):
        draw(results, args.out / "profile.png")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
