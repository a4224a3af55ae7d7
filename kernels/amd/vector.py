"""One value for each lane. The suffix of a name says the kind of its numbers; the tables say what is done with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .crosslane import PATTERNS, dpp
from .machine import ALL, Step, Wave
from .operands import Read, Write, read, write
from .packed import halved
from .text import Instruction, Unknown

F32, F64, I64, U32, U64 = np.float32, np.float64, np.int64, np.uint32, np.uint64


def fma(a: Any, b: Any, c: Any) -> Any:
    """Rounded once, when it is written."""
    return a.astype(F64) * b + c


def to_f16(x: Any) -> Any:
    return np.asarray(x, np.float16).view(np.uint16).astype(U32)


def to_bf16(x: Any) -> Any:
    """The upper half of a float32, rounded to nearest even."""
    u = np.asarray(x, F32).view(U32)
    return np.where(np.isnan(x), u >> 16 | 0x40, u + 0x7FFF + (u >> 16 & 1) >> 16)


def extract(x: Any, at: Any, size: Any) -> Any:
    """The `size` bits from `at` on; a signed number's highest one is its sign."""
    n = I64(size & 31)
    part = I64(x) >> I64(at & 31) & (1 << n) - 1
    return np.where(n > 0, part - ((part >> np.maximum(n - 1, 0) & 1) << n), 0) if x.dtype.kind == "i" else part


def choose_bytes(high: Any, low: Any, selector: Any) -> Any:
    """v_perm: each byte of the selector names a byte of the eight, a byte full of a sign, 0 or 255."""
    data = np.atleast_1d(U64(low) | U64(high) << U64(32))[:, None].view(np.uint8)
    ends = np.zeros_like(data[:, :2]) + np.array([0, 255], np.uint8)
    table = np.concatenate([data, (data[:, 1::2] >> 7) * np.uint8(255), ends], 1)
    chosen = np.minimum(np.atleast_1d(selector)[:, None].view(np.uint8), 13)
    return table[np.arange(len(table))[:, None], chosen].view(U32)[:, 0]


def fix_quotient(quotient: Any, below: Any, above: Any) -> Any:
    """v_div_fixup: its sign, and the cases of a division that the steps before cannot do."""
    special = (below == 0) | (above == 0) | ~np.isfinite(below) | ~np.isfinite(above)
    return np.where(special, above / below, np.copysign(quotient, above) * np.copysign(F32(1), below))


def exponent(x: Any) -> Any:
    return (np.asarray(x, F32).view(U32) >> 23 & 255).astype(np.int32)


def unscale(a: Any, b: Any, c: Any, scaled: Any) -> Any:
    """v_div_fmas: the last step of a division; takes back the factor of v_div_scale where the mask says so."""
    value = fma(a, b, c)
    return np.where(scaled, np.ldexp(F64(F32(value)), np.where(exponent(c) > 127, 64, -64)), value)


def scale(x: Any, below: Any, above: Any) -> tuple[Any, Any]:
    """v_div_scale: a factor of 2**64 or 2**-64 for a division whose steps would leave the range of float32."""
    x, below, above = F64(x), F64(below), F64(above)
    larger, smaller = np.ldexp(x, 64), np.ldexp(x, -64)
    up_below, up_above = np.where(x == below, larger, x), np.where(x == above, larger, x)
    tiny, inverse = (np.abs(above / below) < 2.0**-126) & (above != 0), np.abs(1 / below) < 2.0**-126
    far = exponent(above) - exponent(below) >= 96
    rows = [((below == 0) | (above == 0), F64(np.nan), True), (far, up_below, True),
            (exponent(below) == 0, larger, False), (inverse & tiny, up_below, True),
            (inverse, smaller, False), (tiny, up_above, True), (exponent(above) <= 23, larger, False)]  # fmt: skip
    tests, values, flags = zip(*rows, strict=True)
    return np.select(tests, values, x), np.select(tests, flags, False)


def bitop3(table: int, a: Any, b: Any, c: Any) -> Any:
    """Any function of three bits, from its truth table."""
    rows = [n for n in range(8) if table >> n & 1]
    terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in rows]
    return functools.reduce(np.bitwise_or, terms, a ^ a)


