"""What the field learned the hard way, and what other engines get wrong: each a test by name.

The engines named are those in which the fault was seen. Rules about the model, its loader and the tokeniser are tested
with those parts, about text in test_detokenizer.py; whole random loads in test_fuzz.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from show import CountingRunner, admit, check_blocks

import atom_mini.prefix_cache as prefix_cache_module
from atom_mini import EngineArgs
from atom_mini.block_manager import NO_HASH, BlockManager
from atom_mini.config import SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_scheduler
from atom_mini.prefix_cache import PrefixIndex
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.sequence import Sequence, SequenceType

A, B, C, X = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]  # blocks of tokens
_fresh_tokens = count(1000)
both = pytest.mark.parametrize("cache", ["hash", "radix"])


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
    admit(manager, first)
    parent, child, _ = first.block_table
    manager.deallocate(first)
    manager.pool.free_block_ids.move_to_end(parent, last=False)  # is evicted before its child
    admit(manager, request([*B, 0]))
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


@pytest.mark.parametrize("size", [1, 2, 4])
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
    assert seq.num_cached_tokens == 0, "that is what others had computed of its prompt"
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


# ---- requests ----


def test_request_id_zero_counts() -> None:
    """ATOM's `id or next(counter)` takes an explicit 0 for none."""
    Sequence([1], 4)  # the counter begins with 0
    assert Sequence([1], 4, id=0).id == 0
