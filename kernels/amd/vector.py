"""One value for each lane. The suffix of a name says the kind of its numbers; the tables say what is done with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .crosslane import dpp_lanes
from .machine import ALL, UNSET, Step, Wave, to_mask
from .operands import Read, Write, read, set_scalar, vector, write
from .text import Instruction, Unknown

F32, F64, I64, U32, U64 = np.float32, np.float64, np.int64, np.uint32, np.uint64


def u64(x: Any) -> Any:
    return np.asarray(x).astype(U64)


def i64(x: Any) -> Any:
    return np.asarray(x).astype(I64)


def f64(x: Any) -> Any:
    return np.asarray(x).astype(F64)


def fma(a: Any, b: Any, c: Any) -> Any:
    """Rounded once, when it is written."""
    return f64(a) * b + c


def to_f16(x: Any) -> Any:
    return np.asarray(x, np.float16).view(np.uint16).astype(U32)


def to_bf16(x: Any) -> Any:
    """The upper half of a float32, rounded to nearest even."""
    u = np.asarray(x, F32).view(U32)
    return np.where(np.isnan(x), u >> 16 | 0x40, u + 0x7FFF + (u >> 16 & 1) >> 16)


def extract(x: Any, at: Any, size: Any) -> Any:
    """The `size` bits from `at` on; a signed number's highest one is its sign."""
    n = i64(size & 31)
    part = i64(x) >> i64(at & 31) & (1 << n) - 1
    return np.where(n > 0, part - ((part >> np.maximum(n - 1, 0) & 1) << n), 0) if x.dtype.kind == "i" else part


def choose_bytes(high: Any, low: Any, selector: Any) -> Any:
    """v_perm: each byte of the selector names a byte of the eight, a byte full of a sign, 0 or 255."""
    data, out = u64(low) | u64(high) << U64(32), U64(0)
    for n in range(4):
        s = u64(selector) >> U64(8 * n) & U64(255)
        byte = data >> np.minimum(s, U64(7)) * U64(8) & U64(255)
        sign = (data >> (s & U64(3)) * U64(16) + U64(15) & U64(1)) * U64(255)
        out = out | np.select([s < 8, s < 12, s == 12], [byte, sign, U64(0)], U64(255)) << U64(8 * n)
    return out


def fix_quotient(quotient: Any, below: Any, above: Any) -> Any:
    """v_div_fixup: its sign, and the cases of a division that the steps before cannot do."""
    special = (below == 0) | (above == 0) | ~np.isfinite(below) | ~np.isfinite(above)
    return np.where(special, above / below, np.copysign(quotient, above) * np.copysign(F32(1), below))


def exponent(x: Any) -> Any:
    return (np.asarray(x, F32).view(U32) >> 23 & 255).astype(np.int32)


def unscale(a: Any, b: Any, c: Any, scaled: Any) -> Any:
    """v_div_fmas: the last step of a division; takes back the factor of v_div_scale where the mask says so."""
    value = fma(a, b, c)
    return np.where(scaled, np.ldexp(f64(F32(value)), np.where(exponent(c) > 127, 64, -64)), value)


def bitop3(table: int) -> Callable:
    """Any function of three bits, from its truth table."""
    names = [n for n in range(8) if table >> n & 1]
    term = lambda n, a, b, c: (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)  # noqa: E731
    return lambda a, b, c: functools.reduce(lambda out, n: out | term(n, a, b, c), names, a ^ a)


