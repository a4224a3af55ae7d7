"""How the book reads, in numbers: `python nbs/measure.py [--check] [MODULE ...]`; with --check a missed aim fails.

Counted are the cells that the reader sees (not `#| hide`), exercises excepted, without `#|` lines. A cell asserts by
`assert` or by `assert_close` and its like. A definition (function, class, method under `@patch`) is *used* if one of
the next three code cells names it, and *shown* if one of them that is not exported does; a name in `self: SomeClass`
does not count.
Text is counted in words, without code, tables and folded solutions. The spine is Part I, or the MODULEs (`config`).
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from itertools import chain
from pathlib import Path

import nbformat
from book import is_part_one, module_of
from fold import Method, is_patched, owner

ROOT = Path(__file__).resolve().parent.parent
MAX_EXPORTED, SPINE = 40, "spine"
AIMS = {  # column -> the largest value, or with a minus the smallest
    "median": 6, "p90": 20, f">{MAX_EXPORTED}": 0, "used %": -100, "words": 45, "longest": 150, ">88": 0, SPINE: 2000,
}  # fmt: skip
WIDTH = max(len(p.stem) for p in (ROOT / "nbs").glob("*.ipynb"))


class Cell:
    """A code cell as the reader sees it."""

    def __init__(self, source: str) -> None:
        self.is_exported = bool(re.search(r"(?m)^#\| *export", source))
        self.lines = re.sub(r"(?m)^#\|.*\n?", "", source).strip("\n").splitlines()
        self.tree = ast.parse("\n".join("pass" if re.match("[%!]", line) else line for line in self.lines))
        functions = [n for n in self.tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.is_kernel = any("triton.jit" in ast.unparse(d) for f in functions for d in f.decorator_list)
        self.defined = [n.name for n in self.tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        self.defined = [d for d in self.defined if not d.startswith("__")] if self.is_exported else []
        for node in filter(is_patched, functions):  # the class it is added to is not used by that
            if first := Method(node, owner(node)).parameter:
                first.annotation = None
        self.names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(self.tree)}
        self.later: list[Cell] = []  # the next three
        asserts = any(isinstance(n, ast.Assert) for n in ast.walk(self.tree))
        self.asserts = asserts or any(name.startswith("assert_") for name in self.names)


def count_words(text: str) -> int:
    """The words of a text cell that are read one after the other."""
    return len(re.sub(r"(?ms)^```.*?^```|<details>.*?</details>|^\|.*?$|\$\$.*?\$\$", "", text).split())


def measure(cells: list[Cell], words: list[int]) -> dict[str, float]:
    """One row of the table: of a notebook or, its lists joined, of the book."""
    sizes = [len(cell.lines) for cell in cells]
    exported = [len(cell.lines) for cell in cells if cell.is_exported and not cell.is_kernel] or [0]
    defined = [(name, cell.later) for cell in cells for name in cell.defined]
    used = [any(name in c.names for c in later) for name, later in defined]
    shown = [any(name in c.names for c in later if not c.is_exported) for name, later in defined]
    return {
        "cells": len(cells), "median": statistics.median(sizes), "p90": statistics.quantiles(sizes, n=10)[-1],
        "largest": max(exported), f">{MAX_EXPORTED}": sum(n > MAX_EXPORTED for n in exported),
        "assert %": 100 * statistics.mean(cell.asserts for cell in cells), "defs": len(defined),
        "used %": 100 * statistics.mean(used or [1]), "shown %": 100 * statistics.mean(shown or [1]),
        "words": statistics.median(words), "longest": max(words),
        ">88": sum(len(line) > 88 for cell in cells for line in cell.lines),
    }  # fmt: skip


def count_code(path: Path) -> int:
    """The lines that are neither blank, comment nor docstring, nor written by nbdev."""
    text = re.sub(r"(?ms)^__all__ = \[.*?\]$", "", path.read_text())
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docs = [n.body[0] for n in nodes if ast.get_docstring(n) is not None]
    documented = {n for d in docs for n in range(d.lineno, d.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(n not in documented and not re.match(r"\s*(#|$)", line) for n, line in lines)


def read(path: Path) -> tuple[list[Cell], list[int]]:
    """What the reader sees of a notebook: its code cells, and how many words each text cell has."""
    no = r"(?m)^#\| *(hide|exercise|check|solution)"
    visible = [c for c in nbformat.read(path, as_version=4).cells if not re.search(no, c.source)]
    cells = [cell for c in visible if c.cell_type == "code" and (cell := Cell(c.source)).lines]
    for i, cell in enumerate(cells):
        cell.later = cells[i + 1 : i + 4]
    return cells, [n for c in visible if c.cell_type == "markdown" and (n := count_words(c.source))]


def main(*arguments: str) -> None:
    paths = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))
    books = {path.stem: read(path) for path in paths}
    books["the book"] = tuple([*chain(*lists)] for lists in zip(*books.values(), strict=True))
    rows = {name: measure(*book) for name, book in books.items()}
    print(" " * WIDTH, *(f"{column:>8}" for column in rows["the book"]))
    for name, row in rows.items():
        print(f"{name:{WIDTH}}", *(f"{value:8.0f}" for value in row.values()))
    exported = [m.replace(".", "/") for p in paths if is_part_one(p) and (m := module_of(p))]
    modules = [a for a in arguments if a != "--check"] or exported
    sizes = {name: count_code(ROOT / "atom_mini" / f"{name}.py") for name in modules}
    print(f"\nspine: {sum(sizes.values())} lines of code:", *(f"{name} {n}" for name, n in sizes.items()))
    found = {**rows["the book"], SPINE: sum(sizes.values())}
    missed = {k: aim for k, aim in AIMS.items() if (found[k] > aim if aim >= 0 else found[k] < -aim)}
    for column, aim in missed.items():
        print(f"missed: {column} is {found[column]:.0f}, the aim {abs(aim)}")
    if missed and "--check" in arguments:
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
