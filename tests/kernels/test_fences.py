"""A merge inside a kernel: what its machine code lacks is named (kernels/fences.py), and seen when it runs on a GPU in
NumPy that has caches (kernels/amd/caches.py).

Other Tritons than the installed one are used if they are in build/triton (`make fences` puts them there) or in TRITONS.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels"))

import fences  # noqa: E402
from amd.caches import Caches  # noqa: E402
from amd.machine import TARGETS  # noqa: E402
from amd.memory import Argument, Arguments  # noqa: E402

INSTALLED = importlib.metadata.version("triton")
RECORDED = json.loads(fences.RECORD.read_text())
# As these Tritons wrote it, without arithmetic.
CDNA_3 = """
    global_store_dwordx4 v[6:7], v[2:5], off
    global_load_dword v2, v8, s[12:13] sc0 sc1
    s_waitcnt vmcnt(0)
    s_barrier
    s_and_saveexec_b64 s[2:3], s[0:1]
    buffer_wbl2 sc1
    global_atomic_add v2, v2, v3, s[12:13] offset:4 sc0
    s_waitcnt vmcnt(0)
    buffer_inv sc1
    s_or_b64 exec, exec, s[2:3]
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v0, v0
    buffer_load_dwordx4 v[6:9], v4, s[8:11], 0 offen"""
RDNA_3 = """
    global_store_b128 v[6:7], v[2:5], off
    global_load_b32 v2, v8, s[2:3] glc dlc
    s_waitcnt vmcnt(0)
    s_waitcnt_vscnt null, 0x0
    s_barrier
    buffer_gl0_inv
    s_and_saveexec_b32 s5, s0
    global_atomic_add_u32 v2, v2, v3, s[2:3] offset:4 glc
    s_waitcnt vmcnt(0)
    buffer_gl1_inv
    buffer_gl0_inv
    s_or_b32 exec_lo, exec_lo, s5
    s_barrier
    ds_load_b32 v0, v0
    buffer_load_b128 v[5:8], v4, s[16:19], 0 offen"""
RDNA_4 = """
    global_store_b128 v[5:6], v[1:4], off
    s_wait_storecnt 0x0
    s_barrier_signal -1
    s_barrier_wait -1
    global_inv scope:SCOPE_SE
    s_and_saveexec_b32 s9, s2
    global_atomic_add_u32 v2, v2, v3, s[4:5] offset:4 th:TH_ATOMIC_RETURN scope:SCOPE_DEV
    s_wait_loadcnt 0x0
    global_inv scope:SCOPE_DEV
    s_or_b32 exec_lo, exec_lo, s9
    s_barrier_signal -1
    s_barrier_wait -1
    ds_load_b32 v1, v1
    buffer_load_b128 v[5:8], v4, s[8:11], null offen"""
WRITTEN = [("3.6.0", "gfx942", CDNA_3), ("3.7.1", "gfx950", CDNA_3), ("3.8.0", "gfx1100", RDNA_3),
           ("3.8.0", "gfx1201", RDNA_4)]  # fmt: skip


@pytest.mark.parametrize(("triton", "target", "text"), WRITTEN, ids=lambda value: value[:7])
def test_what_some_tritons_left_out(triton: str, target: str, text: str) -> None:
    """It is named, and with it the code is ordered."""
    assert len(fences.missing(target, text)) == 1 and fences.missing(target, text) == RECORDED[triton][target]
    wbl2, last = "buffer_wbl2 sc1", text.rindex("\n    ds_")
    there = text.replace(wbl2, wbl2 + "\n    s_waitcnt vmcnt(0)")
    if target.startswith("gfx1"):
        there = text[:last] + ("\n buffer_gl0_inv" if target == "gfx1100" else "\n global_inv scope:SCOPE_SE") + text[last:]
    assert not fences.missing(target, there)


def test_a_merge_without_an_add() -> None:
    """Its absence is a fault, as is a second one; so is an add that no barrier precedes."""
    without = re.sub(".*atomic.*", "", CDNA_3)
    assert fences.missing("gfx942", without) == ["0 atomic adds instead of 1"]
    assert fences.missing("gfx942", CDNA_3 + CDNA_3) == ["2 atomic adds instead of 1"]
    (structure,) = fences.missing("gfx942", CDNA_3.replace("s_barrier", "s_nop 0", 1))
    assert structure.startswith("a store, a barrier")
    assert fences.atomics(CDNA_3) == 1 and fences.atomics(without) == 0


@pytest.mark.parametrize(("lacks", "code"), [([], 1), (["the wait for the L2's write-back"], 0)])
def test_another_verdict_than_the_recorded_one(monkeypatch: pytest.MonkeyPatch, lacks: list[str], code: int) -> None:
    """The exit code is 1, even if a fault is gone."""
    monkeypatch.setattr(fences, "is_there", lambda triton: True)
    monkeypatch.setattr(fences, "check", lambda triton, targets: {"gfx942": lacks})
    monkeypatch.setattr(sys, "argv", ["fences", "--triton", "3.6.0", "--target", "gfx942"])
    assert fences.main() == code


def run(triton: str, code: str) -> dict:
    """What the code puts into `result`, in a process with this Triton; `fences` and the emulator are there."""
    start = f"""
