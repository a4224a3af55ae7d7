"""What `make test` picks of all tests."""

from __future__ import annotations

import ast
import json
from types import SimpleNamespace
from typing import Any

import pytest
import quick

KNOWN = {"test_x.py::test_grid": [12.0, 12], "test_x.py::test_giant": [9.0, 1], "test_x.py::test_long": [3.0, 1]}


def cases(name: str, shape: tuple[int, ...] = (1,), **marks: Any) -> list[Any]:
    """A test function with a parameter per number in `shape`, that many values each."""
    found = []
    for n in range(shape[0] * (shape[1] if len(shape) > 1 else 1)):
        indices = {"a": n % shape[0], "b": n // shape[0]}
        at = {k: SimpleNamespace(args=v) for k, v in marks.items()}
        nodeid = f"tests/test_x.py::{name}[{n}]"
        found.append(
            SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(indices=indices), get_closest_marker=at.get)
        )
    return found


def test_a_function_that_fits_runs_whole() -> None:
    items = cases("test_unknown", (5,))
    assert quick.pick(items, KNOWN) == items


@pytest.mark.parametrize(("share", "number"), [(2.0, 2), (4.0, 4), (12.0, 12)])
def test_of_a_grid_as_much_as_fits_and_every_value_first(share: float, number: int) -> None:
    picked = quick.pick(cases("test_grid", (4, 3), share=[share, 30.0]), KNOWN)
    indices = [item.callspec.indices for item in picked]
    assert len(picked) == number and len({i["a"] for i in indices}) == min(number, 4)
    assert len({i["b"] for i in indices}) == min(number, 3)


@pytest.mark.parametrize(
    ("name", "marks", "number"),
    [
        ("test_long", {}, 1),
        ("test_long", {"alone": []}, 0),  # its 3 s count twice
        ("test_long", {"alone": [], "smoke": []}, 1),
        ("test_giant", {}, 0),
        ("test_giant", {"share": [0.1, 30.0]}, 1),
        ("test_giant", {"share": [0, 30.0]}, 0),
        ("test_giant", {"smoke": []}, 1),
    ],
    ids=str,
)
def test_a_long_function_is_quick_only_if_it_is_marked(name: str, marks: dict[str, Any], number: int) -> None:
    """And the rest runs a case of each function, however long it takes."""
    items = cases(name, **marks)
    assert len(quick.pick(items, KNOWN)) == number and quick.pick(items, KNOWN, rest=True) == items


@pytest.mark.parametrize(("seconds", "marks", "number", "more"), [
    (3.0, {}, 1, 6), (8.0, {}, 0, 2), (3.0, {"alone": []}, 0, 3), (8.0, {"smoke": []}, 1, 2),
    (8.0, {"share": [1.0, 24.0]}, 1, 3),
], ids=str)  # fmt: skip
def test_the_rest_holds_what_is_quick(seconds: float, marks: dict[str, Any], number: int, more: int) -> None:
    items, known = cases("test_grid", (4, 3), **marks), {"test_x.py::test_grid": [12 * seconds, 12]}
    found, both = quick.pick(items, known), quick.pick(items, known, rest=True)
    assert (len(found), len(both)) == (number, more) and both[:number] == found


def test_long_files_come_first_and_stay_whole() -> None:
    files = {"short": cases("test_unknown", (3,)), "long": cases("test_giant"), "middle": cases("test_grid", (2,))}
    items = [item for name in files for item in files[name]]
    for name, found in files.items():
        for item in found:
            item.path = name
    assert quick.longest_first(items[::-1], KNOWN) == files["long"] + files["middle"][::-1] + files["short"][::-1]


def test_what_runs_alone_counts_twice() -> None:
    assert len(quick.pick(cases("test_grid", (4, 3), alone=[]), KNOWN)) == 1


def test_the_last_line() -> None:
    """One short line; the names go into a file."""
    line, long = quick.covered([[10, 90, 5, ["test_b"]], [1, 1000, 3, ["test_a"]]])
    assert long == ["test_a", "test_b"] and len(line) < 120
    assert line == "11 of 1,101 tests passed, of 6 test functions; make test-rest runs more (2 functions, in build/test-rest.txt)"
    assert quick.covered([[10, 90, 5, []]]) == ("10 of 100 tests passed, of 5 test functions; make test-rest runs more", [])


def test_what_is_recorded_exists() -> None:
    """A function that was renamed counts as quick: `make test-seconds` records it again."""
    names: set[str] = set()
    for path in quick.SECONDS.parent.rglob("test_*.py"):
        assert not [name for name in names if name.startswith(f"{path.name}::")], "two files of one name"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(f"{path.name}::{node.name}")
            elif isinstance(node, ast.Assign):  # a state machine's test
                names |= {f"{path.name}::{target.id}" for target in node.targets if isinstance(target, ast.Name)}
    assert set(json.loads(quick.SECONDS.read_text())) <= names


def test_what_is_picked_fits_eight_minutes() -> None:
    """Of two cores, less what starting, collecting, and the marked ones take."""
    known = json.loads(quick.SECONDS.read_text())
    each = {name: seconds / number for name, (seconds, number) in known.items()}
    seconds = sum(min(known[name][1], int(quick.SHARE / e) or 1) * e for name, e in each.items() if e <= quick.LONGEST)
    assert seconds < 700, f"{seconds:.0f} s"
