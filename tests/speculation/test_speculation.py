"""Drafts never change a word: verification against the oracle, against the run without, and with its parts broken."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from show import check_blocks, new_tokens
from symbolic import Request, SymbolicDrafter, SymbolicRunner, continuation, make_trial, run_many, run_trial
from test_fuzz import mutate
from test_interrupt import interrupt_everywhere

import atom_mini.speculation.verify as verify
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.model_runner import made_up_batch
from atom_mini.options.build import choose_scheduler
from atom_mini.scheduler import MixedScheduler
from atom_mini.scheduling.overlap import OverlapScheduler
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.verify import Drafter, SpecCore, SpecScheduler, as_rows

Patch = pytest.MonkeyPatch


# ---- the symbolic cache ----


def run_drafts(trials: int, **how: Any) -> Counter[str]:
    """Every third in a tight pool."""
    stats = run_many(range(0, trials, 3), tight=True, drafts=True, **how)
    return stats + run_many([seed for seed in range(trials) if seed % 3], drafts=True, **how)


@pytest.mark.slow
def test_outputs_equal_the_oracle_with_drafts() -> None:
    """And drafts are made, accepted, rejected, dropped and cut off often enough for that to say something."""
    stats = run_drafts(1200)
    least = {
        "drafted": 12_000, "accepted": 6000, "preemptions": 600, "prefix_hits": 600, "chunks": 5000, "failures": 400,
        "aborts_running": 30, "max_tokens": 1000, "max_model_len": 500, "kv_cache": 500, "eos": 400, "stop": 100,
        "stop_sequence": 40,
    }  # fmt: skip
    assert not {name: stats[name] for name in least if stats[name] < least[name]}
    assert stats["drafted"] > 1.2 * stats["accepted"]


def test_with_a_radix_tree() -> None:
    assert run_drafts(150, cache="radix")["accepted"] > 800


def test_drafts_change_nothing_in_the_pool(monkeypatch: Patch) -> None:
    """With a drafter that is always wrong the same steps are taken and the same sequences preempted as without one.

    Not with a prefix cache, of which drafts may take the oldest free block.
    """
    monkeypatch.setattr(SymbolicDrafter, "propose", lambda self, seqs, most: [[self.alphabet] * n for n in most])
    stats: Counter[str] = Counter()
    for seed in range(300):
        config = make_trial(seed).config
        if not config.enable_prefix_caching and not config.scheduler_delay_factor:
            plain, drafted = (run_trial(seed, tight=True, drafts=drafts) for drafts in (False, True))
            if not plain["failures"] and not drafted["failures"]:  # those come by chance
                assert (drafted["preemptions"], drafted["steps"]) == (plain["preemptions"], plain["steps"])
                stats += drafted
    assert stats["preemptions"] > 30 and stats["drafted"] > 300 and stats["accepted"] == 0


# ---- planted bugs: each is found by the fuzz ----


def plant(patch: Patch, name: str, old: str, new: str) -> None:
    mutate(patch, SpecScheduler, name, old, new)


def counts_rejected_drafts_as_computed(patch: Patch) -> None:
    """The rollback is missing."""
    plant(patch, "postprocess", "seq.num_scheduled_tokens = len(output.token_ids[seq.id])", "pass")


def rolls_back_one_too_few(patch: Patch) -> None:
    """Off by one: the bonus token counts as computed."""
    old = "seq.num_scheduled_tokens = len(output.token_ids[seq.id])"
    plant(patch, "postprocess", old, old + " + 1")


def publishes_drafts(patch: Patch) -> None:
    """nano-vLLM's PR 147, vLLM 41838: blocks enter the index before their tokens are known."""
    old = "        seq.num_scheduled_tokens = 1 + len(draft)"
    new = old + "\n        self._publish_drafts(seq, self.drafts[seq.id])"

    def publish(self: SpecScheduler, seq: Sequence, draft: list[int]) -> None:
        seq.token_ids += draft
        self.block_manager.stage(seq, len(seq.token_ids))
        del seq.token_ids[len(seq.token_ids) - len(draft) :]

    patch.setattr(SpecScheduler, "_publish_drafts", publish, raising=False)
    plant(patch, "add_drafts", old, new)


