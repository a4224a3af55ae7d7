"""The spec of a model of these families, read from its config (chapter 60)."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..checkpoint import Fields, JsonObject, ModelRegistry, ModelSpec, check_supported
from ..checkpoint import read_rope, read_spec
from ..errors import require
from ..file_checks import is_count

if TYPE_CHECKING:  # transformers loads when a config is read
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Routing:
    """How a token picks its experts.

    `scoring`: "softmax" over all experts, "sigmoid" of each, or the softmax over the
    "chosen" ones. Groups: DeepSeek-V2 (arXiv 2405.04434), -V3 (arXiv 2412.19437).
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False  # divide the weights of a token's experts by their sum
    scale: float = 1.0  # a factor on the weights
    is_corrected: bool = False  # a bias per expert is added before choosing
    groups: int = 1
    top_groups: int = 1  # experts of other groups cannot be chosen
    group_best: int = 1  # a group's score is the sum of this many best scores


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: how many there are, and what each is."""

    count: int
    width: int  # intermediate size of an expert
    shared: int = 0  # intermediate size of the shared expert; 0: none
    is_gated: bool = False  # the shared expert is multiplied by a sigmoid
    is_biased: bool = False
    limit: float = 0.0  # of gpt-oss's activation; 0: silu(gate) * up
    is_interleaved: bool = False  # the file alternates rows of gate and up


@dataclass(frozen=True)
class Storage:
    """How the weights of a quantized checkpoint are stored."""

    method: str  # "mxfp4", "fp8", or "int8"
    block: tuple[int, ...] = ()  # fp8: the weights [rows, columns] that share a scale


@dataclass(frozen=True)
class FamilySpec(ModelSpec):
    """A `ModelSpec` with the fields of Part VI. A tuple has one entry per layer."""

    experts: Experts | None = None
    routing: Routing | None = None
    sparse: tuple[bool, ...] = ()  # the layer has experts
    rotates: tuple[bool, ...] = ()  # the layer rotates its heads by their positions
    windows: tuple[int, ...] = ()  # number of keys that a query sees; 0: all
    has_whole_norm: bool = False  # one norm over all heads of q, and one of k
    has_sinks: bool = False
    mtp_layers: int = 0  # layers after the last one, for drafting
    storage: Storage | None = None  # None: the file has plain weights

    @property
    def rotated_dim(self) -> int:
        """How many numbers of a head are rotated."""
        return int(self.head_dim * self.rope["partial_rotary_factor"])


@dataclass(frozen=True)
class LatentSpec(FamilySpec):
    """A model that caches one latent row for all heads; sizes in the config's names."""

    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a layer caches per token: one row of latent and rotated part."""
        return 1, 1, self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class StateSpec(FamilySpec):
    """A model in which most layers keep a state; sizes in the config's names."""

    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    mtp_num_hidden_layers: int = 0
    has_vision: bool = False  # the file contains an image encoder

    @property
    def kv_layers(self) -> int:
        """The number of layers that cache keys and values."""
        return self.layer_types.count("full_attention")


def get(cfg: PretrainedConfig, name: str, default: object) -> Any:
    """An option of a config, or `default` if it is missing, None, or 0."""
    return getattr(cfg, name, None) or default


def is_sparse(cfg: PretrainedConfig, layer: int) -> bool:
    """Whether this layer of a mixture has experts."""
    if kinds := get(cfg, "mlp_layer_types", None):
        return bool(kinds[layer] == "sparse")
    is_first = layer < get(cfg, "first_k_dense_replace", 0)
    is_between = (layer + 1) % get(cfg, "decoder_sparse_step", 1) != 0
    is_named = layer in get(cfg, "mlp_only_layers", ())
    return not (is_first or is_between or is_named)


def read_mixture(cfg: PretrainedConfig, count: int, rule: Fields | None = None, **own: Any) -> Fields:
    """The fields `experts`, `routing`, and `sparse` of a config with `count` experts.

    No fields if `count` is 0. `rule`: fields of `Routing`; `own`: of `Experts`.
    """
    if not count:
        return {}
    top_k = get(cfg, "num_experts_per_tok", 0)
    usual = {"renormalize": get(cfg, "norm_topk_prob", False)}
    routing = Routing(top_k, **usual | (rule or {}))
    width = get(cfg, "moe_intermediate_size", 0) or cfg.intermediate_size
    sparse = tuple(is_sparse(cfg, i) for i in range(cfg.num_hidden_layers))
    if any(sparse):
        check_routing(routing, count)
    return {"experts": Experts(count, width, **own), "routing": routing, "sparse": sparse}


