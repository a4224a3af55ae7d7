"""The book holds together: every chapter runs, and package, outputs and README are what the notebooks say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from execnb.nbio import read_nb
from nbdev.clean import clean_nb
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted((ROOT / "nbs").glob("*.ipynb"))
MODULES = [p for p in sorted((ROOT / "atom_mini").glob("*.py")) if p.name != "_modidx.py"]
BY_HAND = {"__init__.py", "__main__.py"}
by_name = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)


def load_book() -> object:
    spec = importlib.util.spec_from_file_location("book", ROOT / "nbs" / "book.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@by_name
def test_notebook_runs(path: Path) -> None:
    """From top to bottom, in one shell, without the cells marked gpu or slow."""
    with torch.enable_grad():  # and back to it, whatever the chapter sets
        success, _ = run_notebook(path, skip_flags=["gpu", "slow"], basepath=ROOT)
    assert success


@by_name
def test_notebook_is_clean_and_holds_its_outputs(path: Path) -> None:
    """Cleaning changes nothing; outputs are stored; none of them is an error."""
    nb, cleaned = read_nb(path), read_nb(path)
    clean_nb(cleaned)
    assert nb == cleaned
    outputs = [o for cell in nb.cells if cell.cell_type == "code" for o in cell.outputs]
    assert outputs and all(o.output_type != "error" for o in outputs)


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem[0].isdigit()], ids=lambda p: p.stem)
def test_chapter_teaches(path: Path) -> None:
    """Each chapter has a promise, a figure from the running code, and two exercises with folded solutions."""
    nb = read_nb(path)
    text = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    assert re.match(r"# .+\n\n> .+", nb.cells[0].source)
    assert re.search(r"## Exercises\n(.|\n)*\n(\*\*)?2\.", text) and "<details>" in text
    assert any("image/png" in o.get("data", {}) for c in nb.cells if c.cell_type == "code" for o in c.outputs)


def test_package_is_in_sync_with_the_notebooks(tmp_path: Path) -> None:
    """Export a copy of the tree and compare every module."""
    for name in ("nbs", "atom_mini"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    for module in (tmp_path / "atom_mini").glob("*.py"):
        if module.name not in BY_HAND:
            module.unlink()
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}  # set by nbdev's test_nb; exports do nothing then
    subprocess.run([sys.executable, "nbs/book.py", "export"], cwd=tmp_path, env=env, check=True, capture_output=True)
    for module in MODULES:
        assert (tmp_path / "atom_mini" / module.name).read_text() == module.read_text(), module.name


def test_readme_is_in_sync_with_the_index() -> None:
    assert load_book().readme() == (ROOT / "README.md").read_text()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    ["config", "sequence", "block_manager", "radix_cache", "scheduler", "trace", "spyre", "engine_core", "overlap", "llm"],
)
def test_floors_without_torch(name: str) -> None:
    """The scheduler never touches a tensor: nothing up to the engine core imports torch, directly or not."""
    code = f"import sys, atom_mini.{name}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_imports_point_down_only() -> None:
    """Each module imports only from floors below."""
    floors = ["config", "sequence", "block_manager", "radix_cache", "scheduler", "trace", "attention", "models", "triton_attention"]
    floors += ["triton_ops", "sampler", "model_runner", "spyre", "spyre_runner", "graphs", "engine_core", "overlap"]
    floors += ["launcher", "llm", "command_line"]
    for name in floors:
        tree = ast.parse((ROOT / "atom_mini" / f"{name}.py").read_text())
        froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        modules = [(n.module or "").removeprefix("atom_mini.") for n in froms if n.level or "atom_mini" in (n.module or "")]
        assert all(floors.index(m) < floors.index(name) for m in modules), (name, modules)


def test_code_is_readable_as_plain_python() -> None:
    """Lines to 120 (nbdev's `__all__` may be longer), functions under 50 lines, public ones documented, no @patch."""
    for path in MODULES:
        tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
        in_all = {n for node in tree.body if "__all__" in ast.unparse(node) for n in range(node.lineno, node.end_lineno + 1)}
        assert all(len(line) <= 120 or n in in_all for n, line in enumerate(lines, 1)), path.name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                nested = isinstance(node, ast.FunctionDef) and node.col_offset > 0
                small = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno < 5
                assert ast.get_docstring(node) or nested or small, f"{path.name}: {node.name} has no docstring"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path.name}: {node.name} is too long"
                assert not any("patch" in ast.unparse(d) for d in node.decorator_list)
