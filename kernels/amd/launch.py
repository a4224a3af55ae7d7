"""In place of a GPU: inside `emulated(target)`, Triton's launches on CPU tensors compile for the target and run here."""

from __future__ import annotations

import ctypes
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


@contextmanager
def emulated(
    name: str, change: Callable[[str], str] | None = None, watch: Watch | None = None, strict: bool = True
) -> Iterator[list[Launch]]:
    """`change` may spoil a kernel's text, `watch` sees each instruction, `strict=False` lets late registers pass."""
    target, run, launches = GPUTarget("hip", name, TARGETS[name].lanes), JITFunction.run, []
    programs: dict[str, Program] = {}

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        text = change(kernel.asm["amdgcn"]) if change else kernel.asm["amdgcn"]
        program = programs.setdefault(text, None) or Program(read_assembly(text))
        programs[text] = program
        given = dict(zip(self.arg_names, args, strict=False)) | options
        names = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        whole = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
        threads = kernel.metadata.num_warps * TARGETS[name].lanes
        keep, address = pack(program.assembly, [given[name] for name in names], whole, threads)
        storages = {}
        for argument in names:
            if hasattr(given[argument], "data_ptr"):
                storage = given[argument].untyped_storage()
                storages.setdefault(storage.data_ptr(), Argument(argument, storage.data_ptr(), storage.nbytes()))
        own = Argument("the arguments", address, program.assembly.directives["kernarg_size"])
        memory, start = Arguments([own, *storages.values()]), time.perf_counter()
        counts = [0] * len(program.steps)
        for z in range(whole[2]):
            for y in range(whole[1]):
                for x in range(whole[0]):
                    group = (x, y, z)
                    more = program.run_group(group, threads, memory, address, kernel.metadata.shared, watch, strict)
                    counts = [a + b for a, b in zip(counts, more, strict=True)]
        launches.append(Launch(self.fn.__name__, whole, program, counts, time.perf_counter() - start))
        return kernel

    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: name, get_current_stream=lambda device: 0
    )
    with patch.object(JITFunction, "run", launch), patch.object(triton.runtime.driver, "_active", driver):
        yield launches
