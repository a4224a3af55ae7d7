"""What the benchmarks share: the machine they ran on, other work beside them, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def machine() -> dict[str, Any]:
    """Date, versions, processor: what a figure means nothing without."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class OtherLoad:
    """How much of the processors others used since it was made: a benchmark beside them is not worth its name."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float | None:
        """0 to 1; None where there is no /proc."""
        total, busy, own = (after - before for after, before in zip(self._now(), self.start, strict=True))
        return max(0.0, (busy - own) / total) if total else None

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """CPU seconds of the processors that this process may use: all, not idle, this process's."""
        stat = Path("/proc/stat")
        if not stat.is_file():
            return 0.0, 0.0, 0.0
        names = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text().splitlines() if line.split()[0] in names]
        ticks = [sum(map(int, column)) / os.sysconf("SC_CLK_TCK") for column in zip(*(row[1:9] for row in rows), strict=True)]
        used = os.times()
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], sum(used[:4])


LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends when the benchmark does


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that want a core all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as they must be, the first to the left; floats with three digits that count."""
    texts = [list(head), *([format_cell(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def format_cell(cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1e}" if 0 < abs(cell) < 1e-3 else f"{cell:.{max(0, 3 - len(str(int(abs(cell)))))}f}"


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write `machine()` and the results, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(machine() | results, indent=2) + "\n")
        print(f"written to {path}")
