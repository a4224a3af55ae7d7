"""The limits of the device, and each kernel beside them and beside torch's best for the same work."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from timing import Bench, Call, ratio, show, time_limit
from torch import Tensor

from atom_mini.attention import AttentionMetaData
from atom_mini.families.grouped import Stack, grouped_experts
from atom_mini.families.latent_kernel import LatentOps
from atom_mini.gpu import tile_configs, triton_attention
from atom_mini.gpu.sampling_kernels import sample
from atom_mini.gpu.triton_ops import TritonOps
from atom_mini.models import TorchOps

BLOCK_SIZE = 16  # tokens, the engine's default
DECODE_AIM = 0.80, 0.90  # least and moonshot, of the read bandwidth, at batch 256 and context 1024
SWEEP = {
    True: {"key_bytes": (2**13, 2**14, 2**15), "warps": (2, 4, 8), "stages": (1, 2, 3, 4), "programs": (2, 3, 4, 6, 8),
           "split": (256, 512, 1024)},
    False: {"rows": (64, 128), "key_bytes": (2**13, 2**14, 2**15), "warps": (4, 8), "stages": (1, 2, 3, 4),
            "programs": (1, 2), "split": (256,)},
}  # fmt: skip
DRY_SWEEP = {"key_bytes": (2**11,), "warps": (4,), "stages": (1, 2), "programs": (2,), "split": (256, 16)}


class Heads(NamedTuple):
    """The sizes of a model that its small kernels see."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def scale(self) -> float:
        return self.dim**-0.5


QWEN, LLAMA = (
    Heads("Qwen3-0.6B", 16, 8, 128, 1024, 3072, 151936),
    Heads("Llama-3.1-8B", 32, 8, 128, 4096, 14336, 128256),
)
TOY = Heads("toy", 4, 2, 16, 32, 48, 500)  # for dry runs


class Mixture(NamedTuple):
    """The sizes of a layer with experts."""

    name: str
    experts: int
    choices: int
    hidden: int
    inner: int
    is_packed: bool = False  # in four bits, and times bfloat16

    @property
    def expert_bytes(self) -> int:
        return int(3 * self.hidden * self.inner * (4.25 if self.is_packed else 16) / 8)


QWEN_MOE = Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768)
GPT = Mixture("gpt-oss-20b", 32, 4, 2880, 2880, True)
TOY_MOE = Mixture("toy", 6, 2, 64, 32)


