"""Every family of Part VI against transformers, on every path; planted mistakes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import test_latent
import test_state
import test_windows
import torch
import transformers
from checkpoints import save_family, spec_of
from small_models import ROOMY, SEVENS, TIGHT, assert_parity, make_prompts, texts
from test_fuzz import mutate

from atom_mini import EngineArgs, families
from atom_mini.families import disk_names, latent, mixture, state, windows
from atom_mini.families.specs import Routing

torch.set_num_threads(1)
NARROW = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GLM = {
    "n_routed_experts": 8,
    "use_qk_norm": True,
    "attention_bias": True,
    "head_dim": 32,
    **NARROW,
}
OTHERS = {"routed_scaling_factor": 2.0, "n_group": 4, "topk_group": 1}  # keys of other families
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("mistral", {"sliding_window": None}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "SmolLM3, biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 8}),
    "OLMoE": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "OLMoE, bias": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}),
    "Qwen2-MoE": ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 48, **NARROW}),
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True, "head_dim": 32, **NARROW}),
    "Qwen3-MoE, dense layers": ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [1], **NARROW}),
    "Qwen3-MoE, every second": ("qwen3_moe", {"num_experts": 5, "decoder_sparse_step": 2, **NARROW}),
    "Qwen3-MoE, keys of others": ("qwen3_moe", {"num_experts": 8, **OTHERS, **NARROW}),
    "GLM-4.5": ("glm4_moe", {"routed_scaling_factor": 1.5, "n_shared_experts": 2, **GLM}),
    "GLM-4.5, no q/k norm": ("glm4_moe", GLM | {"use_qk_norm": False, "first_k_dense_replace": 2}),
    "GLM-4.5, groups": ("glm4_moe", GLM | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
}


# One table: all families x the paths through the engine


def save_latent(name: str, folder: Path) -> Any:
    kind, options = test_latent.CASES[name]
    return test_latent.save_mixture(kind, folder, **options)


def save_small_latents(name: str, folder: Path) -> Any:
    """Latents as small as the epsilon of their norm."""
    kind, options = test_latent.CASES[name]
    model = test_latent.save_mixture(kind, folder, **options | {"rms_norm_eps": 1e-3})
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[:32] *= 1e-3
    model.save_pretrained(folder)
    return model


def save_small_heads(name: str, folder: Path) -> Any:
    """Queries as small as the epsilon of their length; what follows does not hide their scale."""
    model = test_state.make_model("qwen3_5_text", rms_norm_eps=1e-3)
    for layer in model.model.layers[:3]:
        layer.linear_attn.in_proj_qkv.weight.data[:64] *= 1e-3
        layer.linear_attn.in_proj_qkv.weight.data[64:] *= 0.05
    model.save_pretrained(folder)
    return model


MODELS: dict[str, Callable[[Path], Any]] = {
    name: lambda folder, case=case: save_family(case[0], folder, **case[1])
    for name, case in CASES.items()
}
OTHER_TABLES = [
    ("latent", test_latent.CASES, save_latent),
    ("windows", test_windows.MODELS, test_windows.save),
    ("state", test_state.CASES, test_state.save),
    ("latent, small", ["GLM-4.7-Flash"], save_small_latents),
    ("state, small", ["dense"], save_small_heads),
]
for table, names, save_one in OTHER_TABLES:
    for name in names:
        MODELS[f"{table}: {name}"] = lambda folder, n=name, save=save_one: save(n, folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A case's model and its folder, made once."""

    @cache
    def make(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("saved")
        return MODELS[name](folder), folder

    return make


def limit_of(name: str) -> float:
    return 2e-4 if name.startswith("state") else 1e-4


SELDOM = {  # variants of a family: the golden tokens of test_golden.py are theirs, too
    "SmolLM3, biases",
    "OLMoE, bias",
    "Qwen3-MoE, keys of others",
    "Qwen3-MoE, every second",
    "GLM-4.5, no q/k norm",
    "latent: V3, groups although greedy",
    "latent: V3, dense, no query rank",
    "windows: Mixtral",
    "windows: Qwen2",
    "windows: SmolLM3",
    "state: dense, biases, tied",
}
NAMES = [
    pytest.param(
        name, id=name.replace(" ", "_"), marks=[pytest.mark.slow] * (name in SELDOM)
    )
    for name in MODELS
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str, saved: Any) -> None:
    """With room for all: whole prefills, decodes together. Through chunks, prefix hits, and
    preemptions."""
    assert_parity(*saved(name), ROOMY, TIGHT, limit=limit_of(name))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("Mixtral", TIGHT | {"packed": True}),
        ("GLM-4.5, groups", TIGHT | {"packed": True}),
        ("latent: V3", TIGHT | {"packed": True}),
        ("windows: gpt-oss", SEVENS),
        ("latent: V2-Lite", SEVENS),
        ("state: dense", SEVENS),
        ("latent: GLM-4.7-Flash", TIGHT | {"prefix_cache": "radix"}),
        ("latent: V3", TIGHT | {"kv_offloading_size": 0.001}),
        ("windows: gpt-oss", TIGHT | {"kv_offloading_size": 0.001}),
        ("state: dense", SEVENS | {"state_checkpoint_interval_tokens": 8}),
        ("state: mixture", TIGHT | {"state_checkpoint_interval_tokens": 12}),
    ],
    ids=str,
)
def test_other_paths_equal_transformers(name: str, engine: dict[str, Any], saved: Any) -> None:
    """Packed products, chunks of 7 tokens, prefix hits in a tree, blocks from host memory, and states that are kept."""
    assert_parity(*saved(name), engine, limit=limit_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows: gpt-oss", "latent: V2-Lite", "state: mixture"])
def test_thirty_two_at_once(name: str, saved: Any) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 70))] for _ in range(32)]
    assert_parity(*saved(name), ROOMY, prompts=prompts, limit=limit_of(name))


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
SPYRE = {"scheduler": "spyre", "max_num_seqs": 4, "max_model_len": 160}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SmolLM3", {"overlap": True}),
        ("state: mixture", {"overlap": True}),
        ("GLM-4.5", NGRAM),
        ("latent: GLM-4.7-Flash", NGRAM),
        ("windows: gpt-oss", NGRAM),
        ("SmolLM3", SPYRE),
        ("latent: GLM-4.7-Flash", SPYRE),
        ("state: mixture", {"interleave_decode": True}),
        ("windows: gpt-oss", {"enable_mixed_steps": True}),
        ("state: mixture", {"enable_mixed_steps": True}),
        ("state: mixture", {"engine_process": True}),
    ],
    ids=str,
)
def test_with_the_rest(name: str, options: dict[str, Any], saved: Any) -> None:
    """The same tokens with each of the engine's other options."""
    _, folder = saved(name)
    prompts = [*make_prompts(), [5, 6, 7] * 9]
    room = {"kv_cache_block_size": 16, "num_kvcache_blocks": 60, "max_num_seqs": 6}
    assert texts(folder, prompts, **room | options) == texts(folder, prompts, **room)


