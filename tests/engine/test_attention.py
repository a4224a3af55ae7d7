"""Attention through a block table against two oracles, with every slot that nobody may read poisoned."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from show import reference_attention
from torch import Tensor

from atom_mini.attention import AttentionMetaData, batched_decode, paged_attention, store_kv_cache
from atom_mini.cpu.decode import CpuOps
from atom_mini.model_runner import locate, made_up_batch
from atom_mini.sequence import SequenceType

torch.set_num_threads(1)  # products this small are done before a second thread is awake
SHAPES = [  # block size, query and K/V heads, their size
    (1, (6, 2), 16), (16, (2, 2), 64), (16, (3, 1), 96), (32, (8, 1), 64), (256, (4, 2), 128),
]  # fmt: skip
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


DECODES: Lens = [(1, 40), (1, 1), (1, 300), (1, 16), (1, 17), (1, 133)]
def test_a_batched_decode_reads_nothing_behind_an_end() -> None:
    """Neither the slots of the pool there, which hold NaN, nor the entries of the table; in pieces, too."""
    lens = DECODES * 4  # 24 rectangles of 304 slots: two pieces
    meta, num_blocks = make_batch(lens, 16, seed=5)
    pool, plain = fill(meta, num_blocks, 16, 2, 64, torch.float32, seed=1)
    for row, length in enumerate(meta.lens):
        meta.block_tables[row, -(-length // 16) :] = 10**6
    q = torch.randn(len(lens), 6, 64, generator=torch.Generator().manual_seed(2))
    assert relative_error(batched_decode(q, pool, meta, 0.125), contiguous_attention(q, plain, lens, 0.125)) < 1e-6


@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 16), (16, 96), (256, 16)])
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


def test_slots_do_not_wrap() -> None:
    """Block ids are int32, slots are not: 2**31 of them are one of 28 layers' worth on a large GPU."""
    batch = made_up_batch(SequenceType.PREFILL, 32, np.array([[0, 2**31 // 16 + 12345]], np.int32))
    positions, slots, ends = locate(batch, 16)
    assert positions.tolist() == [*range(32)] and ends.tolist() == [0, 32]
    assert slots.tolist() == [*range(16), *range(2**31 + 12345 * 16, 2**31 + 12346 * 16)]
