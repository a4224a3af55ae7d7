"""Random loads on random tiny engines, against an oracle without blocks; and proof that this finds bugs.

    PYTHONPATH=tests:nbs/_book python tests/engine/test_fuzz.py 100000 [first seed]     # as many trials as you have patience for
    PYTHONPATH=tests:nbs/_book python tests/engine/test_fuzz.py planted [most trials]   # measure the table below

A fuzz that never fails proves nothing until it has been seen to fail. So known bugs, most of them of other engines, are
planted one at a time. Trials until caught, with every check of every step, and by wrong outputs (or an exception) alone:

    planted bug                                     checks  outputs
    publishes_at_allocation                              1        1
    publishes_before_the_last_token_is_forwarded         7        7
    compares_own_tokens_only                             7        7
    trusts_the_hash                                      7        7
    remembers_the_parent_by_block_id                   319      319
    keeps_the_index_entry_of_a_reused_block              1       95
    resets_a_free_block_on_a_hit                         1      246
    leaves_a_hit_in_the_free_queue                       1        1
    counts_free_hits_as_a_gift                           8        8
    takes_back_shared_blocks                            13       67
    shares_a_partial_block                               1        8
    keeps_no_token_for_the_query                         3        3
    appends_by_remainder                                 3        3
    appends_one_token_too_late                           2        2
    ends_a_second_prefill_at_the_prompt                 13       13
    forgets_what_was_generated                           1        1
    keeps_a_placeholder                                  1        1
    keeps_the_computed_count                             1        1
    preempts_the_first                                   8        8
    bounds_the_batch_not_the_running                    21    never
    overshoots_max_tokens                                1        1
    ignores_the_pools_limit                              1        1
    believes_what_a_failed_step_found                    1        1
    does_not_undo_a_failed_step                        536    never
    loses_aborted_blocks                                 6        6
    writes_one_block_further                             2        2
    starts_a_chunk_at_the_cached_part                    1        1
    forgets_the_cut                                      1        1

"never": not within 2,000 trials. More running than allowed changes no output, and a failed step that is merely
repeated nearly none; only a check can see these two.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
from symbolic import run_many, run_trial

import atom_mini.model_runner as model_runner
import atom_mini.prefix_cache as prefix_cache
from atom_mini.block_manager import BlockManager, BlockPool
from atom_mini.prefix_cache import PrefixIndex
from atom_mini.scheduler import BaseScheduler, MixedScheduler, ScheduledBatch, Scheduler
from atom_mini.sequence import Sequence

Patch = pytest.MonkeyPatch


@pytest.mark.smoke
def test_outputs_equal_the_oracle_whatever_happens_on_the_way() -> None:
    """And everything that can happen does happen, often; otherwise equality would say little."""
    stats = run_many(range(3000))
    least = {
        "preemptions": 400, "put_back": 1200, "prefix_hits": 1000,
        "same_step_hits": 50, "chunks": 9000, "failures": 800, "refused": 800,
        "aborts_running": 90, "aborts_waiting": 200, "max_tokens": 3000, "max_model_len": 900, "kv_cache": 900,
        "eos": 1000, "stop": 200, "stop_sequence": 80,
    }  # fmt: skip
    assert not {name: stats[name] for name in least if stats[name] < least[name]}


@pytest.mark.slow
def test_a_hash_of_two_bits_is_enough_because_the_comparison_decides(monkeypatch: Patch) -> None:
    """The same cut that breaks a cache which trusts (hash, own tokens): see the planted bugs."""
    cut_hashes(monkeypatch, 2)
    assert run_many(range(300))["prefix_hits"] > 100


@pytest.mark.slow
def test_a_radix_tree_gives_the_same_outputs_and_the_same_hits() -> None:
    """Whatever is counted: steps, hits, preemptions. (An orphan, chapter 40, may change these: 5 of 17,000 trials.)"""
    assert run_many(range(1000), cache="radix") == run_many(range(1000))


@pytest.mark.slow
def test_mixed_steps_give_the_oracles_outputs() -> None:
    """Decodes and chunks in one step, in the same trials and in those where most preempt; with either prefix cache."""
    stats = run_many(range(1200), mixed=True) + run_many(range(10_000, 10_200), mixed=True, cache="radix")
    stats += run_many(range(20_000, 20_400), mixed=True, tight=True)
    least = {
        "mixed": 2000, "preemptions": 600, "prefix_hits": 1500, "same_step_hits": 100, "chunks": 9000, "failures": 900,
        "aborts_running": 90, "aborts_waiting": 300,
    }  # fmt: skip
    assert not {name: stats[name] for name in least if stats[name] < least[name]}


# ---- planted bugs ----


def mutate(patch: Patch, owner: Any, name: str, old: str, new: str) -> None:
    """Recompile `owner.name` with `old`, which must occur once in its source, replaced by `new`."""
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
    source = textwrap.dedent(inspect.getsource(raw))
    assert source.count(old) == 1, f"{name} has changed: plant this bug anew"
    source = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, function.__globals__, namespace)
    patch.setattr(owner, name, namespace[name])


def cut_hashes(patch: Patch, bits: int) -> None:
    whole = prefix_cache.compute_hash
    patch.setattr(prefix_cache, "compute_hash", lambda *args: whole(*args) % 2**bits)


def publishes_at_allocation(patch: Patch) -> None:
    """ATOM's guide (February 2026): a block may be found before its K/V exists, and for ever if the step fails."""
    allocate = BlockManager.allocate

    def bug(self: BlockManager, seq: Sequence, cached: list[int]) -> None:
        allocate(self, seq, cached)
        self.stage(seq, seq.num_tokens)
        self.index.publish()

    patch.setattr(BlockManager, "allocate", bug)


