"""Counts launches and the bytes that they move: `from traffic import TorchTraffic, kernel_traffic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

IS_COUNTED = os.environ.get("TRITON_INTERPRET") == "1"  # a GPU does not say what a kernel loads


def tensors(*trees: Any) -> list[Tensor]:
    """The tensors in nested arguments or results."""
    return [x for x in tree_leaves(trees) if isinstance(x, Tensor)]


class TorchTraffic(TorchFunctionMode):
    """Counts torch's launches and the bytes they move. Views and shapes are free."""

    launches = moved = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tensors(args, kwargs)}
        new = [x for x in tensors(out) if x.untyped_storage().data_ptr() not in known]
        if func is Tensor.mul_:  # writes over its first argument
            new = [out]
        is_store = func is Tensor.__setitem__
        if new or is_store:
            read = tensors(args[2:] if is_store else (args, kwargs))
            self.launches += 1
            self.moved += sum(x.nbytes for x in [*read, *(new or args[2:])])
        return out


class KernelTraffic:
    """What interpreted kernels do: their launches, and the bytes that they load and store."""

    def __init__(self, cached: bool, of: Tensor | None) -> None:
        self.launches = self.moved = 0
        self.cached = cached
        self.low = of.data_ptr() if of is not None else 0
        self.high = self.low + of.nbytes if of is not None else 2**63
        self.seen: set[tuple[int, int]] = set()  # tiles of this launch

    def count(self, ptrs: Any, mask: Any) -> None:
        inside = (ptrs.data >= self.low) & (ptrs.data < self.high) & mask.data
        self.moved += int(inside.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8

    def load(self, ptrs: Any, mask: Any) -> None:
        tile = int(np.min(ptrs.data)), ptrs.data.size
        if tile not in self.seen or not self.cached:
            self.count(ptrs, mask)
        self.seen.add(tile)

    def launch(self) -> None:
        self.launches += 1
        self.seen.clear()


@contextmanager
def kernel_traffic(cached: bool = True, of: Tensor | None = None) -> Iterator[KernelTraffic]:
    """Counts what interpreted kernels move, or only what is in the tensor `of`.

    A tile that a launch reads again is counted once if it is `cached`.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    traffic = KernelTraffic(cached, of)
    load, store, run = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store, GridExecutor.__call__

    def loading(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        traffic.load(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def storing(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.count(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launch()
        return run(self, *args, **kwargs)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loading, storing
    GridExecutor.__call__ = launching
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        GridExecutor.__call__ = run


@contextmanager
def load_order(**tensors: Tensor) -> Iterator[list[tuple[str, bool, int]]]:
    """The loads of interpreted kernels from `tensors`, in order: the tensor's name, whether the load has a mask, and the
    index of the first number that it loads, counted in the tensor's memory.

    Loads whose mask is false everywhere are left out.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    order: list[tuple[str, bool, int]] = []
    ranges = {name: (t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in tensors.items()}

    def loading(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        read = ptrs.data[mask.data]
        for name, (low, high) in ranges.items():
            if read.size and low <= read[0] < high:
                order.append((name, other is not None, int(read[0] - low) // tensors[name].itemsize))
        return load(self, ptrs, mask, other, *rest)

    InterpreterBuilder.create_masked_load = loading
    try:
        yield order
    finally:
        InterpreterBuilder.create_masked_load = load
