"""The scheduler alone, without a model: who runs, with how many tokens, and why a request ends.

What the field learned the hard way has tests by name in test_rules.py; whole random loads run in test_fuzz.py.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from show import check_blocks

import atom_mini.scheduler as scheduler_module
from atom_mini import Config, EngineArgs
from atom_mini.assemble import choose_scheduler
from atom_mini.config import SamplingParams
from atom_mini.options.build import make_scheduler
from atom_mini.scheduler import MixedScheduler, ScheduledBatch, ScheduledBatchOutput, Scheduler, next_chunk
from atom_mini.sequence import NO_TOKEN, Sequence, SequenceStatus, SequenceType

PREFILL, DECODE, MIXED = SequenceType.PREFILL, SequenceType.DECODE, SequenceType.MIXED


def make(**options: Any) -> Scheduler:
    config = EngineArgs(**{"kv_cache_block_size": 4, "num_kvcache_blocks": 64, **options})
    return make_scheduler(config)


def request(id: int, prompt: int | list[int], max_tokens: int = 8, size: int = 4, **params: Any) -> Sequence:
    """A number stands for that many tokens that nobody else has."""
    tokens = [1000 * (id + 1) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(tokens, size, SamplingParams(max_tokens=max_tokens, **params), id=id)


def add(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)


def step(scheduler: Scheduler, token: int = 1) -> tuple[SequenceType, dict[int, int]]:
    """One step of a model that always says `token`: its type, and the tokens computed by request."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    batch, seqs = scheduled
    scheduler.postprocess(list(seqs.values()), answer(batch, token))
    check_blocks(scheduler.block_manager, scheduler.running)
    return batch.type, dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True))


def answer(batch: ScheduledBatch, token: int = 1) -> ScheduledBatchOutput:
    return ScheduledBatchOutput({i: (token,) for i, last in zip(batch.req_ids, batch.is_sampled, strict=True) if last})


def run(scheduler: Scheduler) -> list[tuple[SequenceType, dict[int, int]]]:
    steps = []
    while not scheduler.is_finished():
        steps.append(step(scheduler))
        assert len(steps) < 1000
    return steps


# ---- gates ----


def test_prompts_share_a_step_up_to_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=12)
    add(scheduler, request(0, 5), request(1, 5), request(2, 5))
    assert step(scheduler) == (PREFILL, {0: 5, 1: 5})  # the 2 tokens left would cut a block
    assert step(scheduler) == (PREFILL, {2: 5})
    assert step(scheduler) == (DECODE, {0: 1, 1: 1, 2: 1})


def test_admission_leaves_a_block_free_for_each_who_runs() -> None:
    scheduler = make(num_kvcache_blocks=6)
    add(scheduler, request(0, 8), request(1, 8), request(2, 4))
    assert step(scheduler) == (PREFILL, {0: 8, 1: 8})  # 2 blocks are left and 2 run: the third, of 1 block, would need 3
    assert scheduler.block_manager.num_free_blocks == 2


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    add(scheduler, request(0, 9), request(1, 9))
    assert step(scheduler) == (PREFILL, {0: 9})
    assert step(scheduler) == (PREFILL, {1: 9})


def test_the_decode_batch_is_bounded_by_the_budget_too() -> None:
    scheduler = make(max_num_batched_tokens=2)
    add(scheduler, *(request(i, 1, max_tokens=2) for i in range(3)))
    assert [step(scheduler)[1] for _ in range(2)] == [{0: 1, 1: 1}, {2: 1}]
    assert step(scheduler) == (DECODE, {0: 1, 1: 1})
    assert step(scheduler) == (DECODE, {2: 1})


# ---- chunks ----


@pytest.mark.parametrize(
    ("computed", "missing", "budget", "may_split_block", "expected"),
    [
        (0, 100, 100, False, 100),  # all of it
        (0, 3, 7, False, 3),
        (0, 100, 7, False, 4),  # to the border
        (5, 100, 8, False, 7),  # from inside a block to a border
        (5, 100, 2, False, 0),  # no border in reach: leave it,
        (5, 100, 2, True, 2),  # unless nothing else is in the step
        (4, 100, 3, False, 0),
        (0, 100, 0, True, 0),
    ],
)
def test_next_chunk(computed: int, missing: int, budget: int, may_split_block: bool, expected: int) -> None:
    assert next_chunk(computed, computed + missing, budget, 4, may_split_block) == expected


# ---- the delay gate ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scheduler's time, in seconds; set `clock[0]`."""
    now = [100.0]
    monkeypatch.setattr(scheduler_module.time, "perf_counter", lambda: now[0])
    return now


def test_the_delay_gate_waits_for_a_multiple_of_the_last_prompt_step(clock: list[float]) -> None:
    scheduler = make(scheduler_delay_factor=2.0)
    add(scheduler, request(0, 4))
    assert step(scheduler)[0] is PREFILL  # nothing runs: the gate is open
    clock[0] += 3.0  # so long did the prompt take
    late = request(1, 4)
    assert late.arrive_time == 103.0
    add(scheduler, late)
    assert step(scheduler) == (DECODE, {0: 1})
    clock[0] = 109.0  # has waited 2 x 3 seconds: not *longer* than that
    assert step(scheduler) == (DECODE, {0: 1})
    clock[0] = 109.1
    assert step(scheduler) == (PREFILL, {1: 4})


