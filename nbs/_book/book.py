"""Keeps the book in order: `python nbs/_book/book.py run|export|readme|solutions|fetch|checks [NOTEBOOK ...]`.

A notebook is named by its path or just `04_scheduler`; without any it is all of them.

run        execute the notebooks (not exercises and what is marked `#| eval: false`, gpu or slow; what is marked ray only
           where Ray is installed, and real only where the real weights are: `make real`), store outputs and a digest
           of the code that made them, clean
export     write the package from the notebooks, with methods under `@patch` folded into their classes (fold.py)
readme     write README.md and pages of docs/ from index.ipynb
solutions  move the solutions of exercises to the end of their chapters
fetch      give the notebooks their hidden cell that fetches the book where it is missing (`run` does it, too)
checks     number the checks of exercises and tag them, so that Run All goes on behind an unsolved one (`run` does it, too)

An exercise is a text cell, then code cells that begin with `#| exercise` (what the reader fills in) and `#| check` (it
fails until then). Its solution begins with `#| solution` and `# Exercise 1`, under `## Solutions` at the chapter's end;
while it is being written it may stand under its check, without a number. tests/book/test_exercises.py runs them, nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from execnb.nbio import NbCell, mk_cell, read_nb, write_nb
from execnb.shell import CaptureShell
from fold import fold
from nbdev.clean import clean_nb
from nbdev.config import add_init, get_config
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker
from places import ROOT, path_of
from places import notebooks as all_notebooks

EXERCISE = ("exercise", "check", "solution")  # the kinds of cells, in the order in which they stand
SKIP = re.compile(rf"^#\|\s*(eval:\s*false|gpu|slow|ray|real|{'|'.join(EXERCISE)})\b", re.MULTILINE)
NUMBER = re.compile(r"#\|\s*solution\n# Exercise (\d+)\n")
GOES_ON = "raises-exception"  # Jupyter's tag for a cell that may fail without ending Run All
RAN = "ran"  # the key of a notebook's metadata under which `run` stores the digest of the code that it executed
KEPT = {"allowed_metadata_keys": [RAN], "allowed_cell_metadata_keys": ["tags"]}  # as in settings.ini
SOLUTIONS = "## Solutions"
FETCH = "fe7c4000"  # the id of the cell that fetches the book
SETUP = """
%config InlineBackend.figure_formats = ['png']
__import__("show").MUST_HOLD = True
"""


def notebooks(names: list[str]) -> list[Path]:
    """The notebooks named, by a path or just `04_scheduler`, or all of them in reading order."""
    return [Path(n) if n.endswith(".ipynb") else path_of(n) for n in names] or all_notebooks()


def is_part_one(path: Path) -> bool:
    """Chapters 00 to 19: the tens digit of a chapter is its part, and Part I has two."""
    return path.stem[:1] in ("0", "1")


def module_of(path: Path) -> str | None:
    """The module that a chapter exports: `scheduling.turns`."""
    found = re.search(r"#\| *default_exp ([\w.]+)", path.read_text())
    return found[1] if found else None


def continued(path: Path) -> set[str]:
    """The modules of earlier chapters into which this one writes, too: `#| export scheduler`."""
    return set(re.findall(r"#\| *export ([\w.]+)", path.read_text()))


def minutes(cells: list[Any]) -> int:
    """How long a chapter takes to understand, without its exercises: 200 words or 12 lines of code a minute, imports not
    counted. Cells marked `#| fold` hold code that a first reading may pass over: the text says in a sentence what it
    does."""
    no = r"(?m)^#\| *(hide|fold|exercise|check|solution)"
    shown = [cell for cell in cells if not re.search(no, cell.source)]
    words = sum(len(cell.source.split()) for cell in shown if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in shown if cell.cell_type == "code")
    return round(words / 200 + len(re.findall(r"(?m)^\s*(?!from |import )[^#\s]", code)) / 12)


def colab(chapter: str) -> str:
    """Where the chapter opens in Colab: in the repository that settings.ini names."""
    config = get_config()
    home = config.git_url.rstrip("/").replace("github.com", "colab.research.google.com/github", 1)
    return f"{home}/blob/{config.branch}/{path_of(chapter).relative_to(ROOT).as_posix()}"


def fetching() -> str:
    """The source of the hidden cell that fetches the book and installs the package, where it is missing: in Colab."""
    return f"""#| hide
