"""`@patch` in a notebook and the class that the export makes of it: the same text, the same behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from book import folded
from execnb.shell import CaptureShell
from fold import fold
from nbdev.export import nb_export
from places import TOOLS

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
#| export
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from atom_mini.patch import patch"""
POINT = '''\
@dataclass(frozen=True)
class Point:
    """Two numbers."""

    x: int
    y: int = 0
    seen: list[int] = field(default_factory=list)
'''
PAIR = '''\
class Pair(NamedTuple):
    """Two more."""

    a: int
    b: int
'''
CELLS = [
    HEAD,
    '''
#| export
class Base(ABC):
    """What both have."""

    def __init__(self, size: int) -> None:
        self.size = size
    # the end of the body
''',
    "hash = 5  # a name that a method below has, too\nBase(3).size",
    '''
#| export
# Why it is written so.

# And this.
@patch
def grow(self: Base, by: int = 1, *more: int) -> int:  # a comment behind
    """Larger by `by`.

    Two paragraphs: ä, λ.
    """
    text = """one
  two"""

    def inner(self: int) -> str:
        """A function in it
        has its own docstring."""
        return f"""{self}
three"""

    self.size += by + sum(more) + len(text) + len(inner(7))
    return self.size
    # the end of the method

# the end of the cell
''',
    "assert Base(3).grow(1, 2) == 22\nassert hash == 5 and grow is None",
    '''
#| export
@patch
@abstractmethod
def name(self: Base) -> str:
    """What it is called."""
''',
    """
#| export
@patch
@property
def limit(self: Base) -> int:
    return self.size * 2
""",
    '''
#| export
TWO = 2


@patch
@Base.limit.setter
def limit(self: Base, value: int) -> None:
    self.size = value // TWO


THREE = 3


class Derived(Base):
    """One of them."""
''',
    """
#| export
@patch
def __init__(
    self: Derived, size: int, *, extra: int
) -> None:
    super().__init__(size)
    self.extra = extra
""",
    """
#| export
@patch
def name(self: Derived) -> str: return "derived"
""",
    """
#| export
@patch
def hash(self: Derived) -> int:
    return THREE
""",
    '''
#| export
@patch
@classmethod
def make(cls: type[Derived], size: int) -> Derived:
    return cls(size, extra=super().__sizeof__(cls) * 0)


@patch(Derived)
@staticmethod
def _clean(text: str) -> str:
    return text.strip()


@patch
@contextmanager
def larger(self: Derived) -> Iterator[int]:
    """For a while."""
    self.grow(super().limit)
    yield self.size
    self.size = 0


@patch
@torch.inference_mode()
def run(self: Derived, x: torch.Tensor) -> bool:
    super().grow()
    return (x * 2).is_inference()


@patch
@cached_property
def once(self: Derived) -> list[int]:
    return [self.size]


@patch
@lru_cache(maxsize=None)
def slow(self: Derived, n: int) -> int:
    return n + self.extra


@patch
async def later(self: Derived) -> int:
    return self.extra


@patch
def __len__(self: Derived) -> int:
    return self.size
''',
    f"\n#| export\n{POINT}",
    """
#| export
@patch
def __post_init__(self: Point) -> None:
    if self.x < 0:
        raise ValueError("x")
    self.seen.append(self.x)
""",
    f"\n#| export\n{PAIR}"
    '''

@patch
@property
def total(self: Pair) -> int:
    """Of both."""
    return self.a + self.b
''',
    '''
#| export
@runtime_checkable
class Runner(Protocol):
    """What runs."""

    def start(self) -> None: ...
''',
    '''
#| export
@patch
def stop(self: Runner) -> None:
    """And ends."""
    ...


class Made:
    """A class with its own way to be made."""


@patch
def __new__(cls: type[Made], size: int) -> Made:
    made = super().__new__(cls)
    made.size = size
    return made


@patch
def __init_subclass__(cls: type[Made], **options: int) -> None:
    cls.options = options


@patch
def __eq__(self: Made, other: object) -> bool:
    return isinstance(other, Made)
''',
]

# Where comments, docstrings, and strings of several lines end up.
FOLDED = '''
        self.size = size
    # the end of the body

    # Why it is written so.

    # And this.
    def grow(self, by: int = 1, *more: int) -> int:  # a comment behind
        """Larger by `by`.

        Two paragraphs: ä, λ.
        """
        text = """one
  two"""

        def inner(self: int) -> str:
            """A function in it
            has its own docstring."""
            return f"""{self}
three"""

        self.size += by + sum(more) + len(text) + len(inner(7))
        return self.size
        # the end of the method

    # the end of the cell

    @abstractmethod
    def name(self) -> str:
        """What it is called."""

    @property
    def limit(self) -> int:
        return self.size * 2

    @limit.setter
    def limit(self, value: int) -> None:
        self.size = value // TWO

# %% ../nbs/01_demo.ipynb #c7
TWO = 2
'''