# One table of mistakes


NET = state.GatedDeltaNet
DECAY = "-self.A_log.exp() * F.softplus(a.float() + self.dt_bias)"
MISTAKES: dict[str, tuple[str, Any, str, str, str]] = {  # the case, whose function, from, to
    "not renormalised": ("Qwen3-MoE", mixture, "route", "if routing.renormalize:", "if False:"),
    "renormalised": ("OLMoE", mixture, "route", "if routing.renormalize:", "if True:"),
    "no scale": ("GLM-4.5", mixture, "route", "weights * routing.scale", "weights"),
    "no groups": ("GLM-4.5, groups", mixture, "route", "if routing.groups > 1:", "if False:"),
    "corrected scores as weights": ("GLM-4.5", mixture, "route", "scores.gather", "choice.gather"),
    "shared expert not gated": (
        "Qwen2-MoE", mixture.MixtureMLP, "forward", "self.shared_gate is not None", "False"),
    "turns everywhere": ("SmolLM3", mixture.VariedAttention, "forward", "not self.turns", "False"),
    "no norm of all heads": (
        "OLMoE", mixture.VariedAttention, "project", "if self.has_whole_norm:", "if False:"),
    "rows as they come": ("GLM-4.5", disk_names, "permute_rows", "[:, order]", ""),
    "no sinks": ("windows: gpt-oss", windows, "sink_attention", "sinks is not None", "False"),
    "one key more": ("windows: Qwen3", windows, "seen_keys", "length - n + 1", "length - n"),
    "plain SwiGLU": ("windows: gpt-oss", mixture, "activate", "not limit", "True"),
    "halves, not in turns": (
        "windows: gpt-oss", disk_names, "interleaved", "rows[:, i::n]", "rows.chunk(n, 1)[i]"),
    "mscale once": ("latent: V3", latent, "softmax_scale", "m**2", "m"),
    "neighbors, not halves": (
        "latent: V3", latent, "halves_first", "pairs[::2], pairs[1::2]", "pairs"),
    "epsilon of latents": (
        "latent, small: GLM-4.7-Flash", latent.LatentAttention, "__init__",
        "RMSNorm(latent, 1e-6, ops)", "RMSNorm(latent, 1e-3, ops)"),
    "no decay": ("state: dense", NET, "forward", DECAY, "0 * a.float()"),
    "every strength 1": (
        "state: dense", NET, "forward", "b.float().sigmoid()", "torch.ones_like(g)"),
    "no gate of the output": ("state: dense", NET, "forward", "* F.silu(z.float())", ""),
    "no rows of the past": (
        "state: dense", state, "causal_conv", "torch.cat([past", "torch.cat([0 * past"),
    "heads in turns": (
        "state: dense", NET, "advance", "t.repeat_interleave(heads // t.shape[2], 2)",
        "t.repeat(1, 1, heads // t.shape[2], 1)"),
    "linear attention": (
        "state: dense", state, "delta_chunk", "v - total.exp() * (k @ state)", "v"),
    "no scale of queries": ("state, small: dense", NET, "advance", " * key**-0.5", ""),
    "epsilon of lengths": ("state, small: dense", state, "unit", "1e-6", "1e-12"),
    "states not cleared": (
        "state: dense", state.StatePool, "clear", "self.state.index_fill_(1, slots, 0)", "pass"),
    "slots by place": (
        "state: dense", state.StateRunner, "prepare_model", "batch.rows or",
        "[*range(len(batch.rows))] or"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:request .* failed")  # their logits are NaN
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees(mistake: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made on purpose, each makes the comparison above fail."""
    name, *change = MISTAKES[mistake]
    model, folder = saved(name)
    mutate(monkeypatch, *change)
    with pytest.raises(AssertionError):
        assert_parity(model, folder, TIGHT, limit=0.01)


def test_forbidden_groups_lose_against_negative_scores() -> None:
    """With 0 instead of -inf, an expert of a forbidden group would be chosen."""
    logits, correction = torch.zeros(1, 4), torch.tensor([-1.0, -2.0, -3.0, -9.0])
    routing = Routing(2, "sigmoid", groups=2, top_groups=1, group_best=2)
    assert mixture.route(logits, routing, correction)[1].tolist() == [[0, 1]]


# What a config says


def config_of(kind: str, **options: Any) -> Any:
    usual = {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    return transformers.AutoConfig.for_model(kind, **usual | options)


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "Qwen3NextForCausalLM"])
def test_an_unknown_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """A name that begins like a supported one is another architecture."""
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"]}}')
    with pytest.raises(ValueError, match=f"{name}.*these are: .*DeepseekV3ForCausalLM"):
        EngineArgs(str(tmp_path))


CHUNKED = {"layer_types": ["chunked_attention"] * 4}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"clip_qkv": 4.0}, "clip_qkv=4.0"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 .* use swiglu_alpha=1.702"),
    ("smollm3", CHUNKED, "chunked_attention"),
    ("llama", CHUNKED, "chunked_attention"),
    ("qwen3_5_text", CHUNKED, "chunked_attention"),
    ("mistral", {"rope_parameters": HALF}, "partial_rotary_factor=0.5"),
    ("deepseek_v3", {"rope_parameters": HALF}, "partial_rotary_factor=0.5"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}, "needs q_lora_rank"),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 9}, "do not fit 8 experts"),
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 8}, "n_group=8"),  # of one, and two count
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 3}, "n_group=3"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
    ("qwen3_5_text", {"linear_num_key_heads": 3}, "cannot share 3 key heads"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED, ids=str)
def test_what_is_not_computed_is_refused(kind: str, options: dict[str, Any], words: str) -> None:
    spec_of(config_of(kind))
    with pytest.raises(ValueError, match=words):
        spec_of(config_of(kind, **options))


def test_what_a_config_leaves_out() -> None:
    """gpt-oss clamps at 7 without being told; Qwen3.5's mixture always renormalizes."""
    config = config_of("gpt_oss")
    config.__dict__.pop("swiglu_limit", None)
    assert spec_of(config).experts.limit == 7
    spec = spec_of(transformers.Qwen3_5MoeTextConfig())
    assert spec.routing.renormalize and spec.experts.is_gated


def test_a_config_is_left_alone() -> None:
    packed: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    packed |= {"weight_block_size": [128, 128]}
    for kind in ("llama", "gpt_oss", "deepseek_v3", "qwen3_5_text"):
        config = config_of(kind, quantization_config=packed)
        before = dict(vars(config))
        spec: Any = spec_of(config)
        assert vars(config) == before and spec.storage.block == (128, 128)
        with pytest.raises(AttributeError):
            spec.hidden_size = 1


LOOK = """
import importlib, sys
import atom_mini.families.specs
from atom_mini.checkpoint import ModelRegistry
from atom_mini.models import model_class
from atom_mini.options.args import EngineArgs
before = dict(ModelRegistry.readers)
for module in sys.argv[1:]:
    importlib.import_module("atom_mini." + module)
    assert ModelRegistry.readers == before, f"importing {module} changed the registry"
    spec = EngineArgs("tiny").spec
    print(type(spec).__name__, model_class(spec).__name__, model_class(spec).__module__)
"""


@pytest.mark.slow
def test_no_import_changes_what_a_model_is() -> None:
    """After each module's import, the built-in model has Part I's spec and Part I's class."""
    modules = [f"families.{module.name}" for module in iter_modules(families.__path__)]
    modules += ["parallel.experts"]
    modules += ["parallel.shards"] * bool(find_spec("msgspec"))
    done = subprocess.run([sys.executable, "-c", LOOK, *modules], capture_output=True, text=True)
    wanted = ["ModelSpec", "CausalLM", "atom_mini.models"] * len(modules)
    assert done.stdout.split() == wanted, done.stderr
