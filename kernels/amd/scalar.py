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
WITHOUT_EFFECT = {"nop", "waitcnt_vscnt", "waitcnt_depctr", "delay_alu", "clause", "sendmsg", "sleep", "setprio",
                  "inst_prefetch", "set_inst_prefetch_distance", "sched_barrier", "icache_inv"}  # fmt: skip


def signed(x: int, bits: int = 32) -> int:
    return (x ^ 1 << bits - 1) - (1 << bits - 1)


def overflow(x: int) -> int:
    return int(not -(2**31) <= x < 2**31)


def extract(x: int, field: int, is_signed: bool) -> int:
    """The bits that `field` names: where they start, and from bit 16 on how many."""
    size = field >> 16 & 127
    part = x >> (field & 63) & (1 << size) - 1
    return signed(part, size) if is_signed and size else part


# Bits: (x, y, width) -> value; scc says whether it is not zero.
LOGIC: dict[str, Callable[[int, int, int], int]] = {
    "and": lambda x, y, n: x & y, "or": lambda x, y, n: x | y, "xor": lambda x, y, n: x ^ y,
    "andn2": lambda x, y, n: x & ~y, "and_not1": lambda x, y, n: x & ~y, "orn2": lambda x, y, n: x | ~y,
    "nand": lambda x, y, n: ~(x & y), "nor": lambda x, y, n: ~(x | y), "xnor": lambda x, y, n: ~(x ^ y),
    "lshl": lambda x, y, n: x << (y & n - 1), "lshr": lambda x, y, n: x >> (y & n - 1),
    "ashr": lambda x, y, n: signed(x, n) >> (y & n - 1),
}  # fmt: skip
# Numbers: (x, y, scc) -> (value, new scc or None).
ARITHMETIC: dict[str, Callable[[int, int, int], tuple[int, int | None]]] = {
    "add_u32": lambda x, y, c: (x + y, x + y >> 32), "addc_u32": lambda x, y, c: (x + y + c, x + y + c >> 32),
    "sub_u32": lambda x, y, c: (x - y, int(x < y)), "subb_u32": lambda x, y, c: (x - y - c, int(x < y + c)),
    "add_i32": lambda x, y, c: (x + y, overflow(signed(x) + signed(y))),
    "sub_i32": lambda x, y, c: (x - y, overflow(signed(x) - signed(y))),
    "addk_i32": lambda x, y, c: (x + y, overflow(signed(x) + signed(y))),
    "mul_i32": lambda x, y, c: (x * y, None), "mulk_i32": lambda x, y, c: (x * y, None),
    "mul_hi_u32": lambda x, y, c: (x * y >> 32, None),
    "mul_hi_i32": lambda x, y, c: (signed(x) * signed(y) >> 32, None),
    "min_u32": lambda x, y, c: (min(x, y), int(x < y)), "max_u32": lambda x, y, c: (max(x, y), int(x >= y)),
    "min_i32": lambda x, y, c: (min(signed(x), signed(y)), int(signed(x) < signed(y))),
    "max_i32": lambda x, y, c: (max(signed(x), signed(y)), int(signed(x) >= signed(y))),
    "cselect_b32": lambda x, y, c: (x if c else y, None), "cselect_b64": lambda x, y, c: (x if c else y, None),
    **{f"lshl{k}_add_u32": lambda x, y, c, k=k: ((x << k) + y, int((x << k) + y > ALL)) for k in (1, 2, 3, 4)},
    "pack_ll_b32_b16": lambda x, y, c: (x & 0xFFFF | y << 16, None),
}  # fmt: skip
UNARY: dict[str, Callable[[int, int], tuple[int, bool]]] = {  # (x, width) -> (value, whether scc follows it)
    "mov": lambda x, n: (x, False), "movk": lambda x, n: (x, False), "not": lambda x, n: (~x, True),
    "brev": lambda x, n: (int(f"{x:0{n}b}"[::-1], 2), False), "bcnt1_i32": lambda x, n: (x.bit_count(), True),
    "ff1_i32": lambda x, n: ((x & -x).bit_length() - 1, False), "sext_i32": lambda x, n: (signed(x & 0xFFFF, 16), False),
}  # fmt: skip
COMPARE = {"eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt,
           "le": operator.le}  # fmt: skip
SAVED: dict[str, Callable[[int, int], int]] = {  # (source, mask) -> new mask
    "and": lambda x, e: x & e, "or": lambda x, e: x | e, "xor": lambda x, e: x ^ e,
    "andn2": lambda x, e: x & ~e, "and_not1": lambda x, e: x & ~e,
}  # fmt: skip
WORDS = {"dword": 1, "dwordx2": 2, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16,
         "b32": 1, "b64": 2, "b128": 4, "b256": 8, "b512": 16}  # fmt: skip


