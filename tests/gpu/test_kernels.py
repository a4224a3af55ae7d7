"""Every Triton kernel against its twin in torch: small sizes in the interpreter on a CPU, full ones on a GPU."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter

from drawn import given, settings, st
from show import reference_attention

from atom_mini import sampler
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
          (1, 1, 5, 96), (256, 1, 2, 256), (16, 1, 6, 256), (32, 1, 3, 64)]  # fmt: skip
CASES = list(itertools.product(SHAPES, ["decode", "several", "mixed"], DTYPES))
if not FULL:  # a Latin square: every shape in every kind of step and in every type, not in every combination
    CASES = [c for c in CASES if (SHAPES.index(c[0]) + len(c[1]) + DTYPES.index(c[2])) % 3 == 0]


@pytest.mark.parametrize(("shape", "kind", "dtype"), CASES, ids=str)
def test_attention(shape: tuple[int, int, int, int], kind: str, dtype: torch.dtype) -> None:
    """The kernel equals the oracle over scattered blocks; one NaN read, or one number not written, would be noticed."""
    step = Step(make_lens(kind, shape[0]), *shape, dtype)
    assert step.error(make_ops(*shape[1:], dtype)) < LIMITS[dtype]


@pytest.mark.parametrize("block_size", [16, 512])
def test_small_heads(block_size: int) -> None:
    """Heads so small that many keys make a tile, which must still end where a split of the keys ends."""
    step = Step([(1, length) for length in (1, 255, 256, 257, 600, 1025)], block_size, 1, 4, 16, torch.float16)
    assert step.error(make_ops(1, 4, 16, torch.float16)) < 1e-2


def test_longest_context() -> None:
    """4,096 keys, in 16 splits."""
    assert Step([(1, 4096)], 16, 1, 4, 64, torch.float16).error(make_ops(1, 4, 64, torch.float16)) < 1e-2


@pytest.mark.parametrize("tokens", [1, 3])
def test_more_keys_than_splits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond MAX_SPLITS * SPLIT_KEYS the splits grow instead of becoming more."""
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 64)
    monkeypatch.setattr(triton_attention, "MAX_SPLITS", 4)
    lens = [(tokens, length) for length in (63, 64, 65, 255, 256, 257, 260, 513, 700)]
    assert Step(lens, 16, 1, 3, 64, torch.float32).error(make_ops(1, 3, 64, torch.float32)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES if FULL else DTYPES[::2], ids=str)
@pytest.mark.parametrize(
    "lens",
    [[(1, 40), (1, 600), (1, 16), (1, 257), (2, 300)], [(6, 6), (40, 300), (33, 64), (50, 50)],
     [(1, 600), (17, 530), (70, 600), (16, 290), (1, 40)]],
    ids=["decode", "prefill", "mixed"],
)
@pytest.mark.slow
def test_alone_or_among_others_bitwise(lens: Lens, dtype: torch.dtype) -> None:
    """A sequence's rows do not change by a bit with its company, its place, or the number of programs that share it."""
    step, ops = Step(lens, 16, 1, 3, 64, dtype), make_ops(1, 3, 64, dtype)
    together = step.attend(ops).split([n for n, _ in lens])
    everybody = list(range(len(lens)))
    for order, units in [*(([i], 4) for i in everybody), (everybody[::-1], 4), (everybody, 1), (everybody, 1000)]:
        ops.units = units
        out = step.pick(order).attend(ops).split([lens[i][0] for i in order])
        assert all(torch.equal(out[at], together[i]) for at, i in enumerate(order)), (order, units)


@pytest.mark.parametrize("dtype", DTYPES if FULL else DTYPES[:1], ids=str)
def test_splits_in_any_order(dtype: torch.dtype) -> None:
    """Whichever program attends to a split, and when: the bits are the same."""
    step, ops = Step([(2, 530), (1, 40), (17, 300)], 16, 2, 2, 32, dtype), make_ops(2, 2, 32, dtype)
    wanted, random = step.attend(ops), np.random.default_rng(0)
    for ops.units, order in ((1, np.flip), (1000, random.permutation)):

        def turn(plan: AttentionPlan, order: Callable = order) -> None:
            small, large = items(plan)[: plan.num_small], items(plan)[plan.num_small :]
            small[:], large[:] = small[order(np.arange(len(small)))], large[order(np.arange(len(large)))]

        assert torch.equal(step.attend(ops, turn), wanted)