def takes_the_bonus_from_the_next_row(patch: Patch) -> None:
    """The row after the first rejected draft saw a past that never was."""
    new = "tuple(found[:good] + (found[good + 1 : good + 2] or found[good : good + 1]))"
    mutate(patch, verify, "accept", "tuple(found[: good + 1])", new)


def accepts_after_a_rejection(patch: Patch) -> None:
    """Drafts are compared one by one, not up to the first that is wrong."""
    old = "next((j for j, d in enumerate(drafts) if d != found[j]), n - 1)"
    mutate(patch, verify, "accept", old, "sum(d == s for d, s in zip(drafts, found))")


def forgets_the_limit(patch: Patch) -> None:
    """More tokens than were asked for, in a pool without a place for them."""
    old = "min(self.num_drafts, seq.limit - seq.num_tokens - 1, left)"
    plant(patch, "most_drafts", old, "min(self.num_drafts, left)")


def forgets_the_budget(patch: Patch) -> None:
    plant(patch, "most_drafts", "seq.num_tokens - 1, left)", "seq.num_tokens - 1)")


def takes_blocks_that_are_not_there(patch: Patch) -> None:
    plant(patch, "_reserve", "min(num_drafts, blocks * seq.block_size - seq.num_tokens)", "num_drafts")


def keeps_the_drafts_blocks(patch: Patch) -> None:
    """Found by the count of preemptions alone, see above; here it is that a block is given back twice."""
    old = "self.block_manager.pool.release(seq.block_table.pop())"
    plant(patch, "_give_back", old, f"{old.replace('pop()', 'copy().pop()')}; {old}")


def reads_one_context_for_all_rows(patch: Patch) -> None:
    """vLLM-like metadata per sequence instead of per row: every row sees all drafts."""
    old = "(batch.context_lens - ends)[owners] + np.arange(1, len(owners) + 1)"
    mutate(patch, verify, "as_rows", old, "batch.context_lens[owners]")


PLANTED: list[Callable[[Patch], None]] = [
    counts_rejected_drafts_as_computed, rolls_back_one_too_few, publishes_drafts, takes_the_bonus_from_the_next_row,
    accepts_after_a_rejection, forgets_the_limit, forgets_the_budget, takes_blocks_that_are_not_there,
    keeps_the_drafts_blocks, reads_one_context_for_all_rows,
]  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="reproduce with"):
        run_drafts(300)


# ---- step by step ----


