"""What a host could give away: the machine's memory, or less of it where a cgroup limits this process; and what a GPU's
memory plan measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from atom_mini import EngineArgs, model_runner
from atom_mini.config import SamplingParams
from atom_mini.memory import cgroup_free_bytes
from atom_mini.model_runner import made_up_batch
from atom_mini.models import FEW_ROWS, SOME_ROWS, multiply_on_cpu
from atom_mini.options.build import make_runner
from atom_mini.sequence import SequenceType

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


GROUPS: dict[str, tuple[str | None, dict[str, dict[str, object]], float | None]] = {
    "version 2, the tightest on the way up": (  # the page cache would be given back
        "0::/pod/box",
        {"pod/box": {"memory__max": "max", "memory__current": GIB},
         "pod": {"memory__max": 2 * GIB, "memory__current": GIB,
                 "memory__stat": f"anon 5\ninactive_file {GIB // 2}"}},
        1.5 * GIB,
    ),
    "version 1": (
        "5:cpu:/\n4:memory:/box",
        {"memory/box": {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": GIB}},
        2 * GIB,
    ),
    "in a namespace, over its limit": (
        "0::/elsewhere", {"": {"memory__max": 2 * GIB, "memory__current": 3 * GIB}}, 0,
    ),
    "no limit": (None, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_memory_within_a_control_group(name: str, tmp_path: Path) -> None:
    membership, groups, free = GROUPS[name]
    if membership is not None:
        (tmp_path / "membership").write_text(f"{membership}\n")
    for folder, files in groups.items():
        write(tmp_path / folder, **files)
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == free


# ---- the steps behind a GPU's memory plan, run on a CPU ----


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that torch holds at once beyond what it held before, temporary buffers of an operation included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_measured_steps_hold_what_any_sampling_needs(dtype: str) -> None:
    """The largest prefill is small here, so that all of it is sampling: at least the worst of all options, not much more."""
    rows = 100
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": 64, "max_model_len": 64}
    runner = make_runner(EngineArgs("tiny", device="cpu", dtype=dtype, num_kvcache_blocks=8, **limits))
    batch = made_up_batch(SequenceType.DECODE, 1, np.zeros((rows, 1), np.int32))
    filters = {"top_k": 20, "top_p": 0.95, "min_p": 0.1}
    samplings = [{}, *({name: value} for name, value in filters.items()), filters, {"temperature": 0.0}]

    def sample(sampling: dict[str, Any]) -> None:
        params = SamplingParams(**{"temperature": 1.0} | sampling)
        logits = torch.zeros(rows, runner.config.spec.vocab_size, dtype=runner.dtype)
        runner.sample(replace(batch, sampling_params=[params] * rows), logits)

    worst = max(peak_bytes(partial(sample, sampling)) for sampling in samplings)
    assert worst > 20 * rows * runner.config.spec.vocab_size
    assert worst <= peak_bytes(runner._run_largest_steps) <= 1.1 * worst


def test_a_gpus_pool_gets_what_the_measured_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is made up: of 1,000 GiB 900 are ours, others hold 7, and the steps had a peak of 50 beside their pool."""
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=8))
    runner.device = torch.device("cuda")
    peak = [0]

    def allocate(count: int) -> None:
        runner.kv_cache = torch.empty(count, GIB, device="meta")

    def run() -> None:
        peak[0] = max(peak[0], runner.kv_cache.nbytes + 50 * GIB)

    fakes: dict[str, Any] = {
        "reset_peak_memory_stats": lambda _: peak.__setitem__(0, runner.kv_cache.nbytes),
        "max_memory_allocated": lambda _: peak[0], "memory_reserved": lambda _: 3 * GIB,
        "mem_get_info": lambda _: (990 * GIB, 1000 * GIB),
        "synchronize": lambda _: None, "empty_cache": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(runner, "_set_kv_cache", allocate)
    monkeypatch.setattr(runner, "_run_largest_steps", run)
    assert runner._free_bytes() == (900 - 7 - 50) * GIB and not len(runner.kv_cache)


@pytest.mark.parametrize(("tokens", "longest"), [(64, 64), (64, 32), (64, 24), (64, 2048), (100, 99)])
def test_the_largest_prefill_has_all_tokens_of_a_step(tokens: int, longest: int) -> None:
    """Also where the longest sequence does not divide them, and none is longer."""
    limits = {"max_num_batched_tokens": tokens, "max_model_len": longest}
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=8, **limits))
    batch = runner._largest_batch()
    assert batch.total_tokens_num == tokens == batch.num_scheduled_tokens.sum()
    assert batch.num_scheduled_tokens.max() == min(tokens, longest) and batch.num_scheduled_tokens.min() > 0
    assert runner.run_model(*runner.prepare_model(batch)).shape[0] == -(-tokens // longest)


def test_a_small_step_runs_on_one_thread_and_then_the_callers_count_is_back() -> None:
    """Also after Ctrl-C; a large step keeps all threads, and so does a runner on a GPU."""
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=8))
    few = model_runner.SMALL_STEP // runner.num_weights
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt), runner.threads_for(few):
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2
        with runner.threads_for(few + 1):
            assert torch.get_num_threads() == 2
        runner.device = torch.device("cuda")
        with runner.threads_for(1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("is_intel", [False, True])
@pytest.mark.parametrize(
    ("count", "has_bias"),
    [(0, True), (1, False), (1, True), (FEW_ROWS, True), (FEW_ROWS + 1, True), (SOME_ROWS, False),
     (SOME_ROWS + 1, True)],
)  # fmt: skip
def test_products_on_a_cpu(count: int, has_bias: bool, is_intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the product in float64, for rows that are not contiguous, too; and contiguous, as a collective needs it."""
    monkeypatch.setattr("atom_mini.models.is_intel", lambda: is_intel)
    x, weight = torch.randn(count, 96)[:, ::2], torch.randn(40, 48)
    bias = torch.randn(40) if has_bias else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = multiply_on_cpu(x, weight, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)


