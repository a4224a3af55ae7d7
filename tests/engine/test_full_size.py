"""Published shapes with random weights: what small models cannot show about rounding, time and memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import FULL_SIZE, measure_loading, save_full_size

pytestmark = pytest.mark.large  # minutes, 3 GB of disk and 10 GB of memory


@pytest.fixture(scope="module", params=FULL_SIZE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One checkpoint at a time, with all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    folder = tmp_path_factory.mktemp(request.param, numbered=False)
    save_full_size(request.param, folder)
    yield folder
    shutil.rmtree(folder)
    torch.set_num_threads(threads)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading(folder: Path, dtype: str) -> None:
    """Weights go from the file to their place: at no time is there a second copy of the model."""
    used = measure_loading(folder, dtype)
    ratio = used["peak"] / used["weights"]
    print(f"\n{folder.name} {dtype}: {used['weights'] / 1e9:.2f} GB in {used['seconds']:.1f} s, peak {ratio:.2f} x")
    assert 0.9 < ratio <= 1.3


