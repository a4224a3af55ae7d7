"""The radix tree against an index of hashes, block by block; and the fuzz finds planted bugs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from show import check_index
from symbolic import run_trial
from test_fuzz import mutate

from atom_mini.block_manager import NO_HASH, Block, BlockManager
from atom_mini.prefix_cache import PrefixIndex
from atom_mini.scheduling.radix_cache import RadixCache
from atom_mini.sequence import Sequence


def admit(manager: BlockManager, *prompts: list[int]) -> list[Sequence]:
    """Admit them and run the step that computes them."""
    seqs = [Sequence(p, manager.block_size) for p in prompts]
    for seq in seqs:
        manager.allocate(seq, manager.can_allocate(seq) or [])
        manager.stage(seq, len(seq))
        seq.num_computed_tokens = len(seq)
    manager.index.publish()
    return seqs


def test_evicted_are_the_least_recently_used_leaves_and_what_is_locked_stays() -> None:
    manager: Any = BlockManager(10, 2, RadixCache)
    (old,), (new,), (locked,) = (admit(manager, p) for p in ([1, 1, 2, 2, 0], [1, 1, 3, 3, 0], [4, 4, 5, 5, 0]))
    manager.deallocate(old)
    manager.deallocate(new)
    order = []
    for block in [manager.pool.blocks[i] for i in manager.pool.free_block_ids]:
        if block.hash != NO_HASH:
            node, at = manager.index.places[block.content_id]
            assert at == len(node.block_ids) - 1 and not node.children, "not a leaf"
            order.append(block.token_ids)
        manager._fresh_block()
        check_index(manager.index)
    assert order == [[2, 2], [3, 3], [1, 1]] and manager.index.match([4, 4, 5, 5]) == locked.block_table[:2]


BUGS: dict[str, tuple[str, str, str]] = {  # in which method, what, by what
    "takes the whole edge": ("match", "found + child.block_ids[:same]", "found + child.block_ids"),
    "never forgets": ("forget", "if block.hash == NO_HASH:", "if True:"),
    "cuts no subtree": ("forget", "[at:], list(node.children.values())", "[at:], []"),
    "forgets to hide from its parent": ("forget", "del above.children[tuple(block.token_ids)]", "pass"),
    "loses the places of a split": ("split", "] = rest, i", "] = node, i"),
    "loses children": ("split", "node.block_ids[num_blocks:], node.children)", "node.block_ids[num_blocks:])"),
    "does not split": ("insert", "self.split(node, at + 1)", "pass"),
    "finds a last token": ("find", "(seq.num_tokens - 1) // self.block_size", "seq.num_tokens // self.block_size"),
    "keeps what was pending": ("publish", "self.pending.clear()", "pass"),
    "hangs orphans on the root": ("insert", "return\n", "block.parent_id = ROOT\n"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzz_catches_in_the_tree(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, RadixCache, *BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever breaks first
        for seed in range(1000):
            run_trial(seed, cache="radix")


class Both:
    """A hash index and a tree that see the same blocks, and blocks that are evicted at random."""

    def __init__(self, seed: int) -> None:
        self.rng, self.size = random.Random(seed), 2
        self.pools = [[Block(i) for i in range(16)] for _ in range(2)]
        self.indexes = PrefixIndex(self.pools[0], self.size), RadixCache(self.pools[1], self.size)
        self.running: list[Any] = []  # two copies of each sequence: an index keeps its hashes on it

    def find(self, tokens: list[int]) -> list[int]:
        """What both find; they must agree."""
        one, other = (index.find(Sequence(tokens, self.size)) for index in self.indexes)
        assert one == other, f"{tokens}: hash {one}, radix {other}"
        return one

    def free(self) -> list[int]:
        owned = {i for seq, _ in self.running for i in seq.block_table}
        return [i for i in range(len(self.pools[0])) if i not in owned]

    def fresh(self) -> int:
        """A random block without an owner."""
        block_id = self.rng.choice(self.free())
        for index, pool in zip(self.indexes, self.pools, strict=True):
            index.forget(pool[block_id])
        return block_id

    def begin(self) -> None:
        """A prompt enters with what is found of it."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 8))]
        twins = [Sequence(tokens, self.size) for _ in range(2)]
        for seq in twins:
            seq.block_table = self.find(tokens)
            seq.num_published_blocks = len(seq.block_table)
        self.running.append(twins)
        self.compute(twins)

    def compute(self, twins: Any) -> None:
        """Blocks for all tokens; they are computed in this step."""
        while len(twins[0].block_table) < twins[0].num_blocks:
            block_id = self.fresh()
            for seq in twins:
                seq.block_table.append(block_id)
        for index, seq in zip(self.indexes, twins, strict=True):
            index.stage(seq, seq.num_tokens)

    def grow(self) -> None:
        twins = self.rng.choice(self.running)
        for _ in range(self.rng.randint(1, 3)):
            token = self.rng.randrange(2)
            for seq in twins:
                seq.append_token(token)
        self.compute(twins)

    def step(self) -> None:
        """Some leave, one or two things happen while there are blocks, then the step has run."""
        while self.running and (len(self.free()) < 8 or self.rng.random() < 0.3):
            self.running.pop(self.rng.randrange(len(self.running)))
        for _ in range(self.rng.randint(1, 2)):
            (self.grow if self.running and self.rng.random() < 0.5 else self.begin)()
        for index in self.indexes:
            index.publish()
            check_index(index)


@pytest.mark.parametrize("seed", range(5))
def test_with_the_same_evictions_hash_and_tree_find_the_same(seed: int) -> None:
    """Looking changes nothing."""
    both = Both(seed)
    for _ in range(60):
        both.step()
        for _ in range(2):
            found = [both.find([n >> i & 1 for i in range(6)] + [9]) for n in range(2**6)]
        assert any(found) or not both.running


def test_a_block_takes_the_place_of_an_orphan_that_nothing_leads_to() -> None:
    """Chapter 40's load: the parent of a cached block is handed out, and the prompt comes again."""
    for index_cls in (PrefixIndex, RadixCache):
        manager = BlockManager(12, 2, index_cls)
        (first,), (second,) = admit(manager, [1, 2, 9]), admit(manager, [1, 2])
        for token in (3, 4):
            second.append_token(token)
        manager.may_append(second)
        manager.stage(second, 4)
        manager.index.publish()
        manager.deallocate(first)
        manager.pool.free_block_ids.move_to_end(0, last=False)  # the copy that is known goes first
        (again,) = admit(manager, [1, 2, 3, 4, 5])
        assert manager.index.find(Sequence([1, 2, 3, 4, 5], 2)) == again.block_table[:2]