def test_a_row_sees_the_drafts_before_it() -> None:
    """vLLM 18902: penalties that do not know of the drafts."""
    batch = made_up_batch(SequenceType.PREFILL, 3, np.zeros((1, 1), np.int32))
    rows = as_rows(replace(batch, scheduled_tokens=np.array([7, 8, 9]), histories={0: [5, 7]}))
    assert rows.histories == {0: [5, 7], 1: [5, 7, 8], 2: [5, 7, 8, 9]} and rows.context_lens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_an_oracle_takes_as_few_steps_as_can_be(k: int) -> None:
    """ceil(n / (k + 1)) decode steps for the n tokens after the prompt's own."""
    for n in (1, 2, 9, 17, 40):
        config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=30, max_num_batched_tokens=16, max_num_seqs=2)
        runner, scheduler = SymbolicRunner(config, 12), SpecScheduler(config)
        runner.max_rows = 16
        scheduler.num_drafts = k
        core = SpecCore(config, runner, SymbolicDrafter(12, 1.0, random.Random(0)), scheduler)
        core.add(seq := Sequence([1, 2, 3], 4, SamplingParams(max_tokens=1 + n)))
        while core.step():
            pass
        assert seq.completion_token_ids == [t for t, _ in itertools.islice(continuation([1, 2, 3], None, 12), 1 + n)]
        stats = scheduler.spec_stats
        assert stats.num_steps == -(-n // (k + 1)) and stats.num_tokens == n
        assert sum(a * m for a, m in stats.histogram.items()) == stats.accepted.total()


def test_statistics_do_not_count_what_an_end_token_cuts_off() -> None:
    """vLLM 56101: drafts behind it were accepted, and nobody got them."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=30, max_num_batched_tokens=16)
    tokens = [t for t, _ in itertools.islice(continuation([1, 2, 3], None, 12), 6)]
    last = next(i for i in range(2, 6) if tokens[i] not in tokens[:i])
    runner, scheduler = SymbolicRunner(config, 12), SpecScheduler(config)
    scheduler.num_drafts = 8
    core = SpecCore(config, runner, SymbolicDrafter(12, 1.0, random.Random(0)), scheduler)
    core.add(seq := Sequence([1, 2, 3], 4, SamplingParams(max_tokens=20, stop_token_ids=[tokens[last]])))
    core.step()
    step = core.step()
    assert step and step.finished == [seq] and seq.completion_token_ids == tokens[: last + 1]
    assert scheduler.spec_stats.num_tokens == scheduler.spec_stats.accepted.total() == last
    assert {*scheduler.spec_stats.acceptance} == {1.0}
    assert new_tokens(step)[0].tokens == tuple(tokens[1 : last + 1])


REQUESTS = [
    Request(0, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9, ignore_eos=True)),
    Request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=6, ignore_eos=True)),
    Request(0, [2, 2], SamplingParams(max_tokens=11, seed=3)),
]


def make_core() -> SpecCore:
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=7, max_num_batched_tokens=10, max_num_seqs=4)
    scheduler = SpecScheduler(config)
    scheduler.num_drafts = 3
    runner = SymbolicRunner(config, 12, strict=False)
    return SpecCore(config, runner, SymbolicDrafter(12, 0.8, random.Random(1)), scheduler)


@pytest.mark.slow
def test_interrupted_at_any_line() -> None:
    """As in test_interrupt: the same requests go on, others come, and all see the oracle's tokens."""
    interrupt_everywhere(make_core, REQUESTS, trace=False)


# ---- the real model ----

PROMPTS = [
    "Once upon a time there was",
    "Ada lives in Rome. Mia has a red cat. What does Mia have?",
    "12 + 7 =",
    "3 + 3 = 6 3 + 3 =",
]
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True),
    "everything": SamplingParams(
        temperature=1.1, seed=7, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2, logprobs=3, max_tokens=20
    ),
    "stops": SamplingParams(temperature=0, max_tokens=24, stop=["One day", " cat"], stop_token_ids=[17]),
}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 3},
    "tight": {"num_kvcache_blocks": 22, "kv_cache_block_size": 4},
    "radix": {"prefix_cache": "radix"},
    "turns": {"interleave_decode": True},
}
BASE: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 80, "max_num_seqs": 8}


class FromABook(Drafter):
    """Knows what comes, except every `gap`-th token."""

    def __init__(self, books: dict[tuple[int, ...], list[int]], gap: int) -> None:
        super().__init__()
        self.books, self.gap = books, gap

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        drafts = []
        for seq, n in zip(seqs, most, strict=True):
            at = seq.num_completion_tokens
            book = self.books[tuple(seq.token_ids[: seq.num_prompt_tokens])][at : at + n]
            drafts.append([t ^ ((at + i) % self.gap == 0) for i, t in enumerate(book)])
        return drafts


def noted(llm: LLM, prompts: list[list[int]], params: Any) -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """(the texts, by text and length the drafts that were made) of a run."""
    core: Any = llm.engine_core
    given, propose = dict[tuple[int, int], list[int]](), core.drafter.propose

    def noting(seqs: Any, most: Any) -> Any:
        drafts = propose(seqs, most)
        given.update({(seq.id, seq.num_tokens): draft for seq, draft in zip(seqs, drafts, strict=True)})
        return drafts

    core.drafter.propose = noting
    outs = llm.generate(prompts, params, use_tqdm=False)
    place = {out.request_id: i for i, out in enumerate(outs)}
    texts = [out.prompt_token_ids + out.token_ids for out in outs]
    return texts, {(place[id], length): draft for (id, length), draft in given.items()}


def outcome(outs: list[Any]) -> list[Any]:
    return [(o.text, o.token_ids, o.finish_reason, o.stop_reason, [sorted(p) for p in o.logprobs or []]) for o in outs]