def check_routing(r: Routing, count: int) -> None:
    """ValueError if a token cannot pick `top_k` of `count` experts."""
    size, rest = divmod(count, r.groups)
    is_whole = r.groups == 1 or (not rest and size >= r.group_best)
    most = min(r.top_groups, r.groups) * size if is_whole else 0
    if not 0 < r.top_k <= most:
        raise ValueError(
            f"num_experts_per_tok={r.top_k}, n_group={r.groups}, topk_group={r.top_groups} "
            f"do not fit {count} experts; a token can pick from 1 to {most}"
        )


def check_only(cfg: PretrainedConfig, name: str, only: object) -> None:
    """ValueError if an option is given with another value than `only`."""
    value = getattr(cfg, name, only)
    require(value == only, f"{name}={value} is not supported; use {name}={only}")


def read_plain(cfg: PretrainedConfig) -> Fields:
    """Nothing: such a family has at most windows and quantized files."""
    return {}


def read_smollm3(cfg: PretrainedConfig) -> Fields:
    """Every fourth layer does not rotate."""
    return {"rotates": tuple(map(bool, get(cfg, "no_rope_layers", [1] * cfg.num_hidden_layers)))}


def read_mixtral(cfg: PretrainedConfig) -> Fields:
    """A mixture whose weights always sum to 1."""
    return read_mixture(cfg, cfg.num_local_experts, {"renormalize": True})


def read_olmoe(cfg: PretrainedConfig) -> Fields:
    """A mixture, and one norm over all heads."""
    check_only(cfg, "clip_qkv", None)
    return {"has_whole_norm": True} | read_mixture(cfg, cfg.num_experts)


def read_gated(cfg: PretrainedConfig, count: int, rule: Fields | None = None) -> Fields:
    """A mixture whose shared expert is multiplied by a sigmoid."""
    shared = get(cfg, "shared_expert_intermediate_size", 0)
    return read_mixture(cfg, count, rule, shared=shared, is_gated=shared > 0)


def read_qwen2_moe(cfg: PretrainedConfig) -> Fields:
    """A mixture with a gated shared expert, and biases in q, k, and v."""
    bias = get(cfg, "attention_bias", False) or get(cfg, "qkv_bias", False)
    return {"qkv_bias": bias} | read_gated(cfg, cfg.num_experts)


def read_qwen3_moe(cfg: PretrainedConfig) -> Fields:
    """A mixture, and a norm for each head."""
    return {"has_qk_norm": True} | read_mixture(cfg, cfg.num_experts)


EVEN = {"scoring": "sigmoid", "is_corrected": True, "group_best": 2}


def read_groups(cfg: PretrainedConfig, rule: Fields) -> Fields:
    """A mixture as DeepSeek builds it: groups of experts, a scale, shared experts."""
    names = {"scale": "routed_scaling_factor", "groups": "n_group", "top_groups": "topk_group"}
    found = {field: get(cfg, name, 1) for field, name in names.items()}
    shared = get(cfg, "n_shared_experts", 0) * get(cfg, "moe_intermediate_size", 0)
    count = get(cfg, "n_routed_experts", 0)
    return read_mixture(cfg, count, found | rule, shared=shared)


def read_glm4_moe(cfg: PretrainedConfig) -> Fields:
    """DeepSeek's mixture; norms of heads, and a bias of q, k, and v, are options."""
    return {"out_bias": False, "has_qk_norm": get(cfg, "use_qk_norm", False)} | read_groups(cfg, EVEN)


def read_gpt_oss(cfg: PretrainedConfig) -> Fields:
    """A mixture with biases and a clamped activation, and sinks."""
    check_only(cfg, "swiglu_alpha", 1.702)
    limit = get(cfg, "swiglu_limit", 7.0)
    own = {"is_biased": True, "limit": limit, "is_interleaved": True}
    rule = {"scoring": "chosen"}
    return {"has_sinks": True} | read_mixture(cfg, cfg.num_local_experts, rule, **own)


def read_latent(cfg: PretrainedConfig, rule: Fields = EVEN) -> Fields:
    """DeepSeek-V3's mixture, with latent attention."""
    if cfg.attention_bias and not cfg.q_lora_rank:
        raise ValueError("attention_bias=True needs q_lora_rank: without it, q_proj has no bias")
    return read_groups(cfg, rule)


