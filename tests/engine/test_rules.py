"""What the field learned the hard way, and what other engines get wrong: each a test by name.

The engines named are those in which the fault was seen. Rules about the model, its loader and the tokeniser are tested
with those parts; whole random loads in test_fuzz.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from show import check_blocks

import atom_mini.prefix_index as prefix_index_module
from atom_mini import EngineArgs
from atom_mini.block_manager import NO_HASH, BlockManager
from atom_mini.config import SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.prefix_index import PrefixIndex
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.systems.radix_cache import RadixCache
from atom_mini.text import IncrementalDetokenizer

A, B, C, X = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]  # blocks of tokens
_fresh_tokens = count(1000)
both = pytest.mark.parametrize("cache", ["hash", "radix"])


class CountingRunner:
    """The next token of a request is its length: whatever the steps were, the output is known."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled, strict=True)
        return ScheduledBatchOutput({i: (n,) for i, n, last in rows if last})


class FailingRunner:
    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        raise RuntimeError("out of memory")


def engine(**options: Any) -> EngineCore:
    return EngineCore(EngineArgs(**{"kv_cache_block_size": 4, "num_kvcache_blocks": 64, **options}), CountingRunner())


def request(prompt: int | list[int], max_tokens: int = 1, size: int = 4, **params: Any) -> Sequence:
    """A number stands for that many tokens that nobody else has."""
    tokens = [next(_fresh_tokens) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(tokens, size, SamplingParams(max_tokens=max_tokens, **params))


def add(core: EngineCore, *seqs: Sequence) -> None:
    for seq in seqs:
        core.add(seq)


def run(core: EngineCore, steps: int = 1000) -> list[ScheduledBatch]:
    """At most so many steps, books checked after each."""
    batches = []
    while len(batches) < steps and (step := core.step()):
        batches.append(step.batch)
        check_blocks(core.scheduler.block_manager, core.scheduler.running)
    assert len(batches) < 1000
    return batches


def until(core: EngineCore, condition: Callable[[], object]) -> None:
    """Step by step, until it has come about; it must, before everything is finished."""
    while not condition():
        assert run(core, 1), "everything is finished and it has not happened"


def finished(core: EngineCore, *seqs: Sequence) -> EngineCore:
    """Run `seqs` to their end; what they computed is cached and free."""
    add(core, *seqs)
    run(core)
    return core


def compute(manager: BlockManager, seq: Sequence) -> None:
    """What a scheduler and a step do for a prompt."""
    cached = manager.can_allocate(seq)
    assert cached is not None
    manager.allocate(seq, cached)
    manager.stage(seq, seq.num_tokens)
    manager.index.publish()
    seq.num_computed_tokens = seq.num_tokens


def generated(seq: Sequence) -> list[int]:
    return list(range(seq.num_prompt_tokens, seq.num_prompt_tokens + seq.sampling_params.max_tokens))


# ---- blocks ----


@both
def test_a_block_is_found_only_once_its_kv_has_been_computed(cache: str) -> None:
    """ATOM's guide publishes at allocation. Here the second block of a prompt in chunks is not there yet."""
    core = engine(max_num_batched_tokens=4, prefix_cache=cache)
    add(core, request(A + B + C))
    run(core, 1)
    late = request(A + B + X)
    assert len(core.scheduler.block_manager.can_allocate(late) or []) == 1


@both
def test_a_step_that_failed_publishes_nothing(cache: str) -> None:
    core = engine(prefix_cache=cache)
    runner, core.runner = core.runner, FailingRunner()
    seq = request(A + B + C)
    add(core, seq)
    with pytest.raises(RuntimeError):
        core.step()
    assert not core.scheduler.block_manager.can_allocate(request(A + B + X))
    core.runner = runner
    run(core)
    assert seq.is_finished and len(core.scheduler.block_manager.can_allocate(request(A + B + X)) or []) == 2


@both
def test_a_block_is_not_published_before_its_last_token_was_forwarded(cache: str) -> None:
    """After the prefill, token 8 is sampled and fills the block: its K/V comes with the next step."""
    core = engine(prefix_cache=cache)
    seq = request([*A, 5, 6, 7], max_tokens=3)
    add(core, seq)
    run(core, 1)
    twin = request([*seq.token_ids, 0])
    assert len(seq) == 8 and len(core.scheduler.block_manager.can_allocate(twin) or []) == 1
    run(core, 1)
    assert len(core.scheduler.block_manager.can_allocate(twin) or []) == 2


def test_a_colliding_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash proposes; comparing decides."""
    monkeypatch.setattr(prefix_index_module, "compute_hash", lambda *args: 7)
    core = finished(engine(), request([*A, 0]))
    assert core.scheduler.block_manager.can_allocate(request([*B, 0])) == []
    assert len(core.scheduler.block_manager.can_allocate(request([*A, 1])) or []) == 1


def test_the_same_tokens_after_a_colliding_parent_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vLLM and ATOM compare the block's own tokens: B takes the place of A, X after A is served as X after B."""
    real = prefix_index_module.compute_hash
    roots = {tuple(A): 1, tuple(B): 1}
    monkeypatch.setattr(prefix_index_module, "compute_hash", lambda t, *p: roots.get(tuple(t)) or real(t, *p))
    manager = BlockManager(3, 4)
    first = request([*A, *X, 0])
    compute(manager, first)
    parent, child, _ = first.block_table
    manager.deallocate(first)
    manager.pool.free_block_ids.move_to_end(parent, last=False)  # is evicted before its child
    compute(manager, request([*B, 0]))
    assert manager.pool.blocks[parent].token_ids == B and manager.pool.blocks[child].token_ids == X
    assert manager.index.find(request([*B, *X, 1])) == [parent]


@both
def test_handing_out_a_freed_block_drops_its_index_entry(cache: str) -> None:
    """ATOM's guide: the entry stays, and prompt A+X hits the block that held X after A and holds X after B now."""
    core = finished(engine(num_kvcache_blocks=3, prefix_cache=cache), request([*A, *X, 0]))
    manager = core.scheduler.block_manager
    assert len(manager.can_allocate(request([*A, *X, 1])) or []) == 2
    finished(core, request([*B, *X, 0]))  # needs all three blocks
    assert manager.can_allocate(request([*A, *X, 1])) == []
    assert len(manager.can_allocate(request([*B, *X, 1])) or []) == 2
    assert sum(block.hash != NO_HASH for block in manager.pool.blocks) == 2


@both
def test_handing_out_a_twin_keeps_the_entry_of_the_other(cache: str) -> None:
    """Two blocks may hold the same content, and the index knows one: its entry must not go with the other."""
    manager = BlockManager(3, 4, index_type={"hash": PrefixIndex, "radix": RadixCache}[cache])
    one, two = request(A), request(A)
    compute(manager, one)
    compute(manager, two)  # its only block is the last, so computed again
    assert one.block_table != two.block_table
    twin = two.block_table[0]
    manager.deallocate(two)
    other = request(5)
    compute(manager, other)
    assert twin in other.block_table and manager.index.find(request([*A, 0])) == one.block_table


@both
def test_a_hit_on_a_free_block_keeps_it_whole(cache: str) -> None:
    """ATOM once reset it: found for its content, and robbed of it."""
    core = finished(engine(prefix_cache=cache), request([*A, *B, 0]))
    manager = core.scheduler.block_manager
    again = request([*A, *B, 1], max_tokens=5)
    add(core, again)
    run(core, 1)
    assert again.num_cached_tokens == 8
    for block_id, tokens in zip(again.block_table, (A, B), strict=False):
        block = manager.pool.blocks[block_id]
        assert block.token_ids == tokens and block.hash != NO_HASH
        assert block_id not in manager.pool.free_block_ids
    third = request([*A, *B, 2])
    assert manager.index.find(third) == again.block_table[:2]


@pytest.mark.parametrize("length", [1, 3, 4, 8, 16, 17])
def test_a_prompt_that_is_cached_whole_still_has_a_query_token(length: int) -> None:
    """And no more than its last block is computed again: nano-vLLM recomputes 256 tokens of 512."""
    prompt = list(range(length))
    core = finished(engine(), request(prompt, max_tokens=3))
    again = request(prompt, max_tokens=3)
    add(core, again)
    (batch,) = run(core, 1)
    assert 1 <= batch.num_scheduled_tokens[0] <= 4
    assert again.num_cached_tokens == (length - 1) // 4 * 4
    run(core)
    assert again.completion_token_ids == generated(again)


@both
def test_identical_prompts_admitted_in_one_step_share_their_blocks(cache: str) -> None:
    """nano-vLLM computes and stores each: 15 blocks, not 7."""
    core = engine(prefix_cache=cache)
    seqs = [request([*A, *B, *C, *X, 0], max_tokens=2) for _ in range(3)]
    add(core, *seqs)
    (batch,) = run(core, 1)
    assert batch.num_scheduled_tokens.tolist() == [17, 1, 1]
    assert 64 - core.scheduler.block_manager.num_free_blocks == 7
    assert len({tuple(s.block_table[:4]) for s in seqs}) == 1 and len({s.block_table[4] for s in seqs}) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_may_append_grows_to_the_ceiling_however_many_tokens_came(size: int) -> None:
    """ATOM's `0 < len % size <= n` misses a block when several tokens cross it; and `can_append` must count alike."""
    for length in range(1, 2 * size + 2):
        for new in range(1, 3 * size + 2):
            needed = -(-(length + new - 1) // size)  # the newest is in `length`; new - 1 come after it
            for blocks in (needed - 1, needed):
                manager = BlockManager(blocks, size, enable_prefix_caching=False)
                seq = request(length, size=size)
                if (cached := manager.can_allocate(seq)) is None:
                    continue
                manager.allocate(seq, cached)
                assert manager.can_append(seq, new) == (blocks == needed)
                if blocks == needed:
                    manager.may_append(seq, new)
                    assert len(seq.block_table) == needed
                    manager.may_append(seq, new)  # nothing to do twice
                    assert len(seq.block_table) == needed
                    check_blocks(manager, [seq])


def test_blocks_of_one_token_work() -> None:
    """nano-vLLM: IndexError, for `len % 1 == 1` is never true."""
    core = engine(kv_cache_block_size=1, num_kvcache_blocks=20)
    seqs = [request(n, max_tokens=6, size=1) for n in (1, 5, 9)]
    add(core, *seqs)
    run(core)
    assert [s.completion_token_ids for s in seqs] == [generated(s) for s in seqs]


@pytest.mark.parametrize("damage", ["reference", "queue", "twice", "lost", "stale", "tokens", "row", "kv"])
def test_check_sees_books_that_do_not_balance(damage: str) -> None:
    """free + used == total and references == owners, always; a check that sees nothing would be worth nothing."""
    core = engine()
    seq, other = request(A + B + C, max_tokens=5), request([*A, 0], max_tokens=5)
    add(core, seq, other)
    run(core, 1)
    manager, held = core.scheduler.block_manager, [seq, other]
    check_blocks(manager, held)
    block = manager.pool.blocks[seq.block_table[1]]
    if damage == "reference":
        block.ref_count += 1
    elif damage == "queue":
        manager.pool.free_block_ids[block.block_id] = None
    elif damage == "twice":
        seq.block_table[2] = seq.block_table[1]
    elif damage == "lost":
        held.remove(other)
    elif damage == "stale":
        manager.index.hash_to_block_id[123] = block.block_id
    elif damage == "tokens":
        block.token_ids = X
    elif damage == "row":
        manager.block_tables[seq.row, 0] += 1
    elif damage == "kv":
        seq.num_computed_tokens = 17
    with pytest.raises((AssertionError, KeyError)):
        check_blocks(manager, held)


# ---- scheduling ----


def test_max_num_seqs_bounds_the_running_set_not_only_the_batch() -> None:
    """nano-vLLM and ATOM's guide: max_num_seqs=2 lets six run, and the tail starves."""
    core = engine(max_num_seqs=2)
    add(core, *(request(3, max_tokens=4) for _ in range(6)))
    most = 0
    while core.step():
        most = max(most, len(core.scheduler.running))
    assert most == 2


@pytest.mark.parametrize("budget", [1, 5, 16])
def test_max_num_batched_tokens_bounds_every_step(budget: int) -> None:
    core = engine(max_num_batched_tokens=budget)
    seqs = [request(n, max_tokens=4) for n in (3, 40, 1, 17, 2, 2)]
    add(core, *seqs)
    totals = {SequenceType.PREFILL: 0, SequenceType.DECODE: 0}
    for batch in run(core):
        totals[batch.type] = max(totals[batch.type], batch.total_tokens_num)
    assert max(totals.values()) <= budget and totals[SequenceType.DECODE] == min(budget, 6)
    assert all(s.completion_token_ids == generated(s) for s in seqs)


def test_nobody_passes_the_first_in_the_queue() -> None:
    """Break, not continue: a queue that lets the small ones pass lets a large one wait for ever."""
    core = engine(num_kvcache_blocks=8)
    running, large = request(12, max_tokens=12), request(24)
    small = [request(1) for _ in range(5)]
    add(core, running, large, *small)
    run(core, 5)
    assert list(core.scheduler.running) == [running] and list(core.scheduler.waiting) == [large, *small]
    run(core)
    assert all(large.first_token_time <= s.first_token_time for s in small)


def test_preemption_keeps_what_was_generated() -> None:
    core = engine(num_kvcache_blocks=6)
    seqs = [request(6, max_tokens=12) for _ in range(2)]
    add(core, *seqs)
    until(core, lambda: core.scheduler.num_preemptions)
    victim = seqs[1]
    assert 0 < victim.num_completion_tokens < 12 and not victim.block_table
    assert victim.completion_token_ids == generated(victim)[: victim.num_completion_tokens]
    run(core)
    assert [s.completion_token_ids for s in seqs] == [generated(s) for s in seqs]


def test_a_second_prefill_in_chunks_covers_the_generated_tokens_too() -> None:
    """ATOM asks "done?" with num_prompt_tokens: K/V of the generated tokens was never computed."""
    core = engine(num_kvcache_blocks=8, max_num_batched_tokens=4, enable_prefix_caching=False)
    first, seq = request(4, max_tokens=20), request(4, max_tokens=20)
    add(core, first, seq)
    until(core, lambda: seq.num_preemptions)
    length = len(seq)
    assert length > seq.num_prompt_tokens + 4
    until(core, lambda: seq.block_table)
    while len(seq) == length:  # no token before everything is there
        assert seq.num_computed_tokens < length
        assert run(core, 1)
    assert seq.num_computed_tokens == length
    run(core)
    assert seq.completion_token_ids == generated(seq)


@both
def test_a_prefix_hit_after_a_preemption(cache: str) -> None:
    """Earlier nano-vLLM: IndexError, or silently wrong; it finds its own blocks again and computes the rest."""
    core = engine(num_kvcache_blocks=7, prefix_cache=cache)
    first, seq = request(8, max_tokens=16), request(8, max_tokens=16)
    add(core, first, seq)
    until(core, lambda: seq.num_preemptions)
    scheduled = 0
    while not seq.is_finished:
        (batch,) = run(core, 1)
        if seq.id in batch.req_ids and batch.type is SequenceType.PREFILL:
            scheduled += batch.num_scheduled_tokens[batch.req_ids.index(seq.id)]
    assert 0 < scheduled < len(seq) - 4, "nothing was found again"
    assert seq.completion_token_ids == generated(seq) and first.completion_token_ids == generated(first)


def test_a_lone_sequence_that_outgrows_the_pool_ends_and_the_engine_lives() -> None:
    """nano-vLLM: a bare AssertionError, and the engine is dead."""
    core = engine(num_kvcache_blocks=3)
    lone, after = request(6, max_tokens=100), request(6, max_tokens=3)
    add(core, lone, after)
    run(core)
    assert (lone.leave_reason, len(lone), after.leave_reason) == ("kv_cache", 13, "max_tokens")


def test_a_prompt_that_can_never_fit_is_refused_on_arrival_and_blocks_nobody() -> None:
    """nano-vLLM: the same assertion, after everybody behind it has waited in vain."""
    core = engine(num_kvcache_blocks=3)
    with pytest.raises(ValueError, match=r"20 tokens.*3 blocks x 4"):
        core.add(request(20))
    behind = request(6, max_tokens=2)
    add(core, behind)
    run(core)
    assert behind.leave_reason == "max_tokens"


def test_the_earliest_stop_wins_not_the_first_kind() -> None:
    """ATOM looks for one kind of stop after the other over all tokens of a step."""
    core = engine()
    core.scheduler.eos_token_ids = (2,)
    seq = request(3, max_tokens=9, stop_token_ids=[9])
    add(core, seq)
    assert core.scheduler.schedule() is not None
    core.scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: (5, 9, 2, 6)}))
    assert (seq.leave_reason, seq.completion_token_ids) == ("stop_9", [5, 9])


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_max_tokens_is_never_overshot(asked: int) -> None:
    """ATOM with speculative decoding: 2 asked, 5 given."""
    core = engine()
    seq = request(3, max_tokens=asked)
    add(core, seq)
    assert core.scheduler.schedule() is not None
    core.scheduler.postprocess([seq], ScheduledBatchOutput({seq.id: (5, 5, 5, 5, 5)}))
    assert seq.num_completion_tokens == min(asked, 5) and seq.leave_reason == "max_tokens"


