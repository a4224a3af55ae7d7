"""Bytes that lanes address: the arguments' storage, the LDS of a workgroup, the scratch memory of a wave."""

from __future__ import annotations

import ctypes

import numpy as np

UNSET = 0xFFADFFAD  # NaN as a float32, as two float16, as two bfloat16: what nobody wrote, or has not come yet


class Fault(Exception):
    """What a kernel must not do, or what this machine does not know."""


def unset(size: int) -> np.ndarray:
    """Bytes that nobody has written."""
    return np.full((size + 3) // 4, UNSET, np.uint32).view(np.uint8)


class Bytes:
    """Memory that is read and written at a byte offset in each lane."""

    def __init__(self, u8: np.ndarray) -> None:
        self.u8, self.u32 = u8, u8.view(np.uint32)

    def read(self, at: np.ndarray, size: int) -> np.ndarray:
        """[words, lanes]: `size` bytes at offsets `at`, in words of 32 bits."""
        if size >= 4 and not (at & 3).any():
            return self.u32[(at >> 2) + np.arange(size // 4)[:, None]]
        parts = np.zeros((len(at), max(4, size)), np.uint8)
        parts[:, :size] = self.u8[at[:, None] + np.arange(size)]
        return parts.view(np.uint32).T

    def write(self, at: np.ndarray, words: np.ndarray, size: int) -> None:
        """`words` [words, lanes] to offsets `at`; of lanes that meet, the last wins."""
        if size >= 4 and not (at & 3).any():
            self.u32[(at >> 2) + np.arange(size // 4)[:, None]] = words
        else:
            self.u8[at[:, None] + np.arange(size)] = np.ascontiguousarray(words.T).view(np.uint8)[:, :size]


class Argument(Bytes):
    """The storage of a tensor, or the arguments themselves, where they lie."""

    def __init__(self, name: str, address: int, size: int) -> None:
        self.name, self.first, self.end = name, address, address + size
        super().__init__(np.ctypeslib.as_array((ctypes.c_uint8 * (size + 3 & ~3)).from_address(address)))


class Arguments:
    """All that a kernel may address. The check `bounds`: the lanes of an access meet in one argument's storage."""

    gives_way = False  # to another workgroup

    def __init__(self, arguments: list[Argument]) -> None:
        self.arguments = [a for a in arguments if a.end > a.first]

    def find(self, addresses: np.ndarray, size: int) -> tuple[Argument, np.ndarray]:
        """Whose storage it is, and the offsets there."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for found in self.arguments:
            if found.first <= low and high <= found.end:
                return found, addresses - found.first
        near = min(self.arguments, key=lambda a: max(a.first - low, low - a.end))
        outside = (addresses < near.first) | (addresses > near.end - size)
        raise Fault(f"bounds: {outside.sum()} lanes reach {size} bytes at {int(addresses[outside][0]) - near.first:+d} "
                    f"from the start of {near.name}, whose storage has {near.end - near.first}")  # fmt: skip

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[words, lanes]."""
        argument, at = self.find(addresses, size)
        return argument.read(at, size)

    def write(self, addresses: np.ndarray, words: np.ndarray, size: int) -> None:
        argument, at = self.find(addresses, size)
        argument.write(at, words, size)

    def add(self, address: np.ndarray, number: int) -> int:
        """What was there before."""
        before = int(self.read(address, 4)[0, 0])
        self.write(address, np.array([[before + number & 0xFFFFFFFF]], np.uint32), 4)
        return before

    def refresh(self, levels: tuple[int, ...], addresses: np.ndarray | None = None, size: int = 0) -> None:
        """There are no caches."""

    def write_back(self) -> None:
        """The same."""


class Lds(Bytes):
    """What the waves of a workgroup share. The check `race`: a byte that a wave changes is no other wave's before the
    next barrier. (Threads that hold copies may all write the same.)"""

    def __init__(self, size: int, waves: int) -> None:
        super().__init__(unset(size))
        self.size, self.is_shared = size, waves > 1
        self.wave = 0  # which one runs
        self.has_signalled = False  # it has signalled a barrier that it has not waited at (RDNA 4)
        # By which one a byte was since the last barrier, from 1 on; 0: by none, 255: by several.
        self.written, self.seen = np.zeros((2, len(self.u8)), np.uint8)

    def barrier(self) -> None:
        """All waves have come: what they did is over."""
        self.written[:] = self.seen[:] = 0

    def read(self, at: np.ndarray, size: int) -> np.ndarray:
        self.check(at, size, None)
        return super().read(at, size)

    def write(self, at: np.ndarray, words: np.ndarray, size: int) -> None:
        self.check(at, size, words)
        super().write(at, words, size)

    def check(self, at: np.ndarray, size: int, words: np.ndarray | None) -> None:
        """The offsets are inside, and no other wave is; `words` [words, lanes] if they are written."""
        if len(at) and (at.min() < 0 or at.max() + size > self.size):
            raise Fault(f"bounds: {size} bytes at {int(at.max())} of {self.size} bytes of LDS")
        if not self.is_shared:
            return
        if self.has_signalled:  # the others may be before the barrier or behind it
            raise Fault("race: LDS is used between s_barrier_signal and s_barrier_wait")
        byte, mine = at[:, None] + np.arange(size), self.wave + 1
        written, seen = self.written[byte], self.seen[byte]
        others, readers = (written != 0) & (written != mine), (seen != 0) & (seen != mine)
        if words is None:
            self.seen[byte] = np.where(readers, 255, mine)
        else:
            changed = self.u8[byte] != np.ascontiguousarray(words.T).view(np.uint8)[:, :size]
            others = (others | readers) & changed
            self.written[byte[changed]] = mine
        if others.any():
            last, verb = written[others][0], "reads" if words is None else "writes"
            other = "another wave read" if last in (0, mine) else f"wave {last - 1} wrote"
            where = f"byte {byte[others][0]} of LDS"
            raise Fault(f"race: wave {self.wave} {verb} {where}, which {other} since the last barrier")
