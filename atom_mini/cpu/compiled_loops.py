"""Loops on a CPU that Numba compiles: a decode, and the attention of prompts (chapter 92)."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core.base import BaseContext
from numba.core.caching import FunctionCache
from numba.core.datamodel import DataModelManager
from numba.core.typing import Signature
from numba.extending import intrinsic, models, register_model

F = TypeVar("F", bound=Callable)  # a function of plain arrays and numbers
FAST = {"reassoc", "contract", "arcp", "nsz"}  # NaN stays NaN
OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": FAST, "error_model": "numpy"}


@cache
def warn_once(why: str) -> None:
    """Warn that compiled code is not kept, or was not found."""
    wrong = f"Numba's cache cannot be used ({why}), so each start compiles for seconds"
    warnings.warn(f"{wrong}: set NUMBA_CACHE_DIR to another folder", stacklevel=2)


@cache
def say_compiling() -> None:
    """Tell, once, why this start takes long."""
    how = "this takes a while, and later starts load what it compiled"
    print(f"compiling loops for this CPU: {how}", file=sys.stderr)


class KeptCode(FunctionCache):
    """The machine code of a function on disk. A file that cannot be read or written costs time, not the engine."""

    def load_overload(self, sig: Signature, target_context: BaseContext) -> object:
        try:
            if found := super().load_overload(sig, target_context):
                return found
        except Exception:  # a damaged file may raise anything
            warn_once(f"a file in {self.cache_path} is damaged")
            with suppress(OSError):
                self.flush()  # replaces the index
        say_compiling()
        return None

    def save_overload(self, sig: Signature, data: object) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:
            warn_once(f"{self.cache_path} cannot be written to")


def kernel(function: F) -> F:
    """`function`, compiled at its first call, or found in Numba's cache on disk."""
    compiled = njit(**OPTIONS)(function)
    if function.__module__ != "__main__":  # no cache for a notebook's cells
        try:
            compiled._cache = KeptCode(function)  # private
        except RuntimeError:
            warn_once("no folder is writable")
    return compiled


FEATURES = os.environ.get("NUMBA_CPU_FEATURES") or get_host_cpu_features().flatten()
LANES = 16 if "+avx512f" in FEATURES else 8 if "+avx2" in FEATURES else 4
WIDE = ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)


class Vector(types.Type):
    """LANES numbers of float32 in a register."""


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A `Vector` in machine code."""

    def __init__(self, manager: DataModelManager, kind: types.Type) -> None:
        super().__init__(manager, kind, WIDE)


VECTOR = Vector("Vector")


def pointer(
    context: BaseContext, b: ir.IRBuilder, sig: Signature, args: list[ir.Value],
    count: int = LANES,
) -> tuple[ir.Value, types.Type]:  # fmt: skip
    """A pointer to `count` numbers at args[0][args[1], args[2] :], and their type."""
    array = context.make_array(sig.args[0])(context, b, args[0])
    width = b.extract_value(array.shape, 1)
    first = b.gep(array.data, [b.add(b.mul(args[1], width), args[2])])
    several = ir.VectorType(first.type.pointee, count)
    return b.bitcast(first, several.as_pointer()), sig.args[0].dtype


@intrinsic
def load(typing, array, row, i):
    """array[row, i : i + LANES], float32, int8, or the bits of bfloat16."""

    def generate(context, b, sig, args):
        place, kind = pointer(context, b, sig, args)
        value = b.load(place, align=kind.bitwidth // 8)
        if kind == types.int8:
            return b.sitofp(value, WIDE)
        if kind == types.float32:
            return value
        return b.bitcast(b.shl(b.zext(value, WORDS), WORDS([16] * LANES)), WIDE)

    return VECTOR(array, types.intp, types.intp), generate


def call(b: ir.IRBuilder, name: str, result: ir.Type, values: list[ir.Value], **options: object) -> ir.Value:
    """Call LLVM's function `name`."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.module.declare_intrinsic(name, (), kind), values, **options)


@intrinsic
def fma(typing, x, y, z):
    """x * y + z, of vectors."""
    name = f"llvm.fmuladd.v{LANES}f32"
    return VECTOR(x, y, z), lambda context, b, sig, args: call(b, name, WIDE, args)


@intrinsic
def broadcast(typing, x):
    """A vector of the number x."""

    def generate(context, b, sig, args):
        one = b.insert_element(WIDE(ir.Undefined), args[0], ir.IntType(32)(0))
        return b.shuffle_vector(one, one, WORDS([0] * LANES))

    return VECTOR(types.float32), generate


@intrinsic
def sum_lanes(typing, x):
    """The sum of the lanes, by halves."""

    def generate(context, b, sig, args):
        zero = ir.FloatType()(-0.0)
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return call(b, name, zero.type, [zero, *args], fastmath=("reassoc",))

    return types.float32(VECTOR), generate


