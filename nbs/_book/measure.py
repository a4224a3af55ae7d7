"""How the book reads, in numbers: `python nbs/_book/measure.py`. The numbers inform, they do not command.

Counted are the cells that the reader sees (not `#| hide` or `#| fold`), exercises excepted, without `#|` lines. A cell asserts by
`assert` or by `assert_close` and its like. A definition (function, class, method under `@patch`) is *shown* if one of
the next three code cells that is not exported names it; a name in `self: SomeClass` does not count.
Text is counted in words, without code, tables and folded solutions.

Part I is weighed in tokens of Python's own tokenizer, without comments, docstrings and `__all__`: Ia is the engine (00
to 09), Ib what a GPU needs (10 to 12). A packed assignment is `a, b = x, y`. The package is counted in lines that hold
such a token.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import nbformat
from book import minutes, module_of
from execnb.nbio import read_nb
from fold import Method, is_patched, owner
from places import EVENING, ROOT, chapters, notebooks, number_of

MAX_EXPORTED = 40
WIDTH = max(len(path.stem) for path in notebooks())


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
    shown = [any(name in c.names for c in later if not c.is_exported) for name, later in defined]
    return {
        "cells": len(cells), "median": statistics.median(sizes), "p90": statistics.quantiles(sizes, n=10)[-1],
        "largest": max(exported), f">{MAX_EXPORTED}": sum(n > MAX_EXPORTED for n in exported),
        "assert %": 100 * statistics.mean(cell.asserts for cell in cells), "defs": len(defined),
        "shown %": 100 * statistics.mean(shown or [1]),
        "words": statistics.median(words), "longest": max(words),
        ">88": sum(len(line) > 88 for cell in cells for line in cell.lines),
    }  # fmt: skip


LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Weight(NamedTuple):
    """How much code there is."""

    tokens: int
    lines: int  # that hold a token
    packed: int  # assignments of the form `a, b = x, y`
    assignments: int


def weigh(source: str) -> Weight:
    """What the reader of a module has to take in: no comments, no docstrings, no `__all__`."""
    tree, skipped = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            skipped |= _lines(node.body[0]) if ast.get_docstring(node) is not None else set()
        elif isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
            skipped |= _lines(node)
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.start[0] not in skipped
    ]
    lines = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    packed = [n for n in made if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple)]
    packed = [n for n in packed if isinstance(n.value, ast.Tuple)]
    return Weight(len(tokens), len(lines), len(packed), len(made))


def _lines(node: ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def half_of(path: Path) -> str:
    """Ia (00 to 09), Ib (10 to 14), or nothing; the evening's chapters are in Ia."""
    return {"0": "Ia", "1": "Ib"}.get(path.stem[:1], "")


def weights() -> tuple[dict[str, dict[str, Weight]], dict[str, int]]:
    """Half of Part I -> module -> its weight; folder of the package -> its lines."""
    halves: dict[str, dict[str, Weight]] = {"Ia": {}, "Ib": {}}
    for path in filter(half_of, chapters()):
        if module := module_of(path):
            file = (ROOT / "atom_mini" / module.replace(".", "/")).with_suffix(".py")
            halves[half_of(path)][module] = weigh(file.read_text())
    folders: dict[str, int] = {}
    for file in sorted((ROOT / "atom_mini").rglob("*.py")):
        folder = file.parent.name
        folders[folder] = folders.get(folder, 0) + weigh(file.read_text()).lines
    return halves, folders


def print_weights() -> None:
    """The table under that of the chapters."""
    halves, folders = weights()
    totals = {half: Weight(*map(sum, zip(*found.values(), strict=True))) for half, found in halves.items()}
    for half, found in halves.items():
        print(f"\n{half}: {totals[half].tokens:,} tokens, {totals[half].lines:,} lines")
        print(*(f"{module} {weight.tokens:,}" for module, weight in found.items()), sep=", ")
    packed, made = (sum(t[i] for t in totals.values()) for i in (2, 3))
    print(f"\npacked assignments: {packed} of {made} ({packed / made:.1%})")
    print(f"package: {sum(folders.values()):,} lines:", end=" ")
    print(*(f"{folder} {lines:,}" for folder, lines in folders.items()), sep=", ")


def functions_per_token() -> int:
    """How many functions of the package one request of one token passes in a loaded engine, comprehensions not counted."""
    from atom_mini import LLM, SamplingParams

    home, seen = str(ROOT / "atom_mini"), set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home) and code.co_name[0] != "<":
            seen.add((code.co_filename, code.co_firstlineno))

    with LLM("tiny", device="cpu") as llm:
        for watch in (None, note):  # the first loads what is loaded once
            sys.setprofile(watch)
            llm.generate("12 + 7 =", SamplingParams(max_tokens=1), use_tqdm=False)
        sys.setprofile(None)
    return len(seen)


def print_minutes() -> None:
    """How long the first evening and Part I take to understand, chapter by chapter."""
    evening = {number_of(path): minutes(read_nb(path).cells) for path in chapters() if number_of(path) in EVENING}
    print(f"\nthe first evening takes {sum(evening.values())} minutes:", *(f"{name} {n}," for name, n in evening.items()))
    for half in ("Ia", "Ib"):
        found = {path.stem.split("_")[0]: minutes(read_nb(path).cells) for path in chapters() if half_of(path) == half}
        print(f"\n{half} takes {sum(found.values())} minutes:", *(f"{name} {n}," for name, n in found.items()))


def read(path: Path) -> tuple[list[Cell], list[int]]:
    """What the reader sees of a notebook: its code cells, and how many words each text cell has."""
    no = r"(?m)^#\| *(hide|fold|exercise|check|solution)"
    visible = [c for c in nbformat.read(path, as_version=4).cells if not re.search(no, c.source)]
    cells = [cell for c in visible if c.cell_type == "code" and (cell := Cell(c.source)).lines]
    for i, cell in enumerate(cells):
        cell.later = cells[i + 1 : i + 4]
    return cells, [n for c in visible if c.cell_type == "markdown" and (n := count_words(c.source))]


def cells_before(speaks: str = "06c") -> int:
    """The cells, text and code, before the chapter in which the model speaks; no exercises, none that is hidden."""
    total = 0
    for path in chapters():
        if path.stem.startswith(speaks):
            break
        sources = [c.source for c in nbformat.read(path, as_version=4).cells if not c.source.startswith("#| hide")]
        ends = (i for i, s in enumerate(sources) if re.search(r"(?m)^## (Exercises|Solutions)", s))
        total += next(ends, len(sources))
    return total


def main() -> None:
    paths = chapters()
    books = {path.stem: read(path) for path in paths}
    books["the book"] = tuple([*chain(*lists)] for lists in zip(*books.values(), strict=True))
    rows = {name: measure(*book) for name, book in books.items()}
    print(" " * WIDTH, *(f"{column:>8}" for column in rows["the book"]))
    for name, row in rows.items():
        print(f"{name:{WIDTH}}", *(f"{value:8.0f}" for value in row.values()))
    print_weights()
    lines = [len(cell.lines) for path in paths if half_of(path) for cell in books[path.stem][0]]
    print(f"lines of a cell in Part I, the median: {statistics.median(lines):.0f}")
    print(f"cells before it speaks: {cells_before()}")
    print(f"functions that one token passes: {functions_per_token()}")
    print_minutes()


if __name__ == "__main__":
    main()