# Sources and result of one kind: operation -> (the kinds that there are, function).
SAME: dict[str, tuple[str, Callable]] = {
    "mov": ("b16 b32 b64", lambda a: a), "not": ("b32", np.invert), "accvgpr_mov": ("b32", lambda a: a),
    "accvgpr_read": ("b32", lambda a: a), "accvgpr_write": ("b32", lambda a: a),
    "bfrev": ("b32", lambda a: sum((u64(a) >> U64(n) & U64(1)) << U64(31 - n) for n in range(32))),
    "exp": ("f32", lambda a: np.exp2(f64(a))), "log": ("f32", lambda a: np.log2(f64(a))),
    "rcp": ("f32", lambda a: 1 / f64(a)), "rsq": ("f32", lambda a: 1 / np.sqrt(f64(a))),
    "add": ("f16 f32 u16 u32", np.add), "sub": ("f32 u16 u32", np.subtract), "subrev": ("f32 u32", lambda a, b: b - a),
    "mul": ("f32", np.multiply), "max": ("f32 u16 i32 u32", np.fmax), "min": ("f32 i32 u32", np.fmin),
    "max3": ("f32 i32", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3": ("i32", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "med3": ("f32", lambda a, b, c: np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))),
    "and": ("b16 b32", np.bitwise_and), "or": ("b16 b32", np.bitwise_or), "xor": ("b32", np.bitwise_xor),
    "mul_lo": ("u16 u32", np.multiply), "lshlrev": ("b16 b32", lambda a, b: b << (a & 8 * b.itemsize - 1)),
    "lshrrev": ("b16 b32", lambda a, b: b >> (a & 8 * b.itemsize - 1)), "ashrrev": ("i32", lambda a, b: b >> (a & 31)),
    "mul_hi": ("u32 i32", lambda a, b: i64(a) * i64(b) >> 32 if a.dtype.kind == "i" else u64(a) * u64(b) >> U64(32)),
    "fma": ("f32", fma), "fmac": ("f32", fma), "fmamk": ("f32", fma),
    "add3": ("u32", lambda a, b, c: a + b + c), "xad": ("u32", lambda a, b, c: (a ^ b) + c),
    "or3": ("b32", lambda a, b, c: a | b | c), "xor3": ("b32", lambda a, b, c: a ^ b ^ c),
    "and_or": ("b32", lambda a, b, c: a & b | c), "bfi": ("b32", lambda a, b, c: a & b | ~a & c),
    "lshl_or": ("b32", lambda a, b, c: a << (b & 31) | c), "lshl_add": ("u32", lambda a, b, c: (a << (b & 31)) + c),
    "add_lshl": ("u32", lambda a, b, c: a + b << (c & 31)), "bfe": ("u32 i32", extract),
    "perm": ("b32", choose_bytes), "div_fixup": ("f32", fix_quotient),
}  # fmt: skip
# Kinds that differ: name -> (kinds of result and sources, function).
MIXED: dict[str, tuple[str, Callable]] = {
    "cvt_f32_u32": ("f32 u32", lambda a: a), "cvt_f32_f16": ("f32 f16", lambda a: a),
    "cvt_f16_f32": ("f16 f32", lambda a: a), "cvt_u32_u16": ("u32 u16", lambda a: a),
    "cvt_u32_f32": ("u32 f32", lambda a: np.clip(np.nan_to_num(np.trunc(f64(a))), 0, ALL)),
    "cvt_pk_bf16_f32": ("u32 f32 f32", lambda a, b: to_bf16(a) | to_bf16(b) << 16),
    "cvt_pk_f16_f32": ("u32 f32 f32", lambda a, b: to_f16(a) | to_f16(b) << 16),
    "pack_b32_f16": ("u32 u16 u16", lambda a, b: u64(a) | u64(b) << U64(16)),
    "ldexp_f32": ("f32 f32 i32", lambda a, b: np.ldexp(f64(a), b)),
    "lshlrev_b64": ("b64 b32 b64", lambda a, b: b << u64(a & 63)),
    "lshrrev_b64": ("b64 b32 b64", lambda a, b: b >> u64(a & 63)),
    "lshl_add_u64": ("u64 u64 u32 u64", lambda a, b, c: (a << u64(b & 7)) + c),
    "mul_u32_u24": ("u32 u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mad_u32_u24": ("u32 u32 u32 u32", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    "mul_i32_i24": ("i32 i32 i32", lambda a, b: (a << 8 >> 8) * (b << 8 >> 8)),
    "mad_i32_i24": ("i32 i32 i32 i32", lambda a, b, c: (a << 8 >> 8) * (b << 8 >> 8) + c),
    "mad_u64_u32": ("u64 u32 u32 u64", lambda a, b, c: u64(a) * u64(b) + c),
    "mad_i64_i32": ("u64 i32 i32 u64", lambda a, b, c: (i64(a) * i64(b)).view(U64) + c),
    "cndmask_b32": ("b32 b32 b32 mask", lambda a, b, c: np.where(c, b, a)),
    "cndmask_b16": ("b16 b16 b16 mask", lambda a, b, c: np.where(c, b, a)),
    "div_fmas_f32": ("f32 f32 f32 f32 mask", unscale),
}  # fmt: skip
CLAMPED = {"sub_u32": lambda a, b: np.where(a < b, U32(0), a - b),
           "add_u32": lambda a, b: np.minimum(u64(a) + u64(b), U64(ALL))}  # fmt: skip
COMPARE: dict[str, Callable] = {
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "neq": np.not_equal, "nge": lambda a, b: ~(a >= b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip


def look_up(i: Instruction, name: str) -> tuple[list[str], Callable]:
    """Kinds of result and sources, and the function."""
    operation, _, kind = name.rpartition("_")
    if operation == "bitop3":
        return [kind] * 4, bitop3(i.take("bitop3"))
    if name in MIXED:
        return MIXED[name][0].split(), MIXED[name][1]
    kinds, f = SAME.get(operation, ("", np.add))
    if kind not in kinds.split():
        raise Unknown(i.name)
    f = CLAMPED[name] if i.take("clamp", False) else f
    return [kind] * (1 + (getattr(f, "nin", 0) or f.__code__.co_argcount)), f


def build(i: Instruction) -> Step | None:
    if not i.name.startswith("v_"):
        return None
    name = plain(i.name)
    if name.startswith(("cmp_", "cmpx_")):
        return build_compare(i, *name.split("_"))
    if found := re.fullmatch(r"(add|sub|subrev)(c|b)?_co(_ci)?_u32", name):
        return build_carry(i, found[1])
    if name in SPECIAL:
        return SPECIAL[name](i)
    parts = [operation(half) for half in i.halved()]
    if len(parts) == 1:
        compute, put = parts[0]
        return lambda w: put(w, compute(w))
    (first, put_first), (second, put_second) = parts

    def dual(w: Wave) -> None:
        """VOPD: both halves read before one of them writes."""
        a, b = first(w), np.copy(second(w))
        put_first(w, a)
        put_second(w, b)

    return dual


def plain(name: str) -> str:
    return re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", name)[2:].replace("_nc_", "_")


def sources(i: Instruction, kinds: list[str], texts: list[str]) -> list[Read]:
    """SDWA names a part of each."""
    parts = [i.take("src0_sel", "DWORD"), i.take("src1_sel", "DWORD"), *["DWORD"] * 2]
    texts = [*texts, "vcc"] if len(texts) < len(kinds) and kinds[-1] == "mask" else texts
    if len(kinds) != len(texts):
        raise Unknown(f"{len(texts)} sources")
    return [read(text, kind, part) for text, kind, part in zip(texts, kinds, parts, strict=False)]


def operation(i: Instruction) -> tuple[Read, Write]:
    """What is computed, and where it goes."""
    name = plain(i.name)
    kinds, f = look_up(i, name)
    get = sources(i, kinds[1:], i.operands[1:] + [i.operands[0]] * name.startswith("fmac"))
    put = write(i.operands[0], kinds[0], i.target.is_cdna, i.take("dst_sel", "DWORD"))
    if i.take("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise Unknown("a part of the result that keeps the others")
    if moved := dpp_lanes(i):
        return build_dpp(i, f, get, kinds, *moved)
    if len(get) == 1:
        return (lambda w: f(get[0](w))), put
    if len(get) == 2:
        return (lambda w: f(get[0](w), get[1](w))), put
    return (lambda w: f(*[source(w) for source in get])), put


def build_dpp(
    i: Instruction, f: Callable, get: list[Read], kinds: list[str], source: Any, exists: Any, written: Any
) -> tuple[Read, Write]:
    """The first source comes from another lane; where there is none, it is 0 or the lane is not written."""
    zero, inactive, n = bool(i.take("bound_ctrl")), bool(i.take("fi")), vector(i.operands[0]).first
    if not kinds[0].endswith("32"):
        raise Unknown("DPP on halves")

    def compute(w: Wave) -> Any:
        x = get[0](w)[source]
        return f(np.where(exists & (inactive | w.active[source]), x, x.dtype.type(0)), *[other(w) for other in get[1:]])

    def put(w: Wave, x: Any) -> None:
        w.put(kinds[0], n, x, w.active & written & (zero | exists & (inactive | w.active[source])))

    return compute, put


def build_compare(i: Instruction, op: str, test: str, kind: str) -> Step:
    a, b = sources(i, [kind] * 2, i.operands[-2:])
    put = set_scalar(i.operands[0], i.target.lanes == 64) if len(i.operands) > 2 else lambda w, value: None
    f = COMPARE[test]

    def compare(w: Wave) -> None:
        value = to_mask(np.broadcast_to(f(a(w), b(w)), w.lanes) & w.active)
        put(w, value)
        if op == "cmpx":
            w.set_mask(value)

    return compare


def build_carry(i: Instruction, op: str) -> Step:
    """Sums and differences with a carry for each lane in a scalar register."""
    n, wide = vector(i.operands[0]).first, i.target.lanes == 64
    a, b, carry = read(i.operands[2], "u32"), read(i.operands[3], "u32"), set_scalar(i.operands[1], wide)
    given = read(i.operands[4], "mask") if len(i.operands) > 4 else lambda w: np.zeros(w.lanes, bool)

    def run(w: Wave) -> None:
        x, y, c = i64(a(w)), i64(b(w)), given(w).astype(I64)
        value = {"add": x + y + c, "sub": x - y - c, "subrev": y - x - c}[op]
        carry(w, to_mask(((value > ALL) | (value < 0)) & w.active))
        w.put("u32", n, value)

    return run


def build_mad(i: Instruction) -> Step:
    """v_mad_u64_u32, v_mad_i64_i32. Their carry, which nobody has read yet, is not computed."""
    carry = set_scalar(i.operands.pop(1))
    compute, put = operation(i)

    def mad(w: Wave) -> None:
        put(w, compute(w))
        carry(w, UNSET)

    return mad


def build_div_scale(i: Instruction) -> Step:
    """A factor of 2**64 or 2**-64 for a division whose steps would leave the range of float32."""
    put, flag = write(i.operands[0], "f32", True), set_scalar(i.operands[1], i.target.lanes == 64)
    get = [read(text, "f32") for text in i.operands[2:]]

    def run(w: Wave) -> None:
        x, below, above = (np.broadcast_to(f64(f(w)), w.lanes) for f in get)
        larger, smaller = np.ldexp(x, 64), np.ldexp(x, -64)
        up_below, up_above = np.where(x == below, larger, x), np.where(x == above, larger, x)
        tiny, inverse = (np.abs(above / below) < 2.0**-126) & (above != 0), np.abs(1 / below) < 2.0**-126
        far = exponent(above) - exponent(below) >= 96
        rows = [((below == 0) | (above == 0), F64(np.nan), True), (far, up_below, True),
                (exponent(below) == 0, larger, False), (inverse & tiny, up_below, True),
                (inverse, smaller, False), (tiny, up_above, True),
                (exponent(above) <= 23, larger, False)]  # fmt: skip
        tests, values, flags = zip(*rows, strict=True)
        flag(w, to_mask(np.select(tests, flags, False) & w.active))
        put(w, np.select(tests, values, x))

    return run


def small(codes: Any, bits: int, mantissa: int, bias: int) -> Any:
    """Floats of a few bits: a sign, an exponent, a mantissa."""
    e, m = codes >> mantissa & (1 << bits - 1 - mantissa) - 1, f64(codes & (1 << mantissa) - 1) / (1 << mantissa)
    value = np.where(e > 0, np.ldexp(1 + m, i64(e) - bias), np.ldexp(m, 1 - bias))
    return np.where(codes >> bits - 1 & 1, -value, value)


def build_fp8(i: Instruction) -> Step:
    """v_cvt_pk_f32_fp8: two neighbouring bytes. Until gfx942 with a bias of 8 and one NaN, -0; from then on OCP's."""
    n, get = vector(i.operands[0]).first, sources(i, ["u32"], i.operands[1:])[0]
    bias, nan = (7, 0x7F) if i.target.name == "gfx950" else (8, 0x80)

    def run(w: Wave) -> None:
        for k, codes in enumerate((get(w) & 255, get(w) >> 8 & 255)):
            is_nan = codes & 0x7F == nan if nan == 0x7F else codes == nan
            w.put("f32", n + k, np.where(is_nan, np.nan, small(codes, 8, 3, bias)))

    return run


def build_fp4(i: Instruction) -> Step:
    """v_cvt_scalef32_pk_bf16_fp4 and _f16_: the two halves of a byte, times a power of two."""
    n, source, scale = vector(i.operands[0]).first, read(i.operands[1], "u32"), read(i.operands[2], "f32")
    (low, high, _), narrow = i.halves("op_sel", 0), to_bf16 if "bf16" in i.name else to_f16

    def run(w: Wave) -> None:
        byte, factor = source(w) >> 8 * (low + 2 * high), np.ldexp(1.0, exponent(scale(w)) - 127)
        first, second = (narrow(F32(small(code & 15, 4, 1, 1) * factor)) for code in (byte, byte >> 4))
        w.put("u32", n, first | second << 16)

    return run


SPECIAL = {"cvt_pk_f32_fp8": build_fp8, "cvt_scalef32_pk_bf16_fp4": build_fp4, "cvt_scalef32_pk_f16_fp4": build_fp4,
           "mad_u64_u32": build_mad, "mad_i64_i32": build_mad, "div_scale_f32": build_div_scale}  # fmt: skip
