"""What the pages say of each GPU is what was recorded, of the kernels as they are now."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "kernels"))  # appended: a folder of ours hides no installed package

import machines  # noqa: E402
from amd.machine import TARGETS  # noqa: E402

from atom_mini.gpu import tile_configs  # noqa: E402


def test_all_targets_are_recorded() -> None:
    """Compiled, and AMD's machine code executed, all of it right, and by one Triton; the page says so."""
    known = machines.load()
    assert set(known) == {*TARGETS, "sm_90", "sm_100", "sm_120"}
    for target, facts in known.items():
        assert set(facts) == ({"compiled", "executed"} if target in TARGETS else {"compiled"}), target
        assert not facts["compiled"]["faults"] and facts["compiled"]["launches"] > 100, target
        assert target not in TARGETS or facts["executed"]["right"] == facts["executed"]["cases"] > 20, target
    assert len({found["triton"] for facts in known.values() for found in facts.values()}) == 1
    assert f"\n\n{machines.summary()}\n\n" in (ROOT / "docs" / "machines.md").read_text()


def test_records_are_of_these_kernels() -> None:
    """If not, run `make kernels`, `make execute`, `python nbs/_book/book.py run nbs/index.ipynb` and `... readme`."""
    stale = [f"{target}, {what}" for target, facts in machines.load().items() for what, found in facts.items()
             if found["source"] != machines.source()]  # fmt: skip
    assert not stale


def test_the_digest_is_of_kernels_and_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes with a kernel, a row of a table, an option; not with comments, docstrings or other host code."""
    files = {f"atom_mini/{m}.py": (ROOT / "atom_mini" / f"{m}.py").read_text() for m in machines.MODULES}
    before = machines.source()
    monkeypatch.setattr(machines, "ROOT", tmp_path)
    for old, new, is_other in (
        ('"gfx1201"', '"gfx1299"', True), ("tl.maximum(m,", "tl.minimum(m,", True),
        ('"num_warps": self.warps', '"num_warps": 2 * self.warps', True),
        ('"""Work items of', '"""Pieces of', False), ("class PagedAttention:", "class PagedAttention(object):", False),
    ):  # fmt: skip
        assert any(old in text for text in files.values()), old
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.replace(old, new))
        assert (machines.source() != before) is is_other, old


CARDS = {(7, 5): "sm_80", (8, 9): "sm_80", (9, 0): "sm_90", (10, 3): "sm_100", (11, 0): "sm_100", (12, 1): "sm_120"}


@pytest.mark.parametrize("capability", CARDS, ids=str)
def test_a_card_takes_the_row_whose_tiles_fit_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of 12.x have 99 KB of shared memory for a program, and the prefill of `sm_90` takes 128 KB."""
    major, minor = capability
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major, minor=minor))
    assert tile_configs.architecture(torch.device("cuda", 1)) == CARDS[capability]


def test_a_gpu_of_no_row_takes_its_nearest_relative() -> None:
    rows = {"gfx1200": "gfx1201", "gfx1151": "gfx1100", "gfx1150": "gfx1102", "gfx908": "gfx942", "gfx1101": "gfx1100"}
    rows |= {"gfx950": "gfx950"}
    assert {name: tile_configs.nearest(name) for name in rows} == rows
    table, cpu = tile_configs.TILE_CONFIGS, torch.device("cpu")
    assert tile_configs.configs_for(cpu, torch.float32, table) == table["float32"]
    assert tile_configs.configs_for(cpu, torch.bfloat16, table) == table["sm_80"]
