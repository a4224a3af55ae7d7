"""The sampler against closed forms in float64, against transformers, and against itself in other company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
)

from atom_mini.config import SamplingParams
from atom_mini.extras import Extras, gather_logprobs, penalize
from atom_mini.sampler import Sampler, SamplingMetaData, draw, on_cpu
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
LAST = 1 - 2**-24  # the largest number that `uniforms` gives


def some_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def pack(
    samplings: list[dict[str, Any]], positions: int | np.ndarray, vocabulary: int,
) -> SamplingMetaData:  # fmt: skip
    made = {id(sampling): SamplingParams(**sampling).resolve(DEFAULTS) for sampling in {id(w): w for w in samplings}.values()}
    params = [made[id(sampling)] for sampling in samplings]
    return SamplingMetaData.pack(params, np.broadcast_to(positions, len(params)), vocabulary)


def adjusted(logits: Tensor, samplings: list[dict[str, Any]], histories: dict[int, list[int]]) -> Tensor:
    """What chapter 24 makes of the logits of a decode in which everybody samples."""
    B, params = len(samplings), [SamplingParams(**sampling).resolve(DEFAULTS) for sampling in samplings]
    ones, table = np.ones(B, np.int32), np.zeros((B, 1), np.int32)
    batch = ScheduledBatch(
        SequenceType.DECODE, [*range(B)], ones.astype(np.int64), ones, ones, table, ones > 0, params, histories
    )
    return Extras().adjust(batch, logits, on_cpu)


def sample(
    logits: Tensor, samplings: list[dict[str, Any]], positions: int | np.ndarray = 10,
    histories: dict[int, list[int]] | None = None,
) -> list[int]:  # fmt: skip
    logits = adjusted(logits, samplings, histories) if histories else logits.clone()
    return Sampler()(logits, pack(samplings, positions, logits.shape[-1])).tolist()


def closed_form(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """What a request with these wishes draws from: written from the definitions, one token at a time, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[:top_k] if top_k > 0 else order
    weights = {i: np.exp(scaled[i] - scaled[order[0]]) for i in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if mass < top_p:
            nucleus.append(i)
        mass += weights[i] / total
    nucleus = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    out = np.zeros(len(scaled))
    out[nucleus] = [weights[i] for i in nucleus]
    return out / out.sum()


WISHES: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 1e30}, {"top_k": 1}, {"top_k": -1}, {"top_k": 1000}, {"top_p": 0.05},
    {"min_p": 1.0}, {"temperature": 1.7, "top_k": 8}, {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1}, {"top_k": 9, "min_p": 0.3},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.85, "min_p": 0.08},
]  # fmt: skip


@pytest.mark.parametrize("sampling", WISHES, ids=str)
def test_draws_follow_the_closed_form(sampling: dict[str, Any]) -> None:
    """Eight requests at 2,500 positions each; what is filtered out is never drawn."""
    n, vocabulary = 20_000, 24
    logits = some_logits(1, vocabulary, seed=3, scale=1.5)
    drawn = sample(logits.expand(n, -1), [{"seed": i, **sampling} for i in range(8)] * (n // 8), np.arange(n) // 8)
    counts, p = np.bincount(drawn, minlength=vocabulary), closed_form(logits[0].numpy(), **sampling)
    assert counts[p == 0].sum() == 0
    if (p > 0).sum() > 1:
        rare = p < 5 / n  # chi-square wants at least five of each
        expected = np.append(p[~rare], p[rare].sum()) * n
        observed = np.append(counts[~rare], counts[rare].sum())
        assert chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_one_seed_gives_a_fair_sequence_along_its_positions() -> None:
    """A request draws one number per position: these must be as good as those of many requests."""
    n, logits = 20_000, some_logits(1, 12, seed=4, scale=1.0)
    drawn = sample(logits.expand(n, -1), [{"seed": 42}] * n, np.arange(n))
    p = closed_form(logits[0].numpy())
    assert chisquare(np.bincount(drawn, minlength=12), p * n).pvalue > 1e-3
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
    assert chisquare(pairs.ravel(), np.outer(p, p).ravel() * (n - 1)).pvalue > 1e-3  # neighbours are independent


# ---- in any company ----


def test_a_request_draws_the_same_token_alone_in_any_batch_and_in_any_row() -> None:
    """ATOM shares one row of noise, so neighbours agree and company matters; here nothing about a batch may."""
    rng, vocabulary = np.random.default_rng(0), 200
    logits = some_logits(len(WISHES), vocabulary, seed=5)
    samplings = [{"seed": 100 + i, **sampling} for i, sampling in enumerate(WISHES)]
    positions = rng.integers(1, 1000, len(samplings))
    alone = [sample(logits[i : i + 1], [samplings[i]], positions[i : i + 1])[0] for i in range(len(samplings))]
    for _ in range(20):
        rows = rng.permutation(len(samplings))[: rng.integers(1, len(samplings) + 1)]
        rows = np.append(rows, rng.choice(rows, 3))  # twins, too
        assert sample(logits[rows], [samplings[i] for i in rows], positions[rows]) == [alone[i] for i in rows]


# ---- draw ----


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-3, 1 + 2**-23])
def test_draw_never_takes_a_token_of_probability_zero(scale: float) -> None:
    """Zeros at both ends and in between; sums that are not 1, as rounding makes them."""
    probs = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.25, 0.25, 0.0, 0.0]).expand(6, -1) * scale
    tokens = draw(probs, torch.tensor([0.0, 2.0**-24, 0.25, 0.5, 0.75, LAST]))
    assert tokens.tolist() == [2, 2, 2, 4, 5, 5]


