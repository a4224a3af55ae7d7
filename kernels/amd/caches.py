"""Caches between the waves and memory, as unhelpful as the rules allow.

The rules are LLVM's, https://llvm.org/docs/AMDGPUUsage.html: its memory models of GFX90A, GFX942, GFX10-GFX11 and GFX12.
Within them, a load gives the oldest value and a store arrives as late as possible:

    a cache keeps what memory held when the kernel began, until an instruction invalidates it
    a store is in its CU's cache, and leaves it when a wait for stores says so
    on CDNA 3 and 4 it is then in the L2 of its die, and leaves it when a write-back has been waited for
    an atomic add acts on memory, at once; behind it another workgroup may run
    when the kernel ends, everything has arrived

A real cache has a line only if somebody read it. This one has them all, so a fault shows in the first run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .machine import Step, Target, Wave
from .memory import Argument, Arguments, Bytes
from .text import Instruction, Unknown

NEAR, MIDDLE = 0, 1  # a CU's cache (L1 or L0); the L2 of a die, or the L1 of a shader array of RDNA
# For loads, which caches a modifier goes past; for an invalidate, which ones it empties.
SCOPES = {"sc0": (NEAR,), "sc1": (NEAR, MIDDLE), "glc": (NEAR, MIDDLE), "SCOPE_SE": (NEAR,),
          "SCOPE_DEV": (NEAR, MIDDLE), "SCOPE_SYS": (NEAR, MIDDLE)}  # fmt: skip
INVALIDATES = {"buffer_gl0_inv": (NEAR,), "buffer_gl1_inv": (MIDDLE,), "buffer_wbinvl1": (NEAR,),
               "buffer_wbinvl1_vol": (NEAR,)}  # fmt: skip


def take_scope(i: Instruction) -> tuple[int, ...]:
    """The caches that the modifiers of a load or of an invalidate name."""
    scope, named = i.take("scope"), [name for name in ("sc0", "sc1", "glc", "dlc") if i.take(name)]
    return max((SCOPES.get(name, ()) for name in [scope, *named]), key=len)


def build(i: Instruction) -> Step | None:
    """Write-backs and invalidates."""
    if not re.search("_wb|_inv", i.name):
        return None
    if i.name.startswith("buffer"):  # it has no operands
        i.modifiers |= dict.fromkeys(i.operands, True)
    if i.name == "buffer_wbl2":
        if not i.take("sc1"):
            raise Unknown("a write-back for less than the GPU")
        return lambda w: w.late("vmcnt", frozenset(), w.memory.write_back, "store")
    if i.name == "global_wb":  # RDNA 4 writes through to the L2 that all its units share
        i.take("scope")
        return lambda w: None
    levels, counter = INVALIDATES.get(i.name) or take_scope(i), i.target.counters["memory"]

    def invalidate(w: Wave) -> None:
        if not any(late.kind == "atomic" for late in w.under_way[counter]):  # else it may come before the add
            w.memory.refresh(levels)

    return invalidate


class Level:
    """A cache, or memory: the bytes of each argument, and how many stores of each byte have not gone further down."""

    def __init__(self, arguments: list[Argument], below: Level | None = None, keeps: bool = False) -> None:
        self.below, self.keeps = below, keeps
        self.bytes: dict[Argument, Bytes] = {a: Bytes(a.u8.copy()) if below else a for a in arguments}
        self.own = {a: np.zeros(len(a.u8), np.uint8) for a in arguments}

    def refresh(self, argument: Argument, where: Any = slice(None)) -> None:
        """Take bytes from below, but for those that have not gone there yet."""
        assert self.below, "memory is never stale"
        ours, theirs = self.bytes[argument].u8, self.below.bytes[argument].u8
        ours[where] = np.where(self.own[argument][where] > 0, ours[where], theirs[where])

    def pass_down(self, argument: Argument, where: np.ndarray) -> None:
        """Bytes go down to the next cache that keeps them, or to memory."""
        level = self
        while level.below and (level is self or not level.keeps):
            level = level.below
            level.bytes[argument].u8[where] = self.bytes[argument].u8[where]
        level.own[argument][where] = level.keeps

    def write_back(self) -> None:
        """All of them do."""
        for argument, own in self.own.items():
            where = np.flatnonzero(own)
            self.pass_down(argument, where)
            own[where] = 0


class View:
    """Memory as a wave sees it: `levels` from its CU's cache to memory."""

    gives_way = True

    def __init__(self, memory: Arguments, levels: list[Level]) -> None:
        self.memory, self.levels = memory, levels

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        argument, at = self.memory.find(addresses, size)
        return self.levels[NEAR].bytes[argument].read(at, size)

    def write(self, addresses: np.ndarray, words: np.ndarray, size: int) -> Callable[[], None]:
        """Into the CU's cache. Gives what happens when the wave has waited for it."""
        argument, at = self.memory.find(addresses, size)
        near, where = self.levels[NEAR], (at[:, None] + np.arange(size)).ravel()
        near.bytes[argument].write(at, words, size)
        near.own[argument][where] += 1

        def arrive() -> None:
            near.pass_down(argument, where)
            near.own[argument][where] -= 1

        return arrive

    def add(self, address: np.ndarray, number: int) -> int:
        before = self.memory.add(address, number)
        self.refresh((NEAR, MIDDLE), address, 4)
        return before

    def refresh(self, levels: tuple[int, ...], addresses: np.ndarray | None = None, size: int = 0) -> None:
        """The caches hold what is below again: everything, or at these addresses. The lowest first."""
        found: list[tuple[Argument, Any]] = [(argument, slice(None)) for argument in self.memory.arguments]
        if addresses is not None:
            argument, at = self.memory.find(addresses, size)
            found = [(argument, (at[:, None] + np.arange(size)).ravel())]
        for level in [self.levels[n] for n in sorted(levels, reverse=True) if n < len(self.levels) - 1]:
            for argument, where in found:
                level.refresh(argument, where)

    def write_back(self) -> None:
        self.levels[MIDDLE].write_back()


class Caches:
    """Two dies (CDNA) or two WGPs (RDNA) of two CUs. Workgroups go to them in turn; they run in a random order, and so
    do the waves of each one between two barriers."""

    def __init__(self, target: Target, memory: Arguments, seed: int) -> None:
        self.memory, self.is_cdna, self.random = memory, target.is_cdna, random.Random(seed)
        known, has_dies = memory.arguments, target.name in ("gfx942", "gfx950")
        self.main = Level(known)
        self.middle = [self.main if target.name == "gfx90a" else Level(known, self.main, has_dies) for _ in range(2)]
        self.near = [[Level(known, middle, True) for _ in range(2)] for middle in self.middle]

    def view(self, group: int, wave: int) -> View:
        """A workgroup of CDNA runs on one CU; the waves of one of RDNA alternate between two."""
        near, levels = self.near[group % 2][(group // 2 if self.is_cdna else wave) % 2], []
        level: Level | None = near
        while level:
            levels.append(level)
            level = level.below
        return View(self.memory, levels)

    def run(self, groups: list[Iterator[None]]) -> None:
        """Each goes on until it gives way; then it may have to wait for all that do not. In the end the kernel is over."""
        asleep: list[Iterator[None]] = []
        while groups:
            group = self.random.choice(groups)
            if next(group, "done") == "done":
                groups.remove(group)
            elif self.random.random() < 0.5:
                groups.remove(group)
                asleep.append(group)
            if not groups:
                groups, asleep = asleep, []
        for level in [*self.near[0], *self.near[1], *self.middle]:
            level.write_back()