ROWS = 2 if LANES == 8 else 4  # rows of x in a tile


@kernel
def fma_four(w, x, sums):
    """w * x + sums, for four vectors w, one per output."""
    a, b = fma(w[0], x, sums[0]), fma(w[1], x, sums[1])
    return a, b, fma(w[2], x, sums[2]), fma(w[3], x, sums[3])


@kernel
def store_four(sums, bias, o, y, r):
    """y[r, o : o + 4] = the sums of four vectors, plus bias[o : o + 4]."""
    y[r, o] = sum_lanes(sums[0]) + bias[o]
    y[r, o + 1] = sum_lanes(sums[1]) + bias[o + 1]
    y[r, o + 2] = sum_lanes(sums[2]) + bias[o + 2]
    y[r, o + 3] = sum_lanes(sums[3]) + bias[o + 3]


@intrinsic
def prefetch(typing, array, row, i):
    """Start loading array[row, i : i + LANES] into the cache."""

    def generate(context, b, sig, args):
        place = b.bitcast(pointer(context, b, sig, args)[0], ir.IntType(8).as_pointer())
        # to read; into all caches; data, not code
        how = [ir.IntType(32)(n) for n in (0, 3, 1)]
        call(b, "llvm.prefetch.p0", ir.VoidType(), [place, *how])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


def make_tile(rows: int) -> Callable[..., None]:
    """The compiled tile for `rows` rows of x: 1, 2, or 4."""

    @kernel
    def tile(w, o, x, r, bias, y, at):
        """y[r + j, at + i] = w[o + i] . x[r + j] + bias[at + i]: four i and all j."""
        zero = broadcast(np.float32(0))
        later = min(o + 8, len(w) - 4)
        has_few = 2 * rows <= len(x) < 4 * rows  # two or three tiles of rows
        second = rows if has_few else 0  # the row whose tile prefetches the rest
        a = b = c = d = (zero, zero, zero, zero)
        for k in range(0, w.shape[1], LANES):
            four = (load(w, o, k), load(w, o + 1, k), load(w, o + 2, k), load(w, o + 3, k))
            if r == 0:
                prefetch(w, later, k)
                prefetch(w, later + 1, k)
            if r == second:
                prefetch(w, later + 2, k)
                prefetch(w, later + 3, k)
            a = fma_four(four, load(x, r, k), a)
            if rows > 1:
                b = fma_four(four, load(x, r + 1, k), b)
            if rows > 2:
                c = fma_four(four, load(x, r + 2, k), c)
                d = fma_four(four, load(x, r + 3, k), d)
        store_four(a, bias, at, y, r)
        if rows > 1:
            store_four(b, bias, at, y, r + 1)
        if rows > 2:
            store_four(c, bias, at, y, r + 2)
            store_four(d, bias, at, y, r + 3)

    return tile


tile, tile_of_one = make_tile(ROWS), make_tile(1)

FEW = 4  # rows: up to here, w is read once in the order in which it is stored


@kernel
def sum_row(w, o, x):
    """The sums of w[o] * x[0], in a `Vector`."""
    sums = broadcast(np.float32(0))
    for k in range(0, w.shape[1], LANES):
        sums = fma(load(w, o, k), load(x, 0, k), sums)
    return sums


@kernel
def sum_two(w, o, x, r):
    """The sums of w[o] * x[r] and of w[o] * x[r + 1]."""
    a = b = broadcast(np.float32(0))
    for k in range(0, w.shape[1], LANES):
        both = load(w, o, k)
        a, b = fma(both, load(x, r, k), a), fma(both, load(x, r + 1, k), b)
    return a, b


@kernel
def multiply_few(w, o, x, bias, y, at):
    """`multiply_four` for one to `FEW` rows. Two of them share each row of w that is read."""
    last = len(x) - 1
    for i in range(4):
        for r in range(0, last, 2):
            a, b = sum_two(w, o + i, x, r)
            y[r, at + i] = sum_lanes(a) + bias[at + i]
            y[r + 1, at + i] = sum_lanes(b) + bias[at + i]
        if last % 2 == 0:
            y[last, at + i] = sum_lanes(sum_row(w, o + i, x[last:])) + bias[at + i]


@kernel
def multiply_four(w, o, x, bias, y, at):
    """y[:, at : at + 4] = x [R, I] @ w[o : o + 4].T + bias[at : at + 4].

    `at` is not `o` where w is only a part of the weight."""
    if len(x) <= FEW:
        multiply_few(w, o, x, bias, y, at)
        return
    rest = len(x) % ROWS
    for r in range(0, len(x) - rest, ROWS):
        tile(w, o, x, r, bias, y, at)
    for r in range(len(x) - rest, len(x)):
        tile_of_one(w, o, x, r, bias, y, at)


