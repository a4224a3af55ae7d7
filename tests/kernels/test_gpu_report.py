"""The block of text that `make gpu` prints (kernels/gpu_report.py), from files as a run writes them; whole, and cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "kernels" / "gpu_report.py"
MACHINE = {"device": "Some Card", "compute_units": 304, "memory_bytes": 192 * 2**30, "driver": "6.12", "cuda": None, "hip": "7.0",
           "torch": "2.11", "triton": "3.6.0", "python": "3.12", "date": "2026-12-01T10:00:00+00:00", "dry": False}  # fmt: skip
LIMITS = {"read_bandwidth": 4e12, "bandwidth": 3.6e12, "matrix_rate": 6e14, "launch_seconds": 2.5e-6}


def bench(**parts: Any) -> dict[str, Any]:
    return {"machine": MACHINE, "failures": [], "parts": {"limits": LIMITS} | parts}


WHOLE: dict[str, Any] = {
    "limits": bench(),
    "tokens": {"machine": MACHINE, "models": {
        "built-in model": {"graphs": {"requests": 10, "equal": 10, "partings": []},
                           "overlapped": {"requests": 10, "equal": 9, "partings": [{"request": 3, "token": 7, "apart": 0.25}]}},
        "SmolLM2-135M-Instruct": {"graphs": {"error": "RuntimeError: out of memory"}}}},
    "rates": bench(rates={"plain": {"1": 500.25, "8": 3000.0, "32": 9000.0, "256": 30000.0},
                          "overlapped": {"1": 600.0, "8": 3500.0, "error": "TimeoutError: longer than 60 s"}}),
    "kernels": bench(kernels={
        "decode_attention": {"Qwen3-0.6B batch 256 context 1024": {"GB_per_second": 3400.0},
                             "Qwen3-0.6B batch 1 context 512": {"GB_per_second": 400.0},
                             "Llama-3.1-8B batch 1 context 512": {"skipped": "does not fit"}},
        "prefill_attention": {"Qwen3-0.6B 1 x 16384": {"of_matrix_rate": 0.5}},
        "latent_decode": {"16 heads batch 32 context 1024": {"GB_per_second": 2000.0}},
        "small_kernels": {"Qwen3-0.6B add_rms_norm 256": {"GB_per_second": 3000.0}},
        "experts": {"gpt-oss-20b, packed batch 8": {"error": "OutOfResources: shared memory"}}}),
    "common": bench(common={"tokens_per_second": 20000.0}, overlap={"common": {"tokens_per_second": 22000.0}}),
    "steps": bench(steps={"Qwen3-0.6B": {"loading_seconds": 3.0, "decode batch 1 context 512": {"of_roofline": 0.6}}}),
    "nano-vllm": bench(nano_vllm={"tokens_per_second": 18000.0, "attention": "flash-attn",
                                  "rates": {"1": 300.0, "8": 2000.0}}),
    "transformers": bench(transformers={"tokens_per_second": 2000.0}),
}  # fmt: skip
ENDS = [("passed", "tests/a.py::test_one", ""), ("skipped", "tests/a.py::test_two", ""),
        ("failed", "tests/b.py::test_three[1-2]", "assert 1 == 2")]  # fmt: skip
SLOT = "  0   20 s  limits\n  1   40 s  tokens\n124  140 s  kernels (longer than 140 s)\n"
LOG = "\n==== limits: x\nfine\n\n==== tokens: x\nTraceback\nRuntimeError: first\n\n==== kernels: x\n.....F..\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with all files of a run in which a few things went wrong."""
    for name, facts in WHOLE.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    lines = [json.dumps({"test": test, "outcome": outcome, "why": why}) + "\n" for outcome, test, why in ENDS]
    (tmp_path / "tests-kernels.jsonl").write_text("".join(lines))
    (tmp_path / "slot1.txt").write_text(SLOT)
    (tmp_path / "slot1.log").write_text(LOG)
    return tmp_path


def block(out: Path) -> list[str]:
    done = subprocess.run([sys.executable, "-S", str(PROGRAM), str(out)], capture_output=True, text=True)  # -S: no torch
    assert done.returncode == 0 and done.stderr == "" and (out / "report.txt").read_text() == done.stdout
    return done.stdout.splitlines()


