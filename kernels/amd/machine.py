"""A wave: its lanes, its registers, its execution mask, and what it still waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .memory import UNSET, Arguments, Bytes, Lds

KINDS = {f"{kind}{bits}": np.dtype(f"{'u' if kind == 'b' else kind}{bits // 8}").type
         for kind in "fuib" for bits in (16, 32, 64)}  # fmt: skip
VCC, TTMP, M0, NULL, EXEC = 106, 108, 124, 125, 126  # scalar registers with a purpose
ACCUMULATORS, SCALARS = 256, 512  # where the numbers of a0 and of s0 begin, in sets of registers
ALL = 0xFFFFFFFF
Step = Callable[["Wave"], "int | None"]  # what an instruction does; gives the number of the next, if not the following
END, BARRIER, GIVE_WAY = -1, -2, -3  # in place of that number


class Target(NamedTuple):
    """What differs between the machines."""

    name: str
    lanes: int
    is_cdna: bool = False  # gfx9: 16-bit results clear the upper half, stores count among the loads in vmcnt
    is_rdna4: bool = False  # gfx12: a counter for each kind of access, the workgroup's number in ttmp registers

    @property
    def counters(self) -> dict[str, str]:
        """What counts accesses of a kind that are under way."""
        if self.is_rdna4:
            return {"memory": "loadcnt", "stores": "storecnt", "LDS": "dscnt", "scalar": "kmcnt"}
        return {"memory": "vmcnt", "stores": "vmcnt" if self.is_cdna else "vscnt", "LDS": "lgkmcnt", "scalar": "lgkmcnt"}


TARGETS = {name: Target(name, 64, is_cdna=True) for name in ("gfx90a", "gfx942", "gfx950")}
TARGETS |= {name: Target(name, 32) for name in ("gfx1100", "gfx1102", "gfx1151")}
TARGETS |= {name: Target(name, 32, is_rdna4=True) for name in ("gfx1200", "gfx1201")}


class Late(NamedTuple):
    """An access under way."""

    registers: frozenset[int]  # that it will fill
    finish: Callable[[], None]
    kind: str  # load, store, atomic, scalar


class Wave:
    """`lanes` threads in lockstep.

    v: [512, lanes] vector registers, the accumulation registers from 256 on; `rows` are views of another type.
    s: scalar registers as whole numbers; exec, one bit a lane, says which lanes an instruction writes.
    """

    def __init__(self, number: int, lanes: int, memory: Arguments, lds: Lds, scratch: Bytes) -> None:
        self.number, self.lanes, self.memory, self.lds, self.scratch = number, lanes, memory, lds, scratch
        self.v = np.full((512, lanes), UNSET, np.uint32)
        self.lane = np.arange(lanes)
        self.v[0] = number * lanes + self.lane
        self.rows: dict[str, np.ndarray] = {}
        for kind, dtype in KINDS.items():
            if kind.endswith("32"):
                self.rows[kind] = self.v.view(dtype)
            elif kind.endswith("16"):
                halves = self.v.view(dtype).reshape(512, lanes, 2)
                self.rows[kind + ".l"], self.rows[kind + ".h"] = halves[..., 0], halves[..., 1]
        self.s = [UNSET] * 128
        self.s[NULL] = self.s[VCC] = self.s[VCC + 1] = 0
        self.scc = self.pc = self.jumps = 0
        self.under_way: dict[str, list[Late]] = defaultdict(list)  # by counter
        self.busy: frozenset[int] = frozenset()  # registers that wait for a load
        self.set_mask((1 << lanes) - 1)

    def set_mask(self, value: int) -> None:
        self.exec, self.s[EXEC], self.s[EXEC + 1] = value, value & ALL, value >> 32
        self.active = to_lanes(value, self.lanes)
        self.full = value == (1 << self.lanes) - 1

    def put(self, kind: str, n: int, value: Any, where: np.ndarray | None = None) -> None:
        """Write the active lanes of a register; whole numbers lose what does not fit."""
        row = self.rows[kind][n]
        if self.full and where is None:
            row[...] = value
        else:
            np.copyto(row, value, casting="unsafe", where=self.active if where is None else where)

    def set_scalar(self, n: int, value: int, wide: bool) -> None:
        """Write a scalar register, or a pair; writing the mask has consequences."""
        if n != NULL:
            self.s[n] = value & ALL
            if wide:
                self.s[n + 1] = value >> 32
            if n in (EXEC, EXEC + 1):
                self.set_mask(self.s[EXEC] | self.s[EXEC + 1] << 32)

    def late(self, counter: str, registers: frozenset[int], finish: Callable[[], None], kind: str = "load") -> None:
        """Let an access come in as late as the program's waits allow."""
        self.under_way[counter].append(Late(registers, finish, kind))
        self.busy |= registers

    def load(self, counter: str, n: int, rows: list[np.ndarray], kind: str = "b32", what: str = "load") -> None:
        """`rows` for registers from n on, or for halves of them, when they are waited for."""
        active = self.active
        for i in range(len(rows)):
            self.put(kind, n + i, UNSET >> 16 if "16" in kind else UNSET)

        def finish() -> None:
            for i, row in enumerate(rows):
                self.put(kind, n + i, row, where=active)

        self.late(counter, frozenset(range(n, n + len(rows))), finish, what)

    def wait(self, counter: str, left: int) -> None:
        """Until at most `left` accesses are under way. Those of lanes come in order, scalar ones in any order."""
        queue = self.under_way[counter]
        ordered = [late for late in queue if late.kind != "scalar"]
        done = [late for late in queue if late.kind == "scalar" and not left] + ordered[: max(0, len(ordered) - left)]
        for late in done:
            late.finish()
        self.under_way[counter] = [late for late in queue if late not in done]
        self.busy = frozenset().union(*(late.registers for queue in self.under_way.values() for late in queue))


def to_lanes(value: int, lanes: int) -> np.ndarray:
    """[lanes] bool: the bits of a mask."""
    return np.unpackbits(np.frombuffer(value.to_bytes(lanes // 8, "little"), np.uint8), bitorder="little").view(bool)


def to_mask(lanes: np.ndarray) -> int:
    """The whole number whose bits are these lanes."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
