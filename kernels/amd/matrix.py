"""Tiles spread over the lanes: MFMA of CDNA, WMMA of RDNA 3. D[row, column] = A[row, k] B[k, column] + C."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from .machine import Step, Wave
from .operands import read, to_register, vector
from .text import Instruction, Unknown


class Layout(NamedTuple):
    """Which number of a tile each lane holds: the i-th one of lane l is A[row[i, l], k[i, l]] or D[y[i, l], x[i, l]].

    B lies as A's mirror image does: a column where A has a row.
    """

    row: np.ndarray
    k: np.ndarray
    y: np.ndarray
    x: np.ndarray


def mfma_layout(size: int, depth: int) -> Layout:
    """64 lanes; each holds a row's `depth / groups` neighbours, and four rows of a column at a time."""
    lane, groups = np.arange(64), 64 // size
    held, out = np.arange(depth // groups)[:, None], np.arange(size * size // 64)[:, None]
    row, k = np.broadcast_arrays(lane % size, lane // size * (depth // groups) + held)
    y, x = np.broadcast_arrays(out // 4 * 4 * groups + lane // size * 4 + out % 4, lane % size)
    return Layout(row, k, y, x)


def wmma_layout(size: int, depth: int) -> Layout:
    """32 lanes; the second 16 hold A and B once more, and the odd rows of D."""
    lane = np.arange(32)
    row, k = np.broadcast_arrays(lane % 16, np.arange(depth)[:, None])
    y, x = np.broadcast_arrays(2 * np.arange(8)[:, None] + lane // 16, lane % 16)
    return Layout(row, k, y, x)


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
    found = re.fullmatch(r"v_(mfma|wmma)_f32_(16|32)x\2x(\d+)_?(bf16|f16|f32)(?:_1k)?(?:_e64)?", i.name)
    if not found:
        return None
    is_wmma, size, depth, kind = found[1] == "wmma", int(found[2]), int(found[3]), found[4]
    layout = (wmma_layout if is_wmma else mfma_layout)(size, depth)
    d, a, b = (vector(text) for text in i.operands[:3])
    c, constant = to_register(i.operands[3]), read(i.operands[3], "f32")
    flush = i.target.name == "gfx90a" and kind != "f32"

    def tile(w: Wave, n: int, count: int) -> np.ndarray:
        held, out = numbers(w.v[n : n + count], kind, flush), np.empty((size, depth))
        out[layout.row, layout.k] = held
        if is_wmma and (held[:, :16].view(np.uint32) != held[:, 16:].view(np.uint32)).any():
            raise Unknown("halves of a wave that hold different tiles")
        return out

    def run(w: Wave) -> None:
        product = tile(w, a.first, a.count) @ tile(w, b.first, b.count).T
        before = w.rows["f32"][c.first : c.first + c.count] if c else constant(w)
        w.rows["f32"][d.first : d.first + d.count] = product[layout.y, layout.x] + before

    return run