def limits(bench: Bench, results: dict[str, Any]) -> None:
    """Copy and read bandwidth, matrix rate and launch latency of this device, in this run."""
    size = 2**12 if bench.dry else min(2**32, torch.cuda.mem_get_info(bench.device)[0] // 8)
    source = torch.empty(size // 4, dtype=torch.int32, device=bench.device).random_()
    target = source.clone()
    ways: tuple[Call, ...] = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    bench.bandwidth = 2 * source.nbytes / min(bench.seconds([way], best=True) for way in ways)
    bench.read_bandwidth = source.nbytes / bench.seconds([lambda: source.amax()], best=True)
    n = 64 if bench.dry else 8192
    a, b = bench.random(n, n), bench.random(n, n)
    bench.matrix_rate = 2 * n**3 / bench.seconds([lambda: a @ b] * bench.number(10), best=True)
    one = torch.zeros(1, device=bench.device)
    launch = bench.seconds([lambda: one.add_(1)] * bench.number(200))
    results |= {"bandwidth": bench.bandwidth, "read_bandwidth": bench.read_bandwidth, "matrix_rate": bench.matrix_rate,
                "launch_seconds": launch}  # fmt: skip
    rows = [["copy, GB/s", bench.bandwidth / 1e9], ["read, GB/s", bench.read_bandwidth / 1e9],
            [f"matrix product {n}^3, TFLOP/s", bench.matrix_rate / 1e12],
            ["smallest kernel in a graph, us", launch * 1e6]]  # fmt: skip
    show("Limits of this device", ["", "measured"], rows)


class PagedCase:
    """A step's attention on a pool of scattered blocks, as many different steps as it takes to keep the caches cold."""

    def __init__(self, bench: Bench, heads: Heads, query_lens: list[int], context: int) -> None:
        self.bench, self.heads, self.batch, self.context = bench, heads, len(query_lens), context
        self.lens = np.array(query_lens, dtype=np.int32), np.full(self.batch, context, dtype=np.int32)
        self.bytes = 2 * self.batch * context * heads.kv_heads * heads.dim * bench.dtype.itemsize
        self.flops = 4 * heads.heads * heads.dim * sum(n * (2 * context - n + 1) // 2 for n in query_lens)
        width = -(-context // BLOCK_SIZE)
        copies = bench.copies(self.bytes)
        blocks = np.random.default_rng(0).permutation(copies * self.batch * width).astype(np.int32)
        self.tables = blocks.reshape(copies, self.batch, width)
        self.pool = bench.random(2, blocks.size, heads.kv_heads, BLOCK_SIZE, heads.dim)
        self.q = bench.random(sum(query_lens), heads.heads, heads.dim)

    def calls(self) -> list[Call]:
        """One call of our kernel per data set."""
        heads, q, pool = self.heads, self.q, self.pool
        attention = TritonOps(self.bench.device, heads.heads, heads.kv_heads, heads.dim, self.bench.dtype)
        plans = [attention.plan(*self.lens, table) for table in self.tables]
        for plan in plans:
            plan.data = torch.from_numpy(plan.data).to(self.bench.device)
        return [partial(attention, q, pool, plan, heads.scale) for plan in plans]

    def seconds(self, num_calls: int) -> float:
        """Seconds of one step's attention."""
        return self.bench.seconds(at_least(self.calls(), self.bench.number(num_calls)))


def at_least(calls: list[Call], number: int) -> list[Call]:
    """`calls`, repeated in their order until there are `number`."""
    return list(itertools.islice(itertools.cycle(calls), max(number, len(calls))))


def unpaged_decode(case: PagedCase) -> float:
    """Seconds of torch's fused attention on K/V that lie contiguously: what paging may cost at best nothing over."""
    bench, heads, copies = case.bench, case.heads, len(case.tables)
    shape = (case.batch, heads.kv_heads, case.context, heads.dim)
    pairs = [(bench.random(*shape), bench.random(*shape)) for _ in range(copies)]
    q = case.q.view(case.batch, heads.kv_heads, -1, heads.dim)  # a group's heads as rows: they share their keys

    attend = partial(F.scaled_dot_product_attention, scale=heads.scale)
    return bench.seconds(at_least([partial(attend, q, k, v) for k, v in pairs], bench.number(20)))


def unpaged_prefill(case: PagedCase) -> float:
    """Seconds of torch's fused causal attention on contiguous K/V; each head's own copy of K/V is not timed."""
    heads, bench = case.heads, case.bench
    q, k, v = (bench.random(case.batch, heads.heads, case.context, heads.dim) for _ in range(3))
    call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=heads.scale)
    return bench.seconds([call] * bench.number(4))


def flex_decode(case: PagedCase) -> float | str:
    """Seconds of FlexAttention on contiguous K/V, or why there is none: it does not work everywhere."""
    from torch.nn.attention.flex_attention import flex_attention

    bench, heads = case.bench, case.heads
    try:
        with time_limit(20):
            q = case.q.view(case.batch, heads.heads, 1, heads.dim)
            k, v = (bench.random(case.batch, heads.kv_heads, case.context, heads.dim) for _ in range(2))
            flex: Any = flex_attention if bench.dry else torch.compile(flex_attention, dynamic=False)
            return bench.seconds([lambda: flex(q, k, v, scale=heads.scale, enable_gqa=True)] * bench.number(20))
    except Exception as error:  # a failure of another project's compiler is not ours
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def decode_attention(bench: Bench, results: dict[str, Any]) -> None:
    """Decode attention by batch and context: GB/s, as a fraction of the copy bandwidth, beside torch."""
    shapes = list(itertools.product((1, 32, 256), (512, 1024, 8192))) if not bench.dry else [(2, 40), (1, 300)]
    rows = []
    for heads in (TOY,) if bench.dry else (QWEN, LLAMA):
        for batch, context in shapes:
            name, row = f"{heads.name} batch {batch} context {context}", dict[str, Any]()
            results[name] = row
            with bench.guarded(f"decode attention, {name}", row):
                decode_attention_row(bench, heads, batch, context, row)
            has_aim = (batch, context) in ((256, 1024), (2, 40))
            aim = bench.aim(f"decode attention, {name}, of read", row.get("of_read"), *DECODE_AIM) if has_aim else ""
            kinds = ("microseconds", "GB_per_second", "of_copy", "of_read", "sdpa_microseconds", "speed_to_sdpa")
            rows.append([name, *[row.get(kind) for kind in kinds], row.get("skipped") or aim])
    show("Decode attention", ["", "us", "GB/s", "of copy", "of read", "unpaged SDPA us", "x SDPA", ""], rows)


def decode_attention_row(bench: Bench, heads: Heads, batch: int, context: int, row: dict[str, Any]) -> None:
    """Our kernel and torch's on one shape, into `row`."""
    nbytes = 2 * batch * context * heads.kv_heads * heads.dim * bench.dtype.itemsize
    if not bench.fits(2.2 * bench.copies(nbytes) * nbytes):
        row["skipped"] = "does not fit"
        return
    case = PagedCase(bench, heads, [1] * batch, context)
    seconds = case.seconds(20)
    sdpa = unpaged_decode(case)
    row |= {
        "microseconds": seconds * 1e6, "GB_per_second": nbytes / seconds / 1e9,
        "of_copy": ratio(nbytes / seconds, bench.bandwidth), "of_read": ratio(nbytes / seconds, bench.read_bandwidth),
        "sdpa_microseconds": sdpa * 1e6, "speed_to_sdpa": sdpa / seconds,
    }  # fmt: skip
    if (batch, context) in ((32, 1024), (2, 40)):
        flex = flex_decode(case)
        row["flex_microseconds"] = flex if isinstance(flex, str) else flex * 1e6
        print(f"FlexAttention, {heads.name} batch {batch} context {context}, us: {row['flex_microseconds']}")


def prefill_attention(bench: Bench, results: dict[str, Any]) -> None:
    """Causal prefill attention: TFLOP/s, as a fraction of the matrix rate, beside torch."""
    rows = []
    for heads in (TOY,) if bench.dry else (QWEN, LLAMA):
        for batch, length in ((1, 40), (2, 20)) if bench.dry else ((1, 16384), (16, 1024)):
            name, row = f"{heads.name} {batch} x {length}", dict[str, Any]()
            results[name] = row
            with bench.guarded(f"prefill attention, {name}", row):
                case = PagedCase(bench, heads, [length] * batch, length)
                seconds, sdpa = case.seconds(4), unpaged_prefill(case)
                row |= {
                    "milliseconds": seconds * 1e3, "TFLOP_per_second": case.flops / seconds / 1e12,
                    "of_matrix_rate": ratio(case.flops / seconds, bench.matrix_rate),
                    "sdpa_milliseconds": sdpa * 1e3, "speed_to_sdpa": sdpa / seconds,
                }  # fmt: skip
            kinds = ("milliseconds", "TFLOP_per_second", "of_matrix_rate", "sdpa_milliseconds", "speed_to_sdpa")
            rows.append([name, *[row.get(kind) for kind in kinds]])
    show("Prefill attention, causal", ["", "ms", "TFLOP/s", "of matrix rate", "SDPA ms", "x SDPA"], rows)


def latent_decode(bench: Bench, results: dict[str, Any]) -> None:
    """Decode attention over rows of latents that all heads share, as a fraction of its roof: each row read once at the
    copy's bandwidth, or its products at the matrix rate, whichever takes longer."""
    sizes = [(4, 32, 16)] if bench.dry else [(heads, 512, 64) for heads in (16, 20, 128)]
    shapes = [(2, 40), (1, 300)] if bench.dry else list(itertools.product((1, 32, 256), (1024, 8192)))
    rows = []
    for (heads, latent, rope), (batch, context) in itertools.product(sizes, shapes):
        name, row = f"{heads} heads batch {batch} context {context}", dict[str, Any]()
        results[name] = row
        with bench.guarded(f"latent decode, {name}", row):
            latent_decode_row(bench, LatentOps(bench.device, heads, latent, rope, bench.dtype), batch, context, row)
        kinds = ("microseconds", "GB_per_second", "of_copy", "TFLOP_per_second", "of_roof")
        rows.append([name, *[row.get(kind) for kind in kinds], row.get("skipped") or ""])
    show("Decode attention over latents", ["", "us", "GB/s", "of copy", "TFLOP/s", "of roof", ""], rows)


def latent_decode_row(bench: Bench, ops: LatentOps, batch: int, context: int, row: dict[str, Any]) -> None:
    """One shape, into `row`."""
    size, width = ops.dim + ops.rope, -(-context // BLOCK_SIZE)
    nbytes, flops = batch * context * size * bench.dtype.itemsize, 2 * batch * context * ops.heads * (size + ops.dim)
    copies = bench.copies(nbytes)
    if not bench.fits(1.2 * copies * nbytes):
        row["skipped"] = "does not fit"
        return
    tables = np.random.default_rng(0).permutation(copies * batch * width).astype(np.int32).reshape(copies, batch, width)
    pool = bench.random(1, tables.size, 1, BLOCK_SIZE, size).expand(2, -1, -1, -1, -1)
    q, lens, calls = bench.random(batch, ops.heads, size), np.full(batch, context, dtype=np.int32), list[Call]()
    for table in tables:
        plan = ops.plan(np.ones(batch, dtype=np.int32), lens, table)
        plan.data = torch.from_numpy(plan.data).to(bench.device)
        meta = AttentionMetaData(plan.data, plan.data, plan.data, [], [], plan)  # the kernel reads the plan alone
        calls.append(partial(ops.attend, q, pool, meta, size**-0.5))
    seconds = bench.seconds(at_least(calls, bench.number(20)))
    roof = max(nbytes / bench.bandwidth, flops / bench.matrix_rate) if bench.bandwidth and bench.matrix_rate else None
    row |= {
        "microseconds": seconds * 1e6, "GB_per_second": nbytes / seconds / 1e9,
        "of_copy": ratio(nbytes / seconds, bench.bandwidth), "TFLOP_per_second": flops / seconds / 1e12,
        "of_roof": roof and roof / seconds,
    }  # fmt: skip


Pair = tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Any, ...]], int]  # ours, torch's, data, bytes


def norm_pair(bench: Bench, heads: Heads, ours: TritonOps, twin: TorchOps, tokens: int) -> Pair:
    """The residual's addition and the norm after it: two tensors read, two written."""
    size, weight = heads.hidden, bench.random(heads.hidden)

    def data() -> tuple[Tensor, Tensor]:
        return bench.random(tokens, size), bench.random(tokens, size)

    return (lambda x, r: ours.add_rms_norm(x, r, weight, 1e-6), lambda x, r: twin.add_rms_norm(x, r, weight, 1e-6),
            data, 4 * tokens * size * bench.dtype.itemsize)  # fmt: skip


def silu_pair(bench: Bench, heads: Heads, ours: TritonOps, twin: TorchOps, tokens: int) -> Pair:
    """The activation of the MLP: two thirds read, one written."""
    size = heads.intermediate
    return (ours.silu_and_mul, twin.silu_and_mul, lambda: (bench.random(tokens, 2 * size),),
            3 * tokens * size * bench.dtype.itemsize)  # fmt: skip


def rotate_pair(bench: Bench, heads: Heads, ours: TritonOps, twin: TorchOps, tokens: int) -> Pair:
    """Norm and rotation of q and k, K/V to their slots; the pool's random slots are the scattered writes."""
    dim, all_heads = heads.dim, heads.heads + 2 * heads.kv_heads
    norm = (bench.random(dim), bench.random(dim)) if heads is not LLAMA else None
    blocks = -(-tokens // BLOCK_SIZE) + 1
    slots = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(bench.device)

    def data() -> tuple[Tensor, ...]:
        pool = bench.random(2, blocks, heads.kv_heads, BLOCK_SIZE, dim)
        angles = bench.random(2, tokens, 1, dim)
        return bench.random(tokens, all_heads, dim), angles[0], angles[1], pool

    def call(ops: TorchOps) -> Callable[..., Any]:
        return lambda qkv, cos, sin, pool: ops.rotate_and_store(qkv, norm, 1e-6, cos, sin, pool, slots)

    return call(ours), call(twin), data, 2 * tokens * (all_heads + 1) * dim * bench.dtype.itemsize


def sample_pair(bench: Bench, heads: Heads, ours: TritonOps, twin: TorchOps, rows: int) -> Pair:
    """Temperature sampling, against softmax and an exponential race; at best the logits are read once.

    The race is what torch.multinomial does for one draw, without its check, which waits for the device and so cannot
    be part of a graph.
    """
    temperature = torch.full((rows,), 0.6, device=bench.device)
    u = torch.rand(rows, device=bench.device)

    def plain(logits: Tensor) -> Tensor:
        probs = (logits.float() / temperature[:, None]).softmax(-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    return (lambda logits: sample(logits, temperature, u), plain, lambda: (bench.random(rows, heads.vocab),),
            rows * heads.vocab * bench.dtype.itemsize)  # fmt: skip


def small_kernels(bench: Bench, results: dict[str, Any]) -> None:
    """What lies between the matrix products: GB/s, as a fraction of the copy bandwidth, beside the torch twin."""
    pairs = {
        "add_rms_norm": norm_pair,
        "rotate_and_store": rotate_pair,
        "silu_and_mul": silu_pair,
        "sample": sample_pair,
    }
    rows = []
    for heads in (TOY,) if bench.dry else (QWEN, LLAMA):
        ours = TritonOps(bench.device, heads.heads, heads.kv_heads, heads.dim, bench.dtype)
        for (kind, make), tokens in itertools.product(pairs.items(), (1, 3) if bench.dry else (1, 256, 16384)):
            if kind == "sample" and (tokens > 256 or heads is LLAMA):
                continue
            name, row = f"{heads.name} {kind} {tokens}", dict[str, Any]()
            results[name] = row
            with bench.guarded(name, row):
                row |= compare(bench, make(bench, heads, ours, TorchOps(), tokens))
            kinds = ("microseconds", "GB_per_second", "of_copy", "torch_microseconds", "speed_to_torch")
            rows.append([name, *[row.get(kind) for kind in kinds]])
    show("Small kernels, by tokens", ["", "us", "GB/s", "of copy", "torch us", "x torch"], rows)


def compare(bench: Bench, pair: Pair) -> dict[str, Any]:
    """Ours and torch's on the same data, rotated so that none of it waits in a cache."""
    ours, twin, make_data, nbytes = pair
    sets = [make_data() for _ in range(bench.copies(nbytes))]
    number = bench.number(20 if nbytes > 2**24 else 64)
    seconds, plain = (bench.seconds(at_least([partial(f, *data) for data in sets], number)) for f in (ours, twin))
    return {
        "microseconds": seconds * 1e6, "GB_per_second": nbytes / seconds / 1e9,
        "of_copy": ratio(nbytes / seconds, bench.bandwidth), "torch_microseconds": plain * 1e6,
        "speed_to_torch": plain / seconds,
    }  # fmt: skip


def expert_call(bench: Bench, shape: Mixture, batch: int) -> tuple[Call, int]:
    """The product with the chosen experts of a layer of its own, and how many of them are hit."""
    E, device = shape.experts, bench.device
    dtype = torch.bfloat16 if shape.is_packed else bench.dtype

    def stack(rows: int, size: int) -> Stack:
        if not shape.is_packed:
            return bench.random(E, rows, size).mul_(size**-0.5), None, None
        blocks = torch.randint(256, (E, rows, size // 2), dtype=torch.uint8, device=device)
        return blocks, torch.full((E, rows, size // 32), 120, dtype=torch.uint8, device=device), None

    ids = torch.rand(batch, E).topk(shape.choices).indices
    x, weights = bench.random(batch, shape.hidden).to(dtype), torch.rand(batch, shape.choices, device=device)
    layer = stack(2 * shape.inner, shape.hidden), stack(shape.hidden, shape.inner)
    return partial(grouped_experts, x, ids.to(device), weights, *layer), len(ids.unique())


def experts(bench: Bench, results: dict[str, Any]) -> None:
    """The product with the chosen experts: its time, beside that for reading those that were hit and no others."""
    shapes = [*((QWEN_MOE, batch) for batch in (8, 32, 64)), *((GPT, batch) for batch in (8, 64))]
    rows = []
    for shape, batch in [(TOY_MOE, 3), (TOY_MOE._replace(is_packed=True), 3)] if bench.dry else shapes:
        name, row = f"{shape.name}{', packed' * shape.is_packed} batch {batch}", dict[str, Any]()
        results[name] = row
        with bench.guarded(f"experts, {name}", row):
            number = bench.copies(min(shape.experts, batch * shape.choices) * shape.expert_bytes)
            calls, hit = zip(*(expert_call(bench, shape, batch) for _ in range(number)), strict=True)
            seconds = bench.seconds(at_least(list(calls), bench.number(20)))
            nbytes = sum(hit) / number * shape.expert_bytes
            row |= {
                "microseconds": seconds * 1e6, "experts_hit": sum(hit) / number,
                "GB_per_second": nbytes / seconds / 1e9, "of_copy": ratio(nbytes / seconds, bench.bandwidth),
            }  # fmt: skip
        rows.append([name, *[row.get(kind) for kind in ("microseconds", "experts_hit", "GB_per_second", "of_copy")]])
    show("Chosen experts of a layer", ["", "us", "experts hit", "GB/s", "of copy"], rows)


def kernels(bench: Bench, results: dict[str, Any]) -> None:
    """All of the above."""
    for part in (decode_attention, prefill_attention, latent_decode, small_kernels, experts):
        with bench.guarded(part.__name__, results.setdefault(part.__name__, {})):
            part(bench, results[part.__name__])


@contextmanager
def launched_as(bench: Bench, is_decode: bool, options: dict[str, int]) -> Iterator[None]:
    """The attention kernel with another `TileConfig` and another `SPLIT_KEYS` in this block."""
    arch, split = tile_configs.architecture(bench.device), triton_attention.SPLIT_KEYS
    old = tile_configs.TILE_CONFIGS[arch]
    changed = old[0 if is_decode else 1]._replace(**{k: v for k, v in options.items() if k != "split"})
    try:
        tile_configs.TILE_CONFIGS[arch] = (changed, old[1]) if is_decode else (old[0], changed)
        triton_attention.SPLIT_KEYS = options["split"]
        yield
    finally:
        tile_configs.TILE_CONFIGS[arch], triton_attention.SPLIT_KEYS = old, split


def sweep(bench: Bench, results: dict[str, Any], limit: float = float("inf")) -> None:
    """The best configurations of attention by shape, for `TILE_CONFIGS` and `SPLIT_KEYS`; thousands are tried, for minutes.

    `limit`: seconds in all. Each shape gets an equal share of what is left; what is not tried is counted.
    """
    shapes = {True: [(1, 1024), (1, 8192), (32, 1024), (256, 1024)], False: [(1, 16384), (16, 1024)]}
    if bench.dry:
        shapes = {True: [(1, 40)], False: [(1, 40)]}
    rows, end = [], time.perf_counter() + limit
    models = (TOY,) if bench.dry else (QWEN, LLAMA)
    left = len(models) * sum(map(len, shapes.values()))
    for heads, is_decode in itertools.product(models, (True, False)):
        for batch, context in shapes[is_decode]:
            case = PagedCase(bench, heads, [1 if is_decode else context] * batch, context)
            tried = sweep_case(bench, case, is_decode, (end - time.perf_counter()) / left)
            left -= 1
            name = f"{heads.name} {'decode' if is_decode else 'prefill'} {batch} x {context}"
            results[name] = tried[:10]
            rows += [[name, us, options] for us, options in tried[:3]]
            del case
            bench.release()
    show("Best launches", ["", "us", "options"], rows)


def sweep_case(bench: Bench, case: PagedCase, is_decode: bool, limit: float) -> list[tuple[float, str]]:
    """(microseconds, options) of every launch that compiles, the fastest first; the present one is among them.

    After `limit` seconds no other is tried. They are tried in an order that is shuffled, always the same, so that those
    tried in time are of all kinds.
    """
    grid = DRY_SWEEP if bench.dry else SWEEP[is_decode]
    if tile_configs.architecture(bench.device).startswith("gfx"):
        grid = grid | {"extra": (tile_configs.amd(0), tile_configs.amd(2))}
    tried, start = [(case.seconds(20 if is_decode else 4) * 1e6, "as it is")], time.perf_counter()
    choices = [*itertools.product(*grid.values())]
    for values in random.Random(0).sample(choices, len(choices)):
        if time.perf_counter() - start > limit:
            break
        options: dict[str, int] = dict(zip(grid, values, strict=True))
        with launched_as(bench, is_decode, options):
            try:
                tried.append((case.seconds(20 if is_decode else 4) * 1e6, str(options)))
            except Exception as error:  # too much shared memory or too many registers: not a launch for this device
                tried.append((float("inf"), f"{options}: {type(error).__name__}"))
    print(f"{len(tried)} of {len(choices) + 1} launches in {time.perf_counter() - start:.0f} s", flush=True)
    return [entry for entry in sorted(tried) if entry[0] < float("inf")]