def test_every_step_schedules_something_or_everything_is_finished() -> None:
    """In the tightest pool, with one token a step, while one request waits for another."""
    core = engine(kv_cache_block_size=1, num_kvcache_blocks=4, max_num_batched_tokens=1, interleave_decode=True)
    add(core, *(request(n, max_tokens=9, size=1) for n in (1, 3, 2, 4)))
    assert all(batch.total_tokens_num == 1 for batch in run(core))
    assert core.is_finished() and core.step() is None


def test_running_requests_get_a_token_at_least_every_second_step_while_prompts_keep_arriving() -> None:
    """nano-vLLM, ATOM: decodes stall for as long as prompts come."""
    gaps = {}
    for interleave in (False, True):
        core = engine(num_kvcache_blocks=400, max_num_batched_tokens=8, interleave_decode=interleave)
        seq = request(4, max_tokens=30)
        add(core, seq)
        run(core, 1)
        steps = [0]
        for i in range(1, 200):
            if i % 3 == 0:
                add(core, request(24))
            if (step := core.step()) and seq.id in step.batch.req_ids:
                steps.append(i)
        gaps[interleave] = max(b - a for a, b in zip(steps, [*steps[1:], 200 if len(steps) < 30 else 0], strict=True))
    assert gaps[True] <= 2 < 50 < gaps[False]


