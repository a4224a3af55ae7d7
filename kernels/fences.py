"""Does a merge inside a kernel wait for what it merges? Read from the assembly that each Triton writes.

`merge_inside.py` has such a kernel. Its last program to arrive at an atomic counter loads what the others have stored, so
around the atomic add every wait, write-back, and invalidate must be there that the GPU needs. Some Tritons leave one out.

    python kernels/fences.py [--triton 3.6.0] [--target gfx942] [--install] [--record]

Other Tritons lie beside each other in build/triton (or TRITONS), `--install` puts them there. The exit code is 1 if the
table is not the recorded one, kernels/fences.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
BESIDE = Path(os.environ.get("TRITONS", HERE.parent / "build" / "triton"))
RECORD = HERE / "fences.json"
TRITONS = ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")

ATOMIC = r"(@%p\d+ )?(atom|red)\.global|(global|buffer|flat)_atomic"  # of any kind
ADD = r"(@%p\d+ )?atom\.global|global_atomic_add|buffer_atomic_add|flat_atomic_add"
STORE = r"(@%p\d+ )?st\.global|(global|buffer|flat)_store"
LOAD = r"(@%p\d+ )?ld\.global|(global|buffer|flat)_load"
ARRIVE, LEAVE = r"bar\.sync|s_barrier\b|s_barrier_signal", r"bar\.sync|s_barrier\b|s_barrier_wait"


class Need(NamedTuple):
    """An instruction, and what it is for."""

    pattern: str
    what: str


class Order(NamedTuple):
    """What a GPU needs, in this order. The barriers divide it: all waves arrive, one adds, all waves leave and load."""

    stored: tuple[Need, ...] = ()  # by every wave, between its stores and the barrier
    released: tuple[Need, ...] = ()  # by the wave that adds, between the barrier and the add
    acquired: tuple[Need, ...] = ()  # by that wave, between the add and the next barrier
    loaded: tuple[Need, ...] = ()  # by every wave, between that barrier and its loads


VMCNT, LOADCNT = r"s_waitcnt .*\bvmcnt\(0\)", r"s_wait_loadcnt(_dscnt)? 0x0"
FRAME = ("a part is stored", "all waves have stored", "one more part", "all waves learn the count", "the parts are loaded")
STORES, ADDED = "each wave's wait for its stores", "the wait for the add"
# As in the memory models of https://llvm.org/docs/AMDGPUUsage.html; the barriers are Triton's.
ORDERS = {
    "sm": Order(released=(Need(r".*atom\.global\.gpu\.acq_rel", "acq_rel.gpu at the add"),)),
    "gfx90a": Order(  # one L2 for all
        stored=(Need(VMCNT, STORES),),
        acquired=(Need(VMCNT, ADDED), Need("buffer_wbinvl1", "the L1's invalidation")),
    ),
    "gfx9": Order(  # an L2 for each die; the waves of a workgroup share a CU, and so its L1
        stored=(Need(VMCNT, STORES),),
        released=(Need("buffer_wbl2 sc1", "the L2's write-back"), Need(VMCNT, "the wait for the L2's write-back")),
        acquired=(Need(VMCNT, ADDED), Need("buffer_inv sc1", "the L2's invalidation")),
    ),
    "gfx11": Order(  # writes through to the L2; the waves of a workgroup are on two CUs, each with an L0
        stored=(Need("s_waitcnt_vscnt null, 0x0", STORES),),
        acquired=(Need(VMCNT, ADDED), Need("buffer_gl1_inv", "the L1's invalidation")),
        loaded=(Need("buffer_gl0_inv", "each wave's invalidation of its L0"),),
    ),
    "gfx12": Order(
        stored=(Need("s_wait_storecnt(_dscnt)? 0x0", STORES),),
        acquired=(Need(LOADCNT, ADDED), Need("global_inv scope:SCOPE_DEV", "the device's invalidation")),
        loaded=(Need("global_inv scope:SCOPE_(SE|DEV)", "each wave's invalidation of its L0"),),
    ),
}  # fmt: skip


def instructions(text: str) -> list[str]:
    """Of an assembly text, without comments, labels, and directives."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not re.match(r"[.;/$]|\S+:", line)]


def atomics(text: str) -> int:
    """How many atomic instructions on memory a kernel has."""
    return sum(bool(re.match(ATOMIC, line)) for line in instructions(text))


def missing(target: str, text: str, merges: int = 1) -> list[str]:
    """What a kernel of so many merges lacks, each with one atomic add."""
    lines = instructions(text)
    found = [n for n, line in enumerate(lines) if re.match(ADD, line)]
    if len(found) != merges:
        return [f"{len(found)} atomic adds instead of {merges}"]
    return list(dict.fromkeys(what for at in found for what, n in jobs(target, lines, at).items() if n < 0))