# What is seen from outside; the same in the notebook and in the module.
CHECKS = """
derived = Derived.make(4)
with derived.larger() as size: pass
abstract = sorted(Base.__abstractmethods__), sorted(Derived.__abstractmethods__)
class Half:
    def start(self): ...
class Child(Made, option=3): ...
def error(make):
    try: return make()
    except Exception as e: return type(e).__name__
seen = [
    size, derived.size, derived.name(), abstract, derived.run(torch.ones(2)), derived.size, derived.once is derived.once,
    derived.slow(3), derived.extra, len(derived), Made(1) == Made(2), Made.__hash__, Derived._clean(" a "),
    derived.__class__.grow.__qualname__, type(derived).larger.__qualname__, Base.limit.fset.__qualname__,
    Point(3).seen, error(lambda: Point(-1)), error(lambda: Base(1)), repr(Point(1, 2)), Pair(1, 2).total,
    isinstance(Half(), Runner), Made(5).size, Child(2).size, Child.options, derived.hash(), error(lambda: derived.nothing),
]
derived.limit = 10
seen += [derived.size, derived.limit, error(lambda: setattr(Pair(1, 2), "total", 3)), Point.__init__.__name__]
"""


def notebook(path: Path, cells: list[str], module: str = "demo") -> Path:
    """A notebook with these code cells, of a project in the folder above."""
    sources = [f"#| default_exp {module}", *(c.strip("\n") for c in cells)]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nb.cells[0].id = "start"
    for n, cell in enumerate(nb.cells[1:]):
        cell.id = f"c{n}"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nb, path)
    return path


def exported(tmp_path: Path, cells: list[str]) -> str:
    """The module that these cells become."""
    nb_export(notebook(tmp_path / "nbs/01_demo.ipynb", cells), lib_path=tmp_path / "demo")
    return folded((tmp_path / "demo/demo.py").read_text())


def run_live(tmp_path: Path, cells: list[str]) -> CaptureShell:
    """The shell after these cells, run one after the other."""
    shell = CaptureShell(tmp_path)
    for cell in cells:
        shell.run(cell)
        assert shell.exc is None, (cell, shell.exc)
    return shell


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return exported(tmp_path_factory.mktemp("project"), CELLS)


def test_text_of_a_method_in_its_class(text: str) -> None:
    """The next test runs every other form; the package's own are exported again and compared (test_notebooks.py)."""
    assert FOLDED.lstrip("\n") in text
    head = text.split("# %%")
    assert "__all__ = ['TWO', 'THREE', 'Base', 'Derived', 'Point', 'Pair', 'Runner', 'Made']" in head[2]
    kept = HEAD.removeprefix("#| export\n").partition("\n\nfrom atom_mini")[0]
    assert head[1].endswith(kept + "\n\n") and "patch" not in text


def test_notebook_and_module_do_the_same(tmp_path: Path, text: str) -> None:
    live = run_live(tmp_path, [*CELLS, CHECKS]).user_ns
    module = types.ModuleType("demo")
    sys.modules["demo"] = module  # dataclasses look there
    exec(compile(text + CHECKS, "demo.py", "exec"), module.__dict__)
    assert live["seen"] == module.seen
    assert [n for n in vars(live["Derived"]) if n[0] != "_"] == [n for n in vars(module.Derived) if n[0] != "_"]


def test_folding_again_changes_nothing(tmp_path: Path, text: str) -> None:
    assert fold(text) == text and exported(tmp_path, CELLS) == exported(tmp_path, CELLS) == text
    plain = "x = 1\n\n\n\n# %% a #1\n\n\ny = 2"
    assert fold(plain) == plain


