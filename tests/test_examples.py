"""What the site's pages and the README show as code runs as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text()]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:python -m atom_mini|atom-mini) .*$|`(?:python -m atom_mini|atom-mini) [^`|]*`", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_of_a_page_run(page: Path) -> None:
    """In order, in one namespace; they contain their own assertions."""
    namespace: dict[str, Any] = {}
    snippets = PYTHON.findall(page.read_text())
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), namespace)


def test_readme_example_prints_what_the_readme_says() -> None:
    """The ten lines, in a process of their own."""
    readme = (ROOT / "README.md").read_text()
    example = next(s for s in PYTHON.findall(readme) if "from atom_mini import" in s)
    printed = re.search(r"```text\n(.*?)```", readme[readme.index(example) :], re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert printed is not None and result.stdout.split() == printed[1].split(), result.stderr


def test_readme_commands_run() -> None:
    """Each call of the program that the README shows."""
    commands = [c.strip("`") for c in COMMAND.findall((ROOT / "README.md").read_text())]
    assert commands
    for command in commands:
        words = re.sub(r"^(python -m atom_mini|atom-mini)", f"{sys.executable} -m atom_mini", command)
        result = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert result.returncode == 0, (command, result.stderr)


def test_readme_figures_are_the_recorded_ones() -> None:
    """Every number in the tables of the section *Figures*, and on which machine and day they were measured."""
    recorded = json.loads((ROOT / "tests" / "bench" / "results" / "readme.json").read_text())
    section = (ROOT / "README.md").read_text().split("## Figures")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert len(tables) == len(recorded["tables"])
    for table, rows in zip(tables, recorded["tables"], strict=True):
        lines = [line for line in table.splitlines() if not re.fullmatch(r"[|\- ]+", line)]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert {name: values for name, *values in cells} == rows
    assert recorded["machine"] in section and recorded["date"] in section
