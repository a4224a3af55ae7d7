"""Graphs without a GPU: the recorder that chapter 12 builds on its page, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atom_mini.gpu.graphs import DeviceGraph, GraphRunner
from atom_mini.options.args import EngineArgs
from atom_mini.options.build import choose_ops

CHAPTER = Path(__file__).resolve().parent.parent / "nbs" / "gpu" / "12a_graphs.ipynb"


def load(*names: str) -> list[Any]:
    """These definitions of the chapter's page."""
    cells = json.loads(CHAPTER.read_text())["cells"]  # a machine with a GPU may have no notebook tools
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    exec("from contextlib import contextmanager\nfrom functools import partial\nimport torch\nfrom torch import Tensor", namespace)
    for name in ("class Notes(", "class Recorder(", "class RecordedGraph"):
        exec(next(s for s in sources if name in s), namespace)
    return [namespace[name] for name in names]


def load_recorded_graph() -> Any:
    """The class `RecordedGraph`: stands in for `atom_mini.gpu.graphs.DeviceGraph`, the same arguments, the same face."""
    return load("RecordedGraph")[0]


def load_recorder() -> list[Any]:
    """What `RecordedGraph` is made of: a recorder of operations, and what makes it hear of the interpreter's kernels."""
    return load("Recorder", "recorded_kernels")


def graph_runner(config: EngineArgs, record: Any = DeviceGraph) -> GraphRunner:
    """A `GraphRunner` with the operations that the options ask for, whose steps `record` records."""
    return GraphRunner(config, *choose_ops(config), record=record)
