"""The block manager under a random caller: every hit must be true, and the books must balance after every call."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from show import check_blocks

import atom_mini.prefix_cache as prefix_cache_module
from atom_mini.block_manager import NO_HASH, BlockManager, NoIndex
from atom_mini.config import SamplingParams
from atom_mini.prefix_cache import PrefixIndex, compute_hash
from atom_mini.scheduling.radix_cache import RadixCache
from atom_mini.sequence import Sequence


class BlockManagerMachine(RuleBasedStateMachine):
    """Does what schedulers do, in any order: several admissions and appends a step, then the step runs or fails.

    `content` is the model: for each block, the tokens from the very first on whose K/V it holds, slot by slot. It is
    written when a step runs, and a block that is found must already say, slot by slot, what the sequence wants there.
    """

    index_cls: Any = PrefixIndex

    @initialize(
        blocks=st.integers(1, 7), size=st.integers(1, 3), caching=st.sampled_from([True, True, False]),
        bits=st.sampled_from([0, 1, 64]),
    )  # fmt: skip
    def start(self, blocks: int, size: int, caching: bool, bits: int) -> None:
        real = compute_hash
        self.patch = pytest.MonkeyPatch()  # hashes that collide as often as they like
        self.patch.setattr(prefix_cache_module, "compute_hash", lambda *args: real(*args) % 2**bits)
        self.manager = BlockManager(blocks, size, self.index_cls if caching else NoIndex, 4)
        self.size = size
        self.content: list[list[Any]] = [[None] * size for _ in range(blocks)]
        self.held: list[Sequence] = []  # between two steps, with everything computed but the newest token
        self.step: list[Sequence] = []  # scheduled in the step that has not run yet
        self.hits = 0

    @property
    def free(self) -> int:
        return self.manager.num_free_blocks

    def _past(self, seq: Sequence, position: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[: position + 1])

    @precondition(lambda self: len(self.held) + len(self.step) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), reserve=st.integers(0, 2), cut=st.integers(0, 8))
    def admit(self, tokens: list[int], reserve: int, cut: int) -> None:
        seq = Sequence(tokens, self.size, SamplingParams(max_tokens=4))
        cached = self.manager.can_allocate(seq, reserve)
        held = sum(self.manager.pool.blocks[i].ref_count > 0 for i in cached or [])
        if cached is None:
            assert self.free < seq.num_blocks + reserve, "refused although nothing needed to be shared"
            assert not seq.block_table
            return
        assert self.free >= seq.num_blocks - held + reserve
        before = self.free
        self.manager.allocate(seq, cached)
        assert before - self.free == seq.num_blocks - held
        assert seq.num_computed_tokens == len(cached) * self.size < len(tokens)
        assert seq.block_table[: len(cached)] == cached and len(seq.block_table) == -(-len(tokens) // self.size)
        seq.num_scheduled_tokens = max(1, len(tokens) - seq.num_computed_tokens - cut)  # perhaps a chunk only
        self.manager.stage(seq, seq.num_computed_tokens + seq.num_scheduled_tokens)
        self.step.append(seq)
        self.hits += len(cached)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), new=st.integers(1, 3))
    def go_on(self, data: st.DataObject, new: int) -> None:
        """The next chunk of a prompt, or room for the newest token and `new - 1` more."""
        seq = data.draw(st.sampled_from(self.held))
        missing = -(-(len(seq) + new - 1) // self.size) - len(seq.block_table)
        assert self.manager.can_append(seq, new) == (missing <= self.free)
        if missing > self.free:
            return
        self.manager.may_append(seq, new)
        assert len(seq.block_table) == max(-(-(len(seq) + new - 1) // self.size), len(seq.block_table))
        seq.num_scheduled_tokens = data.draw(st.integers(1, len(seq) - seq.num_computed_tokens))
        self.manager.stage(seq, seq.num_computed_tokens + seq.num_scheduled_tokens)
        self.held.remove(seq)
        self.step.append(seq)

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        """All K/V of the step is stored; then each sequence reads its own, through its table."""
        for seq in self.step:
            for p in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
                block = seq.block_table[p // self.size]
                others = [s for s in self.held + self.step if s is not seq and block in s.block_table]
                computed = [s for s in others if s in self.held and s.num_computed_tokens > p]
                assert not computed, "a slot that others have read from is written again"
                self.content[block][p % self.size] = self._past(seq, p)
        self.manager.index.publish()
        for seq in self.step:
            seq.num_computed_tokens += seq.num_scheduled_tokens
            if seq.num_computed_tokens == len(seq):
                seq.append_token(data.draw(st.integers(0, 1)))
        self.held += self.step
        self.step = []

    @precondition(lambda self: self.step)
    @rule()
    def fail_step(self) -> None:
        """As `Scheduler.rollback`: nothing of it may ever be found."""
        self.manager.index.pending.clear()
        for seq in reversed(self.step):
            self.manager.deallocate(seq)
        self.step = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Finished, aborted, or preempted while a step is being put together."""
        seq = data.draw(st.sampled_from(self.held))
        self.held.remove(seq)
        self.manager.deallocate(seq)
        assert not seq.block_table and seq.row == -1 and seq.num_computed_tokens == 0

    @invariant()
    def every_table_holds_what_its_sequence_has_computed(self) -> None:
        for seq in getattr(self, "held", []):
            for p in range(seq.num_computed_tokens):
                assert self.content[seq.block_table[p // self.size]][p % self.size] == self._past(seq, p)

    @invariant()
    def every_entry_of_the_index_is_true(self) -> None:
        """Whatever the hash: a block that can be found holds the whole past that its finder will have."""
        if not hasattr(self, "manager"):
            return
        check_blocks(self.manager, self.held + self.step)
        for block in self.manager.pool.blocks:
            if block.hash == NO_HASH:  # check() has shown that the index does not know it
                continue
            slots = self.content[block.block_id]
            assert None not in slots and [past[-1] for past in slots] == block.token_ids
            probe = Sequence([*slots[-1], 0], self.size)
            found = self.manager.index.find(probe)
            for i, id in enumerate(found):
                assert id in self.manager.index.pending.values() or self.content[id][-1] == slots[-1][: (i + 1) * self.size]

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            if self.step:
                self.fail_step()
            for seq in self.held:
                self.manager.deallocate(seq)
            check_blocks(self.manager, [])
            assert self.free == len(self.content)
            self.patch.undo()


class RadixMachine(BlockManagerMachine):
    """The same caller, the same promises, the other index."""

    index_cls = RadixCache


BlockManagerMachine.TestCase.settings = RadixMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
test_block_manager_machine = BlockManagerMachine.TestCase
test_block_manager_machine_on_a_radix_tree = RadixMachine.TestCase
both = pytest.mark.parametrize("index_cls", [PrefixIndex, RadixCache])


# ---- hashes: another implementation must find the same numbers ----


def reference_hash(token_ids: list[int], parent: int | None = None) -> int:
    """Little-endian: the parent's 8 bytes (none for the first block), then each id as int64."""
    head = b"" if parent is None else struct.pack("<Q", parent)
    return xxhash.xxh64(head + struct.pack(f"<{len(token_ids)}q", *token_ids)).intdigest()


@pytest.mark.parametrize("token_ids", [[1, 2, 3, 4], [0], [151_935] * 16, [2**40, 7]])
@pytest.mark.parametrize("parent", [None, 0, 1, 2**64 - 1])
def test_hash_format(token_ids: list[int], parent: int | None) -> None:
    """Parent 0 is a parent: only NO_HASH means that there is none."""
    got = compute_hash(token_ids) if parent is None else compute_hash(token_ids, parent)
    assert got == reference_hash(token_ids, parent)


def test_hash_values() -> None:
    """Written down once: neither a platform's default integer nor a new NumPy may change them."""
    first = compute_hash([1, 2, 3, 4])
    assert (hex(first), hex(compute_hash([5, 6, 7, 8], first))) == ("0x73f859a04f669e6d", "0x87884241753df3e")


def test_a_chain_depends_on_every_token_before() -> None:
    chains = []
    for changed in range(9):
        tokens = [i + 100 * (i == changed) for i in range(8)]
        parent, chain = NO_HASH, []
        for i in range(0, 8, 2):
            parent = compute_hash(tokens[i : i + 2], parent)
            chain.append(parent)
        chains.append(chain)
    whole = chains.pop()  # nothing changed
    for changed, chain in enumerate(chains):
        assert [a == b for a, b in zip(chain, whole, strict=True)] == [i < changed // 2 for i in range(4)]


def test_a_sequence_is_hashed_once_in_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = compute_hash
    monkeypatch.setattr(prefix_cache_module, "compute_hash", lambda *args: calls.append(args) or real(*args))
    manager, seq = BlockManager(8, 2, PrefixIndex), Sequence(range(9), 2)
    for _ in range(3):
        admit(manager, seq)
        manager.deallocate(seq)
    assert len(calls) == 4


# ---- which block is next ----


def admit(manager: BlockManager, seq: Sequence) -> Sequence:
    """Admit `seq` and run the step that computes it."""
    cached = manager.can_allocate(seq)
    assert cached is not None
    manager.allocate(seq, cached)
    manager.stage(seq, seq.num_tokens)
    manager.index.publish()
    seq.num_computed_tokens = seq.num_tokens
    return seq


def queue(manager: BlockManager) -> list[int]:
    return list(manager.pool.free_block_ids)


@both
def test_blocks_without_content_go_first_then_the_least_recently_used(index_cls: Any) -> None:
    manager = BlockManager(7, 2, index_cls)
    one, two = admit(manager, Sequence([1, 2, 3], 2)), admit(manager, Sequence([4, 5, 6], 2))
    assert (one.block_table, two.block_table, queue(manager)) == ([0, 1], [2, 3], [4, 5, 6])
    manager.deallocate(two)
    manager.deallocate(one)
    assert queue(manager) == [1, 3, 4, 5, 6, 2, 0]  # half-full ones in front; of the full, 2 was left first


@both
def test_the_beginning_of_a_prompt_stays_longest(index_cls: Any) -> None:
    manager = BlockManager(5, 2, index_cls)
    seq = admit(manager, Sequence([1, 2, 3, 4, 5, 6, 7], 2))
    manager.deallocate(seq)
    assert queue(manager) == [3, 4, 2, 1, 0]
    admit(manager, Sequence([8, 8, 8, 8, 8], 2))  # takes three
    assert manager.index.find(Sequence([1, 2, 3, 4, 5, 6, 7], 2)) == [0, 1]


@both
def test_a_hit_makes_a_block_the_most_recently_used(index_cls: Any) -> None:
    manager = BlockManager(6, 2, index_cls)
    for token in range(3):
        manager.deallocate(admit(manager, Sequence([token, token, 9], 2)))
    blocks = [manager.index.find(Sequence([token, token, 8], 2))[0] for token in range(3)]
    assert queue(manager)[-3:] == blocks
    manager.deallocate(admit(manager, Sequence([0, 0, 8], 2)))
    assert queue(manager)[-3:] == [blocks[1], blocks[2], blocks[0]]


@both
def test_a_shared_block_is_free_when_its_last_owner_leaves(index_cls: Any) -> None:
    manager = BlockManager(6, 2, index_cls)
    one, two = admit(manager, Sequence([1, 2, 3], 2)), admit(manager, Sequence([1, 2, 4], 2))
    assert one.block_table[0] == two.block_table[0] == 0 and manager.num_free_blocks == 3
    manager.deallocate(one)
    assert 0 not in queue(manager) and manager.num_free_blocks == 4
    manager.deallocate(two)
    assert queue(manager)[-1] == 0 and manager.num_free_blocks == 6


# ---- admission ----


@both
def test_free_hits_are_charged_and_held_hits_are_not(index_cls: Any) -> None:
    manager = BlockManager(4, 2, index_cls)
    one = admit(manager, Sequence([1, 2, 3, 4, 5], 2))  # 3 blocks of 4
    same = Sequence([1, 2, 3, 4, 6], 2)
    assert manager.can_allocate(same) == [0, 1]  # 2 held by `one`, 1 free block needed
    assert manager.can_allocate(same, reserve=1) is None
    manager.deallocate(one)
    assert manager.can_allocate(same, reserve=1) == [0, 1]  # now it needs 3 of 4
    assert manager.can_allocate(same, reserve=2) is None


def test_without_caching_nothing_is_found_or_kept() -> None:
    manager = BlockManager(8, 2)
    for _ in range(2):
        assert admit(manager, Sequence([1, 2, 3], 2)).num_cached_tokens == 0
    assert not manager.index.pending and {block.hash for block in manager.pool.blocks} == {NO_HASH}
