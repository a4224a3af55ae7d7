"""Part I stands alone: without the later parts it generates (and its chapters run: test_exercises), names none of them,
and imports only what was read before."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import book
import nbformat
import pytest
import show
from places import EVENING, TOOLS, chapters, number_of

from atom_mini.trace.trace import COLOURS, VERDICTS

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = chapters()
PART_ONE = [p for p in CHAPTERS if book.is_part_one(p)]
MODULES = {p: m for p in CHAPTERS if (m := book.module_of(p))}
# of every engine; a first reading can wait
EXPLAINED_LATER = {
    "cpu.decode", "cpu.products", "errors", "extras", "file_checks", "refused", "rope_scaling",
    "gpu.sampling_kernels", "gpu.tile_configs", "thread_safe", "uploads",
}  # fmt: skip
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]  # it would find the whole house
"""


def module_path(name: str) -> Path:
    return (ROOT / "atom_mini" / name.replace(".", "/")).with_suffix(".py")


def python(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | {"PYTHONPATH": f"{home}:{home / TOOLS}"}
    return subprocess.run([sys.executable, *arguments], cwd=home / "nbs", env=env, capture_output=True, text=True)


def read_imports() -> dict[str, set[str]]:
    """Module -> the modules that it imports: anywhere, in functions and for type checkers, too."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "atom_mini").rglob("*.py")}

    def find(name: str) -> str:
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    found: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        package = module.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else []
                names = [".".join([*base, *filter(None, [node.module]), name]) for name in names]
            found[module] |= {find(name) for name in names} - {"", module}
    return found


ORDER = ["", "gpu", "cpu", "scheduling", "families", "speculation", "parallel", "trace", "options", "serving"]
CHOOSING = {f"atom_mini.{name}" for name in ("__init__", "__main__", "assemble", "small")}


def level(module: str) -> int:
    """How high a module's folder is; the root is the lowest."""
    _, *folder, _ = module.split(".")
    return ORDER.index(folder[0] if folder else "")


def test_imports_are_no_circle_and_none_climbs() -> None:
    """A module imports from its own folder and from those below. Only what chooses looks up."""
    imported = read_imports()
    order = [*TopologicalSorter(imported).static_order()]  # a CycleError names the circle
    assert len(order) > 80 and len(imported["atom_mini.options.build"]) > 12
    pairs = [(module, name) for module in imported.keys() - CHOOSING for name in imported[module] - {"atom_mini.__init__"}]
    assert [(module, name) for module, name in pairs if level(name) > level(module)] == []
    assert ", ".join(f"`{name}`" for name in ORDER[1:]) in (ROOT / "docs" / "chapters.md").read_text()


DELETED = dict(re.findall(r"(?m)^  \| `(\w+)` \|(.*)\|$", (ROOT / "docs" / "CONTRIBUTING.md").read_text()))
LEFT = f"""{WITHOUT_EDITABLE}
import pkgutil
from importlib import import_module
import atom_mini
for module in pkgutil.walk_packages(atom_mini.__path__, "atom_mini."):
    if module.name != "atom_mini.__main__":
        import_module(module.name)
with atom_mini.LLM("tiny", device="cpu") as llm:
    print(llm.generate("12 + 7 =", atom_mini.SamplingParams(max_tokens=8))[0].text)
"""


@pytest.mark.parametrize("folder", ORDER[1:])
def test_a_folder_can_be_deleted(folder: str, tmp_path: Path) -> None:
    """With those above it that need it, as the table in CONTRIBUTING.md says: what is left imports and answers, and the
    command line answers or says what it lacks."""
    gone = {folder, *re.findall(r"`(\w+)`", DELETED[folder])}
    skipped = shutil.ignore_patterns("__pycache__", "tiny", *gone)
    shutil.copytree(ROOT / "atom_mini", tmp_path / "atom_mini", ignore=skipped)
    (tmp_path / "atom_mini" / "tiny").symlink_to(ROOT / "atom_mini" / "tiny")
    (tmp_path / "nbs").mkdir()
    result = python(tmp_path, "-c", LEFT)
    assert result.stdout == " 19\n", result.stderr
    start = f"{WITHOUT_EDITABLE}import runpy\nrunpy.run_module('atom_mini', run_name='__main__')"
    result = python(tmp_path, "-c", start, "--max-tokens", "8", "12 + 7 =")
    needs = "error: the command line needs atom_mini.options, which is not here\n"
    assert result.stderr.endswith(needs) if "options" in gone else "12 + 7 = 19" in result.stdout, result.stderr


def test_part_one_alone_generates(alone: Path) -> None:
    """The built-in model's words are those of the whole house; what is not there is refused like a misspelt name."""
    code = f"""{WITHOUT_EDITABLE}
import atom_mini
from atom_mini import LLM, Config, EngineArgs, SamplingParams
assert EngineArgs is Config
assert not [m for m in sys.modules if m.startswith("atom_mini.") and m.count(".") > 1], sys.modules
try:
    EngineArgs(overlap=True)
except ValueError as error:
    assert "no option 'overlap'" in str(error), error
else:
    raise SystemExit("overlap without its folder")
with LLM("tiny", device="cpu") as llm:
    print(atom_mini.__file__, llm.generate("12 + 7 =", SamplingParams(max_tokens=8))[0].text)
"""
    result = python(alone, "-c", code)
    assert result.stdout == f"{alone / 'atom_mini' / '__init__.py'}  19\n", result.stderr


@pytest.mark.parametrize("name", [MODULES[p] for p in PART_ONE if p in MODULES])
def test_part_one_mentions_no_later_part(name: str) -> None:
    """In comments and docstrings."""
    text = module_path(name).read_text()
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    said = "\n".join([*comments, *(ast.get_docstring(n) or "" for n in nodes)])
    later = re.search(r"(?i)chapters? [2-9]\d|overlap|spyre|radix|timeline|speculat", said)
    assert later is None, said[max(0, later.start() - 60) : later.end() + 60]


LATER = re.compile(r"\]\([^)]*\b[2-8]\d[a-z]?_\w+\.ipynb|(?i:chapters? [2-8]\d)")


@pytest.mark.parametrize("path", PART_ONE, ids=lambda p: p.stem)
def test_the_text_of_part_one_points_to_no_later_part(path: Path) -> None:
    """Neither by a link nor by a number; only the appendix may be linked."""
    for cell in nbformat.read(path, as_version=4).cells:
        found = LATER.search(cell.source) if cell.cell_type == "markdown" else None
        assert found is None, f"cell {cell.id}: {found and found[0]}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_imports_come_from_earlier_chapters(path: Path) -> None:
    """The order of reading is the order of imports, but for what is `EXPLAINED_LATER`. A function that chooses between
    classes may import them from later chapters."""
    read = CHAPTERS[: CHAPTERS.index(path)]
    known = {m for p in read for m in (MODULES.get(p, ""), *book.continued(p))}
    earlier = known | book.continued(path) | EXPLAINED_LATER
    if number_of(path) in EVENING:  # the small engine begins with all of its imports
        earlier |= {"attention", "checkpoint", "loading"}
    package = ["atom_mini", *MODULES[path].split(".")[:-1]]
    for node in ast.parse(module_path(MODULES[path]).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("atom_mini")):
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])]).removeprefix("atom_mini").lstrip(".")
            names = [name] if name else [alias.name for alias in node.names]
            assert earlier.issuperset(names), f"line {node.lineno} imports {names} from a later chapter"


@pytest.mark.parametrize("path", [*CHAPTERS, ROOT / "nbs" / "index.ipynb"], ids=lambda p: p.stem)
def test_lines_fit_the_page(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    assert [line for source in cells for line in source.split("\n") if len(line) > 100] == []


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_exported_cells_fit_on_a_screen(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, 4).cells if "#| export" in cell.source]
    assert max((source.count("\n") + 1 for source in cells), default=0) <= 55


def test_one_palette() -> None:
    """The player and the figures paint the same thing in the same colour."""
    assert show.COLOURS.items() >= (COLOURS | VERDICTS).items()