@pytest.mark.parametrize(("setup", "sampling"), [
    ("plain", "greedy"), ("chunks", "everything"), ("tight", "sampled"), ("radix", "stops"), ("turns", "everything"),
])  # fmt: skip
def test_text_is_what_it_is_without(setup: str, sampling: str) -> None:
    """Token for token, with whatever else is asked; log probabilities within rounding."""
    options = BASE | SETUPS[setup]
    with LLM("tiny", **options) as llm:
        plain = llm.generate(PROMPTS, SAMPLING[sampling], use_tqdm=False)
    books = {tuple(o.prompt_token_ids): o.token_ids for o in plain}
    for k, gap in ((1, 10**6), (5, 2), (8, 7)):
        with LLM("tiny", **options, speculative_config={"num_speculative_tokens": k}) as llm:
            core: Any = llm.engine_core
            core.drafter, scheduler = FromABook(books, gap), core.scheduler
            outs = llm.generate(PROMPTS, SAMPLING[sampling], use_tqdm=False)
            assert outcome(outs) == outcome(plain)
            for ours, theirs in zip(outs, plain, strict=True):
                for found, wanted in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                    assert found == pytest.approx(wanted, abs=1e-4)
            assert scheduler.spec_stats.accepted.total() > 0
            check_blocks(scheduler.block_manager, [])
            assert scheduler.block_manager.num_free_blocks == len(scheduler.block_manager.pool.blocks)


# ---- knobs ----


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"speculative_config": {"method": "oracle"}}, ["'oracle'", "ngram"]),
    ({"speculative_config": {"num_speculative_tokens": -1}}, ["-1", "num_speculative_tokens"]),
    ({"speculative_config": {"num_tokens": 3}}, ["num_tokens", "did you mean"]),
    ({"speculative_config": {"num_speculative_tokens": 16}, "max_num_batched_tokens": 16}, ["16", "17", "lower"]),
    ({"speculative_config": {"prompt_lookup_min": 9}}, ["9", "prompt_lookup_max=4"]),
    ({"speculative_config": {1: 2}}, ["speculative_config={1: 2}", "dict"]),
    ({"speculative_config": "{'method': 1}"}, ["not JSON"]),
    ({"speculative_config": {"method": "eagle3", "model": ""}}, ["model=''", "at least 1 character"]),
    ({"speculative_config": {"method": "draft_model"}}, ["draft_model", "needs a checkpoint", "set model"]),
    ({"speculative_config": {"model": "tiny"}}, ["model='tiny'", "draft_model and eagle3", "'ngram'"]),
    ({"speculative_config": {"draft_sampling": True}}, ["draft_sampling=True", "draft_model", "'ngram'"]),
    ({"speculative_config": {}, "overlap": True}, ["overlap=True", "False"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        EngineArgs("tiny", **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_zero_drafts_is_off() -> None:
    """And then nothing is refused that goes without drafts."""
    config = EngineArgs("tiny", speculative_config='{"num_speculative_tokens": 0}', overlap=True)
    assert choose_scheduler(config) is OverlapScheduler and config.speculative_config is None
    EngineArgs("tiny", tensor_parallel_size=2, speculative_config={"method": "eagle3", "num_speculative_tokens": 0})


class MixedSpecScheduler(SpecScheduler, MixedScheduler):
    """Of a user: drafts, and prompts beside decodes."""


def test_a_scheduler_with_drafts_and_mixed_steps() -> None:
    """A mixed step has no drafts, and a prompt's chunk keeps its tokens."""
    prompts = ["Once upon a time", "the cat and the cat and the cat and", "One day Tom saw a dog"]
    params = SamplingParams(temperature=0, max_tokens=20)
    small = {"device": "cpu", "num_kvcache_blocks": 40, "max_num_seqs": 2}
    more = {"scheduler_cls": MixedSpecScheduler, "speculative_config": {"method": "ngram"}, "max_num_batched_tokens": 12}
    answers = []
    for options in (small, small | more):
        with LLM("tiny", **options) as llm:
            answers.append([out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]
