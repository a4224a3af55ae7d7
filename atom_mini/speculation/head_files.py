"""Reads the heads of EAGLE-3 from files, and refuses those that do not fit (chapter 53)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import JsonObject, ModelSpec, read_dense, read_json, read_spec
from ..errors import require
from ..fields import EngineFields
from ..file_checks import Rules, check_fields, is_count, is_number
from ..loading import Readers, blank_model, checkpoint_files, load_model
from ..loading import load_weights, read_tensor, weight_targets
from ..models import Decoder, TorchOps
from ..rope import check_rope


@dataclass(frozen=True)
class HeadSpec(ModelSpec):
    """The spec of a head's one layer, with what only heads have."""

    draft_vocab_size: int = 0
    norm_before_residual: bool = False
    taps: tuple[int, ...] = ()  # layers of the target whose inputs it reads
    has_embedding: bool = False  # its own, not the target's


def are_layers(value: object) -> bool:
    """Whether `value` is a list of layers' numbers."""
    return type(value) is list and all(is_number(i, int) for i in value)


TAPS = "eagle_aux_hidden_state_layer_ids"
RULES: Rules = {
    "draft_vocab_size": (is_count, "a whole number from 1"),
    "norm_before_residual": (lambda v: type(v) is bool, "true or false"),
    "eagle_config": (lambda v: isinstance(v, dict), "an object"),
    "transformer_layer_config": (lambda v: isinstance(v, dict), "an object"),
    TAPS: (are_layers, "a list of layers' numbers"),
}


def find_taps(raw: JsonObject, num_layers: int) -> list[int]:
    """The target's layers whose *inputs* the head reads; `num_layers`: its norm."""
    nested = raw.get("eagle_config") or {}
    outputs = [i + 1 for i in nested.get(TAPS) or []]
    taps = raw.get(TAPS) or outputs or [2, num_layers // 2, num_layers - 3]
    if not all(0 <= i <= num_layers for i in taps):
        raise ValueError(
            f"the head reads the inputs of layers {taps}, the target has {num_layers} layers: "
            "set model to a head that was trained for it"
        )
    return taps


STYLES: dict[str, bool | None]  # name -> norm_before_residual; None: the config says it
STYLES = {"LlamaForCausalLMEagle3": False, "Eagle3LlamaForCausalLM": False}
STYLES |= {"Eagle3DraftModel": None, "Eagle3Speculator": None}  # speculators'
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")  # EAGLE-3.1's


def read_head_json(folder: Path) -> JsonObject:
    """The `config.json` of an EAGLE-3 head; ValueError if it is not supported."""
    file = folder / "config.json"
    require(file.is_file(), f"{folder} lacks config.json: set model to a head's folder")
    raw = read_json(file)
    check_fields(file, raw)
    check_fields(file, raw, RULES)
    name, *_ = raw.get("architectures") or ["no architecture"]
    if name not in STYLES:
        raise ValueError(f"{folder} holds {name}, which is not supported; these are: {', '.join(STYLES)}")
    is_stated = STYLES[name] is not None or "norm_before_residual" in raw
    require(is_stated, f"{file} does not say norm_before_residual: set it there")
    for key in UNSUPPORTED:
        require(not raw.get(key), f"{file} sets {key}: only false is supported")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} has no safetensors, and a pickle (pytorch_model.bin) is not read: convert it once with "
            "torch.load(file, weights_only=True), then safetensors.torch.save_file"
        )
    return raw


def read_head_spec(folder: Path, target: ModelSpec) -> HeadSpec:
    """The spec of a head; ValueError unless it fits the model of the spec `target`."""
    from transformers import AutoConfig

    raw, fits = read_head_json(folder), {"num_hidden_layers": 1}
    layer = {"model_type": "llama"} | (raw.get("transformer_layer_config") or raw)
    cfg = AutoConfig.for_model(**layer)
    read_dense(cfg)
    own = {
        "draft_vocab_size": raw.get("draft_vocab_size") or cfg.vocab_size,
        "norm_before_residual": raw.get("norm_before_residual", False),
        "taps": tuple(find_taps(raw, target.num_hidden_layers)),
        "has_embedding": "embed_tokens.weight" in checkpoint_files(folder),
    }
    spec = read_spec(cfg, HeadSpec, **own)
    check_rope(spec.rope)
    fits |= {name: getattr(target, name) for name in ("hidden_size", "vocab_size")}
    for name, right in fits.items():
        if (own_value := getattr(spec, name)) != right:
            raise ValueError(
                f"{folder}: {name} of the head is {own_value}, it must be {right}: "
                "set model to a head that was trained for this target"
            )
    return spec


def map_drafts(offsets: Tensor, spec: HeadSpec) -> Tensor:
    """The target's id for each of the head's ids, from the offsets `d2t`."""
    size, limit = spec.draft_vocab_size, spec.vocab_size
    ids = torch.arange(len(offsets)) + offsets.long()
    low, high = int(ids.min()), int(ids.max())
    if len(ids) != size or low < 0 or high >= limit:
        raise ValueError(
            f"d2t maps {len(ids)} tokens to {low}..{high}, it must map "
            f"draft_vocab_size={size} tokens to 0..{limit - 1}"
        )
    return ids


def load_head(folder: Path, spec: HeadSpec, target: Decoder, longest: int, ops: TorchOps) -> Any:
    """The head in `folder`, for `longest` positions; device and dtype are `target`'s."""
    like = target.norm.weight
    files = checkpoint_files(folder)
    head: Any = load_model(spec, folder, longest, like.device, like.dtype, ops)
    ops.prepare(head)
    offsets = read_tensor(files["d2t"], "d2t") if "d2t" in files else torch.zeros(spec.vocab_size, dtype=torch.int64)
    head.target_ids = map_drafts(offsets, spec).to(like.device)
    if not spec.has_embedding:
        head.embed_tokens = target.embed_tokens
    return head


def unsharded_ends(config: EngineFields, runner: Any) -> Any:
    """The target's model; with several ranks, only its embedding, norm, and output."""
    if config.tensor_parallel_size == 1:
        return runner.model
    spec = replace(config.spec, num_hidden_layers=0)
    ends = blank_model(spec, 1, runner.device, runner.dtype, runner.ops)
    places = weight_targets(ends)

    def ends_only(readers: Readers) -> Readers:
        return {n: r for n, r in ends.weight_readers(readers).items() if n in places}

    load_weights(ends, config.folder or Path(), ends_only)
    runner.ops.prepare(ends)
    return ends
