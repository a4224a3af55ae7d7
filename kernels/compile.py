"""Cross-compile every Triton kernel for GPUs that need not be here, and check what the compiler made of it.

The package itself launches its kernels, on tensors without memory (torch's "meta" device), for a driver that only names
a target. So each kernel gets the tiles, options and alignment hints of a real launch; nothing is repeated here.

    python kernels/compile.py [--target gfx942] [--json FILE] [--quick] [--execute]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # both are read when triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

import fences
import machines
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from atom_mini.attention import AttentionMetaData
from atom_mini.families import grouped
from atom_mini.families.latent_kernel import LatentOps
from atom_mini.families.windows import kernel_attention
from atom_mini.gpu import sampling_kernels
from atom_mini.gpu import tile_configs as table
from atom_mini.gpu.fused import FusedOps
from atom_mini.gpu.triton_attention import AttentionPlan
from atom_mini.gpu.triton_ops import TritonOps
from atom_mini.models import Linear


class Hardware(NamedTuple):
    """A target and what limits its occupancy. A unit is four SIMDs: a CU, an SM, or a pair of CUs of RDNA."""

    target: GPUTarget
    cards: str
    registers: int  # per lane of a SIMD, shared by its waves
    granule: int  # in which they are given out
    max_waves: int  # per SIMD
    program_lds: int
    unit_lds: int


TARGETS = {
    "gfx90a": Hardware(GPUTarget("hip", "gfx90a", 64), "MI210, MI250, MI250X", 512, 8, 8, 2**16, 2**16),
    "gfx942": Hardware(GPUTarget("hip", "gfx942", 64), "MI300A, MI300X, MI325X", 512, 8, 8, 2**16, 2**16),
    "gfx950": Hardware(GPUTarget("hip", "gfx950", 64), "MI350X, MI355X", 512, 8, 8, 160 * 2**10, 160 * 2**10),
    "sm_90": Hardware(GPUTarget("cuda", 90, 32), "H100, H200", 512, 8, 16, 227 * 2**10, 228 * 2**10),
    "sm_100": Hardware(GPUTarget("cuda", 100, 32), "B200, GB200", 512, 8, 16, 227 * 2**10, 228 * 2**10),
    "sm_120": Hardware(GPUTarget("cuda", 120, 32), "RTX 5070, RTX 5080, RTX 5090", 512, 8, 12, 99 * 2**10, 100 * 2**10),
}
RDNA = {  # cards, registers, granule; of gfx1102 also gfx1103 and gfx1150, whose configurations are the same
    "gfx1100": ("RX 7900 GRE, RX 7900 XT, RX 7900 XTX", 1536, 24),
    "gfx1102": ("RX 7600, RX 7600 XT", 1024, 16),
    "gfx1151": ("Radeon 8050S, Radeon 8060S", 1536, 24),
    "gfx1200": ("RX 9060, RX 9060 XT", 1536, 24),
    "gfx1201": ("RX 9070, RX 9070 GRE, RX 9070 XT", 1536, 24),
}
for name, (cards, registers, granule) in RDNA.items():
    TARGETS[name] = Hardware(GPUTarget("hip", name, 32), cards, registers, granule, 16, 2**16, 2**17)
# (start of the target, of the case): why spills are accepted
WAIVERS: dict[tuple[str, str], str] = {
    ("gfx11", "decode 256"): "the query alone takes 128 of the 256 registers; right, but slow",
    ("gfx11", "prefill 256"): "the same",
    ("gfx9", "decode 256 fp32"): "a head takes twice the registers of bfloat16; right, but slow",
    ("gfx9", "prefill 256 fp32"): "the same",
    ("gfx12", "decode 256 fp32"): "no matrix instruction for float32: the query's rows take the registers; right, but slow",
    ("gfx12", "prefill 256 fp32"): "the same",
    ("sm_120", "decode 256 fp32"): "8 bytes of stack, though it uses 80 of 255 registers",
    ("sm_120", "prefill 256 fp32"): "the same",
    ("sm_120", "masked"): "32 bytes of stack in the search for thresholds, at the 128 registers that 16 warps leave",
}
# (start of the target, in the case): why a kernel may refuse
REFUSALS: dict[tuple[str, str], str] = {
    ("gfx11", "latents"): "the query alone would take 288 of the 256 registers",
    ("gfx12", "latents fp32"): "no matrix instruction for float32, and too few registers without",
}


class Shape(NamedTuple):
    """What the kernels see of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    vocab: int
    qk_norm: bool


