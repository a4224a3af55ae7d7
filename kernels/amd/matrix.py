"""Tiles spread over the lanes: MFMA of CDNA, WMMA of RDNA. D[row, column] = A[row, k] B[k, column] + C."""

from __future__ import annotations

import re

import numpy as np

from .machine import Step, Target, Wave
from .operands import read, register, to_register
from .text import Instruction, Unknown


def layout(target: Target, depth: int) -> tuple[np.ndarray, ...]:
    """(row, k, y, x): the i-th number that lane l holds is A[row[l], k[i, l]], or D[y[i, l], x[l]].

    Groups of 16 lanes share a tile. MFMA's four groups hold neighbours of a row of A, and four rows of D each. WMMA has
    two: on RDNA 3 both hold all of A, and D's even and odd rows; on RDNA 4 each holds two runs of four of a row of A,
    and half of D. B lies as A's mirror image does: a column where A has a row.
    """
    group, x = np.divmod(np.arange(target.lanes), 16)
    if target.is_rdna4:
        i = np.arange(8)[:, None]
        return x, i % 4 + i // 4 * 8 + 4 * group, i + 8 * group, x
    if not target.is_cdna:
        return x, np.arange(depth)[:, None] + 0 * group, 2 * np.arange(8)[:, None] + group, x
    return x, np.arange(depth // 4)[:, None] + group * (depth // 4), np.arange(4)[:, None] + 4 * group, x


def numbers(v: np.ndarray, kind: str, flush: bool) -> np.ndarray:
    """[numbers, lanes] float32 of registers [n, lanes]; `flush`: 16-bit denormals count as 0."""
    if kind == "f32":
        return v.view(np.float32)
    halves = np.stack([v & 0xFFFF, v >> 16], 1).reshape(-1, v.shape[1])
    if flush:
        halves = np.where(halves & (0x7F80 if kind == "bf16" else 0x7C00), halves, halves & 0x8000)
    if kind == "bf16":
        return (halves << 16).view(np.float32)
    return halves.astype(np.uint16).view(np.float16).astype(np.float32)


def build(i: Instruction) -> Step | None:
    found = re.fullmatch(r"v_(mfma|wmma)_f32_16x16x(\d+)_?(bf16|f16|f32)(?:_1k)?", i.name)
    if not found:
        return None
    depth, kind, is_twice = int(found[2]), found[3], not i.target.is_cdna and not i.target.is_rdna4
    row, k, y, x = layout(i.target, depth)
    d, a, b = (register(text) for text in i.operands[:3])
    c, constant = to_register(i.operands[3]), read(i.operands[3], "f32")
    flush = i.target.name == "gfx90a" and kind != "f32"

    def tile(w: Wave, n: int, count: int) -> np.ndarray:
        held, out = numbers(w.v[n : n + count], kind, flush), np.empty((16, depth))
        out[row, k] = held
        if is_twice and (held[:, :16].view(np.uint32) != held[:, 16:].view(np.uint32)).any():
            raise Unknown("halves of a wave that hold different tiles")
        return out

    def run(w: Wave) -> None:
        product = tile(w, a.first, a.count) @ tile(w, b.first, b.count).T
        before = w.rows["f32"][c.first : c.first + c.count] if c else constant(w)
        w.rows["f32"][d.first : d.first + d.count] = product[y, x] + before

    return run