def test_a_waiting_prompt_is_not_hashed_again_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vLLM: 2.4 ms a step with 32,000 tokens at the head of the queue."""
    hashed: list[int] = []
    compute_hash = prefix_index_module.compute_hash
    core = engine(num_kvcache_blocks=32)
    add(core, request(60, max_tokens=16))
    run(core, 1)
    head = request(80)
    add(core, head)
    counted = lambda *args: hashed.append(1) or compute_hash(*args)  # noqa: E731
    monkeypatch.setattr(prefix_index_module, "compute_hash", counted)
    run(core, 12)
    assert not head.block_table and len(hashed) <= 1 + 12 // 4  # and those of the blocks that are generated


def test_a_reserve_keeps_preemption_from_thrashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vLLM without a watermark: 70 tokens computed where 54 were needed."""

    def computed() -> tuple[int, int]:
        rng, core = random.Random(0), engine(num_kvcache_blocks=24, enable_prefix_caching=False)
        shapes = [(rng.randint(2, 20), rng.randint(2, 40)) for _ in range(60)]
        add(core, *(request(*shape) for shape in shapes))
        return sum(batch.total_tokens_num for batch in run(core)), sum(p + o - 1 for p, o in shapes)

    with_reserve, least = computed()
    can_allocate = BlockManager.can_allocate
    monkeypatch.setattr(BlockManager, "can_allocate", lambda self, seq, reserve=0: can_allocate(self, seq, 0))
    without, _ = computed()
    assert least <= with_reserve < without and (with_reserve - least) < 0.7 * (without - least)