def publishes_before_the_last_token_is_forwarded(patch: Patch) -> None:
    """The sampled token fills the block, but its K/V comes with the next step only (ATOM counts it off by hand)."""
    postprocess = BaseScheduler.postprocess

    def bug(self: BaseScheduler, seqs: list[Sequence], *args: Any) -> list[Sequence]:
        finished = postprocess(self, seqs, *args)
        for seq in self.running:
            if seq.num_tokens - seq.num_computed_tokens == 1 and len(seq.block_table) == seq.num_blocks:
                self.block_manager.stage(seq, seq.num_tokens)
        self.block_manager.index.publish()
        return finished

    patch.setattr(BaseScheduler, "postprocess", bug)


def compares_own_tokens_only(patch: Patch) -> None:
    """ATOM, nano-vLLM: with a short hash, colliding parents slip through."""
    cut_hashes(patch, 4)
    mutate(patch, PrefixIndex, "_lookup", " and block.parent_id == parent_id", "")


def trusts_the_hash(patch: Patch) -> None:
    """vLLM trusts SHA-256; with xxHash cut to 8 bits it goes wrong at once."""
    cut_hashes(patch, 8)
    mutate(patch, PrefixIndex, "_lookup", "block.token_ids == tokens_of(seq, i) and block.parent_id == parent_id", "True")


def remembers_the_parent_by_block_id(patch: Patch) -> None:
    """The parent block has the right number and holds something else by now: why contents have ids of their own."""
    cut_hashes(patch, 2)
    mutate(
        patch, PrefixIndex, "stage",
        "block.content_id = twin.content_id if twin else next(self._content_ids)", "block.content_id = block.block_id",
    )  # fmt: skip


def keeps_the_index_entry_of_a_reused_block(patch: Patch) -> None:
    """ATOM's guide: prompt A+X hits the block that held X after A and now holds X after B."""
    patch.setattr(PrefixIndex, "forget", lambda self, block: None)
    mutate(patch, PrefixIndex, "_lookup", " and block.parent_id == parent_id", "")


def resets_a_free_block_on_a_hit(patch: Patch) -> None:
    """ATOM, be9d6c76e: the block loses the identity for which it was found."""
    old = "del self.free_block_ids[block_id]"
    mutate(patch, BlockPool, "share", old, f"{old}; block.__init__(block_id)")


