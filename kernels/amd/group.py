"""A workgroup: waves that share LDS and start with the same arguments. A launch: a grid of workgroups."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .machine import ALL, UNSET, Wave
from .memory import Argument, Arguments, Lds, Scratch
from .program import Program, Watch, program_of
from .text import Assembly

# What scalar registers hold at the start, in this order, if a directive asks for it: name -> how many.
GIVEN = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2, "dispatch_id": 2,
         "flat_scratch_init": 2, "private_segment_size": 1}  # fmt: skip


def start(w: Wave, directives: dict[str, int], group: tuple[int, ...], kernarg: int) -> None:
    """Scalar registers say where the arguments are, and which workgroup this is; the others are not set."""
    known = {"private_segment_buffer": [0, 0, ALL, 1 << 23], "kernarg_segment_ptr": [kernarg & ALL, kernarg >> 32]}
    given = [name for name in GIVEN if directives.get(f"user_sgpr_{name}")]
    values = [n for name in given for n in known.get(name, [UNSET] * GIVEN[name])]
    w.s[: len(values)], first = values, directives["user_sgpr_count"]
    numbers = [n for axis, n in zip("xyz", group, strict=True) if directives[f"system_sgpr_workgroup_id_{axis}"]]
    w.s[first : first + len(numbers) + 1] = [*numbers, 0]  # at last where a wave's scratch begins: it has its own


def run_group(
    program: Program, group: tuple[int, ...], threads: int, memory: Arguments, kernarg: int, lds: int,
    watch: Watch | None = None, strict: bool = True,
) -> np.ndarray:  # fmt: skip
    """How often the waves of a workgroup executed each instruction."""
    counts, lanes, directives = [0] * len(program.steps), program.target.lanes, program.assembly.directives
    shared, private = Lds(lds, threads // lanes), directives["private_segment_fixed_size"]
    waves = [Wave(n, lanes, memory, shared, Scratch(private, lanes)) for n in range(threads // lanes)]
    for wave in waves:
        start(wave, directives, group, kernarg)
    with np.errstate(all="ignore"):
        while waves:
            waves = [wave for wave in waves if program.run(wave, counts, watch, strict)]
            shared.period += 1
    return np.array(counts)


def pack(assembly: Assembly, values: list[Any], grid: tuple[int, ...], threads: int) -> tuple[Any, int]:
    """The kernel's arguments as bytes, where the metadata wants them, and their address."""
    buffer = ctypes.create_string_buffer(assembly.directives["kernarg_size"] + 64)
    address, given = (ctypes.addressof(buffer) + 63) & ~63, iter(values)
    hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}  # tl.num_programs
    hidden |= {"hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    for offset, size, kind in assembly.arguments:
        value = hidden.get(kind, 0) if kind.startswith("hidden") else next(given, 0)  # Triton's scratch: null
        number = value.data_ptr() if hasattr(value, "data_ptr") else value
        if isinstance(number, float):
            raw = struct.pack("<f" if size == 4 else "<d", number)
        else:
            raw = (int(number) % 2 ** (8 * size)).to_bytes(size, "little")
        ctypes.memmove(address + offset, raw, size)
    return buffer, address


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

    def run(
        self, change: Callable[[Program], Program] | None = None, watch: Watch | None = None, strict: bool = True
    ) -> Launch:
        """On the tensors' own memory. `change` may spoil the program, `watch` sees each instruction,
        `strict=False` lets registers pass that have not come."""
        program = change(self.program) if change else self.program
        _buffer, address = pack(program.assembly, [*self.values.values()], self.grid, self.threads)
        memory = [Argument("the arguments", address, program.assembly.directives["kernarg_size"])]
        for name, value in self.values.items():
            if hasattr(value, "data_ptr"):
                memory.append(Argument(name, value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()))
        self.counts = sum(
            run_group(program, (x, y, z), self.threads, Arguments(memory), address, self.lds, watch, strict)
            for z, y, x in itertools.product(*map(range, self.grid[::-1]))
        )
        return self