QWEN = Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151936, True)
LLAMA = Shape("Llama-3.1-8B", 32, 8, 128, 4096, 14336, 128256, False)
LLAMA_1B = Shape("Llama-3.2-1B", 32, 8, 64, 2048, 8192, 128256, False)
PHI = Shape("Phi-3-mini", 32, 32, 96, 3072, 8192, 32064, False)
GPT = Shape("gpt-oss-20b", 64, 8, 64, 2880, 2880, 201088, False)
GEMMA = Shape("Gemma-2-9B", 16, 8, 256, 3584, 14336, 256000, False)


class Mixture(NamedTuple):
    """What the grouped kernel sees of a model."""

    name: str
    experts: int
    choices: int
    hidden: int
    inner: int
    is_gpt: bool = False  # packed, with biases and a limit


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Mixture("gpt-oss-20b", 32, 4, 2880, 2880, True),
    Mixture("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
    Mixture("DeepSeek-V3", 256, 8, 7168, 2048),  # 7.5 GB in one tensor
)
POOLS = {"1 GiB": 2**30, "4 GiB": 2**32}  # up to 2 GiB, AMD's compiler may address with 32 bits: another kernel
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Row(NamedTuple):
    """What the compiler made of one kernel."""

    target: str
    kernel: str
    case: str
    registers: int = 0  # per lane; on CDNA with the accumulation registers
    accumulators: int = 0  # CDNA's AGPRs
    scalars: int = 0
    spills: int = 0  # AMD: registers; NVIDIA: bytes of stack
    lds: int = 0
    warps: int = 0
    waves: float = 0.0  # that fit on a SIMD
    matrix: str = ""  # matrix instructions: how many of which kind
    wide: int = 0  # loads of 16 bytes
    narrow: int = 0  # loads of 2 bytes
    loads: int = 0  # all, without scalar ones
    unwaited: int = 0  # loads before the wait for the kernel before, of one that is launched early
    executed: int = 0  # wave instructions, of a tiny case that also ran
    unordered: str = ""  # what is wrong with its atomic instructions
    refused: str = ""  # why it does not run there
    error: str = ""


def empty(shape: Iterable[int], dtype: torch.dtype = torch.float32, misaligned: bool = False) -> Tensor:
    """A tensor without memory; its address is 0, or one number further."""
    shape = tuple(shape)
    storage = torch.empty(torch.Size(shape).numel() + 1, dtype=dtype, device="meta")
    return storage[1:].view(shape) if misaligned else storage[:-1].view(shape)


@contextmanager
def recorded(name: str) -> Iterator[list[tuple[str, Any]]]:
    """Inside, a launch compiles for this target and nothing runs; gives the (name, kernel) of each launch."""
    target, launches, run = TARGETS[name].target, [], JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: name, get_current_stream=lambda device: 0
    )
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(triton.runtime.driver, "_active", driver),
        patch.object(table, "architecture", lambda device: table.nearest(name)),
    ):
        yield launches


class Refused(Exception):
    """A kernel says that it does not run on a target."""


def make_plan(phase: str) -> AttentionPlan:
    """Of a decode or of a prefill, cut along the keys."""
    counts = (2**16, 0) if phase == "decode" else (0, 2**16)
    return AttentionPlan(empty([4096], torch.int32), *counts, 64)


def attend(shape: Shape, phase: str, dtype: str, block_size: int, pool: str, misaligned: bool = False) -> None:
    """Launch attention for one kind of step."""
    number = TYPES[dtype]
    block = (shape.kv_heads, block_size, shape.dim)
    blocks = POOLS[pool] // (2 * torch.Size(block).numel() * number.itemsize)
    plan = make_plan(phase)
    q, cache = empty((64, shape.heads, shape.dim), number, misaligned), empty((2, blocks, *block), number, misaligned)
    meta = AttentionMetaData(*[empty([8], torch.int32)] * 3, [], [], plan=plan)
    make_ops(shape, dtype).attend(q, cache, meta, 0.1)


