"""Random loads on random tiny engines, against an oracle without blocks; and proof that this finds bugs.

    PYTHONPATH=tests:nbs/_book python tests/engine/test_fuzz.py 100000 [first seed]  # more trials

A fuzz that never fails proves nothing until it has been seen to fail. So known bugs, most of them of other engines, are
planted one at a time. Most are found within ten trials; of them two change no output in 2,000, so that only the checks
of every step see them: more running than allowed, and a failed step that is not undone.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections import Counter
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


def check_often(stats: Counter[str], least: dict[str, int]) -> None:
    """All that can happen has happened so often; otherwise equality would say little."""
    assert not {name: stats[name] for name in least if stats[name] < least[name]}


OFTEN = [0, 500, 1000]
LATER = [pytest.param(first, marks=pytest.mark.slow) for first in (1500, 2000, 2500)]


@pytest.mark.parametrize("first", OFTEN + LATER)
def test_outputs_equal_the_oracle_whatever_happens_on_the_way(first: int) -> None:
    stats = run_many(range(first, first + 500))
    least = {
        "preemptions": 60, "put_back": 150, "prefix_hits": 150,
        "same_step_hits": 6, "chunks": 1200, "failures": 100, "refused": 100,
        "aborts_running": 10, "aborts_waiting": 25, "max_tokens": 450, "max_model_len": 120,
        "kv_cache": 120, "eos": 150, "stop": 25, "stop_sequence": 8,
    }  # fmt: skip
    check_often(stats, least)


def test_a_hash_of_two_bits_is_enough_because_the_comparison_decides(monkeypatch: Patch) -> None:
    """The same cut that breaks a cache which trusts (hash, own tokens): see the planted bugs."""
    cut_hashes(monkeypatch, 2)
    assert run_many(range(100))["prefix_hits"] > 30


@pytest.mark.slow
def test_a_radix_tree_gives_the_same_outputs_and_the_same_hits() -> None:
    """Whatever is counted: steps, hits, preemptions. (An orphan, chapter 40, may change these: 5 of 17,000 trials.)"""
    assert run_many(range(500), cache="radix") == run_many(range(500))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "how"),
    [
        (range(600), {}),
        (range(10_000, 10_150), {"cache": "radix"}),
        (range(20_000, 20_200), {"tight": True}),
    ],
    ids=["usual", "radix", "tight"],
)
def test_mixed_steps_give_the_oracles_outputs(seeds: range, how: dict[str, Any]) -> None:
    """Decodes and chunks in one step; with either prefix cache; and where most trials preempt."""
    stats, trials = run_many(seeds, mixed=True, **how), len(seeds)
    least = {"mixed": trials // 2, "prefix_hits": trials // 2, "chunks": 4 * trials, "failures": trials // 4}
    check_often(stats, least | {"preemptions": trials if "tight" in how else trials // 10})


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


Change = tuple[Any, str, str, str]  # of the owner's function: a piece of its source, and what it becomes
ITS_PARENT = (PrefixIndex, "_lookup", " and block.parent_id == parent_id", "")
IS_LAST = "context_lens == np.array([s.num_tokens"
CHANGES: dict[str, list[Change]] = {
    # ATOM, nano-vLLM: with a short hash, colliding parents slip through
    "compares_own_tokens_only": [ITS_PARENT],
    # vLLM trusts SHA-256; with xxHash cut to 8 bits it goes wrong at once
    "trusts_the_hash": [
        (PrefixIndex, "_lookup",
         "block.token_ids == tokens_of(seq, i) and block.parent_id == parent_id", "True"),
    ],
    # the parent block has the right number and holds something else by now
    "remembers_the_parent_by_block_id": [
        (PrefixIndex, "stage", "twin.content_id if twin else next(self._content_ids)", "block.block_id"),
    ],
    # ATOM's guide: prompt A+X hits the block that held X after A and now holds X after B
    "keeps_the_index_entry_of_a_reused_block": [
        ITS_PARENT, (PrefixIndex, "forget", "block.hash != NO_HASH", "False"),
    ],
    # ATOM, be9d6c76e: the block loses the identity for which it was found
    "resets_a_free_block_on_a_hit": [
        (BlockPool, "share", "block.ref_count += 1", "block.ref_count or block.__init__(block_id); block.ref_count += 1"),
    ],
    # so it is handed out again while somebody reads it
    "leaves_a_hit_in_the_free_queue": [(BlockPool, "share", "del self.free_block_ids[block_id]", "pass")],
    # ATOM, be9d6c76e: a cached block that nobody owns still uses up a free one
    "counts_free_hits_as_a_gift": [
        (BlockManager, "num_needed", "sum(self.pool.blocks[i].ref_count > 0 for i in cached)", "len(cached)"),
    ],
    # mini-sglang: of two identical prompts one leaves, and the other's pages are free
    "takes_back_shared_blocks": [(BlockPool, "release", "block.ref_count -= 1", "block.ref_count = 0")],
    # ATOM, e77a5ce1a: a prompt that is cached whole has nothing left to compute
    "keeps_no_token_for_the_query": [(PrefixIndex, "find", "(seq.num_tokens - 1)", "seq.num_tokens")],
    # nano-vLLM: `len % block_size == 1` is never true with blocks of one token
    "appends_by_remainder": [
        (BlockManager, "_num_missing", "needed - len(seq.block_table)", "int(seq.num_tokens % self.block_size == 1)"),
    ],
    # block 2 is asked for by token 6 where token 5 needs it
    "appends_one_token_too_late": [(BlockManager, "_num_missing", "num_new_tokens - 1", "num_new_tokens - 2")],
    # ATOM, defect C: "done?" compares with num_prompt_tokens, so generated tokens never get their K/V again
    "ends_a_second_prefill_at_the_prompt": [
        (ScheduledBatch, "pack", IS_LAST, "context_lens >= np.array([s.num_prompt_tokens"),
        (BaseScheduler, "advance", "seq.num_computed_tokens += seq.num_scheduled_tokens",
         "n = seq.num_computed_tokens + seq.num_scheduled_tokens; "
         "seq.num_computed_tokens = n if n < seq.num_prompt_tokens else seq.num_tokens"),
    ],
    # the victim may have been scheduled already, in this very step
    "preempts_the_first": [(Scheduler, "_grow", "self.running[-1]", "self.running[0]")],
    # nano-vLLM, ATOM's guide: six run where max_num_seqs says two
    "bounds_the_batch_not_the_running": [
        (BlockManager, "__post_init__", "self.reset()", "self.max_num_seqs = 512; self.reset()"),
        (Scheduler, "_admit", "and len(self.running) <", "and len(seqs) <"),
    ],
    # ATOM with speculative decoding: two tokens asked, more given
    "overshoots_max_tokens": [(BaseScheduler, "_stop_reason", "length < seq.limit", "length <= seq.limit")],
    # nano-vLLM: a sequence alone outgrows the pool, an assertion fails, the engine is dead
    "ignores_the_pools_limit": [
        (BaseScheduler, "__init__", "config.num_kvcache_blocks * config.kv_cache_block_size + 1", "10**9"),
    ],
    # the blocks are taken back, and what the step noted about them is not
    "believes_what_a_failed_step_found": [
        (BlockManager, "reset", "self.index = self", "self.index = getattr(self, 'index', None) or self"),
    ],
    # the blocks count as published and never are; or are, and were never computed
    "does_not_undo_a_failed_step": [(BaseScheduler, "rollback", "self.block_manager.reset()", "return")],
    # ATOM, 2fc509194: the client has gone and its K/V stays
    "loses_aborted_blocks": [
        (BaseScheduler, "_finish", "if seq.block_table:", 'if seq.block_table and seq.leave_reason != "abort":'),
    ],
    # ATOM takes the last block, whatever the table's length
    "writes_one_block_further": [
        (model_runner, "locate", "block_tables[owner, positions // block_size]", "block_tables[owner, -1]"),
    ],
    # 79a1fcc97: positions and tokens counted from different places
    "starts_a_chunk_at_the_cached_part": [
        (ScheduledBatch, "pack", "s.token_ids[s.num_computed_tokens :]", "s.token_ids[s.num_cached_tokens :]"),
    ],
    # ATOM, 096d6cf51: a chunk that does not end its prompt samples all the same
    "forgets_the_cut": [(ScheduledBatch, "pack", IS_LAST, "context_lens > np.array([0")],
}  # fmt: skip
SHORT_HASHES = {"compares_own_tokens_only": 4, "trusts_the_hash": 8, "remembers_the_parent_by_block_id": 2}
IN_MIXED: dict[str, list[Change]] = {
    "spends_the_decodes_budget_twice": [(MixedScheduler, "_choose", "taken=len(decodes)", "taken=0")],
    # packs a mixed step as if all of its rows were decodes
    "takes_the_newest_token_of_a_chunk": [
        (ScheduledBatch, "pack", "kind is not SequenceType.DECODE", "kind is SequenceType.PREFILL"),
    ],
    # its last token is a decode, and a chunk as well
    "schedules_a_cut_prompt_twice": [
        (Scheduler, "_schedule_prefill", "end - start > 1 and", "end - start > 0 and"),
    ],
}  # fmt: skip
FUNCTIONS = [
    publishes_at_allocation, publishes_before_the_last_token_is_forwarded, shares_a_partial_block,
    forgets_what_was_generated, keeps_a_placeholder, keeps_the_computed_count,
]  # fmt: skip
PLANTED: dict[str, Callable[[Patch], None] | list[Change]] = {plant.__name__: plant for plant in FUNCTIONS}
PLANTED |= CHANGES
PLANTED_IN_MIXED = IN_MIXED | {name: PLANTED[name] for name in (
    "preempts_the_first", "publishes_at_allocation", "forgets_the_cut",
)} | {"puts_prompts_before_decodes": puts_prompts_before_decodes}  # fmt: skip


def is_caught(plant: Callable[[Patch], None] | list[Change], bits: int | None = None, **how: bool) -> bool:
    """Whether one of 1,000 trials fails with this bug, and with hashes of so many bits."""
    with pytest.MonkeyPatch.context() as patch:
        if bits is not None:
            cut_hashes(patch, bits)
        if callable(plant):
            plant(patch)
        else:
            for change in plant:
                mutate(patch, *change)
        for seed in range(1000):
            try:
                run_trial(seed, **how)
            except Exception:
                return True
    return False


@pytest.mark.parametrize("name", PLANTED)
def test_the_fuzz_catches(name: str) -> None:
    assert is_caught(PLANTED[name], SHORT_HASHES.get(name))


@pytest.mark.parametrize("name", PLANTED_IN_MIXED)
def test_the_fuzz_catches_it_in_mixed_steps(name: str) -> None:
    """Those that only a mixed step can have, and some that any step can."""
    assert is_caught(PLANTED_IN_MIXED[name], mixed=True)


if __name__ == "__main__":
    trials, start = (int(text) for text in (*sys.argv[1:], "0", "0")[:2])
    print(dict(sorted(run_many(range(start, start + trials)).items())))
