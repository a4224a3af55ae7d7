"""Small models with latent attention, for test_families.py; what published ones cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import transformers
from checkpoints import random_model, spec_of

from atom_mini.memory import kvcache_block_bytes

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


def save_mixture(kind: str, folder: Path, **options: Any) -> Any:
    """A `save_checkpoint` whose routers differ from expert to expert, the correction bias included."""
    model = random_model(kind, **options)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias", "gate_up_proj", "down_proj")):
            torch.nn.init.normal_(value, std=0.1 if "bias" in name else 0.2)
    model.save_pretrained(folder)
    return model


PUBLISHED: dict[str, tuple[Any, int]] = {
    "DeepSeek-V3": (transformers.DeepseekV3Config(), 70272),
    "GLM-4.7-Flash": (transformers.Glm4MoeLiteConfig(), 54144),
    "Qwen3.5-9B": (transformers.Qwen3_5TextConfig(), 32768),  # of its 8 layers with K/V
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_per_token_of_published_shapes(name: str) -> None:
    config, wanted = PUBLISHED[name]
    assert kvcache_block_bytes(spec_of(config), 16, torch.bfloat16) == 16 * wanted
