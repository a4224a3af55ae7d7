"""Instructions on memory: global (an address in each lane), buffer (an offset into a range that it checks), scratch."""

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
FORM = re.compile(rf"(global|buffer|scratch)_(load|store)_(?:(lds)_)?(d16_)?(hi_)?({'|'.join(SIZES)})(_d16)?(_hi)?")
Place = Callable[[Wave], tuple[np.ndarray, np.ndarray]]  # [lanes] addresses, and which lanes have one


def build(i: Instruction) -> Step | None:
    if not (found := FORM.fullmatch(i.name)):
        return None
    space, what, size = found[1], found[2], SIZES[found[6]]
    to_lds, high = bool(found[3]) or i.take("lds", False), bool(found[5] or found[8])
    half = ("b16.h" if high else "b16.l") if found[4] or found[7] else ""
    operands = ["v0", *i.operands] if to_lds else i.operands
    offset = i.take("offset")
    if space == "buffer":
        data, resource, base = operands[0], to_register(operands[-2]).first, scalar(operands[-1])
        lanes_offset = read(operands[1], "u32") if i.take("offen", False) else read("0", "u32")
        place = buffer_place(resource, base, lanes_offset, offset, size)
        spilled = scratch_place(lanes_offset, base, offset)
    else:
        data, at, base_text = operands if what == "load" else (operands[1], operands[0], operands[2])
        if space == "global":
            place, spilled = global_place(at, base_text, offset), None
        else:
            zero = lambda w: 0  # noqa: E731
            base = scalar(base_text) if base_text != "off" else zero
            place = spilled = scratch_place(read(at, "u32") if at != "off" else zero, base, offset)
    n, words = vector(data).first, max(1, size // 4)
    if to_lds:
        return build_to_lds(i, place, size, offset * (space == "global"))

    def load(w: Wave) -> None:
        memory = w.scratch if spilled and is_private(w) else w.memory
        at, some = (place if memory is w.memory else spilled)(w)
        rows = np.zeros((words, w.lanes), np.uint32)
        if some.any():
            rows[:, some] = memory.read(at[some], size)
        w.load("vmcnt", n, list(rows), [half] if half else None)

    def store(w: Wave) -> None:
        memory = w.scratch if spilled and is_private(w) else w.memory
        at, some = (place if memory is w.memory else spilled)(w)
        if some.any():
            memory.write(at[some], w.v[n : n + words][:, some] >> 16 * high, size)
        if i.target.is_cdna:
            w.late("vmcnt", frozenset(), lambda: None, "store")

    def is_private(w: Wave) -> bool:
        """gfx90a's spills go through a buffer that adds the lane."""
        return space == "scratch" or bool(w.s[resource + 3] >> 23 & 1)

    return load if what == "load" else store


def buffer_place(resource: int, base: Any, lanes_offset: Any, offset: int, size: int) -> Place:
    """Four scalar registers: 48 bits of address, the size of the range. What lies beyond it is not touched."""

    def place(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, count = w.s[resource : resource + 3]
        if high >> 16 & 0x3FFF:
            raise Unknown("a buffer with a stride")
        at = np.broadcast_to(lanes_offset(w), w.lanes).astype(np.uint64) + np.uint64(offset)
        return at + np.uint64((low | (high & 0xFFFF) << 32) + base(w)), (at + np.uint64(size) <= count) & w.active

    return place


def global_place(at: str, base: str, offset: int) -> Place:
    if base == "off":
        address = read(at, "i64")
        return lambda w: ((address(w) + offset).view(np.uint64), w.active)
    lanes_offset, start = read(at, "u32"), scalar(base, True)
    return lambda w: (lanes_offset(w).astype(np.uint64) + np.uint64(start(w) + offset & 2**64 - 1), w.active)


def scratch_place(lanes_offset: Any, base: Any, offset: int) -> Place:
    """Each lane has its own range."""

    def place(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        own = np.arange(w.lanes) * w.scratch.size
        return own + np.asarray(lanes_offset(w)).astype(np.int64) + base(w) + offset, w.active

    return place


def build_to_lds(i: Instruction, place: Place, size: int, offset: int) -> Step:
    """A load that passes the registers by: lane by lane from M0 on."""

    def load(w: Wave) -> None:
        at, some = place(w)
        words = np.zeros((max(1, size // 4), w.lanes), np.uint32)
        if some.any():
            words[:, some] = w.memory.read(at[some], size)
        words, to = words[:, w.active], ((w.s[M0] & 0xFFFFF) + offset + np.arange(w.lanes) * size)[w.active]
        w.lds.check(w.number, to, size, words)
        w.lds.write(to, np.full_like(words, UNSET), size)
        w.late("vmcnt", frozenset(), lambda: w.lds.write(to, words, size))

    return load
