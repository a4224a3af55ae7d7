"""Random drafts leave the target's distribution as it is: over three positions at once, and every known mistake is seen."""

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
from atom_mini.sampler import NEUTRAL, Sampler, SamplingMetaData, draw, scale_by_temperature
from atom_mini.speculation import rejection
from atom_mini.speculation.rejection import RejectionSampler, draft_tokens, final_probs, numbers

V, LENGTH, N = 5, 3, 200_000
FEW = N // 4  # enough to see a mistake
GENERATOR = torch.Generator().manual_seed(0)
TARGET = torch.randn(V, V, generator=GENERATOR)  # logits of what follows each token
DRAFT = TARGET + 0.8 * torch.randn(V, V, generator=GENERATOR)
PLAIN = {"temperature": 0.9}
SAMPLING = [
    PLAIN,
    PLAIN | {"repetition_penalty": 1.8},
    PLAIN | {"min_p": 0.25},
    {"temperature": 1.3, "top_k": 4, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 4, "min_p": 0.15, "repetition_penalty": 1.4},
]


# ---- the joint distribution of three tokens ----


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
    p: Tensor, q: Tensor, drafts: Tensor, seeds: list[int], positions: np.ndarray, sampler: RejectionSampler | None = None
) -> list[list[int]]:
    """What chapter 50's rule keeps of B sequences at `positions` [B] with up to k drafts each, -1 for none: p [B, k + 1, V],
    q [B, k, V], drafts [B, k]."""
    rows = p.shape[1]
    drafts = pad(drafts, (0, 1), value=-1)
    q = pad(q, (0, 0, 0, 1)).masked_fill((drafts < 0)[..., None], 0)
    at = (positions[:, None] + np.arange(rows)).ravel()
    flat = p.flatten(0, 1), q.flatten(0, 1), drafts.flatten()
    found = (sampler or RejectionSampler())(*flat, [s for s in seeds for _ in range(rows)], at).view(-1, rows)
    counts = ((found == drafts).int().cumprod(-1).sum(-1) + 1).tolist()
    return [tokens[:n] for tokens, n in zip(found.tolist(), counts, strict=True)]


def by_drawing(q: Tensor, seeds: list[int], positions: np.ndarray) -> tuple[Tensor, Tensor]:
    return draft_tokens(q, seeds, positions), q


def by_argmax(q: Tensor, seeds: list[int], positions: np.ndarray) -> tuple[Tensor, Tensor]:
    return q.argmax(-1), one_hot(q.argmax(-1), V).float()


def generate(
    sampling: dict[str, Any], k: int = 2, sampler: RejectionSampler | None = None, drafter: Drafter = by_drawing,
    penalise_drafts: bool = True, n: int = N,
) -> np.ndarray:  # fmt: skip
    """Counts [V, V, V] of texts made step by step: ragged drafts, and drafts again where some were rejected."""
    texts = torch.zeros(n, LENGTH + 1, dtype=torch.long)
    done = torch.ones(n, dtype=torch.long)
    step = 0
    while len(who := (done <= LENGTH).nonzero()[:, 0]):
        rows, start, seeds = torch.arange(len(who)), done[who], who.tolist()
        counts = ((who + step) % (k + 1)).clamp(max=LENGTH + 1 - start)  # 0 to k, nobody the same for long
        last, drafts = texts[who, start - 1], torch.full((len(who), k), -1)
        places = torch.arange(LENGTH + 1) < start[:, None]
        seen = torch.zeros(len(who), V, dtype=torch.bool)
        seen[rows[:, None].expand_as(places)[places], texts[who][places]] = True
        q, p = torch.full((len(who), k, V), torch.nan), torch.full((len(who), k + 1, V), torch.nan)
        target_seen = seen.clone()
        for j in range(k + 1):
            has = counts >= j
            p[has, j] = probs_after(TARGET, last[has], target_seen[has], sampling)
            if j < k and (has := counts > j).any():
                at = (start[has] + j).numpy()
                tokens, q[has, j] = drafter(probs_after(DRAFT, last[has], seen[has], sampling), who[has].tolist(), at)
                drafts[has, j] = last[has] = tokens
                seen[rows[has], tokens] = True
                target_seen = seen if penalise_drafts else target_seen
        kept = keep(p, q, drafts, seeds, start.numpy(), sampler)
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


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.slow
def test_three_tokens_follow_the_target(sampling: dict[str, Any]) -> None:
    assert is_exact(generate(sampling), sampling)