def attend_windows(shape: Shape, phase: str, dtype: str, window: int, has_sinks: bool) -> None:
    """The same with sinks and windows."""
    number = TYPES[dtype]
    q, cache = empty((64, shape.heads, shape.dim), number), empty((2, 2**18, shape.kv_heads, 16, shape.dim), number)
    meta = AttentionMetaData(*[empty([8], torch.int32)] * 3, [], [], plan=make_plan(phase))
    sinks = empty([shape.heads]) if has_sinks else None  # in 32 bits: no narrow loads, which are a fault of rows
    kernel_attention(make_ops(shape, dtype), q, cache, meta, 0.1, window, sinks)


def make_ops(shape: Shape, dtype: str) -> TritonOps:
    return TritonOps(torch.device("cpu"), shape.heads, shape.kv_heads, shape.dim, TYPES[dtype])


def attend_latents(heads: int, phase: str, dtype: str, block_size: int, pool: str) -> None:
    """The same over rows of 512 + 64 numbers."""
    number = TYPES[dtype]
    try:
        ops = LatentOps(torch.device("cpu"), heads, 512, 64, number)
    except ValueError as error:
        raise Refused(str(error)) from None
    plan = make_plan(phase)
    blocks = POOLS[pool] // (block_size * 576 * number.itemsize)
    cache = empty((1, blocks, 1, block_size, 576), number).expand(2, -1, -1, -1, -1)
    meta = AttentionMetaData(*[empty([8], torch.int32)] * 3, [], [], plan=plan)
    ops.attend(empty((64, heads, 576), number), cache, meta, 0.1)


def run_small(shape: Shape, tokens: int, dtype: str = "bf16", misaligned: bool = False) -> None:
    """Launch everything else of a step."""
    ops, number = make_ops(shape, dtype), TYPES[dtype]
    x, weight = empty((tokens, shape.hidden), number, misaligned), empty([shape.hidden], number)
    ops.add_rms_norm(x, None, weight, 1e-6)
    ops.add_rms_norm(x, x, weight, 1e-6)
    ops.silu_and_mul(empty((tokens, 2 * shape.inner), number, misaligned))
    qkv = empty((tokens, shape.heads + 2 * shape.kv_heads, shape.dim), number, misaligned)
    norm = (empty([shape.dim], number), empty([shape.dim], number)) if shape.qk_norm else None
    angles = empty((tokens, shape.dim), number)
    cache = empty((2, 2**18, shape.kv_heads, 16, shape.dim), number)
    ops.rotate_and_store(qkv, norm, 1e-6, angles, angles, cache, empty([tokens], torch.int64))
    logits = empty((tokens, shape.vocab), number, misaligned)
    for filters in (None, empty((3, tokens))):
        sampling_kernels.sample(logits, empty([tokens]), empty([tokens]), filters)


