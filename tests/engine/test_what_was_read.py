"""What was read is what runs: a default engine for Part I's models holds Part I's classes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint

from atom_mini import LLM, EngineArgs
from atom_mini.checkpoint import ModelSpec
from atom_mini.gpu.graphs import GraphRunner
from atom_mini.model_runner import ModelRunner
from atom_mini.models import MLP, CausalLM, RotaryEmbedding, SelfAttention
from atom_mini.options.build import make_core

H100 = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="NVIDIA H100")
KINDS = ["qwen3", "qwen2", "llama"]


def classes_of(core: Any) -> set[type]:
    """Of everything that takes part in a step."""
    runner = core.runner
    parts = [core, core.scheduler, core.scheduler.block_manager, runner, runner.ops, runner.sampler, core.config.spec]
    return {type(x) for x in [*parts, *runner.model.modules()]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_engine_holds_part_ones_classes(kind: str, tmp_path: Path) -> None:
    save_checkpoint(kind, tmp_path, num_hidden_layers=2)
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8) as llm:
        core: Any = llm.engine_core
        assert repr(core) == "EngineCore(Scheduler, ModelRunner(TorchOps, Sampler))"
        model = core.runner.model
        assert type(llm.config.spec) is ModelSpec and type(model) is CausalLM
        assert {type(layer.self_attn) for layer in model.model.layers} == {SelfAttention}
        assert {type(layer.mlp) for layer in model.model.layers} == {MLP}
        assert type(model.model.rotary) is RotaryEmbedding
        found = classes_of(core)
        assert {c.__module__.split(".")[0] for c in found} <= {"atom_mini", "torch"}
        for c in found:  # none is of a later part, and none was put together while it ran: each is what its module names so
            if c.__module__.startswith("atom_mini"):
                assert c.__module__.count(".") == 1, c
                assert getattr(import_module(c.__module__), c.__name__) is c, c
        attends = {m.attend.__func__.__module__ for m in model.modules() if hasattr(m, "attend")}
        assert attends == {"atom_mini.models"}


def test_a_default_engine_loads_nothing_that_compiles() -> None:
    """In a process of its own: no Numba, no Triton."""
    code = """
import sys
from atom_mini import LLM
LLM("tiny", device="cpu", num_kvcache_blocks=50).generate("12 + 7 =", use_tqdm=False)
print({"numba", "triton"} & {*sys.modules})
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("options", "classes"),
    [({}, "GraphRunner(TritonOps, KernelSampler)"),
     ({"enforce_eager": True}, "ModelRunner(TritonOps, KernelSampler)"),
     ({"attention": "torch"}, "ModelRunner(TorchOps, Sampler)")],
)  # fmt: skip
def test_a_default_engine_on_a_gpu(
    options: dict[str, Any], classes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faked one: it chooses the classes, and loads nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ModelRunner, "on_device", lambda self: nullcontext())
    monkeypatch.setattr(ModelRunner, "_load", lambda self: setattr(self, "num_kvcache_blocks", 8))
    monkeypatch.setattr(GraphRunner, "_capture", lambda self, sizes: None)
    core = make_core(EngineArgs("tiny", num_kvcache_blocks=8, **options))
    assert repr(core) == f"EngineCore(Scheduler, {classes})"
