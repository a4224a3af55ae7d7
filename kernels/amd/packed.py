"""Two values in each lane: halves of one register, or a pair of registers; sums of products of mixed halves."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from .machine import Step, Wave
from .operands import Read, read, to_register, vector, write
from .text import Instruction, Unknown
from .vector import SAME, fma

OPERATIONS = {"add", "mul", "fma", "sub", "max", "min", "mul_lo"}


def part(text: str, kind: str, second: int, negate: int) -> Read:
    """One of the two numbers of a source."""
    register = to_register(text)
    if register and kind.endswith("16") and register.is_vector:
        text = f"{text}.{'lh'[second]}"
    elif register and kind.endswith("32"):
        text = f"{'v' if register.is_vector else 's'}{register.first + second}"  # a0 is v256, vcc_hi s107
    elif register and second:
        raise Unknown(f"the upper half of {text}")
    get = read(text, kind)
    return (lambda w: -get(w)) if negate else get


def build(i: Instruction) -> Step | None:
    if i.name.startswith("v_fma_mix"):
        return build_mix(i)
    if i.name == "v_pk_mov_b32":
        first, second = i.halves("op_sel", 0, 2)
        n, i.modifiers = vector(i.operands[0]).first, {}
        a, b = part(i.operands[1], "b32", first, 0), part(i.operands[2], "b32", second, 0)
        return lambda w: put_pair(w, n, "b32", a(w), np.copy(b(w)))
    operation, _, kind = i.name.removeprefix("v_pk_").rpartition("_")
    if not i.name.startswith("v_pk_") or operation not in OPERATIONS:
        return None
    low, high, sign, sign_high = (i.halves(*m) for m in (("op_sel", 0), ("op_sel_hi", 1), ("neg_lo", 0), ("neg_hi", 0)))
    n, f, sources = vector(i.operands[0]).first, SAME[operation][1], i.operands[1:]
    lows = [part(text, kind, low[k], sign[k]) for k, text in enumerate(sources)]
    highs = [part(text, kind, high[k], sign_high[k]) for k, text in enumerate(sources)]
    return lambda w: put_pair(w, n, kind, f(*[get(w) for get in lows]), f(*[get(w) for get in highs]))


def put_pair(w: Wave, n: int, kind: str, low: Any, high: Any) -> None:
    if kind.endswith("32"):
        w.put(kind, n, low)
        w.put(kind, n + 1, high)
    else:
        high = np.copy(high)
        w.put(kind + ".l", n, low)
        w.put(kind + ".h", n, high)


def build_mix(i: Instruction) -> Step:
    """v_fma_mix: each source is a float32, or either half of a register as a float16."""
    upper, small = i.halves("op_sel", 0), i.halves("op_sel_hi", 0)
    get = []
    for text, high, is_half in zip(i.operands[1:], upper, small, strict=True):
        half = re.sub(r"(v\d+)", rf"\1.{'lh'[high]}", text)
        get.append(read(half, "f16") if is_half else read(text, "f32"))
    place = {"v_fma_mix_f32": "", "v_fma_mixlo_f16": ".l", "v_fma_mixhi_f16": ".h"}[i.name]
    put = write(i.operands[0] + place, "f16" if place else "f32", False)
    return lambda w: put(w, fma(*[f(w).astype(np.float64) for f in get]))
