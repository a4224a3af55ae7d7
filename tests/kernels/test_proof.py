"""The page of what has been shown (kernels/proof.py): its commands exist, and a card has a row as soon as it has a block."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """\
---- atom_mini on a GPU ----
card        {card}, 96 units, 24 GiB
date        2026-12-01T10:00:00+00:00, atom_mini abcdef0
tests       engine: 3 passed, 1 failed
  FAILED tests/b.py::test_three: assert 1 == 2
kernels     not measured (slot 2, kernels/slots.sh)
failed
  slot1, engine: exit code 1 after 40 s; last line: 1 failed
---- end ----
"""


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with a folder of its own for results."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "kernels")])
    import proof

    (tmp_path / "targets.json").write_text(proof.machines.RESULTS.read_text())
    monkeypatch.setattr(proof.machines, "RESULTS", tmp_path / "targets.json")
    return proof


def test_each_command_and_file_exists(proof: Any) -> None:
    text = proof.shown() + proof.targets() + proof.gpus()
    makefile = (ROOT / "Makefile").read_text()
    commands = set(re.findall(r"`make ([\w-]+)", text))
    assert len(commands) > 6 and [name for name in commands if f"\n{name}:" not in makefile] == []
    files = set(re.findall(r"tests/[\w/.]+", text))
    assert len(files) > 4 and [name for name in files if not (ROOT / name).exists()] == []


def test_a_row_says_what_it_does_not_prove(proof: Any) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in proof.shown().splitlines()[2:]]
    assert len(rows) > 8 and all(len(row) == 5 and all(row) for row in rows)


def test_a_card_is_empty_until_it_has_a_block(proof: Any, tmp_path: Path) -> None:
    """A card that we did not ask for has a row, too; machines.py knows both."""
    before = proof.gpus()
    assert all(f"| {card} | " in before for card in proof.CARDS) and before.count("no run yet") == len(proof.CARDS) == 7
    for name in ("AMD Radeon RX 7900 XTX", "Some Other Card"):
        (tmp_path / f"{name}.txt").write_text(BLOCK.format(card=name))
    after = proof.gpus()
    assert "| AMD Radeon RX 7900 XTX | `gfx1100` | 2026-12-01 | 2 failed, 1 not measured |" in after
    assert "| Some Other Card |  | 2026-12-01 |" in after and after.count("no run yet") == 6
    assert proof.machines.measured_on("RX 7900 XT, RX 7900 XTX") == "AMD Radeon RX 7900 XTX"
