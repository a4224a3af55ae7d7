"""The files that GitHub reads: it says nothing of one that it cannot, and shows no form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / name).read_text())


def test_the_form_of_a_gpu_run() -> None:
    """As GitHub's "Syntax for issue forms" wants it, and with the words of the block that it asks for."""
    form = read("ISSUE_TEMPLATE/gpu_run.yml")
    assert set(form) == {"name", "description", "title", "labels", "body"}
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert {name: field["type"] for name, field in fields.items()} == {"card": "input", "block": "textarea", "comment": "textarea"}
    assert all(field["attributes"]["label"] for field in fields.values())
    assert fields["block"]["attributes"]["render"] == "text"
    program = (ROOT / "kernels" / "gpu_report.py").read_text()
    begin, end = re.search(r'BEGIN, END = "(.*)", "(.*)"', program).groups()  # type: ignore[union-attr]
    assert begin in fields["block"]["attributes"]["description"] and end in fields["block"]["attributes"]["description"]


def test_ci_runs_what_is_run_elsewhere() -> None:
    ci = read("workflows/ci.yml")
    (job,) = ci["jobs"].values()
    assert ci["permissions"] == {"contents": "read"} and job["timeout-minutes"] == 90
    assert job["steps"][-1]["run"] == "bash .ci/run" and (ROOT / ".ci" / "run").exists()
    assert next(step for step in job["steps"] if "setup-python" in step.get("uses", ""))["with"]["python-version"] == "3.11"
    assert set(ci[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
