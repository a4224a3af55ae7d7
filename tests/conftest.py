"""Settings for all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import folders  # noqa: F401
import pytest

from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # before torch loads OpenMP, which reads it then; for the processes of tests, too
os.environ.setdefault("MKL_CBWR", "AUTO")  # so that sums have one order, wherever their numbers lie in memory

import torch  # noqa: E402

pytest_plugins = ["outcomes"]

torch.set_num_threads(1)  # small models: more threads only wait for each other, above all on a busy machine
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its kernels then run without a GPU


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are skipped without a GPU, with this reason. Tests that read the site are marked: `make test-docs` builds
    it once for all of them."""
    for item in items:
        if "pages" in getattr(item, "fixturenames", ()):
            item.add_marker("site")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # a folder of that name is a keyword, too
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the engine's modules, those for a GPU, and the chapters of the evening and Part I, without the
    package's other folders."""
    import book  # not above: it needs notebook tools, which a machine with a GPU may lack
    from places import TOOLS

    root, home = Path(__file__).resolve().parent.parent, tmp_path_factory.mktemp("alone")
    shutil.copytree(root / "atom_mini" / "tiny", home / "atom_mini" / "tiny")
    for module in (root / "atom_mini").glob("*.py"):
        shutil.copy(module, home / "atom_mini")
    shutil.copytree(root / "atom_mini" / "gpu", home / "atom_mini" / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / TOOLS, home / TOOLS, ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"))
    for path in filter(book.is_part_one, book.notebooks([])):
        (home / path.relative_to(root)).parent.mkdir(exist_ok=True)
        shutil.copy(path, home / path.relative_to(root))
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(root / name, home)
    return home
