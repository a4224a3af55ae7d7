"""A merge inside the kernel that makes the parts, kept as an example of what to check. The package merges in a second
kernel.

Each program stores its part of a row, then counts itself at an atomic counter; the last one to arrive merges. That is
right only if the atomic add orders the parts' stores before it and their loads behind it. Which instructions that takes
depends on the GPU, and not every compiler writes all of them: `kernels/fences.py` checks it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_inside(given_ptr, part_ptr, out_ptr, merge_ptr, SIZE: tl.constexpr):
    """Add up the parts of each row: `given`, `part` [rows, parts, SIZE], `out` [rows, SIZE], `merge` [rows, 2] holds
    the number of parts, and a counter that is 0 before and afterwards."""
    at = tl.arange(0, SIZE)
    row = tl.program_id(1)
    merge = merge_ptr + 2 * row
    first = row * tl.num_programs(0)
    here = (first + tl.program_id(0)) * SIZE + at
    tl.store(part_ptr + here, tl.load(given_ptr + here))
    parts = tl.load(merge, cache_modifier=".cv")  # later than the stores
    tl.debug_barrier()
    if tl.atomic_add(merge + 1, 1, sem="acq_rel") == parts - 1:
        total = tl.zeros([SIZE], tl.float32)
        for part in range(parts):
            total += tl.load(part_ptr + (first + part) * SIZE + at)
        tl.store(out_ptr + row * SIZE + at, total)
        tl.store(merge + 1, 0)


@triton.jit
def store_part(given_ptr, part_ptr, SIZE: tl.constexpr):
    """The first of two kernels that do the same: grid (parts, rows)."""
    here = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * SIZE + tl.arange(0, SIZE)
    tl.store(part_ptr + here, tl.load(given_ptr + here))


@triton.jit
def add_parts(part_ptr, out_ptr, parts, SIZE: tl.constexpr):
    """The second one: grid (rows,)."""
    at = tl.arange(0, SIZE)
    row = tl.program_id(0)
    total = tl.zeros([SIZE], tl.float32)
    for part in range(parts):
        total += tl.load(part_ptr + (row * parts + part) * SIZE + at)
    tl.store(out_ptr + row * SIZE + at, total)


def merge(rows: int = 4, parts: int = 2, size: int = 512, warps: int = 2) -> None:
    """Launch it on rows of numbers that all differ. Until a part is stored, it holds -1."""
    import torch

    given = torch.arange(float(rows * parts * size)).view(rows, parts, size)
    counters = torch.tensor([[parts, 0]] * rows, dtype=torch.int32)
    out = torch.zeros(rows, size)
    merge_inside[(parts, rows)](given, torch.full_like(given, -1.0), out, counters, SIZE=size, num_warps=warps)


def merge_after(rows: int = 4, parts: int = 2, size: int = 512, warps: int = 2) -> None:
    """The same in two launches."""
    import torch

    given = torch.arange(float(rows * parts * size)).view(rows, parts, size)
    part, out = torch.full_like(given, -1.0), torch.zeros(rows, size)
    store_part[(parts, rows)](given, part, SIZE=size, num_warps=warps)
    add_parts[(rows,)](part, out, parts, SIZE=size, num_warps=warps)
