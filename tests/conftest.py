"""Settings for all tests."""

from __future__ import annotations

import os

import pytest

from atom_mini.instruments.command_line import spin_less

spin_less(os.environ)  # before torch loads OpenMP, which reads it then; for the processes of tests, too

import torch  # noqa: E402

torch.set_num_threads(1)  # small models: more threads only wait for each other, above all on a busy machine
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its kernels then run without a GPU


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are skipped with a reason where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder of that name is a keyword, too
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))