# ---- decodes between prompts ----


def test_interleave_forbids_two_prompt_steps_in_a_row_while_somebody_decodes() -> None:
    kinds = {}
    for interleave in (False, True):
        scheduler = make(max_num_batched_tokens=8, interleave_decode=interleave)
        add(scheduler, request(0, 2, max_tokens=9))
        step(scheduler)
        add(scheduler, request(1, 24, max_tokens=1))
        kinds[interleave] = [kind.name[0] for kind, _ in run(scheduler)]
    assert "".join(kinds[False]) == "PPPDDDDDDDD"
    assert "".join(kinds[True]) == "DPDPDPDDDDD"


# ---- decodes and prompts in one step ----


def test_the_option_chooses_the_scheduler() -> None:
    for on, kind in ((True, MixedScheduler), (False, Scheduler)):
        assert choose_scheduler(Config(enable_mixed_steps=on)) is kind
    assert not Config().enable_mixed_steps, "ATOM's prefill first is the default"


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_prompts() -> None:
    """A decode of each that can; then the prompt that was cut goes on; then somebody is admitted."""
    scheduler = make(enable_mixed_steps=True, max_num_batched_tokens=8)
    add(scheduler, request(0, 3), request(1, 1))
    assert step(scheduler) == (PREFILL, {0: 3, 1: 1})
    add(scheduler, request(2, 12, max_tokens=1), request(3, 3))
    assert step(scheduler) == (MIXED, {0: 1, 1: 1, 2: 4})  # 6 are left, and a chunk ends at a border of blocks
    assert step(scheduler) == (MIXED, {0: 1, 1: 1, 2: 4})
    assert step(scheduler) == (MIXED, {0: 1, 1: 1, 2: 4})  # its last chunk; 2 are left, too few for a block of the next
    assert step(scheduler) == (MIXED, {0: 1, 1: 1, 3: 3})
    assert step(scheduler) == (DECODE, {0: 1, 1: 1, 3: 1})


def test_a_mixed_batch_has_the_right_tokens_in_the_right_order() -> None:
    """And a chunk of one token is no decode."""
    scheduler = make(enable_mixed_steps=True, max_num_batched_tokens=6)
    add(scheduler, request(0, 2, max_tokens=9, repetition_penalty=1.2))
    step(scheduler, token=77)
    add(scheduler, request(1, 9), request(2, 1))
    batch, _ = scheduler.schedule() or pytest.fail()
    assert (batch.type, batch.req_ids) == (MIXED, [0, 1, 2])
    assert batch.scheduled_tokens.tolist() == [77, 2000, 2001, 2002, 2003, 3000]
    assert batch.num_scheduled_tokens.tolist() == [1, 4, 1]
    assert batch.context_lens.tolist() == [3, 4, 1]
    assert batch.is_sampled.tolist() == [True, False, True]
    assert batch.is_decode.tolist() == [True, False, False] and batch.num_decodes == 1
    assert batch.histories == {0: [0 + 1000, 1001, 77]} and batch.prompt_lens == {0: 2}


# ---- preemption and failed steps ----


def test_the_last_one_gives_its_blocks_and_is_the_first_to_come_back() -> None:
    scheduler = make(num_kvcache_blocks=5)
    seqs = [request(0, 7), request(1, 7), request(2, 3, max_tokens=2)]
    add(scheduler, *seqs)
    assert step(scheduler) == (PREFILL, {0: 7, 1: 7})
    assert step(scheduler) == (DECODE, {0: 1, 1: 1})
    assert step(scheduler) == (DECODE, {0: 1})  # 1 free block was left for two who wanted one each
    assert [s.id for s in scheduler.running] == [0] and [s.id for s in scheduler.waiting] == [1, 2]
    assert seqs[1].num_completion_tokens == 2 and not seqs[1].block_table
    run(scheduler)
    assert scheduler.num_preemptions == sum(s.num_preemptions for s in seqs) == 1


def test_a_failed_step_leaves_the_queues_in_their_order() -> None:
    scheduler = make(max_num_batched_tokens=12)
    add(scheduler, *(request(i, 5) for i in range(4)))
    scheduled = scheduler.schedule()
    assert scheduled is not None and list(scheduled[1]) == [0, 1]
    scheduler.rollback()
    assert [s.id for s in scheduler.waiting] == [0, 1, 2, 3] and not scheduler.running
    assert scheduler.block_manager.num_free_blocks == 64
    check_blocks(scheduler.block_manager, [])
    assert step(scheduler) == (PREFILL, {0: 5, 1: 5})


# ---- stops and streams ----


def finish(tokens: tuple[int, ...], **params: Any) -> Sequence:
    """One step that answers `tokens`, as speculative decoding will; ids 0 and 2 end a text."""
    scheduler = make()
    scheduler.eos_token_ids = (0, 2)
    seq = Sequence([5, 6, 7], 4, SamplingParams(**params))
    scheduler.add(seq)
    assert scheduler.schedule() is not None
    logprobs = {seq.id: [{t: -float(i)} for i, t in enumerate(tokens)]}
    scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: tokens}, logprobs))
    return seq


