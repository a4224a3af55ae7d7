"""A second pool of blocks in host memory: what the prefix cache loses is kept there, and comes back by a copy (chapter 40)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from ..block_manager import BlockManager
from ..config import Config
from ..engine_core import EngineCore, Runner
from ..prefix_cache import tokens_of
from ..scheduler import BaseScheduler, ScheduledBatch, ScheduledBatchOutput
from ..sequence import Sequence

__all__ = ["HOST", "Content", "HostPool", "OffloadManager", "Copies", "OffloadBatch", "OffloadCore"]


class Content:
    """The tokens of a full block after those of `parent`. Equal contents are one object."""

    __slots__ = ("__weakref__", "parent", "token_ids")

    def __init__(self, parent: Content | None, token_ids: tuple[int, ...]) -> None:
        self.parent = parent
        self.token_ids = token_ids


class HostPool:
    """Which content each slot of the second pool holds. Knows ids only.

    Source: vLLM's `kv_offload/cpu/manager.py`, which stores a block when it is computed.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # a content is forgotten when no block, slot, or later content refers to it
        self.known: WeakValueDictionary[
            tuple[Content | None, tuple[int, ...]], Content
        ] = WeakValueDictionary()
        # contents whose copy has been made, the least recently used first
        self.slots: OrderedDict[Content, int] = OrderedDict()
        self.rollback()

    def rollback(self) -> None:
        """Drop the orders of a step that has not run. Copies that were made stay."""
        used = {*self.slots.values()}
        self.free = [i for i in range(self.num_slots) if i not in used]
        self.saving: dict[Content, int] = {}
        self.loading: set[Content] = set()  # may not lose their slots

    def content(self, parent: Content | None, token_ids: list[int]) -> Content:
        """The content of a block with `token_ids` that follows `parent`, if any."""
        key = parent, tuple(token_ids)
        return self.known.setdefault(key, Content(*key))

    def find(self, parent: Content | None, token_ids: list[int]) -> Content | None:
        """The same, but None if no slot holds it."""
        content = self.known.get((parent, tuple(token_ids)))
        return content if content in self.slots else None

    def hold(self, contents: list[Content]) -> None:
        """Keep `contents`, which this step loads, in their slots until it has run."""
        self.loading.update(contents)
        for content in contents:
            self.slots.move_to_end(content)

    def _take_slot(self) -> int | None:
        """A free slot, or that of the content that was used least recently."""
        if self.free:
            return self.free.pop()
        victim = next((c for c in self.slots if c not in self.loading), None)
        return None if victim is None else self.slots.pop(victim)

    def save(self, content: Content) -> int | None:
        """The slot to copy `content` to in this step; None if there is nothing to do."""
        if content in self.slots:
            self.slots.move_to_end(content)
            return None
        if content in self.saving or (slot := self._take_slot()) is None:
            return None
        self.saving[content] = slot
        return slot

    def publish(self) -> None:
        """The step has run: what it saved can be found, and what it loaded is released."""
        self.slots.update(self.saving)
        self.saving = {}
        self.loading = set()


HOST = -1  # in a list of cached blocks: this one is in the second pool