# ---- requests ----


def test_zero_tokens_cannot_be_asked_for() -> None:
    """nano-vLLM: max_tokens=0 never stops."""
    with pytest.raises(ValueError, match=r"max_tokens=0.*from 1"):
        SamplingParams(max_tokens=0)


def test_an_empty_prompt_is_refused_by_name() -> None:
    """nano-vLLM, ATOM: IndexError, after others were queued."""
    with pytest.raises(ValueError, match="empty prompt"):
        Sequence([], 4)


def test_temperature_zero_is_allowed() -> None:
    """nano-vLLM refuses it, and has no greedy."""
    assert SamplingParams(temperature=0).temperature == 0


def test_an_option_that_is_not_supported_is_refused_not_ignored() -> None:
    """mini-sglang accepts stop, n and penalties and does nothing with them."""
    with pytest.raises(ValueError, match="no option 'best_of'"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="did you mean 'repetition_penalty'"):
        SamplingParams(repetition_penalti=1.1)  # type: ignore[call-arg]


def test_request_id_zero_counts() -> None:
    """ATOM's `id or next(counter)` takes an explicit 0 for none."""
    assert Sequence([1], 4, id=0).id == 0


def test_one_sampling_params_object_serves_many_requests_unchanged() -> None:
    """mini-sglang changes it for the prompts that come later."""
    core = engine()
    core.scheduler.eos_token_ids = (2,)
    params = SamplingParams(max_tokens=100, stop_token_ids=[7])
    before = repr(params)
    seqs = [Sequence([50] * n, 4, params) for n in (60, 3)]
    add(core, *seqs)
    run(core)
    assert repr(params) == before and [s.limit for s in seqs] == [160, 103]
    with pytest.raises(AttributeError):
        params.max_tokens = 3  # type: ignore[misc]


