"""A host that plans a step ahead of its device: the same tokens, whatever happens while a step runs."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import symbolic
import torch
from show import new_tokens
from symbolic import run_many
from test_fuzz import mutate

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput, Scheduler
from atom_mini.scheduling.overlap import PLACEHOLDER, OverlapCore, OverlapScheduler
from atom_mini.scheduling.spyre import SpyreScheduler
from atom_mini.sequence import Sequence

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_outputs_equal_the_oracle_a_step_ahead() -> None:
    """Tight pools, most of which preempt; devices that run late, at once or mixed; steps that fail."""
    stats = run_many(range(2000), overlap=True, tight=True)
    least = {
        "ahead": 50_000, "preempting": 1100, "preemptions": 3000, "put_back": 1500, "prefix_hits": 1000,
        "chunks": 4000, "failures": 800,
        "aborts_running": 80, "max_tokens": 1500, "kv_cache": 1000, "eos": 200, "stop": 250, "stop_sequence": 80,
    }  # fmt: skip
    assert not {name: stats[name] for name in least if stats[name] < least[name]}


def test_roomy_pools_and_the_radix_cache() -> None:
    """The loads of the plain fuzz, and a radix tree instead of hashes."""
    assert run_many(range(300), overlap=True)["prefix_hits"] > 300
    assert run_many(range(150), overlap=True, cache="radix")["prefix_hits"] > 100


# ---- planted bugs ----


def plant(patch: Patch, name: str, old: str, new: str) -> None:
    mutate(patch, OverlapScheduler, name, old, new)


def keeps_placeholders(patch: Patch) -> None:
    """ATOM, defect A: a placeholder stays in the context of a sequence that lost its blocks."""
    mutate(patch, Sequence, "restart", "del self.token_ids[self.num_known_tokens :]", "self.num_known_tokens = self.num_tokens")


def drops_one_placeholder_of_two(patch: Patch) -> None:
    """ATOM again: the number is derived, not counted."""
    old = "del self.token_ids[self.num_known_tokens :]"
    cut = "self.num_known_tokens = max(self.num_known_tokens, self.num_tokens - 1)"
    mutate(patch, Sequence, "restart", old, f"{cut}; {old}")


def preempts_under_a_step(patch: Patch) -> None:
    """The preempted sequence's blocks get another owner in the next step."""
    plant(patch, "_schedule_decode", "if self.num_launched and", "if False and")


def publishes_unknown_tokens(patch: Patch) -> None:
    """A block whose last token is a placeholder is hashed with it."""
    old = "seq.num_known_tokens % size == 0:"
    mutate(patch, Scheduler, "_schedule_decode", old, f"{old[:-1]} or manager.stage(seq, seq.num_tokens):")


def maps_by_place_in_the_batch(patch: Patch) -> None:
    """ATOM, an earlier version: deferred inputs by position, although the batch has changed."""
    old = "self.runner.token_pool.get(self.batch.rows[i], 0)"
    mutate(patch, symbolic.SymbolicStep, "fill_in", old, "self.runner.token_pool.get(i, 0)")


def delivers_to_the_finished(patch: Patch) -> None:
    """The token of the superfluous step is delivered after the end."""
    plant(patch, "deliver", "for seq in seqs if not seq.is_finished]", "for seq in seqs]")


def gives_up_one_step_of_two(patch: Patch) -> None:
    """The step after the failed one reads keys and values that were never written."""
    mutate(patch, OverlapCore, "rollback", "self.in_flight.clear()", "pass")


PLANTED = [
    keeps_placeholders, drops_one_placeholder_of_two, preempts_under_a_step, publishes_unknown_tokens,
    maps_by_place_in_the_batch, delivers_to_the_finished, gives_up_one_step_of_two,
]  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_the_fuzz_catches(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="reproduce"):
        run_many(range(1000), overlap=True, tight=True)


# ---- rules ----


class Waiting:
    """A device that runs nothing before its result is asked for; the next token is the sequence's length."""

    def __init__(self) -> None:
        self.launched: list[tuple[ScheduledBatch, Future[ScheduledBatchOutput]]] = []

    def launch(self, batch: ScheduledBatch) -> Any:
        future: Future[ScheduledBatchOutput] = Future()
        self.launched.append((batch, future))
        if len(self.launched) > 1:
            self.answer(len(self.launched) - 2)
        return Answering(future, self)

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        return self.launch(batch)()

    def answer(self, i: int) -> None:
        batch, future = self.launched[i]
        if not future.done():
            rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled, strict=True)
            future.set_result(ScheduledBatchOutput({i: (n,) for i, n, sampled in rows if sampled}))


