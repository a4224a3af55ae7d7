"""Values that move between lanes: DPP's patterns, reads of one lane, permutations, counts of lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Step, Wave
from .operands import Read, Write, read, register, scalar, set_scalar
from .text import Instruction, Unknown

# DPP: (lane, the number given) -> the lane that it reads, and whether there is one. Rows have 16 lanes.
PATTERNS: dict[str, Callable] = {
    "quad_perm": lambda lane, n: ((lane & ~3) + np.array(n)[lane & 3], True),
    "row_shr": lambda lane, n: (lane - n, lane & 15 >= n),
    "row_ror": lambda lane, n: ((lane & ~15) + (lane - n & 15), True),
    "row_half_mirror": lambda lane, n: (lane ^ 7, True),
    "row_bcast": lambda lane, n: ((lane & ~n & 63) - 1, lane > n) if n == 15 else (0 * lane + n, lane > n),
    "row_xmask": lambda lane, n: (lane ^ n, True),
}


def dpp(i: Instruction, pattern: str, get: Read, kind: str) -> tuple[Read, Write]:
    """The first source comes from another lane; where there is none, it is 0 or the lane is not written."""
    lane, zero, n = np.arange(i.target.lanes), bool(i.take("bound_ctrl")), register(i.operands[0]).first
    source, exists = PATTERNS[pattern](lane, i.take(pattern))
    source = np.where(exists, source, 0)
    written = (i.take("row_mask", 15) >> (lane >> 4) & i.take("bank_mask", 15) >> (lane >> 2 & 3) & 1).astype(bool)
    if not kind.endswith("32"):
        raise Unknown("DPP on halves")

    def moved(w: Wave) -> Any:
        x = get(w)[source]
        return np.where(exists & w.active[source], x, x.dtype.type(0))

    return moved, lambda w, x: w.put(kind, n, x, w.active & written & (zero | exists & w.active[source]))


def build(i: Instruction) -> Step | None:
    name = i.name.removeprefix("v_").removesuffix("_e32").removesuffix("_e64")
    if name in ("readlane_b32", "readfirstlane_b32"):
        to, n = set_scalar(i.operands[0]), register(i.operands[1]).first
        at = scalar(i.operands[2]) if len(i.operands) > 2 else first_lane
        return lambda w: to(w, int(w.v[n, at(w) % w.lanes]))
    if name == "writelane_b32":
        n, value, at = register(i.operands[0]).first, scalar(i.operands[1]), scalar(i.operands[2])
        return lambda w: w.v[n].__setitem__(at(w) % w.lanes, value(w))
    if name in ("mbcnt_lo_u32_b32", "mbcnt_hi_u32_b32"):
        return build_count(i, 32 * ("hi" in name))
    if name in ("permlane16_swap_b32", "permlane32_swap_b32"):
        return build_swap(i, int(name[8:10]))
    return build_permute(i) if name == "permlanex16_b32" else None


def first_lane(w: Wave) -> int:
    return (w.exec & -w.exec).bit_length() - 1 if w.exec else 0


def build_swap(i: Instruction, size: int) -> Step:
    """The odd rows of one register change places with the even rows of the other."""
    first, second = (register(x).first for x in i.operands)

    def swap(w: Wave) -> None:
        if not w.full:
            raise Unknown("a swap of some lanes")
        x, y = w.v[first].reshape(-1, 2, size), w.v[second].reshape(-1, 2, size)
        x[:, 1], y[:, 0] = y[:, 0].copy(), x[:, 1].copy()

    return swap


def build_count(i: Instruction, first: int) -> Step:
    """A number, and how many bits of a mask stand for lanes before the own one, of the 32 lanes from `first` on."""
    n, mask, number = register(i.operands[0]).first, read(i.operands[1], "u32"), read(i.operands[2], "u32")
    before = np.arange(32) < np.arange(i.target.lanes)[:, None] - first

    def count(w: Wave) -> None:
        bits = np.asarray(mask(w), np.uint32)[..., None] >> np.arange(32, dtype=np.uint32) & 1
        w.put("u32", n, number(w) + (bits * before).sum(1, dtype=np.uint32))

    return count


def build_permute(i: Instruction) -> Step:
    """Each lane reads, from the other row of a pair, the lane that 4 bits of two scalars name; be it active or not."""
    n, value, low, high = register(i.operands[0]).first, read(i.operands[1], "u32"), *map(scalar, i.operands[2:])
    row, shift = np.arange(i.target.lanes) & ~15 ^ 16, 4 * np.arange(16, dtype=np.uint64)
    if i.take("op_sel") != [1, 0]:
        raise Unknown("a permutation of some lanes")

    def permute(w: Wave) -> None:
        choice = np.uint64(high(w) << 32 | low(w)) >> shift & np.uint64(15)
        w.put("u32", n, value(w)[row + np.tile(choice.astype(int), 2)])

    return permute