import os
import sys
from importlib.util import find_spec

if find_spec("atom_mini") is None:  # in Colab: fetch the book, go to its notebooks
    get_ipython().system("git clone -q {get_config().git_url} book")
    get_ipython().system("pip install -q './book[cpu,server]'")
    get_ipython().run_line_magic("cd", "book/nbs")
sys.path += map(os.path.abspath, ("_book", "../_book"))  # the book's tools
import unsolved  # noqa: F401  says which exercise is not solved yet"""


def with_fetch(cells: list[NbCell]) -> list[NbCell]:
    """The cells of a chapter, that hidden one behind the title, as settings.ini says today."""
    cell = mk_cell(fetching(), "code")
    cell.id, cell.execution_count = FETCH, None
    first, *rest = [cell for cell in cells if cell.id != FETCH]
    return [first, cell, *rest]


def has_what_it_needs(source: str) -> bool:
    """Whether a cell marked ray or real can run here; if not, it keeps the output that it has."""
    there = {"ray": find_spec("ray") is not None, "real": (ROOT / "build" / "smollm2").is_dir()}
    return any(source.startswith(f"#| {mark}\n") and found for mark, found in there.items())


def with_checks(cells: list[NbCell]) -> list[NbCell]:
    """The cells of a chapter, each exercise's check with its number and the tag."""
    for number, each in enumerate(pair(cells), 1):
        check = each["check"]
        check.source = re.sub(r"\A(#\|\s*check\n)(# Exercise \d+\n)?", rf"\1# Exercise {number}\n", check.source)
        check.metadata["tags"] = [GOES_ON]
    return cells


def code_digest(cells: list[NbCell]) -> str:
    """A digest of the code cells that `run` executes on every machine: a test compares it with the one that `run` stored."""
    code = [cell for cell in cells if cell.cell_type == "code" and cell.id != FETCH]  # that one follows settings.ini
    executed = [cell.source for cell in code if not SKIP.search(cell.source)]
    return hashlib.sha256("\0".join(executed).encode()).hexdigest()[:16]


def run(path: Path) -> None:
    """Execute one notebook from top to bottom in a fresh shell and store its outputs; stop at the first error."""
    nb = read_nb(path)
    if path.stem[0].isdigit():
        nb.cells = with_checks(with_fetch(nb.cells))
    shell = CaptureShell(path.parent)
    shell.run(SETUP)
    started = time.perf_counter()
    for cell in nb.cells:
        if cell.cell_type != "code" or (SKIP.search(cell.source) and not has_what_it_needs(cell.source)):
            continue
        cell.outputs = []  # else a cell that prints nothing now keeps what it printed
        shell.cell(cell)
        if shell.exc:
            raise SystemExit(f"{path.name}: the cell failed\n{cell.source}\n{shell.prettytb(path)}")
    kernel = {"display_name": "python3", "language": "python", "name": "python3"}
    nb.metadata = {"kernelspec": kernel, RAN: code_digest(nb.cells)}
    clean_nb(nb, **KEPT)
    write_nb(nb, path)
    print(f"{path.name}: {time.perf_counter() - started:.1f} s")


def kind_of(cell: NbCell) -> str:
    """`exercise`, `check`, `solution`, or nothing."""
    found = re.match(rf"#\|\s*({'|'.join(EXERCISE)})\n", cell.source) if cell.cell_type == "code" else None
    return found[1] if found else ""