def rounded(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """bfloat16 in the upper half of each word; NaN stays NaN."""
    bits = b.bitcast(value, WORDS)
    is_odd = b.and_(b.lshr(bits, WORDS([16] * LANES)), WORDS([1] * LANES))
    near = b.add(b.add(bits, WORDS([0x7FFF] * LANES)), is_odd)
    size = b.and_(bits, WORDS([0x7FFFFFFF] * LANES))  # without the sign
    is_nan = b.icmp_unsigned(">", size, WORDS([0x7F800000] * LANES))
    return b.select(is_nan, b.or_(bits, WORDS([0x400000] * LANES)), near)


@intrinsic
def store(typing, array, row, i, x):
    """array[row, i : i + LANES] = x, rounded if the array is bfloat16."""

    def generate(context, b, sig, args):
        place, kind = pointer(context, b, sig, args)
        value = args[3]
        if kind == types.uint16:
            high = b.lshr(rounded(b, value), WORDS([16] * LANES))
            value = b.trunc(high, place.type.pointee)
        b.store(value, place, align=kind.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, VECTOR), generate


@kernel
def widen(w, o, panel):
    """panel [4, I] = w[o : o + 4] as float32."""
    later = min(o + 8, len(w) - 4)
    for i in range(4):
        for k in range(0, w.shape[1], LANES):
            prefetch(w, later + i, k)
            store(panel, i, k, load(w, o + i, k))


@kernel
def multiply_piece(start, end, x, w, bias, y, panel):
    """Outputs [start, end) of y [R, O] = x [R, I] @ w.T + bias; `start` is a multiple of 4, `end` may be above O.

    w [O, I], I a multiple of LANES, O >= 4; `panel` [4, I] is scratch to widen rows of w, or [0, I]."""
    for first in range(start, min(end, len(w)), 4):
        o = min(first, len(w) - 4)
        if len(panel):
            widen(w, o, panel)
            multiply_four(panel, 0, x, bias, y, o)
        else:
            multiply_four(w, o, x, bias, y, o)


SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
PAIRS = ir.VectorType(ir.IntType(32), 2 * LANES)


@intrinsic
def load_codes(typing, array, row, i):
    """array[row, i : i + 2 * LANES], int8 or int16, as int16 in a `Vector`."""

    def generate(context, b, sig, args):
        place, kind = pointer(context, b, sig, args, 2 * LANES)
        codes = b.load(place, align=kind.bitwidth // 8)
        codes = b.sext(codes, SHORTS) if kind == types.int8 else codes
        return b.bitcast(codes, WIDE)

    return VECTOR(array, types.intp, types.intp), generate


@intrinsic
def add_pairs(typing, x, y, sums):
    """sums + x * y of codes: each 32-bit lane adds its two products."""

    def generate(context, b, sig, args):
        x, y = (b.sext(b.bitcast(v, SHORTS), PAIRS) for v in args[:2])
        both, no = b.mul(x, y), PAIRS(ir.Undefined)
        halves = [[2 * k + j for k in range(LANES)] for j in (0, 1)]
        even, odd = (b.shuffle_vector(both, no, WORDS(half)) for half in halves)
        total = b.add(b.add(even, odd), b.bitcast(args[2], WORDS))
        return b.bitcast(total, WIDE)

    return VECTOR(x, y, sums), generate


@kernel
def quantize(x, codes, scales):
    """Codes [R, size] int16 and scales [R] of the rows of x [R, size]."""
    least = np.float32(1e-30).view(np.int32)
    most = np.float32(min(2**14 - 1, (2**31 - 1) // (127 * x.shape[1])))  # `largest_code`
    for r in range(len(x)):
        bits, top = x[r].view(np.int32), least
        for i in range(len(bits)):
            top = np.int32(max(top, bits[i] & np.int32(0x7FFFFFFF)))
        largest = np.int32(top).view(np.float32)
        scales[r] = largest / most
        inverse = most / largest
        for i in range(len(bits)):
            codes[r, i] = np.int16(np.rint(x[r, i] * inverse))


def add_halves(b: ir.IRBuilder, groups: int, x: ir.Value, y: ir.Value | None = None) -> ir.Value:
    """The sums of the two halves of each group of lanes, first of x, then of y."""
    half = x.type.count // groups // 2
    ends = [x.type.count] * (y is not None)
    first = [start + 2 * half * group + i for start in (0, *ends) for group in range(groups) for i in range(half)]
    kind = ir.VectorType(ir.IntType(32), len(first))
    halves = (kind(first), kind([i + half for i in first]))
    return b.add(*[b.shuffle_vector(x, x if y is None else y, at) for at in halves])


@intrinsic
def store_sums(typing, y, r, o, sums, scale, scales, bias):
    """y[r, o : o + 4] = the sums of four vectors of whole numbers, times both scales, plus the bias."""

    def generate(context, b, sig, args):
        place, _ = pointer(context, b, sig, args, 4)

        def four(i):
            data = context.make_array(sig.args[i])(context, b, args[i]).data
            return b.load(b.bitcast(b.gep(data, [args[2]]), place.type), align=4)

        x = [b.bitcast(b.extract_value(args[3], i), WORDS) for i in range(4)]
        x = add_halves(b, 2, add_halves(b, 1, *x[:2]), add_halves(b, 1, *x[2:]))
        while x.type.count > 4:
            x = add_halves(b, 4, x)
        x = b.sitofp(x, place.type.pointee)
        one = ir.IntType(32)(0)
        scale = b.insert_element(x.type(ir.Undefined), args[4], one)
        scale = b.shuffle_vector(scale, scale, ir.VectorType(one.type, 4)([0] * 4))
        factors = x, b.fmul(scale, four(5))  # one instruction: no other order
        x = call(b, "llvm.fmuladd.v4f32", x.type, [*factors, four(6)])
        b.store(x, place, align=4)
        return context.get_dummy_value()

    return types.void(y, types.intp, types.intp, sums, scale, scales, bias), generate


@kernel
def add_four(w, x, sums):
    """sums + w * x of codes, for four vectors w, one per output."""
    a, b = add_pairs(w[0], x, sums[0]), add_pairs(w[1], x, sums[1])
    return a, b, add_pairs(w[2], x, sums[2]), add_pairs(w[3], x, sums[3])


def make_code_tile(rows: int) -> Callable[..., None]:
    """The compiled tile for one or two rows of codes."""

    @kernel
    def tile(w, scales, o, codes, row_scales, r, bias, y):
        """y[r + j, o + i] = w[o + i] . codes[r + j], scaled, + bias: four i, all j."""
        zero = broadcast(np.float32(0))
        later = min(o + 8, len(w) - 4)
        a = b = (zero, zero, zero, zero)
        for k in range(0, w.shape[1], 2 * LANES):
            four = (load_codes(w, o, k), load_codes(w, o + 1, k), load_codes(w, o + 2, k), load_codes(w, o + 3, k))
            if r == 0:
                for i in range(4):
                    prefetch(w, later + i, k)
            a = add_four(four, load_codes(codes, r, k), a)
            if rows > 1:
                b = add_four(four, load_codes(codes, r + 1, k), b)
        store_sums(y, r, o, a, row_scales[r], scales, bias)
        if rows > 1:
            store_sums(y, r + 1, o, b, row_scales[r + 1], scales, bias)

    return tile


code_tile, code_tile_of_one = make_code_tile(2), make_code_tile(1)


FEW_CODES = 8  # rows, as `FEW`


@kernel
def sum_codes(w, o, codes):
    """The sums of w[o] * codes[0]."""
    sums = broadcast(np.float32(0))
    for k in range(0, w.shape[1], 2 * LANES):
        sums = add_pairs(load_codes(w, o, k), load_codes(codes, 0, k), sums)
    return sums


@kernel
def code_row(w, scales, o, codes, row_scales, bias, y):
    """y[0, o : o + 4] = codes[0] @ w[o : o + 4].T, scaled, + bias[o : o + 4]."""
    sums = (sum_codes(w, o, codes), sum_codes(w, o + 1, codes),
            sum_codes(w, o + 2, codes), sum_codes(w, o + 3, codes))  # fmt: skip
    store_sums(y, 0, o, sums, row_scales[0], scales, bias)


@kernel
def sum_two_codes(w, o, codes, r):
    """The sums of w[o] * codes[r] and of w[o] * codes[r + 1]."""
    a = b = broadcast(np.float32(0))
    for k in range(0, w.shape[1], 2 * LANES):
        both = load_codes(w, o, k)
        a = add_pairs(both, load_codes(codes, r, k), a)
        b = add_pairs(both, load_codes(codes, r + 1, k), b)
    return a, b


@kernel
def multiply_few_codes(w, scales, o, codes, row_scales, bias, y):
    """y[:, o : o + 4] = codes @ w[o : o + 4].T, scaled, + bias[o : o + 4]."""
    last = len(codes) - 1
    for r in range(0, last, 2):
        (a, b), (c, d) = sum_two_codes(w, o, codes, r), sum_two_codes(w, o + 1, codes, r)
        (e, f), (g, h) = sum_two_codes(w, o + 2, codes, r), sum_two_codes(w, o + 3, codes, r)
        store_sums(y, r, o, (a, c, e, g), row_scales[r], scales, bias)
        store_sums(y, r + 1, o, (b, d, f, h), row_scales[r + 1], scales, bias)
    if last % 2 == 0:
        code_row(w, scales, o, codes[last:], row_scales[last:], bias, y[last:])


@kernel
def multiply_codes(start, end, codes, row_scales, w, scales, bias, y):
    """Outputs [start, end) of y [R, O], from codes [R, I] int16 with a scale per row,
    and w [O, I] int8 with a scale per output.

    I is a multiple of 2 * LANES, `start` of 4, and O >= 4; `end` may be above O."""
    rest = len(codes) % 2
    scales = scales[:]  # an array even for Numba, never None
    for first in range(start, min(end, len(w)), 4):
        o = min(first, len(w) - 4)
        if len(codes) == 1:
            code_row(w, scales, o, codes, row_scales, bias, y)
            continue
        if len(codes) <= FEW_CODES:
            multiply_few_codes(w, scales, o, codes, row_scales, bias, y)
            continue
        for r in range(0, len(codes) - rest, 2):
            code_tile(w, scales, o, codes, row_scales, r, bias, y)
        for r in range(len(codes) - rest, len(codes)):
            code_tile_of_one(w, scales, o, codes, row_scales, r, bias, y)


@intrinsic
def fetch_add(typing, counts, place, value):
    """counts[place] += value, atomically; returns the value before."""

    def generate(context, b, sig, args):
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        return b.atomic_rmw("add", b.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(counts, types.intp, types.int64), generate


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(**OPTIONS)
def pieces(counts, n):
    """Yield 0 to n - 1, each in only one of the threads that call this. Ends when all are done.

    `counts` [16] int64, zeros at first: [0] handed out, [8] done.
    """
    i = fetch_add(counts, 0, 1)
    while i < n:
        yield i
        fetch_add(counts, 8, 1)
        i = fetch_add(counts, 0, 1)
    tries = 0
    while fetch_add(counts, 8, 0) < n:  # an atomic read
        tries += 1
        if tries > 2000:
            _sched_yield()


@kernel
def matmul(counts, num_pieces, x, w, bias, y, scales=None):
    """y [R, O] = x [R, I] @ w [O, I].T + bias [O]; I is a multiple of LANES, O >= 4.

    If w is int8, `scales` [O] are those of its rows (chapter 92b)."""
    size = -(-len(w) // (4 * num_pieces)) * 4  # outputs of a piece
    if scales is not None:
        codes, row_scales = np.empty(x.shape, np.int16), np.empty(len(x), np.float32)
        quantize(x, codes, row_scales)
        for i in pieces(counts, num_pieces):
            outs = i * size, i * size + size
            multiply_codes(*outs, codes, row_scales, w, scales, bias, y)
        return
    widens = w.itemsize == 2 and len(x) > 2 * ROWS
    panel = np.empty((4 if widens else 0, w.shape[1]), np.float32)
    for i in pieces(counts, num_pieces):
        multiply_piece(i * size, i * size + size, x, w, bias, y, panel)


@kernel
def exp2(x):
    """2**x in float32, with a relative error below 3e-7; x is cut to [-126, 126]."""
    x = min(max(x, np.float32(-126)), np.float32(126))
    n = np.int32(x + np.float32(126.5))  # rounded, plus 126: x may be negative
    f = x - np.float32(n - np.int32(126))
    p = np.float32(0.0013333558) + f * np.float32(0.00015403530)
    p = np.float32(0.0096181291) + f * p
    p = np.float32(0.055504109) + f * p
    p = np.float32(0.24022651) + f * p
    p = np.float32(0.69314718) + f * p
    power = np.int32((n + np.int32(1)) << np.int32(23)).view(np.float32)
    return (np.float32(1) + f * p) * power


LOG2_E = 1.4426950408889634


@kernel
def add_norm(counts, x, residual, weight, eps, y):
    """residual += x, then y = its norm * weight; all [R, size]."""
    size = x.shape[1]
    for r in pieces(counts, len(x)):
        square = np.float32(0)
        for i in range(size):
            residual[r, i] += x[r, i]
            square += residual[r, i] * residual[r, i]
        scale = np.float32(1) / np.sqrt(square / np.float32(size) + eps)
        for i in range(size):
            y[r, i] = residual[r, i] * scale * weight[i]


@kernel
def silu_and_mul(counts, gate_up, y):
    """y [R, size] = silu(gate) * up of `gate_up` [R, 2 * size]."""
    size = y.shape[1]
    log2_e = np.float32(LOG2_E)
    for r in pieces(counts, len(y)):
        for i in range(size):
            gate = gate_up[r, i]
            divisor = np.float32(1) + exp2(-gate * log2_e)
            y[r, i] = gate / divisor * gate_up[r, size + i]


@kernel
def norm_and_rotate(x, weight, cos, sin, eps, scale):
    """Norm x [D] if `weight` is not empty, rotate it by its position, and scale it."""
    half = len(x) // 2
    if len(weight):
        square = np.float32(0)
        for i in range(len(x)):
            square += x[i] * x[i]
        scale /= np.sqrt(square / np.float32(len(x)) + eps)
        for i in range(len(x)):
            x[i] *= weight[i]
    for i in range(half):
        a, b = x[i] * scale, x[half + i] * scale
        x[i] = a * cos[i] + b * sin[i]
        x[half + i] = b * cos[half + i] + a * sin[half + i]


@kernel
def rotate_and_store(counts, qkv, norms, cos, sin, eps, cache, lens, tables):
    """Norm and rotate queries and keys in `qkv` [B, (H + 2K) * D], scale the queries,
    and store keys and values in a layer's cache [2, N, K, S, D].

    `norms`: weights [2, D] for queries and keys, or [2, 0]."""
    kv_heads, size, dim = cache.shape[2:]
    scale = np.float32(LOG2_E / np.sqrt(dim))
    one = np.float32(1)
    for b in pieces(counts, len(lens)):
        at = lens[b] - 1
        x = qkv[b].reshape(-1, dim)
        keys, values = len(x) - 2 * kv_heads, len(x) - kv_heads
        for h in range(keys):
            norm_and_rotate(x[h], norms[0], cos[at], sin[at], eps, scale)
        for h in range(kv_heads):
            norm_and_rotate(x[keys + h], norms[1], cos[at], sin[at], eps, one)
            block, slot = tables[b, at // size], at % size
            for i in range(0, dim, LANES):
                store(cache[0, block, h], slot, i, load(x, keys + h, i))
                store(cache[1, block, h], slot, i, load(x, values + h, i))


@kernel
def score(q, r, scores, h, pool, first, n, start, following):
    """scores[h, start + s] = q[r] . pool[first + s] for n rows s."""
    for s in range(n):
        sums = broadcast(np.float32(0))
        for i in range(0, pool.shape[1], LANES):
            prefetch(pool, following + s, i)
            sums = fma(load(q, r, i), load(pool, first + s, i), sums)
        scores[h, start + s] = sum_lanes(sums)


@kernel
def load_pair(x, r, i):
    """Two vectors from x[r, i : i + 2 * LANES]; twice the same if only one is left."""
    return load(x, r, i), load(x, r, min(i + LANES, x.shape[1] - LANES))


@kernel
def fma_pair(number, pair, sums):
    """number * pair + sums."""
    many = broadcast(number)
    return fma(many, pair[0], sums[0]), fma(many, pair[1], sums[1])


@kernel
def store_pair(x, r, i, pair):
    """Write a pair back to where `load_pair` found it."""
    store(x, r, i, pair[0])
    store(x, r, min(i + LANES, x.shape[1] - LANES), pair[1])


@kernel
def add_values(scores, h, out, r, pool, first, n, start, following):
    """out[r] += the sum of scores[h, start + s] * pool[first + s] over n rows s; the
    first block (`start` 0) writes it."""
    zero = broadcast(np.float32(0))
    for i in range(0, pool.shape[1], 2 * LANES):
        sums = zero, zero
        for s in range(n):
            prefetch(pool, following + s, i)
            prefetch(pool, following + s, i + LANES)
            sums = fma_pair(scores[h, start + s], load_pair(pool, first + s, i), sums)
        if start > 0:
            sums = fma_pair(np.float32(1), load_pair(out, r, i), sums)
        store_pair(out, r, i, sums)


@kernel
def softmax(scores, h, n):
    """Replace the first n scores of row h by their softmax, to base 2."""
    top = scores[h, 0]
    for i in range(n):
        top = max(top, scores[h, i])
    total = np.float32(0)
    for i in range(n):
        scores[h, i] = exp2(scores[h, i] - top)
        total += scores[h, i]
    for i in range(n):
        scores[h, i] /= total


@kernel
def attend_group(q, q_row, out, out_row, scores, pool, rows, n, size):
    """out[out_row + h] = attention of q[q_row + h], scaled, for G heads h, n tokens.

    `pool` [2 * N * K * S, D]: block i has `size` (S) keys, which begin at rows[i], and
    its values begin half of the pool later. `scores` [G, n or more]: scratch."""
    half, group, last = len(pool) // 2, len(scores), (n - 1) // size
    for i in range(last + 1):
        rest = min(size, n - i * size)
        following = rows[i + 1] if i < last else rows[0] + half
        for h in range(group):
            score(q, q_row + h, scores, h, pool, rows[i], rest, i * size, following)
    for h in range(group):
        softmax(scores, h, n)
    for i in range(last + 1):
        rest, first = min(size, n - i * size), rows[i] + half
        following = rows[min(i + 1, last)] + half
        for h in range(group):
            block = first, rest, i * size, following
            add_values(scores, h, out, out_row + h, pool, *block)


@kernel
def attend(counts, qkv, cache, lens, tables, out):
    """Attention of one token of each of B sequences, whose K/V is stored: the rotated `qkv` [B, (H + 2K) * D] -> `out`
    [B, H * D]; a layer's cache [2, N, K, S, D]; lens [B], tables [B, W]."""
    kv_heads, size, dim = cache.shape[2:]
    pool, q, y = cache.reshape(-1, dim), qkv.reshape(-1, dim), out.reshape(-1, dim)
    heads, width = len(y) // len(lens), len(q) // len(lens)  # of a sequence
    group = heads // kv_heads
    scores = np.empty((group, lens.max()), np.float32)
    rows = np.empty(tables.shape[1], np.int64)
    for piece in pieces(counts, len(lens) * kv_heads):
        b, head = piece // kv_heads, piece % kv_heads
        for i in range(-(-lens[b] // size)):
            rows[i] = (tables[b, i] * kv_heads + head) * size
        q_row, out_row = b * width + head * group, b * heads + head * group
        attend_group(q, q_row, y, out_row, scores, pool, rows, lens[b], size)


class Weights(NamedTuple):
    """The weights of a decode, as arrays."""

    table: np.ndarray  # embeddings [V, size]
    table_scales: np.ndarray | None  # [1, V] if they are int8
    norms: np.ndarray  # [2 * layers + 1, size]
    head_norms: np.ndarray  # of queries and keys [layers, 2, D], or [layers, 2, 0]
    cos: np.ndarray  # [positions, D]
    sin: np.ndarray
    matrices: tuple[np.ndarray, ...]  # qkv, o, gate_up, and down, each [layers, O, I]
    biases: tuple[np.ndarray, ...]  # theirs [layers, O]
    scales: tuple[np.ndarray | None, ...]  # theirs if they are int8 [layers, O]
    head: np.ndarray  # [V, size]
    head_scales: np.ndarray | None  # [1, V] if it is int8
    no_bias: np.ndarray  # [V]


@kernel
def embed(counts, ids, table, scales, x, residual):
    """x [B, size] = the rows `ids` [B] of the table [V, size]; residual = 0."""
    zero = broadcast(np.float32(0))
    for r in pieces(counts, len(ids)):
        scale = broadcast(np.float32(1) if scales is None else scales[0, ids[r]])
        for i in range(0, x.shape[1], LANES):
            store(x, r, i, fma(load(table, ids[r], i), scale, zero))
            store(residual, r, i, zero)


@kernel
def scales_at(scales, i):
    """The scales of layer i, or None."""
    return None if scales is None else scales[i]


@kernel
def decode_step(counters, num_pieces, w, eps, ids, cache, lens, tables, buffers):
    """A decode of B sequences, from their tokens `ids` [B] to their logits in `buffers[-1]`.

    `counters` [9 * layers + 3, 16] int64, zeros: a row for each loop. `w`: `Weights`; `cache` [layers, 2, N, K, S, D];
    lens [B], tables [B, W]; the buffers [B, ...] are those that the runner makes."""
    x, residual, normed, qkv, attended, gate_up, act, logits = buffers
    qkv_w, o_w, gate_up_w, down_w = w.matrices
    qkv_bias, o_bias, gate_up_bias, down_bias = w.biases
    embed(counters[-3], ids, w.table, w.table_scales, x, residual)
    for i in range(len(cache)):
        counts = counters[9 * i :]
        kv = cache[i]
        add_norm(counts[0], x, residual, w.norms[2 * i], eps, normed)
        scale = scales_at(w.scales[0], i)
        matmul(counts[1], num_pieces, normed, qkv_w[i], qkv_bias[i], qkv, scale)
        norms = w.head_norms[i]
        rotate_and_store(counts[2], qkv, norms, w.cos, w.sin, eps, kv, lens, tables)
        attend(counts[3], qkv, kv, lens, tables, attended)
        scale = scales_at(w.scales[1], i)
        matmul(counts[4], num_pieces, attended, o_w[i], o_bias[i], x, scale)
        add_norm(counts[5], x, residual, w.norms[2 * i + 1], eps, normed)
        scale = scales_at(w.scales[2], i)
        bias = gate_up_bias[i]
        matmul(counts[6], num_pieces, normed, gate_up_w[i], bias, gate_up, scale)
        silu_and_mul(counts[7], gate_up, act)
        scale = scales_at(w.scales[3], i)
        matmul(counts[8], num_pieces, act, down_w[i], down_bias[i], x, scale)
    add_norm(counters[-1], x, residual, w.norms[-1], eps, normed)
    scale = scales_at(w.head_scales, 0)
    matmul(counters[-2], num_pieces, normed, w.head, w.no_bias, logits, scale)


TALL = 96  # a multiple of 6 and of 2 * LANES


@kernel
def add_tile(a, r, b, i, n, y):
    """y[r : r + 6, i : i + 2 * LANES] += a[r : r + 6, :n] @ b[:n, i : i + 2 * LANES]"""
    c, d, e = load_pair(y, r, i), load_pair(y, r + 1, i), load_pair(y, r + 2, i)
    f, g, h = load_pair(y, r + 3, i), load_pair(y, r + 4, i), load_pair(y, r + 5, i)
    for k in range(n):
        x = load_pair(b, k, i)
        c, d = fma_pair(a[r, k], x, c), fma_pair(a[r + 1, k], x, d)
        e, f = fma_pair(a[r + 2, k], x, e), fma_pair(a[r + 3, k], x, f)
        g, h = fma_pair(a[r + 4, k], x, g), fma_pair(a[r + 5, k], x, h)
    store_pair(y, r, i, c)
    store_pair(y, r + 1, i, d)
    store_pair(y, r + 2, i, e)
    store_pair(y, r + 3, i, f)
    store_pair(y, r + 4, i, g)
    store_pair(y, r + 5, i, h)


@kernel
def add_product(a, b, n, y, rows, columns):
    """y += a[:, :n] @ b[:n] in the first rows and columns of y, rounded up to tiles."""
    for i in range(0, columns, 2 * LANES):
        for r in range(0, rows, 6):
            add_tile(a, r, b, i, n, y)


@kernel
def turn(q, head, group, columns):
    """columns [D, TALL] = the queries q [n, H, D] of K/V head `head`, scaled, token after token."""
    scale = np.float32(LOG2_E / np.sqrt(len(columns)))
    for t in range(len(q)):
        for h in range(group):
            for i in range(len(columns)):
                columns[i, t * group + h] = q[t, head * group + h, i] * scale


@kernel
def gather(pool, table, head, start, n, panel):
    """panel [TALL, D] = n tokens of a head from `start` on; pool [N, K, S, D]."""
    size = pool.shape[2]
    for s in range(n):
        rows, slot = pool[table[(start + s) // size], head], (start + s) % size
        for i in range(0, panel.shape[1], LANES):
            store(panel, s, i, load(rows, slot, i))


@kernel
def hide(scores, group, value):
    """scores [n, TALL] = value where key k comes after the query's token."""
    for k in range(1, len(scores)):
        scores[k, : k * group] = value


@kernel
def softmax_columns(scores, columns, tops, sums):
    """Replace each score [n, TALL] by 2**(score - the largest of its column); `sums`
    [TALL] are the columns' sums, `tops` [TALL] scratch."""
    tops[:] = np.float32(-np.inf)
    sums[:] = np.float32(0)
    for k in range(len(scores)):
        for c in range(columns):
            tops[c] = max(tops[c], scores[k, c])
    some = np.empty(TALL, np.float32)
    for start in range(0, len(scores), TALL):
        some[:] = np.float32(0)
        for k in range(start, min(start + TALL, len(scores))):
            for c in range(columns):
                scores[k, c] = exp2(scores[k, c] - tops[c])
                some[c] += scores[k, c]
        for c in range(columns):
            sums[c] += some[c]


@kernel
def attend_piece(q, cache, table, head, seen, scratch, out):
    """Attention of a sequence's last tokens of `seen`, by K/V head `head`: q and out
    [n, H, D]; a layer's cache [2, N, K, S, D]; `scratch` as `attend_prompts` has it."""
    scores, columns, panel, found, some, tops, sums = scratch
    group, dim = q.shape[1] // cache.shape[2], q.shape[2]
    used = len(q) * group
    first = seen - len(q)
    turn(q, head, group, columns)
    scores[:seen] = found[:] = np.float32(0)
    for s in range(0, seen, TALL):
        n = min(TALL, seen - s)
        gather(cache[0], table, head, s, n, panel)
        add_product(panel, columns, dim, scores[s:], n, used)
    hide(scores[first:seen], group, np.float32(-np.inf))
    softmax_columns(scores[:seen], used, tops, sums)
    hide(scores[first:seen], group, np.float32(0))
    for s in range(0, seen, TALL):
        n = min(TALL, seen - s)
        gather(cache[1], table, head, s, n, panel)
        some[:] = np.float32(0)
        add_product(scores[s:].T, panel, n, some, used, dim)
        found += some
    for c in range(used):
        out[c // group, head * group + c % group] = found[c] / sums[c]


@kernel
def attend_prompts(counts, q, cache, tables, parts, out):
    """Attention of T tokens whose K/V is stored: rotated q [T, H, D] -> out [T, H, D];
    a layer's cache [2, N, K, S, D]; tables [B, W].

    `parts` [P, 4]: tokens that the part's last token sees, its sequence, and its range
    of the T tokens, which have at most TALL queries per K/V head."""
    heads, dim = cache.shape[2], cache.shape[4]
    longest = -(-parts[0, 0] // TALL) * TALL
    scratch = (
        np.empty((longest, TALL), np.float32), np.empty((dim, TALL), np.float32),
        np.empty((TALL, dim), np.float32), np.empty((TALL, dim), np.float32),
        np.empty((TALL, dim), np.float32), np.empty(TALL, np.float32),
        np.empty(TALL, np.float32),
    )  # fmt: skip
    for piece in pieces(counts, len(parts) * heads):
        part, head = parts[piece // heads], piece % heads
        x, y = q[part[2] : part[3]], out[part[2] : part[3]]
        attend_piece(x, cache, tables[part[1]], head, part[0], scratch, y)