def build(i: Instruction, labels: dict[str, int]) -> Step | None:
    if i.name.startswith("buffer_gl") or i.name in ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1"):
        return lambda w: None
    if not i.name.startswith("s_"):
        return None
    name = i.name[2:]
    operation, _, kind = name.rpartition("_")
    if name in WITHOUT_EFFECT:
        i.modifiers.clear()
        return lambda w: None
    if name.startswith("load_"):
        return build_load(i, name[5:])
    if operation.endswith("_saveexec"):
        return build_saveexec(i, SAVED[operation.removesuffix("_saveexec")], kind == "b64")
    if name in ("barrier", "endpgm", "branch", "waitcnt") or name.startswith("cbranch_"):
        return build_control(i, name, labels)
    if name.startswith(("cmp_", "cmpk_", "bitcmp")):
        return build_compare(i, operation, kind)
    wide, to = name.endswith("64"), set_scalar(i.operands[0], kind[1:] == "64" and not operation.startswith("bcnt"))
    if operation in UNARY:
        return build_unary(UNARY[operation], immediate(i) if "k_" in name else scalar(i.operands[1], wide), to, wide)
    if "k_" in name and name in ARITHMETIC:
        return build_arithmetic(ARITHMETIC[name], scalar(i.operands[0]), immediate(i), to, wide)
    x, y = scalar(i.operands[1], wide), scalar(i.operands[2], wide and operation not in ("lshl", "lshr", "ashr", "bfe"))
    if name in ARITHMETIC:
        return build_arithmetic(ARITHMETIC[name], x, y, to, wide)
    if operation == "bfe":
        return build_logic(lambda a, b, n: extract(a, b, kind[0] == "i"), x, y, to, wide)
    return build_logic(LOGIC[operation], x, y, to, wide) if operation in LOGIC else None


def immediate(i: Instruction) -> Callable[[Wave], int]:
    """A constant of 16 bits with a sign."""
    value = signed(int(i.operands[1], 0) & 0xFFFF, 16) & ALL
    return lambda w: value


def build_unary(f: Callable, x: Callable, to: Callable, wide: bool) -> Step:
    bits, full = (64, 2**64 - 1) if wide else (32, ALL)

    def run(w: Wave) -> None:
        value, counts = f(x(w), bits)
        to(w, value & full)
        if counts:
            w.scc = int(value & full != 0)

    return run


def build_arithmetic(f: Callable, x: Callable, y: Callable, to: Callable, wide: bool) -> Step:
    full = 2**64 - 1 if wide else ALL

    def run(w: Wave) -> None:
        value, scc = f(x(w), y(w), w.scc)
        to(w, value & full)
        if scc is not None:
            w.scc = scc

    return run


def build_logic(f: Callable, x: Callable, y: Callable, to: Callable, wide: bool) -> Step:
    bits, full = (64, 2**64 - 1) if wide else (32, ALL)

    def run(w: Wave) -> None:
        value = f(x(w), y(w), bits) & full
        to(w, value)
        w.scc = int(value != 0)

    return run


def build_compare(i: Instruction, operation: str, kind: str) -> Step:
    wide = kind.endswith("64")
    x, y = scalar(i.operands[0], wide), scalar(i.operands[1], wide)
    if operation.startswith("bitcmp"):
        wanted = int(operation[6])

        def bit(w: Wave) -> None:
            w.scc = int(x(w) >> (y(w) & 31) & 1 == wanted)

        return bit
    compare = COMPARE[operation.split("_")[1]]
    number: Callable[[int], int] = signed if kind[0] == "i" else int
    if operation.startswith("cmpk"):
        value = int(i.operands[1], 0) & 0xFFFF
        y = lambda w: signed(value, 16) & ALL if kind[0] == "i" else value  # noqa: E731

    def run(w: Wave) -> None:
        w.scc = int(compare(number(x(w)), number(y(w))))

    return run


def build_saveexec(i: Instruction, f: Callable[[int, int], int], wide: bool) -> Step:
    to, x = set_scalar(i.operands[0], wide), scalar(i.operands[1], wide)

    def run(w: Wave) -> None:
        value, before = f(x(w), w.exec), w.exec
        to(w, before)
        w.set_mask(value)
        w.scc = int(value != 0)

    return run


def build_control(i: Instruction, name: str, labels: dict[str, int]) -> Step | None:
    if name == "endpgm":
        return lambda w: END
    if name == "barrier":
        return barrier
    if name == "waitcnt":
        counts = [(counter, int(left)) for counter, left in re.findall(r"(\w+)\((\d+)\)", i.text)]
        if not counts or not {counter for counter, _ in counts} <= {"vmcnt", "lgkmcnt", "expcnt"}:
            raise Unknown(i.text)

        def wait(w: Wave) -> None:
            for counter, left in counts:
                if counter != "expcnt":
                    w.wait(counter, left)

        return wait
    if i.operands[0] not in labels:
        raise Fault(f"no label {i.operands[0]}")
    to, wide = labels[i.operands[0]], i.target.lanes == 64
    vcc: Callable[[Wave], int] = lambda w: w.s[VCC] | w.s[VCC + 1] << 32 if wide else w.s[VCC]  # noqa: E731
    tests: dict[str, Callable[[Wave], Any]] = {
        "branch": lambda w: True, "cbranch_scc0": lambda w: not w.scc, "cbranch_scc1": lambda w: w.scc,
        "cbranch_vccz": lambda w: not vcc(w), "cbranch_vccnz": vcc,
        "cbranch_execz": lambda w: not w.exec, "cbranch_execnz": lambda w: w.exec,
    }  # fmt: skip
    test = tests[name]
    return lambda w: to if test(w) else None


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

        def finish() -> None:
            w.s[n : n + words] = values

        w.late("lgkmcnt", frozenset(range(SCALARS + n, SCALARS + n + words)), finish, "scalar")

    return run
