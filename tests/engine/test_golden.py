"""The engine's tokens today are those of tests/data/golden.json. `python tests/golden.py` records it anew."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest
import torch
from real_weights import FOLDER, is_whole

from atom_mini import LLM

KNOWN = json.loads(golden.FILE.read_text())["models"]


FAMILIES = [*golden.FAMILIES]
OFTEN = {*FAMILIES[::2]}


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_small_models_answer_as_they_did(name: str, tmp_path: Path) -> None:
    """With room for all, and through chunks, prefix hits and preemptions; with decodes beside the chunks, too."""
    golden.save(name, tmp_path)
    assert golden.checksum(tmp_path) == KNOWN[name]["weights"], "torch draws other weights: record the golden file anew"
    tight = golden.TIGHT | ({"enable_prefix_caching": False} if name.startswith("state") else {})
    for options in (golden.ROOMY, tight, tight | {"enable_mixed_steps": True}):
        with LLM(str(tmp_path), device="cpu", dtype="float32", **options) as llm:
            found, _ = golden.answers(llm, golden.asked_of(name))
        golden.check(name, KNOWN[name], found)


@pytest.mark.parametrize(("compiled", "mixed"), [(False, False), (False, True), (True, False)])
def test_the_built_in_model_answers_as_it_did(compiled: bool, mixed: bool) -> None:
    budget = {"enable_mixed_steps": True, "max_num_batched_tokens": 22} if mixed else {}
    with LLM("tiny", device="cpu", compiled=compiled, **budget) as llm:
        golden.check("tiny", KNOWN["tiny"], golden.answers(llm, golden.asked_of("tiny"))[0])


@pytest.mark.real
@pytest.mark.skipif(not is_whole(), reason="no real weights in build/smollm2: run make real")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_real_model_answers_as_it_did(compiled: bool) -> None:
    torch.set_num_threads(2)
    try:
        with LLM(str(FOLDER), device="cpu", dtype="float32", compiled=compiled) as llm:
            found, _ = golden.answers(llm, golden.asked_of(golden.REAL))
    finally:
        torch.set_num_threads(1)
    golden.check(golden.REAL, KNOWN[golden.REAL], found)
