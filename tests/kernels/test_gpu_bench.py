"""The GPU benchmark's logic, on a CPU: every part runs in a dry run, failures are reported, the sums are right."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

# What kernels/peers.py touches of nano-vLLM, and a generate that checks the stand-ins for flash-attn against torch.
FAKE_NANO = {
    "__init__.py": """
import torch
import torch.nn.functional as F
from dataclasses import dataclass
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from nanovllm.engine import llm_engine, model_runner
from nanovllm.models import qwen3

@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool

class LLM:
    def __init__(self, folder, enforce_eager, max_model_len):
        assert llm_engine.AutoTokenizer.from_pretrained(folder).eos_token_id == -1
        model_runner.load_model(torch.nn.Linear(3, 2), folder)
        assert qwen3.get_rope(16, base=1e6, rope_scaling={"rope_type": "default"}) == (16, 1e6, None)

    def generate(self, prompts, params, use_tqdm):
        torch.manual_seed(0)
        cache = torch.randn(2, 6, 8, 2, 16)  # k and v, blocks, tokens, K/V heads, head_dim
        table, lens = torch.tensor([[4, 1, 0], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32), [19, 5, 0]
        q = torch.randn(3, 1, 4, 16)
        out = flash_attn_with_kvcache(q, *cache, cache_seqlens=torch.tensor(lens, dtype=torch.int32),
                                      block_table=table, softmax_scale=0.3, causal=True)
        for i in range(2):
            k, v = cache[:, table[i].clamp(min=0).long()].flatten(1, 2)[:, :lens[i]].transpose(1, 2)[:, None]
            want = F.scaled_dot_product_attention(q[i, 0, :, None][None], k, v, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(out[i, 0], want[0, :, 0])
        assert (out[2] == 0).all()  # a graph's unused row
        q, ends = torch.randn(7, 4, 16), torch.tensor([0, 3, 7])
        k, v = torch.randn(2, 7, 2, 16)
        out = flash_attn_varlen_func(q, k, v, max_seqlen_q=4, cu_seqlens_q=ends, max_seqlen_k=4, cu_seqlens_k=ends,
                                     softmax_scale=0.3, causal=True, block_table=None)
        q, k, v = (t[3:].transpose(0, 1)[None] for t in (q, k, v))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[3:], want[0].transpose(0, 1))
""",
    "engine/llm_engine.py": "AutoTokenizer = None",
    "engine/model_runner.py": "load_model = None",
    "models/qwen3.py": "def get_rope(dim, base, rope_scaling=None): return dim, base, rope_scaling",
}


def run_bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(KERNELS / "bench.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | NO_GPU, timeout=300, check=False)


def no_errors(figures: Any) -> bool:
    """Whether no part, however deep, reports an error."""
    if not isinstance(figures, dict):
        return True
    return "error" not in figures and all(map(no_errors, figures.values()))


@pytest.mark.slow
def test_dry_run_runs_every_part(tmp_path: Path) -> None:
    for name, text in FAKE_NANO.items():
        file = tmp_path / "checkout" / "nanovllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    out = tmp_path / "out.json"
    done = run_bench("--dry-run", "--json", str(out), "--nano-vllm", str(tmp_path / "checkout"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY RUN" in done.stdout
    figures = json.loads(out.read_text())
    assert {"date", "device", "torch", "triton", "transformers", "driver", "cuda", "hip", "command"} <= set(
        figures["machine"]
    )
    assert figures["machine"]["dry"] is True
    parts = figures["parts"]
    assert list(parts) == [
        "limits", "rates", "kernels", "steps", "mixtures", "common", "single", "overlap", "transformers", "nano_vllm"
    ]  # fmt: skip
    assert no_errors(parts) and figures["failures"] == []
    assert all(part["elapsed_seconds"] > 0 for part in parts.values())
    assert {"bandwidth", "matrix_rate", "launch_seconds"} <= set(parts["limits"])
    loads = [parts["rates"]["plain"], parts["rates"]["overlapped"], parts["nano_vllm"]["rates"]]
    assert all(rate > 0 for found in loads for rate in found.values()) and {*map(tuple, loads)} == {("1", "2")}
    assert len(parts["kernels"]["decode_attention"]) == len(parts["kernels"]["prefill_attention"]) == 2
    assert len(parts["kernels"]["small_kernels"]) == 8
    assert all(row["microseconds"] > 0 for row in parts["kernels"]["small_kernels"].values())
    assert set(parts["kernels"]["experts"]) == {"toy batch 3", "toy, packed batch 3"}
    assert all(row["microseconds"] > 0 < row["experts_hit"] <= 6 for row in parts["kernels"]["experts"].values())
    assert {"ms", "roofline_ms", "of_roofline"} <= set(parts["mixtures"]["toy mixture"]["decode batch 2"])
    steps = parts["steps"]["toy"]
    assert {"ms", "roofline_ms", "of_roofline", "tokens_per_second", "host_ms"} <= set(
        steps["decode batch 2 context 48"]
    )
    assert steps["decode batch 2 context 8192"] == {"skipped": "K/V does not fit"}
    assert {"ms", "TFLOP_per_second", "of_matrix_rate"} <= set(steps["prefill 2 x 20"])
    sampling = steps["sampling, batch 2 context 16"]
    assert sampling["greedy_of_filtered"] == pytest.approx(sampling["greedy_ms"] / sampling["filtered_ms"])
    assert all(row["ttft_ms"] > 0 < row["tokens_per_second"] for row in parts["single"].values() if isinstance(row, dict))
    assert {"overlap=False", "overlap=True", "fused layers", "fused layers, launched early"} <= set(parts["single"])
    for engine in ("common", "transformers", "nano_vllm"):
        assert parts[engine]["output_tokens"] == parts["common"]["output_tokens"]
        assert parts[engine]["tokens_per_second"] > 0
    assert parts["overlap"]["common"]["output_tokens"] == parts["common"]["output_tokens"]
    assert all(parts["overlap"][f"overlap={ahead}"]["ms"] > 0 for ahead in (False, True))
    assert len(figures["aims"]) == 12 and all(aim["reached"] is None for aim in figures["aims"].values())


@pytest.mark.slow
def test_sweep_tries_other_launches_and_restores_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_bench("--dry-run", "--sweep", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = json.loads(out.read_text())["parts"]["sweep"]
    assert len(sweep["toy decode 1 x 40"]) == 5  # as it is, and 2 x 2 others
    assert any("'split': 16" in options for _, options in sweep["toy decode 1 x 40"])


@pytest.mark.slow
def test_a_failure_is_reported_and_the_others_still_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_bench("--dry-run", "--only", "common", "nano_vllm", "--nano-vllm", str(tmp_path), "--json", str(out))
    assert done.returncode == 1
    figures = json.loads(out.read_text())
    assert figures["failures"] == ["nano_vllm"] and "pass a checkout of nano-vLLM" in figures["parts"]["nano_vllm"]["error"]
    assert figures["parts"]["common"]["tokens_per_second"] > 0


def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = run_bench()
    assert done.returncode == 2 and "needs a CUDA or ROCm device and Triton" in done.stdout


def test_a_dry_run_leaves_the_results_alone() -> None:
    done = run_bench("--dry-run", "--json", str(KERNELS / "results" / "x.json"))
    assert done.returncode == 2 and not (KERNELS / "results" / "x.json").exists()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(KERNELS))
    import engines

    return engines


def test_the_common_trace_and_its_ideal(engines: Any) -> None:
    trace = engines.Trace.common()
    assert (trace.num_inputs, trace.num_outputs) == (142_827, 133_966)
    qwen = engines.Model(596_049_920 * 2, 2 * 28 * 8 * 128 * 2, 440_401_920, 155_582_464, 28 * 16 * 128)  # Qwen3-0.6B
    seconds = trace.ideal_seconds(qwen, 4.3e12, 640e12)  # an H200
    assert trace.num_outputs / seconds == pytest.approx(36_014, rel=0.01)


def test_bytes_of_a_mixtures_step(engines: Any) -> None:
    """Qwen3-30B-A3B in bfloat16: the GB of chapter 61, which counts attention, router, experts and head."""
    shape = engines.QWEN3_30B_A3B
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    weights = 2 * (engines.num_params(shape) + 48 * 128 * 2048 - 151936 * 2048)  # the table is looked up, not read
    model = engines.Model(weights, 98_304, 0, 0, 0, (experts, 128, 8))
    found = [model.decode_bytes(0, rows) / 1e9 for rows in (1, 8, 32, 64)]
    assert found == pytest.approx([6.1, 25.8, 53, 59.5], rel=0.02)


class FakeCuda:
    """The calls of torch.cuda that the clock makes, and the order in which they came."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def note(self, name: str, result: Any = None) -> Any:
        return lambda *args, **options: self.log.append(name) or result

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream.name} (")
        yield
        self.log.append(")")

    def graph(self, graph: Any, stream: Any, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        return self.stream(stream)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        side, stream = (SimpleNamespace(name=name, wait_stream=self.note("wait")) for name in ("side", "main"))
        event = SimpleNamespace(record=self.note("record"), synchronize=lambda: None, elapsed_time=lambda end: 6.0)
        fakes = {
            "Stream": lambda: side, "current_stream": lambda: stream, "stream": self.stream, "graph": self.graph,
            "CUDAGraph": lambda: SimpleNamespace(replay=self.note("replay")), "synchronize": self.note("sync"),
            "Event": lambda enable_timing: event, "mem_get_info": lambda device: (100, 200),
            "empty_cache": lambda: None,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_the_clock_warms_up_captures_and_times_replays(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    bench = engines.Bench(torch.device("cuda"), dry=False)
    assert bench.seconds([cuda.note("a"), cuda.note("b")], repeats=2) == 3e-3  # 6 ms for two calls
    timed = ["record", "replay", "record"]
    once = ["on side (", "a", "b", ")"]  # the stream that warms up also records
    assert cuda.log == ["wait", *once, *once, "replay", "sync", *timed, *timed]
    assert gc.isenabled() and bench.fits(89) and not bench.fits(91)
    assert [bench.copies(n) for n in (1, 2**28, 2**40)] == [128, 2, 1] and bench.dtype == torch.bfloat16


def test_an_error_becomes_a_line_and_the_aims_are_judged(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().install(monkeypatch)
    bench, results = engines.Bench(torch.device("cuda"), dry=False), dict[str, Any]()
    with bench.guarded("part", results):
        raise RuntimeError("two\nlines")
    assert results == {"error": "RuntimeError: two lines"} and bench.failures == ["part"]
    assert [bench.aim("x", value, 0.5) for value in (0.5, 0.4, None)] == [
        "aim 0.5: reached", "aim 0.5: MISSED", "aim 0.5: not measured"]  # fmt: skip
    assert bench.aim("y", 0.6, 0.5, 0.7) == "aim 0.5 (moonshot 0.7): reached" and bench.aims["y"]["moonshot"] == 0.7


def test_overlapping_kernels_count_once(engines: Any) -> None:
    assert engines.covered_length([(0, 2), (1, 3), (5, 6), (5.2, 5.5), (3, 3.5)]) == 4.5
    assert engines.covered_length([]) == 0
