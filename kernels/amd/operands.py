"""How an instruction reads and writes: registers, constants, halves, signs, parts of a word."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .machine import ACCUMULATORS, ALL, EXEC, KINDS, M0, NULL, SCALARS, VCC, Wave, to_lanes
from .text import Unknown

Read = Callable[[Wave], Any]  # [lanes], or one number for all
Write = Callable[[Wave, Any], None]
NAMES = {"vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "null": (NULL, 1),
         "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1)}  # fmt: skip
REGISTER = re.compile(r"\b(v|a|s|ttmp)(?:(\d+)(?:\.([lh]))?|\[(\d+)(?::(\d+))?\])(?!\w)")
PARTS = {"DWORD": (0, 32), "WORD_0": (0, 16), "WORD_1": (16, 16), **{f"BYTE_{n}": (8 * n, 8) for n in range(4)}}


class Register(NamedTuple):
    """`count` registers from `first` on; accumulation registers follow the vector registers. RDNA names halves."""

    is_vector: bool
    first: int
    count: int
    half: str = ""  # l, h


def to_register(text: str) -> Register | None:
    if text in NAMES:
        return Register(False, *NAMES[text])
    if not (found := REGISTER.fullmatch(text)):
        return None
    first = int(found[2] or found[4])
    count = int(found[5] or first) - first + 1
    return Register(found[1] in "va", first + {"a": ACCUMULATORS, "ttmp": 108}.get(found[1], 0), count, found[3] or "")


def vector(text: str) -> Register:
    """A vector register, nothing else."""
    register = to_register(text)
    if register is None or not register.is_vector:
        raise Unknown(f"operand {text}")
    return register


def used(operands: list[str]) -> frozenset[int]:
    """The numbers of all registers that are named."""
    found = [to_register(match[0]) for match in REGISTER.finditer(" ".join(operands))]
    return frozenset(r.first + n + SCALARS * (not r.is_vector) for r in found for n in range(r.count))


def constant(text: str, kind: str) -> int:
    """The bits of a constant, as an operand of this kind."""
    try:
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
            return int(text, 0) & (1 << int(kind[1:])) - 1
        value = float(text)
    except ValueError:
        raise Unknown(f"operand {text}") from None
    number, bits = {"16": "eH", "32": "fI", "64": "dQ"}[kind[1:]]
    return struct.unpack("<" + bits, struct.pack("<" + number, value))[0]


def read(text: str, kind: str, part: str = "DWORD") -> Read:
    """An operand as numbers of this kind ("mask": as a bit for each lane), or with SDWA a byte or half of it."""
    if kind == "mask":
        mask = scalar(text, to_register(text).count == 2)
        return lambda w: to_lanes(mask(w) & (1 << w.lanes) - 1, w.lanes)
    text = text.replace("neg(0)", "-0.0")
    negative = text.startswith("-") and not text[1:2].isdigit()
    magnitude = text.lstrip("-").startswith("|")
    if not negative and not magnitude:
        return read_plain(text, kind) if part == "DWORD" else read_part(text, kind, part)
    if kind[0] not in "fb" or part != "DWORD":
        raise Unknown(f"a sign before {text}")
    get, bits = read_plain(text.removeprefix("-").strip("|"), kind), KINDS["b" + kind[1:]]
    sign = bits(1 << int(kind[1:]) - 1)

    def signed(w: Wave) -> Any:
        value = np.asarray(get(w)).view(bits)
        value = value & ~sign if magnitude else value
        return (value ^ sign if negative else value).view(KINDS[kind])

    return signed


def read_plain(text: str, kind: str) -> Read:
    register, dtype, size = to_register(text), KINDS[kind], int(kind[1:])
    if register is None:
        value = np.array(constant(text, kind), KINDS[f"u{size}"]).view(dtype)[()]
        return lambda w: value
    n = register.first
    if register.is_vector and size < 64:
        row = kind if size == 32 else f"{kind}.{register.half or 'l'}"
        return lambda w: w.rows[row][n]
    if register.is_vector:
        return lambda w: (w.v[n] | w.v[n + 1].astype(np.uint64) << np.uint64(32)).view(dtype)
    if size == 64:
        return lambda w: np.uint64(w.s[n] | w.s[n + 1] << 32).view(dtype)
    number = KINDS[f"u{size}"]
    return lambda w: number(w.s[n] & (1 << size) - 1).view(dtype)


def read_part(text: str, kind: str, part: str) -> Read:
    at, bits = PARTS[part]
    get, mask, small = read_plain(text, "u32"), np.uint32((1 << bits) - 1), KINDS["u" + kind[1:]]
    return lambda w: np.asarray(get(w) >> np.uint32(at) & mask).astype(small).view(KINDS[kind])


def write(text: str, kind: str, is_cdna: bool, part: str = "DWORD") -> Write:
    """Where the active lanes of a result go. CDNA clears the other half of the register, RDNA leaves it."""
    (_, n, _, half), dtype, (at, bits) = vector(text), KINDS[kind], PARTS[part]
    if part != "DWORD" and (bits != 16 or not kind.endswith("16")):
        raise Unknown(f"{part} of the result")
    if kind.endswith("32"):
        return lambda w, x: w.put(kind, n, x)
    if kind.endswith("16") and (half or not is_cdna):
        return lambda w, x: w.put(f"{kind}.{half or 'l'}", n, x)
    if kind.endswith("16"):
        return lambda w, x: w.put("u32", n, np.asarray(x, dtype).view(np.uint16).astype(np.uint32) << at)

    def pair(w: Wave, x: Any) -> None:
        low = np.asarray(x, dtype).view(np.uint64)
        w.put("u32", n, low & np.uint64(ALL))
        w.put("u32", n + 1, low >> np.uint64(32))

    return pair


def scalar(text: str, wide: bool = False) -> Callable[[Wave], int]:
    """A scalar register, a pair, or a constant as a whole number."""
    register = to_register(text)
    if register is None:
        value = constant(text, "u64" if wide else "u32")
        return lambda w: value
    if register.is_vector:
        raise Unknown(f"operand {text}")
    n = register.first
    return (lambda w: w.s[n] | w.s[n + 1] << 32) if wide else lambda w: w.s[n]


def set_scalar(text: str, wide: bool = False) -> Callable[[Wave, int], None]:
    register = to_register(text)
    if register is None or register.is_vector:
        raise Unknown(f"operand {text}")
    n = register.first
    return lambda w, value: w.set_scalar(n, value, wide)
