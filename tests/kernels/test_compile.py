"""Every Triton kernel compiles for every target without spills; and what `kernels/compile.py` calls a fault is found.

Each test compiles in a process of its own: once a process has imported triton to interpret, it cannot compile.
These are the variants most likely to fail; `python kernels/compile.py` compiles all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[2] / "kernels" / "compile.py"
LOAD = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("compile_kernels", {str(SCRIPT)!r})
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool
spec.loader.exec_module(tool)
"""
TARGETS = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90"]
# Whose configurations are those of a relative above, or nearly: `make kernels` compiles them all.
RELATIVES = [pytest.param(name, marks=pytest.mark.large) for name in ("gfx1102", "gfx1151", "gfx1200", "sm_100", "sm_120")]


def run(code: str) -> dict[str, list[str]]:
    """What the code puts into `result`, run where `tool` is kernels/compile.py."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = LOAD + code + "\nprint(json.dumps(result))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
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


@pytest.mark.parametrize("target", [*TARGETS, *RELATIVES])
@pytest.mark.slow
def test_no_faults(target: str) -> None:
    result = run(f"rows, wrong = tool.check({target!r}, quick=True)\nresult = {{'rows': len(rows), 'wrong': wrong}}")
    assert not result["wrong"]
    assert result["rows"] >= 20


def with_launch(target: str, launch: str, phase: str = "prefill", shape: str = "LLAMA") -> str:
    change = f"tool.table.TILE_CONFIGS[{target!r}] = 2 * (tool.table.TileConfig({launch}),)"
    return f"{change}; tool.attend(tool.{shape}, {phase!r}, 'bf16', 16, '4 GiB')"


@pytest.mark.slow
def test_spills_are_found() -> None:
    launch = with_launch("gfx942", "rows=128, key_bytes=2**14, warps=4, stages=1, programs=2, extra=tool.table.amd(2)")
    faults = faults_of("gfx942", launch, "prefill")["paged_attention_kernel"]
    assert any("spills" in fault for fault in faults)


@pytest.mark.slow
def test_a_kernel_that_is_launched_early_waits_before_it_reads() -> None:
    """On Hopper; the same kernels without the wait are at fault."""
    right = faults_of("sm_90", "tool.run_fused(tool.QWEN, 16, extra=tool.EARLY)", "fused, launched early")
    assert len(right) == 3 and not any(right.values())
    wrong = faults_of("sm_90", "tool.run_fused(tool.QWEN, 16)", "fused, launched early")
    assert all("loads before the wait" in faults[0] for faults in wrong.values())


@pytest.mark.slow
def test_a_refusal_is_a_fault_where_none_is_expected() -> None:
    """RDNA 3 refuses latent attention. If CDNA did, its row of the table might be lost."""
    launch = "tool.attend_latents(16, 'decode', 'bf16', 16, '4 GiB')"
    assert faults_of("gfx1151", launch, "decode latents bf16") == {"refused": []}
    lost = f"del sys.modules['atom_mini.families.latent_kernel'].LATENT_CONFIGS['gfx942']; {launch}"
    (fault,) = faults_of("gfx942", lost, "decode latents bf16")["refused"]
    assert "on gfx942: set attention='torch'" in fault


@pytest.mark.parametrize("target", ["gfx942", "gfx1201"])
@pytest.mark.slow
def test_readme_says_what_float32_heads_of_256_spill(target: str) -> None:
    """No other kernel of these targets spills more, so the row of the table has their number."""
    spilled = run(f"""
with tool.recorded({target!r}) as launches:
    for phase in ('decode', 'prefill'):
        for pool in tool.POOLS:
            tool.attend(tool.GEMMA, phase, 'fp32', 16, pool)
result = max(tool.amd_facts(kernel.asm["amdgcn"])["spills"] for _, kernel in launches)
""")
    readme = Path(__file__).parents[2].joinpath("docs", "machines.md").read_text()
    said = re.search(rf"^\| `{target}` .*\| float32: (\d+) \|", readme, re.MULTILINE)
    assert said and spilled == int(said[1]) > 0


@pytest.mark.parametrize("target", ["gfx942", "gfx1102", "gfx1201"])
@pytest.mark.slow
def test_waves_are_as_many_as_the_compiler_says(target: str) -> None:
    """By registers: those given, which may be more than are used, where a launch asks for fewer waves."""
    result = run(f"""
import re
result = {{}}
with tool.recorded({target!r}) as launches:
    tool.attend(tool.LLAMA, 'prefill', 'bf16', 16, '4 GiB')
    tool.attend(tool.LLAMA, 'decode', 'bf16', 16, '4 GiB')
    tool.run_small(tool.QWEN, 64)
    if {target!r} == 'gfx1201':  # what happens with a row that asks for six waves
        tool.table.TILE_CONFIGS['gfx1201'] = tool.table.TILE_CONFIGS['gfx1100']
        tool.attend(tool.LLAMA, 'decode', 'bf16', 16, '4 GiB')
for n, (name, kernel) in enumerate(launches):
    text = kernel.asm["amdgcn"]
    ours = tool.examine({target!r}, name, "", tool.amd_facts(text), 0, 4).waves
    result[f"{{name}} {{n}}"] = [ours, float(re.search(r"; Occupancy: (\\d+)", text)[1])]
""")
    assert len(result) >= 6 and all(ours == theirs for ours, theirs in result.values()), result


@pytest.mark.slow
def test_too_much_lds_is_found() -> None:
    launch = with_launch("sm_120", "rows=16, key_bytes=2**15, warps=4, stages=3, programs=1", "decode")
    faults = faults_of("sm_120", launch, "decode")["paged_attention_kernel"]
    assert any("bytes of LDS" in fault for fault in faults)


@pytest.mark.parametrize("target", ["gfx942", "gfx1100", "sm_90"])
@pytest.mark.slow
def test_narrow_loads_are_found(target: str) -> None:
    """A tensor that does not begin at a multiple of 16 bytes cannot be loaded 16 bytes at a time."""
    launch = "tool.run_small(tool.LLAMA, 64, misaligned=True); "
    launch += "tool.attend(tool.LLAMA, 'decode', 'bf16', 16, '4 GiB', misaligned=True)"
    faults = faults_of(target, launch, "misaligned bf16")
    for kernel in ("silu_and_mul_kernel", "chunk_stats_kernel", "threshold_kernel", "paged_attention_kernel"):
        assert any("no 128-bit loads" in fault for fault in faults[kernel]), kernel


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_atomic_instructions_are_found(target: str) -> None:
    """A kernel that merges inside is a fault, unless it is known to; `tests/kernels/test_fences.py` has what it needs then."""
    launch = "import merge_inside; merge_inside.merge()"
    (fault,) = faults_of(target, launch, "a merge")["merge_inside"]
    assert fault == "1 atomic instructions in a kernel that is not in MERGES"
    assert faults_of(target, f"tool.MERGES = ('merge_inside',); {launch}", "a merge") == {"merge_inside": []}


def test_missing_matrix_instructions_are_found() -> None:
    """The check reads the name of the case: float32 has no matrix instruction on RDNA 3, but bfloat16 has one."""
    launch = "tool.attend(tool.LLAMA, 'decode', 'fp32', 16, '4 GiB')"
    assert "no matrix instructions" in faults_of("gfx1100", launch, "decode bf16")["paged_attention_kernel"]


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