@both
def test_of_two_identical_prompts_in_one_step_one_may_leave_first(cache: str) -> None:
    """mini-sglang: the other's page table is left on freed pages."""
    core = engine(num_kvcache_blocks=12, prefix_cache=cache)
    short, long = request([*A, *B, 0], max_tokens=1), request([*A, *B, 0], max_tokens=12)
    add(core, short, long)
    run(core, 1)
    assert short.is_finished and not short.block_table
    manager = core.scheduler.block_manager
    assert all(manager.pool.blocks[i].ref_count == 1 for i in long.block_table)
    add(core, request(20, max_tokens=8))  # would be given the freed blocks
    run(core)
    assert long.completion_token_ids == generated(long)


@both
def test_an_abort_in_flight_frees_once(cache: str) -> None:
    """mini-sglang frees twice; ATOM once lost the blocks of clients that had gone."""
    core = engine(prefix_cache=cache)
    seq, twin = request([*A, *B, 0], max_tokens=9), request([*A, *B, 0], max_tokens=9)
    add(core, seq, twin)
    run(core, 2)
    assert core.abort(seq.id) is seq and core.abort(seq.id) is None
    check_blocks(core.scheduler.block_manager, [twin])
    run(core)
    assert core.scheduler.block_manager.num_free_blocks == 64 and twin.completion_token_ids == generated(twin)


