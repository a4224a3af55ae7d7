"""The three runs for a lent GPU (kernels/slots.sh), in a dry run on a machine as bare as such a machine is: no notebook
tools, no libraries of later parts, no make."""

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
FILES = {
    "1": ["limits.json", "profile.json", "report.txt", "slot1.log", "slot1.txt", "tests-engine.jsonl",
          "tests-kernels.jsonl", "tokens.json"],
    "2": ["common.json", "kernels.json", "rates.json", "report.txt", "slot2.log", "slot2.txt", "steps.json"],
    "3": ["mixtures.json", "nano-vllm.json", "report.txt", "slot3.log", "slot3.txt", "sweep.json", "transformers.json"],
}  # fmt: skip
IN_THE_BLOCK = {  # of a dry run
    "1": ["card        cpu (dry run)", "tokens      equal to the CPU's, built-in model: graphs 2 of 2, no graphs 2 of 2",
          "tests       engine: 0 passed, 1 skipped, 0 failed", "tests       kernels: 0 passed, 0 failed",
          "tokens/s    not measured (slot 2"],
    "2": ["tokens/s    at 1, 2 requests", "plain: ", "overlapped: ", "decode, toy: 2 x 40 ", "  toy add_rms_norm: 1 "],
    "3": ["nano-vLLM: not run: not installed", "transformers "],
}  # fmt: skip


def hiding(absent: str) -> str:
    """A sitecustomize.py that lets Python find none of these packages."""
    return f"ABSENT = {absent!r}\n{HIDE}"


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that finds none of ABSENT, and no GPU."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(hiding(ABSENT))
    nothing = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    nothing |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest finds a hidden plugin, and cannot load it
    return os.environ | nothing | {"PYTHONPATH": str(tmp_path / "bare")}


def run_slot(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SLOTS), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.share(0, 900)
@pytest.mark.parametrize("slot", FILES)
@pytest.mark.slow
def test_a_slot_runs_every_step_and_keeps_to_its_folder(slot: str, tmp_path: Path, bare: dict[str, str]) -> None:
    """Toy shapes in the interpreter; tests are collected, which imports all that they need."""
    before = {path for path in (ROOT / "kernels").rglob("*") if "__pycache__" not in path.parts}
    out = tmp_path / "out"
    done = run_slot(bare, slot, str(out), "--dry-run")
    log = (out / f"slot{slot}.log").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    assert sorted(path.name for path in out.iterdir()) == FILES[slot]
    steps = (out / f"slot{slot}.txt").read_text().splitlines()
    assert steps and all(line.startswith("  0 ") for line in steps)
    block = (out / "report.txt").read_text()
    assert done.stdout.endswith(block) and "DRY RUN" in block and "\nfailed      nothing\n" in block
    assert [line for line in IN_THE_BLOCK[slot] if line not in block] == []
    assert before == {path for path in (ROOT / "kernels").rglob("*") if "__pycache__" not in path.parts}


def test_the_limits_of_a_slot_fit_in_ten_minutes() -> None:
    """Of the steps of each slot together, as they are written."""
    text = SLOTS.read_text().split("case $slot in")[1]
    for slot, part in zip("123", re.split(r"(?m)^[123]\)$", text)[1:], strict=True):
        seconds = sum(int(n) for n in re.findall(r"(?:step|bench|tests) (\d+) ", part))
        assert 300 <= seconds <= 600, f"slot {slot}: {seconds} s"