def pair(cells: list[NbCell]) -> list[dict[str, NbCell]]:
    """Of each exercise, its cells by kind. ValueError if one lacks a kind, has two of it, or they are out of order."""
    found: list[dict[str, NbCell]] = []
    kinds = [kind for cell in cells if (kind := kind_of(cell))]
    for cell in cells:
        number = NUMBER.match(cell.source)
        if kind_of(cell) == "exercise":
            found.append({})
        place = int(number[1]) - 1 if number else len(found) - 1
        if kind := kind_of(cell):
            expected = (*EXERCISE, "")[len(found[place])] if 0 <= place < len(found) else ""
            if kind != expected or (not number and place != len(found) - 1):
                raise ValueError(f"{kinds} should be {EXERCISE}, again and again, the solutions there or numbered at the end")
            found[place][kind] = cell
    if any(len(cells) < len(EXERCISE) for cells in found):
        raise ValueError(f"{kinds} should be {EXERCISE}, again and again, the solutions there or numbered at the end")
    return found


def exercises(path: Path) -> list[dict[str, str]]:
    """Of each exercise, the source of its cells by kind. ValueError as `pair` says."""
    try:
        return [{kind: cell.source for kind, cell in cells.items()} for cells in pair(read_nb(path).cells)]
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def move_solutions(cells: list[NbCell]) -> list[NbCell]:
    """The cells with all solutions behind the others, numbered, under one heading; as they are if they stand so."""
    solutions = [each["solution"] for each in pair(cells)]
    if not solutions:
        return cells
    for number, cell in enumerate(solutions, 1):
        if not NUMBER.match(cell.source):
            cell.source = cell.source.replace("\n", f"\n# Exercise {number}\n", 1)
    headings = [cell for cell in cells if cell.source == SOLUTIONS] or [mk_cell(SOLUTIONS, "markdown")]
    headings[0].id = headings[0].get("id") or hashlib.sha1(solutions[0].id.encode()).hexdigest()[:8]
    moved = {cell.id for cell in (*headings, *solutions)}
    return [cell for cell in cells if cell.id not in moved] + headings + solutions


def unmove_solutions(cells: list[Any]) -> list[Any]:
    """Each solution under its check, without its number, and no heading: as the site shows them, folded."""
    behind = {each["check"].id: each["solution"] for each in pair(cells)}
    placed: list[Any] = []
    for cell in cells:
        if kind_of(cell) != "solution" and cell.source != SOLUTIONS:
            placed.append(cell)
        if cell.id in behind:
            solution = behind[cell.id]
            solution.source = NUMBER.sub(lambda found: found[0].split("\n")[0] + "\n", solution.source)
            placed.append(solution)
    return placed


class FoldingMaker(ModuleMaker):
    """nbdev's writer of a module, and then `fold`; a module that cannot be folded stays as it was.

    nbdev begins a file only for a notebook's `default_exp`. Here the first notebook that writes into a module begins it.
    """

    begun: ClassVar[set[str]] = set()  # the modules written since `export` was called

    def __init__(self, dest: Path, name: str, nb_path: Path, is_new: bool = True, **options: Any) -> None:
        super().__init__(dest, name, nb_path, is_new or name not in self.begun, **options)
        self.begun.add(name)

    def make(self, *args: Any, **options: Any) -> None:
        before = self.fname.read_text() if self.fname.exists() else None
        super().make(*args, **options)
        try:
            folded = fold(self.fname.read_text())
        except ValueError as error:
            self.fname.unlink() if before is None else self.fname.write_text(before)
            raise SystemExit(f"{self.nb_path}: {error}") from None
        wrapped = re.sub(r"^__all__ = .*$", _wrapped, folded, flags=re.MULTILINE)
        self.fname.write_text(wrapped.rstrip("\n") + "\n")  # where nbdev adds to a module, its last line has no end


def _wrapped(names: re.Match[str]) -> str:
    """As nbdev wraps `__all__` when it writes a module; where it adds to one, it does not."""
    return "\n".join(textwrap.wrap(names[0], 131, subsequent_indent=" " * 11, break_long_words=False))


