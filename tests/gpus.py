"""Two GPUs that are this CPU, for tests: torch.cuda's bookkeeping, the interpreter's kernels, the chapter's recordings.

As on real GPUs, each thread has a *current device*, 0 until somebody changes it. A Triton kernel, a replay and an event
go to that one; entering a stream makes its device current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recording import load_recorder
from torch.overrides import TorchFunctionMode

COUNT, BYTES = 2, 2**26
CPU = torch.device("cpu")


def on_cpu(x: Any) -> Any:
    return CPU if isinstance(x, torch.device) and x.type == "cuda" else x


def index_of(device: Any) -> int | None:
    return (torch.device(device) if isinstance(device, str) else device).index


class OnCpu(TorchFunctionMode):
    """Tensors of a GPU are made on the CPU. A thread has to enter it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {n: on_cpu(x) for n, x in (kwargs or {}).items() if n != "pin_memory"}
        return func(*map(on_cpu, args), **options)


class Gpus:
    """`log`: (what, the device that it went to, its stream), in order; `captures`, `modes`: the streams and error modes."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.log: list[tuple[str, int, int]] = []
        self.captures: list[Any] = []
        self.modes: set[str] = set()
        self.waits: list[Any] = []

    @property
    def current(self) -> int:
        return getattr(self.thread, "current", 0)

    def note(self, what: str) -> None:
        self.log.append((what, self.current, id(getattr(self.thread, "stream", None))))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, index = self.current, index_of(device)
        self.thread.current = before if index is None else index
        try:
            yield
        finally:
            self.thread.current = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before = getattr(self.thread, "stream", None)
        self.thread.stream = stream
        with self.device(stream.device):
            try:
                yield
            finally:
                self.thread.stream = before

    def make_stream(self, device: Any = None) -> Any:
        """`torch.cuda.Stream`: of the current device, unless another is asked for."""
        index = self.current if device is None else index_of(device)
        event = SimpleNamespace(synchronize=lambda: None)
        return SimpleNamespace(
            device=torch.device("cuda", index), synchronize=lambda: None, wait_event=lambda event: None,
            record_event=lambda: event, wait_stream=self.waits.append,
        )  # fmt: skip

    def make_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None, record=lambda: self.note("event"))

    @contextmanager
    def graph(
        self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """`torch.cuda.graph`. Its default stream belongs to the device of the first capture."""
        if stream is None:
            stream = self.default = getattr(self, "default", None) or self.make_stream()
        self.captures.append(stream)
        self.modes.add(capture_error_mode)
        with self.stream(stream), self.recorder() as recorder, self.listen(recorder.launches):
            self.note("capture")
            yield

        def replay() -> None:
            self.note("replay")
            with torch.inference_mode():
                for launch in recorder.launches:
                    launch()

        graph.replay = replay

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import GridExecutor

        import atom_mini.loading as loading

        self.recorder, self.listen = load_recorder()
        launch, blank = GridExecutor.__call__, loading.blank_model

        @wraps(launch)
        def noting(*args: Any, **options: Any) -> Any:
            self.note("kernel")
            return launch(*args, **options)

        def fakes(**names: Any) -> None:
            for name, fake in names.items():
                monkeypatch.setattr(torch.cuda, name, fake)

        properties = SimpleNamespace(multi_processor_count=4, major=9, minor=0, name="a CPU")
        nothing, none, some = (lambda *_: None), (lambda *_: 0), (lambda *_: BYTES)
        fakes(is_available=lambda: True, device_count=lambda: COUNT, current_device=lambda: self.current)
        fakes(current_stream=lambda device: f"the stream of {device}")
        fakes(device=self.device, stream=self.stream, Stream=self.make_stream, Event=self.make_event)
        fakes(graph=self.graph, CUDAGraph=SimpleNamespace, graph_pool_handle=lambda: (0, 1))
        fakes(get_device_properties=lambda device: properties, mem_get_info=lambda *_: (BYTES, BYTES))
        fakes(synchronize=nothing, empty_cache=nothing, reset_peak_memory_stats=nothing)
        fakes(memory_reserved=some, max_memory_allocated=none)
        monkeypatch.setattr(GridExecutor, "__call__", noting)
        monkeypatch.setattr(torch.Tensor, "record_stream", nothing)
        # `with torch.device` comes after a mode
        monkeypatch.setattr(loading, "blank_model", lambda *args: blank(*map(on_cpu, args)))

    def take(self) -> dict[str, set[int]]:
        """What has gone to which devices, since the last time."""
        log, self.log = self.log, []
        return {what: {at for other, at, _ in log if other == what} for what, _, _ in log}
