"""Random drafts leave the target's distribution as it is: over three positions at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import one_hot, pad

from atom_mini.config import SamplingParams
from atom_mini.extras import penalize
from atom_mini.sampler import NEUTRAL, Sampler, SamplingMetaData, draw
from atom_mini.speculation import rejection
from atom_mini.speculation.rejection import RejectionSampler, draft_tokens, final_probs, numbers

V, LENGTH, N = 5, 3, 50_000
GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randn(V, V, generator=GENERATOR)  # logits of what follows each token
DRAFT = TARGET + 0.8 * torch.randn(V, V, generator=GENERATOR)
PLAIN = {"temperature": 0.9}
SAMPLING = [
    PLAIN | {"repetition_penalty": 1.8},
    PLAIN | {"min_p": 0.25},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.95},
]


def closed_form(logits: np.ndarray, seen: set[int], temperature: float = 1.0, top_k: int = V, top_p: float = 1.0,
                min_p: float = 0.0, repetition_penalty: float = 1.0) -> np.ndarray:  # fmt: skip
    """What one row is drawn from, from the definitions, in float64."""
    x = logits.astype(np.float64)
    scaled = np.where(x > 0, x / repetition_penalty, x * repetition_penalty)
    x = np.where(np.isin(np.arange(V), [*seen]), scaled, x)
    weights = np.exp((x - x.max()) / temperature)
    order = np.argsort(-weights)
    weights[order[top_k:]] = 0
    before = (weights / weights.sum())[order].cumsum() - (weights / weights.sum())[order]
    weights[order[before >= top_p]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def joint(sampling: dict[str, Any]) -> np.ndarray:
    """[V, V, V]: the probability of each text of three tokens, after token 0."""
    table, found = TARGET.numpy(), np.zeros((V,) * LENGTH)
    for text in np.ndindex(*found.shape):
        prefix = [0, *text]
        rows = [closed_form(table[prefix[j]], set(prefix[: j + 1]), **sampling)[prefix[j + 1]] for j in range(LENGTH)]
        found[text] = np.prod(rows)
    return found


def probs_after(table: Tensor, last: Tensor, seen: Tensor, sampling: dict[str, Any]) -> Tensor:
    """Final probabilities [B, V] after tokens `last` [B], where `seen` [B, V] have been seen."""
    B, rows, logits = len(last), torch.arange(len(last)), table[last]
    meta = SamplingMetaData(temperature=torch.full((B,), sampling["temperature"]))
    if "min_p" in sampling:
        meta.min_p = torch.full((B,), sampling["min_p"])
    if "top_k" in sampling:
        meta.sorted_rows, meta.top_k = rows, torch.full((B,), sampling["top_k"])
        meta.top_p = torch.full((B,), sampling.get("top_p", 1.0))
    if "repetition_penalty" in sampling:
        logits = penalize(logits, torch.full((B,), sampling["repetition_penalty"]), seen.nonzero().T)
    return rejection.final_probs(logits, meta)


Drafter = Callable[[Tensor, list[int], np.ndarray], tuple[Tensor, Tensor]]  # q -> (tokens, the q that they claim)


def keep(
    p: Tensor, q: Tensor, drafts: Tensor, seeds: list[int], positions: np.ndarray
) -> list[list[int]]:
    """What chapter 50's rule keeps of B sequences at `positions` [B] with up to k drafts each, -1 for none: p [B, k + 1, V],
    q [B, k, V], drafts [B, k]."""
    rows = p.shape[1]
    drafts = pad(drafts, (0, 1), value=-1)
    q = pad(q, (0, 0, 0, 1)).masked_fill((drafts < 0)[..., None], 0)
    at = (positions[:, None] + np.arange(rows)).ravel()
    flat = p.flatten(0, 1), q.flatten(0, 1), drafts.flatten()
    found = RejectionSampler()(*flat, [s for s in seeds for _ in range(rows)], at).view(-1, rows)
    counts = ((found == drafts).int().cumprod(-1).sum(-1) + 1).tolist()
    return [tokens[:n] for tokens, n in zip(found.tolist(), counts, strict=True)]


def by_drawing(q: Tensor, seeds: list[int], positions: np.ndarray) -> tuple[Tensor, Tensor]:
    return draft_tokens(q, seeds, positions), q


def by_argmax(q: Tensor, seeds: list[int], positions: np.ndarray) -> tuple[Tensor, Tensor]:
    return q.argmax(-1), one_hot(q.argmax(-1), V).float()


def generate(sampling: dict[str, Any], k: int, drafter: Drafter) -> np.ndarray:
    """Counts [V, V, V] of texts made step by step: ragged drafts, and drafts again where some were rejected."""
    texts = torch.zeros(N, LENGTH + 1, dtype=torch.long)
    done = torch.ones(N, dtype=torch.long)
    step = 0
    while len(who := (done <= LENGTH).nonzero()[:, 0]):
        rows, start, seeds = torch.arange(len(who)), done[who], who.tolist()
        counts = ((who + step) % (k + 1)).clamp(max=LENGTH + 1 - start)  # 0 to k, nobody the same for long
        last, drafts = texts[who, start - 1], torch.full((len(who), k), -1)
        places = torch.arange(LENGTH + 1) < start[:, None]
        seen = torch.zeros(len(who), V, dtype=torch.bool)
        seen[rows[:, None].expand_as(places)[places], texts[who][places]] = True
        q, p = torch.full((len(who), k, V), torch.nan), torch.full((len(who), k + 1, V), torch.nan)
        for j in range(k + 1):
            has = counts >= j
            p[has, j] = probs_after(TARGET, last[has], seen[has], sampling)
            if j < k and (has := counts > j).any():
                at = (start[has] + j).numpy()
                tokens, q[has, j] = drafter(probs_after(DRAFT, last[has], seen[has], sampling), who[has].tolist(), at)
                drafts[has, j] = last[has] = tokens
                seen[rows[has], tokens] = True
        kept = keep(p, q, drafts, seeds, start.numpy())
        assert all(0 < len(new) <= most + 1 for new, most in zip(kept, counts.tolist(), strict=True))
        filled = torch.tensor([(new + [-1] * k)[: k + 1] for new in kept])
        for j in range(k + 1):
            fits = (filled[:, j] >= 0) & (start + j <= LENGTH)
            texts[who[fits], start[fits] + j] = filled[fits, j]
        done[who] = start + (filled >= 0).sum(-1)
        step += 1
    return np.bincount((texts[:, 1:] * torch.tensor([V * V, V, 1])).sum(-1).numpy(), minlength=V**LENGTH)


def is_exact(counts: np.ndarray, sampling: dict[str, Any]) -> bool:
    """Nothing impossible; chi-square; a total variation distance as small as chance leaves it."""
    p, n = joint(sampling).ravel(), counts.sum()
    rare = p * n < 5
    observed, expected = np.append(counts[~rare], counts[rare].sum()), np.append(p[~rare], p[rare].sum()) * n
    if counts[p == 0].sum():
        return False
    distance, by_chance = abs(counts / n - p).sum() / 2, math.sqrt(p.size / (2 * math.pi * n))  # at most, in the mean
    return bool(distance < 1.5 * by_chance and chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3)


@pytest.mark.parametrize(("sampling", "k", "drafter"), [
    (SAMPLING[0], 3, by_drawing), (SAMPLING[1], 2, by_drawing), (SAMPLING[2], 1, by_drawing), (PLAIN, 2, by_argmax),
])  # fmt: skip
def test_three_tokens_follow_the_target(sampling: dict[str, Any], k: int, drafter: Drafter) -> None:
    """Drawn drafts, and an argmax that says so."""
    assert is_exact(generate(sampling, k, drafter), sampling)


def random_probs(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def test_a_draft_of_probability_zero_is_never_accepted() -> None:
    """SGLang 35771: a random number of exactly 0 let it pass."""
    p, q = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    accepts = RejectionSampler().accepts
    assert not accepts(p, q, torch.tensor([1]), torch.zeros(1)).item()
    assert accepts(p, q, torch.tensor([0]), torch.tensor([1 - 2**-24])).item()


def test_a_residual_that_rounding_has_emptied_is_the_target() -> None:
    p, q = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), torch.tensor([[[1e-9, 1.0]]])
    assert keep(p, q, torch.tensor([[0]]), [3], np.array([4])) == [[1]]


def test_a_sequence_keeps_the_same_tokens_in_any_batch() -> None:
    """Alone, in any row, and among rows of others that hold anything."""
    rng, B, k = np.random.default_rng(0), 40, 4
    p, q = random_probs(B, k + 1, 11, seed=7), random_probs(B, k, 11, seed=8)
    seeds, at, counts = rng.integers(0, 9, B).tolist(), rng.integers(1, 99, B), rng.integers(0, k + 1, B)
    drafts = torch.stack([draft_tokens(q[:, j], seeds, at + j) for j in range(k)], 1)
    drafts[torch.arange(k) >= torch.from_numpy(counts)[:, None]] = -1

    def alone(i: int) -> list[int]:
        n = counts[i]
        return keep(p[i : i + 1, : n + 1], q[i : i + 1, :n], drafts[i : i + 1, :n], [seeds[i]], at[i : i + 1])[0]

    expected = [alone(i) for i in range(B)]
    p[torch.arange(k + 1) > torch.from_numpy(counts)[:, None]] = torch.nan
    before = drafts.clone()
    for _ in range(10):
        rows = rng.permutation(B)[: rng.integers(1, B + 1)]
        kept = keep(p[rows], q[rows], drafts[rows], [seeds[i] for i in rows], at[rows])
        assert kept == [expected[i] for i in rows]
    assert torch.equal(drafts, before)  # the caller's own
    assert any(len(tokens) > 1 for tokens in expected)


def test_streams_are_independent_of_each_other_and_of_plain_sampling() -> None:
    """Across positions of one seed, and across seeds at one position: pairs fill the square evenly."""
    n = 100_000
    for seeds, positions in (([7] * n, np.arange(n)), (list(range(n)), np.full(n, 12))):
        u = [numbers(stream, seeds, positions).numpy() for stream in range(4)]
        for i in range(4):
            for j in range(i):
                cells = np.histogram2d(u[i], u[j], 16, [[0, 1], [0, 1]])[0]
                assert chisquare(cells.ravel()).pvalue > 1e-4


def test_final_probs_are_what_the_sampler_draws_from() -> None:
    """The same numbers give the same tokens; greedy rows among the others."""
    wishes: list[dict[str, Any]] = [{"temperature": 0.0}, *SAMPLING[1:], {"temperature": 2.0, "top_p": 0.6}]
    params = [SamplingParams(**NEUTRAL | wishes[i % len(wishes)], seed=i) for i in range(4000)]
    logits = torch.randn(4000, 30, generator=torch.Generator().manual_seed(9))
    meta = SamplingMetaData.pack(params, np.arange(4000), 30)
    probs, tokens = final_probs(logits, meta), Sampler()(logits, meta)
    assert torch.allclose(probs.sum(-1), torch.ones(4000))
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert (draw(probs, meta.u) == tokens).float().mean() > 0.999  # but for rounding at a border
    greedy = meta.temperature == 0
    assert torch.equal(probs[greedy].argmax(-1), tokens[greedy])
