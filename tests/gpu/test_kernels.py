"""Every Triton kernel against its twin in torch: small sizes in the interpreter on a CPU, full ones on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter

from drawn import given, settings, st
from show import reference_attention

from atom_mini.attention import AttentionMetaData
from atom_mini.gpu import sampling_kernels, triton_attention
from atom_mini.gpu.triton_attention import FEW_TOKENS, MAX_ITEMS, MAX_PARTIALS, AttentionPlan, plan_attention
from atom_mini.gpu.triton_ops import TritonOps
from atom_mini.models import TorchOps
from atom_mini.sampler import draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of the relative error
TWIN, EPS = TorchOps(), 1e-6
# Infinities and zeros on the way to a right result, of which the interpreter's NumPy complains and a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")
NEAR_1 = 0.99999994  # the largest float32 below 1
Lens = list[tuple[int, int]]  # (queries, context with them) of each sequence


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_ops(kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> TritonOps:
    return TritonOps(torch.device(DEVICE), kv_heads * group, kv_heads, dim, dtype)


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """By norm, of the worst row; NaN counts as infinitely wrong, so that `<` can be trusted."""
    wanted = wanted.double().flatten(1)
    error = ((ours.double().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()
    return math.inf if math.isnan(error) else error


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (or the largest integer): what a kernel forgets to write cannot look right by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Step:
    """Queries, a pool that holds NaN but where a sequence's tokens are, and random tables that name NaN at the end."""

    def __init__(self, lens: Lens, block_size: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
        rng, random = np.random.default_rng(block_size), generator(dim)
        needed = [-(-length // block_size) for _, length in lens]
        ids = rng.permutation(sum(needed) + 2).astype(np.int32)
        tables = np.full((len(lens), max(needed) + 1), ids[-1])  # the last two blocks stay nobody's
        pool = torch.full((2, len(ids), kv_heads, block_size, dim), math.nan, dtype=dtype)
        for row, (_, length) in enumerate(lens):
            tables[row, : needed[row]] = ids[sum(needed[:row]) :][: needed[row]]
            places = np.arange(length)
            values = torch.randn(2, length, kv_heads, dim, generator=random).to(dtype)
            pool.transpose(2, 3)[:, tables[row, places // block_size], places % block_size] = values
        self.lens, self.tables, self.pool = lens, tables, pool.to(DEVICE)
        total = sum(n for n, _ in lens)
        self.q = torch.randn(total, kv_heads * group, dim, generator=random).to(dtype).to(DEVICE)

    def pick(self, order: list[int]) -> Step:
        """Some of the sequences, in that order, over the same pool."""
        some = object.__new__(Step)
        some.lens, some.tables, some.pool = [self.lens[i] for i in order], self.tables[order], self.pool
        rows = self.q.split([n for n, _ in self.lens])
        some.q = torch.cat([rows[i] for i in order])
        return some

    def meta(self, plan: AttentionPlan | None = None) -> AttentionMetaData:
        queries, lens = [n for n, _ in self.lens], [length for _, length in self.lens]
        return AttentionMetaData(
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.from_numpy(self.tables).to(DEVICE),
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            query_lens=queries,
            lens=lens,
            plan=plan,
        )

    def attend(self, ops: TritonOps, change: Callable[[AttentionPlan], object] = lambda plan: None) -> Tensor:
        """Through the kernel; `change` may spoil the plan."""
        query_lens, context_lens = np.array(self.lens).T
        plan = ops.plan(query_lens, context_lens, self.tables)
        change(plan)
        plan.data = torch.from_numpy(plan.data).to(DEVICE)
        with poisoned_memory():
            return ops.attend(self.q, self.pool, self.meta(plan), self.q.shape[-1] ** -0.5)

    def error(self, ops: TritonOps, change: Callable[[AttentionPlan], object] = lambda plan: None) -> float:
        wanted = reference_attention(self.q.float(), self.pool.float(), self.meta(), self.q.shape[-1] ** -0.5)
        return relative_error(self.attend(ops, change), wanted)


def items(plan: AttentionPlan) -> np.ndarray:
    return plan.data[plan.data[2] :][: 8 * plan.num_items].reshape(-1, 8)


def make_lens(kind: str, size: int) -> Lens:
    """Around the borders of blocks (of `size` tokens) and of splits (of 256 keys)."""
    lens = sorted({1, max(1, size - 1), size, size + 1, 255, 256, 257, 530} | ({2049, 4095, 4096} if FULL else set()))
    if kind == "decode":
        return [(1, length) for length in lens]
    if kind == "several":  # 1 to 8 tokens: drafts to verify, or a prompt's tail
        return [(min(1 + i, length, 8), length) for i, length in enumerate(lens)]
    whole = [(length, length) for length in lens if length <= 40 or FULL]
    return [*whole, (33, 290), (1, 257), (8, 100), (70, 70), (17, 64)]


# block size, K/V heads, query heads per K/V head, head size
SHAPES = [(16, 2, 1, 64), (1, 1, 2, 64), (256, 1, 3, 96), (32, 1, 7, 64), (16, 1, 4, 128), (32, 1, 8, 128),
          (1, 1, 5, 96), (256, 1, 2, 256), (16, 1, 6, 256), (512, 1, 4, 16)]  # fmt: skip
KINDS = ["decode", "several", "mixed"]
CASES = list(itertools.product(SHAPES, KINDS, DTYPES))
if not FULL:  # every shape once, every kind of step in every type
    CASES = [(shape, KINDS[i % 3], DTYPES[i // 3 % 3]) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES, ids=str)
def test_attention(shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype) -> None:
    """The kernel equals the oracle over scattered blocks; one NaN read, or one number not written, would be noticed."""
    step = Step(make_lens(kind, shape[0]), *shape, dtype)
    assert step.error(make_ops(*shape[1:], dtype)) < LIMITS[dtype]


def test_more_keys_than_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond MAX_SPLITS * SPLIT_KEYS the splits grow instead of becoming more."""
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_attention, "MAX_SPLITS", 4)
    lens = [(3, length) for length in (63, 64, 65, 255, 256, 257, 260, 513, 700)]
    assert Step(lens, 16, 1, 3, 64, torch.float32).error(make_ops(1, 3, 64, torch.float32)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES if FULL else DTYPES[2:], ids=str)
@pytest.mark.slow
def test_alone_or_among_others_bitwise(dtype: torch.dtype) -> None:
    """A sequence's rows do not change by a bit with its company, its place, or the number of programs that share it."""
    lens = [(1, 600), (17, 530), (70, 600), (16, 290), (1, 40)]
    step, ops = Step(lens, 16, 1, 3, 64, dtype), make_ops(1, 3, 64, dtype)
    together = step.attend(ops).split([n for n, _ in lens])
    everybody = list(range(len(lens)))
    for order, units in [*(([i], 4) for i in everybody), (everybody[::-1], 1000)]:
        ops.units = units
        out = step.pick(order).attend(ops).split([lens[i][0] for i in order])
        assert all(torch.equal(out[at], together[i]) for at, i in enumerate(order)), (order, units)


@pytest.mark.parametrize(("tokens", "tile_tokens"), [(1, (4, 32)), (2, (4, 16)), (17, (2, 8)), (1000, (8, 128))])
def test_new_tokens_after_a_long_prefix_fill_a_gpu(tokens: int, tile_tokens: tuple[int, int]) -> None:
    """One or two have as many items as a lone decode of 8,193 keys, which fills an H200's 132 multiprocessors with 8 K/V
    heads. The items of more hold half of `MAX_PARTIALS` tokens or more, whatever a tile holds. A prompt without a prefix has
    tiles enough, and nothing to merge."""
    counts, table = np.array([tokens]), np.zeros((1, 800), np.int32)
    plan = plan_attention(counts, counts + 8192, table, tile_tokens)
    decode = plan_attention(np.array([1]), np.array([8193]), table, tile_tokens)
    size = tile_tokens[tokens > FEW_TOKENS]
    assert plan.num_items * size >= MAX_PARTIALS / 2
    assert tokens > 2 or (plan.num_items >= decode.num_items and 8 * plan.num_items >= 132)
    assert plan.num_items <= max(MAX_ITEMS, -(-tokens // size))
    assert plan_attention(counts, counts, table, tile_tokens).num_partials == 0


@pytest.mark.parametrize(("tokens", "group"), [(2, 1), (5, 7), (9, 2), (FEW_TOKENS, 4)])
def test_several_queries_of_a_sequence(tokens: int, group: int) -> None:
    """What a verify step asks: short and long contexts, one split and several, whatever the tile holds."""
    lens = [(tokens, tokens), (1, 40), (tokens, tokens + 250), (tokens, 530 + tokens)]
    step, ops = Step(lens, 16, 1, group, 32, torch.float32), make_ops(1, group, 32, torch.float32)
    plans: list[AttentionPlan] = []
    assert step.error(ops, plans.append) < 1e-5
    assert not plans[0].num_large and plans[0].num_partials >= 2 * tokens


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, FEW_TOKENS) | st.integers(1, 600), st.integers(0, 40000)), min_size=1, max_size=8),
    st.integers(1, 12), st.integers(0, 3), st.integers(0, 500),
)  # fmt: skip
def test_what_is_set_aside_is_enough(before: Lens, group: int, more: int, longer: int) -> None:
    """The memory plan reserves `most_partials` rows: of so many tokens, in so many sequences, of up to such a length. A graph
    for so many rows has room for the plan of as many rows in fewer sequences with few new tokens."""
    ops, (counts, prefixes) = make_ops(1, group, 64, torch.float16), np.array(before).T
    lens, rows = counts + prefixes, int(counts.sum()) + more
    longest = int(lens.max()) + longer
    plan = ops.plan(counts, lens, np.zeros((len(lens), -(-int(lens.max()) // 16)), np.int32))
    assert plan.num_partials <= ops.most_partials(rows, len(lens) + more, longest)
    if counts.max() <= FEW_TOKENS:
        largest = ops.largest_decode_plan(rows, longest, 16)
        assert not plan.num_large and not largest.num_large and len(plan.data) <= len(largest.data)
        assert plan.num_items <= largest.num_items and plan.num_partials <= largest.num_partials
    longest_decodes = ops.plan(np.ones(3, int), np.full(3, longest), np.zeros((3, -(-longest // 16)), np.int32))
    assert len(longest_decodes.data) <= len(ops.largest_decode_plan(3, longest, 16).data)


@pytest.fixture
def far_pool() -> Tensor:
    """float16 [2, 5, 2, 16, 64] whose blocks lie 2**30 numbers apart: only the pages in use get memory on a CPU.

    In 32 bits the offset of block 4 would be 0, which is where block 0 is: NaN.
    """
    try:
        storage = torch.empty(2**32 + 2**13, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("8 GiB of address space are not to be had")
    pool = torch.as_strided(storage, (2, 5, 2, 16, 64), (2048, 2**30, 1024, 64, 1))
    pool[:] = math.nan
    return pool


@pytest.mark.parametrize("tokens", [1, 20], ids=["decode", "prefill"])
def test_attention_far_away(far_pool: Tensor, tokens: int) -> None:
    """Keys and values beyond 2**31 numbers are found."""
    step = Step([(tokens, 29)], 16, 2, 2, 64, torch.float16)
    places = {int(block): far for block, far in zip(step.tables[0, :2], (4, 1), strict=True)}
    near, step.pool = step.pool, far_pool
    wanted = reference_attention(step.q.float(), near.float(), step.meta(), 0.125)
    for block, far in places.items():
        far_pool[:, far] = near[:, block]
    step.tables = np.array([[places.get(int(block), 0) for block in row] for row in step.tables], dtype=np.int32)
    assert relative_error(step.attend(make_ops(2, 2, 64, torch.float16)), wanted) < 1e-2


def rotation(dim: int, kv_heads: int, group: int, norm: bool, tokens: int, dtype: torch.dtype) -> tuple:
    """(the arguments of `rotate_and_store` up to the pool, a pool of random numbers, distinct slots)."""
    random, spare = generator(dim + tokens), 5
    qkv = torch.randn(tokens, kv_heads * (group + 2), dim, generator=random)
    angles = 6 * torch.rand(tokens, 1, dim // 2, generator=random)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    weights = 1 + torch.randn(2, dim, generator=random) / 2
    pool = torch.randn(2, tokens // 16 + spare, kv_heads, 16, dim, generator=random).to(dtype).to(DEVICE)
    slots = torch.randperm(pool.shape[1] * 16, generator=random)[:tokens].to(DEVICE)
    qkv, cos, sin, weights = (t.to(dtype).to(DEVICE) for t in (qkv, cos, sin, weights))
    return (qkv, tuple(weights) if norm else None, EPS, cos, sin), pool, slots


def rotation_is_right(ours: Callable[..., Tensor], arguments: tuple, pool: Tensor, slots: Tensor) -> bool:
    """q and k near the twin's, which computes in float32; v, and all that nobody stores, the same bits as before."""
    qkv, weights, eps, cos, sin = arguments
    mine, twins, bits = pool.clone(), pool.float(), torch.int32 if pool.dtype == torch.float32 else torch.int16
    with poisoned_memory():
        q = ours(*arguments, mine, slots)
    wanted = TWIN.rotate_and_store(
        qkv.float(), weights and tuple(w.float() for w in weights), eps, cos.float(), sin.float(), twins, slots
    )
    exact = twins.to(pool.dtype)  # v and the rest went to float32 and back unchanged
    blocks, places = slots // 16, slots % 16
    k_error = relative_error(mine[0][blocks, :, places], twins[0][blocks, :, places])
    exact[0][blocks, :, places] = mine[0][blocks, :, places]
    same = torch.equal(mine.view(bits), exact.view(bits))
    return same and max(k_error, relative_error(q, wanted)) < LIMITS[pool.dtype]


# head size, K/V heads, query heads per K/V head, tokens, norm
ROTATIONS = [(24, 1, 3, 2, True), (64, 2, 2, 2, False), (96, 1, 7, 2, True), (128, 1, 4, 2, False),
             (256, 1, 1, 2, True), pytest.param(24, 1, 1, 257, True, marks=pytest.mark.slow)]  # fmt: skip
ROTATIONS += [(64, 2, 7, 257, False), (128, 8, 4, 2000, True), (96, 8, 3, 1000, False)] if FULL else []


@pytest.mark.parametrize(("dim", "kv_heads", "group", "tokens", "norm"), ROTATIONS)
def test_rotate_and_store(dim: int, kv_heads: int, group: int, tokens: int, norm: bool) -> None:
    """q, k and the pool are right in both launch widths (one head per program up to 256 tokens, eight above)."""
    large = tokens > 256 and not FULL  # slow to interpret
    for dtype in [torch.float16] if large else DTYPES:
        arguments, pool, slots = rotation(dim, kv_heads, group, norm, tokens, dtype)
        before = arguments[0].clone()
        assert rotation_is_right(make_ops(kv_heads, group, dim, dtype).rotate_and_store, arguments, pool, slots), dtype
        assert torch.equal(arguments[0], before)


def test_rotate_and_store_far_away(far_pool: Tensor) -> None:
    """A slot beyond 2**31 numbers is written, and the one that 32 bits would make of it is not."""
    arguments, near, _ = rotation(64, 2, 2, True, 3, torch.float16)
    near = torch.full_like(near, math.nan)
    slots = torch.tensor([4 * 16 + 15, 1 * 16 + 2, 4 * 16], device=DEVICE)
    ops = make_ops(2, 2, 64, torch.float16)
    q, far_q = (ops.rotate_and_store(*arguments, pool, slots) for pool in (near, far_pool))
    assert torch.equal(q, far_q) and torch.equal(far_pool.view(torch.int16), near.view(torch.int16)[:, :5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "add"), [(64, True), (1000, False), (1024, True), (4096, False)])
def test_add_rms_norm(size: int, add: bool, dtype: torch.dtype) -> None:
    """The norm is near the twin's in float32, the sum is the twin's bit for bit; the inputs stay."""
    x, residual = torch.randn(2, 5, size, generator=generator(size)).to(dtype).to(DEVICE)
    x[1], residual[1], x[2], residual[2] = 0, 0, x[2] / 2**10, 0  # the third so small that eps matters
    weight = torch.randn(size, generator=generator(1)).to(dtype).to(DEVICE)
    inputs = [x, weight, residual]
    before = [t.clone() for t in inputs]
    with poisoned_memory():
        out, total = make_ops(1, 1, 64, dtype).add_rms_norm(x, residual if add else None, weight, EPS)
    wanted = x + residual if add else x
    exact = FULL or dtype != torch.bfloat16  # the interpreter cuts bfloat16 off instead of rounding it
    some = [0, 2, 3, 4]
    assert torch.equal(total, wanted) if exact else relative_error(total[some], wanted[some]) < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    norm = TWIN.add_rms_norm(total.float(), None, weight.float(), EPS)[0]
    assert relative_error(out[some], norm[some]) < LIMITS[dtype] and not out[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 1024, 3001])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    """Near the twin in float32, up to gates so large or small that exp overflows."""
    gate_up = 3 * torch.randn(4, 2 * size, generator=generator(size))
    gate_up[1, :size], gate_up[2, :size] = -200, 200
    gate_up = gate_up.to(dtype).to(DEVICE)
    with poisoned_memory():
        out = make_ops(1, 1, 64, dtype).silu_and_mul(gate_up)
    wanted = TWIN.silu_and_mul(gate_up.float())
    some = [0, 2, 3]
    assert relative_error(out[some], wanted[some]) < LIMITS[dtype] and out[1].abs().max() < 1e-6


def sample(logits: Tensor, temperature: Tensor, u: Tensor) -> Tensor:
    with poisoned_memory():
        return sampling_kernels.sample(*(t.to(DEVICE) for t in (logits, temperature, u))).cpu()


def twin_sample(logits: Tensor, temperature: Tensor, u: Tensor) -> Tensor:
    is_greedy, logits = temperature == 0, logits.float()
    drawn = draw((logits / temperature.masked_fill(is_greedy, 1)[:, None]).softmax(-1), u)
    return torch.where(is_greedy, logits.argmax(-1), drawn)


def is_drawn(tokens: Tensor, logits: Tensor, temperature: Tensor, u: Tensor) -> bool:
    """`u` lies where float64 has each token's share of [0, 1), up to rounding; nothing of probability 0 is drawn."""
    probs = (logits.double() / temperature.double()[:, None]).softmax(-1)
    ends = probs.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    share = probs.gather(1, tokens[:, None])[:, 0]
    return bool(((share > 0) & (ends - share - 1e-5 <= u) & (u <= ends + 1e-5)).all())


@pytest.mark.parametrize(
    ("vocab", "rows", "dtype"),
    [(5000, 18, torch.float32), (151936, 2, torch.bfloat16)],
)
def test_sample(vocab: int, rows: int, dtype: torch.dtype) -> None:
    """Mixed temperatures (greedy, tiny, large) and u to both ends: each token in its share, nearly always the twin."""
    rows *= 20 if FULL else 1
    logits = (4 * torch.randn(rows, vocab, generator=generator(vocab))).to(dtype)
    temperature = torch.tensor([0, 1, 0.6, 1e-3, 2, 0.1]).repeat(rows)[:rows]
    u = torch.rand(rows, generator=generator(1))
    ours, twins, is_random = sample(logits, temperature, u), twin_sample(logits, temperature, u), temperature > 0
    assert torch.equal(ours[~is_random], twins[~is_random]) and (ours == twins).float().mean() > 0.999
    for ends in (u, torch.zeros(rows), torch.full((rows,), NEAR_1)):
        tokens = ours if ends is u else sample(logits, temperature, ends)
        assert is_drawn(*(t[is_random] for t in (tokens, logits, temperature, ends)))