class Answering:
    """Run the last step, if it is the only one left."""

    def __init__(self, future: Future[ScheduledBatchOutput], device: Waiting) -> None:
        self.future, self.device = future, device

    def __call__(self) -> ScheduledBatchOutput:
        self.device.answer(next(i for i, (_, f) in enumerate(self.device.launched) if f is self.future))
        return self.future.result()


def make_core(**options: Any) -> OverlapCore:
    knobs = {"kv_cache_block_size": 4, "num_kvcache_blocks": 16, "overlap": True}
    return OverlapCore(EngineArgs(**knobs | options), Waiting())


def tables(core: OverlapCore) -> list[list[int]]:
    return [batch.scheduled_tokens.tolist() for batch, _ in core.runner.launched]  # type: ignore[attr-defined]


def test_the_next_step_is_launched_before_the_last_is_looked_at() -> None:
    """And a request that ends by length costs no superfluous step."""
    core = make_core()
    seq = Sequence([1, 2, 3], 4, SamplingParams(max_tokens=3, ignore_eos=True))
    core.add(seq)
    core.step()
    assert tables(core) == [[1, 2, 3], [PLACEHOLDER]] and seq.completion_token_ids == [3]
    core.step()
    assert len(core.runner.launched) == 3 and seq.completion_token_ids == [3, 4] and seq.num_tokens == 6  # type: ignore[attr-defined]
    core.step()
    assert len(core.runner.launched) == 3 and seq.completion_token_ids == [3, 4, 5] and core.is_finished()  # type: ignore[attr-defined]
    assert core.step() is None


def test_an_end_token_costs_one_step_and_frees_its_blocks_at_once() -> None:
    core = make_core()
    seq = Sequence([1, 2, 3], 4, SamplingParams(max_tokens=9, stop_token_ids=[4]))
    core.add(seq)
    core.step()
    step = core.step()
    assert step is not None and step.finished == [seq] and seq.completion_token_ids == [3, 4]
    assert core.scheduler.block_manager.num_free_blocks == 16 and not core.is_finished()
    step = core.step()
    assert step is not None and new_tokens(step) == [] and core.is_finished()
    assert core.scheduler.block_manager.num_free_blocks == 16 and seq.completion_token_ids == [3, 4]


