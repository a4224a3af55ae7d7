"""In place of a GPU: inside `emulated(target)`, launches on CPU tensors compile for the target and run here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # both are read when triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from .group import Launch
from .machine import TARGETS


@contextmanager
def emulated(name: str, runs: bool = True, **options: Any) -> Iterator[list[Launch]]:
    """The launches, which have run; `options` are those of `Launch.run`."""
    target, compile_kernel, launches = GPUTarget("hip", name, TARGETS[name].lanes), JITFunction.run, []

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        kernel = compile_kernel(self, *args, grid=grid, warmup=True, **given)
        given = dict(zip(self.arg_names, args, strict=False)) | given
        values = {key: given[key] for key, kind in kernel.src.signature.items() if kind != "constexpr"}
        groups = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
        threads, lds = kernel.metadata.num_warps * TARGETS[name].lanes, kernel.metadata.shared
        launches.append(Launch(self.fn.__name__, kernel.asm["amdgcn"], values, groups, threads, lds))
        if runs:
            launches[-1].run(**options)
        return kernel

    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: name, get_current_stream=lambda device: 0
    )
    with patch.object(JITFunction, "run", launch), patch.object(triton.runtime.driver, "_active", driver):
        yield launches
