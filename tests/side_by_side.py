"""All ranks of a model in one process, a thread each, over the real collectives: no process to wait for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from atom_mini.config import Config
from atom_mini.options import build
from atom_mini.parallel import ranks, replicas
from atom_mini.parallel.engine_process import decode_frame
from atom_mini.parallel.ranks import ToRank, pack_batch, unpack_batch
from atom_mini.parallel.shards import make_rank, open_group
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput

LIMIT = 120.0  # seconds, after which a rank hangs; the interpreter is slow


class SideBySide:
    """A runner that has all ranks, compares what they return, and lets a test look at rank 0's."""

    def __init__(
        self, config: Config, beside: tuple[int, int] = (0, 0), make: Callable[..., Any] = make_rank
    ) -> None:  # fmt: skip
        n, folder = config.tensor_parallel_size, tempfile.mkdtemp()
        self.threads = [ThreadPoolExecutor(1) for _ in range(n)]
        meets = [partial(open_group, folder, rank, n, LIMIT) for rank in range(n)]
        self.runners = self.all(lambda r: make(config, r, meets[r], (0, 0) if r else beside))
        blocks = {r.num_kvcache_blocks for r in self.runners}
        (self.num_kvcache_blocks,) = blocks
        self.model, self.kv_cache, self.num_steps = Face(self), Pools(self), 0

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` on every rank's thread at the same time."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        errors = [error for future in futures if (error := future.exception(LIMIT))]
        if errors:
            raise min(errors, key=lambda error: "onnection" in str(error))  # the cause, not who was left alone
        return [future.result() for future in futures]

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """One step; what the others get went over the wire."""
        if "sample" in vars(self):  # a test listens
            self.runners[0].sample = self.sample
        frame = pack_batch(batch)
        self.num_steps += 1

        def received() -> ScheduledBatch:
            return unpack_batch(decode_frame(frame, ToRank))

        first, *others = self.all(lambda r: self.runners[r].forward(received() if r else batch))
        assert all(other == first for other in others), "the ranks drew different tokens"
        return first

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self.runners[0]), name).__get__(self.runners[0])


def in_this_process(patch: Any, make: Callable[..., Any] = SideBySide) -> None:
    """From now on an engine on several ranks has them all in this process."""
    patch.setattr(ranks, "Leader", make)
    patch.setattr(replicas, "make_front", build.make_core)


class Face:
    """The model of rank 0; what needs the others runs on all."""

    def __init__(self, ranks: SideBySide) -> None:
        self.ranks = ranks

    def compute_logits(self, hidden: Any) -> Any:
        first, *others = self.ranks.all(lambda r: self.ranks.runners[r].model.compute_logits(hidden))
        assert all(first.equal(other) for other in others)
        return first

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ranks.runners[0].model, name)


class Pools:
    """The K/V caches of all ranks."""

    def __init__(self, ranks: SideBySide) -> None:
        self.ranks = ranks

    def fill_(self, value: float) -> None:
        for runner in self.ranks.runners:
            runner.kv_cache.fill_(value)