def test_what_cannot_run_ahead_is_refused_by_name() -> None:
    for options in ({"scheduler": "spyre"}, {"scheduler_delay_factor": 0.5}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}=.*overlap=True"):
            EngineArgs(overlap=True, max_model_len=512, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scheduler=None must be 'atom' or 'spyre'"):  # none at all, with overlap or without
        EngineArgs(overlap=True, scheduler=None)
    with pytest.raises(ValueError, match="overlap='yes'"):
        EngineArgs(overlap="yes")  # type: ignore[arg-type]
    config = EngineArgs(scheduler="spyre", kv_cache_block_size=64, num_kvcache_blocks=8, max_model_len=512)
    for scheduler in (SpyreScheduler(config), Scheduler(EngineArgs(num_kvcache_blocks=8))):
        with pytest.raises(ValueError, match=type(scheduler).__name__):
            OverlapCore(config, Waiting(), scheduler)


def test_no_step_is_planned_ahead_unless_it_is_asked_for(monkeypatch: Patch) -> None:
    """Not on a GPU either, where no run has shown yet what it gains."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [EngineArgs("tiny", device=device).overlap for device in (None, "cpu")] == [False, False]


# ---- the built-in model ----


@pytest.mark.parametrize("options", [
    {}, {"num_kvcache_blocks": 30, "kv_cache_block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 48},
    {"prefix_cache": "radix", "interleave_decode": True}, {"max_num_batched_tokens": 16},
], ids=str)  # fmt: skip
def test_the_models_tokens_are_the_same(options: dict[str, Any]) -> None:
    """With temperatures, penalties, log probabilities and stop strings."""
    rng = random.Random(0)
    names = ["Ada", "Ben", "Mia", "Tom"]
    prompts = [f"{rng.choice(names)} lives in Rome. {rng.choice(names)} has a red cat. Then" for _ in range(16)]
    params = [
        SamplingParams(
            max_tokens=16 + i, temperature=(i % 2) * 0.9, seed=i, repetition_penalty=1 + (i % 3) * 0.2,
            logprobs=2 if i % 5 == 0 else None, stop=["cat"] if i % 4 == 0 else [], top_k=5 * (i % 7 == 0),
        )
        for i in range(16)
    ]  # fmt: skip
    results = []
    for ahead in (False, True):
        with LLM("tiny", device="cpu", overlap=ahead, **options) as llm:
            outs = llm.generate(prompts, params, use_tqdm=False)
            manager = llm.engine_core.scheduler.block_manager
            assert manager.num_free_blocks == len(manager.pool.blocks)
            results.append(([(o.token_ids, o.text, o.stop_reason) for o in outs], [o.logprobs or [] for o in outs]))
    (plain, plain_logprobs), (ahead_outs, logprobs) = results
    assert ahead_outs == plain
    for ours, theirs in zip(logprobs, plain_logprobs, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-3)


def arrivals(llm: LLM, kept: dict[int, list[int]]) -> int:
    """Run sixteen requests, one every third step, of which every fourth is aborted. `kept` gets the tokens of the others by
    number. Return how many sequences have lost their blocks so far."""
    rng, ids, steps = random.Random(1), list[int](), 0
    while len(ids) < 16 or not llm.engine_core.is_finished():
        if steps % 3 == 0 and (number := len(ids)) < 16:
            params = SamplingParams(max_tokens=rng.randrange(5, 20), temperature=number % 2, seed=number, ignore_eos=True)
            ids.append(llm.add_request([rng.randrange(5, 300) for _ in range(rng.randrange(2, 30))], params))
        if steps % 12 == 11 and steps < 48:
            llm.abort(ids[-1])
        step = llm.step()
        kept |= {ids.index(seq.id): seq.completion_token_ids for seq in (step.finished if step else [])}
        steps += 1
    return llm.engine_core.scheduler.num_preemptions


@pytest.mark.slow
def test_arrivals_aborts_and_preemptions_change_no_token_and_leave_nothing() -> None:
    """With and without overlap. Repeating the same arrivals leaves no more objects behind than before."""
    limits: dict[str, Any] = {"num_kvcache_blocks": 30, "kv_cache_block_size": 4, "max_num_seqs": 6}
    with LLM("tiny", device="cpu", **limits) as plain, LLM("tiny", device="cpu", overlap=True, **limits) as ahead:
        wanted, found = dict[int, list[int]](), dict[int, list[int]]()
        assert arrivals(plain, wanted) > 0 and arrivals(ahead, found) > 0
        assert found == wanted and len(wanted) == 12
        counts = []
        for _ in range(3):
            arrivals(ahead, {})
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert counts[2] - counts[1] < 50, counts
        manager = ahead.engine_core.scheduler.block_manager
        assert manager.num_free_blocks == len(manager.pool.blocks)


def test_closing_waits_and_gives_the_memory_back() -> None:
    """While a step runs: it ends first, and then its memory and its thread are freed, without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        with LLM("tiny", device="cpu", overlap=True) as llm:
            for i in range(4):
                llm.add_request([i + 5] * 50, SamplingParams(max_tokens=20, ignore_eos=True))
            llm.step()
            core: Any = llm.engine_core
            pending, cache = core.in_flight[0][2].args[0], weakref.ref(core.runner.runner.kv_cache)
        assert pending.done() and cache() is None
        assert "device" not in "".join(thread.name for thread in threading.enumerate())
    finally:
        gc.enable()


def test_engines_side_by_side_do_not_see_each_others_step() -> None:
    """One computes in a thread while the other computes in this one."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM("tiny", device="cpu", overlap=True) as ahead, LLM("tiny", device="cpu") as plain:
        wanted = plain.generate("The cat", params, use_tqdm=False)[0].token_ids
        for i in range(64):
            ahead.add_request([i + 5] * 40, SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(8):
            ahead.step()  # leaves a step in flight
            assert plain.generate("The cat", params, use_tqdm=False)[0].token_ids == wanted