def read_deepseek_v2(cfg: PretrainedConfig) -> Fields:
    """DeepSeek-V2's mixture, with latent attention."""
    method = get(cfg, "topk_method", None)
    known = ("greedy", "group_limited_greedy")
    if method not in known:
        raise ValueError(f"topk_method={method!r} is not supported; use one of {known}")
    return read_latent(cfg, {"renormalize": False} | ({"groups": 1} if method == "greedy" else {}))


def read_state(cfg: PretrainedConfig) -> Fields:
    """Layers with a state, and perhaps Qwen2-MoE's mixture, renormalized."""
    check_only(cfg, "attn_output_gate", True)
    keys, values = cfg.linear_num_key_heads, cfg.linear_num_value_heads
    if values % keys:
        raise ValueError(f"{values} value heads cannot share {keys} key heads evenly")
    count, rule = get(cfg, "num_experts", 0), {"renormalize": True}
    return {"has_qk_norm": True} | read_gated(cfg, count, rule)


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True)
class Family:
    """How the configs of one model type are read."""

    name: str  # of its architectures, before "ForCausalLM"
    read: Callable[[PretrainedConfig], Fields] = read_plain  # the fields that it sets
    spec: type[FamilySpec] = FamilySpec
    layers: tuple[str, ...] = (FULL, SLIDING)  # the kinds of layers that we compute
    is_partial: bool = False  # a part of each head may be rotated


FAMILIES = {
    "llama": Family("Llama", layers=(FULL,)),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral"),
    "smollm3": Family("SmolLM3", read_smollm3),
    "mixtral": Family("Mixtral", read_mixtral),
    "olmoe": Family("Olmoe", read_olmoe),
    "qwen2_moe": Family("Qwen2Moe", read_qwen2_moe),
    "qwen3_moe": Family("Qwen3Moe", read_qwen3_moe),
    "glm4_moe": Family("Glm4Moe", read_glm4_moe, is_partial=True),
    "gpt_oss": Family("GptOss", read_gpt_oss),
    "deepseek_v2": Family("DeepseekV2", read_deepseek_v2, LatentSpec, (FULL,)),
    "deepseek_v3": Family("DeepseekV3", read_latent, LatentSpec, (FULL,)),
    "glm4_moe_lite": Family("Glm4MoeLite", read_latent, LatentSpec, (FULL,)),
}
HYBRID = read_state, StateSpec, (FULL, LINEAR), True
FAMILIES |= {"qwen3_5_text": Family("Qwen3_5", *HYBRID), "qwen3_5_moe_text": Family("Qwen3_5Moe", *HYBRID)}


def read_windows(cfg: PretrainedConfig, layers: tuple[str, ...] = (SLIDING,)) -> tuple[int, ...]:
    """For each layer, the number of keys that a query sees; 0: all. `layers`: the
    kinds that the model may have. ValueError if layers slide and no window is given."""
    size = getattr(cfg, "sliding_window", 0) if SLIDING in layers else 0
    types = getattr(cfg, "layer_types", None)
    if not types:
        return (size or 0,) * cfg.num_hidden_layers
    slides = [kind == SLIDING for kind in types]
    if any(slides) and not size:
        raise ValueError(f"sliding_window={size}, but layers slide; give the number of keys")
    return tuple(size if one else 0 for one in slides)


def is_int8(group: object) -> bool:
    """Whether a group of compressed-tensors stores int8 with a scale per row of each
    weight, for activations in int8 with a scale per token, and for exact outputs."""
    codes = {"num_bits": 8, "type": "int", "symmetric": True}
    rules = {"weights": codes | {"strategy": "channel"}}
    rules["input_activations"] = codes | {"strategy": "token", "dynamic": True}
    if not isinstance(group, dict) or group.get("output_activations"):
        return False
    pairs = [(group.get(name), rule.items()) for name, rule in rules.items()]
    is_known = all(isinstance(own, dict) and rule <= own.items() for own, rule in pairs)
    return is_known and group.get("format") in (None, "int-quantized")


def read_compressed(how: JsonObject) -> str:
    """The method of compressed-tensors: "int8", or words for what we do not read."""
    method, groups = how.get("format"), how.get("config_groups")
    each = [*groups.values()] if isinstance(groups, dict) else []
    more = [name for name in ("transform_config", "kv_cache_scheme") if how.get(name)]
    if method == "int-quantized" and each and not more and all(map(is_int8, each)):
        return "int8"
    return ", ".join([f"compressed-tensors, format={method}", *more])


