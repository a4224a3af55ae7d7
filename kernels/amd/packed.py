"""Two instructions in one: a dual one has two texts, a packed one names two values of each source."""

from __future__ import annotations

from .operands import to_register
from .text import Instruction


def halved(i: Instruction) -> list[Instruction]:
    """What it consists of: itself, or two instructions that read before one of them writes."""
    if " :: " in i.text:
        i.modifiers.clear()
        return [Instruction(half.replace("v_dual_", "v_"), i.target) for half in i.text.split(" :: ")]
    if not i.name.startswith("v_pk_"):
        return [i]
    (to, *sources), halves, is_move = i.operands, [], i.name == "v_pk_mov_b32"  # it has a source for each result
    low = i.halves("op_sel", 0)
    second = low, low if is_move else i.halves("op_sel_hi", 1)
    negative = i.halves("neg_lo", 0), i.halves("neg_hi", 0)
    for n in (0, 1):
        chosen = [n] if is_move else range(len(sources))
        texts = [pick(sources[k], i.name, second[n][k], negative[n][k]) for k in chosen]
        halves.append(Instruction(f"v_{i.name[5:]} {', '.join([pick(to, i.name, n), *texts])}", i.target))
    return halves


def pick(text: str, name: str, second: int, negative: int = 0) -> str:
    """One of the two numbers of an operand: a half of a register, or a register of a pair."""
    if register := to_register(text):
        single = f"{'v' if register.is_vector else 's'}{register.first + second}"  # a0 is v256, vcc_hi s107
        text = single if name.endswith("32") else f"{text}.{'lh'[second]}"
    return f"neg({text})" if negative else text
