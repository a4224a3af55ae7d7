"""Latent attention: transformers' logits on every path, the expanded form as oracle, and each trap planted."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
import transformers
from checkpoints import Recorder, random_model, recorded, spec_of
from safetensors.torch import load_file, save_file
from show import plain_attention
from torch import Tensor

import atom_mini.families.latent as latent
from atom_mini import LLM, SamplingParams
from atom_mini.attention import AttentionMetaData, set_forward_context
from atom_mini.memory import kvcache_block_bytes
from atom_mini.models import RMSNorm, RotaryEmbedding, TorchOps, rotate

KINDS: dict[str, Any] = {
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
}
checkpoints.CONFIGS.update(KINDS)
SMALL: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
V2 = SMALL | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}
V3 = SMALL | {"q_lora_rank": 24, "rope_parameters": YARN | {"mscale_all_dim": 1.0}}
GLM = SMALL | {"q_lora_rank": 24, "v_head_dim": 48}
LIMITED = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite": ("deepseek_v2", V2 | {"q_lora_rank": None}),
    "V2, groups, biases": ("deepseek_v2", V2 | GROUPS | LIMITED | {"q_lora_rank": 24, "attention_bias": True}),
    "V3": ("deepseek_v3", V3 | GROUPS),
    "V3, groups although greedy": ("deepseek_v3", V3 | GROUPS | {"topk_method": "greedy"}),
    "V3, halves, no groups": ("deepseek_v3", V3 | {"n_group": 1, "topk_group": 1, "rope_interleave": False}),
    "V3, dense, no query rank": ("deepseek_v3", V3 | {"first_k_dense_replace": 3, "q_lora_rank": None}),
    "GLM-4.7-Flash": ("glm4_moe_lite", GLM | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ROOMY = {"num_kvcache_blocks": 200, "enable_prefix_caching": False}
SEVENS = {"kv_cache_block_size": 4, "num_kvcache_blocks": 40, "max_num_batched_tokens": 7}
TIGHT = {"kv_cache_block_size": 4, "num_kvcache_blocks": 36, "max_num_batched_tokens": 22}


def save_mixture(kind: str, folder: Path, **options: Any) -> Any:
    """A `save_checkpoint` whose routers differ from expert to expert, the correction bias included."""
    model = random_model(kind, **options)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias", "gate_up_proj", "down_proj")):
            torch.nn.init.normal_(value, std=0.1 if "bias" in name else 0.2)
    model.save_pretrained(folder)
    return model


def make_prompts() -> list[list[int]]:
    """1 to 100 tokens: YaRN's 64 lie within; two begin alike, two are equal."""
    rng = random.Random(0)
    stem = [rng.randrange(300) for _ in range(100)]
    return [stem, [*stem[:40], 7, 8], stem[:33], stem[:33], stem[50:51]]


def generate(folder: Path, prompts: list[list[int]], **engine: Any) -> tuple[Recorder, dict[int, list[int]], LLM]:
    """All logits of a run, the tokens by request, and the engine; what was never stored is NaN."""
    with LLM(str(folder), **{"device": "cpu", "dtype": "float32"} | engine) as llm, recorded(llm) as recorder:
        runner: Any = llm.engine_core.runner
        for tensor in (runner.kv_cache, *vars(getattr(runner, "pool", SimpleNamespace())).values()):
            tensor.fill_(math.nan)
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return recorder, {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}, llm


def equal_on_every_path(model: Any, folder: Path, prompts: list[list[int]], *engines: dict[str, Any], limit: float) -> None:
    """The logits are transformers', and all engines say the same; small ones with chunks and preemptions."""
    texts = []
    for engine in engines:
        recorder, sequences, llm = generate(folder, prompts, **engine)
        errors = recorder.errors(model, sequences)
        assert max(errors.values()) <= limit, errors
        spread = torch.stack(list(recorder.every.values())).std()
        assert 1 < spread < 20, f"logits with a spread of {spread} would show no error, or too much rounding"
        scheduler: Any = llm.engine_core.scheduler
        assert recorder.num_decode_steps > 0
        if "max_num_batched_tokens" in engine:
            assert recorder.num_chunks > 0 and scheduler.num_preemptions > 0
        texts.append([*sequences.values()])
    assert all(text == texts[0] for text in texts)


def equal_alone_and_among_32(model: Any, folder: Path, limit: float, **engine: Any) -> None:
    """The same logits, and the same tokens, in a batch of 32 and alone."""
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 70))] for _ in range(32)]
    recorder, many, _ = generate(folder, prompts, **engine)
    assert max(len(batch.req_ids) for batch in recorder.batches) == 32
    assert max(recorder.errors(model, many).values()) <= limit
    for n in (0, 13):
        _, alone, _ = generate(folder, prompts[n : n + 1], **engine)
        assert [*alone.values()] == [[*many.values()][n]]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """Whole prefills, chunks of 7, decodes of five and of one, prefix hits, preempted and resumed."""
    kind, options = CASES[case]
    model = save_mixture(kind, tmp_path, **options)
    equal_on_every_path(model, tmp_path, make_prompts(), ROOMY, SEVENS, TIGHT, limit=1e-4)