@pytest.mark.parametrize("k", [1, 3])
def test_however_many_drafts(k: int) -> None:
    assert is_exact(generate(SAMPLING[1], k, n=FEW), SAMPLING[1])


def test_drafts_that_are_an_argmax_and_say_so() -> None:
    assert is_exact(generate(PLAIN, drafter=by_argmax, n=FEW), PLAIN)


# ---- mistakes that others have made: each must be seen ----


class Unclamped(RejectionSampler):
    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p - q


class Absolute(RejectionSampler):
    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).abs()


class FromTarget(RejectionSampler):
    """Draws the replacement from p as it is."""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class Swapped(RejectionSampler):
    def accepts(self, p: Tensor, q: Tensor, x: Tensor, u: Tensor) -> Tensor:
        return super().accepts(q, p, x, u)


class WrongBonus(RejectionSampler):
    """Draws the bonus from the row of the last draft."""

    def __call__(self, p: Tensor, q: Tensor, drafts: Tensor, *rest: Any) -> Tensor:
        bonus = (drafts < 0) & (drafts.roll(1) >= 0)
        return super().__call__(torch.where(bonus[:, None], p.roll(1, 0), p), q, drafts, *rest)


class OneForAll(RejectionSampler):
    """Decides all drafts of a step with the number of the first."""

    def accepts(self, p: Tensor, q: Tensor, x: Tensor, u: Tensor) -> Tensor:
        return super().accepts(p, q, x, u.view(-1, 3)[:, :1].expand(-1, 3).flatten())  # two drafts and the bonus


