"""Chapters that export nothing: their definitions are found all the same, and the package has none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import script
from places import path_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_chapter_is_loaded_once_and_has_what_its_script_cells_define(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = ["#| hide\n#| script\nimport sys", "x = 1", "#| script\nfrom __future__ import annotations\n\nX = 2",
               "#| script\ndef f() -> NotHere:\n    raise ValueError(X)"]  # fmt: skip
    cells = [{"cell_type": "code", "source": source.splitlines(True)} for source in sources]
    (tmp_path / "nbs" / "later").mkdir(parents=True)
    (tmp_path / "nbs" / "later" / "95a_other.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "nbs" / "96_empty.ipynb").write_text(json.dumps({"cells": cells[1:2]}))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    other = script.load("95a_other")
    assert script.load("95a_other") is other is sys.modules.pop("other") and not hasattr(other, "x")
    with pytest.raises(ValueError, match="2"):
        other.f()
    with pytest.raises(ValueError, match=r"96_empty\.ipynb has no cell"):
        script.load("96_empty")


@pytest.mark.parametrize("chapter", ["90_tiny_model", "91_tiny_head"])
@pytest.mark.slow
def test_the_appendix_is_a_script_and_not_in_the_package(chapter: str) -> None:
    help_ = [sys.executable, "nbs/_book/script.py", chapter, "--help"]
    result = subprocess.run(help_, cwd=ROOT, capture_output=True, text=True)
    assert f"usage: python nbs/_book/script.py {chapter}" in result.stdout, result.stderr
    assert "default_exp" not in path_of(chapter).read_text()
    assert not (ROOT / "atom_mini" / "appendix").exists()