@dataclass(eq=False)
class OffloadManager(BlockManager):
    """`BlockManager` that saves blocks before they are overwritten, and loads them again.

    Its second pool has `num_slots`. `saves` has (block, slot) pairs and `loads` (slot,
    block) pairs: all saves, then all loads, must be copied before the step runs.
    """

    num_slots: int = 0

    def __post_init__(self) -> None:
        self.host = HostPool(self.num_slots)
        super().__post_init__()

    def reset(self) -> None:
        """Start over; only the second pool keeps what it has."""
        super().reset()
        self.host.rollback()
        self.contents: dict[int, Content] = {}  # block -> what it holds, if it is full
        self.saves: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []

    def _fresh_block(self) -> int:
        block_id = super()._fresh_block()
        content = self.contents.pop(block_id, None)
        if content is not None and (slot := self.host.save(content)) is not None:
            self.saves.append((block_id, slot))
        return block_id

    def _content_of(self, table: list[int], i: int) -> Content | None:
        """The content of the `i`-th block of `table`; None before the first one."""
        return None if i < 0 else self.contents[table[i]]

    def stage(self, seq: Sequence, num_tokens: int) -> None:
        """Note the blocks of `seq` that are full once this step has run."""
        first = seq.num_published_blocks
        super().stage(seq, num_tokens)
        for i in range(first, seq.num_published_blocks):
            parent = self._content_of(seq.block_table, i - 1)
            content = self.host.content(parent, tokens_of(seq, i))
            self.contents[seq.block_table[i]] = content

    def find(self, seq: Sequence, cached: list[int]) -> list[Content]:
        """The contents in the second pool that continue the blocks `cached` of `seq`."""
        found: list[Content] = []
        content = self._content_of(cached, len(cached) - 1)
        for i in range(len(cached), (seq.num_tokens - 1) // self.block_size):
            content = self.host.find(content, tokens_of(seq, i))
            if content is None:
                break
            found.append(content)
        return found

    def can_allocate(
        self, seq: Sequence, reserve: int = 0
    ) -> list[int] | None:
        """As in `BlockManager`, then a `HOST` for each block that can be loaded."""
        cached = super().can_allocate(seq, reserve)
        if cached is None:
            return None
        return cached + [HOST] * len(self.find(seq, cached))

    def allocate(
        self, seq: Sequence, cached: list[int], num_blocks: int = 0
    ) -> None:
        """As in `BlockManager`; fresh blocks take the place of those in the second pool,
        and are loaded."""
        here = [i for i in cached if i != HOST]
        contents = self.find(seq, here)[: len(cached) - len(here)]
        self.host.hold(contents)  # before fresh blocks order saves
        super().allocate(seq, here, num_blocks)
        targets = seq.block_table[len(here) : len(cached)]
        slots = [self.host.slots[content] for content in contents]
        self.loads += zip(slots, targets, strict=True)
        seq.num_computed_tokens = len(cached) * self.block_size
        seq.metrics["loaded_tokens"] += len(contents) * self.block_size
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens

    def publish(self) -> None:
        """The step has run, and its copies have been made."""
        self.host.publish()
        self.saves, self.loads = [], []


class Copies(Protocol):
    """Copies blocks between the two pools; the second one has `num_slots`."""

    num_slots: int

    def run(self, saves: Seq[tuple[int, int]], loads: Seq[tuple[int, int]]) -> None: ...


@dataclass(frozen=True)
class OffloadBatch(ScheduledBatch):
    """A batch with copies to make before it runs: (block, slot) and (slot, block) pairs."""

    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()


class OffloadCore(EngineCore):
    """`EngineCore` with a second pool. Any runner fits: copies are made before it runs."""

    def __init__(
        self, config: Config, runner: Runner, scheduler: BaseScheduler, copies: Copies
    ) -> None:
        super().__init__(config, runner, scheduler)
        self.copies = copies
        old = scheduler.block_manager
        sizes = old.num_blocks, old.block_size, old.index_cls, old.max_num_seqs
        scheduler.block_manager = OffloadManager(*sizes, copies.num_slots)

    @property
    def manager(self) -> OffloadManager:
        manager = self.scheduler.block_manager
        assert isinstance(manager, OffloadManager)
        return manager

    def before_step(
        self, batch: ScheduledBatch, seqs: list[Sequence]
    ) -> ScheduledBatch:
        """The batch with the copies that its blocks need."""
        saves, loads = self.manager.saves, self.manager.loads
        if not saves and not loads:
            return batch
        return OffloadBatch(**vars(batch), saves=tuple(saves), loads=tuple(loads))

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Make the copies, then run the batch."""
        if isinstance(batch, OffloadBatch):
            self.copies.run(batch.saves, batch.loads)
        return super().forward(batch)

    def after_step(
        self, batch: ScheduledBatch, seqs: list[Sequence],
        output: ScheduledBatchOutput,
    ) -> None:
        """Publish what was copied."""
        self.manager.publish()

    def close(self) -> None:
        """Also release the second pool's memory."""
        super().close()
        vars(self).pop("copies", None)
