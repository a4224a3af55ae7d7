"""Planted faults: each is put into a copy of the package, and the test that it names has to fail.

    python tests/plant.py                # all of them: minutes
    python tests/plant.py engine gpu     # those of tests/faults/engine.txt and tests/faults/gpu.txt
    python tests/plant.py engine:preempt # those of engine.txt whose first line has this word

A fault is a few lines of a text file: what is wrong, `@ module test ...`, the lines as they are, the lines as they
would be. A line that the module has several times needs a neighbour.

    # The last block of a prompt is taken from the cache, although nothing would be left to compute.
    @ block_manager.py engine/test_block_manager.py::test_last_block
    -        for block in blocks[:-1]:
    +        for block in blocks:
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "atom_mini"
JOBS, LIMIT = int(os.environ.get("JOBS", 2)), 300  # processes at a time; seconds for one fault's tests
CAUGHT = 1  # pytest: some tests failed


@dataclass
class Fault:
    """Lines of a module, what they become, and the tests that have to notice."""

    what: str
    module: str
    tests: list[str]
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def plant(self, folder: Path) -> None:
        """A copy of the package with this fault in `folder`; compiled files of the other modules stay good."""
        shutil.copytree(PACKAGE, folder / "atom_mini")
        path = folder / "atom_mini" / self.module
        old, new = ("".join(f"{line}\n" for line in lines) for lines in (self.old, self.new))
        text = "\n" + path.read_text()
        if (times := text.count("\n" + old)) != 1:
            raise ValueError(f"{self.what!r}: {self.module} has these lines {times} times, not once:\n{old}")
        path.write_text(text.replace("\n" + old, "\n" + new)[1:])


def read(path: Path) -> Iterator[Fault]:
    fault, what = None, []
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            what.append(line[2:])
        elif line.startswith("@ "):
            module, *tests = line[2:].split()
            fault, what = Fault(" ".join(what), module, tests), []
            yield fault
        elif line[:1] in ("-", "+") and fault:
            (fault.old if line[0] == "-" else fault.new).append(line[1:])
        elif line.strip():
            raise ValueError(f"{path.name}: {line!r} begins with none of '# ', '@ ', '-' and '+'")


def run(fault: Fault, output: Path) -> int:
    """In a process of its own: the tests' exit status, with the fault in the package that they import."""
    import pytest

    signal.alarm(LIMIT)
    with tempfile.TemporaryDirectory() as folder, output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        fault.plant(Path(folder))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder  # for processes that the tests start
        tests = [str(TESTS / name) for name in fault.tests]
        return int(pytest.main(["-x", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *tests]))


def start(fault: Fault, output: Path) -> int:
    if child := os.fork():
        return child
    try:
        status = run(fault, output)
    except BaseException as wrong:
        output.write_text(str(wrong))
        status = 9
    os._exit(status)


def chosen(names: list[str]) -> list[Fault]:
    faults = []
    for name in names or sorted(path.stem for path in (TESTS / "faults").glob("*.txt")):
        area, _, word = name.partition(":")
        faults += [fault for fault in read(TESTS / "faults" / f"{area}.txt") if word in fault.what]
    return faults


def main(names: list[str]) -> int:
    import torch  # once, before the forks
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    left, running, missed, began = chosen(names)[::-1], {}, 0, time.monotonic()
    total = len(left)
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < JOBS:
                fault, output = left.pop(), Path(folder) / str(len(left))
                running[start(fault, output)] = fault, output, time.monotonic()
            child, status = os.wait()
            fault, output, since = running.pop(child)
            if (code := os.waitstatus_to_exitcode(status)) != CAUGHT:
                missed += 1
                print(f"NOT CAUGHT (exit status {code}): {fault.what}\n{output.read_text()[-3000:]}")
            else:
                print(f"caught in {time.monotonic() - since:.0f} s: {fault.what}", flush=True)
    print(f"{total - missed} of {total} planted faults were caught, in {time.monotonic() - began:.0f} s")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
