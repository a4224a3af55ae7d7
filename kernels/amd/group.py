"""A workgroup: waves that share LDS and start with the same arguments. A launch: a grid of workgroups."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .caches import Caches
from .machine import ALL, BARRIER, GIVE_WAY, TTMP, Wave
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


def turns(
    program: Program, waves: list[Wave], counts: list[int], watch: Watch | None = None, strict: bool = True,
    shuffle: Callable[[list[Wave]], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run a workgroup from barrier to barrier, and count; give way where another one may come between."""
    while waves:
        if shuffle:
            shuffle(waves)
        stops = []
        for wave in waves:
            while (stop := program.run(wave, counts, watch, strict)) == GIVE_WAY:
                yield
            stops.append(stop)
        waves = [wave for wave, stop in zip(waves, stops, strict=True) if stop == BARRIER]
        if waves:
            waves[0].lds.barrier()


def make_waves(
    program: Program, group: tuple[int, ...], threads: int, views: Callable[[int], Any], kernarg: int, lds: int
) -> list[Wave]:
    """The waves of a workgroup before the first instruction; `views` gives each one its memory."""
    lanes, count = program.target.lanes, threads // program.target.lanes
    shared, private = Lds(lds, count), program.assembly.directives["private_segment_fixed_size"] * lanes
    waves = [Wave(n, lanes, views(n), shared, Bytes(unset(private))) for n in range(count)]
    for wave in waves:
        start(wave, program.assembly, group, kernarg)
    return waves


def run_group(
    program: Program, group: tuple[int, ...], threads: int, memory: Arguments, kernarg: int, lds: int,
    watch: Watch | None = None, strict: bool = True,
) -> np.ndarray:  # fmt: skip
    """How often the waves of a workgroup executed each instruction."""
    counts, waves = [0] * len(program.steps), make_waves(program, group, threads, lambda n: memory, kernarg, lds)
    with np.errstate(all="ignore"):
        for _ in turns(program, waves, counts, watch, strict):
            pass
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

    def run(
        self, change: Change | None = None, watch: Watch | None = None, strict: bool = True, caches: int | None = None
    ) -> Launch:
        """On the tensors' own memory. `change` may spoil the program, `watch` sees each instruction,
        `strict=False` lets registers pass that have not come, `caches` is the seed of an order of the workgroups on a
        GPU that has caches."""
        program = change(self.program) if change else self.program
        packed = pack(program.assembly, [*self.values.values()], self.grid)
        known = [Argument("the arguments", packed.ctypes.data, packed.nbytes)]
        storages = {name: x.untyped_storage() for name, x in self.values.items() if hasattr(x, "data_ptr")}
        known += [Argument(name, storage.data_ptr(), storage.nbytes()) for name, storage in storages.items()]
        memory, given = Arguments(known), (packed.ctypes.data, self.lds)
        groups = [group[::-1] for group in itertools.product(*map(range, self.grid[::-1]))]
        if caches is None:
            found = (run_group(program, group, self.threads, memory, *given, watch, strict) for group in groups)
            self.counts = sum(found)
            return self
        counts, machine, waiting = [0] * len(program.steps), Caches(program.target, memory, caches), []
        for n, group in enumerate(groups):
            waves = make_waves(program, group, self.threads, functools.partial(machine.view, n), *given)
            waiting.append(turns(program, waves, counts, watch, strict, machine.random.shuffle))
        with np.errstate(all="ignore"):
            machine.run(waiting)
        self.counts = np.array(counts)
        return self
