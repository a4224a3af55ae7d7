"""Values that move between lanes: DPP's patterns, reads of one lane, permutations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .machine import Step, Wave
from .operands import read, scalar, set_scalar, vector
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


def dpp_lanes(i: Instruction) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """[lanes]: which lane each reads, whether there is one, whether the lane may be written."""
    names = [name for name in PATTERNS if name in i.modifiers]
    if not names:
        return None
    lane = np.arange(i.target.lanes)
    source, exists = PATTERNS[names[0]](lane, i.take(names[0]))
    exists = np.broadcast_to(exists, lane.shape)
    written = i.take("row_mask", 15) >> (lane >> 4) & i.take("bank_mask", 15) >> (lane >> 2 & 3) & 1
    return np.where(exists, source, 0), exists, written.astype(bool)


def build(i: Instruction) -> Step | None:
    name = i.name.removeprefix("v_").removesuffix("_e32").removesuffix("_e64")
    if name == "readfirstlane_b32":
        to, n = set_scalar(i.operands[0]), vector(i.operands[1]).first
        return lambda w: to(w, int(w.v[n, (w.exec & -w.exec).bit_length() - 1 if w.exec else 0]))
    if name == "readlane_b32":
        to, n, at = set_scalar(i.operands[0]), vector(i.operands[1]).first, scalar(i.operands[2])
        return lambda w: to(w, int(w.v[n, at(w) % w.lanes]))
    if name == "writelane_b32":
        n, value, at = vector(i.operands[0]).first, scalar(i.operands[1]), scalar(i.operands[2])
        return lambda w: w.v[n].__setitem__(at(w) % w.lanes, value(w))
    if name in ("permlane16_swap_b32", "permlane32_swap_b32"):
        return build_swap(i, int(name[8:10]))
    return build_permute(i) if name == "permlanex16_b32" else None


def build_swap(i: Instruction, size: int) -> Step:
    """The odd rows of one register change places with the even rows of the other."""
    first, second = (vector(x).first for x in i.operands)

    def swap(w: Wave) -> None:
        if not w.full:
            raise Unknown("a swap of some lanes")
        x, y = w.v[first].reshape(-1, 2, size), w.v[second].reshape(-1, 2, size)
        x[:, 1], y[:, 0] = y[:, 0].copy(), x[:, 1].copy()

    return swap


def build_permute(i: Instruction) -> Step:
    """Each lane reads, from the other row of a pair, the lane that 4 bits of two scalars name."""
    n, value, low, high = vector(i.operands[0]).first, read(i.operands[1], "u32"), *map(scalar, i.operands[2:])
    inactive, zero = i.halves("op_sel", 0, 2)
    lane = np.arange(i.target.lanes)

    def permute(w: Wave) -> None:
        choice = high(w) << 32 | low(w)
        source = (lane & ~15 ^ 16) + np.array([choice >> 4 * k & 15 for k in range(16)])[lane & 15]
        valid = w.active[source] | bool(inactive)
        w.put("u32", n, np.where(valid, value(w)[source], 0 if zero else w.v[n]))

    return permute