def run_masked(shape: Shape, tokens: int) -> None:
    """Sample with a mask of allowed tokens for each row."""
    logits, u = empty((tokens, shape.vocab), TYPES["bf16"]), empty([tokens])
    masks = empty([tokens], torch.int32), empty((tokens, -(-shape.vocab // 32)), torch.int32)
    for filters in (None, empty((3, tokens))):
        sampling_kernels.sample(logits, u, u, filters, masks)


EARLY = "launched early"
STARTS_EARLY = ("sm_90", "sm_100")


def run_fused(shape: Shape, rows: int, dtype: str = "bf16", units: int = 132, extra: str = "") -> None:
    """Launch the fused products of a layer, on a GPU of so many units; `extra`: biases, or launched early, from Hopper on."""
    number = TYPES[dtype]
    ops = FusedOps(torch.device("cpu"), shape.heads, shape.kv_heads, shape.dim, number)
    ops.units = units  # decides how many columns a program has
    ops.starts_early = extra == EARLY and table.architecture(torch.device("cpu")) in STARTS_EARLY

    def linear(size: int, columns: int) -> Linear:
        return Linear(size, {"w": columns}, extra == "biases").to(device="meta", dtype=number)

    x, angles = empty((rows, shape.hidden), number), empty((rows, 1, shape.dim), number)
    for size in (shape.heads * shape.dim, shape.inner):
        ops.add_product(empty((rows, size), number), linear(size, shape.hidden), x)
    ops.gated_product(x, linear(shape.hidden, 2 * shape.inner), 1e-6)
    qkv = linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.dim)
    norm = empty((2, shape.dim), number) if shape.qk_norm else None
    cache = empty((2, 2**18, shape.kv_heads, 16, shape.dim), number)
    ops.heads_product(x, qkv, 1e-6, norm, 1e-6, angles, angles, cache, empty([rows], torch.int64))


def run_experts(shape: Mixture, tokens: int, dtype: str = "bf16") -> None:
    """Launch the product with the chosen experts."""
    number, E = TYPES[dtype], shape.experts

    def stack(rows: int, size: int) -> grouped.Stack:
        if not shape.is_gpt:
            return empty((E, rows, size), number), None, None
        blocks, scales = (empty((E, rows, size // n), torch.uint8) for n in (2, 32))
        return blocks, scales, empty((E, rows), number)

    x, ids = empty((tokens, shape.hidden), number), empty((tokens, shape.choices), torch.int64)
    stacks = stack(2 * shape.inner, shape.hidden), stack(shape.hidden, shape.inner)
    grouped.grouped_experts(x, ids, empty((tokens, shape.choices)), *stacks, 7.0 * shape.is_gpt)


Case = tuple[str, Callable[[], None]]


def cases(quick: bool = False) -> Iterator[Case]:
    """(name, launches) of all variants; `quick`: those most likely to fail."""
    variants = [(shape, "bf16", 16) for shape in (LLAMA_1B, PHI, QWEN, LLAMA, GEMMA)]
    variants += [(LLAMA, "bf16", 1), (LLAMA, "bf16", 256), (LLAMA, "fp16", 16), (LLAMA, "fp32", 16), (GEMMA, "fp32", 16)]
    if quick:
        variants = [(LLAMA, "bf16", 16), (GEMMA, "bf16", 16), (LLAMA, "fp32", 16), (GEMMA, "fp32", 16)]
    for shape, dtype, size in variants:
        for phase in ("decode", "prefill"):
            for pool in list(POOLS)[quick:]:
                name = f"{phase} {shape.dim} {dtype}, {shape.heads}/{shape.kv_heads} heads, blocks of {size}, {pool}"
                yield name, lambda a=(shape, phase, dtype, size, pool): attend(*a)
    windows = [(GPT, 128, True), (GPT, 0, True), (LLAMA, 4096, False)]
    for shape, window, has_sinks in windows[:: 2 if quick else 1]:
        for phase in ("decode", "prefill"):
            name = f"{phase} {shape.dim} bf16, window of {window}" + ", sinks" * has_sinks
            yield name, lambda a=(shape, phase, "bf16", window, has_sinks): attend_windows(*a)
    latents = [(16, "bf16", 16), (20, "bf16", 16), (128, "bf16", 16), (16, "bf16", 1), (16, "fp16", 256), (16, "fp32", 16)]
    for heads, dtype, size in latents[: 1 if quick else None]:
        for phase in ("decode", "prefill"):
            for pool in list(POOLS)[quick:]:
                name = f"{phase} latents {dtype}, {heads} heads, blocks of {size}, {pool}"
                yield name, lambda a=(heads, phase, dtype, size, pool): attend_latents(*a)
    for shape in [QWEN] if quick else [QWEN, LLAMA]:
        for tokens in (64, 4096):
            yield f"{shape.name}, {tokens} tokens", lambda a=(shape, tokens): run_small(*a)
            yield f"masked {shape.name}, {tokens} tokens", lambda a=(shape, tokens): run_masked(*a)
    fused = [(QWEN, 16, "bf16", 132), (QWEN, 64, "bf16", 132), (QWEN, 64, "fp32", 132), (LLAMA, 64, "bf16", 4),
             (LLAMA_1B, 32, "fp16", 132), (LLAMA_1B, 64, "bf16", 132, "biases"), (QWEN, 16, "bf16", 132, EARLY),
             (LLAMA, 64, "bf16", 132, EARLY)]  # fmt: skip
    for shape, rows, dtype, units, *extra in fused[: 2 if quick else None]:
        name = ", ".join([f"fused {shape.name}", f"{rows} rows", dtype, f"{units} units", *extra])
        yield name, lambda a=(shape, rows, dtype, units, *extra): run_fused(*a)
    mixtures = [(shape, "bf16") for shape in MIXTURES[: 2 if quick else None]]
    for mixture, dtype in mixtures if quick else [*mixtures, (MIXTURES[0], "fp16"), (MIXTURES[0], "fp32")]:
        for phase, tokens in (("decode", 32), ("prefill", 8192)):
            yield f"{phase} of experts, {mixture.name}, {dtype}", lambda a=(mixture, tokens, dtype): run_experts(*a)


def occupancy(hardware: Hardware, registers: int, lds: int, warps: int) -> float:
    """Waves per SIMD that find room, in whole programs."""
    given = -(-max(registers, 1) // hardware.granule) * hardware.granule
    by_registers = min(hardware.max_waves, hardware.registers // given) * 4 // warps
    return min(by_registers, hardware.unit_lds // max(lds, 1)) * warps / 4


def loads_before_wait(text: str) -> int:
    """How many loads of a kernel in PTX come before its wait for the kernel before: all, if it does not wait."""
    before = text.partition("griddepcontrol.wait")[0]
    return len(re.findall(r"\bld\.global|cp\.async\.c[ag]", before))


def amd_facts(text: str) -> dict[str, Any]:
    """What the assembly and its metadata say."""

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:?\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    loads = re.findall(r"^\s*(?:global|buffer|flat)_load_(?:lds_)?(\w+).*$", text, re.M)
    kinds = {kind: len(re.findall(rf"^\s*v_{kind}_", text, re.M)) for kind in ("mfma", "wmma")}
    return {
        "given": number("amdhsa_next_free_vgpr"), "registers": number("vgpr_count"),
        "accumulators": number("agpr_count"), "scalars": number("sgpr_count"),
        "spills": number("vgpr_spill_count"), "matrix": " ".join(f"{n} {kind}" for kind, n in kinds.items() if n),
        "wide": sum(kind in ("dwordx4", "b128") for kind in loads), "loads": len(loads),
        "narrow": sum("short" in kind or "16" in kind for kind in loads),
    }  # fmt: skip


def nvidia_facts(kernel: Any) -> dict[str, Any]:
    """What the assembly says, and cuobjdump of the registers that ptxas gave."""
    text, tool = kernel.asm["ptx"], triton.knobs.nvidia.cuobjdump.path
    path = Path(triton.knobs.cache.dir) / f"resources-{os.getpid()}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kernel.asm["cubin"])
    report = subprocess.run([tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True).stdout
    path.unlink()
    registers, stack = (int(re.search(rf"{field}:(\d+)", report).group(1)) for field in ("REG", "STACK"))
    names = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    kinds = {kind: text.count(name) for kind, name in names.items()}
    loads = re.findall(r"\bld\.global\S*|cp\.async\.c[ag]\.\S+ [^;]*", text)
    wide = r"\.v4\.[bfu]32|\.v2\.[bfu]64|cp\.async.*, (?:0x10|16)\b"
    return {
        "registers": registers, "spills": stack, "matrix": " ".join(f"{n} {kind}" for kind, n in kinds.items() if n),
        "wide": sum(bool(re.search(wide, load)) for load in loads), "loads": len(loads),
        "narrow": sum(bool(re.search(r"(?<!v\d)\.[bu]16$", load)) for load in loads),
    }  # fmt: skip


def examine(target: str, name: str, case: str, facts: dict[str, Any], lds: int, warps: int) -> Row:
    """`given` registers count, if there are more of them: so AMD's compiler keeps to the number of waves asked for."""
    waves = occupancy(TARGETS[target], facts.pop("given", facts["registers"]), lds, warps)
    return Row(target, name, case, lds=lds, warps=warps, waves=waves, **facts)


def compile_case(target: str, case: str, launch: Callable[[], None]) -> list[Row]:
    """A row for each kernel that a case launches, or one with the error or why it is refused."""
    with recorded(target) as launches:
        try:
            launch()
        except Refused as refusal:
            return [Row(target, "refused", case, refused=str(refusal))]
        except Exception as error:  # the compiler's own, of any kind: it is a row, and the others follow
            while error.__cause__:
                error = error.__cause__
            return [Row(target, "not compiled", case, error=f"{type(error).__name__}: {str(error).strip()[-300:]}")]
    rows = []
    for name, kernel in launches:
        text = kernel.asm["ptx" if target.startswith("sm") else "amdgcn"]
        facts = nvidia_facts(kernel) if target.startswith("sm") else amd_facts(text)
        facts["unordered"] = unordered(target, name, text)
        facts["unwaited"] = loads_before_wait(text) if EARLY in case and target in STARTS_EARLY else 0
        rows.append(examine(target, name, case, facts, kernel.metadata.shared, kernel.metadata.num_warps))
    return rows


def execute_cases(target: str, only: str = "") -> list[Row]:
    """The same of the tiny cases of kernels/execute.py, for AMD, and how many instructions their waves executed."""
    import execute

    rows = []
    for case in execute.cases_of(target, only):
        done, launches = execute.execute(target, case)
        for launch in launches:
            warps = launch.threads // TARGETS[target].target.warp_size
            row = examine(target, launch.kernel, case, amd_facts(launch.text), launch.lds, warps)
            rows.append(row._replace(executed=int(launch.counts.sum()), error=done.fault))
    return rows


def unordered(target: str, kernel: str, text: str) -> str:
    """The faults of a kernel's atomic instructions: only those of `MERGES` have one, and it needs waits around it."""
    if kernel in MERGES:
        lacking = fences.missing(target, text)
        return f"merges without {', '.join(lacking)}" if lacking else ""
    count = fences.atomics(text)
    return f"{count} atomic instructions in a kernel that is not in MERGES" if count else ""


ATTENTION = ("paged_attention_kernel", "latent_attention_kernel")
MERGES: tuple[str, ...] = ()  # kernels whose last program merges what the others have stored: none of the package's does
FUSED = ("add_product_kernel", "gated_product_kernel", "heads_kernel")
STREAMS = (*ATTENTION, "merge_splits_kernel", "add_rms_norm_kernel", "silu_and_mul_kernel", "chunk_stats_kernel",
           "threshold_kernel")  # fmt: skip
WIDE = {"sm_90": "wgmma", "sm_100": "tcgen05"}  # the matrix instructions of several warps together


def reason(row: Row) -> str:
    """Why a refusal is expected, if it is."""
    here = [why for (target, case), why in REFUSALS.items() if row.target.startswith(target) and case in row.case]
    return "".join(here)


def faults(row: Row) -> list[str]:
    """The faults of a kernel."""
    found = [row.error] if row.error else []
    if row.executed:  # its shapes are not a model's
        return found
    if row.refused:
        return [] if reason(row) else [row.refused]
    waived = any(row.target.startswith(target) and row.case.startswith(case) for target, case in WAIVERS)
    if row.spills and not waived:
        found.append(f"{row.spills} spills")
    if row.lds > TARGETS[row.target].program_lds:
        found.append(f"{row.lds} bytes of LDS, the limit is {TARGETS[row.target].program_lds}")
    has_matrix = "fp32" not in row.case or row.target in ("gfx90a", "gfx942", "gfx950")
    if row.kernel in (*ATTENTION, *FUSED, "expert_kernel") and has_matrix:
        is_wide = row.kernel != "latent_attention_kernel" and "prefill" in row.case  # 64 rows and more
        wanted = WIDE.get(row.target, "") if is_wide else ""
        if not row.matrix or wanted not in row.matrix:
            found.append(f"no {wanted or 'matrix'} instructions")
    if row.kernel in (*FUSED, "expert_kernel") and not row.wide:  # a bias, or scales, may be narrow
        found.append("no 128-bit loads")
    if row.unordered:
        found.append(row.unordered)
    if row.unwaited:
        found.append(f"{row.unwaited} loads before the wait for the kernel before")
    if row.kernel in STREAMS and (row.narrow or not row.wide):  # the plan's 32-bit numbers are loaded one by one
        found.append(f"no 128-bit loads of rows ({row.narrow} of 16 bits)")
    return found


def print_table(rows: list[Row]) -> None:
    """One line a kernel, the variants of a name below each other."""
    print(f"{'kernel':22} {'case':58} {'VGPR':>4} {'AGPR':>4} {'SGPR':>4} {'spill':>5} {'LDS':>6} {'warps':>5} "
          f"{'waves':>5} {'16 B loads':>10} {'executed':>8} matrix")  # fmt: skip
    for row in sorted(dict.fromkeys(rows), key=lambda row: row.kernel):
        loads, executed = f"{row.wide}/{row.loads}", f"{row.executed:,}" if row.executed else ""
        print(f"{row.kernel:22} {row.case:58} {row.registers:4} {row.accumulators:4} {row.scalars:4} {row.spills:5} "
              f"{row.lds:6} {row.warps:5} {row.waves:5.1f} {loads:>10} {executed:>8} {row.matrix}")  # fmt: skip


def check(target: str, quick: bool = False, executes: bool = False) -> tuple[list[Row], list[str]]:
    """Compile all for one target: (rows, what is wrong)."""
    rows = [row for name, launch in cases(quick) for row in compile_case(target, name, launch)]
    rows += execute_cases(target) if executes and target.startswith("gfx") else []
    return rows, [f"{row.target}, {row.kernel}, {row.case}: {fault}" for row in rows for fault in faults(row)]


def summary(rows: list[Row]) -> dict[str, Any]:
    """The record of a target: how many kernels, what is refused, and the worst case of each kind of kernel."""
    groups, refused = defaultdict(list), [row for row in rows if row.refused]
    for row in rows:
        if not row.refused and not row.executed and not row.error:
            groups[label(row)].append(row)
    kernels = {
        name: {"variants": len(group), "waves": min(row.waves for row in group),
               **{field: max(getattr(row, field) for row in group) for field in ("registers", "spills", "lds")}}
        for name, group in sorted(groups.items())
    }  # fmt: skip
    launches = sum(kernel["variants"] for kernel in kernels.values())
    only = " in float32" * all("fp32" in row.case for row in refused)
    return {"cards": TARGETS[rows[0].target].cards, "launches": launches, "kernels": kernels,
            "refused": {f"latent attention{only}": reason(refused[0])} if refused else {},
            "faults": sum(bool(faults(row)) for row in rows)}  # fmt: skip


def label(row: Row) -> str:
    """The kernel, in what phase, and what makes it another one: the size of heads, a window or sinks, float32."""
    name, found = row.kernel.removesuffix("_kernel").replace("_", " "), re.match(r"(decode|prefill)( \d+)?", row.case)
    if found and name in ("paged attention", "latent attention", "expert"):
        name += f", {found[1]}" + f", heads of{found[2]}" * bool(found[2])
        name += ", window or sinks" * ("window" in row.case)
    return name + ", float32" * ("fp32" in row.case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="only the variants most likely to fail")
    parser.add_argument("--execute", action="store_true", help="on AMD, count what tiny cases execute")
    arguments = parser.parse_args()
    everything, wrong, targets, start = [], [], arguments.target or [*TARGETS], time.perf_counter()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(check, target, arguments.quick, arguments.execute) for target in targets]
        for target, task in zip(targets, tasks, strict=True):
            rows, found = task.result()
            print(f"\n{target}, Triton {triton.__version__}: {len(rows)} kernels, {time.perf_counter() - start:.0f} s")
            print_table(rows)
            everything, wrong = everything + rows, wrong + found
            if not arguments.quick:
                machines.record(target, "compiled", summary(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row._asdict() for row in everything], indent=1) + "\n")
    print("\n" + ("\n".join(["FAILED", *wrong]) if wrong else "no faults"))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