def export(paths: list[Path]) -> None:
    """Write the modules of these notebooks, and an `__init__.py` into each folder of modules.

    settings.ini's `lib_path` is no folder on purpose: nbdev_export, which folds nothing, stops there before it writes.
    """
    package = ROOT / get_config().lib_name
    writes = {path.resolve(): {module_of(path), *continued(path)} for path in notebooks([])}
    grown = set().union(*map(continued, notebooks([])))  # modules that several chapters write: exported by all of them
    chosen, before = {path.resolve() for path in paths}, 0
    while len(chosen) > before:  # a chapter that is added may write into another shared module
        before = len(chosen)
        names = grown & set().union(*(writes[path] for path in chosen))
        chosen |= {path for path in writes if writes[path] & names}
    FoldingMaker.begun = set()
    for path in sorted(chosen, key=lambda path: path.name):
        nb_export(path, lib_path=package, mod_maker=FoldingMaker)
    add_init(package)
    (package / "_modidx.py").unlink(missing_ok=True)  # nbdev's index of names, which nothing reads


PAGE = re.compile(r"<!-- page: (\S+) -->\n")  # begins a page of its own in index.ipynb


def pages(path: Path | None = None) -> dict[Path, str]:
    """README.md and the pages of docs/ that index.ipynb writes, by their paths from the root: its markdown cells, its
    code cells fenced, their printed outputs, and of hidden ones the tables that they show."""
    written: dict[Path, list[str]] = {(here := Path("README.md")): []}
    for cell in read_nb(path or path_of("index")).cells:
        if cell.cell_type == "markdown":
            if found := PAGE.match(cell.source):
                written[here := Path(found[1])] = []
            written[here].append(PAGE.sub("", cell.source, count=1))
        elif "#| hide" in cell.source:
            written[here] += ["".join(o["data"].get("text/markdown", "")) for o in cell.outputs if "data" in o]
        else:
            written[here] += [f"```python\n{cell.source}\n```", *filter(None, [_printed(cell)])]
    texts = {page: "\n\n".join(parts) + "\n" for page, parts in written.items()}
    return {page: _from(page, re.sub(r"(?m)(?:^\|.*\n)+", _with_minutes, text)) for page, text in texts.items()}


def _from(page: Path, text: str) -> str:
    """Links that start at the root, as seen from a page in docs/."""
    if page.parent == Path():
        return text
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\]\((nbs/|README\.md|tests/|kernels/)", r"](../\1", text)


def readme(path: Path | None = None) -> str:
    """README.md's text."""
    return pages(path)[Path("README.md")]


def written() -> str:
    """README.md and its pages in docs/, as they are, in one text, with links that start at the root."""
    return "\n".join((ROOT / page).read_text() for page in pages()).replace("](../", "](")


def _with_minutes(table: re.Match[str]) -> str:
    """A table whose rows begin with chapters, with one column more: how long each takes to read, to five minutes."""
    head, rule, *rows = table[0].splitlines()
    names = [re.match(r"\| \[[^\]]+\]\(nbs/(?:\w+/)?(\w+)\.ipynb\) \|", row) for row in rows]
    if not names or not all(names):
        return table[0]
    times = [minutes(read_nb(path_of(name[1])).cells) for name in names if name]
    rows = [f"{row} {max(5, 5 * round(time / 5))} |" for row, time in zip(rows, times, strict=True)]
    return "\n".join([f"{head} minutes |", f"{rule}---|", *rows]) + "\n"


def _printed(cell: NbCell) -> str:
    text = "".join("".join(o.get("text", "")) for o in cell.outputs if o.output_type == "stream")
    return "```text\n" + text.rstrip() + "\n```" if text else ""


def main(command: str, *names: str) -> None:
    os.chdir(ROOT)
    if command == "run":
        paths = notebooks(list(names))
        for path in paths:
            if len(paths) == 1:
                run(path)
            else:  # a process each, so that no chapter sees what another has imported or counted
                subprocess.run([sys.executable, __file__, "run", path], check=True)
    elif command == "export":
        export(notebooks(list(names)))
    elif command in ("solutions", "fetch", "checks"):
        change = {"solutions": move_solutions, "fetch": with_fetch, "checks": with_checks}[command]
        for path in notebooks(list(names)):
            if command != "fetch" or path.stem[0].isdigit():
                nb = read_nb(path)
                nb.cells = change(nb.cells)
                write_nb(nb, path)
    elif command == "readme":
        for page, text in pages().items():
            (ROOT / page).write_text(text)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["help"]))