def cut(q: Tensor, seeds: list[int], positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """What is drawn from must be what is tested: here the drafts are cut, and q is not."""
    return draft_tokens(q.masked_fill(q < 0.2, 0), seeds, positions), q


RULES = [Unclamped, Absolute, FromTarget, Swapped, WrongBonus, OneForAll]
MISTAKES: dict[str, dict[str, Any]] = {kind.__name__: {"sampler": kind()} for kind in RULES} | {
    "an argmax that calls itself random": {"drafter": lambda q, *_: (q.argmax(-1), q)},
    "a q before its filters": {"drafter": cut},
    "penalties without the drafts": {"sampling": SAMPLING[1], "penalise_drafts": False},  # vLLM 18902
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    how = {"sampling": PLAIN} | MISTAKES[mistake]
    assert not is_exact(generate(**how, n=FEW), how["sampling"])


@pytest.mark.parametrize("streams", [("DRAFT", "ACCEPT"), ("DRAFT", "RESIDUAL"), ("ACCEPT", "RESIDUAL")])
def test_shared_noise_is_seen(streams: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 54282: chi-square far off, with every single function right."""
    monkeypatch.setattr(rejection, streams[1], getattr(rejection, streams[0]))
    assert not is_exact(generate(PLAIN, n=FEW), PLAIN)


def test_probabilities_that_do_not_sum_to_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """min-p only cuts: drawing from the rest does no harm, dividing it by q does."""

    def unscaled(logits: Tensor, meta: SamplingMetaData) -> Tensor:
        assert meta.temperature is not None
        return Sampler().filtered(scale_by_temperature(logits, meta.temperature), meta)

    monkeypatch.setattr(rejection, "final_probs", unscaled)
    assert not is_exact(generate(SAMPLING[2], n=FEW), SAMPLING[2])


# ---- how much is accepted ----


def random_probs(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def one_step(
    p: Tensor, q: Tensor, sampler: RejectionSampler | None = None, first: int = 0
) -> tuple[Tensor, list[list[int]]]:
    """(drafts drawn from q, what is kept) for seeds first, first + 1 ... at position 9."""
    B, k, _ = q.shape
    seeds, at = list(range(first, first + B)), np.full(B, 9)
    drafts = torch.stack([draft_tokens(q[:, j], seeds, at + j) for j in range(k)], 1)
    return drafts, keep(p, q, drafts, seeds, at, sampler)


def test_acceptance_is_what_both_share() -> None:
    """One draft: sum min(p, q) = 1 - TV, for 20,000 pairs of distributions."""
    p, q = random_probs(20_000, 2, 50, seed=1), random_probs(20_000, 1, 50, seed=2)
    _, kept = one_step(p, q)
    share = torch.minimum(p[:, 0], q[:, 0]).sum(-1)
    accepted = np.mean([len(tokens) == 2 for tokens in kept])
    assert abs(accepted - share.mean().item()) < 4 * (share * (1 - share)).sum().sqrt().item() / 20_000


@pytest.mark.parametrize("k", [1, 3, 6])
def test_tokens_per_step(k: int) -> None:
    """E(k) = (1 - a^(k+1)) / (1 - a) where every row has the same a."""
    p, q = random_probs(12, seed=1), random_probs(12, seed=2)
    a = torch.minimum(p, q).sum().item()
    _, kept = one_step(p.expand(20_000, k + 1, 12), q.expand(20_000, k, 12))
    assert abs(np.mean([len(tokens) for tokens in kept]) - (1 - a ** (k + 1)) / (1 - a)) < 0.05


def test_equal_distributions_accept_everything() -> None:
    q = random_probs(5000, 4, 30)
    p = torch.cat([q, random_probs(5000, 1, 30, seed=3)], 1)
    drafts, kept = one_step(p, q)
    assert [tokens[:4] for tokens in kept] == drafts.tolist() and {len(tokens) for tokens in kept} == {5}


# ---- greedy ----


def test_greedy_is_exact_for_any_drafts() -> None:
    """The kept tokens are the drafts that are the argmax of their row, and then the argmax of the next."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(500, 5, 7, generator=generator)
    best = logits.argmax(-1)
    drafts = torch.where(
        torch.rand(500, 4, generator=generator) < 0.7, best[:, :4], torch.randint(7, (500, 4), generator=generator)
    )
    p = final_probs(logits.flatten(0, 1), SamplingMetaData()).view(500, 5, 7)
    for q in (one_hot(drafts, 7).float(), random_probs(500, 4, 7, scale=5.0)):
        kept = keep(p, q, drafts, list(range(500)), np.full(500, 3))
        for row, draft, right in zip(kept, drafts.tolist(), best.tolist(), strict=True):
            n = next((j for j in range(4) if draft[j] != right[j]), 4)
            assert row == right[: n + 1]


def test_greedy_drafts_are_the_argmax() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(5))
    probs = final_probs(logits, SamplingMetaData())
    assert torch.equal(draft_tokens(probs, list(range(50)), np.arange(50)), logits.argmax(-1))


# ---- edges ----


def test_a_draft_of_probability_zero_is_never_accepted() -> None:
    """SGLang 35771: a random number of exactly 0 let it pass."""
    p, q = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    accepts = RejectionSampler().accepts
    assert not accepts(p, q, torch.tensor([1]), torch.zeros(1)).item()
    assert accepts(p, q, torch.tensor([0]), torch.tensor([1 - 2**-24])).item()


def test_a_residual_that_rounding_has_emptied_is_the_target() -> None:
    p, q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 1e-9]]])
    assert keep(p, q, torch.tensor([[1]]), [3], np.array([4])) == [[0]]


def test_a_tiny_rest_is_drawn_from_where_it_is() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.5, 0.5 - 2**-24, 2**-24]])
    rest = RejectionSampler().residual(p, q)
    assert rest.count_nonzero() == 1 and draw(rest, torch.tensor([0.0])).item() == 1


