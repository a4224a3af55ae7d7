"""The book holds together: every chapter runs, and package, outputs and README are what the notebooks say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import book
import pytest
import show
import torch
from execnb.nbio import mk_cell, new_nb, read_nb, write_nb
from fold import check_imports, is_patched
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.test import test_nb as run_notebook
from places import TOOLS, chapters, notebooks, path_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = book.notebooks([])
MODULES = sorted((ROOT / "atom_mini").rglob("*.py"))
BY_HAND = {"__init__.py", "__main__.py"}
by_name = pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)


RUN_ELSEWHERE = {p for p in CHAPTERS if book.is_part_one(p) or "#| exercise" in p.read_text()}


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p not in RUN_ELSEWHERE], ids=lambda p: p.stem)
def test_notebook_runs(path: Path) -> None:
    """From top to bottom, in one shell, without the cells marked gpu or slow.

    `test_house` runs those of Part I, without the rest of the house; `test_exercises` those that have exercises.
    """
    with torch.enable_grad():  # and back to it, whatever the chapter sets
        success, _ = run_notebook(path, skip_flags=["gpu", "slow", *book.EXERCISE], basepath=ROOT)
    assert success


@by_name
def test_notebook_is_clean_and_holds_its_outputs(path: Path) -> None:
    """Cleaning changes nothing; outputs are stored; none is an error, none names a place of the machine that ran it."""
    nb, cleaned = read_nb(path), read_nb(path)
    clean_nb(cleaned, **book.KEPT)
    assert nb == cleaned
    outputs = [o for cell in nb.cells if cell.cell_type == "code" for o in cell.outputs]
    assert outputs and all(o.output_type != "error" for o in outputs)
    text = " ".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs)
    assert not re.search(r"site-packages|(?<![\w.:/])/(?!tmp/)[\w.-]+/[\w.-]+/", text)  # nor of another that has


@by_name
def test_outputs_are_of_the_present_code(path: Path) -> None:
    """`run` stores a digest of the cells that it executes: code edited since then has old outputs, or none."""
    nb = read_nb(path)
    assert nb.metadata.get(book.RAN) == book.code_digest(nb.cells), f"python nbs/_book/book.py run {path.stem}"


RECORDS = re.compile(r"^(?!def ).*\b(?:recorded|rungs)\(", re.M)  # show.py's, which read tests/bench/results


@pytest.mark.parametrize("path", [p for p in CHAPTERS if RECORDS.search(p.read_text())], ids=lambda p: p.stem)
def test_outputs_are_of_the_present_records(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record may change after a chapter ran. Cells that only read records are run again; others need the chapter's names."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for cell in read_nb(path).cells:
        if cell.cell_type != "code" or not RECORDS.search(cell.source):
            continue
        with redirect_stdout(StringIO()) as printed, suppress(NameError):
            exec(cell.source, dict(vars(show)))
            shown = "".join("".join(o.text) for o in cell.outputs if o.output_type == "stream")
            assert printed.getvalue() == shown, f"python nbs/_book/book.py run {path.stem}"


def test_code_edited_after_its_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stores the digest, and cleaning keeps it; text may change, and exercises, which a run leaves out."""
    path = tmp_path / "later.ipynb"
    write_nb(new_nb([mk_cell("# A", "markdown"), mk_cell("print(1)", "code"), mk_cell("#| exercise\n2", "code")]), path)
    monkeypatch.setattr(show, "MUST_HOLD", show.MUST_HOLD)  # a run sets it, in this process
    book.run(path)
    for cell, source, is_fresh in ((0, "# B", True), (2, "#| exercise\n3", True), (1, "print( 1)", False)):
        nb = read_nb(path)
        nb.cells[cell].source = source
        clean_nb(nb, **book.KEPT)
        write_nb(nb, path)
        with nullcontext() if is_fresh else pytest.raises(AssertionError, match=r"book\.py run later"):
            test_outputs_are_of_the_present_code(path)
    kept = {name: getattr(get_config(), name).split() for name in book.KEPT}
    assert kept == book.KEPT, "settings.ini lets nbdev_clean delete what `run` stores"


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem[0].isdigit()], ids=lambda p: p.stem)
def test_chapter_teaches(path: Path) -> None:
    """Each chapter has a promise, a figure from the running code, and two exercises (tests/book/test_exercises.py)."""
    nb = read_nb(path)
    assert re.match(r"# .+\n\n> .+", nb.cells[0].source)
    assert len(book.exercises(path)) >= 2
    assert any("image/png" in o.get("data", {}) for c in nb.cells if c.cell_type == "code" for o in c.outputs)


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem[0] in "01"], ids=lambda p: p.stem)
def test_a_chapter_ends_with_the_class_as_it_is(path: Path) -> None:
    """What `finished("module.Class")` has stored is the package's source of today; chapters that build a module begin
    with the map."""
    cells = [cell for cell in read_nb(path).cells if cell.cell_type == "code"]
    shown = [cell for cell in cells if re.search(r"(?m)^finished\(", cell.source)]
    for cell in shown:
        names = re.findall(r'"([\w.]+)"', cell.source[cell.source.index("finished(") :])
        (output,) = cell.outputs
        assert "".join(output.data["text/markdown"]) == show.finished(*names).data, f"run it again: {path.stem}"
    maps = [cell for cell in cells if re.search(r"(?m)^where\(", cell.source)]
    assert not shown or maps
    for cell in maps:  # of today's size: an older map has other boxes
        assert cell.outputs[0].data["text/plain"] == ["<Figure size 800x320 with 1 Axes>"], f"run it again: {path.stem}"
    assert shown or not book.module_of(path) or path.stem[:2] in ("12", "14")