def carry(total: Any) -> tuple[Any, Any]:
    """A sum, and where it does not fit."""
    return total, (total > ALL) | (total < 0)


def small(codes: Any, bits: int, mantissa: int, bias: int) -> Any:
    """Floats of a few bits: a sign, an exponent, a mantissa."""
    e, m = codes >> mantissa & (1 << bits - 1 - mantissa) - 1, F64(codes & (1 << mantissa) - 1) / (1 << mantissa)
    value = np.where(e > 0, np.ldexp(1 + m, I64(e) - bias), np.ldexp(m, 1 - bias))
    return F32(np.where(codes >> bits - 1 & 1, -value, value))


def from_fp8(codes: Any) -> Any:
    """Two neighbouring bytes, with a bias of 8 and one NaN, -0: gfx942's."""
    low, high = (np.where(c == 0x80, F32(np.nan), small(c, 8, 3, 8)).view(U32) for c in (codes & 255, codes >> 8))
    return U64(low) | U64(high) << U64(32)


def from_fp4(byte: Any, factor: Any, narrow: Callable) -> Any:
    """The two halves of a byte, times a power of two."""
    low, high = (narrow(small(c & 15, 4, 1, 1) * np.ldexp(1.0, exponent(factor) - 127)) for c in (byte, byte >> 4))
    return low | high << 16