@pytest.mark.parametrize(
    ("tokens", "params", "reason", "kept"),
    [
        ((4, 0, 9), {"stop_token_ids": [9]}, "eos", 2),
        ((4, 2), {}, "stop_2", 2),  # the checkpoint names it after the first
        ((4, 2), {"ignore_eos": True}, None, 2),
        ((4, 9, 0), {"stop_token_ids": [9]}, "stop_9", 2),
        ((4, 0, 9), {"stop_token_ids": [9], "ignore_eos": True}, "stop_9", 3),
        ((4, 4, 0), {"max_tokens": 2}, "max_tokens", 2),
        ((4, 0, 4), {"max_tokens": 2}, "eos", 2),  # at the same token: the end of the text,
        ((4, 9, 4), {"max_tokens": 2, "stop_token_ids": [9]}, "stop_9", 2),  # a stop id,
        ((4, 4, 4), {"max_tokens": 2, "ignore_eos": True}, "max_tokens", 2),  # the length
        ((0,), {"stop_token_ids": [0]}, "eos", 1),  # asked for twice
        ((0, 4), {"stop_token_ids": [0], "ignore_eos": True}, "stop_0", 1),
        ((4, 4, 4), {}, None, 3),
        ((4, NO_TOKEN, 4), {}, "not_finite", 1),
    ],
)
def test_stop_order(tokens: tuple[int, ...], params: dict[str, Any], reason: str | None, kept: int) -> None:
    seq = finish(tokens, **params)
    assert seq.leave_reason == reason and seq.is_finished == (reason is not None)
    assert tuple(seq.completion_token_ids) == tokens[:kept]
    assert len(seq.logprobs) == kept, "log probabilities are cut with their tokens"


def test_times_and_status_of_a_life(clock: list[float]) -> None:
    scheduler = make()
    seq = request(0, 3, max_tokens=2)
    assert seq.status is SequenceStatus.WAITING and seq.arrive_time == 100.0
    add(scheduler, seq)
    clock[0] = 101.0
    step(scheduler)
    assert seq.status is SequenceStatus.RUNNING and seq.first_token_time == 101.0 and seq.leave_reason is None
    clock[0] = 103.0
    step(scheduler)
    assert seq.status is SequenceStatus.FINISHED and (seq.first_token_time, seq.leave_time) == (101.0, 103.0)


# ---- abort ----


# ---- what is refused, and what crosses the border ----


def test_a_refusal_names_number_limit_and_knob_and_changes_nothing() -> None:
    scheduler = make(num_kvcache_blocks=3, max_model_len=50)
    add(scheduler, request(0, 4))
    with pytest.raises(ValueError, match=r"13 tokens exceeds the pool's 12 \(3 blocks x 4\).*raise num_kvcache_blocks$"):
        scheduler.add(request(1, 13))
    with pytest.raises(ValueError, match="id 0 is in use: choose another"):
        scheduler.add(request(0, 4))
    with pytest.raises(ValueError, match=r"10 tokens exceeds max_model_len=10 less one .*: .*raise max_model_len$"):
        make(num_kvcache_blocks=3, max_model_len=10).add(request(1, 10))
    assert [s.id for s in scheduler.waiting] == [0] and scheduler.block_manager.num_free_blocks == 3
    run(scheduler)
    add(scheduler, request(2, 12))  # one less fits


def test_a_batch_is_frozen_and_a_snapshot() -> None:
    """If the runner could see live state it would soon read a field that has changed in the meantime."""
    scheduler = make(max_num_batched_tokens=8)
    one, two = request(0, [9, 8, 7], repetition_penalty=1.5), request(1, 9)
    add(scheduler, one, two)
    batch, seqs = scheduler.schedule() or pytest.fail("nothing scheduled")
    assert (batch.type, batch.req_ids, batch.total_seqs_num, batch.total_tokens_num) == (PREFILL, [0, 1], 2, 7)
    assert batch.scheduled_tokens.tolist() == [9, 8, 7, *two.token_ids[:4]]
    assert batch.num_scheduled_tokens.tolist() == batch.context_lens.tolist() == [3, 4]
    assert batch.is_sampled.tolist() == [True, False]
    assert batch.block_tables[:, 0].tolist() == [one.block_table[0], two.block_table[0]]
    dtypes = [batch.scheduled_tokens, batch.num_scheduled_tokens, batch.context_lens, batch.block_tables]
    assert [a.dtype for a in dtypes] == [np.int64, np.int32, np.int32, np.int32]
    assert batch.histories == {0: [9, 8, 7]}  # only for those who are penalized
    with pytest.raises(FrozenInstanceError):
        batch.req_ids = []  # type: ignore[misc]
    before = batch.block_tables.copy()
    scheduler.postprocess(list(seqs.values()), answer(batch))
    run(scheduler)
    assert (batch.block_tables == before).all() and batch.histories == {0: [9, 8, 7]}