@pytest.mark.parametrize("path", [p for p in CHAPTERS if p.stem[0].isdigit()], ids=lambda p: p.stem)
def test_chapter_fetches_the_book_where_it_is_missing(path: Path) -> None:
    """In Colab: a hidden cell behind the title, as settings.ini says."""
    found = [cell for cell in read_nb(path).cells if cell.id == book.FETCH]
    assert [cell.source for cell in found] == [book.fetching()], "run: python nbs/_book/book.py fetch"
    assert read_nb(path).cells[1].id == book.FETCH


GUESS = re.compile(r"(?m)\A(?:# .+\n)*guess = None$")
GUESSING = [p for p in CHAPTERS if "guess = None" in p.read_text()]


@pytest.mark.parametrize("path", GUESSING, ids=lambda p: p.stem)
def test_a_guess_is_compared_with_its_measurement(path: Path) -> None:
    """A cell begins with the guess; and the first one from there that prints something measures and compares."""
    cells = [cell for cell in read_nb(path).cells if cell.cell_type == "code" and cell.id != book.FETCH]
    at = [i for i, cell in enumerate(cells) if "guess = None" in cell.source]
    assert all(GUESS.match(cells[i].source) for i in at)
    for i in at:
        first = next(cell for cell in cells[i:] if cell.outputs)
        assert re.search(r"(?m)^predicted\(guess, ", first.source) and "(no guess)" in str(first.outputs)
    assert len(at) == sum("predicted(guess, " in cell.source for cell in cells)


def test_a_guess_may_be_empty_close_or_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(GUESSING) >= 12
    for guess, says in ((None, "(no guess)"), (9, "(close)"), (11, "(close)"), (40, "factor of 4.0"), (2.5, "factor of 4.0")):
        show.predicted(guess, 10)
        assert says in capsys.readouterr().out
    show.predicted(0, 10)
    assert "close" not in capsys.readouterr().out


