"""Two ways for blocks to go from one engine's pool to another's: shared memory, and point to point (chapter 73).

The names are values of `kv_connector`, as vLLM's are. `P2pNcclConnector` was vLLM's name for the same job, until its
PR #44854 (June 2026) removed it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import Attention
from ..fields import EngineFields
from ..model_runner import ModelRunner
from .kv_transfer import Arrival
from .roles import SENDER, SHARED, connector_name
from .shards import make_backend


def form_of(config: EngineFields, pool: Tensor) -> str:
    """What two engines must have in common to exchange blocks of `pool` [layers, 2, N, K, S, D]."""
    size = "x".join(map(str, [*pool.shape[:2], *pool.shape[3:]]))
    return f"{config.model}, {pool.dtype}, blocks of {size}"


class SharedMemoryConnector:
    """Moves the pool of `runner` [layers, 2, N, K, S, D] to shared memory, and copies blocks from
    the pools of others, which it opens for reading. On a CPU only.

    The memory belongs to no file, so nothing is left behind if a process is killed, and what a dead
    process has computed can be read as long as another one has opened it.
    """

    is_busy = False  # nothing is ever on its way

    def __init__(self, config: EngineFields, runner: ModelRunner) -> None:
        old = runner.kv_cache
        self.file = os.memfd_create("K/V of atom_mini")
        os.ftruncate(self.file, old.nbytes)
        memory = mmap.mmap(self.file, old.nbytes)
        runner.kv_cache = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)
        layers = [m for m in runner.model.modules() if isinstance(m, Attention)]
        for layer, cache in zip(layers, runner.kv_cache, strict=True):
            layer.kv_cache = cache
        layers_and_halves = prod(old.shape[:2])
        self.row = prod(old.shape[3:]) * old.itemsize  # bytes of a block's part
        self.shape = layers_and_halves, -1, self.row
        self.own = np.frombuffer(memory, np.uint8).reshape(self.shape)
        self.pools: dict[int, np.ndarray] = {}
        self.form = form_of(config, old)

    @property
    def path(self) -> str:
        """Where another process of the same user can open it."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def open(self, number: int, path: str) -> None:
        """Open the pool of engine `number`, which has the same `form`."""
        file = os.open(path, os.O_RDONLY)
        try:
            memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self.pools[number] = np.frombuffer(memory, np.uint8).reshape(self.shape)

    def send(self, target: int, blocks: list[int]) -> None:
        """Nothing: the others read by themselves."""

    def receive(self, request_id: int, source: int, blocks: list[int]) -> Arrival:
        """They can be read at any time."""
        return Arrival.HERE

    def run(self, request_id: int, source: int, pairs: list[tuple[int, int]]) -> None:
        """Copy (block of engine `source`, own block) pairs."""
        if pairs:
            theirs, ours = map(list, zip(*pairs, strict=True))
            self.own[:, ours] = self.pools[source][:, theirs]

    def drop(self, request_id: int) -> None:
        """Nothing is kept for a request."""

    def lose(self, number: int) -> None:
        """The memory of an engine that has died can still be read."""


@dataclass(eq=False)
class Parcel:
    """Blocks on their way to or from an engine. `data` [layers, 2, number of rows, K, S, D]."""

    data: Tensor
    source: int = 0
    rows: dict[int, int] = field(default_factory=dict)  # block of the source -> row
    is_here: bool = False  # it has arrived, or left


class Pipe(Thread):
    """Moves parcels between two engines, in order. A thread waits for the other side, so no step does.

    `backend`: a group of two, in which the sender is rank 0. The thread ends, and `is_broken` is set,
    if the other engine dies.

    On a GPU the parcel is moved on a stream of its own, after what the compute stream has queued until
    `put`: a sent parcel has been gathered, and the memory of a received one is not in use. The thread
    then waits for the stream, so what is here may be read by the compute stream. No GPU has run this.
    """

    def __init__(self, backend: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(name="pipe", daemon=True)
        self.backend, self.device = backend, device
        self.is_sender = backend.rank() == 0
        self.queue = SimpleQueue[tuple[Parcel, torch.cuda.Event | None]]()
        self.is_broken = False
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, parcel: Parcel) -> None:
        """Queue a parcel; returns at once."""
        on_gpu = self.stream is not None
        event = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
        self.queue.put((parcel, event))

    def _move(self, data: Tensor) -> None:
        """Send it, or receive into it. RuntimeError if the other engine has died."""
        bytes_ = [data.flatten().view(torch.uint8)]
        work = self.backend.send(bytes_, 1, 0) if self.is_sender else self.backend.recv(bytes_, 0, 0)
        work.wait()

    def _move_on_gpu(self, data: Tensor, event: torch.cuda.Event) -> None:
        with torch.cuda.stream(self.stream):
            event.wait(self.stream)
            self._move(data)  # its wait is one of the stream
            torch.cuda.current_stream().synchronize()

    def run(self) -> None:
        """The thread."""
        with suppress(RuntimeError):
            while not self.is_broken:
                parcel, event = self.queue.get()
                self._move(parcel.data) if event is None else self._move_on_gpu(parcel.data, event)
                parcel.is_here = True
                del parcel  # its memory, until the next one
        self.is_broken = True

    def close(self) -> None:
        """Move nothing any more. On a GPU, end a transfer that waits for a dead engine."""
        self.is_broken = True
        if self.stream is not None:
            self.backend.abort()


def connect(path: str, is_sender: bool, limit: float, device: torch.device) -> Pipe:
    """Meet another engine at the file `path`. Returns when a first byte has crossed, because NCCL makes
    its communicator then. RuntimeError if the other one does not come within `limit` seconds."""
    wait = timedelta(seconds=limit)
    store = dist.FileStore(path, 2)
    store.set_timeout(wait)
    pipe = Pipe(make_backend(store, not is_sender, 2, wait, device.type == "cuda"), device)
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    pipe._move(byte)
    byte.tolist()  # waits for the device
    pipe.start()
    return pipe