@pytest.mark.slow
def test_one_failing_step_does_not_take_the_rest_along(tmp_path: Path, bare: dict[str, str]) -> None:
    """Without a GPU every step of a real run fails, and each is tried and told; figures of an earlier run are gone."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rates.json").write_text("{}")
    done = run_slot(bare, "2", str(tmp_path / "out"))
    steps = (tmp_path / "out" / "slot2.txt").read_text().splitlines()
    assert done.returncode == 1 and len(steps) == 4 and all(line.startswith("  2 ") for line in steps)
    assert done.stdout.splitlines()[:4] == steps
    assert not (tmp_path / "out" / "rates.json").exists()
    assert done.stdout.count("needs a CUDA or ROCm device and Triton") == 4  # in the block


def test_a_run_that_is_stopped_still_prints_its_block(tmp_path: Path, bare: dict[str, str]) -> None:
    """Ctrl-C in the middle of a step ends that step, too."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *bench.py*) exec sleep 99 ;; *) exec {sys.executable} "$@" ;; esac\n')
    slow.chmod(0o755)
    command = ["bash", str(SLOTS), "2", str(tmp_path / "out")]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so do its children
    run = subprocess.Popen(command, env=bare | {"PYTHON": str(slow)}, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
    log = tmp_path / "out" / "slot2.log"
    while not (log.exists() and "==== rates" in log.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    printed, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and printed == (tmp_path / "out" / "report.txt").read_text()
    assert printed.startswith("---- atom_mini on a GPU ----\n") and "tokens/s    not measured (slot 2" in printed


def test_every_test_file_of_a_slot_exists() -> None:
    named = re.findall(r"tests/\S+\.py", SLOTS.read_text())
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("arguments", [[], ["4", "out"], ["1"], ["1", "out", "--fast"]])
def test_a_wrong_call_says_how_to_call_it(arguments: list[str], tmp_path: Path, bare: dict[str, str]) -> None:
    done = subprocess.run(["bash", str(SLOTS), *arguments], env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "slots.sh 1|2|3 OUT" in done.stderr and not (tmp_path / "out").exists()


def test_a_machine_that_lacks_a_requirement_says_which(tmp_path: Path, bare: dict[str, str]) -> None:
    """At once, and not in ten minutes of failed steps."""
    (tmp_path / "bare" / "sitecustomize.py").write_text(hiding(f"{ABSENT} pydantic"))
    done = run_slot(bare, "1", str(tmp_path / "out"), "--dry-run")
    assert done.returncode == 2 and "pydantic" in done.stderr and "PYTHONPATH" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_profile_adds_up(tmp_path: Path, bare: dict[str, str]) -> None:
    """The kernels of a step take as long together as it is busy, or longer where they overlap or nest."""
    program = str(ROOT / "kernels" / "profile_step.py")
    done = subprocess.run([sys.executable, program, str(tmp_path), "--dry-run"], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "profile.json").read_text())["steps"]
    assert list(steps) == ["decode 1 x 16", "decode 2 x 48", "prefill"]
    for step in steps.values():
        assert step["busy_us"] <= 1.001 * sum(us for us, _ in step["kernels"].values())
        assert step["launches"] >= len(step["kernels"]) > 0


@pytest.mark.slow
def test_the_sweep_stops_at_its_limit(tmp_path: Path, bare: dict[str, str]) -> None:
    """Nothing else is tried, and how much was left is told."""
    out = tmp_path / "sweep.json"
    command = [sys.executable, str(ROOT / "kernels" / "bench.py"), "--dry-run", "--sweep", "--limit", "0", "--json", str(out)]
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("1 of 5 launches") == 2, done.stdout + done.stderr
    assert [len(found) for found in json.loads(out.read_text())["parts"]["sweep"].values() if isinstance(found, list)] == [1, 1]


@pytest.mark.parametrize("side_by_side", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_each_tests_end_is_written(side_by_side: tuple[str, ...], tmp_path: Path) -> None:
    """`--outcomes`: as soon as it has ended; a file that cannot be imported counts as a failure."""
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n"
        "def test_c(): pytest.skip('no')\n@pytest.fixture\ndef bad(): raise ValueError('bad')\ndef test_d(bad): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "--outcomes", "ends", "--continue-on-collection-errors"]
    subprocess.run([*command, *side_by_side], env=env, cwd=tmp_path, capture_output=True)
    ends = [json.loads(line) for line in (tmp_path / "ends").read_text().splitlines()]
    found = {end["test"].removeprefix("test_some.py::"): (end["outcome"], end["why"]) for end in ends}
    assert found.pop("test_broken.py") == ("failed", "E   ModuleNotFoundError: No module named 'nothing_of_that_name'")
    assert found == {"test_a": ("passed", ""), "test_b": ("failed", "assert 1 == 2"), "test_c": ("skipped", ""),
                     "test_d": ("failed", "ValueError: bad")}  # fmt: skip
