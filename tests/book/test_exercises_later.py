"""The chapters after Part I, as test_exercises.py runs those before; a file of its own, for a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_exercises import LATER, check_chapter, study  # noqa: F401  a fixture


@pytest.mark.parametrize("path", LATER)
def test_chapter_runs_and_its_exercises_bite(path: Path, study: Any) -> None:  # noqa: F811
    check_chapter(path, study(path))
