"""Tiles spread over the lanes: MFMA of CDNA, WMMA of RDNA 3. D[row, column] = A[row, k] B[k, column] + C."""

from __future__ import annotations

import re

import numpy as np

from .machine import Step, Wave
from .operands import read, register, to_register
from .text import Instruction, Unknown


def layout(is_wmma: bool, depth: int) -> tuple[np.ndarray, ...]:
    """(row, k, y, x): the i-th number that lane l holds is A[row[l], k[i, l]], or D[y[i, l], x[l]].

    Groups of 16 lanes share a tile. MFMA's four groups hold neighbours of a row of A, and four rows of D each; WMMA's
    two hold A twice, and D's even and odd rows. B lies as A's mirror image does: a column where A has a row.
    """
    group, x = np.divmod(np.arange(32 if is_wmma else 64), 16)
    if is_wmma:
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
    is_wmma, depth, kind = found[1] == "wmma", int(found[2]), found[3]
    row, k, y, x = layout(is_wmma, depth)
    d, a, b = (register(text) for text in i.operands[:3])
    c, constant = to_register(i.operands[3]), read(i.operands[3], "f32")
    flush = i.target.name == "gfx90a" and kind != "f32"

    def tile(w: Wave, n: int, count: int) -> np.ndarray:
        held, out = numbers(w.v[n : n + count], kind, flush), np.empty((16, depth))
        out[row, k] = held
        if is_wmma and (held[:, :16].view(np.uint32) != held[:, 16:].view(np.uint32)).any():
            raise Unknown("halves of a wave that hold different tiles")
        return out

    def run(w: Wave) -> None:
        product = tile(w, a.first, a.count) @ tile(w, b.first, b.count).T
        before = w.rows["f32"][c.first : c.first + c.count] if c else constant(w)
        w.rows["f32"][d.first : d.first + d.count] = product[y, x] + before

    return run
