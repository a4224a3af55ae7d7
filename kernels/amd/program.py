"""An instruction finds its room and becomes a function of a wave; a program runs from barrier to barrier."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable

from . import caches, crosslane, loads, matrix, scalar, vector
from .machine import SCALARS, Step, Wave
from .memory import Fault
from .operands import used
from .text import Assembly, Instruction, Unknown, read_assembly

Watch = Callable[[Wave, int], None]  # before each instruction: the wave, and which one
ROOMS = (matrix.build, crosslane.build, caches.build, loads.build, vector.build)
KINDS = {"matrix": "v_mfma|v_wmma", "memory": "s_load|global|buffer|scratch", "LDS": "ds", "scalar": "s", "vector": "v"}
MAX_JUMPS = 100_000  # of one wave, before it is called endless


def kind_of(text: str) -> str:
    """What an instruction has to do with: one of `KINDS`."""
    return next((kind for kind, names in KINDS.items() if re.match(names, text)), "")


class Program:
    """The instructions of a kernel as functions. A Fault names all that are not known."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.target, self.steps, self.used, unknown = assembly, assembly.target, [], [], []
        self.kinds = [kind_of(text) for text, _ in assembly.lines]
        for text, where in assembly.lines:
            i = Instruction(text, self.target)
            self.used.append(self.uses(i))
            try:
                self.steps.append(self.build(i))
            except (Unknown, KeyError, ValueError, IndexError, AttributeError) as error:
                unknown.append(f"{self.target.name}, {where}: not known: {text} ({error})")
        if unknown:
            raise Fault("\n".join(unknown))

    def build(self, i: Instruction) -> Step:
        step = scalar.build(i, self.assembly.labels)
        for room in ROOMS:
            step = step or room(i)
        if step is None or i.modifiers:
            raise Unknown(" ".join([i.name, *i.modifiers]))
        return step

    @staticmethod
    def uses(i: Instruction) -> frozenset[int]:
        """Registers that must have come. Loads come in their order, so one may follow another into its register, but a
        load of one half (d16) also reads the register, for the other half."""
        is_load = ("_load" in i.name or i.name.startswith("ds_read")) and "d16" not in i.name
        return used([i.text] if " :: " in i.text else i.operands[is_load and "lds" not in i.modifiers :])

    def run(self, w: Wave, counts: list[int], watch: Watch | None = None, strict: bool = True) -> int:
        """Until a barrier, the end, or where another workgroup may run."""
        steps, uses, pc, w.lds.wave = self.steps, self.used, w.pc, w.number
        try:
            while True:
                if watch:
                    watch(w, pc)
                if w.busy and strict and not w.busy.isdisjoint(uses[pc]):
                    n = min(w.busy & uses[pc])
                    name = f"s{n - SCALARS}" if n >= SCALARS else f"v{n}"
                    raise Fault(f"late: {name} is used, but no s_waitcnt has waited for the load that fills it")
                counts[pc] += 1
                to = steps[pc](w)
                if to is None:
                    pc += 1
                elif to < 0:
                    w.pc = pc + 1
                    return to
                else:
                    pc, w.jumps = to, w.jumps + 1
                    if w.jumps > MAX_JUMPS:
                        raise Fault(f"endless: {MAX_JUMPS} jumps")
        except (Fault, Unknown, IndexError, OverflowError) as error:
            text, where = self.assembly.lines[pc] if pc < len(steps) else ("the end", "no s_endpgm")
            raise Fault(f"{self.target.name}, {where}: {text}: {error}") from error

    def without(self, n: int) -> Program:
        """The same, but instruction `n` does nothing: an error to be noticed."""
        spoiled = copy.copy(self)
        spoiled.steps = [*self.steps[:n], lambda w: None, *self.steps[n + 1 :]]
        spoiled.used = [*self.used[:n], frozenset(), *self.used[n + 1 :]]
        return spoiled


@functools.cache
def program_of(text: str) -> Program:
    return Program(read_assembly(text))
