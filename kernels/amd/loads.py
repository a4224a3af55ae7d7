"""Instructions on memory: global (an address in each lane), buffer (an offset into a range that it checks), scratch."""

from __future__ import annotations

import re
from collections.abc import Callable

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
    space, is_load, size = found[1], found[2] == "load", SIZES[found[6]]
    to_lds, high = bool(found[3]) or i.take("lds", False), bool(found[5] or found[8])
    half = ("b16.h" if high else "b16.l") if found[4] or found[7] else ""
    operands, offset = ["v0"] * to_lds + i.operands, i.take("offset")
    if space != "buffer" and not is_load:
        operands[:2] = operands[1::-1]  # the address stands before the data
    data, at, base = (operands[0], operands[1], operands[-1])
    n, words = vector(data).first, max(1, size // 4)
    if space == "buffer":
        at, resource = at if i.take("offen", False) else "0", to_register(operands[-2]).first
        place, own = buffer_place(resource, at, base, offset, size), scratch_place(at, base, offset)
        # A buffer that adds the lane: spills of gfx90a.
        is_private: Callable = lambda w: w.s[resource + 3] >> 23 & 1  # noqa: E731
    else:
        at, base = at.replace("off", "0"), base if space == "global" else base.replace("off", "0")
        place = own = (global_place if space == "global" else scratch_place)(at, base, offset)
        is_private = lambda w: space == "scratch"  # noqa: E731
    if to_lds:
        return build_to_lds(place, size, offset * (space == "global"))

    def load(w: Wave) -> None:
        memory, (at, some) = (w.scratch, own(w)) if is_private(w) else (w.memory, place(w))
        w.load("vmcnt", n, [*read_some(w, memory, at, some, size)], [half] if half else None)

    def store(w: Wave) -> None:
        memory, (at, some) = (w.scratch, own(w)) if is_private(w) else (w.memory, place(w))
        if some.any():
            memory.write(at[some], w.v[n : n + words][:, some] >> 16 * high, size)
        if i.target.is_cdna:
            w.late("vmcnt", frozenset(), lambda: None, "store")

    return load if is_load else store


def read_some(w: Wave, memory: object, at: np.ndarray, some: np.ndarray, size: int) -> np.ndarray:
    """[words, lanes]; 0 where a lane has no address."""
    rows = np.zeros((max(1, size // 4), w.lanes), np.uint32)
    if some.any():
        rows[:, some] = memory.read(at[some], size)
    return rows


def buffer_place(resource: int, at: str, base: str, offset: int, size: int) -> Place:
    """Four scalar registers: 48 bits of address, the size of the range. What lies beyond it is not touched."""
    lanes_offset, start = read(at, "u32"), scalar(base)

    def place(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, count = w.s[resource : resource + 3]
        if high >> 16 & 0x3FFF:
            raise Unknown("a buffer with a stride")
        at = np.broadcast_to(lanes_offset(w), w.lanes).astype(np.uint64) + np.uint64(offset)
        return at + np.uint64((low | (high & 0xFFFF) << 32) + start(w)), (at + np.uint64(size) <= count) & w.active

    return place


def global_place(at: str, base: str, offset: int) -> Place:
    if base == "off":
        address = read(at, "i64")
        return lambda w: ((address(w) + offset).view(np.uint64), w.active)
    lanes_offset, start = read(at, "u32"), scalar(base, True)
    return lambda w: (lanes_offset(w).astype(np.uint64) + np.uint64(start(w) + offset & 2**64 - 1), w.active)


def scratch_place(at: str, base: str, offset: int) -> Place:
    """Each lane has its own range."""
    lanes_offset, start = read(at, "i32"), scalar(base)
    return lambda w: (np.arange(w.lanes) * w.scratch.size + lanes_offset(w) + start(w) + offset, w.active)


def build_to_lds(place: Place, size: int, offset: int) -> Step:
    """A load that passes the registers by: lane by lane from M0 on."""

    def load(w: Wave) -> None:
        words = read_some(w, w.memory, *place(w), size)[:, w.active]
        to = ((w.s[M0] & 0xFFFFF) + offset + np.arange(w.lanes) * size)[w.active]
        w.lds.check(w.number, to, size, words)
        w.lds.write(to, np.full_like(words, UNSET), size)
        w.late("vmcnt", frozenset(), lambda: w.lds.write(to, words, size))

    return load
