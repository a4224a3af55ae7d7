"""Execute every Triton kernel for AMD GPUs that need not be here: tiny cases, or the whole test of the kernels.

    python kernels/execute.py [--target gfx942] [--only decode] [--caches SEED] [--json FILE]
    python kernels/execute.py --target gfx942 --all [pytest arguments]

The assembly that Triton writes runs in `kernels/amd`, on a CPU's tensors. It counts instructions; it knows no times.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [p for p in map(str, (ROOT, ROOT / "kernels", ROOT / "tests", ROOT / "nbs" / "_book")) if p not in sys.path]

from amd.launch import emulated  # noqa: E402, I001  before atom_mini imports triton
from amd.group import Launch  # noqa: E402
from amd.machine import TARGETS  # noqa: E402
from amd.memory import Fault  # noqa: E402
from amd.program import KINDS  # noqa: E402

import machines  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import pytest  # noqa: E402
import folders  # noqa: E402, F401
import test_kernels as kernels  # noqa: E402
from atom_mini.families.latent_kernel import LATENT_CONFIGS  # noqa: E402
from atom_mini.gpu import sampling_kernels  # noqa: E402
from atom_mini.gpu import tile_configs as table  # noqa: E402
from atom_mini.config import SamplingParams  # noqa: E402
from atom_mini.sampler import Sampler, SamplingMetaData  # noqa: E402
from torch import Tensor  # noqa: E402

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}  # twice what was seen
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Error = float  # relative, against torch in float32; 0 or infinity where the result is exact or wrong


def randn(shape: list[int], dtype: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TYPES[dtype])


def silu(dtype: str, rows: int = 2, size: int = 300) -> Error:
    x = randn([rows, 2 * size], dtype)
    return kernels.relative_error(kernels.make_ops(1, 1, 64, TYPES[dtype]).silu_and_mul(x),
                                  kernels.TWIN.silu_and_mul(x.float()))  # fmt: skip


def norm(dtype: str, adds: bool, rows: int = 2, size: int = 1024) -> Error:
    x, residual, weight = randn([rows, size], dtype), randn([rows, size], dtype, 1), randn([size], dtype, 2)
    ours = kernels.make_ops(1, 1, 64, TYPES[dtype]).add_rms_norm(x, residual if adds else None, weight, kernels.EPS)
    twin = kernels.TWIN.add_rms_norm(x.float(), residual.float() if adds else None, weight.float(), kernels.EPS)
    return max(kernels.relative_error(a, b) for a, b in zip(ours, twin, strict=True))


def rotate(dtype: str, norm: bool, tokens: int = 2, dim: int = 64) -> Error:
    arguments, pool, slots = kernels.rotation(dim, 2, 2, norm, tokens, TYPES[dtype])
    ops = kernels.make_ops(2, 2, dim, TYPES[dtype])
    return 0.0 if kernels.rotation_is_right(ops.rotate_and_store, arguments, pool, slots) else math.inf


def sample(dtype: str) -> Error:
    logits, heat, u = 3 * randn([2, 5000], dtype, 3), torch.tensor([0.0, 0.8]), torch.tensor([0.3, 0.7])
    ours = sampling_kernels.sample(logits, heat, u)
    return 0.0 if torch.equal(ours, kernels.twin_sample(logits, heat, u)) else math.inf


def filter_and_sample(dtype: str) -> Error:
    options = [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.85, "min_p": 0.04}]  # no equal logits where they cut
    logits = 3 * randn([2, 5000], dtype, 3)
    params = [SamplingParams(temperature=0.8, seed=seed, **one) for seed, one in enumerate(options)]
    meta = SamplingMetaData.pack(params, np.arange(2), 5000)
    ours = sampling_kernels.KernelSampler()(logits, meta)
    return 0.0 if torch.equal(ours, Sampler()(logits, meta)) else math.inf


def mask_and_sample(dtype: str) -> Error:
    """A mask of one token, one of every third, a row without a mask, and a mask that leaves filters little to keep."""
    masks = {row: np.packbits(np.arange(5003) % n == 0, bitorder="little") for row, n in ((0, 3), (1, 6000), (3, 500))}
    options = [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_k": 4, "top_p": 0.9, "min_p": 0.02}]
    logits = 3 * randn([4, 5003], dtype, 3)
    params = [SamplingParams(**{"temperature": 0.8, "seed": seed} | one) for seed, one in enumerate(options)]
    meta = SamplingMetaData.pack(params, np.arange(4), 5003, masks=masks)
    ours = sampling_kernels.KernelSampler()(logits, meta)
    return 0.0 if torch.equal(ours, Sampler()(logits, meta)) else math.inf


def attend(
    dtype: str, lens: kernels.Lens, dim: int = 64, group: int = 2, kv_heads: int = 1, backwards: bool = False
) -> Error:
    """`backwards`: the splits of a context come from the last to the first."""
    ops = kernels.make_ops(kv_heads, group, dim, TYPES[dtype])
    ops.units = 1  # so few programs that each has several items: its registers then hold another one's numbers

    def turn(plan: kernels.AttentionPlan) -> None:
        items = kernels.items(plan)
        items[:] = items[:: -1 if backwards else 1].copy()

    return kernels.Step(lens, 16, kv_heads, group, dim, TYPES[dtype]).error(ops, turn)


def windows(dtype: str, lens: kernels.Lens, window: int) -> Error:
    from test_windows import by_column, in_triton, some_sinks

    step, sinks = kernels.Step(lens, 16, 1, 2, 64, TYPES[dtype]), some_sinks(2, TYPES[dtype])
    return kernels.relative_error(in_triton(step, window, sinks), by_column(step, window, sinks))


def experts(dtype: str, tokens: int, choices: int = 2, packed: bool = False) -> Error:
    from test_grouped import Layer, pack, relative_error, unpack

    layer = Layer(tokens, choices, 64, 64, limit=1.0, experts=8, dtype=TYPES[dtype])
    if packed:
        weights = [pack(8, 128, 64), pack(8, 64, 64)]
        layer.mats = [unpack(*w) for w in weights]
    wanted = layer.wanted()
    layer.mats = weights if packed else layer.mats
    return relative_error(layer.run(), wanted)


def latents(dtype: str, lens: kernels.Lens) -> Error:
    from test_latent_kernel import LatentStep

    return LatentStep(lens, 16, 16, TYPES[dtype]).off()


def products(dtype: str, rows: int) -> Error:
    from test_fused import product_errors

    return max(product_errors(rows, 96, 40, True, 3, TYPES[dtype]))


def heads(dtype: str, has_norm: bool) -> Error:
    from test_fused import heads_error

    return heads_error(5, 64, has_norm, TYPES[dtype], not has_norm)


# The launches to execute: name -> a launch that returns its error. A new kernel adds its rows. Lengths end within a tile; where
# errors are planted (tests/kernels/test_amd.py), one just before its end, so that most of it is seen, and one at its beginning.
CASES: dict[str, Callable[[], Error]] = {
    "silu bf16": lambda: silu("bf16"),
    "silu fp32": lambda: silu("fp32"),
    "norm bf16": lambda: norm("bf16", False),
    "norm and sum bf16": lambda: norm("bf16", True),
    "norm and sum fp16": lambda: norm("fp16", True),
    "rotate bf16": lambda: rotate("bf16", False),
    "rotate, norm bf16": lambda: rotate("bf16", True),
    "rotate, norm fp16, heads of 96": lambda: rotate("fp16", True, tokens=3, dim=96),
    "sample fp32": lambda: sample("fp32"),
    "sample bf16": lambda: sample("bf16"),
    "sample bf16, filters": lambda: filter_and_sample("bf16"),
    "sample bf16, masks": lambda: mask_and_sample("bf16"),
    "sample fp32, masks": lambda: mask_and_sample("fp32"),
    "decode bf16, heads of 64": lambda: attend("bf16", [(1, 40)]),
    "decode bf16, two parts": lambda: attend("bf16", [(1, 319), (1, 5)], group=3, kv_heads=2),
    "decode fp16, three parts": lambda: attend("fp16", [(2, 600), (1, 270)], backwards=True),
    "decode fp16, heads of 128": lambda: attend("fp16", [(1, 40), (1, 17)], dim=128),
    "decode fp32, heads of 64": lambda: attend("fp32", [(1, 40)]),
    "decode bf16, heads of 96": lambda: attend("bf16", [(1, 40), (2, 9)], dim=96, group=3),
    "decode bf16, heads of 256": lambda: attend("bf16", [(1, 40)], dim=256),
    "prefill bf16, heads of 64": lambda: attend("bf16", [(130, 191), (70, 133)]),  # chunks whose keys are not cut
    "prefill fp16, heads of 128": lambda: attend("fp16", [(40, 70)], dim=128, group=4),
    "prefill fp32, heads of 64": lambda: attend("fp32", [(33, 40)]),
    "prefill bf16, heads of 256": lambda: attend("bf16", [(33, 40)], dim=256, group=4),
    "a chunk bf16, two parts": lambda: attend("bf16", [(17, 300), (1, 20)], group=4),
    "windows bf16, decode": lambda: windows("bf16", [(1, 300), (1, 40)], 50),
    "windows fp16, prefill": lambda: windows("fp16", [(20, 290)], 30),
    "experts fp32": lambda: experts("fp32", 5),
    "experts bf16, packed": lambda: experts("bf16", 40, packed=True),
    "latents bf16, decode": lambda: latents("bf16", [(1, 40), (1, 300)]),
    "latents fp16, prefill": lambda: latents("fp16", [(20, 30)]),
    "fused products bf16": lambda: products("bf16", 5),
    "fused products fp16, 20 rows": lambda: products("fp16", 20),
    "fused heads bf16": lambda: heads("bf16", False),
    "fused heads, norm fp16": lambda: heads("fp16", True),
}
# (target, start of a case): kernels that a target refuses
NOT_THERE = {(t, "latents") for t in TARGETS if table.nearest(t) not in LATENT_CONFIGS}


class Row(NamedTuple):
    target: str
    case: str
    kernels: str
    counts: dict[str, int]  # wave instructions by kind
    error: Error
    fault: str = ""


def cases_of(target: str, only: str = "") -> list[str]:
    """The cases that a target has, whose name has `only` in it."""
    return [case for case in CASES if only in case and (target, case.split()[0]) not in NOT_THERE]


def limit(case: str) -> float:
    return LIMITS[next(dtype for name, dtype in TYPES.items() if name in case)]


def execute(target: str, case: str, **options) -> tuple[Row, list[Launch]]:
    """Run one case; a fault of the machine, or too large an error, is told in the row."""
    launches: list[Launch] = []
    error, fault = math.inf, ""
    with patch.object(table, "architecture", lambda device: table.nearest(target)):
        try:
            with emulated(target, **options) as launches:
                error = CASES[case]()
            fault = "" if error < limit(case) else "wrong"
        except Fault as found:
            fault = str(found)
    counts: Counter[str] = Counter()
    for launch in launches:
        counts += launch.kinds if len(launch.counts) else Counter()
    names = ", ".join(dict.fromkeys(launch.kernel.removesuffix("_kernel") for launch in launches))
    return Row(target, case, names, dict(counts), error, fault), launches


def print_row(row: Row) -> None:
    numbers = "".join(f"{row.counts.get(kind, 0):>9,}" for kind in KINDS)
    verdict = row.fault.splitlines()[0] if row.fault else "right"
    print(f"{row.target:8} {row.case:31} {row.kernels:22}{numbers}  {row.error:8.0e}  {verdict}", flush=True)


def summary(rows: list[Row]) -> dict[str, int]:
    """The record of a target."""
    count = sum(sum(row.counts.values()) for row in rows)
    return {"cases": len(rows), "right": sum(not row.fault for row in rows), "instructions": count}


def run_cases(target: str, only: str, caches: int | None = None) -> list[Row]:
    return [execute(target, case, caches=caches)[0] for case in cases_of(target, only)]


class Everything:
    """pytest's plugin: the kernels' own tests, every launch executed for a target."""

    def __init__(self, target: str) -> None:
        self.target, self.launches = target, []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        os.environ.pop("TRITON_INTERPRET", None)  # conftest.py has set it

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self) -> None:
        patch.object(table, "architecture", lambda device: table.nearest(self.target)).start()
        self.emulation = emulated(self.target)
        self.launches = self.emulation.__enter__()


def run_all(target: str, arguments: list[str]) -> int:
    everything = Everything(target)
    test = str(ROOT / "tests" / "gpu" / "test_kernels.py")
    code = pytest.main([test, "-p", "no:cacheprovider", "-q", *arguments], plugins=[everything])
    launches = everything.launches
    print(f"{target}: {len(launches)} launches, {sum(int(one.counts.sum()) for one in launches):,} wave instructions, "
          f"{'all right' if not code and launches else 'FAILED'}")  # fmt: skip
    return int(code) or not launches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--caches", type=int, metavar="SEED", help="with caches, and workgroups in the order of this seed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--all", action="store_true", help="the whole of tests/gpu/test_kernels.py")
    arguments, rest = parser.parse_known_args()
    targets = arguments.target or list(TARGETS)
    if arguments.all:
        return max(run_all(target, rest) for target in targets)
    start, rows = time.perf_counter(), []
    print(f"{'target':8} {'case':31} {'kernels':22}{''.join(f'{kind:>9}' for kind in KINDS)}     error")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        run = pool.map if len(targets) > 1 else map
        options = [arguments.only] * len(targets), [arguments.caches] * len(targets)
        for found in run(run_cases, targets, *options):
            for row in found:
                print_row(row)
            rows += found
            if found and not arguments.only and arguments.caches is None:
                machines.record(found[0].target, "executed", summary(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    wrong = [row for row in rows if row.fault]
    total = sum(sum(row.counts.values()) for row in rows)
    verdict = f"{len(wrong)} FAILED" if wrong else "all right"
    print(f"{len(rows)} cases on {len(targets)} targets: {total:,} wave instructions in "
          f"{time.perf_counter() - start:.0f} s, {verdict if rows else 'NOTHING was executed'}")  # fmt: skip
    return bool(wrong) or not rows


if __name__ == "__main__":
    sys.exit(main())
