"""In place of a GPU: inside `emulated(target)`, Triton's launches on CPU tensors compile for the target and run here."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # both are read when triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from .machine import TARGETS
from .memory import Argument, Arguments
from .program import Program, Watch
from .text import Assembly, read_assembly


@dataclass
class Launch:
    """One kernel that ran."""

    kernel: str
    grid: tuple[int, int, int]
    program: Program
    counts: list[int]  # executions of each instruction
    seconds: float

    @property
    def kinds(self) -> Counter[str]:
        return self.program.by_kind(self.counts)


def pack(assembly: Assembly, values: list[Any], grid: tuple[int, int, int], threads: int) -> tuple[Any, int]:
    """The kernel's arguments as bytes, where the metadata wants them, and their address."""
    size = assembly.directives["kernarg_size"]
    buffer = ctypes.create_string_buffer(size + 64)
    address = (ctypes.addressof(buffer) + 63) & ~63
    hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}  # tl.num_programs
    hidden |= {"hidden_group_size_x": threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    given = iter(values)
    for offset, size, kind in assembly.arguments:
        value = hidden.get(kind, 0) if kind.startswith("hidden") else next(given, 0)  # Triton's scratch: null
        if isinstance(value, float):
            raw = struct.pack("<f" if size == 4 else "<d", value)
        else:
            number = value.data_ptr() if hasattr(value, "data_ptr") else int(value)
            raw = number.to_bytes(size, "little", signed=number < 0)
        ctypes.memmove(address + offset, raw, size)
    return buffer, address


@functools.cache
def program_of(text: str) -> Program:
    return Program(read_assembly(text))


@contextmanager
def emulated(
    name: str, change: Callable[[Program], Program] | None = None, watch: Watch | None = None, strict: bool = True
) -> Iterator[list[Launch]]:
    """`change` may spoil a program, `watch` sees each instruction, `strict=False` lets late registers pass."""
    target, run, launches = GPUTarget("hip", name, TARGETS[name].lanes), JITFunction.run, []

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel, start = run(self, *args, grid=grid, warmup=True, **options), time.perf_counter()
        program = program_of(kernel.asm["amdgcn"])
        program = change(program) if change else program
        given = dict(zip(self.arg_names, args, strict=False)) | options
        values = {name: given[name] for name, kind in kernel.src.signature.items() if kind != "constexpr"}
        groups = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
        threads = kernel.metadata.num_warps * TARGETS[name].lanes
        keep, address = pack(program.assembly, [*values.values()], groups, threads)
        memory = [Argument("the arguments", address, program.assembly.directives["kernarg_size"])]
        for argument, value in values.items():
            if hasattr(value, "data_ptr"):
                storage = value.untyped_storage()
                memory.append(Argument(argument, storage.data_ptr(), storage.nbytes()))
        counts = [0] * len(program.steps)
        for z, y, x in itertools.product(*map(range, groups[::-1])):
            more = program.run_group(
                (x, y, z), threads, Arguments(memory), address, kernel.metadata.shared, watch, strict
            )
            counts = [a + b for a, b in zip(counts, more, strict=True)]
        launches.append(Launch(self.fn.__name__, groups, program, counts, time.perf_counter() - start))
        return kernel

    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: name, get_current_stream=lambda device: 0
    )
    with patch.object(JITFunction, "run", launch), patch.object(triton.runtime.driver, "_active", driver):
        yield launches
