"""One value for all lanes: whole numbers, branches, waits, barriers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import BARRIER, END, KINDS, VCC, Step, Wave
from .memory import Fault
from .operands import read, scalar, set_scalar, signed
from .text import Instruction, Unknown
from .vector import look_up

# What changes times or what a debugger sees, but no result.
WITHOUT_EFFECT = re.compile(r"v_nop|s_(nop|waitcnt_depctr|delay_alu|clause|sendmsg|wait_alu)")


def extract(x: int, field: int) -> int:
    """The bits that `field` names: where they start, and from bit 16 on how many."""
    return x >> (field & 31) & (1 << (field >> 16)) - 1


# Of two sources x and y (a single one is y), scc, and how many bits they have. The suffix says whether they have signs.
Operation = Callable[[int, int, int, int], int]
BITS: dict[str, Operation] = {  # scc: the result is not zero
    "and": lambda x, y, c, n: x & y, "or": lambda x, y, c, n: x | y, "xor": lambda x, y, c, n: x ^ y,
    "andn2": lambda x, y, c, n: x & ~y, "and_not1": lambda x, y, c, n: x & ~y, "abs": lambda x, y, c, n: abs(y),
    "lshl": lambda x, y, c, n: x << (y & n - 1), "lshr": lambda x, y, c, n: x >> (y & n - 1),
    "ashr": lambda x, y, c, n: x >> (y & n - 1), "bfe_u32": lambda x, y, c, n: extract(x, y),
    "bfe_i32": lambda x, y, c, n: signed(extract(x, y), y >> 16),
    "bcnt1_i32": lambda x, y, c, n: (y & (1 << n) - 1).bit_count(),
}  # fmt: skip
SUMS: dict[str, Operation] = {  # scc: the result does not fit
    "add": lambda x, y, c, n: x + y, "addc": lambda x, y, c, n: x + y + c,
    "sub": lambda x, y, c, n: x - y, "subb": lambda x, y, c, n: x - y - c,
    **{f"lshl{k}_add": lambda x, y, c, n, k=k: (x << k) + y for k in (1, 2, 3, 4)},
}  # fmt: skip
OTHERS: dict[str, Operation] = {  # scc stays
    "mov": lambda x, y, c, n: y, "cselect": lambda x, y, c, n: x if c else y,
    "brev": lambda x, y, c, n: int(f"{y & (1 << n) - 1:0{n}b}"[::-1], 2),
    "mul": lambda x, y, c, n: x * y, "mul_hi": lambda x, y, c, n: x * y >> 32,
    "add_nc": lambda x, y, c, n: x + y, "sub_nc": lambda x, y, c, n: x - y,
}  # fmt: skip
TESTS: dict[str, Operation] = {  # scc: what they say; the result is x or y, if there is one
    "cmp_eq": lambda x, y, c, n: x == y, "cmp_lg": lambda x, y, c, n: x != y, "cmp_lt": lambda x, y, c, n: x < y,
    "cmp_gt": lambda x, y, c, n: x > y, "cmp_ge": lambda x, y, c, n: x >= y,
    "bitcmp0": lambda x, y, c, n: not x >> (y & 31) & 1, "bitcmp1": lambda x, y, c, n: x >> (y & 31) & 1,
    "min": lambda x, y, c, n: x < y, "max": lambda x, y, c, n: x >= y,
}  # fmt: skip
OPERATIONS = BITS | SUMS | OTHERS | TESTS
BRANCHES: dict[str, Callable[[Wave], Any]] = {
    "branch": lambda w: True, "cbranch_scc0": lambda w: not w.scc, "cbranch_scc1": lambda w: w.scc,
    "cbranch_vccz": lambda w: not vcc(w), "cbranch_vccnz": lambda w: vcc(w),
    "cbranch_execz": lambda w: not w.exec, "cbranch_execnz": lambda w: w.exec,
}  # fmt: skip


def vcc(w: Wave) -> int:
    return w.s[VCC] | (w.s[VCC + 1] << 32 if w.lanes == 64 else 0)


def build(i: Instruction, labels: dict[str, int]) -> Step | None:
    if WITHOUT_EFFECT.fullmatch(i.name):
        i.modifiers.clear()
        return lambda w: None
    i.name = i.name.removeprefix("v_") if i.name.startswith("v_s_") else i.name  # by the vector unit
    if not i.name.startswith("s_"):
        return None
    if "_f32" in i.name:
        return build_float(i)
    name, operands = i.name[2:].replace("_co_", "_"), i.operands
    if name in BRANCHES:
        to, test = labels[operands[0]], BRANCHES[name]
        return lambda w: to if test(w) else None
    if name in SIMPLE:
        return SIMPLE[name]
    if name.startswith("wait"):
        return build_wait(i)
    if short := re.fullmatch(r"(add|cmp|mov|mul)k(_\w+)", name):  # a constant of 16 bits
        number, name = int(operands[1], 0) & 0xFFFF, short[1] + short[2]
        operands[1] = str(signed(number, 16) if name.endswith("i32") else number)
    operation, _, kind = name.rpartition("_")
    if found := re.fullmatch(r"(\w+)_(save|wr)exec", operation):
        return build_mask(BITS[found[1]], found[2], operands)
    operation = name if name in BITS else operation
    return build_operation(operation, kind, operands) if operation in OPERATIONS else None


def build_operation(name: str, kind: str, operands: list[str]) -> Step:
    f, bits, (x, y) = OPERATIONS[name], int(kind[1:]), (scalar(text, kind) for text in operands[-2:])
    full, low = (1 << bits) - 1, -(1 << bits - 1) if kind[0] == "i" else 0
    to = set_scalar("null" if "cmp" in name else operands[0])

    def run(w: Wave) -> None:
        first, second = x(w), y(w)
        value = f(first, second, w.scc, bits)
        if name in TESTS:
            w.scc, value = int(value), first if value else second
        elif name not in OTHERS:
            w.scc = int(value & full != 0 if name in BITS else not low <= value <= low + full)
        to(w, value & full)

    return run


def build_float(i: Instruction) -> Step:
    """RDNA 3.5 and 4: what the vector unit does, once for all lanes."""
    name, (result,), kinds, f = look_up(i)
    operands = i.operands + i.operands[:1] * name.startswith("fmac")
    sources = [read(text, kind) for text, kind in zip(operands[-len(kinds) :], kinds, strict=True)]
    to = set_scalar("null" if result == "mask" else operands[0])

    def run(w: Wave) -> None:
        value = f(*[source(w) for source in sources])
        w.scc = int(value) if result == "mask" else w.scc
        to(w, 0 if result == "mask" else int(np.asarray(value, KINDS[result]).view(np.uint32)))

    return run


def build_mask(f: Operation, form: str, operands: list[str]) -> Step:
    """The mask is combined with a register; another one then holds the old mask (save) or the new one (wr)."""
    to, x = set_scalar(operands[0]), scalar(operands[1], "u64")

    def run(w: Wave) -> None:
        before, after = w.exec, f(x(w), w.exec, 0, 0) & (1 << w.lanes) - 1
        to(w, before if form == "save" else after)
        w.set_mask(after)
        w.scc = int(after != 0)

    return run


def build_wait(i: Instruction) -> Step:
    """`s_waitcnt vmcnt(1) lgkmcnt(0)`, `s_waitcnt_vscnt null, 0x0`; on RDNA 4 `s_wait_loadcnt_dscnt 0x100`, a byte each."""
    counts = [(counter, int(left)) for counter, left in re.findall(r"(\w+)\((\d+)\)", i.text)]
    if i.name == "s_waitcnt_vscnt":
        counts = [("vscnt", int(i.operands[1], 0))]
    if i.target.is_rdna4:
        names, left = i.name.removeprefix("s_wait_").split("_"), int(i.operands[0], 0)
        counts = [(name, left >> 8 * n & 63) for n, name in enumerate(names[::-1])]
    if not counts or not {counter for counter, _ in counts} <= {*i.target.counters.values()}:
        raise Unknown(i.text)

    def wait(w: Wave) -> None:
        for counter, left in counts:
            w.wait(counter, left)

    return wait


def barrier(w: Wave) -> int:
    arrive(w)
    return leave(w)


def arrive(w: Wave) -> None:
    """The check `late`, for what the others are going to read."""
    if any(late.kind == "store" for late in [*w.under_way["lgkmcnt"], *w.under_way["dscnt"]]):
        raise Fault("late: this wave still writes to LDS, and nothing waited for it before the barrier")
    if w.lds.has_signalled:
        raise Fault("race: a second s_barrier_signal before s_barrier_wait")
    w.lds.has_signalled = True


def leave(w: Wave) -> int:
    """Until all have arrived."""
    if not w.lds.has_signalled:
        raise Fault("endless: s_barrier_wait, but this wave has not signalled")
    w.lds.has_signalled = False
    return BARRIER


SIMPLE: dict[str, Step] = {
    "endpgm": lambda w: END, "barrier": barrier, "barrier_signal": arrive, "barrier_wait": leave,
}  # fmt: skip