def test_a_whole_run(out: Path) -> None:
    lines = block(out)
    date = lines.pop(4)
    assert date.startswith("date        2026-12-01T10:00:00+00:00, atom_mini ")
    assert lines == """\
---- atom_mini on a GPU ----
card        Some Card, 304 units, 192 GiB
driver      6.12, ROCm 7.0
software    torch 2.11, triton 3.6.0, python 3.12
read rate   4,000 GB/s, measured in this run; copy 3,600 GB/s, product 600 TFLOP/s, smallest kernel 2.5 us
tokens      equal to the CPU's, built-in model: graphs 10 of 10, overlapped 9 of 10
  DIFFERS: overlapped, request 3 from token 7, where the CPU's two likeliest are 2.5e-01 apart
tokens      equal to the CPU's, SmolLM2-135M-Instruct: -
tests       kernels: 1 passed, 1 skipped, 1 failed
  FAILED tests/b.py::test_three[1-2]: assert 1 == 2
tokens/s    at 1, 8, 32, 256 requests, Qwen3-0.6B's shape in bfloat16, 128 tokens in, 256 out
            plain: 500, 3,000, 9,000, 30,000
            overlapped: 600, 3,500, -, -
            nano-vLLM: 300, 2,000, -, -
benchmark   256 requests, tokens/s: plain 20,000, overlapped 22,000, transformers 2,000, nano-vLLM 18,000
            nano-vLLM's attention: flash-attn
kernels     share of the read rate, by batch x context, or by tokens
  decode, Qwen3-0.6B: 256 x 1024 85 %, 1 x 512 10 %
  latents, 16 heads: 32 x 1024 50 %
  Qwen3-0.6B add_rms_norm: 256 75 %
            share of the matrix rate
  prefill, Qwen3-0.6B: 1 x 16384 50 %
steps       share of the roofline, decodes by batch x context
  Qwen3-0.6B: 1 x 512 60 %
slot1       1 of 3 steps went well, 200 s
failed
  slot1, tokens: exit code 1 after 40 s; last line: RuntimeError: first
  slot1, kernels (longer than 140 s): exit code 124 after 140 s; last line: .....F..
  tokens.json, SmolLM2-135M-Instruct / graphs: RuntimeError: out of memory
  rates.json, rates / overlapped: TimeoutError: longer than 60 s
  kernels.json, kernels / experts / gpt-oss-20b, packed batch 8: OutOfResources: shared memory
---- end ----""".splitlines()


def test_a_run_that_was_cut_off(out: Path) -> None:
    """After the first tests; the last file and the last line are half written."""
    for name in ("rates", "common", "steps", "nano-vllm", "transformers"):
        (out / f"{name}.json").unlink()
    (out / "kernels.json").write_text(json.dumps(WHOLE["kernels"])[:200])
    (out / "tests-kernels.jsonl").write_text('{"test": "a", "outcome": "passed", "why": ""}\n{"test": "b", "outc')
    lines = block(out)
    assert lines[1] == "card        Some Card, 304 units, 192 GiB" and lines[-1] == "---- end ----"
    for line in ("tests       kernels: 1 passed, 0 failed", "tokens/s    not measured (slot 2, kernels/slots.sh)",
                 "benchmark   not measured (slot 2, kernels/slots.sh)",
                 "kernels     not measured (slot 2, kernels/slots.sh)"):  # fmt: skip
        assert line in lines


def test_an_unforeseen_file_costs_its_section_alone(out: Path) -> None:
    (out / "tokens.json").write_text(json.dumps({"models": {"built-in model": {"graphs": {"equal": 1}}}}))
    (out / "rates.json").write_text(json.dumps({"parts": {"rates": {"plain": {"1": 5.0}}}}))
    lines = block(out)
    assert "tokens      cannot be told: KeyError: 'requests'" in lines and "            plain: 5" in lines


def test_an_empty_folder_has_a_block_too(tmp_path: Path) -> None:
    lines = block(tmp_path)
    assert lines[1] == "card        unknown: no step has written a file"
    assert sum("not measured" in line for line in lines) == 7 and "failed      nothing" in lines


def test_where_tokens_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place, and how far apart the CPU found its two likeliest tokens there; a shorter answer parts at its end."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROGRAM.parent)])
    from same_tokens import compare

    likely = [{1: -0.5, 9: -1.0}, {2: -0.5, 9: -0.75}, {3: -0.1, 9: -4.0}]
    want = SimpleNamespace(token_ids=[1, 2, 3], logprobs=likely)
    answers = [SimpleNamespace(token_ids=ids) for ids in ([1, 2, 3], [1, 9, 3], [1, 2])]
    assert compare([want] * 3, answers) == {
        "requests": 3, "equal": 1,
        "partings": [{"request": 1, "token": 1, "apart": 0.25}, {"request": 2, "token": 2, "apart": pytest.approx(3.9)}],
    }  # fmt: skip