def test_alone_and_among_32(tmp_path: Path) -> None:
    kind, options = CASES["V2-Lite"]
    equal_alone_and_among_32(save_mixture(kind, tmp_path, **options), tmp_path, 1e-4, **ROOMY)


def test_prefix_hits(tmp_path: Path) -> None:
    """Latents of a cached prefix serve another request, through hashes and through the radix tree."""
    kind, options = CASES["V3"]
    model = save_mixture(kind, tmp_path, **options)
    for cache in ("hash", "radix"):
        with LLM(str(tmp_path), device="cpu", kv_cache_block_size=4, num_kvcache_blocks=90, prefix_cache=cache) as llm:
            llm.generate(make_prompts()[0], GREEDY, use_tqdm=False)
            with recorded(llm) as recorder:
                outs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
        assert sum(out.num_cached_tokens for out in outs) >= 200
        sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
        assert max(recorder.errors(model, sequences).values()) <= 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"scheduler": "spyre", "num_kvcache_blocks": 60, "kv_cache_block_size": 16, "max_num_seqs": 4, "max_model_len": 160},
    ],
    ids=str,
)
def test_other_rooms_say_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    """Overlap, drafts (several queries per sequence) and Spyre's rectangles."""
    kind, shape = CASES["GLM-4.7-Flash"]
    save_mixture(kind, tmp_path, **shape)
    prompts = [*make_prompts(), [5, 6, 7] * 9]
    _, plain, _ = generate(tmp_path, prompts, **ROOMY)
    with LLM(str(tmp_path), device="cpu", **ROOMY | options) as llm:
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
        stats = getattr(llm.engine_core.scheduler, "spec_stats", None)
    assert [out.prompt_token_ids + out.token_ids for out in outs] == [*plain.values()]
    assert stats is None or stats.tokens_per_step > 1


