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


@pytest.mark.parametrize("marks", [{}, {"alone": []}, {"share": [0.1, 30.0]}, {"smoke": []}], ids=str)
@pytest.mark.parametrize("name", ["test_long", "test_giant", "test_grid"])
def test_one_case_of_each_function_runs_however_long_it_takes(name: str, marks: dict[str, Any]) -> None:
    picked = quick.pick(cases(name, (4, 3) if name == "test_grid" else (1,), **marks), KNOWN)
    assert len(picked) == 1 or (name == "test_grid" and len(picked) == 2)


@pytest.mark.parametrize("marks", [{}, {"alone": []}, {"share": [1.0, 24.0]}, {"smoke": []}], ids=str)
def test_the_rest_holds_what_is_quick(marks: dict[str, Any]) -> None:
    items = cases("test_grid", (4, 3), **marks)
    known = {"test_x.py::test_grid": [96.0, 12]}
    quick_ones, more = quick.pick(items, known), quick.pick(items, known, rest=True)
    assert len(quick_ones) == 1 and more[:1] == quick_ones and len(more) == (1 if "alone" in marks else 3)


def test_long_cases_that_are_left_out_have_names() -> None:
    known = KNOWN | {"test_x.py::test_giant": [27.0, 3]}
    picked = {f"test_x.py::{n}": (all := cases(n, (3,)), quick.pick(all, known)) for n in ("test_giant", "test_short")}
    assert quick.left_out(picked, known) == {"test_x.py::test_giant": [2, 3]}


def test_what_runs_alone_counts_twice() -> None:
    assert len(quick.pick(cases("test_grid", (4, 3), alone=[]), KNOWN)) == 1


def test_the_last_line() -> None:
    runs = [[10, 90, 5, {"test_x.py::test_b": [2, 3], "test_x.py::test_a": [4, 5]}], [1, 1000, 3, {}]]
    assert quick.covered(runs) == (
        "make test ran 11 of 1,101 tests, at least one of each of 8 test functions; make test-rest and make test-all "
        "have the other 1,090, and mypy. Left out of those that take over 4.5 s: test_x.py::test_a (4 of 5), "
        "test_x.py::test_b (2 of 3)."
    )
    assert quick.covered([[10, 0, 5, {}]]).endswith("and mypy.")


def test_what_is_recorded_exists() -> None:
    """A function that was renamed counts as quick: `make test-seconds` records it again."""
    names: set[str] = set()
    for path in quick.SECONDS.parent.rglob("test_*.py"):
        assert not [name for name in names if name.startswith(f"{path.name}::")], "two files of one name"
        functions = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
        names |= {f"{path.name}::{f.name}" for f in functions}
    assert set(json.loads(quick.SECONDS.read_text())) <= names


def test_what_is_picked_fits_a_quarter_of_an_hour() -> None:
    """Two cores: a case of each function takes most of it, for the long ones are those that start processes."""
    known = json.loads(quick.SECONDS.read_text())
    each = {name: seconds / number for name, (seconds, number) in known.items()}
    fit = {name: int(quick.SHARE / e) or 1 for name, e in each.items()}
    seconds = sum(min(known[name][1], fit[name]) * e for name, e in each.items())
    assert seconds < 1700, f"{seconds:.0f} s"
