"""What the field learned the hard way, and what other engines get wrong: each a test by name.

The engines named are those in which the fault was seen. Rules about the model, its loader and the tokeniser are tested
with those parts, about text in test_detokenizer.py; whole random loads in test_fuzz.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from show import check_blocks

import atom_mini.prefix_cache as prefix_cache_module
from atom_mini import EngineArgs
from atom_mini.block_manager import NO_HASH, BlockManager
from atom_mini.config import SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_scheduler
from atom_mini.prefix_cache import PrefixIndex
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.scheduling.radix_cache import RadixCache
from atom_mini.sequence import Sequence, SequenceType

A, B, C, X = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]  # blocks of tokens
_fresh_tokens = count(1000)
both = pytest.mark.parametrize("cache", ["hash", "radix"])


class CountingRunner:
    """The next token of a request is its length: whatever the steps were, the output is known."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled, strict=True)
        return ScheduledBatchOutput({i: (n,) for i, n, last in rows if last})


def engine(**options: Any) -> EngineCore:
    config = EngineArgs(**{"kv_cache_block_size": 4, "num_kvcache_blocks": 64, **options})
    return EngineCore(config, CountingRunner(), make_scheduler(config))


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


def test_the_same_tokens_after_a_colliding_parent_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vLLM and ATOM compare the block's own tokens: B takes the place of A, X after A is served as X after B."""
    real = prefix_cache_module.compute_hash
    roots = {tuple(A): 1, tuple(B): 1}
    monkeypatch.setattr(prefix_cache_module, "compute_hash", lambda t, *p: roots.get(tuple(t)) or real(t, *p))
    manager = BlockManager(3, 4, PrefixIndex)
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
    manager = BlockManager(3, 4, {"hash": PrefixIndex, "radix": RadixCache}[cache])
    one, two = request(A), request(A)
    compute(manager, one)
    compute(manager, two)  # its only block is the last, so computed again
    assert one.block_table != two.block_table
    twin = two.block_table[0]
    manager.deallocate(two)
    other = request(5)
    compute(manager, other)
    assert twin in other.block_table and manager.index.find(request([*A, 0])) == one.block_table


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
                manager = BlockManager(blocks, size)
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


def test_a_waiting_prompt_is_not_hashed_again_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vLLM: 2.4 ms a step with 32,000 tokens at the head of the queue."""
    hashed: list[int] = []
    compute_hash = prefix_cache_module.compute_hash
    core = engine(num_kvcache_blocks=32)
    add(core, request(60, max_tokens=16))
    run(core, 1)
    head = request(80)
    add(core, head)
    counted = lambda *args: hashed.append(1) or compute_hash(*args)  # noqa: E731
    monkeypatch.setattr(prefix_cache_module, "compute_hash", counted)
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


def test_an_empty_prompt_is_refused_by_name() -> None:
    """nano-vLLM, ATOM: IndexError, after others were queued."""
    with pytest.raises(ValueError, match="empty prompt"):
        Sequence([], 4)


def test_request_id_zero_counts() -> None:
    """ATOM's `id or next(counter)` takes an explicit 0 for none."""
    assert Sequence([1], 4, id=0).id == 0