def jobs(target: str, lines: list[str], at: int) -> dict[str, int]:
    """What the atomic add in line `at` needs, and the number of the line that does it; -1 if there is none. The store, the
    add, the load, and the barriers between them are there, too."""

    def last(pattern: str, start: int, end: int) -> int:
        return max((n for n in range(start, end) if re.match(pattern, lines[n])), default=-1)

    def first(pattern: str, start: int) -> int:
        return next((n for n in range(start, len(lines)) if re.match(pattern, lines[n])), -1)

    store, before, leave = last(STORE, 0, at), last(LEAVE, 0, at), first(LEAVE, at)
    load = first(LOAD, leave)
    if not 0 <= store < before or not at < leave < load:
        return {"a store, a barrier, the add, a barrier, and a load": -1}
    order = next(order for name, order in ORDERS.items() if target.startswith(name))
    arrived, added = last(ARRIVE, store, before + 1), first(ARRIVE, at)
    ends = (store, arrived), (before, at + 1), (at, added), (leave, load)
    found = dict(zip(FRAME, (store, arrived, at, added, load), strict=True))
    for needs, (start, end) in zip(order, ends, strict=True):
        for need in needs:
            n = next((n for n in range(start, end) if re.match(need.pattern, lines[n])), -1)
            found[need.what], start = n, max(start, n + 1)
    return found


def compile_merge(target: str) -> str:
    """The assembly text of the kernel that merges inside, from the Triton of this process."""
    from merge_inside import merge_inside
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    lanes = 64 if target.startswith("gfx9") else 32
    gpu = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, lanes)
    kinds = {"given_ptr": "*fp32", "part_ptr": "*fp32", "out_ptr": "*fp32", "merge_ptr": "*i32", "SIZE": "constexpr"}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(4)}
    source = ASTSource(merge_inside, kinds, {(4,): 1024}, aligned)
    kernel = compile_kernel(source, target=gpu, options={"num_warps": 256 // lanes})
    return kernel.asm["ptx" if target == "sm_90" else "amdgcn"]


def path_of(triton: str) -> Path | None:
    """The folder that holds this Triton; None: it is installed, or nowhere."""
    return BESIDE / triton if (BESIDE / triton / "triton").is_dir() else None


def is_there(triton: str) -> bool:
    return path_of(triton) is not None or triton == version("triton")


def environment(triton: str) -> dict[str, str]:
    """Of a process that imports this Triton."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(path) for path in (path_of(triton), HERE) if path] + [os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_DEFAULT_FP_FUSION": "1"}


def install(triton: str) -> None:
    if not is_there(triton):
        print(f"installing Triton {triton} into {BESIDE / triton}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "--target", str(BESIDE / triton), f"triton=={triton}"], check=True)


def check(triton: str, targets: list[str]) -> dict[str, list[str]]:
    """Target -> what is missing, of this Triton's code, compiled in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", *(f"--target={target}" for target in targets)]
    done = subprocess.run(command, env=environment(triton), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Triton {triton} did not compile: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found.pop("triton") != triton:
        raise RuntimeError(f"another Triton than {triton} was imported")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triton", action="append", help=f"default: {', '.join(TRITONS)}")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--install", action="store_true", help="install the Tritons that are not there")
    parser.add_argument("--record", action="store_true", help=f"write the table into {RECORD.relative_to(HERE.parent)}")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    targets = arguments.target or [*TARGETS]
    if arguments.here:
        warnings.simplefilter("ignore")
        import triton

        found = {target: missing(target, compile_merge(target)) for target in targets}
        print(json.dumps({"triton": triton.__version__, **found}))
        return 0
    table, recorded = {}, json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for triton in arguments.triton or TRITONS:
        if arguments.install:
            install(triton)
        if not is_there(triton):
            parser.error(f"no Triton {triton} in {BESIDE}; --install fetches it")
        table[triton] = check(triton, targets)
        for target, lacking in table[triton].items():
            print(f"Triton {triton}  {target:8} {'lacks ' + ', '.join(lacking) if lacking else 'ordered'}", flush=True)
    if arguments.record:
        table = {triton: recorded.get(triton, {}) | found for triton, found in table.items()}
        RECORD.write_text(json.dumps(recorded | table, indent=1) + "\n")
        return 0
    changed = [triton for triton, found in table.items() if not found.items() <= recorded.get(triton, {}).items()]
    print(f"not as recorded: Triton {', '.join(changed)}" if changed else "as recorded")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