# ---- filters and penalty, as transformers ----


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    """Repeated tokens count once; logits above and below zero move the other way; so does zero. And
    beside somebody who has not asked for it."""
    logits = some_logits(3, 30, seed=2)
    logits[:, 5] = 0.0
    ids = torch.tensor([[1, 5, 5, 7, 29], [0, 1, 2, 3, 4], [9, 9, 9, 9, 9]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    seen = torch.tensor([(row, token) for row in range(3) for token in set(ids[row].tolist())]).T
    assert torch.equal(penalize(logits, torch.full((3,), penalty), seen), expected)
    assert torch.equal(adjusted(logits, [{"repetition_penalty": penalty}] * 3,
                                {row: ids[row].tolist() for row in range(3)}), expected)  # fmt: skip
    beside = adjusted(logits, [{}, {"repetition_penalty": penalty}, {}], {1: ids[1].tolist()})
    assert torch.equal(beside, torch.stack([logits[0], expected[1], logits[2]]))


# ---- temperature ----


@pytest.mark.parametrize(
    ("temperature", "others"),
    [(1e-2, {}), (1e-10, {"top_p": 0.9}), (1e-38, {"top_k": 5}), (1e-44, {"min_p": 0.1}), (1e-60, {})],
)
def test_a_tiny_temperature_is_argmax_and_no_nan(temperature: float, others: dict[str, Any]) -> None:
    """nano-vLLM and ATOM divide large numbers by 1e-10; 1e-60 is 0 in float32."""
    logits = some_logits(50, 100, seed=6, scale=30.0)
    logits[:, 3] = -torch.inf
    top = logits.topk(2).values
    samplings = [{"seed": i, "temperature": temperature, **others} for i in range(50)]
    clear = (top[:, 0] - top[:, 1]) / temperature > 20
    assert clear.sum() > 25
    drawn = torch.tensor(sample(logits, samplings))
    assert torch.equal(drawn[clear], logits.argmax(-1)[clear])


@pytest.mark.parametrize(
    ("sampling", "value"),
    [({"temperature": 0}, np.nan), ({"seed": 1}, np.inf), ({"seed": 1, "top_k": 3}, np.nan), ({"seed": 1, "min_p": 0.1}, np.inf)],
)
def test_no_token_where_a_logit_is_no_number(sampling: dict[str, Any], value: float) -> None:
    """Whatever is wished, and whatever the others in the batch get: -1 for this row alone."""
    logits = some_logits(3, 16)
    fine = sample(logits, [sampling] * 3)
    logits[1, 5] = value
    assert sample(logits, [sampling] * 3) == [fine[0], -1, fine[2]]
    with_penalty = [{**sampling, "repetition_penalty": 1.5}] * 3
    assert sample(logits, with_penalty, histories={0: [1], 1: [2], 2: [3]})[1] == -1


# ---- log probabilities ----


def test_logprobs_are_the_models_and_hold_the_sampled_token() -> None:
    logits = some_logits(4, 30, seed=9)
    exact = logits.double().log_softmax(-1).numpy()
    sampled, wanted = [3, 4, int(logits[2].argmax()), 6], [0, None, 2, 5]
    out = gather_logprobs(logits, sampled, wanted)
    assert list(out) == [0, 2, 3]
    for row, found in out.items():
        k = wanted[row] or 0
        best = np.argsort(-exact[row])[:k].tolist()
        assert set(found) == {*best, sampled[row]} and list(found)[:k] == best
        assert all(abs(p - exact[row, token]) < 1e-5 for token, p in found.items())
    assert len(out[0]) == 1 and len(out[2]) == 2


# ---- the part that does both ----


def test_places_are_counted_among_the_rows_that_sample_and_the_newest_is_filled_in() -> None:
    """A prompt that goes on has no row; -1 is the token that only the device knows, here the penalized 2."""
    params = [SamplingParams(), SamplingParams(repetition_penalty=2.0, logprobs=0)]
    ones = np.ones(2, np.int32)
    batch = ScheduledBatch(
        SequenceType.PREFILL, [7, 8], np.ones(2, np.int64), ones, ones, np.zeros((2, 1), np.int32),
        np.array([False, True]), params, {1: [0, 0, -1]},
    )  # fmt: skip
    logits = torch.tensor([[4.0, 3.0, -1.0]])
    extras = Extras()
    extras.newest = torch.tensor([2])
    assert extras.adjust(batch, logits, on_cpu).tolist() == [[2.0, 3.0, -2.0]]
    ((token, value),) = Extras().report(batch, logits, [1])[8][0].items()
    assert token == 1 and abs(value - logits.log_softmax(-1)[0, 1].item()) < 1e-6  # the model's own
    assert [*Extras().report(batch, logits, [1])] == [8]