def expanded(layer: latent.LatentAttention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer as the paper writes it: keys and values of every head, nothing cached."""
    q, c, k_rope = layer.down(x).split(layer.sizes, -1)
    if layer.q_a_layernorm is not None:
        q = layer.q_b(layer.q_a_layernorm(q.contiguous(), None)[0])
    c, _ = layer.kv_a_layernorm(c.contiguous(), None)
    k, v = (torch.einsum("hnl,tl->htn", m, c) for m in layer.matrices())
    k_rope = rotate(k_rope[:, None], cos, sin).transpose(0, 1).expand(layer.heads, -1, -1)
    q, q_rope = q.view(len(x), layer.heads, -1).split(layer.key, -1)
    q, k = torch.cat([q, rotate(q_rope, cos, sin)], -1), torch.cat([k, k_rope], -1)
    return layer.o(plain_attention(q, k, v, layer.attn.scale).flatten(1))


@torch.inference_mode()
@pytest.mark.parametrize("case", CASES)
def test_absorbed_equals_expanded(case: str) -> None:
    kind, options = CASES[case]
    spec = spec_of(KINDS[kind](**checkpoints.SMALL | options))
    layer, n = latent.LatentAttention(spec, TorchOps()), 90
    for name, weight in layer.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.3)
    x, tables = torch.randn(n, 64), RotaryEmbedding(spec, 99)(torch.arange(n), torch.float32)
    layer.attn.kv_cache = torch.full((1, 1, 1, 96, 48), math.nan)
    lens, table = torch.tensor([n]).int(), torch.zeros(1, 1).int()
    with set_forward_context(AttentionMetaData(lens, table, torch.arange(n), [n], [n])):
        out, right = layer(x, *tables), expanded(layer, x, *tables)
    assert right.std() > 0.5
    torch.testing.assert_close(out, right, atol=1e-4, rtol=0)


CRAFTED = YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("mistake", ["none", "no mscale squared", "halves", "eps"])
def test_mistakes_show(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves a logit by more than 1. The weights are crafted: latents as small as their epsilon."""
    options = CASES["GLM-4.7-Flash"][1] | {"rope_parameters": CRAFTED, "rms_norm_eps": 1e-3}
    model = save_mixture("glm4_moe_lite", tmp_path, **options)
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[:32] *= 1e-3
    model.save_pretrained(tmp_path)
    if mistake == "no mscale squared":
        monkeypatch.setattr(latent, "softmax_scale", lambda cfg: (32 + 16) ** -0.5)
    if mistake == "halves":
        monkeypatch.setattr(latent, "halves_first", lambda size, dim: torch.arange(size))
    if mistake == "eps":
        monkeypatch.setattr(latent, "RMSNorm", lambda size, eps, ops: RMSNorm(size, 1e-3, ops))
    recorder, sequences, _ = generate(tmp_path, make_prompts()[:1], **ROOMY)
    error = recorder.errors(model, sequences)["every"]
    assert error <= 1e-4 if mistake == "none" else error > 1, error


PUBLISHED: dict[str, tuple[Any, int]] = {
    "DeepSeek-V2-Lite": (transformers.DeepseekV2Config(num_hidden_layers=27, num_attention_heads=16, num_experts_per_tok=6), 31104),
    "GLM-4.7-Flash": (transformers.Glm4MoeLiteConfig(), 54144),
    "DeepSeek-V3": (transformers.DeepseekV3Config(), 70272),
    "Kimi-K2": (transformers.DeepseekV3Config(num_attention_heads=64), 70272),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_per_token_of_published_shapes(name: str) -> None:
    cfg, wanted = PUBLISHED[name]
    assert kvcache_block_bytes(spec_of(cfg), 1, torch.bfloat16) == wanted
    assert kvcache_block_bytes(spec_of(cfg), 16, torch.bfloat16) == 16 * wanted


@pytest.mark.parametrize(("factor", "all_dim", "wanted"), [(40.0, 0.707, 1.590), (40.0, 1.0, 1.874), (1.0, 1.0, 1.0)])
def test_scale_of_published_models(factor: float, all_dim: float, wanted: float) -> None:
    rope = YARN | {"factor": factor, "mscale": all_dim, "mscale_all_dim": all_dim}
    spec = spec_of(transformers.DeepseekV3Config(rope_parameters=rope))
    assert math.isclose(latent.softmax_scale(spec) * 192**0.5, wanted, abs_tol=5e-4)
    assert float(RotaryEmbedding(spec, 8).cos[0, 0]) == 1.0  # the factor on cos and sin


def test_bias_beside_none_is_refused() -> None:
    cfg = transformers.DeepseekV2Config(q_lora_rank=None, attention_bias=True, num_experts_per_tok=6)
    with pytest.raises(ValueError, match="attention_bias=True needs q_lora_rank"):
        spec_of(cfg)


def test_rows_are_sorted_once() -> None:
    """The rows of each head are sorted; other weights stay as they are."""
    cfg = KINDS["deepseek_v3"](**checkpoints.SMALL | V3 | GROUPS)
    rows = torch.arange(4.0 * 48).view(-1, 1)
    readers: Any = {"a.q_b_proj.weight": lambda: rows, "a.o_proj.weight": lambda: rows, "lm_head.weight": lambda: rows}
    found = latent.sort_latents(readers, spec_of(cfg))
    assert found["a.o_proj.weight"] is readers["a.o_proj.weight"] and found["lm_head.weight"]() is rows
    assert found["a.q_b_proj.weight"]()[48 + 30 : 48 + 36, 0].tolist() == [78, 79, 80, 82, 84, 86]


@pytest.mark.slow
def test_info_counts_latents(tmp_path: Path) -> None:
    """`atom-mini info` without an engine, in a process of its own: the bytes of latents, not of keys and values."""
    bytes_of_a_layer = []
    for name in ("DeepSeek-V2-Lite", "GLM-4.7-Flash"):
        cfg, wanted = PUBLISHED[name]
        cfg.num_hidden_layers, layers = 1, cfg.num_hidden_layers  # a table of weights is enough
        cfg.dtype, cfg.architectures = torch.bfloat16, [type(cfg).__name__.replace("Config", "ForCausalLM")]
        cfg.save_pretrained(tmp_path / name)
        cfg.num_hidden_layers = layers
        bytes_of_a_layer.append(str(wanted // layers))
    code = "import sys; from atom_mini import EngineArgs; from atom_mini.options.info import needs\n"
    code += "for folder in sys.argv[1:]:\n    config = EngineArgs(folder, dtype='bfloat16')\n"
    code += "    print(needs(config, 'cuda')['kvcache_bytes_per_token'])"
    folders = [str(tmp_path / name) for name in ("DeepSeek-V2-Lite", "GLM-4.7-Flash")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True)
    assert done.stdout.split() == bytes_of_a_layer, done.stderr


@pytest.mark.parametrize("announced", [0, 1])
def test_layers_for_mtp_are_left_out_if_the_config_says_so(announced: int, tmp_path: Path) -> None:
    model = save_mixture("deepseek_v3", tmp_path, **V3 | GROUPS | {"num_mtp_layers": announced})
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.self_attn.q_a_proj.weight": torch.ones(1, 1)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    if announced:
        recorder, sequences, _ = generate(tmp_path, make_prompts()[2:3], **ROOMY)
        assert max(recorder.errors(model, sequences).values()) <= 1e-4
    else:
        with pytest.raises(ValueError, match="no place for: model"):
            generate(tmp_path, [[1]], **ROOMY)


def test_fp8_as_deepseek_v3_is_published(tmp_path: Path) -> None:
    """Packed in blocks and sorted after unpacking: transformers' logits for the unpacked weights."""
    from test_quantized import save_fp8_twin  # which imports all families

    save_mixture("deepseek_v3", tmp_path / "plain", **V3 | GROUPS)
    save_fp8_twin(tmp_path, lambda n: n.endswith(("_proj.weight", "_mqa.weight")))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    recorder, sequences, _ = generate(tmp_path / "fp8", make_prompts()[1:3], **ROOMY)
    assert max(recorder.errors(model, sequences).values()) <= 1e-4