# Sources and result of one kind: operation -> (the kinds that there are, function).
SAME: dict[str, tuple[str, Callable]] = {
    "mov": ("b16 b32 b64", np.positive), "not": ("b32", np.invert), "accvgpr_mov": ("b32", np.positive),
    "accvgpr_read": ("b32", np.positive), "accvgpr_write": ("b32", np.positive),
    "bfrev": ("b32", lambda a: sum((U64(a) >> U64(n) & U64(1)) << U64(31 - n) for n in range(32))),
    "exp": ("f32", lambda a: np.exp2(F64(a))), "log": ("f32", lambda a: np.log2(F64(a))),
    "rcp": ("f32", lambda a: 1 / F64(a)), "rsq": ("f32", lambda a: 1 / np.sqrt(F64(a))),
    "add": ("f16 f32 u16 u32", np.add), "sub": ("f32 u16 u32", np.subtract), "subrev": ("f32 u32", lambda a, b: b - a),
    "mul": ("f32", np.multiply), "max": ("f32 u16 i32 u32", np.fmax), "min": ("f32 i32", np.fmin),
    "max3": ("f32 i32 u32", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3": ("i32", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "med3": ("f32", lambda a, b, c: np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))),
    "and": ("b16 b32", np.bitwise_and), "or": ("b16 b32", np.bitwise_or), "xor": ("b32", np.bitwise_xor),
    "mul_lo": ("u16 u32", np.multiply), "lshlrev": ("b16 b32", lambda a, b: b << (a & 8 * b.itemsize - 1)),
    "lshrrev": ("b16 b32", lambda a, b: b >> (a & 8 * b.itemsize - 1)), "ashrrev": ("i32", lambda a, b: b >> (a & 31)),
    "mul_hi": ("u32 i32", lambda a, b: I64(a) * I64(b) >> 32 if a.dtype.kind == "i" else U64(a) * U64(b) >> U64(32)),
    "fma": ("f32", fma), "fmac": ("f32", fma), "fmamk": ("f32", fma),
    "add3": ("u32", lambda a, b, c: a + b + c), "xad": ("u32", lambda a, b, c: (a ^ b) + c),
    "or3": ("b32", lambda a, b, c: a | b | c), "xor3": ("b32", lambda a, b, c: a ^ b ^ c),
    "and_or": ("b32", lambda a, b, c: a & b | c), "bfi": ("b32", lambda a, b, c: a & b | ~a & c),
    "lshl_or": ("b32", lambda a, b, c: a << (b & 31) | c), "lshl_add": ("u32", lambda a, b, c: (a << (b & 31)) + c),
    "add_lshl": ("u32", lambda a, b, c: a + b << (c & 31)), "bfe": ("u32 i32", extract),
    "alignbit": ("b32", lambda a, b, c: U32((U64(a) << U64(32) | U64(b)) >> U64(c & 31) & U64(ALL))),
    "perm": ("b32", choose_bytes), "div_fixup": ("f32", fix_quotient),
}  # fmt: skip
# Kinds that differ: name -> (kinds of the results: of the sources, function). A mask has a bit for each lane.
MIXED: dict[str, tuple[str, Callable]] = {
    "cvt_f32_u32": ("f32: u32", np.positive), "cvt_f32_f16": ("f32: f16", np.positive),
    "cvt_f16_f32": ("f16: f32", np.positive), "cvt_u32_u16": ("u32: u16", np.positive),
    "cvt_u32_f32": ("u32: f32", lambda a: np.clip(np.nan_to_num(np.trunc(F64(a))), 0, ALL)),
    "cvt_pk_bf16_f32": ("u32: f32 f32", lambda a, b: to_bf16(a) | to_bf16(b) << 16),
    "cvt_pk_f16_f32": ("u32: f32 f32", lambda a, b: to_f16(a) | to_f16(b) << 16),
    "cvt_pk_f32_fp8": ("u64: u16", from_fp8),
    "cvt_scalef32_pk_bf16_fp4": ("u32: u32 f32", lambda a, b: from_fp4(a, b, to_bf16)),
    "cvt_scalef32_pk_f16_fp4": ("u32: u32 f32", lambda a, b: from_fp4(a, b, to_f16)),
    "pack_b32_f16": ("u32: u16 u16", lambda a, b: U64(a) | U64(b) << U64(16)),
    "ldexp_f32": ("f32: f32 i32", lambda a, b: np.ldexp(F64(a), b)),
    "lshlrev_b64": ("b64: b32 b64", lambda a, b: b << U64(a & 63)),
    "lshrrev_b64": ("b64: b32 b64", lambda a, b: b >> U64(a & 63)),
    "lshl_add_u64": ("u64: u64 u32 u64", lambda a, b, c: (a << U64(b & 7)) + c),
    "mul_u32_u24": ("u32: u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mad_u32_u24": ("u32: u32 u32 u32", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "mul_i32_i24": ("i32: i32 i32", lambda a, b: (a << 8 >> 8) * (b << 8 >> 8)),
    "mad_i32_i24": ("i32: i32 i32 i32", lambda a, b, c: (a << 8 >> 8) * (b << 8 >> 8) + c),
    "mad_u64_u32": ("u64 mask: u32 u32 u64", lambda a, b, c: (U64(a) * U64(b) + c, None)),
    "mad_i64_i32": ("u64 mask: i32 i32 u64", lambda a, b, c: (U64(I64(a) * I64(b)) + c, None)),
    "sub_u32 clamp": ("u32: u32 u32", lambda a, b: np.where(a < b, U32(0), a - b)),
    "add_co_u32": ("u32 mask: u32 u32", lambda a, b: carry(I64(a) + b)),
    "addc_co_u32": ("u32 mask: u32 u32 mask", lambda a, b, c: carry(I64(a) + b + c)),
    "sub_co_u32": ("u32 mask: u32 u32", lambda a, b: carry(I64(a) - b)),
    "subrev_co_u32": ("u32 mask: u32 u32", lambda a, b: carry(I64(b) - a)),
    "subb_co_u32": ("u32 mask: u32 u32 mask", lambda a, b, c: carry(I64(a) - b - c)),
    "cndmask_b32": ("b32: b32 b32 mask", lambda a, b, c: np.where(c, b, a)),
    "cndmask_b16": ("b16: b16 b16 mask", lambda a, b, c: np.where(c, b, a)),
    "div_scale_f32": ("f32 mask: f32 f32 f32", scale),
    "div_fmas_f32": ("f32: f32 f32 f32 mask", unscale),
}  # fmt: skip
COMPARE: dict[str, Callable] = {
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "gt": np.greater, "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
}  # fmt: skip
COMPARE |= {f"n{name}": lambda a, b, f=f: ~f(a, b) for name, f in COMPARE.items()}  # so of a NaN they hold
COMPARE |= {"ne": np.not_equal, "u": lambda a, b: np.isnan(a) | np.isnan(b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b))}


def look_up(i: Instruction) -> tuple[str, list[str], list[str], Callable]:
    """Its name without what its encoding adds; the kinds of its results and sources; the function."""
    name = re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", i.name)[2:].replace("_nc_", "_")
    name = name.replace("sub_co_ci", "subb_co").replace("add_co_ci", "addc_co")
    name = name.replace("_num_", "_").replace("mad_co_", "mad_")  # RDNA 4's names
    name += " clamp" * i.take("clamp", False)
    operation, _, kind = name.rpartition("_")
    if name == "cvt_pk_f32_fp8" and i.target.name != "gfx942":
        raise Unknown("another fp8")
    if name in MIXED:
        results, kinds = MIXED[name][0].split(":")
        return name, results.split(), kinds.split(), MIXED[name][1]
    if operation.startswith("fma_mix"):
        return name, [kind], [("f32", "f16")[half] for half in i.halves("op_sel_hi", 0)], fma
    if operation == "bitop3":
        return name, [kind], [kind] * 3, functools.partial(bitop3, i.take("bitop3"))
    if operation[:3] == "cmp":
        return name, ["mask"], [kind] * 2, COMPARE[operation.split("_")[1]]
    kinds, f = SAME.get(operation, ("", np.add))
    if kind not in kinds.split():
        raise Unknown(i.name)
    return name, [kind], [kind] * (getattr(f, "nin", 0) or f.__code__.co_argcount), f


def parts(i: Instruction, name: str) -> list[str]:
    """Which part of a register each source is: what SDWA says, a half for fma_mix, a byte for fp4."""
    if name.startswith("fma_mix"):
        return [("DWORD", "WORD_1")[high] for high in i.halves("op_sel", 0)]
    if name.endswith("fp4"):
        low, high, _ = i.halves("op_sel", 0)
        return [f"BYTE_{low + 2 * high}", "DWORD"]
    return [i.take("src0_sel", "DWORD"), i.take("src1_sel", "DWORD"), "DWORD", "DWORD"]


def build(i: Instruction) -> Step | None:
    if not i.name.startswith("v_"):
        return None
    if len(halves := [operation(half) for half in halved(i)]) == 1:
        compute, put = halves[0]
        return lambda w: put(w, compute(w))
    (first, put_first), (second, put_second) = halves

    def both(w: Wave) -> None:
        """They read before one of them writes."""
        a, b = first(w), second(w)
        put_first(w, a)
        put_second(w, b)

    return both


def operation(i: Instruction) -> tuple[Read, Write]:
    """What is computed, and where it goes. Some operands go without saying."""
    name, results, kinds, f = look_up(i)
    operands = ["exec_lo"] * name.startswith("cmpx") + i.operands + i.operands[:1] * name.startswith("fmac")
    operands[0] += {"fma_mixlo_f16": ".l", "fma_mixhi_f16": ".h"}.get(name, "")
    missing = len(results) + len(kinds) - len(operands)
    if missing and (missing, kinds[-1]) != (1, "mask"):
        raise Unknown(f"{len(operands)} operands")
    sources = operands[len(results) :] + ["vcc"] * missing
    get = [read(text, kind, part) for text, kind, part in zip(sources, kinds, parts(i, name), strict=False)]
    to = i.take("dst_sel", "DWORD")
    puts = [write(text, kind, i.target.is_cdna, to) for text, kind in zip(operands, results, strict=False)]
    if i.take("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise Unknown("a part of the result that keeps the others")
    for pattern in PATTERNS.keys() & i.modifiers:
        get[0], puts[0] = dpp(i, pattern, get[0], results[0])

    def put_all(w: Wave, values: tuple) -> None:
        for put, value in zip(puts, values, strict=True):
            put(w, value)

    return lambda w: f(*[source(w) for source in get]), put_all if len(puts) > 1 else puts[0]
