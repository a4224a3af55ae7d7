"""Top-k, top-p, and min-p without a sort: each row's threshold, and the tokens drawn, against the sampler of chapter 07."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from atom_mini.config import SamplingParams
from atom_mini.forms import stacked
from atom_mini.gpu import sampling_kernels
from atom_mini.gpu.sampling_kernels import KernelSampler, find_thresholds, sample
from atom_mini.sampler import Sampler, SamplingMetaData, scale_by_temperature, uploads_to

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEAR_1 = 1 - 2**-24  # the largest u
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value|All-NaN slice) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last of which is not full."""
    monkeypatch.setattr(sampling_kernels, "SAMPLE_CHUNK", 128)
    monkeypatch.setattr(sampling_kernels, "SEARCH_CHUNK", 256)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_filters(rows: list[tuple[float, float, float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32).T.contiguous()


def thresholds_of(logits: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    return find_thresholds(*(t.to(DEVICE) for t in (logits, temperature, filters))).cpu()


def kept(logits: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """The tokens that the kernels keep: bool [B, V]."""
    thresholds = thresholds_of(logits, temperature, filters)
    bits = logits.float().view(torch.int32)
    key = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    is_early = torch.arange(logits.shape[1]) <= thresholds[:, 1:]
    return (key > thresholds[:, :1]) | ((key == thresholds[:, :1]) & is_early)


def wanted(logits: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """The same by a stable sort in float64. Tokens that weigh nothing are kept: no sampler draws them."""
    k, p, min_p = filters[:, :, None].double()
    scaled = scale_by_temperature(logits.float(), temperature).double()
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    keep = (k <= 0) | (torch.arange(logits.shape[1]) < k)
    probs = ordered.masked_fill(~keep, -math.inf).softmax(-1)
    keep &= (p >= 1) | (probs.cumsum(-1) - probs < p)
    keep &= (min_p <= 0) | (ordered.exp() >= min_p)
    weightless = scaled.float().exp() == 0
    return torch.zeros_like(keep).scatter_(1, order, keep) | weightless


def assert_keeps(logits: Tensor, temperature: Tensor, filters: Tensor) -> None:
    weightless = scale_by_temperature(logits.float(), temperature).exp() == 0
    found = kept(logits, temperature, filters) | weightless
    rows = (found != wanted(logits, temperature, filters)).any(-1).nonzero().flatten().tolist()
    assert not rows, (rows, filters[:, rows].T.tolist())


COMBINATIONS = [*itertools.product((0, 1, 20), (1.0, 0.37), (0.0, 0.1)), (300, 0.9, 0.1), (20, 1e-6, 0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_combination_keeps_what_a_sort_keeps(dtype: torch.dtype) -> None:
    """A row for each of them, or for some where a search has more steps, and a vocabulary that no chunk divides."""
    rows = COMBINATIONS if dtype is torch.bfloat16 else COMBINATIONS[3::5]
    logits = (3 * torch.randn(len(rows), 257, generator=generator(0))).to(dtype)
    temperature = torch.tensor([0.6, 1.0, 2.0]).repeat(len(rows))[: len(rows)]
    assert_keeps(logits, temperature, as_filters(rows))


def test_of_equal_logits_the_first_are_kept() -> None:
    """Few different logits, so that the threshold is in the middle of many; 0 and -0 are equal; a row of one value alone."""
    filters = [(40, 1, 0), (0, 0.37, 0), (100, 0.43, 0), (100, 0.77, 0.2), (0, 0.9, 0.3), (0, 0.333, 0)]
    logits = torch.randint(-3, 4, (6, 257), generator=generator(1)).bfloat16()
    logits[:, ::5] *= -1
    logits[5] = 2
    assert_keeps(logits, torch.full((6,), 1.3), as_filters(filters))


def test_only_random_rows_with_a_filter_have_a_bar() -> None:
    """Greedy rows, filters that are off or keep all, and padding rows: every token is above the threshold."""
    logits = torch.randn(6, 257, generator=generator(2))
    filters = as_filters([(5, 0.5, 0.1), (0, 1, 0), (257, 1, 0), (1000, 1, 0), (-1, 1, 0), (0, 0, 0)])
    thresholds = thresholds_of(logits, torch.tensor([0, 1, 1, 1, 1, 0.0]), filters)
    assert thresholds[:, 0].unique().tolist() == [-(2**31)]


def test_rows_of_minus_infinity_and_single_tokens() -> None:
    """Barred tokens are never drawn, even if top-k has places left for them; a lone token is drawn."""
    logits = torch.full((6, 257), -math.inf)
    logits[:2, [3, 200]], logits[2, 130], logits[3:5, 5:9], logits[5, 0] = 1.0, -7.0, torch.arange(4.0), 1e30
    filters = as_filters([(20, 1, 0), (20, 0.9, 0), (20, 0.9, 0), (3, 0.999, 0), (3, 1, 0), (5, 0.5, 0.5)])
    args = logits.bfloat16(), torch.ones(6), torch.tensor([0, NEAR_1, 0.5, 0, NEAR_1, 0.5]), filters
    assert sample(*(t.to(DEVICE) for t in args)).tolist() == [3, 200, 130, 6, 8, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_token_for_a_row_with_nan_or_infinity(dtype: torch.dtype) -> None:
    """As in the plain sampler, wherever it is, and with either sign; the row beside them has its own."""
    logits = torch.randn(6, 257, generator=generator(3)).to(dtype)
    logits[0, 256], logits[1, 7], logits[2, 128], logits[3], logits[4, 3] = math.nan, -math.nan, math.inf, -math.inf, math.nan
    logits[4, 9] = math.inf
    filters = as_filters([(2, 0.9, 0.1), (20, 1, 0), (0, 0.5, 0), (0, 1, 0.3), (20, 1, 0.2), (2, 1, 0)])
    args = logits, torch.ones(6), torch.full((6,), 0.4), filters
    tokens = sample(*(t.to(DEVICE) for t in args)).tolist()
    assert tokens[:5] == [-1] * 5 and tokens[5] >= 0


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    """So tiny that one token more or less is lost in rounding."""
    logits = torch.randn(5, 257, generator=generator(8))
    filters = as_filters([(0, 1e-7, 0), (0, 5e-8, 0), (20, 1e-12, 0), (0, 1e-30, 0.5), (0, 1e-30, 0)])
    args = logits, torch.ones(5), torch.full((5,), 0.9), filters
    assert sample(*(t.to(DEVICE) for t in args)).tolist() == logits.argmax(-1).tolist()


def test_a_search_for_a_bar_ends_on_nan() -> None:
    """NaN keys above every number: a top-k of the NaN alone leaves top-p nothing to search."""
    logits = torch.randn(3, 257, generator=generator(7))
    logits[0], logits[1, 7], logits[2, :127] = math.nan, math.nan, math.nan
    filters = as_filters([(20, 0.95, 0), (1, 0.95, 0), (20, 0.5, 0.1)])
    assert thresholds_of(logits, torch.ones(3), filters).shape == (3, 2)


OPTIONS: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.95}, {"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.1}, {}, {"top_k": 5, "min_p": 0.2},
    {"temperature": 0.0, "top_k": 3}, {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
]  # fmt: skip


def test_seeds_draw_the_tokens_of_the_plain_sampler() -> None:
    """A batch of every kind: the same tokens, in the order of the vocabulary."""
    params = [SamplingParams(**{"temperature": 0.8, "seed": i} | options) for i, options in enumerate(OPTIONS)]
    logits, positions = (3 * torch.randn(len(params), 257, generator=generator(4))).half(), np.full(len(params), 10)
    meta = SamplingMetaData.pack(params, positions, 257)
    there = SamplingMetaData.pack(params, positions, 257, uploads_to(torch.device(DEVICE)))
    ours = KernelSampler()(logits.clone().to(DEVICE), there).cpu()
    assert torch.equal(ours, Sampler()(logits.clone(), meta))


def draws(u: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """A token for each `u` [B], of 25 with top-k 9, top-p 0.85, min-p 0.05: int64 [B]; and float64's probabilities [25].

    The threshold is the same for all rows, and found once.
    """
    monkeypatch.setattr(sampling_kernels, "SAMPLE_CHUNK", 32)
    monkeypatch.setattr(sampling_kernels, "SEARCH_CHUNK", 32)
    logits, temperature, filters = torch.randn(1, 25, generator=generator(5)), torch.tensor([0.8]), as_filters([(9, 0.85, 0.05)])
    thresholds = thresholds_of(logits, temperature, filters)
    monkeypatch.setattr(sampling_kernels, "find_thresholds", lambda *args: thresholds.expand(len(u), 2).contiguous().to(DEVICE))
    args = logits.expand(len(u), 25).contiguous(), temperature.expand(len(u)).contiguous(), u.float(), filters
    keep = wanted(logits, temperature, filters)[0]
    assert 4 <= keep.sum() < 9
    return sample(*(t.to(DEVICE) for t in args)).cpu(), (logits[0].double() / 0.8).masked_fill(~keep, -math.inf).softmax(-1)


def test_each_token_owns_its_share_of_u(monkeypatch: pytest.MonkeyPatch) -> None:
    """From where float64's cumulative sum begins to where it ends, up to rounding: so the distribution is float64's."""
    _, probs = draws(torch.zeros(1), monkeypatch)
    monkeypatch.undo()
    (tokens,), ends = probs.nonzero(as_tuple=True), probs.cumsum(-1)
    u = torch.cat([(ends - probs)[tokens] + 1e-6, ends[tokens] - 1e-6])
    assert draws(u, monkeypatch)[0].tolist() == 2 * tokens.tolist()


# ---- masks ----

KEPT: list[Any] = [slice(None), [200], slice(0, None, 2), [0, 31, 32, 255, 256], slice(250, 257), slice(3, 8), None, []]


def some_masks(rows: int) -> tuple[dict[int, np.ndarray], Tensor]:
    """Masks of 257 tokens: all, one, every second, at the ends of words, ...; a row has none, and one allows nothing. And
    what each row allows: bool [rows, 257]."""
    allowed = torch.ones(rows, 257, dtype=torch.bool)
    for row in range(rows):
        if (kept := KEPT[row % len(KEPT)]) is not None:
            allowed[row] = False
            allowed[row, kept] = True
    masks = {row: np.packbits(allowed[row].numpy(), bitorder="little") for row in range(rows) if KEPT[row % len(KEPT)] is not None}
    return masks, allowed


def placed(masks: dict[int, np.ndarray], rows: int) -> tuple[Tensor, Tensor]:
    """The masks as the kernels take them, in another order than the rows."""
    last_first = dict(reversed(masks.items()))
    where, words = stacked(last_first)
    places = torch.full((rows,), -1, dtype=torch.int32)
    places[torch.from_numpy(where)] = torch.arange(len(where), dtype=torch.int32)
    return places.to(DEVICE), torch.from_numpy(words).to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_filters", [False, True])
def test_a_mask_is_minus_infinity_elsewhere(dtype: torch.dtype, has_filters: bool) -> None:
    """To the bit: thresholds and tokens are those of logits that are -inf outside of the masks, NaN and +inf there included."""
    rows = 16 if has_filters else 32
    logits = (3 * torch.randn(rows, 257, generator=generator(11))).to(dtype)
    masks, allowed = some_masks(rows)
    logits[2, 1], logits[10, 3], logits[5, 2], logits[3, 32] = math.nan, math.inf, math.inf, math.nan  # the last is allowed
    temperature = torch.tensor([0.7, 1.3, 1.0, 0.0])[torch.arange(rows) // 8]
    filters = as_filters([COMBINATIONS[i % len(COMBINATIONS)] for i in range(rows)]).to(DEVICE) if has_filters else None
    hidden = logits.masked_fill(~allowed, -math.inf).to(DEVICE)
    logits, temperature, where = logits.to(DEVICE), temperature.to(DEVICE), placed(masks, rows)
    if filters is not None:
        assert torch.equal(find_thresholds(logits, temperature, filters, where), find_thresholds(hidden, temperature, filters))
    u = torch.linspace(0, NEAR_1, rows).to(DEVICE)
    found = sample(logits, temperature, u, filters, where).cpu()
    assert torch.equal(found, sample(hidden, temperature, u, filters).cpu())
    broken = [i for i in range(rows) if i % 8 == 7] + [3]
    assert (found == -1).nonzero().flatten().tolist() == sorted(broken)
    drawn = (found >= 0).nonzero().flatten()
    assert allowed[drawn, found[drawn]].all()


@pytest.mark.slow
def test_masked_seeds_draw_the_tokens_of_the_plain_sampler() -> None:
    """A batch of every kind beside its masks, and a batch in which every request is greedy."""
    rows = 8 * len(OPTIONS)
    masks, allowed = some_masks(rows)
    logits = (3 * torch.randn(rows, 257, generator=generator(12))).half()
    for greedy in ({}, {"temperature": 0.0}):
        params = [SamplingParams(**{"temperature": 0.8, "seed": i} | OPTIONS[i // 8] | greedy) for i in range(rows)]
        meta = SamplingMetaData.pack(params, np.full(rows, 10), 257, masks=masks)
        there = SamplingMetaData.pack(params, np.full(rows, 10), 257, uploads_to(torch.device(DEVICE)), masks)
        before = logits.clone().to(DEVICE)
        ours = KernelSampler()(before, there).cpu()
        assert torch.equal(ours, Sampler()(logits.clone(), meta)) and torch.equal(before.cpu(), logits)
        assert allowed[ours >= 0].gather(1, ours[ours >= 0, None]).all()


def test_each_allowed_token_owns_its_share_of_u() -> None:
    """From where float64's cumulative sum over the allowed tokens begins to where it ends: their distribution is exact."""
    logits, allowed = torch.randn(1, 257, generator=generator(13)), torch.arange(257) % 29 == 5
    probs = (logits[0].double() / 0.8).masked_fill(~allowed, -math.inf).softmax(-1)
    (tokens,), ends = probs.nonzero(as_tuple=True), probs.cumsum(-1)
    u = torch.cat([(ends - probs)[tokens] + 1e-6, ends[tokens] - 1e-6]).float()
    words = torch.from_numpy(stacked({0: np.packbits(allowed.numpy(), bitorder="little")})[1])
    masks = torch.zeros(len(u), dtype=torch.int32), words
    args = logits.expand(len(u), 257).contiguous(), torch.full((len(u),), 0.8), u
    found = sample(*(t.to(DEVICE) for t in args), None, tuple(t.to(DEVICE) for t in masks))
    assert found.tolist() == 2 * tokens.tolist()
