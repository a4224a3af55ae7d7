"""An instruction finds its room and becomes a function of a wave; the waves of a workgroup run from barrier to barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from . import crosslane, lds, loads, matrix, packed, scalar, vector
from .machine import ALL, BARRIER, SCALARS, Fault, Step, Wave
from .memory import Arguments, Lds, Scratch
from .operands import used
from .text import Assembly, Instruction, Unknown

Watch = Callable[[Wave, int], None]  # before each instruction: the wave, and which one
ROOMS = (matrix.build, packed.build, crosslane.build, vector.build, lds.build, loads.build)
KINDS = ("matrix", "memory", "LDS", "scalar", "vector")
MAX_JUMPS = 100_000  # of one wave, before it is called endless


def kind_of(name: str) -> str:
    """What an instruction has to do with: one of `KINDS`."""
    if "mfma" in name or "wmma" in name:
        return "matrix"
    first = name.split("_")[0]
    return {"ds": "LDS", "s": "scalar", "v": "vector"}.get("" if name.startswith("s_load") else first, "memory")


class Program:
    """The instructions of a kernel as functions. A Fault names all that are not known."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.target = assembly, assembly.target
        self.steps: list[Step] = []
        unknown = []
        for text, where in assembly.lines:
            try:
                self.steps.append(self.build(Instruction(text, where, self.target)))
            except (Unknown, KeyError, ValueError, IndexError, AttributeError) as error:
                unknown.append(f"{self.target.name}, {where}: not known: {text} ({error})")
        if unknown:
            raise Fault("\n".join(unknown))
        self.used = [self.uses(Instruction(text, where, self.target)) for text, where in assembly.lines]
        self.kinds = [kind_of(text) for text, _ in assembly.lines]

    def build(self, i: Instruction) -> Step:
        step = scalar.build(i, self.assembly.labels)
        for room in ROOMS:
            step = step or room(i)
        if step is None:
            raise Unknown(i.name)
        i.done()
        return step

    @staticmethod
    def uses(i: Instruction) -> frozenset[int]:
        """Registers that must have come. Loads come in their order, so one may follow another into its register."""
        is_load = "_load" in i.name or i.name.startswith("ds_read")
        return used(i.operands[is_load and "lds" not in i.name :] if " :: " not in i.text else [i.text])

    def run(self, w: Wave, counts: list[int], watch: Watch | None = None, strict: bool = True) -> bool:
        """Until a barrier (True) or the end."""
        steps, uses, pc = self.steps, self.used, w.pc
        try:
            while True:
                if watch:
                    watch(w, pc)
                if w.busy and strict and not w.busy.isdisjoint(uses[pc]):
                    self.complain(w, w.busy & uses[pc])
                counts[pc] += 1
                to = steps[pc](w)
                if to is None:
                    pc += 1
                elif to < 0:
                    w.pc = pc + 1
                    return to == BARRIER
                else:
                    pc, w.jumps = to, w.jumps + 1
                    if w.jumps > MAX_JUMPS:
                        raise Fault(f"endless: {MAX_JUMPS} jumps")
        except (Fault, Unknown, IndexError, OverflowError) as error:
            text, where = self.assembly.lines[pc] if pc < len(steps) else ("the end", "no s_endpgm")
            raise Fault(f"{self.target.name}, {where}: {text}: {error}") from error

    def complain(self, w: Wave, registers: frozenset[int]) -> None:
        n = min(registers)
        name = f"s{n - SCALARS}" if n >= SCALARS else f"v{n}"
        raise Fault(f"late: {name} is used, but no s_waitcnt has waited for the load that fills it")

    def run_group(
        self, group: tuple[int, int, int], threads: int, memory: Arguments, kernarg: int, lds_size: int,
        watch: Watch | None = None, strict: bool = True,
    ) -> list[int]:  # fmt: skip
        """How often each instruction was executed by the waves of a workgroup."""
        counts, lanes, directives = [0] * len(self.steps), self.target.lanes, self.assembly.directives
        shared, waves = Lds(lds_size, threads // lanes), []
        for number in range(threads // lanes):
            scratch = Scratch(directives["private_segment_fixed_size"], lanes)
            wave = Wave(number, lanes, memory, shared, scratch)
            self.start(wave, group, kernarg)
            waves.append(wave)
        with np.errstate(all="ignore"):
            while waves:
                waves = [wave for wave in waves if self.run(wave, counts, watch, strict)]
                shared.period += 1
        return counts

    def start(self, w: Wave, group: tuple[int, int, int], kernarg: int) -> None:
        """What scalar registers hold at the start: where the arguments are, which workgroup this is."""
        d = self.assembly.directives
        given: list[int] = []
        sizes = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2,
                 "dispatch_id": 2, "flat_scratch_init": 2, "private_segment_size": 1}  # fmt: skip
        values = {"private_segment_buffer": [0, 0, ALL, 1 << 23], "kernarg_segment_ptr": [kernarg & ALL, kernarg >> 32]}
        for name, size in sizes.items():
            given += values.get(name, [0] * size) if d.get(f"user_sgpr_{name}") else []
        w.s[: len(given)] = given
        n = d["user_sgpr_count"]
        for axis, number in zip("xyz", group, strict=True):
            if d[f"system_sgpr_workgroup_id_{axis}"]:
                w.s[n] = number
                n += 1
        w.s[n] = 0  # where a wave's scratch begins: it has its own here

    def by_kind(self, counts: list[int]) -> Counter[str]:
        out: Counter[str] = Counter()
        for kind, count in zip(self.kinds, counts, strict=True):
            out[kind] += count
        return out
