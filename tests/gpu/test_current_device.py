"""Whatever goes to CUDA's current device finds its runner's current, in whatever thread: on two GPUs that are a CPU."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_one_layer

pytest.importorskip("triton", reason="Triton is not installed")

from gpus import Gpus, OnCpu
from recording import graph_runner

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_runner

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs are made of a CPU")

ROOM = {"num_kvcache_blocks": 6, "max_num_seqs": 1, "max_model_len": 12, "kv_cache_block_size": 4, "dtype": "float32"}
ROOM |= {"max_num_batched_tokens": 4}  # a step as large is measured
FEW = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPTS = [[3, 4, 3], [7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_one_layer(tmp_path_factory.mktemp("small"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    gpus = Gpus()
    gpus.install(monkeypatch)
    with OnCpu():
        yield gpus


def in_thread(run: Any) -> None:
    """Run it in a thread of its own, whose current device is 0."""
    failed: list[BaseException] = []

    def whole() -> None:
        try:
            with OnCpu():
                run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=whole)
    thread.start()
    thread.join()
    assert not failed, failed


@pytest.mark.parametrize("options", [{"enforce_eager": True, "overlap": True}, {"trace": True}], ids=str)
@pytest.mark.slow
def test_all_of_an_engine_goes_to_its_device(options: dict[str, Any], folder: Path, gpus: Gpus) -> None:
    """While it loads, measures and records, and in each step, whoever runs it."""
    with LLM(str(folder), device="cuda:1", **ROOM | options) as llm:  # type: ignore[arg-type]
        made = gpus.take()
        llm.generate(PROMPTS, FEW, use_tqdm=False)
        steps = [gpus.take()]
        in_thread(lambda: llm.generate(PROMPTS, FEW, use_tqdm=False))
        steps.append(gpus.take())
    graphs = not options.get("enforce_eager")
    assert made.keys() == ({"kernel", "event", "capture", "replay"} if graphs else {"kernel", "event"})
    assert all(step.keys() == {"kernel", "event"} | ({"replay"} if graphs else set()) for step in steps)
    assert [at for found in (made, *steps) for at in found.values() if at != {1}] == []
    assert gpus.current == 0


@pytest.mark.slow
def test_graphs_are_recorded_on_a_stream_of_their_own(folder: Path, gpus: Gpus) -> None:
    """Those of a runner share it, those that measure memory have another one. A library's handle belongs to a stream: one
    that is made during a recording would end it, so a step warms up there. Other threads may go on."""
    runner = graph_runner(EngineArgs(str(folder), device="cuda:1", **ROOM | {"max_num_seqs": 2}))
    measured, kept = gpus.captures[:4], gpus.captures[4:]  # each of sizes 1 and 2, a step and sampling with masks
    assert len(runner.graphs) == len(runner.masked) == 2 and len(measured) == len(kept) == 4
    assert len({*map(id, measured)}) == len({*map(id, kept)}) == 1 and kept[0] is not measured[0]
    assert {stream.device.index for stream in gpus.captures} == {1} and not hasattr(gpus, "default")
    whats, last = [what for what, _, _ in gpus.log], 0
    for stream in map(id, gpus.captures):
        end = whats.index("capture", last)
        start = max(i for i in range(end) if whats[i] == "event")  # its upload
        last = whats.index("replay", end)
        assert {*whats[start + 1 : end]} == {"kernel"}
        assert {at for _, _, at in gpus.log[start : last + 1]} == {stream}
    assert gpus.waits == 2 * ["the stream of cuda:1"] and gpus.modes == {"thread_local"}


def test_a_device_without_a_number_is_the_makers(folder: Path, gpus: Gpus) -> None:
    """`cuda` is what is current where the engine is made, and stays it in a thread where another one is."""
    with gpus.device("cuda:1"):
        llm = LLM(str(folder), device="cuda", enforce_eager=True, **ROOM)  # type: ignore[arg-type]
    runner: Any = llm.engine_core.runner
    assert runner.device == torch.device("cuda:1") and gpus.take()["kernel"] == {1}
    in_thread(lambda: llm.generate(PROMPTS, FEW, use_tqdm=False))
    assert gpus.take() == {"kernel": {1}, "event": {1}}
    llm.close()


def test_a_failed_step_leaves_the_callers_device_current(folder: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(folder), device="cuda:1", enforce_eager=True, **ROOM) as llm:  # type: ignore[arg-type]

        def fail(*args: Any) -> None:
            assert gpus.current == 1
            raise MemoryError

        monkeypatch.setattr(llm.engine_core.runner, "sample", fail)
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS, FEW, use_tqdm=False)
        assert gpus.current == 0


@pytest.mark.slow
def test_a_dummy_step_goes_to_its_device(folder: Path, gpus: Gpus) -> None:
    """An engine in lockstep that has nothing to do steps along outside of a transaction."""
    from atom_mini.parallel.lockstep import LockstepProc, LockstepRunner

    config = EngineArgs(str(folder), device="cuda:1", **ROOM)
    runner = make_runner(config)
    ranks: Any = SimpleNamespace(agree=lambda *mine: [1, 0, 0, 0, 1], num_rows=0)
    loop = LockstepProc(EngineCore(config, LockstepRunner(runner, ranks)), None, None)
    gpus.take()
    loop.idle()
    assert gpus.take() == {"event": {1}, "replay": {1}, "kernel": {1}}