@pytest.mark.parametrize("spoil", ["the last split", "the first split", "a query's merge"])
def test_each_split_counts(spoil: str) -> None:
    """A merge that leaves out a split, or a cut query without a merge, is noticed by the comparison."""

    def change(plan: AttentionPlan) -> None:
        merges = plan.data[8 : plan.data[2]].reshape(-1, 4)
        if spoil == "the last split":
            merges[:, 3] -= 1
        elif spoil == "the first split":
            merges[:, 1] += merges[:, 2]
            merges[:, 3] -= 1
        else:
            plan.data[1] -= 1

    step, ops = Step([(2, 530), (1, 300)], 16, 1, 2, 32, torch.float32), make_ops(1, 2, 32, torch.float32)
    assert step.error(ops) < 1e-5 and not step.error(ops, change) < 1e-2


def check_plan(
    plan: AttentionPlan, lens: Lens, tables: np.ndarray, tile_tokens: tuple[int, int], max_splits: int
) -> None:
    """Every query token meets every key of its tile exactly once, and every partial result is merged exactly once. Small items
    are of sequences with few new tokens, large ones of the others. A sequence has `MAX_ITEMS`, or a tile an item, and at
    most `MAX_PARTIALS` rows of partial results; none where its new tokens are most of its context."""
    num_small, num_merges, items_at, num_rows, num_large, _, large_at, _ = plan.data[:8].tolist()
    assert large_at == items_at + 8 * num_small and num_rows == sum(n for n, _ in lens)
    items, merges = plan.data[items_at:][: 8 * plan.num_items].reshape(-1, 8), plan.data[8:items_at].reshape(-1, 4)
    assert (num_small, num_large, num_merges) == (plan.num_small, plan.num_large, len(merges))
    by_sequence: Counter[int] = Counter()
    tiles_of = [-(-n // tile_tokens[n > FEW_TOKENS]) for n, _ in lens]
    owner = [(b, length - n + i) for b, (n, length) in enumerate(lens) for i in range(n)]  # of rows, with the position
    tiles: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for at, (row, tokens, position, table, begin, end, partial, _) in enumerate(items.tolist()):
        is_large = lens[owner[row][0]][0] > FEW_TOKENS
        assert begin < end and 1 <= tokens <= tile_tokens[is_large] and is_large == (at >= num_small)
        by_sequence[owner[row][0]] += 1
        assert owner[row : row + tokens] == [(owner[row][0], position + i) for i in range(tokens)]
        assert np.array_equal(plan.data[table:][: tables.shape[1]], tables[owner[row][0]])
        tiles.setdefault((row, tokens, position), []).append((begin, end, partial))
    wanted: dict[int, list[int]] = {}  # query row -> its rows in the partial results
    for (row, tokens, position), splits in tiles.items():
        begins, ends, partials = zip(*sorted(splits), strict=True)
        assert (0, *ends) == (*begins, position + tokens) and len(splits) <= max_splits
        if len(splits) == 1:
            assert partials == (-1,)
        else:
            wanted |= {row + i: [partial + i for partial in partials] for i in range(tokens)}
    assert sorted(row + i for row, tokens, _ in tiles for i in range(tokens)) == list(range(len(owner)))
    merged = {row: [first + i * apart for i in range(count)] for row, first, apart, count in merges.tolist()}
    assert merged == wanted and len(merges) == len(wanted)
    assert sorted(itertools.chain(*wanted.values())) == list(range(plan.num_partials))
    assert all(by_sequence[b] <= max(MAX_ITEMS, count) for b, count in enumerate(tiles_of))
    rows_of = Counter[int]()
    for row, partials in wanted.items():
        rows_of[owner[row][0]] += len(partials)
    assert all(rows_of[b] <= (MAX_PARTIALS if length >= 2 * n else 0) for b, (n, length) in enumerate(lens))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500) | st.integers(0, 20000)), min_size=1, max_size=8),
    st.tuples(st.integers(1, 16), st.integers(1, 40)), st.sampled_from([32, 256]), st.sampled_from([2, 4, 32]),
)  # fmt: skip
def test_plan(before: Lens, tile_tokens: tuple[int, int], split_keys: int, max_splits: int) -> None:
    """What `check_plan` says, for any step, and a sequence is cut as if it were alone."""
    lens = [(n, n + seen) for n, seen in before]
    tables = np.arange(3 * len(lens), dtype=np.int32).reshape(-1, 3) + 1000  # not looked into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "SPLIT_KEYS", split_keys)
        patch.setattr(triton_attention, "MAX_SPLITS", max_splits)
        query_lens, context_lens = np.array(lens).T
        plan = plan_attention(query_lens, context_lens, tables, tile_tokens)
        each = [plan_attention(*np.array([pair]).T, tables[:1], tile_tokens) for pair in lens]
    check_plan(plan, lens, tables, tile_tokens, max_splits)
    for name in ("num_small", "num_large", "num_partials"):
        assert getattr(plan, name) == sum(getattr(one, name) for one in each)
    first = np.array([n for n, _ in lens]).cumsum() - query_lens
    alone = [(row + a, *rest) for a, one in zip(first, each, strict=True) for row, *rest in keys_of(one)]
    assert sorted(alone) == sorted(keys_of(plan))


