"""How tests are divided: this file holds the rule, seconds.json the times that it is applied to.

`--quick` (`make test`) gives every test function SHARE seconds. Of a function whose cases take longer it runs as many
cases as fit, chosen so that each value of each parameter turns up as soon as it can, and at least one case. A function
whose cases take more than LONGEST each is left to `make test-rest`, unless some are marked `smoke` or `share`: `smoke`
ones come first, and `share(1.0, 60.0)` names other seconds for `--quick` and `--rest` (0: none). Tests marked `alone` keep
two cores from work and count twice. A function that seconds.json does not know takes no time.
`--rest` (`make test-rest`; CI runs both) gives every function REST seconds and runs what `--quick` has left of those
cases, so that both together leave no function out.
`--left` (`make test-all` runs all three) runs what is left then: more combinations of values that were each tested.
`--record` writes seconds.json for the tests it runs: do that on a quiet machine.

    python tests/quick.py    # the line with which `make test` ends
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SHARE, REST = 2.0, 20.0  # seconds
LONGEST = 4.5
WORTH_RECORDING, UNRECORDED = 0.4, 0.05  # a function that takes less than the first is taken for the second, per test
SECONDS = Path(__file__).with_name("seconds.json")  # function -> [seconds, of how many cases]
COVERED = Path(__file__).resolve().parent.parent / "build" / "covered.json"  # which tests -> how many, left, functions, long ones
LONG = COVERED.with_name("test-rest.txt")  # the functions that only `make test-rest` runs: a case of them takes over LONGEST


def function_of(nodeid: str) -> str:
    """`test_llm.py::test_stop` of `tests/engine/test_llm.py::test_stop[a-b]`: no two files have one name."""
    return nodeid.split("[")[0].rpartition("/")[2].removesuffix("::runTest")  # of a state machine


def values(item: pytest.Item) -> set[tuple[str, int]]:
    """Which value each of its parameters has."""
    return set(item.callspec.indices.items()) if hasattr(item, "callspec") else set()


def diagonal(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases: always the one that shows most values which no earlier one has shown; `smoke` ones first."""
    left, chosen, seen = list(cases), [], set()
    while left and len(chosen) < count:
        best = max(left, key=lambda item: (is_smoke(item), len(values(item) - seen), zlib.crc32(item.nodeid.encode())))
        left.remove(best)
        chosen.append(best)
        seen |= values(best)
    return chosen


def is_smoke(item: pytest.Item) -> bool:
    return item.get_closest_marker("smoke") is not None


def pick(cases: list[pytest.Item], known: dict[str, list[float]], rest: bool = False) -> list[pytest.Item]:
    """Those of a function's cases that fit into its seconds: SHARE or REST, or as its mark says (0: none)."""
    seconds, number = known.get(function_of(cases[0].nodeid), [0.0, 1])
    each, mark = seconds / number, cases[0].get_closest_marker("share")
    if cases[0].get_closest_marker("alone"):
        each *= 2
    if each > LONGEST and not (rest or mark or any(map(is_smoke, cases))):
        return []
    share = (mark.args if mark else (SHARE, REST))[rest]
    if each * len(cases) <= share:
        return cases
    return diagonal(cases, int(share / each) or share > 0)


def longest_first(items: list[pytest.Item], known: dict[str, list[float]]) -> list[pytest.Item]:
    """The files in order of their seconds, so that no worker begins a long one when the others have nothing left to do."""
    files: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds, number = known.get(function_of(item.nodeid), [UNRECORDED, 1])
        files[item.path] += seconds / number
    return sorted(items, key=lambda item: (-files[item.path], str(item.path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("atom_mini")
    group.addoption("--quick", action="store_true", help="what `make test` runs")
    group.addoption("--rest", action="store_true", help="what `make test-rest` runs")
    group.addoption("--left", action="store_true", help="what neither runs")
    group.addoption("--record", action="store_true", help="write how long tests take to tests/seconds.json")


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    option = config.option
    if not (option.quick or option.rest or option.left):
        return
    functions, known = defaultdict(list), json.loads(SECONDS.read_text())
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    picked = {name: (cases, pick(cases, known)) for name, cases in functions.items()}
    quick = {item for _, some in picked.values() for item in some}
    both = quick | {item for cases, _ in picked.values() for item in pick(cases, known, rest=True)}
    runs = quick if option.quick else both - quick if option.rest else {*items} - both
    left = [item for item in items if item not in runs]
    if option.quick and getattr(config, "workerinput", {}).get("workerid") in (None, "gw0"):
        none_of = [name for name, (_, some) in picked.items() if not some]
        _add(COVERED, {option.markexpr: [len(quick), len(left), len(functions), none_of]})
    config.hook.pytest_deselected(items=left)
    items[:] = longest_first([item for item in items if item in runs], known)


class Recorder:
    """How long each test function takes, with what its fixtures take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cases: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)] += report.duration
        self.cases[function_of(report.nodeid)].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Those that were run replace what the file knew of them."""
        found = {name: [round(self.seconds[name], 1), len(self.cases[name])] for name in self.seconds}
        _add(SECONDS, found)
        known = json.loads(SECONDS.read_text())
        kept = (f'  "{name}": {value}' for name, value in sorted(known.items()) if value[0] >= WORTH_RECORDING)
        SECONDS.write_text("{\n" + ",\n".join(kept) + "\n}\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def _add(path: Path, found: dict[str, list]) -> None:
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | found))


def covered(runs: Iterable[list[Any]]) -> tuple[str, list[str]]:
    """The last line of `make test`, and the names of the test functions that it leaves to `make test-rest`."""
    *counts, names = zip(*runs, strict=True)
    tests, left, functions = map(sum, counts)
    long = sorted(name for found in names for name in found)
    line = f"{tests:,} of {tests + left:,} tests passed, of {functions - len(long):,} test functions; make test-rest runs more"
    return line + (f" ({len(long)} functions, in {LONG.relative_to(LONG.parents[1])})" if long else ""), long


if __name__ == "__main__":
    last, long = covered(json.loads(COVERED.read_text()).values())
    LONG.write_text("".join(f"{name}\n" for name in long))
    print(last)