# ---- text ----


class ByteTokenizer:
    """A token is a byte: nothing cuts characters in more places."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_joined_stream_equals_the_decoded_whole() -> None:
    """Token by token most are wrong, and without a final flush many: chapter 09b counts them."""
    rng, wrong = random.Random(0), 0
    pieces = ["a", "é", "漢", "🙂", "\ufffd", " "]
    for _ in range(500):
        data = "".join(rng.choices(pieces, k=rng.randint(0, 6))).encode()
        data = data[: rng.randint(0, len(data))] + rng.randbytes(rng.choice((0, 0, 1, 2)))
        detokenizer, text = IncrementalDetokenizer(ByteTokenizer()), ""
        for n in range(1, len(data) + 1):
            detokenizer.read([*data[:n]])
            text += detokenizer.take()
        detokenizer.flush([*data])
        text += detokenizer.take()
        wrong += text != data.decode("utf-8", errors="replace")
    assert wrong == 0


def test_a_stop_string_is_found_in_the_text_and_held_back_until_it_cannot_match() -> None:
    """ATOM compares separately encoded tokens, and misses what was tokenised in another way."""
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), ("STOP", "ST!"))
    shown, data = [], [*b"aSTSTxSTOPz"]
    for n in range(1, len(data) + 1):
        stopped = detokenizer.read(data[:n])
        shown.append(detokenizer.take())
        if stopped:
            break
    assert shown == ["a", "", "", "ST", "", "STx", "", "", "", ""]
    assert stopped == "STOP" and detokenizer.text == "aSTSTx"
