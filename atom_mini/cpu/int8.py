"""The option `quantization`: dense models on a CPU in eight bits (chapter 92b)."""

from __future__ import annotations

from dataclasses import fields

from ..checkpoint import ModelSpec
from .int8_model import Int8Spec
from ..errors import require
from ..fields import EngineFields, is_on_cpu

DENSE = "llama", "qwen2", "qwen3"  # model types whose layers have eight bits, too
LONGEST = 2**31 // 127**2 - 1  # products in a sum of 32 bits, with codes of eight bits


def int8_spec(spec: ModelSpec) -> Int8Spec:
    """`spec` with weights in eight bits. ValueError if it has other layers, or is stored in fewer bits already."""
    storage = getattr(spec, "storage", None)
    is_ours = type(spec).__module__.startswith("atom_mini.")  # not a user's
    is_plain = type(spec) is ModelSpec or (spec.model_type in DENSE and is_ours)
    if not is_plain:
        raise ValueError(
            f"quantization='int8' does not support the layers of {spec.model_type!r}, "
            "only those of Qwen3, Qwen2, and Llama: leave it out"
        )
    require(not any(getattr(spec, "windows", ())), "quantization='int8' has no sliding windows: leave it out")
    method = getattr(storage, "method", "int8")
    if method != "int8":
        raise ValueError(
            f"quantization='int8' does not go with weights stored in {method}: "
            "leave it out, or take a checkpoint in 16 bits"
        )
    longest = max(spec.intermediate_size, spec.num_attention_heads * spec.head_dim)
    if longest > LONGEST:
        raise ValueError(f"quantization='int8' adds up to {LONGEST} products, not {longest}: leave it out")
    return Int8Spec(**{f.name: getattr(spec, f.name) for f in fields(ModelSpec)})


def check_int8(config: EngineFields) -> Int8Spec:
    """The spec in eight bits. ValueError where it cannot run."""
    if not is_on_cpu(config):
        device = config.device
        raise ValueError(f"quantization='int8' is for a CPU, not for {device=}: set device='cpu', or leave it out")
    return int8_spec(config.spec)
