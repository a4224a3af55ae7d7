"""The AMD GPU in NumPy (kernels/amd): its checks, and planted errors noticed. Kernels show whether instructions are right.

What launches kernels runs in a process of its own: once a process has imported triton to interpret, it cannot compile.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels"))  # appended: a folder of ours hides no installed package

from amd.machine import TARGETS  # noqa: E402

NAN, INF = math.nan, math.inf
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(code: str) -> dict:
    """What the code puts into `result`, in a process that compiles; `tool` is kernels/execute.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    start = f"import json, sys\nsys.path[:0] = [{str(ROOT / 'kernels')!r}]\nimport execute as tool"
    code = f"{start}\n{code}\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT / "kernels")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# Each reads with masks, and ends within a tile; `make execute` runs many more, for all targets.
CASES = ["silu fp32", "norm and sum bf16", "rotate, norm bf16", "sample bf16, filters", "decode bf16, two parts"]


@needs_triton
@pytest.mark.parametrize("target", ["gfx942", "gfx1201"])
@pytest.mark.slow
def test_cases_are_right(target: str) -> None:
    """AMD's machine code gives torch's numbers, and touches nothing outside of its tensors."""
    faults = run(f"result = [row.fault for case in {CASES} for row in tool.run_cases({target!r}, case)]")
    assert len(faults) >= len(CASES) and not any(faults), faults


PLANT = """
import random, re
from amd import program
program.MAX_JUMPS = 1000
names = {"barriers": r"s_barrier(_signal)?\\b", "waits": r"s_wait(cnt|_(?!storecnt )\\w*cnt) ", "vector instructions": r"v_(?!s_)"}
def remove(code, n):
    lines = [text for text, _ in code.assembly.lines]
    halves = [n, lines.index("s_barrier_wait -1", n)] if "signal" in lines[n] else [n]  # RDNA 4's barrier has two
    for n in halves:
        code = code.without(n)
    return code
def plant(target, case, kind, most):
    row, (launch, *_) = tool.execute(target, case)
    assert not row.fault, row
    lines, counts = launch.program.assembly.lines, launch.counts
    places = [n for n, (text, _) in enumerate(lines) if counts[n] and re.match(names[kind], text)]
    places = random.Random(0).sample(places, min(most, len(places)))
    missed = []
    for n in places:
        spoil = lambda code: remove(code, n) if code.assembly.lines == lines else code
        if not tool.execute(target, case, change=spoil)[0].fault:
            missed.append(f"{target}, {case}, {lines[n][1]}: {lines[n][0]}")
    return len(places), missed
"""
SHARES = {"barriers": 0.9, "waits": 0.85, "vector instructions": 0.7}
PLACES = ("decode bf16, two parts", "prefill bf16, heads of 64")


def planted(kind: str, targets: tuple[str, ...], most: int) -> None:
    """Up to so many errors of a kind in each program: which are not noticed, and whether enough are."""
    result = run(f"{PLANT}\nresult = [plant(t, c, {kind!r}, {most}) for t in {targets} for c in {PLACES}]")
    count, missed = sum(n for n, _ in result), [text for _, texts in result for text in texts]
    print(f"{kind}: {count - len(missed)} of {count} noticed; not:", *missed, sep="\n  ")
    assert count >= 12 and 1 - len(missed) / count >= SHARES[kind]


@needs_triton
@pytest.mark.parametrize(("kind", "targets", "most"), [
    ("waits", ("gfx942",), 8), ("barriers", ("gfx1201",), 8),
])  # fmt: skip
@pytest.mark.slow
def test_planted_errors(kind: str, targets: tuple[str, ...], most: int) -> None:
    """Some waits and barriers: enough are noticed if they are missing.

    The barrier before the first use of LDS guards nothing, so a few are missed with reason.
    """
    planted(kind, targets, most)


@needs_triton
@pytest.mark.large
@pytest.mark.parametrize("kind", SHARES)
def test_all_planted_errors(kind: str) -> None:
    """Lastly 145 of 148 barriers (98 %), 716 of 748 waits (96 %) and 582 of 800 vector instructions (73 %).

    Of 124 that an earlier run missed on gfx942, gfx950 and gfx1100, 100 left every bit of the results as it was. 33 copy
    a register: 21 of them, always, to where its number is already. 31 refine a division that is rounded to 16 bits
    afterwards, 30 round to bfloat16 and decide only in ties and for NaN, 11 are steps of a maximum that softmax does
    not depend on while nothing overflows. The other 19 compute addresses of masked keys, masks, or products in lanes
    that do not matter.
    """
    planted(kind, ("gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"), 80)


BEYOND = """
import torch, triton, triton.language as tl
@triton.jit
def beyond(x_ptr, y_ptr, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x, mask=at < n)
"""


@needs_triton
def test_unmasked_load(tmp_path: Path) -> None:
    """A load past the end of a tensor is named with its line, on all targets; nobody else would have noticed."""
    (tmp_path / "past_the_end.py").write_text(BEYOND)
    result = run(f"""
sys.path.append({str(tmp_path)!r})
import past_the_end, torch
result = {{}}
for target in tool.TARGETS:
    try:
        with tool.emulated(target):
            past_the_end.beyond[(1,)](torch.ones(250), torch.ones(250), 250, SIZE=256)
    except tool.Fault as fault:
        result[target] = str(fault)
""")
    assert set(result) == set(TARGETS)
    for target, fault in result.items():
        assert fault.startswith(f"{target}, past_the_end.py:6: ") and "bounds" in fault and "x_ptr" in fault, fault
