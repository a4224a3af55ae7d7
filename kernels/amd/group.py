"""A workgroup: waves that share LDS and start with the same arguments. A launch: a grid of workgroups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .machine import ALL, TTMP, Wave
from .memory import UNSET, Argument, Arguments, Bytes, Lds, unset
from .program import Program, Watch, program_of
from .text import Assembly

Change = Callable[[Program], Program]
# Scalar registers that a directive may ask for, and that lie before the address of the arguments: name -> what they hold.
BEFORE = {"private_segment_buffer": [0, 0, ALL, 1 << 23], "dispatch_ptr": [UNSET] * 2, "queue_ptr": [UNSET] * 2}


def start(w: Wave, assembly: Assembly, group: tuple[int, ...], kernarg: int) -> None:
    """Scalar registers say where the arguments are, and which workgroup this is; the others are not set."""
    directives = assembly.directives
    given = [n for name, values in BEFORE.items() if directives.get(f"user_sgpr_{name}") for n in values]
    given, first = [*given, kernarg & ALL, kernarg >> 32], directives["user_sgpr_count"]
    numbers = [n for axis, n in zip("xyz", group, strict=True) if directives[f"system_sgpr_workgroup_id_{axis}"]]
    w.s[: len(given)] = given
    if assembly.target.is_rdna4:
        w.s[TTMP + 7 : TTMP + 10] = [group[1] | group[2] << 16, w.number << 25, group[0]]
        return
    w.s[first : first + len(numbers) + 1] = [*numbers, 0]  # at last where a wave's scratch begins: it has its own


def run_group(
    program: Program, group: tuple[int, ...], threads: int, memory: Arguments, kernarg: int, lds: int,
    watch: Watch | None = None, strict: bool = True,
) -> np.ndarray:  # fmt: skip
    """How often the waves of a workgroup executed each instruction."""
    counts, lanes, directives = [0] * len(program.steps), program.target.lanes, program.assembly.directives
    shared, private = Lds(lds, threads // lanes), directives["private_segment_fixed_size"] * lanes
    waves = [Wave(n, lanes, memory, shared, Bytes(unset(private))) for n in range(threads // lanes)]
    for wave in waves:
        start(wave, program.assembly, group, kernarg)
    with np.errstate(all="ignore"):
        while waves:
            waves = [wave for wave in waves if program.run(wave, counts, watch, strict)]
            shared.barrier()
    return np.array(counts)


def pack(assembly: Assembly, values: list[Any], grid: tuple[int, ...]) -> np.ndarray:
    """The kernel's arguments as bytes, where the metadata wants them. Of the hidden ones `tl.num_programs` is known."""
    packed, given = np.zeros(assembly.directives["kernarg_size"], np.uint8), iter(values)
    hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}
    for offset, size, kind in assembly.arguments:
        value = hidden.get(kind, UNSET) if kind.startswith("hidden") else next(given, 0)  # Triton's scratch: null
        number = np.array(value.data_ptr() if hasattr(value, "data_ptr") else value)
        number = number.astype(f"{'f' if isinstance(value, float) else 'i'}{size}")
        packed[offset : offset + size] = np.frombuffer(number.tobytes(), np.uint8)
    return packed


@dataclass
class Launch:
    """A kernel's text, and what its workgroups are given."""

    kernel: str
    text: str
    values: dict[str, Any]  # tensors and numbers by the name of the argument
    grid: tuple[int, ...]
    threads: int
    lds: int
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, int))  # executions of each instruction

    @property
    def program(self) -> Program:
        return program_of(self.text)

    @property
    def kinds(self) -> Counter[str]:
        """Wave instructions by kind."""
        pairs = zip(self.program.kinds, self.counts, strict=False)  # no counts if it has not run
        return sum((Counter({kind: int(n)}) for kind, n in pairs), Counter())

    def run(self, change: Change | None = None, watch: Watch | None = None, strict: bool = True) -> Launch:
        """On the tensors' own memory. `change` may spoil the program, `watch` sees each instruction,
        `strict=False` lets registers pass that have not come."""
        program = change(self.program) if change else self.program
        packed = pack(program.assembly, [*self.values.values()], self.grid)
        known = [Argument("the arguments", packed.ctypes.data, packed.nbytes)]
        storages = {name: x.untyped_storage() for name, x in self.values.items() if hasattr(x, "data_ptr")}
        known += [Argument(name, storage.data_ptr(), storage.nbytes()) for name, storage in storages.items()]
        memory = Arguments(known)
        self.counts = sum(
            run_group(program, (x, y, z), self.threads, memory, packed.ctypes.data, self.lds, watch, strict)
            for z, y, x in itertools.product(*map(range, self.grid[::-1]))
        )
        return self
