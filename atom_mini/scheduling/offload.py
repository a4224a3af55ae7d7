"""Copies of blocks between a device and host memory, and whether a second pool fits there (chapter 42)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..fields import EngineFields
from ..memory import free_host_bytes, kvcache_block_bytes
from ..model_runner import choose_device, choose_dtype, numbered

GIB = 2**30
NUM_STAGED = 16  # blocks of a GPU's staging buffer

Pairs = Seq[tuple[int, int]]


def block_bytes(config: EngineFields) -> int:
    """Bytes of a block of the cache that `config` asks for."""
    dtype = choose_dtype(config, choose_device(config.device))
    return kvcache_block_bytes(config.spec, config.kv_cache_block_size, dtype)


def count_host_blocks(config: EngineFields) -> int:
    """How many blocks the second pool holds."""
    return int((config.kv_offloading_size or 0) * GIB) // block_bytes(config)


def check_offloading(config: EngineFields) -> None:
    """ValueError if the second pool does not fit into the host's memory, or holds no block."""
    size = config.kv_offloading_size or 0
    engines = config.data_parallel_size
    free = free_host_bytes()
    if size * engines * GIB > free:
        each = f" for each of {engines} engines" if engines > 1 else ""
        raise ValueError(
            f"kv_offloading_size={size} GiB{each} exceeds the host's {free / GIB:.2f} GiB of free memory: lower it"
        )
    if count_host_blocks(config) == 0:
        raise ValueError(
            f"kv_offloading_size={size} GiB holds no block of {block_bytes(config)} bytes: "
            "raise it, or lower kv_cache_block_size"
        )


class HostCopies:
    """The second pool's tensor [host blocks, layers, 2, K, S, D], and copies from and to it.

    On a CPU it is ordinary memory, which is taken when the engine is made. On a GPU it is
    pinned. There, a save is first gathered into a staging buffer on the compute stream, and
    leaves for the host on a stream of its own while the step computes. A load runs on the
    compute stream, because the step reads it, after all earlier saves. No GPU has run this.
    """

    def __init__(self, config: EngineFields) -> None:
        self.device = numbered(choose_device(config.device))
        self.on_gpu = self.device.type == "cuda"
        halves, heads, dim = config.spec.kv_shape
        shape = config.spec.kv_layers, halves, heads, config.kv_cache_block_size, dim
        self.num_host_blocks = count_host_blocks(config)
        dtype = choose_dtype(config, self.device)
        self.host = torch.empty(self.num_host_blocks, *shape, dtype=dtype, pin_memory=self.on_gpu)
        if self.on_gpu:
            self.stream = torch.cuda.Stream(self.device)
            self.staging = torch.empty(NUM_STAGED, *shape, dtype=dtype, device=self.device)
        else:
            self.host.zero_()  # takes the memory now

    def attach(self, kv_cache: Tensor) -> None:
        """Set the device's pool [layers, 2, N, K, S, D]."""
        layers, halves, _, *rest = kv_cache.shape
        assert self.host.shape[1:] == (layers, halves, *rest), "pools of different shapes"
        assert self.host.dtype == kv_cache.dtype, "pools of different types"
        self.kv_cache = kv_cache

    @torch.inference_mode()
    def run(self, saves: Pairs, loads: Pairs) -> None:
        """Copy (block, host block) pairs to the host, then (host block, block) pairs to the device."""
        if self.on_gpu:
            self._run_on_gpu(saves, loads)
            return
        if saves:
            blocks, host_ids = map(list, zip(*saves, strict=True))
            self.host[host_ids] = self.kv_cache[:, :, blocks].movedim(2, 0)
        if loads:
            host_ids, blocks = map(list, zip(*loads, strict=True))
            self.kv_cache[:, :, blocks] = self.host[host_ids].movedim(0, 2)

    def _run_on_gpu(self, saves: Pairs, loads: Pairs) -> None:
        compute = torch.cuda.current_stream(self.device)
        for start in range(0, len(saves), NUM_STAGED):
            self._save(saves[start : start + NUM_STAGED], compute)
        if loads:
            compute.wait_stream(self.stream)  # a host block may have been saved just now
        for host_id, block in loads:
            self.kv_cache[:, :, block].copy_(self.host[host_id], non_blocking=True)

    def _save(self, saves: Pairs, compute: torch.cuda.Stream) -> None:
        """Copy at most `NUM_STAGED` blocks to the host, without a wait for them."""
        compute.wait_stream(self.stream)  # the staging buffer has been read
        for i, (block, _) in enumerate(saves):
            self.staging[i].copy_(self.kv_cache[:, :, block])
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            for i, (_, host_id) in enumerate(saves):
                self.host[host_id].copy_(self.staging[i], non_blocking=True)
