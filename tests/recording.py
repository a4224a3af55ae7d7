"""Graphs without a GPU: the recorder that chapter 12 builds on its page, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAPTER = Path(__file__).resolve().parent.parent / "nbs" / "12a_graphs.ipynb"


def load_recorded_graph() -> Any:
    """The class `RecordedGraph`: stands in for `atom_mini.graphs.DeviceGraph`, the same arguments, the same face."""
    cells = json.loads(CHAPTER.read_text())["cells"]  # a machine with a GPU may have no notebook tools
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    exec("from contextlib import contextmanager\nfrom functools import partial\nimport torch\nfrom torch import Tensor", namespace)
    names = "class Notes(", "def again(", "class Recorder(", "class StrictRecorder(", "def recorded_kernels(", "class RecordedGraph"
    for name in names:
        exec(next(s for s in sources if name in s), namespace)
    return namespace["RecordedGraph"]
