"""How much memory is free, and how much of it a block of keys and values takes (chapter 08)."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from .checkpoint import ModelSpec


def kvcache_block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of `block_size` tokens, all layers together."""
    numbers = math.prod(spec.kv_shape) * spec.kv_layers
    return numbers * block_size * dtype.itemsize


CPU_KVCACHE_BYTES = 4 * 2**30


def free_host_bytes() -> int:
    """Bytes that this process can still allocate, within its container's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if os.path.exists("/proc/meminfo"):  # Linux: includes reclaimable cache
        with open("/proc/meminfo") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        free = int(found.split()[1]) * 1024
    limited = cgroup_free_bytes()
    return free if limited is None else min(free, limited)

CGROUP = Path("/sys/fs/cgroup")
# Versions 2 and 1: the files of limit and usage, and the reclaimable cache's statistic
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def group_free_bytes(folder: Path) -> int | None:
    """Bytes that one control group leaves free; None if it sets no limit."""
    for limit, usage, cache in CGROUP_FILES:
        if not (folder / limit).exists() or (folder / limit).read_text() == "max\n":
            continue
        stat = folder / "memory.stat"
        lines = stat.read_text().splitlines() if stat.exists() else []
        spare = sum(int(x.split()[1]) for x in lines if x.split()[0] == cache)
        used = int((folder / usage).read_text()) - spare
        return max(0, int((folder / limit).read_text()) - used)
    return None


def cgroup_free_bytes(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that this process's control groups leave free; None without a limit."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    folders = {root, root / "memory"}
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds in ("", "memory"):  # version 2, version 1
            top = root / kinds
            inside = top / path.lstrip("/")
            folders |= {inside, *(p for p in inside.parents if p.is_relative_to(top))}
    found = [free for f in folders if (free := group_free_bytes(f)) is not None]
    return min(found, default=None)