def keys_of(plan: AttentionPlan) -> list[tuple[int, ...]]:
    """(first query row, tokens, first key, end of keys) of each item."""
    return [tuple(item[[0, 1, 4, 5]].tolist()) for item in plan.data[plan.data[2] :][: 8 * plan.num_items].reshape(-1, 8)]


@pytest.mark.parametrize("tokens", [1, 2, 4, 15, 16, 17, 18, 33, 64, 128, 129, 500, 1000, 2048, 4096])
@pytest.mark.parametrize("tile_tokens", [(4, 32), (4, 16), (2, 8), (8, 128)])
def test_new_tokens_after_a_long_prefix_fill_a_gpu(tokens: int, tile_tokens: tuple[int, int]) -> None:
    """One or two have as many items as a lone decode of 8,193 keys, which fills an H200's 132 multiprocessors with 8 K/V
    heads. The items of more hold half of `MAX_PARTIALS` tokens or more, whatever a tile holds."""
    counts, table = np.array([tokens]), np.zeros((1, 800), np.int32)
    plan = plan_attention(counts, counts + 8192, table, tile_tokens)
    decode = plan_attention(np.array([1]), np.array([8193]), table, tile_tokens)
    size = tile_tokens[tokens > FEW_TOKENS]
    assert plan.num_items * size >= MAX_PARTIALS / 2
    assert tokens > 2 or (plan.num_items >= decode.num_items and 8 * plan.num_items >= 132)
    assert plan.num_items <= max(MAX_ITEMS, -(-tokens // size))


@pytest.mark.parametrize(("count", "tokens"), [(16, 1024), (32, 512), (50, 300), (1, 16384)])
def test_prompts_have_nothing_to_merge(count: int, tokens: int) -> None:
    """A prompt has as many tiles as its keys are worth. Cut along the keys, sixteen of them wrote 302 MB in each layer."""
    lens = np.full(count, tokens)
    plan = plan_attention(lens, lens, np.zeros((count, 1), np.int32), (8, 64))
    assert plan.data[1] == plan.num_partials == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40) | st.integers(1, 600), st.integers(0, 40000)), min_size=1, max_size=8),
    st.integers(1, 12), st.integers(0, 3), st.integers(0, 500),
)  # fmt: skip
def test_no_step_has_more_partial_results_than_the_bound(before: Lens, group: int, more: int, longer: int) -> None:
    """The memory plan reserves `most_partials` rows: of so many tokens, in so many sequences, of up to such a length."""
    ops, (counts, prefixes) = make_ops(1, group, 64, torch.float16), np.array(before).T
    lens = counts + prefixes
    plan = ops.plan(counts, lens, np.zeros((len(lens), 1), np.int32))
    assert plan.num_partials <= ops.most_partials(int(counts.sum()) + more, len(lens) + more, int(lens.max()) + longer)


