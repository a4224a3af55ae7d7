"""Every exercise can be done, and not by doing nothing: its check fails on the stub and passes on the solution."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import book
import pytest
import torch
from execnb.nbio import read_nb
from execnb.shell import CaptureShell
from fastcore.xtras import working_directory

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = [p for p in sorted((ROOT / "nbs").glob("*.ipynb")) if "#| exercise" in p.read_text()]
CASES = [pytest.param(p, id=p.stem, marks=[pytest.mark.alone] * (p.stem[0] == "7")) for p in CHAPTERS]  # 7: processes
LIMIT = 120  # seconds for a check
CHAPTER_LIMIT = 900  # and for a chapter with all of its own
UNSOLVED = ("AssertionError", "NotImplementedError")


def run(shell: CaptureShell, source: str) -> str:
    """Run a cell; the name of the exception it ended with, or nothing."""
    shell.run(source)
    return type(shell.exc).__name__ if shell.exc else ""


def apart(work: Callable[[], list[str]], limit: int = LIMIT) -> list[str]:
    """What `work` returns in a copy of this process: whatever it changes, the next one does not see."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(limit)
        torch.set_num_threads(1)  # OpenMP's other threads are not copied
        code = 1
        try:
            os.write(write, "\n".join(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0, f"it failed, was killed, or took longer than {limit} s"
    return result


def check_exercise(shell: CaptureShell, cells: dict[str, str]) -> None:
    """Stub and check, then solution and check, each from where the chapter stands now."""
    stub, check, solution = (cells[kind] for kind in book.EXERCISE)
    errors = apart(lambda: [run(shell, stub), run(shell, check)])
    assert errors[0] == "", f"the stub must run, it raises {errors[0]}:\n{stub}"
    assert errors[1] in UNSOLVED, f"on the stub the check gives {errors[1] or 'no error'}, not {UNSOLVED}:\n{check}"
    errors = apart(lambda: [run(shell, solution), run(shell, check)])
    assert errors == ["", ""], f"{errors} from the solution and its check:\n{solution}\n{check}"


def study(path: Path) -> list[str]:
    """Run the chapter, and each exercise where it stands: all cells before it are what the reader has."""
    exercises, done = iter(book.exercises(path)), []
    shell = CaptureShell(path)
    with torch.enable_grad(), working_directory(path.parent):
        for cell in read_nb(path).cells:
            if cell.cell_type == "code" and cell.source.startswith("#| solution"):
                check_exercise(shell, next(exercises))
                done.append("done")
            elif cell.cell_type == "code" and not book.SKIP.search(cell.source):
                error = run(shell, cell.source)
                assert not error, f"{error}: {shell.exc}\n{cell.source}"
    return done


@pytest.mark.parametrize("path", CASES)
def test_exercises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a chapter's, in a copy of this process: a chapter may change the package's own tables."""
    monkeypatch.setenv("IN_TEST", "1")
    assert apart(lambda: study(path), CHAPTER_LIMIT) == ["done"] * len(book.exercises(path))


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


def test_incomplete_exercises_are_noticed(tmp_path: Path) -> None:
    """A stub without a check, a solution before it: nothing is left out in silence."""
    from execnb.nbio import mk_cell, new_nb, write_nb

    for kinds in (["exercise", "solution"], ["exercise", "solution", "check"], ["check"], [*book.EXERCISE, "check"]):
        write_nb(new_nb([mk_cell(f"#| {kind}\npass", "code") for kind in kinds]), tmp_path / "x.ipynb")
        with pytest.raises(ValueError, match="should be"):
            book.exercises(tmp_path / "x.ipynb")
