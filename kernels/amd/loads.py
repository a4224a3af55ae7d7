"""Instructions on memory: LDS, global (an address in each lane), buffer (an offset into a range), scratch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import M0, UNSET, Step, Wave
from .operands import read, scalar, to_register, vector
from .text import Instruction, Unknown

SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
         "ushort": 2, "short": 2, "u16": 2, "b16": 2, "ubyte": 1, "byte": 1, "u8": 1, "b8": 1}  # fmt: skip
# CDNA's names and RDNA's: ds_read2st64_b32 is ds_load_2addr_stride64_b32, global_load_short_d16 global_load_d16_b16.
FORM = re.compile(r"(ds|global|buffer|scratch)_(load|store|read|write)(_lds)?(2|_2addr)?(st64|_stride64)?(_d16)?(_hi)?"
                  rf"_({'|'.join(SIZES)})(_tr_b16)?(_d16)?(_hi)?")  # fmt: skip
Place = Callable[[Wave], tuple[Any, np.ndarray, np.ndarray]]  # a memory, [lanes] addresses, which lanes have one


def build(i: Instruction) -> Step | None:
    if i.name == "ds_bpermute_b32":
        return build_permute(i)
    if not (found := FORM.fullmatch(i.name)):
        return None
    space, access, to_lds, paired, apart, *short, name, transposed, short_too, high_too = found.groups()
    is_load, size, high = access in ("load", "read"), SIZES[name], bool(short[1] or high_too)
    to_lds = to_lds or i.take("lds", False)
    step = size * (64 if apart else 1)
    offsets = [i.take("offset0") * step, i.take("offset1") * step] if paired else [i.take("offset")]
    operands = [""] * bool(to_lds) + i.operands
    if space != "buffer" and not is_load:
        operands[:2] = operands[1::-1]  # the address stands before the data
    data, at, *others = operands
    places = [build_place(i, space, at, others, offset, size) for offset in offsets]
    counter = "lgkmcnt" if space == "ds" else "vmcnt"
    if to_lds:
        return build_to_lds(places[0], size, offsets[0] * (space == "global"))
    if is_load:
        rows = [f"b16.{'h' if high else 'l'}"] if short[0] or short_too else None
        return build_load(places, size, vector(data).first, counter, rows, bool(transposed))
    sources = [vector(text).first for text in [data, *others[: len(places) - 1]]]
    return build_store(places, size, sources, counter if i.target.is_cdna or space == "ds" else "", 16 * high)


def build_load(
    places: list[Place], size: int, n: int, counter: str, kinds: list[str] | None, transposed: bool
) -> Step:
    def load(w: Wave) -> None:
        rows = [row for place in places for row in read_some(w, *place(w), size)]
        w.load(counter, n, [*transpose(np.stack(rows))] if transposed else rows, kinds)

    return load


def read_some(w: Wave, memory: Any, at: np.ndarray, some: np.ndarray, size: int) -> np.ndarray:
    """[words, lanes]; 0 where a lane has no address."""
    rows = np.zeros((max(1, size // 4), w.lanes), np.uint32)
    if some.any():
        rows[:, some] = memory.read(at[some], size)
    return rows


def transpose(words: np.ndarray) -> np.ndarray:
    """gfx950: 16 lanes hold 4 rows of 16 numbers, a quarter row each; afterwards a lane has a column."""
    numbers = np.ascontiguousarray(words.T).view(np.uint16).reshape(-1, 4, 4, 4)  # group, row, quarter, number
    return np.ascontiguousarray(numbers.transpose(0, 2, 3, 1)).reshape(-1, 4).view(np.uint32).T


def build_store(places: list[Place], size: int, sources: list[int], counter: str, shift: int) -> Step:
    """RDNA counts its stores to memory elsewhere, and nothing waits for them."""

    def store(w: Wave) -> None:
        for place, n in zip(places, sources, strict=True):
            memory, at, some = place(w)
            if some.any():
                memory.write(at[some], w.v[n : n + max(1, size // 4)][:, some] >> shift, size)
        if counter:
            w.late(counter, frozenset(), lambda: None, "store")

    return store


def build_to_lds(place: Place, size: int, offset: int) -> Step:
    """A load that passes the registers by: lane by lane from M0 on."""

    def load(w: Wave) -> None:
        words = read_some(w, *place(w), size)[:, w.active]
        to = ((w.s[M0] & 0xFFFFF) + offset + np.arange(w.lanes) * size)[w.active]
        w.lds.write(to, np.full_like(words, UNSET), size)
        w.late("vmcnt", frozenset(), lambda: w.lds.write(to, words, size))

    return load


def build_permute(i: Instruction) -> Step:
    """Each lane reads the register of the lane that it names, in bytes. It uses the wires of LDS."""
    n, at, source = (vector(text).first for text in i.operands)
    offset = i.take("offset")

    def permute(w: Wave) -> None:
        lane = (w.v[at].astype(np.int64) + offset >> 2) % w.lanes
        w.load("lgkmcnt", n, [np.where(w.active[lane], w.v[source][lane], 0)])

    return permute


def build_place(i: Instruction, space: str, at: str, others: list[str], offset: int, size: int) -> Place:
    if space == "ds":
        n = vector(at).first
        return lambda w: (w.lds, w.v[n].astype(np.int64) + offset, w.active)
    if space == "buffer":
        resource, at = to_register(others[0]).first, at if i.take("offen", False) else "0"
        return buffer_place(resource, at, others[1], offset, size)
    if space == "global":
        return global_place(at, others[0], offset)
    return scratch_place(at.replace("off", "0"), others[0].replace("off", "0"), offset)


def buffer_place(resource: int, at: str, base: str, offset: int, size: int) -> Place:
    """Four scalar registers: 48 bits of address, the size of the range (what lies beyond is not touched), and in the
    last one, whether each lane has a range of its own: that is how gfx90a spills."""
    lanes_offset, start, own = read(at, "u32"), scalar(base), scratch_place(at, base, offset)

    def place(w: Wave) -> tuple[Any, np.ndarray, np.ndarray]:
        low, high, count, form = w.s[resource : resource + 4]
        if form >> 23 & 1:
            return own(w)
        if high >> 16 & 0x3FFF:
            raise Unknown("a buffer with a stride")
        at = np.broadcast_to(lanes_offset(w), w.lanes).astype(np.uint64) + np.uint64(offset)
        address = at + np.uint64((low | (high & 0xFFFF) << 32) + start(w))
        return w.memory, address, (at + np.uint64(size) <= count) & w.active

    return place


def global_place(at: str, base: str, offset: int) -> Place:
    if base == "off":
        address = read(at, "i64")
        return lambda w: (w.memory, (address(w) + offset).view(np.uint64), w.active)
    lanes_offset, start = read(at, "u32"), scalar(base, True)

    def place(w: Wave) -> tuple[Any, np.ndarray, np.ndarray]:
        return w.memory, lanes_offset(w).astype(np.uint64) + np.uint64(start(w) + offset & 2**64 - 1), w.active

    return place


def scratch_place(at: str, base: str, offset: int) -> Place:
    lanes_offset, start = read(at, "i32"), scalar(base)

    def place(w: Wave) -> tuple[Any, np.ndarray, np.ndarray]:
        return w.scratch, np.arange(w.lanes) * w.scratch.size + lanes_offset(w) + start(w) + offset, w.active

    return place
