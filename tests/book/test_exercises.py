"""Chapters run, and every exercise can be done, but not by doing nothing: its check fails on the stub and on a wrong
answer (tests/book/wrong_answers), and passes on the solution. Part I runs without the other parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import book
import pytest
import unsolved
from execnb.shell import CaptureShell
from exercises import SECTION, check_exercise, run, wrong_answers
from IPython.core.interactiveshell import InteractiveShell
from places import TOOLS

ROOT = Path(__file__).resolve().parents[2]
WRONG = ROOT / "tests" / "book" / "wrong_answers"
CHAPTERS = [p for p in book.notebooks([]) if "#| exercise" in p.read_text()]
SLOW, PROCESSES = pytest.mark.slow, pytest.mark.processes


def marks(path: Path) -> list[pytest.MarkDecorator]:
    """`make test` runs those of the first evening; those of processes and servers have their mark."""
    return [SLOW] * (not path.stem.startswith("00")) + [PROCESSES] * (path.stem[0] in "78")


CASES = [pytest.param(path, id=path.stem, marks=marks(path)) for path in CHAPTERS if book.is_part_one(path)]
LATER = [pytest.param(path, id=path.stem, marks=marks(path)) for path in CHAPTERS if not book.is_part_one(path)]
START = """
import sys
if sys.argv[2] == "alone":  # else the whole house would be found
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]
from pathlib import Path
import exercises
exercises.serve(Path(sys.argv[1]))
"""


def start(home: Path, paths: str, which: str) -> subprocess.Popen[str]:
    """A process that knows the house in `home`, and answers how a chapter went."""
    env = os.environ | {"PYTHONPATH": paths, "IN_TEST": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", START, str(WRONG), which], cwd=home / "nbs", env=env, **pipes)


@pytest.fixture(scope="module")
def study(alone: Path) -> Iterator[Any]:
    """Path -> how the chapter went, in the house of Part I or in the whole one."""
    processes = []

    @cache
    def ask(is_part_one: bool) -> subprocess.Popen[str]:
        home = alone if is_part_one else ROOT
        paths = [str(p) for p in (home, home / TOOLS, ROOT / "tests")]
        processes.append(start(home, ":".join(paths), "alone" if is_part_one else "whole"))
        return processes[-1]

    def studied(path: Path) -> dict[str, Any]:
        process, is_part_one = ask(book.is_part_one(path)), book.is_part_one(path)
        print((alone if is_part_one else ROOT) / path.relative_to(ROOT), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield studied
    for process in processes:
        process.communicate(timeout=60)


@pytest.mark.parametrize("path", CASES)
def test_chapter_runs_and_its_exercises_bite(path: Path, study: Any) -> None:
    check_chapter(path, study(path))


def check_chapter(path: Path, found: dict[str, Any]) -> None:
    """That it ran, and each exercise refused its stub and its wrong answers, and passed on the solution."""
    assert not found["error"], found["error"]
    wrong = sum(map(len, wrong_answers(path, WRONG).values()))
    assert found == {"done": len(book.exercises(path)), "wrong": wrong, "error": ""}


def test_wrong_answers_are_to_exercises() -> None:
    """Of chapters of their part: a misspelled name would be read by nobody."""
    for file in WRONG.glob("*.py"):
        stems = {stem for stem, _ in SECTION.findall(file.read_text())}
        assert stems <= {path.stem for path in CHAPTERS if path.parent.name == file.stem}, file.name


SHELL = {"exercise": "#| exercise\nanswer = None", "check": "#| check\nassert answer == 3"}


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ({}, ""),
        ({"solution": "answer = 4"}, "from the solution"),
        ({"solution": "pass"}, "from the solution"),
        ({"solution": "answer = given['x']"}, "from the solution"),  # the stub's leavings do not help it
        ({"exercise": "answer = given['x'] = 3"}, "no error"),
        ({"exercise": "answer = undefined"}, "must run"),
        ({"check": "assert anwser == 3"}, "NameError"),  # fails, but for another reason
        ({"check": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"}, "killed"),
        ({"check": "import os; os._exit(1)"}, "failed"),
    ],
)
def test_faulty_exercises_are_noticed(cells: dict[str, str], fault: str) -> None:
    shell = CaptureShell()
    assert not run(shell, "given = {}")
    stub = {"exercise": "#| exercise\ngiven['x'] = 3; answer = None"}
    exercise = SHELL | stub | {"solution": "#| solution\nanswer = 3"} | cells
    if not fault:
        check_exercise(shell, exercise)
    else:
        with pytest.raises(AssertionError, match=fault):
            check_exercise(shell, exercise)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("#| check\n# Exercise 2\nassert 1 == 2", "Exercise 2 is not solved yet: edit the cell above\n"),
        ("#| check\n# Exercise 1\nassert not 5, '5 is too much'", "yet: edit the cell above (5 is too much)\n"),
        ("#| check\n# Exercise 3\nraise NotImplementedError", "Exercise 3 is not solved yet: edit the cell above\n"),
        ("#| check\n# Exercise 1\nassert True", ""),
    ],
)
def test_an_unsolved_exercise_says_so(source: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell()
    unsolved.install(shell)
    result = shell.run_cell(source)
    said = capsys.readouterr().out
    assert result.success == (not says) and said.endswith(says) and "Traceback" not in said
    for source, error in (("assert 1 == 2", "AssertionError"), ("#| check\n# Exercise 1\nundefined", "NameError")):
        shell.run_cell(source)  # anything else fails as ever
        said = capsys.readouterr().out
        assert error in said and "Traceback" in said
