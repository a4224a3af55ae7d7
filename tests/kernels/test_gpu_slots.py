"""The three runs for a lent GPU (kernels/slots.sh) and the block of text that they print (kernels/gpu_report.py)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOTS = ROOT / "kernels" / "slots.sh"
MACHINE = {"device": "Some Card", "compute_units": 304, "memory_bytes": 192 * 2**30, "driver": "6.12", "cuda": None,
           "hip": "7.0", "torch": "2.11", "triton": "3.6.0", "python": "3.12", "date": "2026-12-01T10:00:00+00:00",
           "dry": False}  # fmt: skip
RATES = {"plain": {"1": 500.25, "8": 3000.0}, "overlapped": {"1": 600.0, "error": "TimeoutError: longer than 60 s"}}
TOKENS = {"requests": 10, "equal": 9, "partings": [{"request": 3, "token": 7, "apart": 0.25}]}
ENDS = [("passed", "tests/a.py::test_one", ""), ("skipped", "tests/a.py::test_two", ""),
        ("failed", "tests/b.py::test_three[1-2]", "assert 1 == 2")]  # fmt: skip
ABSENT = (
    "execnb nbdev fastcore ghapi jupytext nbformat IPython zmq msgspec starlette uvicorn prometheus_client ray hypothesis "
    "scipy numba matplotlib networkx xdist"
)
HIDE = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec

def find_others(cls, name, *args):
    return None if name.split(".")[0] in ABSENT.split() else find(name, *args)

PathFinder.find_spec = classmethod(find_others)
"""
NOTHING = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def block(out: Path) -> list[str]:
    program = str(ROOT / "kernels" / "gpu_report.py")
    done = subprocess.run([sys.executable, "-S", program, str(out)], capture_output=True, text=True)  # -S: no torch
    assert done.returncode == 0 and done.stderr == "" and (out / "report.txt").read_text() == done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "---- atom_mini on a GPU ----" and lines[-1] == "---- end ----"
    return lines


def test_the_block_of_a_run(tmp_path: Path) -> None:
    """Of a folder with nothing in it, of one in which a few things went wrong, and of one that was cut off."""
    assert sum("not measured" in line for line in block(tmp_path)) == 7
    (tmp_path / "rates.json").write_text(json.dumps({"machine": MACHINE, "failures": [], "parts": {"rates": RATES}}))
    models = {"built-in model": {"graphs": TOKENS}, "another": {"graphs": {"error": "RuntimeError: out of memory"}}}
    (tmp_path / "tokens.json").write_text(json.dumps({"machine": MACHINE, "models": models}))
    ends = [json.dumps({"test": test, "outcome": outcome, "why": why}) for outcome, test, why in ENDS]
    (tmp_path / "tests-kernels.jsonl").write_text("\n".join([*ends, '{"test": "b", "outc']))
    (tmp_path / "slot1.txt").write_text("  0   20 s  limits\n  1   40 s  tokens\n")
    (tmp_path / "slot1.log").write_text("\n==== limits: x\nfine\n\n==== tokens: x\nRuntimeError: first\n")
    lines = block(tmp_path)
    for line in (
        "card        Some Card, 304 units, 192 GiB",
        "tokens      equal to the CPU's, built-in model: graphs 9 of 10",
        "tests       kernels: 1 passed, 1 skipped, 1 failed",
        "  FAILED tests/b.py::test_three[1-2]: assert 1 == 2",
        "            plain: 500, 3,000",
        "slot1       1 of 2 steps went well, 60 s",
        "  slot1, tokens: exit code 1 after 40 s; last line: RuntimeError: first",
        "  tokens.json, another / graphs: RuntimeError: out of memory",
        "  rates.json, rates / overlapped: TimeoutError: longer than 60 s",
    ):
        assert line in lines, "\n".join(lines)
    (tmp_path / "rates.json").write_text('{"machine": {"dev')
    (tmp_path / "tokens.json").write_text(json.dumps({"models": {"built-in model": {"graphs": {"equal": 1}}}}))
    assert any("not measured (slot 2" in line for line in block(tmp_path))


def test_a_run_that_is_stopped_still_prints_its_block(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a step ends that step, too."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *bench.py*) exec sleep 99 ;; *) exec {sys.executable} "$@" ;; esac\n')
    slow.chmod(0o755)
    command, env = ["bash", str(SLOTS), "2", str(tmp_path / "out")], os.environ | NOTHING | {"PYTHON": str(slow)}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
    log = tmp_path / "out" / "slot2.log"
    while not (log.exists() and "==== rates" in log.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    printed, _ = run.communicate(timeout=60)
    assert run.returncode == 130 and printed == (tmp_path / "out" / "report.txt").read_text()
    assert printed.startswith("---- atom_mini on a GPU ----\n") and "not measured (slot 2" in printed


@pytest.mark.slow
def test_tests_for_a_gpu_need_little(tmp_path: Path) -> None:
    """They are collected, which imports what they need, on a machine without notebook tools and libraries of later parts."""
    (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {ABSENT!r}\n{HIDE}")
    env = os.environ | NOTHING | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for arguments in re.findall(r"(?m)^ +tests \d+ \w+ (.+)$", SLOTS.read_text()):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", *arguments.split()]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode in (0, 5), done.stdout[-3000:] + done.stderr[-3000:]


def test_what_slots_and_pages_name_exists() -> None:
    """Files of tests, and targets of make; the limits of a slot's steps fit into its ten minutes."""
    text = SLOTS.read_text()
    pages = [(ROOT / "docs" / name).read_text() for name in ("proof.md", "machines.md")]
    named = re.findall(r"tests/[\w/]+\.py", text + "".join(pages))
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []
    targets, makefile = set(re.findall(r"`make ([\w-]+)", "".join(pages))), (ROOT / "Makefile").read_text()
    assert len(targets) > 6 and [name for name in targets if f"\n{name}:" not in makefile] == []
    parts = re.split(r"(?m)^[123]\)$", text.split("case $slot in")[1])[1:]
    for part in parts:
        assert 300 <= sum(int(n) for n in re.findall(r"(?:step|bench|tests) (\d+) ", part)) <= 600


@pytest.mark.parametrize("side_by_side", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_each_tests_end_is_written(side_by_side: tuple[str, ...], tmp_path: Path) -> None:
    """`--outcomes`: as soon as it has ended; a file that cannot be imported counts as a failure."""
    (tmp_path / "test_some.py").write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "--outcomes", "ends"]
    command += ["--continue-on-collection-errors", *side_by_side]
    subprocess.run(command, env=env, cwd=tmp_path, capture_output=True)
    ends = [json.loads(line) for line in (tmp_path / "ends").read_text().splitlines()]
    assert sorted((end["test"], end["outcome"]) for end in ends) == [
        ("test_broken.py", "failed"), ("test_some.py::test_a", "passed"), ("test_some.py::test_b", "failed"),
    ]  # fmt: skip
