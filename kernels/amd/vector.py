"""One value for each lane. The suffix of a name says the kind of its numbers; the tables say what is done with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .crosslane import dpp_lanes
from .machine import ALL, UNSET, VCC, Step, Wave, to_lanes, to_mask
from .operands import Read, Write, read, read_part, scalar, set_scalar, to_register, vector, write
from .text import Instruction, Unknown

F32, F64, I64, U32, U64 = np.float32, np.float64, np.int64, np.uint32, np.uint64


def fma(a: Any, b: Any, c: Any) -> Any:
    """Rounded once, when it is written."""
    return np.asarray(a, F64) * b + c


def u64(x: Any) -> Any:
    return np.asarray(x).astype(U64)


def i64(x: Any) -> Any:
    return np.asarray(x).astype(I64)



def to_bf16(x: Any) -> Any:
    """The upper half of a float32, rounded to nearest even."""
    u = np.asarray(x, F32).view(U32)
    return np.where(np.isnan(x), u >> 16 | 0x40, u + 0x7FFF + (u >> 16 & 1) >> 16)


def to_f16(x: Any) -> Any:
    return np.asarray(x, np.float16).view(np.uint16).astype(U32)


def to_whole(x: Any, low: int, high: int) -> Any:
    return np.clip(np.nan_to_num(np.trunc(x.astype(F64))), low, high)


def extract(x: Any, at: Any, size: Any) -> Any:
    """The `size` bits from `at` on."""
    return u64(x) >> u64(at & 31) & (U64(1) << u64(size & 31)) - U64(1)


def extract_signed(x: Any, at: Any, size: Any) -> Any:
    n, part = i64(size & 31), extract(x, at, size).astype(I64)
    return np.where(n > 0, part - ((part >> np.maximum(n - 1, 0) & 1) << n), 0)


def choose_bytes(high: Any, low: Any, selector: Any) -> Any:
    """v_perm: each byte of the selector names a byte of the eight, a byte full of a sign, 0 or 255."""
    data, out = u64(low) | u64(high) << U64(32), U64(0)
    for n in range(4):
        s = u64(selector) >> U64(8 * n) & U64(255)
        byte = data >> np.minimum(s, 7) * U64(8) & U64(255)
        sign = (data >> (s & U64(3)) * U64(16) + U64(15) & U64(1)) * U64(255)
        out = out | np.where(s < 8, byte, np.where(s < 12, sign, np.where(s == 12, U64(0), U64(255)))) << U64(8 * n)
    return out


def reverse(x: Any) -> Any:
    for n, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0xFFFF)):
        x = x >> n & U32(mask) | (x & U32(mask)) << n
    return x


def fix_quotient(quotient: Any, below: Any, above: Any) -> Any:
    """v_div_fixup: the cases of a division that the steps before cannot do."""
    a, b, infinity = np.abs(above), np.abs(below), F32(np.inf)
    out = np.select([(b == infinity) | (a == 0), (b == 0) | (a == infinity)], [F32(0), infinity], np.abs(quotient))
    nan = np.isnan(a) | np.isnan(b) | (a == 0) & (b == 0) | (a == infinity) & (b == infinity)
    return np.where(nan, F32(np.nan), np.where(np.signbit(below) ^ np.signbit(above), -out, out))


def low24(x: Any) -> Any:
    return x & U32(0xFFFFFF)


def signed24(x: Any) -> Any:
    return i64(x << 8 >> 8)


# Sources and result of one kind: operation -> (the kinds that there are, function).
SAME: dict[str, tuple[str, Callable]] = {
    "mov": ("b16 b32 b64", lambda a: a), "not": ("b32", np.invert), "bfrev": ("b32", reverse),
    "accvgpr_read": ("b32", lambda a: a), "accvgpr_write": ("b32", lambda a: a), "accvgpr_mov": ("b32", lambda a: a),
    "exp": ("f32", lambda a: np.exp2(a.astype(F64))), "log": ("f32", lambda a: np.log2(a.astype(F64))),
    "rcp": ("f32", lambda a: 1 / a.astype(F64)), "rsq": ("f32", lambda a: 1 / np.sqrt(a.astype(F64))),
    "sqrt": ("f32", np.sqrt), "rndne": ("f32", np.rint), "floor": ("f32", np.floor), "ceil": ("f32", np.ceil),
    "trunc": ("f32", np.trunc), "fract": ("f32", lambda a: a - np.floor(a)),
    "add": ("f16 f32 u16 u32", np.add), "sub": ("f16 f32 u16 u32", np.subtract), "mul": ("f16 f32", np.multiply),
    "subrev": ("f16 f32 u16 u32", lambda a, b: b - a), "max": ("f16 f32", np.fmax), "min": ("f16 f32", np.fmin),
    "and": ("b16 b32", np.bitwise_and), "or": ("b16 b32", np.bitwise_or), "xor": ("b16 b32", np.bitwise_xor),
    "xnor": ("b32", lambda a, b: ~(a ^ b)), "mul_lo": ("u16 u32", np.multiply),
    "lshlrev": ("b16 b32", lambda a, b: b << (a & 8 * b.itemsize - 1)),
    "lshrrev": ("b16 b32", lambda a, b: b >> (a & 8 * b.itemsize - 1)),
    "ashrrev": ("i16 i32", lambda a, b: b >> (a & 8 * b.itemsize - 1)),
    "mul_hi": ("u32 i32", lambda a, b: i64(a) * i64(b) >> 32 if a.dtype.kind == "i" else u64(a) * u64(b) >> U64(32)),
    "fma": ("f16 f32", fma), "fmac": ("f16 f32", fma), "fmamk": ("f32", fma), "fmaak": ("f32", fma),
    "add3": ("u32", lambda a, b, c: a + b + c), "xad": ("u32", lambda a, b, c: (a ^ b) + c),
    "or3": ("b32", lambda a, b, c: a | b | c), "xor3": ("b32", lambda a, b, c: a ^ b ^ c),
    "and_or": ("b32", lambda a, b, c: a & b | c), "bfi": ("b32", lambda a, b, c: a & b | ~a & c),
    "lshl_or": ("b32", lambda a, b, c: a << (b & 31) | c), "lshl_add": ("u32", lambda a, b, c: (a << (b & 31)) + c),
    "add_lshl": ("u32", lambda a, b, c: a + b << (c & 31)), "bfe": ("u32", extract),
    "alignbit": ("b32", lambda a, b, c: (u64(a) << U64(32) | u64(b)) >> u64(c & 31)),
    "perm": ("b32", choose_bytes), "div_fixup": ("f32", fix_quotient),
    "med3": ("f32 i32 u32", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
}  # fmt: skip
WHOLE = {"max": np.maximum, "min": np.minimum}
# Kinds that differ: name -> (kinds of result and sources, function).
MIXED: dict[str, tuple[str, Callable]] = {
    "cvt_f32_i32": ("f32 i32", lambda a: a), "cvt_f32_u32": ("f32 u32", lambda a: a),
    "cvt_f32_f16": ("f32 f16", lambda a: a), "cvt_f16_f32": ("f16 f32", lambda a: a),
    "cvt_f32_bf16": ("f32 u16", lambda a: (a.astype(U32) << 16).view(F32)), "cvt_u32_u16": ("u32 u16", lambda a: a),
    "cvt_i32_i16": ("i32 i16", lambda a: a), "cvt_i32_f32": ("i32 f32", lambda a: to_whole(a, -(2**31), 2**31 - 1)),
    "cvt_u32_f32": ("u32 f32", lambda a: to_whole(a, 0, ALL)),
    "cvt_pk_bf16_f32": ("u32 f32 f32", lambda a, b: to_bf16(a) | to_bf16(b) << 16),
    "cvt_pk_f16_f32": ("u32 f32 f32", lambda a, b: to_f16(a) | to_f16(b) << 16),
    "pack_b32_f16": ("u32 u16 u16", lambda a, b: u64(a) | u64(b) << U64(16)),
    "ldexp_f32": ("f32 f32 i32", lambda a, b: np.ldexp(a.astype(F64), b)),
    "lshlrev_b64": ("b64 b32 b64", lambda a, b: b << u64(a & 63)),
    "lshrrev_b64": ("b64 b32 b64", lambda a, b: b >> u64(a & 63)),
    "ashrrev_i64": ("i64 u32 i64", lambda a, b: b >> i64(a & 63)),
    "lshl_add_u64": ("u64 u64 u32 u64", lambda a, b, c: (a << u64(b & 7)) + c),
    "mul_u32_u24": ("u32 u32 u32", lambda a, b: low24(a) * low24(b)),
    "mul_i32_i24": ("i32 i32 i32", lambda a, b: signed24(a) * signed24(b)),
    "mad_u32_u24": ("u32 u32 u32 u32", lambda a, b, c: low24(a) * low24(b) + c),
    "mad_i32_i24": ("i32 i32 i32 i32", lambda a, b, c: signed24(a) * signed24(b) + c),
    "bfe_i32": ("i32 u32 u32 u32", extract_signed),
    "bcnt_u32_b32": ("u32 u32 u32", lambda a, b: sum((a >> n & 1 for n in range(32)), b)),
}  # fmt: skip
for n in range(4):
    MIXED[f"cvt_f32_ubyte{n}"] = ("f32 u32", lambda a, n=n: a >> 8 * n & 255)
COMPARE: dict[str, Callable] = {
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "neq": np.not_equal, "lg": lambda a, b: (a < b) | (a > b), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "u": lambda a, b: np.isnan(a) | np.isnan(b), "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b), "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
}  # fmt: skip


def bitop3(table: int) -> Callable:
    """Any function of three bits, from its truth table."""

    def run(a: Any, b: Any, c: Any) -> Any:
        terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in range(8) if table >> n & 1]
        return np.bitwise_or.reduce(np.broadcast_arrays(*terms)) if terms else a ^ a

    return run


def look_up(i: Instruction, name: str) -> tuple[list[str], Callable] | None:
    """Kinds of result and sources, and the function."""
    if name in MIXED:
        return MIXED[name][0].split(), MIXED[name][1]
    operation, _, kind = name.rpartition("_")
    f = bitop3(i.take("bitop3")) if operation == "bitop3" else None
    triple = operation if operation in ("max3", "min3") else ""
    if (operation[:3] if triple else operation) in WHOLE and kind in ("i32", "u32", "i16", "u16", "f16", "f32"):
        f = (SAME if kind[0] == "f" else {key: (kind, g) for key, g in WHOLE.items()})[operation[:3]][1]
        return ([kind] * 4, lambda a, b, c: f(f(a, b), c)) if triple else ([kind] * 3, f)
    if f is None and (operation not in SAME or kind not in SAME[operation][0].split()):
        return None
    f = f or SAME[operation][1]
    count = 3 if operation == "bitop3" else getattr(f, "nin", 0) or f.__code__.co_argcount
    return [kind] * (1 + count), f


def build(i: Instruction) -> Step | None:
    if not i.name.startswith("v_"):
        return None
    if " :: " in i.text:
        return build_dual(i)
    if special := build_special(i, plain(i.name)):
        return special
    if not (parts := operation(i)):
        return None
    compute, put = parts
    return lambda w: put(w, compute(w))


def plain(name: str) -> str:
    return re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", name)[2:].replace("_nc_", "_")


def build_dual(i: Instruction) -> Step:
    """VOPD: both halves read before one of them writes."""
    halves = [Instruction(half.replace("v_dual_", "v_"), i.where, i.target) for half in i.text.split(" :: ")]
    (first, put_first), (second, put_second) = (operation(half) or missing(half) for half in halves)
    i.modifiers.clear()

    def run(w: Wave) -> None:
        a, b = first(w), np.copy(second(w))
        put_first(w, a)
        put_second(w, b)

    return run


def missing(i: Instruction) -> Any:
    raise Unknown(i.name)


def operation(i: Instruction) -> tuple[Read, Write] | None:
    """What is computed, and where it goes."""
    name = plain(i.name)
    if name in ("cndmask_b32", "cndmask_b16"):
        kinds, f = [name[-3:]] * 3, None
        flag = scalar(i.operands[3] if len(i.operands) > 3 else "vcc", i.target.lanes == 64)
    elif found := look_up(i, name):
        kinds, f = found
    else:
        return None
    texts = i.operands[1:3] if f is None else i.operands[1:] + [i.operands[0]] * name.startswith("fmac")
    if len(texts) != len(kinds) - 1:
        raise Unknown(f"{len(texts)} sources")
    parts = [i.take(f"src{n}_sel", "DWORD") for n in range(2)] + ["DWORD"]
    if i.take("dst_sel", "DWORD") != "DWORD" or i.take("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise Unknown("a part of the result")
    get = [read_part(text, kind, part) for text, kind, part in zip(texts, kinds[1:], parts)]  # noqa: B905
    put = write(i.operands[0], kinds[0], i.target.is_cdna)
    if i.take("clamp", False):
        f = {"sub_u32": lambda a, b: np.where(a < b, U32(0), a - b),
             "add_u32": lambda a, b: np.minimum(u64(a) + u64(b), U64(ALL))}.get(name)  # fmt: skip
        if f is None:
            raise Unknown("clamp")
    if f is None:
        a, b = get
        return (lambda w: np.where(to_lanes(flag(w), w.lanes), b(w), a(w))), put
    if moved := dpp_lanes(i):
        return build_dpp(i, f, get, kinds, moved)
    if len(get) == 1:
        (a,) = get
        return (lambda w: f(a(w))), put
    if len(get) == 2:
        a, b = get
        return (lambda w: f(a(w), b(w))), put
    a, b, c = get
    return (lambda w: f(a(w), b(w), c(w))), put


def build_dpp(i: Instruction, f: Callable, get: list[Read], kinds: list[str], moved: Any) -> tuple[Read, Write]:
    """The first source comes from another lane; where there is none, it is 0 or the lane is not written."""
    source, exists, written = moved
    zero, inactive, (first, *rest) = bool(i.take("bound_ctrl")), bool(i.take("fi")), get
    if not kinds[0].endswith("32"):
        raise Unknown("DPP on halves")
    n = vector(i.operands[0]).first

    def compute(w: Wave) -> Any:
        valid = exists if inactive else exists & w.active[source]
        x = first(w)[source]
        return f(np.where(valid, x, x.dtype.type(0)), *[other(w) for other in rest])

    def put(w: Wave, x: Any) -> None:
        valid = w.active & written
        w.put(kinds[0], n, x, valid if zero else valid & (exists if inactive else exists & w.active[source]))

    return compute, put


def build_special(i: Instruction, name: str) -> Step | None:
    if name.startswith(("cmp_", "cmpx_")):
        return build_compare(i, *name.split("_"))
    if found := re.fullmatch(r"(add|sub|subrev|addc|subb|subbrev)_co(_ci)?_u32", name.replace("c_co", "_co_ci")):
        return build_carry(i, found[1])
    if name in ("mad_u64_u32", "mad_i64_i32"):
        to, kind, wide = write(i.operands[0], "u64", True), name[-3:], u64 if name[-3] == "u" else i64
        carry, (a, b, c) = set_scalar(i.operands[1], i.target.lanes == 64), (i.operands[2:])
        x, y, z = read(a, kind), read(b, kind), read(c, "u64")

        def mad(w: Wave) -> None:
            to(w, (wide(x(w)) * wide(y(w))).view(U64) + z(w))
            carry(w, UNSET)  # nobody has read it yet

        return mad
    if name == "div_scale_f32":
        return build_div_scale(i)
    if name == "div_fmas_f32":
        return build_div_fmas(i)
    return None


def build_compare(i: Instruction, op: str, test: str, kind: str) -> Step | None:
    if test not in COMPARE:
        return None
    wide = i.target.lanes == 64
    parts = [i.take(f"src{n}_sel", "DWORD") for n in range(2)]
    a, b = (read_part(text, kind, part) for text, part in zip(i.operands[-2:], parts, strict=True))
    put = set_scalar(i.operands[0], wide) if len(i.operands) > 2 else None
    f = COMPARE[test]

    def compare(w: Wave) -> None:
        value = to_mask(np.broadcast_to(f(a(w), b(w)), w.lanes) & w.active)
        if put:
            put(w, value)
        if op == "cmpx":
            w.set_mask(value)

    return compare


def build_carry(i: Instruction, op: str) -> Step:
    """Sums and differences with a carry for each lane in a scalar register."""
    wide = i.target.lanes == 64
    n, carry = vector(i.operands[0]).first, set_scalar(i.operands[1], wide)
    a, b = read(i.operands[2], "u32"), read(i.operands[3], "u32")
    given = scalar(i.operands[4], wide) if len(i.operands) > 4 else None

    def run(w: Wave) -> None:
        x, y = i64(a(w)), i64(b(w))
        c = to_lanes(given(w), w.lanes).astype(I64) if given else 0
        value = np.broadcast_to(x + y + c if op.startswith("add") else y - x - c if "rev" in op else x - y - c, w.lanes)
        carry(w, to_mask(((value > ALL) | (value < 0)) & w.active))
        w.put("u32", n, value)

    return run


def exponent(x: Any) -> Any:
    return (np.asarray(x, F32).view(U32) >> 23 & 255).astype(np.int32)


def build_div_scale(i: Instruction) -> Step:
    """A factor of 2**64 or 2**-64 for a division whose steps would leave the range of float32."""
    put, flag = write(i.operands[0], "f32", True), set_scalar(i.operands[1], i.target.lanes == 64)
    get = [read(text, "f32") for text in i.operands[2:]]

    def run(w: Wave) -> None:
        x, below, above = (np.broadcast_to(f(w), w.lanes).astype(F64) for f in get)
        larger, smaller = np.ldexp(x, 64), np.ldexp(x, -64)
        one = np.where(x == below, larger, x)
        tiny = (np.abs(above / below) < 2.0**-126) & (above != 0)
        inverse = np.abs(1 / below) < 2.0**-126
        e = exponent(above) - exponent(below)
        rows = [((below == 0) | (above == 0), F64(np.nan), True), (e >= 96, one, True),
                (exponent(below) == 0, larger, False), (inverse & tiny, one, True), (inverse, smaller, False),
                (tiny, np.where(x == above, larger, x), True), (exponent(above) <= 23, larger, False)]  # fmt: skip
        tests, values, flags = zip(*rows, strict=True)
        flag(w, to_mask(np.select(tests, flags, False) & w.active))
        put(w, np.select(tests, values, x))

    return run


def build_div_fmas(i: Instruction) -> Step:
    """The last step of a division; takes the factor back where vcc says so."""
    put, (a, b, c) = write(i.operands[0], "f32", True), (read(text, "f32") for text in i.operands[1:])
    wide = i.target.lanes == 64

    def run(w: Wave) -> None:
        value, scaled = fma(a(w), b(w), c(w)).astype(F32), to_lanes(w.s[VCC] | wide * w.s[VCC + 1] << 32, w.lanes)
        up = exponent(np.broadcast_to(c(w), w.lanes)) > 127
        put(w, np.where(scaled, np.ldexp(value.astype(F64), np.where(up, 64, -64)), value))

    return run
