"""Runs chapters with their exercises: `python exercises.py FOLDER` reads paths of notebooks and answers a line for each.

FOLDER holds the wrong answers. A line is JSON: how many exercises were done, how many wrong answers were refused, and
the error, if there was one. tests/book/test_exercises.py asks; to a process of its own one can give a smaller house.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LIMIT = 120  # seconds for a check
CHAPTER_LIMIT = 900  # and for a chapter with all of its own
UNSOLVED = ("AssertionError", "NotImplementedError")
MISSPELT = ("", "NameError", "SyntaxError")  # how a check must not end on a wrong answer
SECTION = re.compile(r"(?m)^# %% (\w+) (\d+)\n")


def run(shell: Any, source: str) -> str:
    """Run a cell; the name of the exception it ended with, or nothing."""
    shell.run(source)
    return type(shell.exc).__name__ if shell.exc else ""


def line_of(error: BaseException | None) -> int:
    """The number of the cell's line that raised it."""
    return [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"][-1]


def apart(work: Callable[[], list[str]], limit: int = LIMIT) -> list[str]:
    """What `work` returns in a copy of this process: whatever it changes, the next one does not see."""
    import torch

    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(limit)
        torch.set_num_threads(1)  # OpenMP's other threads are not copied
        for thing in gc.get_objects():  # an LLM refuses a fork; with one thread it works
            if type(thing).__name__ == "LLM":
                thing._process = os.getpid()
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


def check_exercise(shell: Any, cells: dict[str, str], wrong: Iterable[str] = ()) -> None:
    """Stub, solution, and wrong answers, each with the check, from where the chapter stands now."""
    stub, check, solution = (cells[kind] for kind in ("exercise", "check", "solution"))
    errors = apart(lambda: [run(shell, stub), run(shell, check)])
    assert errors[0] == "", f"the stub must run, it raises {errors[0]}:\n{stub}"
    assert errors[1] in UNSOLVED, f"on the stub the check gives {errors[1] or 'no error'}, not {UNSOLVED}:\n{check}"
    errors = apart(lambda: [run(shell, solution), run(shell, check)])
    assert errors == ["", ""], f"{errors} from the solution and its check:\n{solution}\n{check}"
    for given in wrong:
        errors = apart(lambda given=given: [run(shell, given), run(shell, check)])
        assert errors[0] == "", f"the wrong answer must run, it raises {errors[0]}:\n{given}"
        assert errors[1] not in MISSPELT, f"the check gives {errors[1] or 'no error'} on a wrong answer:\n{given}\n{check}"


def wrong_answers(path: Path, folder: Path) -> dict[int, list[str]]:
    """A chapter's sections of its part's file of wrong answers, by the number of the exercise."""
    file = folder / f"{path.parent.name}.py"
    _, *parts = SECTION.split(file.read_text())
    sections = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    found: dict[int, list[str]] = {}
    for stem, number, text in sections:
        if stem == path.stem:
            found.setdefault(int(number), []).append(text)
    return found


def study(path: Path, folder: Path) -> tuple[int, int]:
    """Run the chapter, and each exercise where it stands: all cells before it are what the reader has."""
    import book
    import torch
    from execnb.nbio import read_nb
    from execnb.shell import CaptureShell
    from fastcore.xtras import working_directory

    exercises, wrong, done = book.exercises(path), wrong_answers(path, folder), 0
    assert not wrong or sorted(wrong) == [*range(1, len(exercises) + 1)], f"wrong answers to {sorted(wrong)}"
    shell = CaptureShell(path)
    with torch.enable_grad(), working_directory(path.parent):
        for cell in read_nb(path).cells:
            if cell.cell_type == "code" and cell.source.startswith("#| check"):
                check_exercise(shell, exercises[done], wrong.get(done + 1, []))
                done += 1
            elif cell.cell_type == "code" and not book.SKIP.search(cell.source):
                error = run(shell, cell.source)
                assert not error, f"{error}: {shell.exc}, in line {line_of(shell.exc)} of\n{cell.source}"
    return done, sum(map(len, wrong.values()))


def answer(path: Path, folder: Path) -> dict[str, Any]:
    """All of a chapter's, in a copy of this process: a chapter may change the package's own tables."""

    def work() -> list[str]:
        try:
            done, wrong = study(path, folder)
            return [json.dumps({"done": done, "wrong": wrong, "error": ""})]
        except BaseException:
            return [json.dumps({"error": traceback.format_exc()})]

    try:
        return json.loads(apart(work, CHAPTER_LIMIT)[0])
    except AssertionError as error:
        return {"error": str(error)}


def serve(folder: Path) -> None:
    """Answer until the input ends; with what all chapters need already loaded."""
    import matplotlib.pyplot
    import transformers

    del matplotlib, transformers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a chapter prints
    while line := sys.stdin.readline():
        print(json.dumps(answer(Path(line.strip()), folder)), file=answers, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
