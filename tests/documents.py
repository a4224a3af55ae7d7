"""What the five documents behind this book say, statement by statement: tests/data/documents.tsv.

A row is one statement of a document: the section it is from, whether it is built, the statement in our own words, our
places for it, a call that must be refused, and a note. A place is a chapter (`04`), a name (`scheduler:Scheduler`,
after the folder and module that have it), a test (`test_rules.py::test_...`) or an entry of tests/data/errata.md (`S14`).
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "nbs" / "_book"))  # appended: a folder of ours hides no installed package
from places import chapters  # noqa: E402

TITLES = {
    "S": "ATOM Scheduling & KV Cache Guide", "A": "ATOM Architecture Guide", "P": "Spyre: Scheduling and Padding Logic",
    "M": "MiniSGL Walk Through", "N": "nano-vLLM Scheduler",
}  # fmt: skip
HOW = ("built", "otherwise", "no GPU", "refused")  # "no GPU": built, and never run on a GPU


class Row(NamedTuple):
    """One statement."""

    document: str  # a key of `TITLES`
    group: str
    how: str  # a key of `HOW`
    statement: str
    where: str  # places, with spaces between them
    refused: str  # a call of Python that raises a ValueError
    note: str


def read() -> list[Row]:
    """The table."""
    with (ROOT / "tests" / "data" / "documents.tsv").open(newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Row(*row) for row in rows][1:]


def chapter(place: str) -> str | None:
    """The name of the notebook that a place like `06f` means."""
    found = [path.stem for path in chapters() if path.stem.startswith(f"{place}_")]
    return found[0] if found and re.fullmatch(r"\d\d\w?", place) else None
