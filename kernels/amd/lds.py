"""Instructions on the memory of a workgroup: reads, writes, and a permutation of lanes that uses its wires."""

from __future__ import annotations

import re

import numpy as np

from .machine import Step, Wave
from .operands import vector
from .text import Instruction

NAMES = {"read2st64": "load_2addr_stride64", "write2st64": "store_2addr_stride64", "read2": "load_2addr",
         "write2": "store_2addr", "read": "load", "write": "store"}  # CDNA's and RDNA's names  # fmt: skip
SIZES = {"u8": 1, "b8": 1, "u16": 2, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def build(i: Instruction) -> Step | None:
    if not i.name.startswith("ds_"):
        return None
    if i.name == "ds_bpermute_b32":
        return build_permute(i)
    first, _, rest = i.name[3:].partition("_")
    name = f"{NAMES.get(first, first)}_{rest}"
    form = r"(load|store)_(2addr_)?(stride64_)?(u8|b8|u16|b16|b32|b64|b96|b128)(_tr_b16)?(_d16)?(_hi)?"
    if not (found := re.fullmatch(form, name)):
        return None
    size = SIZES[found[4]]
    step = size * (64 if found[3] else 1)
    offsets = [i.take("offset0") * step, i.take("offset1") * step] if found[2] else [i.take("offset")]
    half = ("b16.h" if found[7] else "b16.l") if found[6] else ""
    if found[1] == "load":
        return build_load(i, size, offsets, half, bool(found[5]))
    return build_store(i, size, offsets, bool(found[7]))


def build_load(i: Instruction, size: int, offsets: list[int], half: str, transposed: bool) -> Step:
    n, at = vector(i.operands[0]).first, vector(i.operands[1]).first

    def load(w: Wave) -> None:
        rows: list[np.ndarray] = []
        base = w.v[at][w.active].astype(np.int64)
        for offset in offsets:
            w.lds.check(w.number, base + offset, size, None)
            words = np.zeros((max(1, size // 4), w.lanes), np.uint32)
            words[:, w.active] = w.lds.read(base + offset, size)
            rows.extend(transpose(words) if transposed else words)
        w.load("lgkmcnt", n, rows, [half] if half else None)

    return load


def transpose(words: np.ndarray) -> np.ndarray:
    """gfx950: 16 lanes hold 4 rows of 16 numbers, a quarter row each; afterwards a lane has a column."""
    numbers = np.ascontiguousarray(words.T).view(np.uint16).reshape(-1, 4, 4, 4)  # group, row, quarter, number
    return np.ascontiguousarray(numbers.transpose(0, 2, 3, 1)).reshape(-1, 4).view(np.uint32).T


def build_store(i: Instruction, size: int, offsets: list[int], high: bool) -> Step:
    at, sources = vector(i.operands[0]).first, [vector(text).first for text in i.operands[1:]]

    def store(w: Wave) -> None:
        base = w.v[at][w.active].astype(np.int64)
        for offset, n in zip(offsets, sources, strict=True):
            words = w.v[n : n + max(1, size // 4)][:, w.active] >> 16 * high
            w.lds.check(w.number, base + offset, size, words)
            w.lds.write(base + offset, words, size)
        w.late("lgkmcnt", frozenset(), lambda: None, "store")

    return store


def build_permute(i: Instruction) -> Step:
    """Each lane reads the register of the lane that it names, in bytes."""
    n, at, source = (vector(text).first for text in i.operands)
    offset = i.take("offset")

    def permute(w: Wave) -> None:
        lane = (w.v[at].astype(np.int64) + offset >> 2) % w.lanes
        w.load("lgkmcnt", n, [np.where(w.active[lane], w.v[source][lane], 0)])

    return permute