def leaves_a_hit_in_the_free_queue(patch: Patch) -> None:
    """So it is handed out again while somebody reads it."""
    mutate(patch, BlockPool, "share", "del self.free_block_ids[block_id]", "pass")


def counts_free_hits_as_a_gift(patch: Patch) -> None:
    """ATOM, be9d6c76e: a cached block that nobody owns still uses up a free one."""
    old = "sum(self.pool.blocks[i].ref_count > 0 for i in cached)"
    mutate(patch, BlockManager, "num_needed", old, "len(cached)")


def takes_back_shared_blocks(patch: Patch) -> None:
    """mini-sglang: of two identical prompts one leaves, and the other's pages are free."""
    mutate(patch, BlockPool, "release", "block.ref_count -= 1", "block.ref_count = 0")


def shares_a_partial_block(patch: Patch) -> None:
    """Two sequences that start alike inside a block write to the same place when they part."""
    allocate, owners = BlockManager.allocate, []

    def bug(self: BlockManager, seq: Sequence, cached: list[int]) -> None:
        allocate(self, seq, cached)
        n = len(cached)
        for other in owners:
            table = other.block_table
            start = n * self.block_size
            alike = other.token_ids[: start + 1] == seq.token_ids[: start + 1]
            if alike and len(table) > n < len(seq.block_table) and table[n] not in seq.block_table:
                self.pool.release(seq.block_table[n])
                self.pool.share(table[n])
                seq.block_table[n] = table[n]
                self._write_row(seq, n)
                break
        owners.append(seq)

    patch.setattr(BlockManager, "allocate", bug)


def keeps_no_token_for_the_query(patch: Patch) -> None:
    """ATOM, e77a5ce1a; nano-vLLM at first: a prompt that is cached whole has nothing left to compute."""
    mutate(patch, PrefixIndex, "find", "(seq.num_tokens - 1) // self.block_size", "seq.num_tokens // self.block_size")


def appends_by_remainder(patch: Patch) -> None:
    """nano-vLLM: `len % block_size == 1` is never true with blocks of one token."""
    missing = lambda self, seq, n: int(seq.num_tokens % self.block_size == 1)  # noqa: E731
    patch.setattr(BlockManager, "_num_missing", missing)


def appends_one_token_too_late(patch: Patch) -> None:
    """The slide of the deck, the other way round: block 2 is asked for by token 6 where token 5 needs it."""
    mutate(patch, BlockManager, "_num_missing", "+ num_new_tokens - 1)", "+ num_new_tokens - 2)")


def ends_a_second_prefill_at_the_prompt(patch: Patch) -> None:
    """ATOM, defect C: "done?" compares with num_prompt_tokens, so generated tokens never get their K/V again."""
    old = "context_lens == np.array([s.num_tokens"
    mutate(patch, ScheduledBatch, "pack", old, "context_lens >= np.array([s.num_prompt_tokens")
    mutate(
        patch, BaseScheduler, "advance", "seq.num_computed_tokens += seq.num_scheduled_tokens",
        "seq.num_computed_tokens += seq.num_scheduled_tokens\n"
        "        if seq.num_computed_tokens >= seq.num_prompt_tokens:\n"
        "            seq.num_computed_tokens = seq.num_tokens",
    )  # fmt: skip


def forgets_what_was_generated(patch: Patch) -> None:
    """Preemption starts the request anew: the stream says everything twice."""

    def truncate(seq: Sequence) -> None:
        del seq.token_ids[seq.num_prompt_tokens :]
        seq._resize()

    after_preemption(patch, truncate)


def keeps_a_placeholder(patch: Patch) -> None:
    """ATOM, defect A: the EOS put in for a token still to come stays in the context after a preemption."""
    after_preemption(patch, lambda seq: seq.append_token(0) if seq.num_completion_tokens else None)


def keeps_the_computed_count(patch: Patch) -> None:
    """nano-vLLM at first: after a preemption the old count is believed, though the blocks are gone."""
    allocate, deallocate = BlockManager.allocate, BlockManager.deallocate

    def keep(change: Callable[..., None]) -> Callable[..., None]:
        def bug(self: BlockManager, seq: Sequence, *args: Any) -> None:
            before = seq.num_computed_tokens
            change(self, seq, *args)
            seq.num_computed_tokens = max(before, seq.num_computed_tokens)

        return bug

    patch.setattr(BlockManager, "allocate", keep(allocate))
    patch.setattr(BlockManager, "deallocate", keep(deallocate))


