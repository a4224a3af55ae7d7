"""Hashes that others must find, too, and which block is handed out next. Random callers: test_fuzz.py."""

from __future__ import annotations

from typing import Any

import pytest
from show import admit

import atom_mini.prefix_cache as prefix_cache_module
from atom_mini.block_manager import NO_HASH, BlockManager
from atom_mini.prefix_cache import PrefixIndex, compute_hash
from atom_mini.scheduling.radix_cache import RadixCache
from atom_mini.sequence import Sequence

both = pytest.mark.parametrize("index_cls", [PrefixIndex, RadixCache])


# ---- hashes: another implementation must find the same numbers ----


def test_hash_values() -> None:
    """Written down once: neither a platform's default integer nor a new NumPy may change them."""
    manager = BlockManager(8, 4, PrefixIndex)
    admit(manager, Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], 4))
    known = [0x73F859A04F669E6D, 0x87884241753DF3E]
    assert [*manager.index.hash_to_block_id] == known  # type: ignore[attr-defined]
    assert compute_hash([1, 2, 3, 4], 0) != known[0], "parent 0 is a parent: only NO_HASH is none"


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


def queue(manager: BlockManager) -> list[int]:
    return list(manager.pool.free_block_ids)


@both
def test_blocks_without_content_go_first_then_the_least_recently_used(index_cls: Any) -> None:
    manager = BlockManager(7, 2, index_cls)
    one, two = Sequence([1, 2, 3], 2), Sequence([4, 5, 6, 7, 8], 2)
    admit(manager, one)
    admit(manager, two)
    assert (one.block_table, two.block_table, queue(manager)) == ([0, 1], [2, 3, 4], [5, 6])
    manager.deallocate(two)
    manager.deallocate(one)
    # half-full ones in front; of the full ones of a prompt its beginning stays longest
    assert queue(manager) == [1, 4, 5, 6, 3, 2, 0]
    again = Sequence([4, 5, 9], 2)
    admit(manager, again)
    assert 2 not in queue(manager), "it is shared"
    manager.deallocate(again)
    assert queue(manager)[-3:] == [3, 0, 2], "a hit makes a block the most recently used"


@both
def test_a_shared_block_is_free_when_its_last_owner_leaves(index_cls: Any) -> None:
    manager = BlockManager(6, 2, index_cls)
    one, two = Sequence([1, 2, 3], 2), Sequence([1, 2, 4], 2)
    admit(manager, one, two)
    assert one.block_table[0] == two.block_table[0] == 0 and manager.num_free_blocks == 3
    manager.deallocate(one)
    assert 0 not in queue(manager) and manager.num_free_blocks == 4
    manager.deallocate(two)
    assert queue(manager)[-1] == 0 and manager.num_free_blocks == 6


# ---- admission ----


def test_without_caching_nothing_is_found_or_kept() -> None:
    manager = BlockManager(8, 2)
    for _ in range(2):
        seq = Sequence([1, 2, 3], 2)
        admit(manager, seq)
        assert seq.num_cached_tokens == 0
    assert not manager.index.pending and {block.hash for block in manager.pool.blocks} == {NO_HASH}