A = 'class A:\n    """A."""\n\n    field: int = 0\n\n    def old(self): ...\n\n'
REFUSED = {
    "B.f: B is imported from .other": "from .other import B\n\n@patch\ndef f(self: B): ...",
    "Base.f: Base is imported from abc": "from abc import ABC as Base\n\n@patch\ndef f(self: Base): ...",
    "A.f: the module defines 0 classes A": "@patch\ndef f(self: A): ...",
    "A.f: the module defines 2 classes A": f"{A}\n{A}\n@patch\ndef f(self: A): ...",
    "A.f: it is added before A is defined": f"@patch\ndef f(self: A): ...\n\n{A}",
    "A.f: the class has it already": f"{A}\n@patch\ndef f(self: A): ...\n\n@patch\ndef f(self: A): ...",
    "A.old: the class has it already": f"{A}\n@patch\ndef old(self: A): ...",
    "A.field: the class has it already": f"{A}\n@patch\n@property\ndef field(self: A): ...",
    "A.f: the class has it already; do": f"{A}\n@patch\ndef f(self: A): ...\n\n@patch\n@A.f.deleter\ndef f(self: A): ...",
    "A.f: its property is not in the class": f"{A}\n@patch\n@A.f.setter\ndef f(self: A, value): ...",
    "A.f: give A a docstring or fields": "class A:\n    pass\n\n@patch\ndef f(self: A): ...",
    "A.g: give A a docstring or fields": "class A: ...\n\n@patch\ndef g(self: A): ...",
    "A.f: inside a class __x is another name": f"{A}\n@patch\ndef f(self: A): return self.__x",
    "A.__f: inside a class __f is another name": f"{A}\n@patch\ndef __f(self: A): ...",
    "A.f: its decorators and defaults need LATE": f"{A}\nLATE = 1\n\n@patch\ndef f(self: A, n=LATE): ...",
    "A.f: nothing else stands in the line": f"{A}\n@patch  # why\ndef f(self: A): ...",
    "A.f: self and its class stand in one line": f"{A}\n@patch\ndef f(self:\n    A): ...",
    "f: @patch stands once, above": f"{A}\n@property\n@patch\ndef f(self: A): ...",
    "f: @patch needs one class": f"{A}\n@patch\ndef f(self): ...",
    "g: @patch needs one class": f"{A}\n@patch\ndef g(self: A | int): ...",
    "h: @patch needs one class": f"{A}\n@patch(cls=A)\n@staticmethod\ndef h(): ...",
    r"f: @patch\(SomeClass\) is for static": f"{A}\n@patch\n@staticmethod\ndef f(self: A): ...",
    r"g: @patch\(SomeClass\) is for static": f"{A}\n@patch(A)\ndef g(self): ...",
    r"h: @patch\(SomeClass\) is for static": f"{A}\n@patch(as_prop=True)\ndef h(self: A): ...",
    "f: @patch works at the top level": f"{A}\nif A:\n    @patch\n    def f(self: A): ...",
    "the package must not import fastcore.basics": "import fastcore.basics",
}


@pytest.mark.parametrize(("message", "source"), REFUSED.items(), ids=range(len(REFUSED)))
def test_refused(message: str, source: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold(source)


def test_export_of_a_project(tmp_path: Path) -> None:
    """Modules in a folder, their relative imports, `__init__.py`, and no index of nbdev's."""
    (tmp_path / TOOLS).mkdir(parents=True)
    for name in ("book.py", "fold.py", "places.py"):
        shutil.copy(ROOT / TOOLS / name, tmp_path / TOOLS)
    (tmp_path / "settings.ini").write_text((ROOT / "settings.ini").read_text().replace("atom_mini", "demo"))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/__init__.py").write_text('__version__ = "0.1.0"\n')
    shutil.copy(ROOT / "atom_mini" / "patch.py", tmp_path / "demo")
    floor = "#| export\nfrom demo.patch import patch\n\n\nclass Floor:\n    height = 3"
    method = "#| export\n@patch\ndef double(self: {0}) -> int:\n    return 2 * self.height"
    room = "#| export\nfrom demo.floor import Floor\nfrom demo.patch import patch\n\n\nclass Room(Floor):\n    width = 4"
    notebook(tmp_path / "nbs/01_floor.ipynb", [floor, method.format("Floor")], "floor")
    notebook(tmp_path / "nbs/02_room.ipynb", [room, method.format("Room")], "tower.room")
    top = ["#| export\nfrom demo.tower.room import Room\nfrom demo.floor import Floor\n\nROOMS = [Room()]"]
    notebook(tmp_path / "nbs/03_roof.ipynb", top, "tower.roof")
    env = {k: v for k, v in os.environ.items() if k not in ("IN_TEST", "PYTHONPATH")}

    def export() -> dict[str, str]:
        subprocess.run([sys.executable, "nbs/_book/book.py", "export"], cwd=tmp_path, env=env, check=True)
        return {p.relative_to(tmp_path).as_posix(): p.read_text() for p in sorted((tmp_path / "demo").rglob("*.py"))}

    files = export()
    assert [*files] == ["demo/__init__.py", "demo/floor.py", "demo/patch.py", "demo/tower/__init__.py",
                        "demo/tower/roof.py", "demo/tower/room.py"]  # fmt: skip
    assert "patch" not in files["demo/floor.py"] + files["demo/tower/room.py"]
    assert "from ..floor import Floor" in files["demo/tower/room.py"]
    assert "from .room import Room\nfrom ..floor import Floor" in files["demo/tower/roof.py"]
    code = dedent("""
        from demo.tower.roof import ROOMS
        assert ROOMS[0].double() == 6""")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
    assert export() == files
