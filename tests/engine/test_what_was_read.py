"""What was read is what runs: a default engine for Part I's models holds Part I's classes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, save_checkpoint

from atom_mini import LLM
from atom_mini.checkpoint import ModelSpec
from atom_mini.models import MLP, CausalLM, RotaryEmbedding, SelfAttention

KINDS = ["qwen3", "qwen2", "llama"]
# The CPU's decode attention, chapter 93; the `LLM` that knows the options of all parts.
OTHERS = {"atom_mini.cpu_decode", "atom_mini.refinements.parts"}
COMPILED = "atom_mini.refinements.compiled_step"  # where Numba is installed: chapter 93


def classes_of(llm: Any) -> set[type]:
    """Of everything that takes part in a step."""
    core = llm.engine_core
    runner = core.runner
    spec = llm.config.spec
    rooms = [llm, core, core.scheduler, core.scheduler.block_manager, runner, runner.ops, runner.sampler, spec]
    return {type(x) for x in [*rooms, *runner.model.modules()]}


@pytest.mark.parametrize("compiled", [False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_default_engine_holds_part_ones_classes(
    kind: str, compiled: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the CPU's decodes, which `compiled=False` leaves to torch."""
    save_checkpoint(kind, tmp_path, num_hidden_layers=2)
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8, compiled=compiled) as llm:
        model: Any = llm.engine_core.runner.model  # type: ignore[attr-defined]
        assert type(llm.config.spec) is ModelSpec and type(model) is CausalLM
        assert {type(layer.self_attn) for layer in model.model.layers} == {SelfAttention}
        assert {type(layer.mlp) for layer in model.model.layers} == {MLP}
        assert type(model.model.rotary) is RotaryEmbedding
        found = classes_of(llm)
        ours = {c for c in found if c.__module__.startswith("atom_mini")}
        foreign = {c.__module__ for c in ours if c.__module__.count(".") > 1}
        is_compiled = compiled is None and find_spec("numba") is not None
        assert foreign <= OTHERS | ({COMPILED} if is_compiled else set()), foreign
        assert (COMPILED in foreign) is is_compiled
        assert {c.__module__.split(".")[0] for c in found} <= {"atom_mini", "torch"}
        for c in ours:  # none was put together while it ran: each is what its module names so
            module = __import__(c.__module__, fromlist=[c.__name__])
            assert getattr(module, c.__name__) is c, c
        attends = {m.attend.__func__.__module__ for m in model.modules() if hasattr(m, "attend")}
        assert attends <= OTHERS | {"atom_mini.models"} | ({COMPILED} if is_compiled else set()), attends


def test_a_config_without_rope_parameters(tmp_path: Path) -> None:
    """Transformers' own default for this kind of model is read, in whatever layout; none at all is refused."""
    from types import SimpleNamespace

    from atom_mini import EngineArgs
    from atom_mini.checkpoint import read_rope

    save_checkpoint("llama", tmp_path, num_hidden_layers=1)
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=1234.0)
    assert EngineArgs(str(tmp_path)).spec.rope["rope_theta"] == 1234.0
    cfg = SimpleNamespace(max_position_embeddings=64)
    with pytest.raises(ValueError, match="neither rope_parameters nor rope_theta"):
        read_rope(cfg)
    cfg.rope_theta, cfg.rope_scaling = 5e5, {"type": "linear", "factor": 2.0}
    assert read_rope(cfg)["rope_type"] == "linear" and read_rope(cfg)["rope_theta"] == 5e5
