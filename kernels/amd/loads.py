"""Instructions on memory: for all lanes, LDS, global (an address in each), buffer (an offset into a range), scratch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .caches import take_scope
from .machine import GIVE_WAY, M0, SCALARS, Step, Wave
from .memory import UNSET
from .operands import read, register, scalar, to_register
from .text import Instruction, Unknown

SIZES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "b32": 4, "b64": 8, "b96": 12, "b128": 16,
         "b256": 32, "ushort": 2, "short": 2, "u16": 2, "b16": 2, "ubyte": 1, "u8": 1, "b8": 1}  # fmt: skip
# CDNA's names and RDNA's: ds_read2st64_b32 is ds_load_2addr_stride64_b32, global_load_short_d16 global_load_d16_b16.
FORM = re.compile(rf"([a-z]+)_(load|store|read|write)(2|_2addr)?(st64|_stride64)?_({'|'.join(SIZES)})")
MORE = re.compile("_d16|_hi|_lds|_tr_b16")
Place = Callable[[Wave], tuple[Any, np.ndarray, np.ndarray]]  # a memory, [lanes] addresses, which lanes have one


def build(i: Instruction) -> Step | None:
    if i.name == "ds_bpermute_b32":
        return build_permute(i)
    if i.name in ("global_atomic_add", "global_atomic_add_u32"):
        return build_atomic_add(i)
    if not (found := FORM.fullmatch(MORE.sub("", i.name))):
        return None
    (space, access, paired, apart, name), more = found.groups(), MORE.findall(i.name)
    is_load, size, to_lds = access in ("load", "read"), SIZES[name], "_lds" in more or i.take("lds", False)
    if space == "s":
        return build_scalar(i, size // 4)
    if is_load and i.take("th", "TH_LOAD_LU") not in ("TH_LOAD_LU", "TH_LOAD_NT"):  # for the cache: it was the last use
        raise Unknown(i.text)
    past = take_scope(i) if is_load and space == "global" else ()
    step = size * (64 if apart else 1)
    offsets = [i.take("offset0") * step, i.take("offset1") * step] if paired else [i.take("offset")]
    operands = [""] * to_lds + i.operands
    if space != "buffer" and not is_load:
        operands[:2] = operands[1::-1]  # the address stands before the data
    data, at, *others = operands
    i.take("offen")  # if not, the address is `off`
    places = [PLACES[space](at, others, offset, size) for offset in offsets]
    places = [fresh(place, past, size) for place in places] if past else places
    counter, half = i.target.counters["LDS" if space == "ds" else "memory"], "h" if "_hi" in more else "l"
    if to_lds:
        return build_to_lds(places[0], size, offsets[0] * (space == "global"), counter)
    if is_load:
        return build_load(places, size, data, counter, f"b16.{half}" if "_d16" in more else "b32", "_tr_b16" in more)
    sources = [register(text).first for text in [data, *others[: len(places) - 1]]]
    counter = counter if space == "ds" else i.target.counters["stores"]
    return build_store(places, size, sources, counter, 16 * (half == "h"))


def build_scalar(i: Instruction, words: int) -> Step:
    """For all lanes. They come in any order, so only a wait for all of them helps."""
    n, base, offset = register(i.operands[0], False).first, scalar(i.operands[1], "i64"), scalar(i.operands[2])
    counter = i.target.counters["scalar"]

    def load(w: Wave) -> None:
        values = w.memory.read(np.array([base(w) + offset(w)]), 4 * words)[:, 0].tolist()
        w.s[n : n + words] = [UNSET] * words
        numbers = frozenset(range(SCALARS + n, SCALARS + n + words))
        w.late(counter, numbers, lambda: w.s.__setitem__(slice(n, n + words), values), "scalar")

    return load


def build_load(places: list[Place], size: int, to: str, counter: str, kind: str, transposed: bool) -> Step:
    n = register(to).first

    def load(w: Wave) -> None:
        rows = [row for place in places for row in read_some(w, *place(w), size)]
        w.load(counter, n, [*transpose(np.stack(rows))] if transposed else rows, kind)

    return load


def fresh(place: Place, levels: tuple[int, ...], size: int) -> Place:
    """The same, but these caches do not answer."""

    def refreshed(w: Wave) -> tuple[Any, np.ndarray, np.ndarray]:
        memory, at, some = place(w)
        if some.any():
            memory.refresh(levels, at[some], size)
        return memory, at, some

    return refreshed


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
    """What must wait for it: others that use LDS, and with caches everybody. CDNA counts it among the loads."""
    counts = counter not in ("vscnt", "storecnt")

    def store(w: Wave) -> None:
        arrive = None
        for place, n in zip(places, sources, strict=True):
            memory, at, some = place(w)
            if some.any():
                arrive = memory.write(at[some], w.v[n : n + max(1, size // 4)][:, some] >> shift, size)
        if counts or arrive:
            w.late(counter, frozenset(), arrive or (lambda: None), "store")

    return store


def build_atomic_add(i: Instruction) -> Step:
    """Gives what was there before, lane after lane; nothing comes between."""
    if True not in (i.take("sc0"), i.take("glc"), i.take("th") == "TH_ATOMIC_RETURN"):
        raise Unknown("an atomic that returns nothing")
    i.take("scope")
    to, at, data, base = i.operands
    n, source, counter = register(to).first, register(data).first, i.target.counters["memory"]
    place = global_place(at, [base], i.take("offset"), 4)

    def add(w: Wave) -> int | None:
        memory, at, some = place(w)
        before = np.zeros(w.lanes, np.uint32)
        for lane in np.flatnonzero(some):
            before[lane] = memory.add(at[lane : lane + 1], int(w.v[source, lane]))
        w.load(counter, n, [before], what="atomic")
        return GIVE_WAY if memory.gives_way else None

    return add


def build_to_lds(place: Place, size: int, offset: int, counter: str) -> Step:
    """A load that passes the registers by: lane by lane from M0 on."""

    def load(w: Wave) -> None:
        words = read_some(w, *place(w), size)[:, w.active]
        to = ((w.s[M0] & 0xFFFFF) + offset + w.lane * size)[w.active]
        w.lds.write(to, np.full_like(words, UNSET), size)
        w.late(counter, frozenset(), lambda: w.lds.write(to, words, size))

    return load


def build_permute(i: Instruction) -> Step:
    """Each lane reads the register of the lane that it names, in bytes. It uses the wires of LDS."""
    n, at, source = (register(text).first for text in i.operands)
    counter = i.target.counters["LDS"]

    def permute(w: Wave) -> None:
        lane = (w.v[at] >> 2) % w.lanes
        w.load(counter, n, [np.where(w.active[lane], w.v[source][lane], 0)])

    return permute


def lds_place(at: str, others: list[str], offset: int, size: int) -> Place:
    """A byte of LDS in each lane."""
    own = read(at, "u32")
    return lambda w: (w.lds, own(w).astype(np.int64) + offset, w.active)


def global_place(at: str, others: list[str], offset: int, size: int) -> Place:
    """64 bits in each lane, or 32 bits in each lane behind 64 for all."""
    if others[0] == "off":
        address = read(at, "i64")
        return lambda w: (w.memory, address(w) + offset, w.active)
    own, start = read(at, "u32"), scalar(others[0], "i64")
    return lambda w: (w.memory, own(w).astype(np.int64) + (start(w) + offset), w.active)


def scratch_place(at: str, others: list[str], offset: int, size: int) -> Place:
    """The same place in each lane's own memory."""
    own, start = read(at.replace("off", "0"), "u32"), scalar(others[0].replace("off", "0"))
    return lambda w: (w.scratch, w.lane * (len(w.scratch.u8) // w.lanes) + own(w) + (start(w) + offset), w.active)


def buffer_place(at: str, others: list[str], offset: int, size: int) -> Place:
    """Four scalar registers: 48 bits of address, the size of the range (what lies beyond is not touched), and in the
    last one, whether each lane has a range of its own: that is how gfx90a spills."""
    own, resource, start = read(at.replace("off", "0"), "u32"), to_register(others[0]).first, scalar(others[1])
    spilled = scratch_place(at, others[1:], offset, size)

    def place(w: Wave) -> tuple[Any, np.ndarray, np.ndarray]:
        low, high, count, form = w.s[resource : resource + 4]
        if form >> 23 & 1:
            return spilled(w)
        if high >> 16 & 0x3FFF:
            raise Unknown("a buffer with a stride")
        at = own(w).astype(np.int64) + offset
        return w.memory, at + ((low | (high & 0xFFFF) << 32) + start(w)), (at + size <= count) & w.active

    return place


PLACES = {"ds": lds_place, "global": global_place, "buffer": buffer_place, "scratch": scratch_place}
