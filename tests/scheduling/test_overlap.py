"""A host that plans a step ahead of its device: the same tokens, whatever happens while a step runs."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import symbolic
from symbolic import run_many
from test_fuzz import mutate

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.scheduler import Scheduler
from atom_mini.scheduling.overlap import OverlapCore, OverlapScheduler
from atom_mini.scheduling.spyre import SpyreScheduler
from atom_mini.sequence import Sequence


def test_outputs_equal_the_oracle_a_step_ahead() -> None:
    """Tight pools, most of which preempt; devices that run late, at once or mixed; steps that fail."""
    stats = run_many(range(100), overlap=True, tight=True)
    least = {"ahead": 2000, "preemptions": 100, "put_back": 40, "chunks": 100, "failures": 20}
    least |= {"aborts_running": 2, "stop": 5, "kv_cache": 20}
    assert not {name: stats[name] for name in least if stats[name] < least[name]}
    assert run_many(range(60), overlap=True, cache="radix")["prefix_hits"] > 30


@pytest.mark.slow
def test_more_outputs_equal_the_oracle_a_step_ahead() -> None:
    run_many(range(100, 350), overlap=True, tight=True)
    run_many(range(60, 150), overlap=True)


RESTART = "del self.token_ids[self.num_known_tokens :]"
KEEP_ONE = "self.num_known_tokens = max(self.num_known_tokens, self.num_tokens - 1); "
FULL = "seq.num_known_tokens % size == 0"
POOL = "self.runner.token_pool.get"
STEP = symbolic.SymbolicStep
BUGS: dict[str, tuple[Any, str, str, str]] = {
    # ATOM, defect A: a placeholder stays in the context of a sequence that lost its blocks
    "keeps placeholders": (
        Sequence, "restart", RESTART, "self.num_known_tokens = self.num_tokens"),
    # ATOM again: the number is derived, not counted
    "drops one placeholder of two": (Sequence, "restart", RESTART, KEEP_ONE + RESTART),
    # the preempted sequence's blocks get another owner in the next step
    "preempts under a step": (
        OverlapScheduler, "_schedule_decode", "if self.num_launched and", "if False and"),
    # a block whose last token is a placeholder is hashed with it
    "publishes unknown tokens": (
        Scheduler, "_schedule_decode", f"{FULL}:", f"{FULL} or manager.stage(seq, seq.num_tokens):"),
    # ATOM, an earlier version: deferred inputs by position, although the batch has changed
    "maps by place in the batch": (STEP, "fill_in", f"{POOL}(self.batch.rows[i], 0)", f"{POOL}(i, 0)"),
    # the token of the superfluous step is delivered after the end
    "delivers to the finished": (
        OverlapScheduler, "deliver", "for seq in seqs if not seq.is_finished]", "for seq in seqs]"),
    # the step after the failed one reads keys and values that were never written
    "gives up one step of two": (OverlapCore, "rollback", "self.in_flight.clear()", "pass"),
}  # fmt: skip


RARE = [pytest.param(bug, marks=pytest.mark.slow) for bug in ("preempts under a step",)]
OFTEN = [bug for bug in BUGS if bug != "preempts under a step"]


@pytest.mark.parametrize("bug", OFTEN + RARE)
def test_the_fuzz_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *BUGS[bug])
    with pytest.raises(AssertionError, match="reproduce"):
        run_many(range(1000), overlap=True, tight=True)


class Waiting:
    """A device that runs nothing before its result is asked for; it notes its batches."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []

    def launch(self, batch: Any) -> Any:
        self.launched.append(batch.scheduled_tokens.tolist())
        lens = zip(batch.req_ids, batch.context_lens.tolist(), strict=True)
        tokens = {id: (n,) for id, n in lens}
        return lambda: symbolic.ScheduledBatchOutput(tokens)


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({"max_tokens": 3, "ignore_eos": True}, [1, 2, 3]),  # no superfluous step
        ({"max_tokens": 9, "stop_token_ids": [5]}, [1, 2, 4]),  # an end token costs one
    ],
    ids=str,
)
def test_the_next_step_is_launched_before_the_last_is_looked_at(
    params: dict[str, Any], steps: list[int]
) -> None:
    """The next token is the length of the text: 3, 4, 5. At its end the blocks are free at once."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=16, overlap=True)
    device = Waiting()
    core = OverlapCore(config, device)  # type: ignore[arg-type]
    seq = Sequence([1, 2, 3], 4, SamplingParams(**params))
    core.add(seq)
    launched = []
    while not seq.is_finished:
        core.step()
        launched.append(len(device.launched))
        assert seq.completion_token_ids == [3, 4, 5][: len(launched)]
    assert core.scheduler.block_manager.num_free_blocks == 16
    while core.step():
        assert seq.completion_token_ids == [3, 4, 5]
    assert core.is_finished() and seq.token_ids == [1, 2, 3, 3, 4, 5]
    assert launched == [2, 3, steps[2]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": "spyre", "max_model_len": 512}, "scheduler='spyre'.*overlap=True"),
        ({"scheduler_delay_factor": 0.5}, "scheduler_delay_factor=0.5.*overlap=True"),
        ({"scheduler": None}, "scheduler=None must be 'atom' or 'spyre'"),
        ({"overlap": "yes"}, "overlap='yes'"),
    ],
)
def test_what_cannot_run_ahead_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs(**{"overlap": True} | options)


def test_schedulers_that_cannot_are_refused_by_name() -> None:
    config = EngineArgs(
        scheduler="spyre", kv_cache_block_size=64, num_kvcache_blocks=8, max_model_len=512
    )
    for scheduler in (SpyreScheduler(config), Scheduler(EngineArgs(num_kvcache_blocks=8))):
        with pytest.raises(ValueError, match=type(scheduler).__name__):
            OverlapCore(config, Waiting(), scheduler)  # type: ignore[arg-type]


# ---- the built-in model ----


SMALL = {"num_kvcache_blocks": 30, "kv_cache_block_size": 4, "max_num_seqs": 8}


@pytest.mark.parametrize(
    "options",
    [SMALL | {"max_num_batched_tokens": 48}, {"prefix_cache": "radix", "interleave_decode": True}],
    ids=str,
)
def test_the_models_tokens_are_the_same(options: dict[str, Any]) -> None:
    """With temperatures, penalties, log probabilities and stop strings."""
    rng = random.Random(0)
    names = ["Ada", "Ben", "Mia", "Tom"]
    prompts = [f"{rng.choice(names)} lives in Rome. {rng.choice(names)} has a red cat. Then" for _ in range(16)]
    params = [
        SamplingParams(
            max_tokens=16 + i, temperature=(i % 2) * 0.9, seed=i, repetition_penalty=1.0 + i % 3,
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
