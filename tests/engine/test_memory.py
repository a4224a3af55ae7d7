"""What a host could give away: the machine's memory, or less of it where a cgroup limits this process; and what a GPU's
memory plan measures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
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
from atom_mini.models import FEW_ROWS, SOME_ROWS, is_intel, multiply_on_cpu
from atom_mini.options.build import make_runner
from atom_mini.sequence import SequenceType

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/pod/box\n")
    write(tmp_path / "pod/box", memory__max="max", memory__current=1 * GIB, memory__stat="anon 5\ninactive_file 0")
    write(tmp_path / "pod", memory__max=2 * GIB, memory__current=1 * GIB, memory__stat=f"inactive_file {GIB // 2}")
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 1.5 * GIB  # the page cache would be given back


def test_version_1_has_other_names(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu:/\n4:memory:/box\n")
    files = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 1 * GIB}
    write(tmp_path / "memory/box", **files, memory__stat="total_inactive_file 0")
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 2 * GIB


@pytest.mark.parametrize("membership", ["0::/elsewhere\n", "", None])
def test_a_container_sees_its_own_group_as_the_root(membership: str | None, tmp_path: Path) -> None:
    """In a namespace of its own, the path may not exist; the files at the top are the container's."""
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    write(tmp_path, memory__max=2 * GIB, memory__current=3 * GIB)
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 0  # over its limit: nothing, not less


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") is None


def test_a_refused_pool_names_the_memory_that_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_kvcache_blocks` may take all that the host has free, not only the share that a pool takes by itself."""
    monkeypatch.setattr(model_runner, "free_host_bytes", lambda: 2**20)  # 16 blocks
    make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=16))
    with pytest.raises(ValueError, match=r"^1048576 bytes are free .* 17 block"):
        make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=17))


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


def test_the_measured_step_holds_all_partial_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as any step may write, which the kernel allocates, whatever the prefill itself needs."""
    pytest.importorskip("triton", reason="Triton is not installed")
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_model_len": 700}
    runner = make_runner(EngineArgs("tiny", device="cpu", attention="triton", num_kvcache_blocks=8, **limits))
    found = list[Any]()
    monkeypatch.setattr(runner, "run_model", lambda ids, positions, meta, last: found.append(meta.plan))
    runner._run_largest_steps()
    assert [plan.num_partials for plan in found] == [runner.ops.most_partials(20, 4, 700)] == [60]  # type: ignore[attr-defined]


def test_a_gpus_pool_gets_what_the_measured_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is made up: of 1,000 GiB 900 are ours, others hold 7, and the steps had a peak of 50."""
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=8))
    runner.device = torch.device("cuda")
    peak = [0]
    fakes: dict[str, Any] = {
        "reset_peak_memory_stats": lambda _: peak.__setitem__(0, 0), "max_memory_allocated": lambda _: peak[0],
        "memory_reserved": lambda _: 3 * GIB, "mem_get_info": lambda _: (990 * GIB, 1000 * GIB),
        "synchronize": lambda _: None, "empty_cache": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(runner, "_set_kv_cache", lambda count: None)
    monkeypatch.setattr(runner, "_run_largest_steps", lambda: peak.__setitem__(0, 50 * GIB))
    assert runner._free_bytes() == (900 - 7 - 50) * GIB


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_small_step_runs_on_one_thread_and_then_the_callers_count_is_back(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after Ctrl-C; a large step keeps all threads, and so does a runner on a GPU."""
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=8, max_model_len=64))
    monkeypatch.setattr(model_runner, "SMALL_STEP", 20 * runner.num_weights)
    seen: list[int] = []

    def model(ids: Any, positions: Any) -> Any:
        seen.append(torch.get_num_threads())
        if error is not None:
            raise error
        return torch.zeros(len(ids), runner.config.spec.hidden_size)

    monkeypatch.setattr(runner, "model", SimpleNamespace(compute_logits=lambda x: x), raising=False)
    monkeypatch.setattr(runner, "compute_hidden", lambda ids, positions, meta: model(ids, positions))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for length in (19, 20):
            batch = made_up_batch(SequenceType.PREFILL, length, np.arange(2, dtype=np.int32)[None])
            with pytest.raises(error) if error else nullcontext():
                runner.run_model(*runner.prepare_model(batch))
            assert torch.get_num_threads() == 2
        runner.device = torch.device("cuda")
        with runner.threads_for(1):
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 2]


@pytest.mark.parametrize("is_intel", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1, 8, 9, SOME_ROWS - 1, SOME_ROWS, SOME_ROWS + 1, 200])
def test_products_on_a_cpu(count: int, has_bias: bool, is_intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the product in float64, for rows that are not contiguous, too; and contiguous, as a collective needs it."""
    monkeypatch.setattr("atom_mini.models.is_intel", lambda: is_intel)
    x, weight = torch.randn(count, 96)[:, ::2], torch.randn(40, 48)
    bias = torch.randn(40) if has_bias else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = multiply_on_cpu(x, weight, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", range(FEW_ROWS + 2))
def test_few_rows_are_a_plain_product_on_intels_cpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere, and from five rows on, they are not."""
    seen, linear = list[bool](), F.linear

    def note(x: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(not x.is_mkldnn)
        return linear(x, *others)

    monkeypatch.setattr(F, "linear", note)
    for intel in (True, False):
        monkeypatch.setattr("atom_mini.models.is_intel", lambda intel=intel: intel)
        seen.clear()
        multiply_on_cpu(torch.randn(count, 48), torch.randn(40, 48))
        assert (True in seen) == (intel and count <= FEW_ROWS)


def test_a_cpu_has_one_maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As /proc/cpuinfo says; elsewhere, as Python's platform does."""
    named = tmp_path / "cpuinfo"
    monkeypatch.setattr("atom_mini.models.Path", lambda place: named)
    monkeypatch.setattr("platform.processor", lambda: "Intel64 Family 6 Model 85, GenuineIntel")
    assert is_intel.__wrapped__()
    named.write_text("vendor_id\t: AuthenticAMD\n")
    assert not is_intel.__wrapped__()
    named.write_text("vendor_id\t: GenuineIntel\n")
    assert is_intel.__wrapped__()


def test_onednn_sees_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps machine code for each."""
    seen, linear = set[int](), F.linear

    def note(x: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.update([len(x)] if x.is_mkldnn else [])
        return linear(x, *others)

    monkeypatch.setattr(F, "linear", note)
    for count in range(300):
        multiply_on_cpu(torch.randn(count, 48), torch.randn(40, 48))
    assert 0 < len(seen) <= 8 and all(count % 8 == 0 for count in seen)