def ask_nobody(request_id: int, source: int, blocks: list[int]) -> None:
    """The `ask` of an engine that has not met the others."""


class P2pNcclConnector:
    """Sends blocks of the pool of `runner` [layers, 2, N, K, S, D] to other engines, and receives theirs:
    over NCCL (RCCL) between GPUs, and over Gloo on a CPU. Over NCCL it has run on no GPU.

    The sender gathers what it is asked for, so it may release the blocks at once. The receiver stages
    what arrives until the request is admitted. What is asked for always crosses: if its request has been
    aborted meanwhile, it is dropped on arrival.
    """

    num_staged = 64  # blocks that may be on their way or staged, unless one request alone has more
    path = ""

    def __init__(self, config: EngineFields, runner: ModelRunner) -> None:
        self.config, self.pool = config, runner.kv_cache
        self.form = form_of(config, self.pool)
        self.ask: Callable[[int, int, list[int]], None] = ask_nobody  # (request, source, blocks): see `send`
        self.pipes: dict[int, Pipe] = {}
        self.parcels: dict[int, Parcel] = {}  # of requests
        self.dropped: list[Parcel] = []  # on their way for nobody

    def open(self, number: int, path: str) -> None:
        """Connect with engine `number`, if it has the other role. All must do this in the order of numbers."""
        recipe = self.config.recipe
        roles = self.config.kv_transfer_config
        is_sender, is_other = (roles[i]["kv_role"] == SENDER for i in (recipe["number"], number))
        if is_sender != is_other:
            ends = sorted([recipe["number"], number])
            place = f"{recipe['meeting']}/blocks {ends[0]} {ends[1]}"
            self.pipes[number] = connect(place, is_sender, self.config.collective_timeout, self.pool.device)

    @torch.inference_mode()
    def send(self, target: int, blocks: list[int]) -> None:
        """Send these blocks as they are now to engine `target`, which has asked for them."""
        if not self.pipes[target].is_broken:
            self.pipes[target].put(Parcel(self.gather(blocks)))

    def gather(self, blocks: list[int]) -> Tensor:
        """A copy of own blocks [layers, 2, len(blocks), K, S, D]."""
        return self.pool[:, :, blocks].contiguous()

    def staging(self, count: int) -> Tensor:
        """Memory for `count` blocks."""
        layers, halves, _, *rest = self.pool.shape
        return self.pool.new_empty(layers, halves, count, *rest)

    def receive(self, request_id: int, source: int, blocks: list[int]) -> Arrival:
        """Where these blocks are; asks for them, unless too much is on its way or staged.
        ConnectionError if `source` has died with them."""
        parcel = self.parcels.get(request_id)
        is_asked = parcel is not None and parcel.rows.keys() >= {*blocks}
        if not blocks or (is_asked and parcel is not None and parcel.is_here):
            return Arrival.HERE
        if self.pipes[source].is_broken:
            raise ConnectionError(f"engine {source} has died")
        if not is_asked:
            self.drop(request_id)  # others may have left the cache here since it was asked for
            if not self._may_ask(source, blocks):
                return Arrival.MUST_WAIT
            self._expect(request_id, source, blocks)
        return Arrival.COMING

    def _may_ask(self, source: int, blocks: list[int]) -> bool:
        """Whether there is memory, and none of the blocks is on its way or staged for another request,
        after which it can be found in the cache."""
        used = sum(len(parcel.rows) for parcel in [*self.parcels.values(), *self._draining()])
        sent = {b for p in self.parcels.values() if p.source == source for b in p.rows}
        return sent.isdisjoint(blocks) and (not used or used + len(blocks) <= self.num_staged)

    def _draining(self) -> list[Parcel]:
        """What is still on its way for nobody."""
        lost = [number for number, pipe in self.pipes.items() if pipe.is_broken]
        self.dropped = [p for p in self.dropped if not p.is_here and p.source not in lost]
        return self.dropped

    def _expect(self, request_id: int, source: int, blocks: list[int]) -> None:
        rows = {block: row for row, block in enumerate(blocks)}
        parcel = self.parcels[request_id] = Parcel(self.staging(len(blocks)), source, rows)
        self.pipes[source].put(parcel)
        self.ask(request_id, source, blocks)

    @torch.inference_mode()
    def run(self, request_id: int, source: int, pairs: list[tuple[int, int]]) -> None:
        """Copy (block of engine `source`, own block) pairs that have arrived."""
        if pairs:
            parcel = self.parcels[request_id]
            assert parcel.is_here, "blocks are read before they are here"
            theirs, ours = zip(*pairs, strict=True)
            self.scatter(parcel.data, [parcel.rows[block] for block in theirs], [*ours])

    def scatter(self, data: Tensor, rows: list[int], blocks: list[int]) -> None:
        """Copy rows of `data` into own blocks."""
        self.pool[:, :, blocks] = data[:, :, rows]

    def drop(self, request_id: int) -> None:
        """Keep nothing for a request any more. What is on its way for it arrives, and is forgotten."""
        if parcel := self.parcels.pop(request_id, None):
            self.dropped.append(parcel)

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way to this engine."""
        return bool(self.parcels or self._draining())

    def lose(self, number: int) -> None:
        """Engine `number` has died: nothing comes from it any more."""
        if number in self.pipes:
            self.pipes[number].close()


def choose_connector(config: EngineFields) -> type[SharedMemoryConnector | P2pNcclConnector]:
    """The class of that name, which all engines have."""
    return SharedMemoryConnector if connector_name(config) == SHARED else P2pNcclConnector