def preempts_the_first(patch: Patch) -> None:
    """The victim may have been scheduled already, in this very step."""
    mutate(patch, Scheduler, "_grow", "victim = self.running[-1]", "victim = self.running[0]")


def bounds_the_batch_not_the_running(patch: Patch) -> None:
    """nano-vLLM, ATOM's guide: six run where max_num_seqs says two."""
    init = BlockManager.__init__
    patch.setattr(BlockManager, "__init__", lambda self, *args: init(self, *args[:3], 512, *args[4:]))
    mutate(patch, Scheduler, "_admit", "and len(self.running) <", "and len(seqs) <")


def overshoots_max_tokens(patch: Patch) -> None:
    """ATOM with speculative decoding: two tokens asked, more given."""
    mutate(patch, BaseScheduler, "_stop_reason", "length < seq.limit", "length <= seq.limit")


def ignores_the_pools_limit(patch: Patch) -> None:
    """nano-vLLM: a sequence alone outgrows the pool, an assertion fails, the engine is dead."""
    mutate(patch, BaseScheduler, "__init__", "config.num_kvcache_blocks * config.kv_cache_block_size + 1", "10**9")


def believes_what_a_failed_step_found(patch: Patch) -> None:
    """The blocks are taken back, and what the step noted about them is not."""
    old = "self.index = self.index_cls(self.pool.blocks, self.block_size)"
    new = "self.index = getattr(self, 'index', None) or self.index_cls(self.pool.blocks, self.block_size)"
    mutate(patch, BlockManager, "reset", old, new)


def does_not_undo_a_failed_step(patch: Patch) -> None:
    """The blocks count as published by their owner, and never are; or are, and were never computed."""
    patch.setattr(BaseScheduler, "rollback", lambda self: None)


def loses_aborted_blocks(patch: Patch) -> None:
    """ATOM, 2fc509194: the client has gone and its K/V stays."""
    mutate(patch, BaseScheduler, "_finish", "if seq.block_table:", 'if seq.block_table and seq.leave_reason != "abort":')


def writes_one_block_further(patch: Patch) -> None:
    """A slot computed with the wrong block of the table (ATOM takes the last one, whatever the table's length)."""
    mutate(patch, model_runner, "locate", "block_tables[owner, positions // block_size]", "block_tables[owner, -1]")


def starts_a_chunk_at_the_cached_part(patch: Patch) -> None:
    """79a1fcc97: positions and tokens counted from different places."""
    mutate(patch, ScheduledBatch, "pack", "s.token_ids[s.num_computed_tokens :]", "s.token_ids[s.num_cached_tokens :]")


def forgets_the_cut(patch: Patch) -> None:
    """A chunk that does not end its prompt samples all the same (ATOM, 096d6cf51)."""
    mutate(patch, ScheduledBatch, "pack", "context_lens == np.array([s.num_tokens", "context_lens > np.array([0")


def after_preemption(patch: Patch, change: Callable[[Sequence], None]) -> None:
    preempt = BaseScheduler.preempt

    def bug(self: BaseScheduler, seq: Sequence) -> None:
        preempt(self, seq)
        change(seq)

    patch.setattr(BaseScheduler, "preempt", bug)


def puts_prompts_before_decodes(patch: Patch) -> None:
    """Then a decode that finds no block takes those of a chunk that is in the step already."""
    source = inspect.getsource(MixedScheduler._choose)
    decode, prefill = (next(line for line in source.splitlines() if f"{name} = " in line) for name in ("decodes", "prompts"))
    late = decode.replace("self._decodable()", "self._decodable()[: self.config.max_num_batched_tokens - used]")
    early = prefill.replace("taken=len(decodes)", "taken=0") + "; used = sum(s.num_scheduled_tokens for s in prompts)"
    mutate(patch, MixedScheduler, "_choose", f"{decode}\n{prefill}".replace("\n    ", "\n").strip(),
           f"{early}\n{late}".replace("\n    ", "\n").strip())  # fmt: skip


