"""Attention through a block table against two oracles, with every slot that nobody may read poisoned."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from show import reference_attention
from torch import Tensor

from atom_mini.attention import AttentionMetaData, batched_decode, looped_attention, paged_attention, store_kv_cache
from atom_mini.config import SamplingParams
from atom_mini.cpu.decode import CpuOps, decode_attention
from atom_mini.model_runner import locate
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType

torch.set_num_threads(1)  # products this small are done before a second thread is awake
BLOCK_SIZES = [1, 16, 32, 256]
HEADS = [(2, 2), (4, 2), (6, 2), (3, 1), (8, 1)]  # query and K/V heads: ratios 1, 2, 3, 3, 8
SHAPES = [(size, heads, 64) for size in BLOCK_SIZES for heads in HEADS]
SHAPES += [(size, (6, 2), head_dim) for size in BLOCK_SIZES for head_dim in (16, 96, 128)]
Lens = list[tuple[int, int]]  # (queries, context with them) of each sequence


def make_batch(lens: Lens, block_size: int, seed: int, spare: int = 3) -> tuple[AttentionMetaData, int]:
    """Random, scattered, disjoint block tables; entries past a sequence's own blocks name the pool's last block."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // block_size) for _, length in lens]
    num_blocks = sum(needed) + spare
    ids = rng.permutation(num_blocks - 1)  # the last one stays nobody's
    tables = np.full((len(lens), max(needed) + 1), num_blocks - 1, dtype=np.int32)
    start = 0
    for row, n in enumerate(needed):
        tables[row, :n] = ids[start : start + n]
        start += n
    slots = [int(tables[row, p // block_size]) * block_size + p % block_size
             for row, (n, length) in enumerate(lens) for p in range(length - n, length)]  # fmt: skip
    queries = [n for n, _ in lens]
    meta = AttentionMetaData(
        context_lens=torch.tensor([length for _, length in lens], dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens=queries,
        lens=[length for _, length in lens],
    )
    return meta, num_blocks


def fill(
    meta: AttentionMetaData, num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """(a pool that holds NaN but where a sequence's tokens are, each sequence's K and V [heads, length, D])."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((2, num_blocks, heads, block_size, head_dim), float("nan"), dtype=dtype)
    plain = []
    for row, length in enumerate(meta.lens):
        kv = torch.randn(2, heads, length, head_dim, generator=generator).to(dtype)
        for position in range(length):
            block = int(meta.block_tables[row, position // block_size])
            pool[:, block, :, position % block_size] = kv[:, :, position]
        plain.append((kv[0], kv[1]))
    return pool, plain


def cpu_attention(q: Tensor, pool: Tensor, meta: AttentionMetaData, scale: float) -> Tensor:
    """The engine's attention on a CPU: `CpuOps` takes the sparse table for float32 decodes, and only for them."""
    meta = replace(meta, plan=None)
    out = CpuOps().attend(q, pool, meta, scale)
    is_sparse = max(meta.query_lens) == 1 and q.dtype == torch.float32
    assert (meta.plan is not None) == is_sparse
    return out


BOTH = (paged_attention, cpu_attention)


def contiguous_attention(q: Tensor, plain: list[tuple[Tensor, Tensor]], lens: Lens, scale: float) -> Tensor:
    """What torch makes of each sequence when K and V are simply there, in float64."""
    outs, start = [], 0
    for (n, length), (k, v) in zip(lens, plain, strict=True):
        group = q.shape[1] // len(k)
        qs = q[start : start + n].transpose(0, 1).double()
        ks, vs = k.repeat_interleave(group, 0).double(), v.repeat_interleave(group, 0).double()
        seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        outs.append(F.scaled_dot_product_attention(qs, ks, vs, attn_mask=seen, scale=scale).transpose(0, 1))
        start += n
    return torch.cat(outs)


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    return ((ours.double() - wanted).norm() / wanted.norm()).item()


def edge_lens(block_size: int) -> Lens:
    """Decodes, whole prompts, chunks and the tails of chunks, around the borders of blocks."""
    edges = sorted({1, 2, max(1, block_size - 1), block_size, block_size + 1, min(2 * block_size, 300), 17, 300})
    lens = [(n, length) for length in edges for n in {1, length, max(1, length - block_size), max(1, length // 2)}]
    rng = random.Random(block_size)
    lens += [(rng.randint(1, length), length) for length in (rng.randint(1, 300) for _ in range(6))]
    rng.shuffle(lens)
    return lens


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), SHAPES, ids=str)
def test_paged_attention(
    block_size: int, heads: tuple[int, int], head_dim: int, kind: str, dtype: torch.dtype, limit: float
) -> None:
    """All implementations equal torch's on contiguous K and V; one NaN read would spoil the whole norm."""
    lens = edge_lens(block_size)
    if kind == "decode":
        lens = [(1, length) for _, length in lens]
    meta, num_blocks = make_batch(lens, block_size, seed=head_dim)
    pool, plain = fill(meta, num_blocks, block_size, heads[1], head_dim, dtype, seed=1)
    q = torch.randn(sum(meta.query_lens), heads[0], head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    scale = head_dim**-0.5
    wanted = contiguous_attention(q, plain, lens, scale)
    for function in (reference_attention, *BOTH):
        out = function(q, pool, meta, scale)
        assert out.shape == q.shape and out.dtype == dtype
        assert relative_error(out, wanted) < limit, function.__name__
        ends = itertools.accumulate(meta.query_lens, initial=0)
        for start, end in itertools.pairwise(ends):  # a short sequence must not hide among long ones
            assert relative_error(out[start:end], wanted[start:end]) < 2 * limit, (function.__name__, end - start)


@pytest.mark.parametrize("function", [reference_attention, *BOTH, decode_attention])
def test_poison_is_seen(function: object) -> None:
    """The test above can fail: one token too many, one wrong block, one scale off by 1 %."""
    lens = [(1, 20), (1, 16), (1, 5)] if function is decode_attention else [(3, 20), (1, 16), (5, 5)]
    meta, num_blocks = make_batch(lens, 16, seed=0)
    pool, plain = fill(meta, num_blocks, 16, 2, 16, torch.float32, seed=1)
    q = torch.randn(sum(meta.query_lens), 4, 16)
    wanted = contiguous_attention(q, plain, lens, 0.25)
    assert relative_error(function(q, pool, replace(meta), 0.2525), wanted) > 1e-4  # type: ignore[operator]
    longer = replace(meta, lens=[n + 1 for n in meta.lens], context_lens=meta.context_lens + 1)
    assert function(q, pool, longer, 0.25).isnan().any()  # type: ignore[operator]
    other = meta.block_tables.clone()
    other[0, 0], other[1, 0] = meta.block_tables[1, 0], meta.block_tables[0, 0]
    swapped = replace(meta, block_tables=other)
    assert relative_error(function(q, pool, swapped, 0.25), wanted) > 0.1  # type: ignore[operator]


@pytest.mark.parametrize("attend", BOTH)
def test_shared_blocks(attend: Callable[..., Tensor]) -> None:
    """Two sequences over the same first blocks (a prefix hit) read the same numbers."""
    meta, num_blocks = make_batch([(4, 36), (4, 36)], 16, seed=3)
    meta.block_tables[1, :2] = meta.block_tables[0, :2]
    pool, _ = fill(meta, num_blocks, 16, 2, 16, torch.float32, seed=1)  # the second one's prefix is in both tables now
    pool[:, meta.block_tables[1, 2]] = pool[:, meta.block_tables[0, 2]]
    q = torch.randn(4, 6, 16).repeat(2, 1, 1)
    out = attend(q, pool, meta, 0.25)
    assert torch.equal(out[:4], out[4:]) and not out.isnan().any()
    decodes = replace(meta, query_lens=[1, 1])
    out = attend(q[3::4], pool, decodes, 0.25)
    assert torch.equal(out[0], out[1]) and not out.isnan().any()


DECODES: Lens = [(1, 40), (1, 1), (1, 300), (1, 16), (1, 17), (1, 133)]
PREFILLS: Lens = [(7, 7), (5, 40), (33, 70), (2, 300), (16, 32), (16, 16)]


def pick(meta: AttentionMetaData, order: list[int]) -> AttentionMetaData:
    """The metadata of some of the sequences, in that order."""
    queries = [meta.query_lens[i] for i in order]
    width = -(-max(meta.lens[i] for i in order) // 16)
    return AttentionMetaData(
        context_lens=meta.context_lens[order],
        block_tables=meta.block_tables[order, :width].contiguous(),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        query_lens=queries,
        lens=[meta.lens[i] for i in order],
    )


def test_a_batched_decode_reads_nothing_behind_an_end() -> None:
    """Neither the slots of the pool there, which hold NaN, nor the entries of the table; in pieces, too."""
    lens = DECODES * 4  # 24 rectangles of 304 slots: two pieces
    meta, num_blocks = make_batch(lens, 16, seed=5)
    pool, plain = fill(meta, num_blocks, 16, 2, 64, torch.float32, seed=1)
    for row, length in enumerate(meta.lens):
        meta.block_tables[row, -(-length // 16) :] = 10**6
    q = torch.randn(len(lens), 6, 64, generator=torch.Generator().manual_seed(2))
    assert relative_error(batched_decode(q, pool, meta, 0.125), contiguous_attention(q, plain, lens, 0.125)) < 1e-6


def test_a_decode_of_very_different_lengths_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rectangle as long as the longest would be copied for each of the others."""
    monkeypatch.setattr("atom_mini.attention.batched_decode", lambda *args: "batched")
    monkeypatch.setattr("atom_mini.attention.looped_attention", lambda *args: "looped")
    for lens, path in (([9], "looped"), ([9, 9], "batched"), ([9, 4], "batched"), ([40, 1, 1], "looped")):
        meta, _ = make_batch([(1, n) for n in lens], 16, seed=5)
        assert paged_attention(torch.empty(0), torch.empty(0), meta, 1.0) == path, lens


OF_DECODES = [(DECODES, attend) for attend in (*BOTH, looped_attention, batched_decode)]
OF_PREFILLS = [(PREFILLS, attend) for attend in (*BOTH, looped_attention)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("lens", "attend"), OF_DECODES + OF_PREFILLS)
def test_alone_or_among_others(lens: Lens, dtype: torch.dtype, attend: Callable[..., Tensor]) -> None:
    """A sequence's rows do not change by a bit with its company, its place in the batch, or its place in the pool;
    in a batched decode, whose rectangle is as wide as the longest, they may be rounded otherwise."""
    is_sparse = attend is cpu_attention and dtype == torch.float32
    is_batched = lens is DECODES and not is_sparse and attend is not looped_attention
    error = 0 if not is_batched else 8e-3 if dtype == torch.bfloat16 else 1e-6

    def is_same(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().max() <= error)

    meta, num_blocks = make_batch(lens, 16, seed=5)
    pool, plain = fill(meta, num_blocks, 16, 2, 64, dtype, seed=1)
    q = torch.randn(sum(meta.query_lens), 6, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    together, rows = attend(q, pool, meta, 0.125).split(meta.query_lens), q.split(meta.query_lens)
    for orders in [*([i] for i in range(len(lens))), [3, 1], [5, 4, 3, 2, 1, 0], [0, 2, 4]]:
        some = pick(meta, orders)
        out = attend(torch.cat([rows[i] for i in orders]), pool, some, 0.125).split(some.query_lens)
        assert all(is_same(out[at], together[i]) for at, i in enumerate(orders)), orders
    for i, pair in enumerate(lens):  # elsewhere in another pool
        alone, few_blocks = make_batch([pair], 16, seed=100 + i)
        own = torch.full((2, few_blocks, 2, 16, 64), float("nan"), dtype=dtype)
        for position in range(pair[1]):
            block = int(alone.block_tables[0, position // 16])
            own[:, block, :, position % 16] = torch.stack([t[:, position] for t in plain[i]])
        assert is_same(attend(rows[i].clone(), own, alone, 0.125), together[i]), pair


def test_one_query_among_chunks() -> None:
    """A prompt's last token, scheduled beside others' chunks, takes the path of chunks: the same up to rounding."""
    meta, num_blocks = make_batch([*DECODES, *PREFILLS], 16, seed=6)
    pool, _ = fill(meta, num_blocks, 16, 2, 64, torch.float32, seed=1)
    q = torch.randn(sum(meta.query_lens), 6, 64, generator=torch.Generator().manual_seed(2))
    mixed = cpu_attention(q, pool, meta, 0.125)[: len(DECODES)]
    decoded = cpu_attention(q[: len(DECODES)], pool, pick(meta, list(range(len(DECODES)))), 0.125)
    assert relative_error(mixed, decoded.double()) < 1e-6


@pytest.mark.parametrize("head_dim", [16, 96])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_store_writes_exactly_the_slots(block_size: int, head_dim: int) -> None:
    """The slots hold the new K and V bit for bit, all others what they held. K and V may be views, as in the model."""
    meta, num_blocks = make_batch([(5, 9), (1, 30), (20, 20), (1, 1)], block_size, seed=7)
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(2, num_blocks, 3, block_size, head_dim, generator=generator)
    qkv = torch.randn(27, 9, head_dim, generator=generator)
    _, k, v = qkv.split([3, 3, 3], 1)
    wanted = pool.clone()
    for row, slot in enumerate(meta.slot_mapping.tolist()):
        wanted[:, slot // block_size, :, slot % block_size] = torch.stack([k[row], v[row]])
    store_kv_cache(k, v, pool, meta.slot_mapping)
    assert torch.equal(pool, wanted)


def make_scheduled(lens: Lens, tables: np.ndarray) -> ScheduledBatch:
    scheduled = np.array([n for n, _ in lens], dtype=np.int32)
    return ScheduledBatch(
        type=SequenceType.PREFILL,
        req_ids=list(range(len(lens))),
        scheduled_tokens=np.zeros(int(scheduled.sum()), dtype=np.int64),
        num_scheduled_tokens=scheduled,
        context_lens=np.array([length for _, length in lens], dtype=np.int32),
        block_tables=tables,
        is_sampled=np.ones(len(lens), dtype=bool),
        sampling_params=[SamplingParams()] * len(lens),
    )


@pytest.mark.parametrize("seed", range(40))
def test_locate_equals_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 3, 4, 16, 32, 256))
    lens = [(rng.randint(1, length), length) for length in (rng.randint(1, 300) for _ in range(rng.randint(1, 9)))]
    width = max(-(-length // size) for _, length in lens) + rng.randint(0, 2)
    tables = np.array([[rng.randrange(10_000) for _ in range(width)] for _ in lens], dtype=np.int32)
    positions, slots, cu_seqlens = locate(make_scheduled(lens, tables), size)
    wanted = [(row, p) for row, (n, length) in enumerate(lens) for p in range(length - n, length)]
    assert positions.tolist() == [p for _, p in wanted]
    assert slots.tolist() == [int(tables[row, p // size]) * size + p % size for row, p in wanted]
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(n for n, _ in lens)]
    assert positions.dtype == slots.dtype == np.int64


@pytest.mark.parametrize("size", [1, 16, 256])
def test_slots_do_not_wrap(size: int) -> None:
    """Block ids are int32, slots are not: a pool of 2**31 slots is one of 28 layers' worth on a large GPU."""
    top = 2**31 - 1
    for block in (2**31 // size - 1, min(top, 2**31 // size), min(top, 2**31 // size + 12345), top):
        tables = np.array([[0, block]], dtype=np.int32)
        positions, slots, _ = locate(make_scheduled([(2, 2 * size)], tables), size)
        first = block * size + size - 2 if size > 1 else 0  # with blocks of 1 token it is in block 0
        assert slots.tolist() == [first, block * size + size - 1] and positions.tolist() == [2 * size - 2, 2 * size - 1]
        assert slots.dtype == np.int64 and slots.min() >= 0
