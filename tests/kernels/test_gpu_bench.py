"""The GPU benchmark's logic, on a CPU: every part runs in a dry run, failures are reported, the sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KERNELS / program), *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | NO_GPU, timeout=300, check=False)


def no_errors(figures: Any) -> bool:
    """Whether no part, however deep, reports an error."""
    if not isinstance(figures, dict):
        return True
    return "error" not in figures and all(map(no_errors, figures.values()))


@pytest.mark.slow
def test_dry_run_runs_every_part(tmp_path: Path) -> None:
    """In the interpreter, with toy shapes; nano-vLLM is not there, and that costs no other part."""
    out = tmp_path / "out.json"
    done = run("bench.py", "--dry-run", "--json", str(out))
    assert done.returncode == 0 and "DRY RUN" in done.stdout, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    parts = figures["parts"]
    names = ["limits", "rates", "kernels", "steps", "mixtures", "common", "single", "overlap", "transformers"]
    assert [name for name in parts if name != "nano_vllm"] == names
    assert figures["failures"] == [] and all(no_errors(parts[name]) for name in names)
    assert all(parts[name]["elapsed_seconds"] > 0 for name in names)
    assert parts["common"]["output_tokens"] == parts["transformers"]["output_tokens"] > 0
    assert all(aim["reached"] is None for aim in figures["aims"].values())


@pytest.mark.slow
@pytest.mark.parametrize("program", ["profile_step.py", "same_tokens.py"])
def test_other_programs_run_dry(program: str, tmp_path: Path) -> None:
    """Where a step's time goes, and whether tokens are the CPU's."""
    options = [str(tmp_path), "--dry-run"] if program == "profile_step.py" else ["--dry-run", str(tmp_path)]
    done = run(program, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*.json")
    figures = json.loads(written.read_text())
    if program == "profile_step.py":
        assert list(figures["steps"]) == ["decode 1 x 16", "decode 2 x 48", "prefill"]
        for step in figures["steps"].values():  # kernels overlap or nest
            assert step["busy_us"] <= 1.001 * sum(us for us, _ in step["kernels"].values())
    else:
        ways = figures["models"]["built-in model"].values()
        assert ways and all(way["equal"] == way["requests"] > 0 for way in ways)
