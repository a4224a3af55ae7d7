"""How an instruction reads and writes: registers, constants, halves, signs, parts of a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .machine import ACCUMULATORS, ALL, EXEC, KINDS, M0, NULL, SCALARS, TTMP, VCC, Wave, to_lanes, to_mask
from .memory import UNSET
from .text import Unknown

Read = Callable[[Wave], Any]  # [lanes], or one number for all
Write = Callable[[Wave, Any], None]
NAMES = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "null": (NULL, 1),
         "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
         **{f"ttmp{n}": (TTMP + n, 1) for n in (7, 8, 9)}}  # fmt: skip
REGISTER = re.compile(r"\b(v|a|s)(?:(\d+)(?:\.([lh]))?|\[(\d+):(\d+)\])(?!\w)")
SIGNED = re.compile(r"(-(?!\d)|neg\()?(\|)?([^|)]*)[|)]*")  # -v1, |v1|, neg(0)
PARTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}}


class Register(NamedTuple):
    """`count` registers from `first` on; accumulation registers follow the vector registers. RDNA names halves."""

    is_vector: bool
    first: int
    count: int
    half: str = ""  # l, h


def to_register(text: str) -> Register | None:
    """None if it is a constant."""
    if text in NAMES:
        return Register(False, *NAMES[text])
    if not (found := REGISTER.fullmatch(text)):
        return None
    first = int(found[2] or found[4])
    count = int(found[5] or first) - first + 1
    return Register(found[1] in "va", first + ACCUMULATORS * (found[1] == "a"), count, found[3] or "")


def register(text: str, is_vector: bool = True) -> Register:
    """A register of this sort, nothing else."""
    found = to_register(text)
    if found is None or found.is_vector != is_vector:
        raise Unknown(f"operand {text}")
    return found


def used(operands: list[str]) -> frozenset[int]:
    """The numbers of all registers that are named."""
    found = [to_register(match[0]) for match in REGISTER.finditer(" ".join(operands))]
    return frozenset(r.first + n + SCALARS * (not r.is_vector) for r in found for n in range(r.count))


def constant(text: str, kind: str) -> int:
    """The bits of a constant, as an operand of this kind."""
    try:
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return int(text, 0) & (1 << int(kind[1:])) - 1
        return int(np.array(float(text), KINDS["f" + kind[1:]]).view(KINDS["u" + kind[1:]]))
    except ValueError:
        raise Unknown(f"operand {text}") from None


def read(text: str, kind: str, part: str = "DWORD") -> Read:
    """An operand as numbers of this kind ("mask": as a bit for each lane), or a byte or half of it; then its sign."""
    if kind == "mask":
        mask = scalar(text)
        return lambda w: to_lanes(mask(w) & (1 << w.lanes) - 1, w.lanes)
    negative, magnitude, name = SIGNED.fullmatch(text).groups()
    get = read_plain(name, kind) if part == "DWORD" else read_part(name, kind, part)
    if not negative and not magnitude:
        return get
    if kind[0] != "f":
        raise Unknown(f"a sign before {name}")
    change = np.abs if not negative else (lambda x: -np.abs(x)) if magnitude else np.negative
    return lambda w: change(get(w))


def read_plain(text: str, kind: str) -> Read:
    """A constant, a row of vector registers or halves, a pair of them, or a scalar register."""
    named, dtype, size = to_register(text), KINDS[kind], int(kind[1:])
    if named is None:
        value = np.array(constant(text, kind), KINDS[f"u{size}"]).view(dtype)[()]
        return lambda w: value
    n, half = named.first, named.half or "l"
    if named.is_vector and size < 64:
        row = kind if size == 32 else f"{kind}.{half}"
        return lambda w: w.rows[row][n]
    if named.is_vector:
        return lambda w: (w.v[n] | w.v[n + 1].astype(np.uint64) << np.uint64(32)).view(dtype)
    get, number, at = scalar(text), KINDS[f"u{size}"], 16 * (half == "h")
    return lambda w: number(get(w) >> at & (1 << size) - 1).view(dtype)


def read_part(text: str, kind: str, part: str) -> Read:
    """One of `PARTS` of a register."""
    at, bits = PARTS[part]
    get, mask, small = read_plain(text, "u32"), np.uint32((1 << bits) - 1), KINDS["u" + kind[1:]]
    return lambda w: (get(w) >> np.uint32(at) & mask).astype(small).view(KINDS[kind])


def write(text: str, kind: str, is_cdna: bool, part: str = "DWORD") -> Write:
    """Where the active lanes of a result go ("mask": a bit for each; None: nobody has read it yet, so it is not
    computed). CDNA clears the other half of a register, RDNA leaves it."""
    if kind == "mask":
        put = set_scalar(text)
        return lambda w, x: put(w, UNSET << 32 | UNSET if x is None else to_mask(x & w.active))
    (_, n, _, half), dtype, (at, bits) = register(text), KINDS[kind], PARTS[part]
    if part != "DWORD" and (bits != 16 or not kind.endswith("16")):
        raise Unknown(f"{part} of the result")
    if kind.endswith("16") and is_cdna and not half:
        return lambda w, x: w.put("u32", n, np.asarray(x, dtype).view(np.uint16).astype(np.uint32) << at)
    if not kind.endswith("64"):
        row = kind if kind.endswith("32") else f"{kind}.{half or 'l'}"
        return lambda w, x: w.put(row, n, x)

    def pair(w: Wave, x: Any) -> None:
        low = np.asarray(x, dtype).view(np.uint64)
        w.put("u32", n, low & np.uint64(ALL))
        w.put("u32", n + 1, low >> np.uint64(32))

    return pair


def signed(x: int, bits: int = 32) -> int:
    """The number that these bits are in two's complement."""
    return (x ^ 1 << bits - 1) - (1 << bits - 1)


def scalar(text: str, kind: str = "u32") -> Callable[[Wave], int]:
    """A scalar register, a pair, or a constant as a whole number, with a sign if the kind has one."""
    if to_register(text) is None:
        value = constant(text, kind)
        value = signed(value, int(kind[1:])) if kind[0] == "i" else value
        return lambda w: value
    _, n, count, _ = register(text, is_vector=False)
    if kind[0] == "i":
        return (lambda w: signed(w.s[n] | w.s[n + 1] << 32, 64)) if count == 2 else lambda w: signed(w.s[n])
    return (lambda w: w.s[n] | w.s[n + 1] << 32) if count == 2 else lambda w: w.s[n]


def set_scalar(text: str) -> Write:
    """Where a whole number goes: a scalar register or a pair."""
    _, n, count, _ = register(text, is_vector=False)
    return lambda w, value: w.set_scalar(n, value, count == 2)