def spends_the_decodes_budget_twice(patch: Patch) -> None:
    mutate(patch, MixedScheduler, "_choose", "taken=len(decodes)", "taken=0")


def takes_the_newest_token_of_a_chunk(patch: Patch) -> None:
    """Packs a mixed step as if all of its rows were decodes."""
    mutate(patch, ScheduledBatch, "pack", "type is not SequenceType.DECODE", "type is SequenceType.PREFILL")


def schedules_a_cut_prompt_twice(patch: Patch) -> None:
    """Its last token is a decode, and a chunk as well."""
    mutate(patch, Scheduler, "_schedule_prefill", "end - start > 1 and", "end - start > 0 and")


PLANTED_IN_MIXED: list[Callable[[Patch], None]] = [
    puts_prompts_before_decodes,
    spends_the_decodes_budget_twice,
    takes_the_newest_token_of_a_chunk,
    schedules_a_cut_prompt_twice,
    preempts_the_first,
    publishes_at_allocation,
    forgets_the_cut,
]
PLANTED: list[Callable[[Patch], None]] = [
    publishes_at_allocation,
    publishes_before_the_last_token_is_forwarded,
    compares_own_tokens_only,
    trusts_the_hash,
    remembers_the_parent_by_block_id,
    keeps_the_index_entry_of_a_reused_block,
    resets_a_free_block_on_a_hit,
    leaves_a_hit_in_the_free_queue,
    counts_free_hits_as_a_gift,
    takes_back_shared_blocks,
    shares_a_partial_block,
    keeps_no_token_for_the_query,
    appends_by_remainder,
    appends_one_token_too_late,
    ends_a_second_prefill_at_the_prompt,
    forgets_what_was_generated,
    keeps_a_placeholder,
    keeps_the_computed_count,
    preempts_the_first,
    bounds_the_batch_not_the_running,
    overshoots_max_tokens,
    ignores_the_pools_limit,
    believes_what_a_failed_step_found,
    does_not_undo_a_failed_step,
    loses_aborted_blocks,
    writes_one_block_further,
    starts_a_chunk_at_the_cached_part,
    forgets_the_cut,
]


def trials_until_caught(
    plant: Callable[[Patch], None], most: int, strict: bool, **how: bool
) -> tuple[int, BaseException] | None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(most):
            try:
                run_trial(seed, strict, **how)
            except Exception as error:
                return seed + 1, error
    return None


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_fuzz_catches(plant: Callable[[Patch], None]) -> None:
    assert trials_until_caught(plant, 1000, strict=True) is not None


@pytest.mark.parametrize("plant", PLANTED_IN_MIXED, ids=lambda plant: plant.__name__)
def test_the_fuzz_catches_it_in_mixed_steps(plant: Callable[[Patch], None]) -> None:
    """Those that only a mixed step can have, and some that any step can."""
    assert trials_until_caught(plant, 1000, strict=True, mixed=True) is not None


def _measure(most: int) -> None:
    for plant in PLANTED:
        counts, kinds = [], []
        for strict in (True, False):
            caught = trials_until_caught(plant, most, strict)
            counts.append(str(caught[0]) if caught else f"> {most}")
            kinds.append(f"{type(caught[1]).__name__}: {caught[1]}"[:48] if caught else "-")
        print(f"    {plant.__name__:46} {counts[0]:>7} {counts[1]:>7}   {kinds[0]}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["planted"]:
        _measure(int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
    else:
        trials, first = (int(x) for x in (sys.argv[1:] + ["3000", "0"][len(sys.argv) - 1 :]))
        start = time.perf_counter()
        counted = run_many(range(first, first + trials))
        seconds = time.perf_counter() - start
        print(f"{trials} trials from seed {first}: {seconds:.0f} s, {trials / seconds:.0f} trials/s, all as the oracle says")
        print(dict(sorted(counted.items())))