import copy, json, sys
sys.path.append({str(ROOT / 'kernels')!r})
import fences, merge_inside
from amd.launch import emulated
def launched(target, launch=merge_inside.merge):
    with emulated(target, runs=False) as launches:
        launch()
    return launches
def wrong(launches, seed, change=None):
    "How many numbers of `out` are wrong after these launches."
    memo = {{}}
    copies = [copy.deepcopy(one, memo) for one in launches]
    for one in copies:
        one.run(caches=seed, change=change)
    return int((copies[-1].values["out_ptr"] != copies[0].values["given_ptr"].sum(1)).sum())
"""
    code = f"{start}\n{code}\nprint(json.dumps(result))"
    environment = fences.environment(triton)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


AMD = [target for target in fences.TARGETS if target.startswith("gfx")]
SEEDS = 8


def test_the_emulator_notices_each_missing_instruction() -> None:
    """Of the installed Triton's code, which is right in every order: without one of the instructions that the check
    demands, there is an order in which numbers are wrong, or a load that came too late. The check says so, too."""
    result = run(INSTALLED, f"""
result = {{}}
for target in {AMD}:
    launches = launched(target)
    lines = [text for text, _ in launches[0].program.assembly.lines]
    at = next(n for n, line in enumerate(lines) if "atomic_add" in line)
    jobs = {{what: n for what, n in fences.jobs(target, lines, at).items() if what not in fences.FRAME}}
    noticed, named = [], []
    for what, n in jobs.items():
        spoiled = "\\n".join(lines[:n] + ["s_nop 0"] + lines[n + 1 :])
        named.append(bool(fences.missing(target, spoiled)))
        try:
            noticed.append(any(wrong(launches, seed, lambda program: program.without(n)) for seed in range({SEEDS})))
        except Exception as fault:
            noticed.append("late" in str(fault))
    right = not any(wrong(launches, seed) for seed in range({SEEDS}))
    result[target] = [right, dict(zip(jobs, noticed)), all(named)]
""")
    for target, (right, noticed, named) in result.items():
        assert right and named and len(noticed) >= 3 and all(noticed.values()), (target, noticed)


def test_two_launches_are_ordered() -> None:
    """The end of a kernel is all that a merge in a second one needs."""
    result = run(INSTALLED, f"""
result = {{}}
for target in {AMD}:
    launches = launched(target, merge_inside.merge_after)
    result[target] = [len(launches), sum(wrong(launches, seed) for seed in range({SEEDS}))]
""")
    assert result == {target: [2, 0] for target in AMD}


@pytest.mark.parametrize("triton", RECORDED)
def test_tritons(triton: str) -> None:
    """Each one's code is as recorded, and wrong on a GPU with caches where something is missing, and only there."""
    if not fences.is_there(triton):
        pytest.skip(f"no Triton {triton} in {fences.BESIDE} (make fences)")
    assert fences.check(triton, [*fences.TARGETS]) == RECORDED[triton]
    result = run(triton, f"""
result = {{}}
for target in {AMD}:
    launches = launched(target)
    result[target] = [wrong(launches, None), sum(wrong(launches, seed) > 0 for seed in range({SEEDS}))]
""")
    for target, (flat, orders) in result.items():
        assert flat == 0 and bool(orders) == bool(RECORDED[triton][target]), (target, orders)


def test_who_sees_a_store() -> None:
    """On two dies: the CU at once; its die after the wait; all the others after a write-back and their invalidate."""
    numbers = np.zeros(4, np.uint32)
    memory = Arguments([Argument("x_ptr", numbers.ctypes.data, numbers.nbytes)])
    at, seven = np.array([numbers.ctypes.data + 4]), np.array([[7]], np.uint32)
    caches = Caches(TARGETS["gfx942"], memory, seed=0)
    own, die, other = (caches.view(group, 0) for group in (0, 2, 1))  # workgroups 0 and 2 are on die 0

    def seen() -> list[int]:
        for view in (die, other):
            view.refresh((0, 1))
        return [int(view.read(at, 4)[0, 0]) for view in (own, die, other)] + [int(numbers[1])]

    arrive = own.write(at, seven, 4)
    assert seen() == [7, 0, 0, 0]
    arrive()
    assert seen() == [7, 7, 0, 0]
    own.write_back()
    assert int(other.read(at, 4)[0, 0]) == 0 and seen() == [7, 7, 7, 7]
