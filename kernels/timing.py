"""What the parts of the GPU benchmark share: the device, a clock that does not time launches, names of the machine."""

from __future__ import annotations

import gc
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
# appended, not prepended: a folder of ours must never hide an installed package (`kernels` is one)
sys.path += [p for p in map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "bench")) if p not in sys.path]

from report import machine, print_table  # noqa: E402

Call = Callable[[], Any]
COLD_BYTES = 2**29  # twice the largest last-level cache we know of (MI300X, 256 MiB)
MAX_COPIES = 128


@dataclass
class Bench:
    """The device under test, and what this run has measured of it."""

    device: torch.device
    dry: bool
    bandwidth: float | None = None  # bytes per second, read and written, of a copy
    read_bandwidth: float | None = None  # bytes per second of a pass that only reads
    matrix_rate: float | None = None  # FLOP per second of a large matrix product
    failures: list[str] = field(default_factory=list)
    aims: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, but float32 in a dry run: the type that a CPU is good at."""
        return torch.float32 if self.dry else torch.bfloat16

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers on the device, in the dtype under test."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def aim(self, name: str, value: float | None, least: float, moonshot: float | None = None) -> str:
        """Note a figure that has an aim; the aim and whether it is reached, in words for a table. A moonshot is told only."""
        reached = None if value is None or self.dry else value >= least
        self.aims[name] = {"value": value, "aim": least, "moonshot": moonshot, "reached": reached}
        more = "" if moonshot is None else f" (moonshot {moonshot:g})"
        return f"aim {least:g}{more}: " + {None: "not measured", True: "reached", False: "MISSED"}[reached]

    def fits(self, nbytes: float) -> bool:
        """Whether so many bytes can be allocated now, with some air."""
        return self.dry or nbytes < 0.9 * torch.cuda.mem_get_info(self.device)[0]

    def copies(self, nbytes: float) -> int:
        """How many data sets to rotate through, so that a call finds nothing of its own in the caches."""
        return 1 if self.dry else max(1, min(MAX_COPIES, -(-COLD_BYTES // max(1, int(nbytes)))))

    def number(self, calls: int) -> int:
        """How many calls to time as one: as asked, but one where the interpreter runs it."""
        return 1 if self.dry else calls

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if not self.dry:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return memory without an owner to the device."""
        if not self.dry:
            gc.collect()
            torch.cuda.empty_cache()

    def seconds(self, calls: Sequence[Call], repeats: int = 7, best: bool = False) -> float:
        """Seconds of one of `calls`, which run one after another as one graph: the median (or best) of `repeats`."""
        replay = calls_in_turn(calls) if self.dry else capture(calls)
        replay()
        self.synchronize()
        times = [self._time(replay) / len(calls) for _ in range(1 if self.dry else repeats)]
        return min(times) if best else statistics.median(times)

    def _time(self, call: Call) -> float:
        if self.dry:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    @contextmanager
    def guarded(self, name: str, results: dict[str, Any]) -> Iterator[None]:
        """One failure must not cost the other figures: it becomes a string in the results and the exit code."""
        self.release()  # also here: while an error is handled, its traceback holds what it failed with
        try:
            yield
        except Exception as error:
            results["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self.failures.append(name)
            print(f"FAILED {name}: {results['error']}", flush=True)
        finally:
            self.release()


def calls_in_turn(calls: Sequence[Call]) -> Call:
    """What `capture` gives, for a CPU."""

    def replay() -> None:
        for call in calls:
            call()

    return replay


def capture(calls: Sequence[Call]) -> Call:
    """`calls` as one CUDA graph: launching them costs the host nothing, so only the device is timed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate, and make their handles for this stream; a capture may not
        for call in calls:
            call()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # a collection inside the capture could unload a kernel or free a graph, which is refused
    try:
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # synchronizes first
            for call in calls:
                call()
    finally:
        gc.enable()
    return graph.replay


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError after so long (where the system has alarms): compilers have been seen to take minutes."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def ratio(value: float | None, of: float | None) -> float | None:
    """value / of, None where one is missing."""
    return None if value is None or not of else value / of


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A titled table; what was not measured is a dash."""
    print(f"\n{title}")
    print_table(head, [["-" if cell is None else cell for cell in row] for row in rows])
    sys.stdout.flush()


def device_names(bench: Bench) -> dict[str, Any]:
    """Device, driver and versions, beside what `report.machine` says."""
    import triton

    names: dict[str, Any] = {"dry": bench.dry, "triton": triton.__version__, "command": " ".join(sys.argv)}
    names |= {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver_version(),
        "device": "cpu (dry run)",
    }
    if not bench.dry:
        properties = torch.cuda.get_device_properties(bench.device)
        names |= {
            "device": properties.name,
            "compute_units": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return machine() | {"host": platform.platform()} | names


def driver_version() -> str | None:
    """The kernel driver's version as NVIDIA's or AMD's tools give it; None if neither does."""
    if (tool := shutil.which("nvidia-smi")) is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.split("\n")[0].strip() or None
    file = Path("/sys/module/amdgpu/version")
    return file.read_text().strip() if file.is_file() else None
