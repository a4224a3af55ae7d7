"""`--outcomes FILE`: how each test ended, a line of JSON as soon as it has, so that a run that is cut off leaves its part.

`make gpu` uses it: kernels/gpu_report.py names the tests that failed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write a line for each test to this file")


class Outcomes:
    """Tests, and files that could not be collected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def note(self, name: str, outcome: str, why: str = "") -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"test": name, "outcome": outcome, "why": why}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.splitlines()
            errors = [line[1:].strip() for line in lines if line.startswith("E ")]
            self.note(report.nodeid, "failed", (errors or lines or [""])[0])
        elif report.skipped or report.when == "call":
            self.note(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(report.nodeid, "failed", report.longreprtext.splitlines()[-1])
        elif report.skipped:
            self.note(report.nodeid, "skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.outcomes and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.option.outcomes))