def test_a_notebook_is_found_by_its_name(tmp_path: Path) -> None:
    """In any folder but those that begin with a dot or an underscore; the order is that of the names."""
    names = ["index", "later/60_b", "10_a", "later/.ipynb_checkpoints/60_b-checkpoint", "_book/70_c", "20_d"]
    for name in names:
        (tmp_path / "nbs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nbs" / f"{name}.ipynb").touch()
    assert [path.stem for path in notebooks(tmp_path)] == ["10_a", "20_d", "60_b", "index"]
    assert [path.stem for path in chapters(tmp_path)] == ["10_a", "20_d", "60_b"]
    assert path_of("60_b", tmp_path) == tmp_path / "nbs" / "later" / "60_b.ipynb"
    with pytest.raises(ValueError, match="no notebook below nbs/ is called '70_c'"):
        path_of("70_c", tmp_path)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *CHAPTERS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    """From where the page lies; those of index.ipynb are README's."""
    is_notebook = page.suffix == ".ipynb"
    text = "\n".join(c.source for c in read_nb(page).cells if c.cell_type == "markdown") if is_notebook else page.read_text()
    text = re.sub(r"(?ms)^```.*?^```$", "", text)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]
    start = ROOT if page.stem == "index" and is_notebook else page.parent
    assert [link for link in links if not (start / link).exists()] == []


CLOCKS = {"perf_counter", "process_time", "thread_time", "monotonic", "seconds", "repeat"}


def names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def told_by(nodes: list[ast.AST], clocks: set[str]) -> Callable[[ast.AST], bool]:
    """Of an expression: whether it asks a clock, or names what these nodes have made of an answer."""

    def hears(node: ast.AST) -> bool:
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        return any(getattr(f, "attr", getattr(f, "id", "")) in clocks for f in calls)

    made = [n for n in nodes if isinstance(n, ast.Assign) and hears(n.value)]
    said = {name for n in made for target in n.targets for name in names(target)}
    return lambda node: hears(node) or bool(said & names(node))


def is_deadline(order: ast.Compare) -> bool:
    """`took < 2`: a promise of so many seconds, generous, and none of a speed."""
    is_upper = all(isinstance(op, ast.Lt) for op in order.ops)
    return is_upper and isinstance(order.left, ast.Name | ast.Constant) and not names(order.comparators[-1])


def asserted_by_clock(cells: list[str]) -> list[str]:
    """Assertions that put in order what a clock has said; a deadline is none."""
    clocks, found = {*CLOCKS}, []
    for cell in cells:
        nodes = [*ast.walk(ast.parse(re.sub(r"(?m)^[%!].*$", "", cell)))]
        for f in nodes:
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [*ast.walk(f)]
                is_told = told_by(inside, clocks)
                if any(isinstance(n, ast.Return) and n.value and is_told(n.value) for n in inside):
                    clocks.add(f.name)
        is_told = told_by(nodes, clocks)
        for claim in (n for n in nodes if isinstance(n, ast.Assert)):
            orders = [n for n in ast.walk(claim) if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Lt | ast.Gt)]
            found += [ast.unparse(claim)] if any(is_told(n) and not is_deadline(n) for n in orders) else []
    return found


@by_name
def test_no_chapter_asserts_what_a_clock_said(path: Path) -> None:
    """But for deadlines: a test that executes it would be timed. `timed` holds it where the page is made."""
    cells = [c.source for c in read_nb(path).cells if c.cell_type == "code" and not c.source.startswith("#| export")]
    assert asserted_by_clock(cells) == []


def test_a_timed_claim_holds_where_pages_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    cells = ["def took(f):\n    start = time.perf_counter()\n    f()\n    return time.perf_counter() - start"]
    cells += ["ours = took(f)\nassert ours < took(g)\nassert ours < 2\nassert f() < 2\nassert ours / 3 > 1.1"]
    assert asserted_by_clock(cells) == ["assert ours < took(g)", "assert ours / 3 > 1.1"]
    show.timed(1 < 2)
    assert not capsys.readouterr().out
    show.timed(1 > 2)
    assert "otherwise" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="not now"):
        patch.setattr(show, "MUST_HOLD", True)
        show.timed(1 > 2)


ENV = {k: v for k, v in os.environ.items() if k != "IN_TEST"}  # set by nbdev's test_nb; exports do nothing then


def copy_tree(home: Path) -> None:
    """What the book is made of, without the model."""
    for name in ("nbs", "atom_mini"):
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("tiny", "__pycache__"))
    for name in ("settings.ini", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, home)


