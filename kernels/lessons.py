"""The kernels whose machine code chapter 93 reads: `python kernels/lessons.py FILE` pickles their launches.

A process of its own, because one that has imported triton to interpret cannot compile.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from unittest.mock import patch

import execute  # first: it chooses how triton is imported
import merge_inside
import torch
import triton
import triton.language as tl
from amd.group import Launch
from amd.launch import emulated

from atom_mini.gpu import tile_configs as table


@triton.jit
def silu(x_ptr, out_ptr, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x / (1 + tl.exp(-x)), mask=at < count)


@triton.jit
def total(x_ptr, out_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(out_ptr, tl.sum(x, 0))


@triton.jit
def product(a_ptr, b_ptr, out_ptr):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + row * 16 + column), tl.load(b_ptr + row * 16 + column)
    tl.store(out_ptr + row * 16 + column, tl.dot(a, b))


def lessons() -> None:
    """One launch of each; `total` has two waves."""
    silu[(1,)](torch.linspace(-4, 5, 50), torch.zeros(50), 50, SIZE=64, num_warps=1)
    total[(1,)](torch.arange(128.0), torch.zeros(1), SIZE=128, num_warps=2)
    a, b = torch.arange(256).half().view(16, 16), torch.eye(16).half()
    product[(1,)](a, b, torch.zeros(16, 16), num_warps=1, matrix_instr_nonkdim=16)


def record(target: str) -> dict[str, list[Launch]]:
    """The launches before they ran, with what they are given: the lessons, a decode of 250 keys, and rows that are merged
    inside a kernel, or by a second one."""
    found = {}
    with triton.knobs.amd.scope():
        triton.knobs.amd.use_buffer_ops = False  # masked loads then change the execution mask
        with emulated(target, runs=False) as found["lessons"]:
            lessons()
    architecture = patch.object(table, "architecture", lambda device: target)
    with architecture, emulated(target, runs=False) as found["decode"]:
        execute.attend("bf16", [(1, 250)])
    for name, launch in (("inside", merge_inside.merge), ("after", merge_inside.merge_after)):
        with emulated(target, runs=False) as found[name]:
            launch()
    return found


if __name__ == "__main__":
    recorded = {target: record(target) for target in ("gfx942", "gfx1100", "gfx1201")}
    Path(sys.argv[1]).write_bytes(pickle.dumps(recorded))
