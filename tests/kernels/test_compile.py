"""Every Triton kernel compiles for every target without spills; and what `kernels/compile.py` calls a fault is found.

Each test compiles in a process of its own: once a process has imported triton to interpret, it cannot compile.
These are the variants most likely to fail; `python kernels/compile.py` compiles all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "compile.py"
LOAD = f"""
import importlib.util, json, sys
import atom_mini  # before the tool says where it is
spec = importlib.util.spec_from_file_location("compile_kernels", {str(SCRIPT)!r})
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)
"""
# `make kernels` compiles all, and tests/kernels/test_machines.py knows whether that was done since a kernel changed.
TARGETS = ["gfx1201", "sm_90", *(pytest.param(name, marks=pytest.mark.large) for name in ("gfx90a", "gfx942", "gfx950"))]


def run(code: str) -> dict[str, list[str]]:
    """What the code puts into `result`, run where `tool` is kernels/compile.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = LOAD + code + "\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def faults_of(target: str, launch: str, case: str) -> dict[str, list[str]]:
    """The faults of each kernel of a case; `launch` is a statement that launches it."""
    return run(f"""
def launch():
    {launch}
result = {{}}
for row in tool.compile_case({target!r}, {case!r}, launch):
    result.setdefault(row.kernel, []).extend(tool.faults(row))
""")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow
def test_no_faults(target: str) -> None:
    result = run(f"rows, wrong = tool.check({target!r}, quick=True)\nresult = {{'rows': len(rows), 'wrong': wrong}}")
    assert not result["wrong"]
    assert result["rows"] >= 20


def with_launch(target: str, launch: str, phase: str) -> str:
    change = f"tool.table.TILE_CONFIGS[{target!r}] = 2 * (tool.table.TileConfig({launch}),)"
    return f"{change}; tool.attend(tool.LLAMA, {phase!r}, 'bf16', 16, '4 GiB')"


SPILLS = with_launch(
    "gfx942", "rows=128, key_bytes=2**14, warps=4, stages=1, programs=2, extra=tool.table.amd(2)", "prefill"
)
TOO_MUCH = with_launch("sm_120", "rows=16, key_bytes=2**15, warps=4, stages=3, programs=1", "decode")
LOST = "del sys.modules['atom_mini.families.latent_kernel'].LATENT_CONFIGS['gfx942']; "
LOST += "tool.attend_latents(16, 'decode', 'bf16', 16, '4 GiB')"
# target, name of the case, launch, kernel, its fault
FAULTS = [
    ("gfx942", "prefill", SPILLS, "paged_attention_kernel", "spills"),
    ("sm_120", "decode", TOO_MUCH, "paged_attention_kernel", "bytes of LDS"),
    ("sm_90", "fused, launched early", "tool.run_fused(tool.QWEN, 16)", "add_product_kernel", "loads before the wait"),
    ("gfx942", "decode latents bf16", LOST, "refused", "on gfx942: set attention='torch'"),
    ("gfx1100", "misaligned bf16", "tool.run_small(tool.LLAMA, 64, misaligned=True)", "silu_and_mul_kernel",
     "no 128-bit loads"),
    ("gfx1100", "decode bf16", "tool.attend(tool.LLAMA, 'decode', 'fp32', 16, '4 GiB')", "paged_attention_kernel",
     "no matrix instructions"),
    ("gfx942", "a merge", "import merge_inside; merge_inside.merge()", "merge_inside", "1 atomic instructions"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "case", "launch", "kernel", "fault"), FAULTS, ids=[fault[-1] for fault in FAULTS])
@pytest.mark.slow
def test_faults_are_found(target: str, case: str, launch: str, kernel: str, fault: str) -> None:
    found = faults_of(target, launch, case)[kernel]
    assert any(fault in text for text in found), found


@pytest.mark.slow
def test_a_kernel_that_is_launched_early_waits_before_it_reads() -> None:
    """On Hopper."""
    found = faults_of("sm_90", "tool.run_fused(tool.QWEN, 16, extra=tool.EARLY)", "fused, launched early")
    assert len(found) == 3 and not any(found.values()), found


def test_executed_instructions() -> None:
    """Tiny cases have a row, too, with what they executed; a wrong result is a fault of the kernel."""
    result = run("""
result = {}
for planted in (False, True):
    if planted:
        import execute
        execute.CASES["silu fp32"] = lambda: execute.silu("fp32") + 1
    rows = tool.execute_cases("gfx942", only="silu fp32")
    result[planted] = [[row.kernel, row.registers, row.executed, *tool.faults(row)] for row in rows]
""")
    (name, registers, executed), (*_, fault) = *result["false"], *result["true"]
    assert name == "silu_and_mul_kernel" and registers > 0 and executed > 100 and fault == "wrong"
