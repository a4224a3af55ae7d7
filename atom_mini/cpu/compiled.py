"""The options `compiled` and `packed`: where they apply (chapter 92)."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ..checkpoint import ModelSpec
from .int8_model import Int8Spec
from ..errors import install, require
from ..fields import EngineFields, is_on_cpu


def unfit(config: EngineFields) -> str | None:
    """Why the decode cannot be compiled, with Numba or without; None if it can."""
    spec = config.spec
    if (config.device or "cpu") != "cpu" or config.attention == "triton":
        return "it is for torch on a CPU: set device='cpu' and attention='torch'"
    if config.dtype == "float16":
        return "it supports float32 and bfloat16: set dtype to one of them"
    if type(spec) not in (ModelSpec, Int8Spec):
        return f"it does not support the layers of model_type={spec.model_type!r}"
    sizes = spec.hidden_size, spec.intermediate_size, spec.head_dim
    if any(size % 16 for size in sizes):
        return f"hidden, intermediate and head sizes {sizes} must be multiples of 16"
    if spec.vocab_size < 4:
        return f"a vocabulary of {spec.vocab_size} tokens must have at least 4"
    inputs = *sizes[:2], spec.num_attention_heads * spec.head_dim
    if type(spec) is Int8Spec and any(size % 32 for size in inputs):
        return f"in eight bits, the inputs {inputs} of layers must be multiples of 32"
    return None


def remedy() -> str | None:
    """What lets Numba compile here; None if it can. Does not import it."""
    if find_spec("numba") is None:
        return install("cpu")
    is_off = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
    return "unset NUMBA_DISABLE_JIT" if is_off else None


def why_not(config: EngineFields) -> str | None:
    """Why the decode cannot be compiled here; None if it can."""
    how = remedy()
    return unfit(config) if how is None else f"Numba cannot compile here: {how}"


def why_not_packed(config: EngineFields) -> str | None:
    """Why `packed` would change nothing here; None if it would."""
    import torch

    from atom_mini.cpu.products import lacks_products, uses_onednn

    numbers = torch.empty(0, dtype=getattr(torch, config.dtype or "float32"))
    if uses_onednn(numbers) or lacks_products(numbers):
        return None
    if config.dtype in (None, "float32"):
        return "this torch has no packed products of oneDNN"
    return f"nothing is packed in {config.dtype} on this CPU: set dtype='float32'"


def check_cpu(config: EngineFields) -> None:
    """ValueError if `compiled` or `packed` is True and cannot be."""
    which = "compiled=True" if config.compiled else "packed=True"
    reason = why_not(config) if config.compiled else why_not_packed(config)
    require(reason is None, f"{which} does not apply: {reason}; or leave it out")
    if not is_on_cpu(config):
        raise ValueError(f"{which} is for a CPU, and there is a GPU: set device='cpu', or leave it out")
