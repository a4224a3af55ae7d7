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
from test_mtp import save_module

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


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"trace": True}, {"overlap": True},
                                     {"overlap": True, "enforce_eager": True}], ids=str)  # fmt: skip
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


@pytest.mark.parametrize("method", ["draft_model", pytest.param("mtp", marks=pytest.mark.large)])
@pytest.mark.slow
def test_drafters_go_to_their_targets_device(method: str, folder: Path, tmp_path: Path, gpus: Gpus) -> None:
    """A draft model's own passes and graphs, a head's, and the graphs that are recorded again for a head."""
    wanted: dict[str, Any] = {"method": method, "num_speculative_tokens": 1}
    if method == "draft_model":
        wanted["model"] = str(folder)
    if method == "mtp":
        save_module("GLM-4.5, dense", folder := tmp_path)
    with LLM(str(folder), device="cuda:1", speculative_config=wanted, **ROOM) as llm:  # type: ignore[arg-type]
        llm.generate(PROMPTS[:1], FEW, use_tqdm=False)
    found = gpus.take()
    assert found.keys() == {"kernel", "event", "capture", "replay"}
    assert [at for at in found.values() if at != {1}] == []


@pytest.mark.slow
def test_two_engines_of_one_process_keep_to_their_devices(folder: Path, gpus: Gpus) -> None:
    """They take turns, in one thread."""
    room: dict[str, Any] = ROOM | {"enforce_eager": True}
    with LLM(str(folder), device="cuda:0", **room) as first, LLM(str(folder), device="cuda:1", **room) as second:
        gpus.take()
        for at, llm in enumerate((first, second, first)):
            llm.generate(PROMPTS, FEW, use_tqdm=False)
            assert gpus.take() == {what: {at % 2} for what in ("kernel", "event")}


@pytest.mark.slow
def test_graphs_of_one_runner_share_a_stream_and_no_others_do(folder: Path, gpus: Gpus) -> None:
    """Those that measure memory, which are thrown away, and those of two runners on one device."""
    room, streams = ROOM | {"max_num_seqs": 2}, list[Any]()
    for at in (1, 1):
        runner = graph_runner(EngineArgs(str(folder), device=f"cuda:{at}", **room))
        measured, kept = gpus.captures[:2], gpus.captures[2:]  # each of sizes 1 and 2
        gpus.captures.clear()
        assert len(kept) == len(runner.graphs) == 2
        assert measured[0] is measured[1] and kept[0] is kept[1] is not measured[0]
        assert {stream.device.index for stream in (*measured, *kept)} == {at}
        streams += measured[:1] + kept[:1]
    assert len({id(stream) for stream in streams}) == 4 and not hasattr(gpus, "default")


def test_a_step_warms_up_on_the_stream_that_records_it(folder: Path, gpus: Gpus) -> None:
    """A library's handle belongs to a stream: one that is made during a recording would end it. Other threads may go on."""
    graph_runner(EngineArgs(str(folder), device="cuda:1", **ROOM))
    for stream in map(id, gpus.captures):
        whats = [what for what, _, _ in gpus.log]
        end = gpus.log.index(("capture", 1, stream))
        start = max(i for i in range(end) if whats[i] == "event")  # its upload
        last = whats.index("replay", end)
        assert {*whats[start + 1 : end]} == {"kernel"} and {at for _, _, at in gpus.log[start : last + 1]} == {stream}
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