def test_the_bound_of_partial_results_is_reached() -> None:
    """512 requests with 32 tokens of their own behind a long prompt that all of them share."""
    ops, counts = make_ops(8, 2, 128, torch.float16), np.full(512, 32)
    plan = ops.plan(counts, np.full(512, 40960), np.zeros((512, 1), np.int32))
    assert plan.num_partials == ops.most_partials(512 * 32, 512, 40960) == 512 * MAX_PARTIALS


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([16, 64, 128, 256]))
def test_plan_fits_the_tile(group: int, queries: list[int], dim: int) -> None:
    """No item has more tokens than its tile has rows for; few new tokens of a sequence go into small tiles."""
    ops = make_ops(1, group, dim, torch.float16)
    lens = np.array(queries) + 300
    plan = ops.plan(np.array(queries), lens, np.zeros((len(queries), 30), dtype=np.int32))
    items = plan.data[plan.data[2] :][: 8 * plan.num_items].reshape(-1, 8)
    assert items[:, 1].max() * group <= ops.tiles[0][0]
    assert not plan.num_large  # in as many tiles as it takes
    longer = np.array([*queries, FEW_TOKENS + 1])
    mixed = ops.plan(longer, longer + 300, np.zeros((len(longer), 30), dtype=np.int32))
    large = mixed.data[mixed.data[6] :][: 8 * mixed.num_large].reshape(-1, 8)
    assert mixed.num_small == plan.num_small and large[:, 1].max() * group <= ops.tiles[1][0]
    assert set(large[:, 0]) >= {sum(queries)}


def test_launched_for_a_larger_decode() -> None:
    """With the counts of the largest plan there can be, as in a captured graph, the result is the same to the bit."""
    step, ops = Step([(1, 300), (1, 40), (1, 1)], 16, 1, 4, 64, torch.float16), make_ops(1, 4, 64, torch.float16)

    def enlarge(plan: AttentionPlan) -> None:
        largest = ops.largest_decode_plan(num_seqs=4, longest=600, block_size=16)
        assert len(plan.data) <= len(largest.data)
        largest.data[: len(plan.data)] = plan.data
        plan.__dict__.update(vars(largest))

    assert torch.equal(step.attend(ops, enlarge), step.attend(ops))


@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [*range(1, 10), FEW_TOKENS])
def test_several_queries_of_a_sequence(tokens: int, group: int) -> None:
    """What a verify step asks: short and long contexts, one split and several, whatever the tile holds."""
    lens = [(tokens, tokens), (1, 40), (tokens, tokens + 250), (tokens, 530 + tokens)]
    step, ops = Step(lens, 16, 1, group, 32, torch.float32), make_ops(1, group, 32, torch.float32)
    plans: list[AttentionPlan] = []
    assert step.error(ops, plans.append) < 1e-5
    assert not plans[0].num_large and plans[0].num_partials >= 2 * tokens


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, FEW_TOKENS), st.integers(0, 9000)), min_size=1, max_size=6), st.integers(1, 12)
)
def test_rows_of_few_sequences_fit_a_graph(shapes: list[tuple[int, int]], group: int) -> None:
    """A graph for so many rows has room for the plan of as many rows in fewer sequences."""
    ops, counts = make_ops(1, group, 64, torch.float16), np.array([n for n, _ in shapes])
    lens = counts + np.array([before for _, before in shapes])
    tables = np.zeros((len(lens), -(-int(lens.max()) // 16)), dtype=np.int32)
    plan, largest = ops.plan(counts, lens, tables), ops.largest_decode_plan(int(counts.sum()), int(lens.max()), 16)
    assert not plan.num_large and len(plan.data) <= len(largest.data)
    for name in ("num_items", "num_partials"):
        assert getattr(plan, name) <= getattr(largest, name)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20000), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 500))
