"""One value for all lanes: whole numbers, branches, waits, barriers, constants from memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import ALL, BARRIER, END, SCALARS, UNSET, VCC, Fault, Step, Wave
from .operands import scalar, set_scalar, to_register
from .text import Instruction, Unknown

# What changes times, caches or what a debugger sees, but no result.
WITHOUT_EFFECT = re.compile(r"v_nop|s_(nop|waitcnt_vscnt|waitcnt_depctr|delay_alu|clause|sendmsg|sleep|setprio"
                            r"|sched_barrier|icache_inv|(set_)?inst_prefetch\w*)"
                            r"|buffer_(gl[01]_inv|wbl2|inv|wbinvl1)")  # fmt: skip
WORDS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16,
         "b32": 1, "b64": 2, "b128": 4, "b256": 8, "b512": 16}  # fmt: skip


def signed(x: int, bits: int = 32) -> int:
    return (x ^ 1 << bits - 1) - (1 << bits - 1)


def overflow(x: int) -> tuple[int, int]:
    """With scc where it does not fit."""
    return x, int(not -(2**31) <= x < 2**31)


def extract(x: int, field: int, kind: str) -> int:
    """The bits that `field` names: where they start, and from bit 16 on how many."""
    size = field >> 16 & 127
    part = x >> (field & 63) & (1 << size) - 1
    return signed(part, size) if kind[0] == "i" and size else part


# (x, y, scc, bits) -> a value, of which scc then says whether it is not zero, or (value, scc; None: as it was).
OPERATIONS: dict[str, Callable[[int, int, int, int], Any]] = {
    "and": lambda x, y, c, n: x & y, "or": lambda x, y, c, n: x | y, "xor": lambda x, y, c, n: x ^ y,
    "andn2": lambda x, y, c, n: x & ~y, "and_not1": lambda x, y, c, n: x & ~y, "not": lambda x, y, c, n: ~x,
    "lshl": lambda x, y, c, n: x << (y & n - 1), "lshr": lambda x, y, c, n: x >> (y & n - 1),
    "ashr": lambda x, y, c, n: signed(x, n) >> (y & n - 1), "abs_i32": lambda x, y, c, n: abs(signed(x)),
    "bfe_u32": lambda x, y, c, n: extract(x, y, "u"), "bfe_i32": lambda x, y, c, n: extract(x, y, "i"),
    "cselect": lambda x, y, c, n: (x if c else y, None), "mov": lambda x, y, c, n: (x, None),
    "add_u32": lambda x, y, c, n: (x + y, x + y >> 32), "addc_u32": lambda x, y, c, n: (x + y + c, x + y + c >> 32),
    "sub_u32": lambda x, y, c, n: (x - y, int(x < y)), "subb_u32": lambda x, y, c, n: (x - y - c, int(x < y + c)),
    "add_i32": lambda x, y, c, n: overflow(signed(x) + signed(y)),
    "sub_i32": lambda x, y, c, n: overflow(signed(x) - signed(y)),
    "mul_i32": lambda x, y, c, n: (x * y, None), "mul_hi_u32": lambda x, y, c, n: (x * y >> 32, None),
    "mul_hi_i32": lambda x, y, c, n: (signed(x) * signed(y) >> 32, None),
    "min_i32": lambda x, y, c, n: (min(signed(x), signed(y)), int(signed(x) < signed(y))),
    "max_i32": lambda x, y, c, n: (max(signed(x), signed(y)), int(signed(x) >= signed(y))),
    **{f"lshl{k}_add_u32": lambda x, y, c, n, k=k: ((x << k) + y, int((x << k) + y > ALL)) for k in (1, 2, 3, 4)},
}  # fmt: skip
COMPARE: dict[str, Callable[[int, int], Any]] = {
    "eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
    "bitcmp0": lambda x, n: not x >> (n & 31) & 1, "bitcmp1": lambda x, n: x >> (n & 31) & 1,
}  # fmt: skip
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
    if not i.name.startswith("s_"):
        return None
    name, operands, wide = i.name[2:], i.operands, i.name.endswith("64")
    if short := re.fullmatch(r"(add|cmp|mov|mul)k(_\w+)", name):  # a constant of 16 bits; the result is a source, too
        number, name = int(operands[1], 0) & 0xFFFF, short[1] + short[2]
        number = signed(number, 16) if "_i32" in name else number
        operands = [operands[0]] * (1 + (short[1] in ("add", "mul"))) + [str(number)]
    operation, _, kind = name.rpartition("_")
    if name in BRANCHES:
        if operands[0] not in labels:
            raise Unknown(f"no label {operands[0]}")
        to, test = labels[operands[0]], BRANCHES[name]
        return lambda w: to if test(w) else None
    if simple := {"endpgm": lambda w: END, "barrier": barrier}.get(name):
        return simple
    if name == "waitcnt":
        return build_wait(i)
    if operation == "load":
        return build_load(i, kind)
    if (test_name := operation.removeprefix("cmp_")) in COMPARE:
        return build_compare(COMPARE[test_name], signed if kind == "i32" else int, *(scalar(x, wide) for x in operands))
    if found := re.fullmatch(r"(\w+)_(save|wr)exec", operation):
        return build_mask(OPERATIONS[found[1]], scalar(operands[1], wide), set_scalar(operands[0], wide), found[2])
    operation = operation if operation in OPERATIONS else name
    if operation not in OPERATIONS:
        return None
    narrow = operation in ("lshl", "lshr", "ashr") or operation.startswith("bfe")  # how far is a single register
    x, y = scalar(operands[1], wide), scalar(operands[2] if len(operands) > 2 else "0", wide and not narrow)
    return build_operation(OPERATIONS[operation], x, y, set_scalar(operands[0], wide), wide)


def build_operation(f: Callable, x: Callable, y: Callable, to: Callable, wide: bool) -> Step:
    bits, full = (64, 2**64 - 1) if wide else (32, ALL)

    def run(w: Wave) -> None:
        value = f(x(w), y(w), w.scc, bits)
        value, scc = value if isinstance(value, tuple) else (value, int(value & full != 0))
        to(w, value & full)
        w.scc = w.scc if scc is None else scc

    return run


def build_mask(f: Callable, x: Callable, to: Callable, form: str) -> Step:
    """The mask is combined with a register; another one then holds the old mask (save) or the new one (wr)."""

    def run(w: Wave) -> None:
        before, after = w.exec, f(x(w), w.exec, 0, 0) & (1 << w.lanes) - 1
        to(w, before if form == "save" else after)
        w.set_mask(after)
        w.scc = int(after != 0)

    return run


def build_compare(f: Callable, number: Callable[[int], int], x: Callable, y: Callable) -> Step:
    def run(w: Wave) -> None:
        w.scc = int(f(number(x(w)), number(y(w))))

    return run


def build_wait(i: Instruction) -> Step:
    counts = [(counter, int(left)) for counter, left in re.findall(r"(\w+)\((\d+)\)", i.text)]
    if not counts or not {counter for counter, _ in counts} <= {"vmcnt", "lgkmcnt", "expcnt"}:
        raise Unknown(i.text)

    def wait(w: Wave) -> None:
        for counter, left in counts:
            if counter != "expcnt":
                w.wait(counter, left)

    return wait


def barrier(w: Wave) -> int:
    """The check `late`, for what the others are going to read."""
    if any(late.kind == "store" for late in w.under_way["lgkmcnt"]):
        raise Fault("late: this wave still writes to LDS, and nothing waited for it before the barrier")
    return BARRIER


def build_load(i: Instruction, kind: str) -> Step:
    """Scalar loads come in any order, so only a wait for all of them helps."""
    words, n = WORDS[kind], to_register(i.operands[0]).first
    base, offset, more = scalar(i.operands[1], True), scalar(i.operands[2]), i.take("offset")

    def run(w: Wave) -> None:
        address = np.array([base(w) + offset(w) + more & 2**64 - 1], np.uint64)
        values = w.memory.read(address, 4 * words)[:, 0].tolist()
        w.s[n : n + words] = [UNSET] * words
        numbers = frozenset(range(SCALARS + n, SCALARS + n + words))
        w.late("lgkmcnt", numbers, lambda: w.s.__setitem__(slice(n, n + words), values), "scalar")

    return run
