"""The K/V of an engine in memory that the engines beside it may read (chapter 74)."""

from __future__ import annotations

import mmap
import os
from math import prod

import numpy as np
import torch

from ..attention import Attention
from ..fields import EngineFields
from ..model_runner import ModelRunner


class SharedPool:
    """Moves the pool of `runner` [layers, 2, N, K, S, D] to shared memory, and copies blocks from
    the pools of others, which it opens for reading.

    The memory belongs to no file, so nothing is left behind if a process is killed, and what a dead
    process has computed can be read as long as another one has opened it.
    """

    def __init__(self, config: EngineFields, runner: ModelRunner) -> None:
        old = runner.kv_cache
        self.file = os.memfd_create("K/V of atom_mini")
        os.ftruncate(self.file, old.nbytes)
        memory = mmap.mmap(self.file, old.nbytes)
        runner.kv_cache = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)
        layers = [m for m in runner.model.modules() if isinstance(m, Attention)]
        for layer, cache in zip(layers, runner.kv_cache, strict=True):
            layer.kv_cache = cache
        layers_and_halves, self.row = prod(old.shape[:2]), prod(old.shape[3:]) * old.itemsize  # bytes of a block's part
        self.shape = layers_and_halves, -1, self.row
        self.own = np.frombuffer(memory, np.uint8).reshape(self.shape)
        self.pools: dict[int, np.ndarray] = {}
        size = "x".join(map(str, [*old.shape[:2], *old.shape[3:]]))
        self.form = f"{config.model}, {old.dtype}, blocks of {size}"

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

    def run(self, source: int, pairs: list[tuple[int, int]]) -> None:
        """Copy (block of engine `source`, own block) pairs."""
        if pairs:
            theirs, ours = map(list, zip(*pairs, strict=True))
            self.own[:, ours] = self.pools[source][:, theirs]
