"""A reminder, not the goal: phrases that the pages, docstrings, comments and messages must not fall back into."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
import pytest
from places import notebooks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = sorted([*(ROOT / "atom_mini").rglob("*.py"), *(ROOT / "kernels").glob("*.py"), *(ROOT / "docs").rglob("*.py")])
INSTEAD = {  # a phrase -> what to write
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more than\b|less than\b|such\b|other\b|faster\b|slower\b)": "is not a",
    r"\bshall\b": "must, should, will",
    r"\b[Aa]lso if\b": "even if",
    r"\b[Aa]s often as\b": "each time",
    r"\b[Ww]hoever\b|\b[Ww]hosoever\b": "the caller, a reader, a request",
    r"\bhow-manieth\b": "the index of",
    r"(?:^|(?<=[.!] ))Who (?![^.!?\n]*\?)": "name the subject",
    r"\AWhat (?:is|has|was|may|must|can|runs|comes)\b(?![^.!?\n]*\?)(?!.* is )": "name the subject",
    r"\b(?:nobody|somebody)(?:'s)?\b": "name the subject",
    r"\b(?:rooms?|desks?) (?:of|that|for) (?:the )?(?:part|book|module|chapter)": "module, chapter",
    r"\bof one's own\b": "its own",
    r"\bin the place of\b": "instead of",
}


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """What a reader reads in a file, with its place: prose of notebooks and pages; docstrings, comments and strings of code."""
    if path.suffix == ".md":
        yield path.name, re.sub(r"(?s)```.*?```", "", path.read_text())
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            place = f"{path.stem}, cell {number}"
            if cell.cell_type == "markdown":
                yield place, re.sub(r"(?s)```.*?```", "", cell.source)
            elif "%%" not in cell.source and not cell.source.lstrip().startswith(("!", "%")):
                yield from of_code(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source), place)
    else:
        yield from of_code(path.read_text(), path.name)


def of_code(source: str, place: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 20:
            yield place, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#|"):
            yield place, token.string.lstrip("# ")


@cache
def everything() -> list[tuple[str, str]]:
    paths = [
        *PAGES,
        *notebooks(),
        *(path for path in CODE if "atom_mini" not in path.parts or path.name == "__init__.py"),
    ]
    return [text for path in paths for text in texts(path)]


@pytest.mark.parametrize("phrase", INSTEAD)
def test_phrases_that_are_not_english_do_not_come_back(phrase: str) -> None:
    found = [
        f"{place}: {text[max(0, m.start() - 40) : m.end() + 40]!r}"
        for place, text in everything()
        for m in re.finditer(phrase, text)
    ]
    assert not found, f"write {INSTEAD[phrase]!r} instead:\n" + "\n".join(found)


def test_a_phrase_is_found_wherever_it_is_written() -> None:
    source = 'def f():\n    """It shall stop there, here."""\n    # also if\n    raise ValueError("This text is no name of it")\n'
    found = [phrase for phrase in INSTEAD for _, text in of_code(source, "x") if re.search(phrase, text)]
    assert len(found) == 3