def test_largest_decode_plan(lens: list[int], more: int, longer: int) -> None:
    """It has room for the plan of any decode of so many sequences of up to so many tokens."""
    ops, longest = make_ops(1, 4, 64, torch.float16), max(lens) + longer
    tables = np.zeros((len(lens), -(-longest // 16)), dtype=np.int32)
    plan = ops.plan(np.ones(len(lens), dtype=np.int64), np.array(lens), tables)
    largest = ops.largest_decode_plan(len(lens) + more, longest, 16)
    assert not plan.num_large and not largest.num_large and len(plan.data) <= len(largest.data)
    for name in ("num_items", "num_partials"):
        assert getattr(plan, name) <= getattr(largest, name)


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


def rotate(ops: TorchOps, arguments: tuple, pool: Tensor, slots: Tensor) -> Tensor:
    function: Callable[..., Tensor] = ops.rotate_and_store
    return function(*arguments, pool, slots)


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


ROTATIONS = [(24, 1, 3, 2), (64, 2, 2, 2), (96, 1, 7, 2), (128, 1, 4, 2), (256, 1, 1, 2)]
ROTATIONS += [(64, 2, 7, 257), (128, 8, 4, 256), (128, 8, 4, 2000), (96, 8, 3, 1000)] if FULL else []
ROTATION_CASES = [*((*case, norm) for case in ROTATIONS for norm in (True, False)), (24, 2, 3, 257, True)]


@pytest.mark.parametrize(("dim", "kv_heads", "group", "tokens", "norm"), ROTATION_CASES)
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
    q, far_q = (rotate(ops, arguments, pool, slots) for pool in (near, far_pool))
    assert torch.equal(q, far_q) and torch.equal(far_pool.view(torch.int16), near.view(torch.int16)[:, :5])


@pytest.mark.gpu
def test_pool_beyond_2_gib() -> None:
    """A real pool of 8 GiB with K and V each beyond 2**31 numbers, used at both ends: stored, then attended to."""
    blocks = 2**31 // 4096 + 8
    pool = torch.full((2, blocks, 2, 16, 128), math.nan, dtype=torch.bfloat16, device=DEVICE)
    step = Step([(1, 600), (1, 33), (8, 300), (1, 16)], 16, 2, 4, 128, torch.bfloat16)
    ids = np.concatenate([np.arange(step.pool.shape[1] // 2), np.arange(blocks - step.pool.shape[1], blocks)])
    places = np.random.default_rng(0).permutation(ids)[: step.pool.shape[1]]
    pool[:, places] = step.pool
    ops, wanted = make_ops(2, 4, 128, torch.bfloat16), step.attend(make_ops(2, 4, 128, torch.bfloat16))
    step.pool, step.tables = pool, places[step.tables].astype(np.int32)
    assert torch.equal(step.attend(ops), wanted)
    arguments, small, _ = rotation(128, 2, 4, True, 3, torch.bfloat16)
    rotate(ops, arguments, small, torch.tensor([0, 17, 40], device=DEVICE))
    slots = torch.tensor([5, blocks * 16 - 1, blocks * 16 - 17], device=DEVICE)
    rotate(ops, arguments, pool, slots)
    for slot, near in zip(slots.tolist(), [0, 17, 40], strict=True):
        assert torch.equal(pool[:, slot // 16, :, slot % 16], small[:, near // 16, :, near % 16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [True, False], ids=["residual", "first"])
@pytest.mark.parametrize("size", [64, 96, 1000, 1024, 4096])
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
@pytest.mark.parametrize("size", [1, 37, 1000, 1024, 1025, 3001])
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
    [(300, 36, torch.float32), (5000, 24, torch.float32), (5000, 18, torch.bfloat16), (151936, 4, torch.float32),
     (151936, 2, torch.bfloat16)],
    ids=str,
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


def test_sample_never_takes_the_impossible() -> None:
    """Logits of -inf anywhere, chunks full of them included, are not chosen at either end of u."""
    u = torch.tensor([0, 1e-7, 0.3, 0.5, 0.9, NEAR_1])
    for possible in ([1], [4998], [2047, 2048], [3, 4, 4990], list(range(2500, 2600)), list(range(1, 4999, 7))):
        logits = torch.full((6, 5000), -math.inf)
        logits[:, possible] = torch.randn(6, len(possible), generator=generator(len(possible)))
        for heat in (0.0, 0.7, 1e-3):
            temperature = torch.full((6,), heat)
            tokens = sample(logits, temperature, u)
            assert set(tokens.tolist()) <= set(possible), (possible[:3], heat, tokens)
            assert torch.equal(tokens, logits.argmax(-1)) if heat == 0 else is_drawn(tokens, logits, temperature, u)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter subtracts inf from inf
def test_sample_has_no_token_for_what_is_no_number(dtype: torch.dtype) -> None:
    """NaN and +inf anywhere, or nothing but -inf: -1, as in torch; the rows beside are not touched."""
    logits = torch.randn(7, 5000, generator=generator(0)).to(dtype)
    logits[0, 7], logits[1, 4999], logits[2, 2048], logits[3, 2047] = math.nan, math.inf, math.nan, math.inf
    logits[4], logits[5, 1:] = -math.inf, -math.inf
    logits[5, 0] = math.nan
    for heat in (0.0, 0.7):
        temperature, u = torch.full((7,), heat), torch.full((7,), 0.4)
        tokens = sample(logits, temperature, u)
        assert tokens[:6].tolist() == [-1] * 6 and tokens[6] >= 0
        assert torch.equal(tokens, sampler.sample(logits, temperature, u))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_ties(dtype: torch.dtype) -> None:
    """Of equal logits the first one wins, within a chunk and across chunks."""
    logits = torch.randint(-3, 4, (6, 5000), generator=generator(0)).to(dtype)
    for row, tied in enumerate([[7, 9], [2047, 2048], [4999, 2048], [4097, 4096, 4999], list(range(5000)), [0, 4999]]):
        logits[row, tied] = 5
    tokens = sample(logits, torch.zeros(6), torch.rand(6))
    assert tokens.tolist() == logits.float().numpy().argmax(-1).tolist() == [7, 2047, 2048, 4096, 0, 0]


@pytest.mark.slow
def test_sample_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frequencies over 25 tokens in 2 chunks are softmax's: chi-square with 24 degrees of freedom, p = 0.1 %."""
    monkeypatch.setattr(sampling_kernels, "SAMPLE_CHUNK", 16)
    rows = 4000 if FULL else 500
    logits = 0.5 * torch.randn(25, generator=generator(0)).expand(rows, 25).contiguous()
    temperature, u = torch.full((rows,), 0.8), torch.rand(rows, generator=generator(1))
    tokens = sample(logits, temperature, u)
    wanted = rows * (logits[0].double() / 0.8).softmax(-1)
    assert ((tokens.bincount(minlength=25) - wanted) ** 2 / wanted).sum() < 51.2
    assert (tokens == twin_sample(logits, temperature, u)).float().mean() > 0.999


def items(plan: AttentionPlan) -> np.ndarray:
    return plan.data[plan.data[2] :][: 8 * plan.num_items].reshape(-1, 8)


PLAN_MISTAKES: dict[str, Callable[[AttentionPlan], object]] = {
    "an end too early": lambda plan: np.subtract.at(items(plan)[:, 5], 0, 1),
    "an item dropped": lambda plan: np.subtract.at(plan.data, 0, 1),
    "a part too many in a merge": lambda plan: np.add.at(plan.data, 9, 1),
    "a part missing in a merge": lambda plan: np.subtract.at(plan.data, 9, 1),
    "a counter that is not zero": lambda plan: np.add.at(plan.data, 10, 1),
    "a position too early": lambda plan: items(plan)[:, 2].__isub__(1),
    "another's block table": lambda plan: items(plan)[:, 3].sort(),
    "two parts in the same rows": lambda plan: np.minimum(items(plan)[:, 6], 0, out=items(plan)[:, 6]),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN - NaN
@pytest.mark.parametrize("mistake", PLAN_MISTAKES)
def test_mistakes_in_a_plan_are_noticed(mistake: str) -> None:
    """The comparison of `test_attention` fails for each of these, and not without them."""
    step, ops = Step([(2, 600), (3, 40), (1, 300)], 16, 1, 3, 64, torch.float16), make_ops(1, 3, 64, torch.float16)
    assert step.error(ops) < 1e-2
    assert step.error(ops, PLAN_MISTAKES[mistake]) > 1e-2


@pytest.mark.parametrize("mistake", ["next slot", "sin turned round", "weights swapped", "v rounded"])
def test_mistakes_in_rotate_and_store_are_noticed(mistake: str) -> None:
    """The comparison of `test_rotate_and_store` fails for each of these, and not without them."""
    ops = make_ops(1, 3, 64, torch.float32)
    arguments, pool, slots = rotation(64, 1, 3, True, 3, torch.float32)

    def wrong(qkv: Tensor, norm: tuple, eps: float, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        q = ops.rotate_and_store(
            qkv, norm[::-1] if mistake == "weights swapped" else norm, eps, cos,
            -sin if mistake == "sin turned round" else sin, cache, slots.roll(1) if mistake == "next slot" else slots,
        )  # fmt: skip
        if mistake == "v rounded":
            cache[1] = cache[1].bfloat16()
        return q

    assert rotation_is_right(ops.rotate_and_store, arguments, pool, slots)
    assert not rotation_is_right(wrong, arguments, pool, slots)