def test_package_is_in_sync_with_the_notebooks(tmp_path: Path) -> None:
    """Export a copy of the tree, methods folded into their classes, and compare every module."""
    copy_tree(tmp_path)
    for module in (tmp_path / "atom_mini").rglob("*.py"):
        if module.name not in BY_HAND:
            module.unlink()
    subprocess.run([sys.executable, "nbs/_book/book.py", "export"], cwd=tmp_path, env=ENV, check=True, capture_output=True)
    written = sorted(p.relative_to(tmp_path) for p in (tmp_path / "atom_mini").rglob("*.py"))
    assert written == [module.relative_to(ROOT) for module in MODULES]  # no module of a chapter that is gone
    for module in MODULES:
        assert (tmp_path / module.relative_to(ROOT)).read_text() == module.read_text(), module.name


def test_one_chapter_is_exported_with_those_that_share_its_module(tmp_path: Path) -> None:
    """Alone it would write a part of the module, or add its cells a second time."""
    copy_tree(tmp_path)
    modules = {module.relative_to(ROOT): module.read_text() for module in MODULES}
    code = "import sys, book\nfor name in sys.stdin.read().split():\n    book.main('export', name)\n    "
    code += "print({str(p): p.read_text() for p in book.Path('atom_mini').rglob('*.py')})"
    command, chapters = [sys.executable, "-c", code], "04_scheduler 08_model_runner 14_survives 13_one_request_through 09c_llm"
    env = ENV | {"PYTHONPATH": str(tmp_path / TOOLS)}
    done = subprocess.run(command, cwd=tmp_path, env=env, input=chapters, check=True, capture_output=True, text=True)
    found = [{Path(k): v for k, v in ast.literal_eval(line).items()} for line in done.stdout.splitlines()]
    assert len(found) == 5 and all(one == modules for one in found)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nbdev_export", "the package is written by: make export"),
        ("nbdev_prepare", "the package is written by: make export"),
        ("nbdev_clean", ""),
        ("nbdev_test --path nbs/01a_checkpoint.ipynb", ""),
    ],
)
def test_nbdevs_own_commands_change_nothing(command: str, says: str, tmp_path: Path) -> None:
    """The export cannot fold, so it stops before it writes; what is clean stays clean; exercises are not run."""
    copy_tree(tmp_path)
    (tmp_path / "atom_mini" / "tiny").symlink_to(ROOT / "atom_mini" / "tiny")

    def files() -> dict[Path, bytes]:
        paths = (p for p in tmp_path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {path: path.read_bytes() for path in paths}

    before, (name, *arguments) = files(), command.split()
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{tmp_path / TOOLS}"}
    command = [Path(sys.executable).with_name(name), *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (result.returncode != 0) == bool(says) and says in (result.stderr.splitlines() or [""])[-1], result.stderr
    assert files() == before


def test_readme_and_its_pages_are_in_sync_with_the_index() -> None:
    pages = book.pages()
    assert len(pages) > 5 and {page: (ROOT / page).read_text() for page in pages} == pages
    assert pages[Path("README.md")].count("\n") <= 150, "README is for somebody who has five minutes"


@pytest.mark.parametrize(
    "name",
    ["scheduler", "llm", "refinements.overlap", "instruments.command_line", "systems.radix_cache", "systems.spyre"],
)
def test_floors_without_torch(name: str) -> None:
    """The scheduler never touches a tensor: importing it, or an LLM, or their variants, brings no torch along."""
    code = f"import sys, atom_mini.{name}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_code_is_readable_as_plain_python() -> None:
    """Lines to 120 (`__all__` may be longer), functions under 50, public ones documented; no @patch, no fastcore."""
    for path in MODULES:
        check_imports(ast.parse(path.read_text()))
        tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
        in_all = {n for node in tree.body if "__all__" in ast.unparse(node) for n in range(node.lineno, node.end_lineno + 1)}
        assert all(len(line) <= 120 or n in in_all for n, line in enumerate(lines, 1)), path.name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                nested = isinstance(node, ast.FunctionDef) and node.col_offset > 0
                small = isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno < 5
                assert ast.get_docstring(node) or nested or small, f"{path.name}: {node.name} has no docstring"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 50, f"{path.name}: {node.name} is too long"
                assert not is_patched(node), f"{path.name}: {node.name} is not in its class"
