"""Writes docs/documents.md from docs/documents.tsv: `python docs/documents.py`.

A row is one statement of a document: where it stands there, whether it is built, the statement in our own words, our
places for it, a call that must be refused, and a note. A place is a chapter (`06f`), a name (`scheduler:Scheduler`,
after the folder and module where it is), a test (`test_rules.py::test_...`) or an entry of errata.md (`S14`).
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "nbs" / "_book"))  # appended: a folder of ours hides no installed package
from places import chapters, path_of  # noqa: E402

TITLES = {
    "S": "ATOM Scheduling & KV Cache Guide", "A": "ATOM Architecture Guide", "P": "Spyre: Scheduling and Padding Logic",
    "M": "MiniSGL Walk Through", "N": "nano-vLLM Scheduler",
}  # fmt: skip
HOW = {"built": "built", "otherwise": "done otherwise", "no GPU": "built, and never run on a GPU", "refused": "refused by name"}
TWICE = {"20t": "20_turns"}  # the chapter 20 that is not `20_parts`
HEAD = """# The five documents, statement by statement

Five documents stand behind this book. Here is what each of them says, in our own words and in its order, and where
that is: a chapter, a name in the package, a test. Where something is done otherwise, or not at all, the reason stands
beside it. What we found wrong in the documents is on a page of its own, [Where the documents err](errata.md); an entry
like [S14](errata.md#s14) leads there.

This page is written by `docs/documents.py` from `docs/documents.tsv`; a test follows every name to what has it, and
every refusal to the error that is raised.

"""


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
    with (ROOT / "docs" / "documents.tsv").open(newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Row(*row) for row in rows][1:]


def chapter(place: str) -> str | None:
    """The name of the notebook that a place like `06f` means."""
    if place in TWICE:
        return TWICE[place]
    found = [path.stem for path in chapters() if path.stem.startswith(f"{place}_")]
    return found[0] if found and re.fullmatch(r"\d\d\w?", place) else None


def link(place: str) -> str:
    """A place as Markdown. ValueError if it is of no known kind."""
    if name := chapter(place):
        return f"[{place.removesuffix('t')}](../{path_of(name).relative_to(ROOT)})"
    if re.fullmatch(r"[NSAMP]C?\d+", place):
        return f"[{place}](errata.md#{place.lower()})"
    if re.fullmatch(r"test_\w+\.py::test_\w+", place):
        return f"`{place.split('::')[1]}`"
    if re.fullmatch(r"[\w.]+:[\w.]+", place):
        module, name = place.split(":")
        return f"`{module.split('.')[-1]}.{name}`"
    raise ValueError(f"documents.tsv: no place is called {place!r}")


def line(row: Row) -> str:
    """A row of a table."""
    places = ", ".join(map(link, row.where.split()))
    refused = f"`{row.refused}` raises a ValueError. " if row.refused else ""
    how = "" if row.how == "built" else f"**{HOW[row.how]}**. "
    note = f"{row.note}." if row.note and row.note[-1] not in ".)" else row.note
    return f"| {row.statement} | {places} | {' '.join((how + refused + note).split())} |"


def count(rows: list[Row]) -> str:
    """How many statements there are of each kind."""
    lines = [f"| document | statements | {' | '.join(HOW.values())} |", "|---|---|" + "---|" * len(HOW)]
    for key, title in TITLES.items():
        found = Counter(row.how for row in rows if row.document == key)
        numbers = " | ".join(str(found[how]) for how in HOW)
        lines.append(f"| [{title}](#{anchor(title)}) | {found.total()} | {numbers} |")
    return "\n".join(lines) + "\n"


def anchor(title: str) -> str:
    """GitHub's and the site's anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def page() -> str:
    """documents.md."""
    rows = read()
    parts = [HEAD, count(rows)]
    for document, of_document in groupby(rows, lambda row: row.document):
        parts.append(f"\n## {TITLES[document]}\n")
        for group, of_group in groupby(of_document, lambda row: row.group):
            parts.append(f"\n### {group}\n\n| it says | where it is | remarks |\n|---|---|---|\n")
            parts.append("\n".join(map(line, of_group)) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "documents.md").write_text(page())
