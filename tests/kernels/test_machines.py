"""What README and the site say of each GPU is what was recorded, of the kernels as they are now."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import path_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels"))  # appended: a folder of ours hides no installed package

import machines  # noqa: E402
from amd.machine import TARGETS  # noqa: E402

from atom_mini.gpu import tile_configs  # noqa: E402

KERNEL = {"variants": 3, "waves": 4.0, "registers": 100, "spills": 0, "lds": 2048}


def test_readme_says_what_was_recorded() -> None:
    assert f"\n\n{machines.summary()}\n\n" in (ROOT / "docs" / "machines.md").read_text()


def test_all_targets_are_recorded() -> None:
    """Compiled, and AMD's machine code executed, all of it right, and by one Triton."""
    known = machines.load()
    assert set(known) == {*TARGETS, "sm_90", "sm_100", "sm_120"}
    for target, facts in known.items():
        assert set(facts) == ({"compiled", "executed"} if target in TARGETS else {"compiled"}), target
        assert not facts["compiled"]["faults"] and facts["compiled"]["launches"] > 100, target
        assert target not in TARGETS or facts["executed"]["right"] == facts["executed"]["cases"] > 20, target
    assert len({found["triton"] for facts in known.values() for found in facts.values()}) == 1


def test_chapters_say_first_what_has_run_where() -> None:
    """As long as no GPU's figures are recorded; then their first cells and this test must change."""
    assert [path.name for path in machines.RESULTS.parent.glob("*.json")] == ["targets.json"]
    for name in ("10_triton_attention", "11_small_kernels", "11b_one_copy", "12a_graphs", "12b_assemble"):
        first = "".join(json.loads(path_of(name).read_text())["cells"][0]["source"])
        assert "No GPU has " in first, name
        assert ("eight AMD targets and for NVIDIA's sm_90" in first) == (name in ("10_triton_attention", "11_small_kernels"))
    assert len(TARGETS) == 8


def test_records_are_of_these_kernels() -> None:
    """If not, run `make kernels` and `make execute`, then `python nbs/_book/book.py run nbs/index.ipynb` and `... readme`."""
    stale = [f"{target}, {what}" for target, facts in machines.load().items() for what, found in facts.items()
             if found["source"] != machines.source()]  # fmt: skip
    assert not stale


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records two targets into a folder of the test."""
    monkeypatch.setattr(machines, "RESULTS", tmp_path / "results" / "targets.json")
    monkeypatch.setattr(machines, "stamp", lambda: {"source": "1", "triton": "9.9", "llvm": "abc"})
    kernels = {"paged attention, decode, heads of 256": {**KERNEL, "spills": 7}, "merge": KERNEL}
    compiled = {"cards": "RX 1, RX 1 XT", "launches": 6, "kernels": kernels, "refused": {"sort": "why"}, "faults": 0}
    machines.record("gfx2", "compiled", compiled)
    machines.record("gfx2", "executed", {"cases": 5, "right": 4, "instructions": 10})
    machines.record("gfx1", "compiled", {**compiled, "kernels": {"merge": KERNEL}, "refused": {}, "faults": 2})
    return compiled


def test_what_is_wrong_is_in_the_table(written: Any) -> None:
    first, second = machines.summary().splitlines()[2:4]
    assert first.startswith("| `gfx1` | RX 1, RX 1 XT | 6 kernels, 2 with faults | no | none | 100, 2 KiB | nothing |")
    assert second.startswith("| `gfx2` | RX 1, RX 1 XT | 6 kernels | 4 of 5 cases right | heads of 256: 7 |")
    assert second.endswith("| sort | **never** |")
    assert "**7 spilled**" in machines.whole() and "Triton 9.9 and its LLVM abc" in machines.whole()


def test_a_measured_gpu_is_named(written: Any) -> None:
    """`make gpu` records what it ran on."""
    for n, name in enumerate(("AMD Radeon RX 1 XT", "NVIDIA H100 80GB HBM3", "AMD Radeon RX 7900 XTX")):
        (machines.RESULTS.parent / f"{n}.json").write_text(json.dumps({"machine": {"device": name}}))
    assert all("| AMD Radeon RX 1 XT |" in line for line in machines.summary().splitlines()[2:4])
    found = {cards: machines.measured_on(cards) for cards in ("H100, H200", "RX 1", "RX 7900 XT", "RX 7900 XTX")}
    assert [*found.values()] == ["NVIDIA H100 80GB HBM3", machines.NEVER, machines.NEVER, "AMD Radeon RX 7900 XTX"]


def test_dates_are_of_the_first_time(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finds the same changes nothing; one that finds something else has its own date."""
    text = machines.RESULTS.read_text()

    class Later(date):
        @classmethod
        def today(cls) -> date:
            return date(2999, 1, 1)

    monkeypatch.setattr(machines, "date", Later)
    machines.record("gfx2", "compiled", written)
    assert machines.RESULTS.read_text() == text
    machines.record("gfx2", "compiled", {**written, "launches": 7})
    assert machines.load()["gfx2"]["compiled"]["date"] == "2999-01-01" > machines.load()["gfx1"]["compiled"]["date"]


def test_the_digest_is_of_kernels_and_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes with a kernel, a row of a table, an option; not with comments, docstrings or other host code."""
    files = {f"atom_mini/{m}.py": (ROOT / "atom_mini" / f"{m}.py").read_text() for m in machines.MODULES}
    before = machines.source()
    monkeypatch.setattr(machines, "ROOT", tmp_path)

    def after(old: str, new: str) -> str:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.replace(old, new))
        assert any(old in text for text in files.values()), old
        return machines.source()

    assert after('"gfx1201"', '"gfx1299"') != before
    assert after("tl.maximum(m,", "tl.minimum(m,") != before
    assert after('"num_warps": self.warps', '"num_warps": 2 * self.warps') != before
    assert after("# as in `TILE_CONFIGS`", "# as there") == before
    assert after('"""Work items of', '"""Pieces of') == before
    assert after("class PagedAttention:", "class PagedAttention(object):") == before

CARDS = {(7, 5): "sm_80", (8, 0): "sm_80", (8, 6): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100",
         (10, 3): "sm_100", (11, 0): "sm_100", (12, 0): "sm_120", (12, 1): "sm_120"}  # fmt: skip


@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_a_card_takes_the_row_whose_tiles_fit_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of 12.x have 99 KB of shared memory for a program, and the prefill of `sm_90` takes 128 KB."""
    major, minor = capability
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major, minor=minor))
    assert tile_configs.architecture(torch.device("cuda", 1)) == CARDS[capability]