def read_storage(cfg: PretrainedConfig) -> Storage | None:
    """How a config says that its weights are stored; None: plainly. Opens no file.
    ValueError for a method that we do not read (chapter 63)."""
    if (how := getattr(cfg, "quantization_config", None)) is None:
        return None
    keys = ("quant_method", "weight_block_size", "activation_scheme")
    method, size, scheme = (how.get(key) for key in keys)
    is_pair = isinstance(size, list | tuple) and [*map(is_count, size)] == [True, True]
    if method == "fp8" and (not is_pair or scheme != "dynamic"):
        method = f"fp8, weight_block_size={size}, activation_scheme={scheme}"
    if method == "compressed-tensors":
        method = read_compressed(how)
    if method not in ("mxfp4", "fp8", "int8"):
        raise ValueError(
            f"quant_method={method} is not supported, mxfp4, fp8 (in blocks), and int8 "
            "(compressed-tensors, symmetric, by row and token) are: use the checkpoint in 16 bits"
        )
    return Storage(method, tuple(size or ()))


def check_family(cfg: PretrainedConfig, family: Family) -> None:
    """ValueError if the config asks for something that we do not compute."""
    check_supported(cfg)
    given = {*get(cfg, "layer_types", ())}
    known = " and ".join(family.layers)
    others = sorted(given - {*family.layers})
    require(not others, f"layer_types={others} are not supported; {known} are")
    if get(cfg, "use_sliding_window", False) and SLIDING not in family.layers:
        raise ValueError("use_sliding_window=True is not supported; set it to False")
    part = read_rope(cfg)["partial_rotary_factor"]
    if part != 1 and not family.is_partial:
        raise ValueError(f"partial_rotary_factor={part} is not supported for {cfg.model_type}; use 1")


def decoder_of(wrapper: PretrainedConfig) -> PretrainedConfig:
    """A copy of the decoder's config, from a model with an image encoder."""
    cfg = copy(wrapper.text_config)
    for name in ("dtype", "tie_word_embeddings", "quantization_config"):
        setattr(cfg, name, getattr(cfg, name, None) or getattr(wrapper, name, None))
    return cfg


def own_sizes(cfg: PretrainedConfig, kind: type[FamilySpec]) -> Fields:
    """The fields that `kind` adds to `FamilySpec`, by their names in the config."""
    names = {f.name: f.default for f in fields(kind)}
    for field in fields(FamilySpec):
        del names[field.name]
    found = {name: getattr(cfg, name, default) for name, default in names.items()}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}


MTP = ("num_nextn_predict_layers", "num_mtp_layers")
WRAPPED = ("qwen3_5", "qwen3_5_moe")  # a decoder in a model with an image encoder


def read_family(cfg: PretrainedConfig, raw: JsonObject | None = None) -> ModelSpec:
    """The spec of any model that this book runs. `raw`: its `config.json`.

    A model of Part I without windows and quantized weights gets Part I's spec.
    Raises ValueError for what we do not compute.
    """
    is_wrapped = cfg.model_type in WRAPPED
    cfg = decoder_of(cfg) if is_wrapped else cfg
    family = FAMILIES[cfg.model_type]
    check_family(cfg, family)
    windows, storage = read_windows(cfg, family.layers), read_storage(cfg)
    is_part_one = family.name in ("Llama", "Qwen2", "Qwen3")
    if is_part_one and not storage and not any(windows):
        return read_spec(cfg)
    layers = cfg.num_hidden_layers
    mtp = [get(cfg, name, 0) for name in MTP if raw is None or name in raw]
    found = own_sizes(cfg, family.spec) | {"windows": windows, "storage": storage, "mtp_layers": max([0, *mtp])}
    found |= {"sparse": (False,) * layers, "rotates": (True,) * layers}
    if is_wrapped:
        found["has_vision"] = True
    return read_spec(cfg, family.spec, **found | family.read(cfg))


for family in FAMILIES.values():
    ModelRegistry.register_model(f"{family.name}ForCausalLM", read_family)
for name in ("Qwen3_5", "Qwen3_5Moe"):
    ModelRegistry.register_model(f"{name}ForConditionalGeneration", read_family)