@pytest.mark.parametrize("k", [0, 1, 4])
def test_without_drafts_it_is_a_draw_from_the_target(k: int) -> None:
    p = random_probs(V, seed=6)
    drafts = torch.full((50_000, k), -1)
    kept = keep(
        p.expand(50_000, k + 1, V), torch.zeros(50_000, k, V), drafts, list(range(50_000)), np.full(50_000, 2)
    )
    counts = np.bincount([token for (token,) in kept], minlength=V)
    assert chisquare(counts, p.double().numpy() / p.double().sum().item() * 50_000).pvalue > 1e-3


# ---- in any company ----


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


def test_drafts_are_the_same_in_any_batch() -> None:
    probs, seeds, at = random_probs(30, 20), list(range(30)), np.arange(30)
    drawn = draft_tokens(probs, seeds, at)
    for i in range(30):
        assert draft_tokens(probs[i : i + 1], seeds[i : i + 1], at[i : i + 1]).item() == drawn[i]


def test_streams_are_independent_of_each_other_and_of_plain_sampling() -> None:
    """Across positions of one seed, and across seeds at one position: pairs fill the square evenly."""
    n = 100_000
    for seeds, positions in (([7] * n, np.arange(n)), (list(range(n)), np.full(n, 12))):
        u = [numbers(stream, seeds, positions).numpy() for stream in range(4)]
        for i in range(4):
            for j in range(i):
                cells = np.histogram2d(u[i], u[j], 16, [[0, 1], [0, 1]])[0]
                assert chisquare(cells.ravel()).pvalue > 1e-4


def test_seeds_of_any_size_and_sign() -> None:
    seeds = [0, 1, -1, 2**31, 2**63, 2**64 - 2, -(2**63) + 5]
    u = torch.stack([numbers(stream, seeds, np.full(len(seeds), 3)) for stream in range(4)])
    assert len(u.unique()) == u.numel()


# ---- final probabilities, and a whole step ----


def pack(samplings: list[dict[str, Any]], lens: list[int], size: int) -> SamplingMetaData:
    params = [SamplingParams(**({**NEUTRAL, "repetition_penalty": 1} | sampling)) for sampling in samplings]
    return SamplingMetaData.pack(params, np.array(lens), size)


def test_final_probs_are_what_the_sampler_draws_from() -> None:
    """The same numbers give the same tokens; greedy rows among the others, and rows that see their own history."""
    samplings: list[dict[str, Any]] = [{}, *SAMPLING, {"repetition_penalty": 3.0}, {"temperature": 2.0, "top_p": 0.6}]
    rows = [{"seed": i, **samplings[i % len(samplings)]} for i in range(4000)]
    logits = torch.randn(4000, 30, generator=torch.Generator().manual_seed(9)).bfloat16()
    past = [(i, token) for i, sampling in enumerate(rows) if "repetition_penalty" in sampling for token in {i % 30, i % 7}]
    by = torch.tensor([sampling.get("repetition_penalty", 1.0) for sampling in rows])
    logits = penalize(logits.float(), by, torch.tensor(past).T)
    meta = pack(rows, list(range(4000)), 30)
    probs, tokens = final_probs(logits, meta), Sampler()(logits, meta)
    assert probs.dtype == torch.float32 and torch.allclose(probs.sum(-1), torch.ones(4000))
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert (draw(probs, meta.u) == tokens).float().mean() > 0.999  # but for rounding at a border
    greedy = meta.temperature == 0
    assert torch.equal(probs[greedy].argmax(-1), tokens[greedy]) and (probs[greedy].amax(-1) == 1).all()


def test_all_greedy_with_a_penalty() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    logits = penalize(logits, torch.tensor([2.0]), torch.tensor([[0], [0]]))
    meta = pack([{"repetition_penalty": 2.0}], [4], 3)
    assert final_probs(logits, meta).tolist() == [[0, 1, 0]]
