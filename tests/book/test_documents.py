"""tests/data/documents.tsv: every place in the table is there, and every refusal is raised; docs/mapping.md counts it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from atom_mini import EngineArgs
from atom_mini.checkpoint import ModelRegistry

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import documents  # noqa: E402

ROWS = documents.read()
PLACES = sorted({place for row in ROWS for place in row.where.split()})
REFUSED = sorted({row.refused for row in ROWS if row.refused})


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def is_there(place: str) -> bool:
    """A chapter, an entry of tests/data/errata.md, a test, or a name: of a module, in a class, or that its methods set."""
    if documents.chapter(place):
        return True
    if re.fullmatch(r"[NSAMP]C?\d+", place):
        return f"#### {place}\n" in text_of(ROOT / "tests" / "data" / "errata.md")
    if "::" in place:
        file, test = place.split("::")
        return any(f"\ndef {test}(" in text_of(path) for path in (ROOT / "tests").rglob(file))
    module, _, name = place.partition(":")
    if not name:
        return False
    found: Any = importlib.import_module(f"atom_mini.{module}")
    *owners, last = name.split(".")
    for owner in owners:
        found = getattr(found, owner)
    if hasattr(found, last):
        return True
    sources = [inspect.getsource(cls) for cls in getattr(found, "__mro__", ())[:-1]]
    return any(re.search(rf"(?m)self\.{last}(: .*)? = |^    {last}: |[ .]{last} = ", source) for source in sources)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_there(place: str) -> None:
    assert is_there(place), place


@pytest.mark.parametrize("call", REFUSED)
def test_every_refusal_is_raised(call: str) -> None:
    """With a message that names what was asked for."""
    with pytest.raises(ValueError) as error:
        eval(call, {"EngineArgs": EngineArgs, "ModelRegistry": ModelRegistry, "Path": Path})
    assert len(str(error.value)) > 20


def test_the_mapping_counts_the_statements() -> None:
    """The table of docs/mapping.md: document, statements, and how many are built, done otherwise, untried, refused."""
    page = (ROOT / "docs" / "mapping.md").read_text()
    for key, title in documents.TITLES.items():
        found = Counter(row.how for row in ROWS if row.document == key)
        numbers = " | ".join(str(n) for n in (found.total(), *(found[how] for how in documents.HOW)))
        assert re.search(rf"{title}(\]\(\S+\))? \| {re.escape(numbers)} \|", page), (title, numbers)


def test_every_statement_has_a_place_or_a_reason() -> None:
    """What is not as the document says has a reason; what is has a place; no statement stands twice in a group."""
    assert len(ROWS) == len({row[:4] for row in ROWS}) > 340
    for row in ROWS:
        assert row.document in documents.TITLES and row.how in documents.HOW, row
        assert row.where, row
        reason = row.note or row.refused or re.search(r"\b[NSAMP]C?\d+\b", row.where)
        assert row.how != "otherwise" or reason, row
        assert (row.how != "refused") or (row.refused and row.note), row


HERE = re.findall(r"(?m)^\| [^|]+ \| ([^|]+) \|.*\|$|^\| `[^|]+ \| ([^|]+) \|$", text_of(ROOT / "docs" / "mapping.md"))
NAMES = sorted({name for cell in HERE for name in re.findall(r"`([A-Za-z_][\w.]*)`", "".join(cell))})
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "atom_mini").rglob("*.py")))


@pytest.mark.parametrize("name", NAMES)
def test_the_mapping_names_what_is_here(name: str) -> None:
    """The column "here" of its tables, word for word."""
    assert re.search(rf"\b{name.split('.')[-1]}\b", SOURCE), name
