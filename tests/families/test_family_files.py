"""What a family's files may contain: fused experts, layers for MTP, a wrapper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import edit_json, measure_loading, save_family
from safetensors.torch import load_file
from small_models import ROOMY, assert_parity, make_prompts, rewrite
from test_families import CASES, GLM
from test_latent import GROUPS, V3, save_mixture
from test_state import EXPERTS, SMALL, save, spread_weights
from test_windows import save as save_windowed

from atom_mini import EngineArgs
from atom_mini.loading import load_model

FEW = make_prompts()[1:3]
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def load(folder: Path) -> Any:
    spec = EngineArgs(str(folder)).spec
    return load_model(spec, folder, 64, torch.device("cpu"), torch.float32)


def save_qwen3_moe(folder: Path) -> Any:
    return save_family("qwen3_moe", folder, **CASES["Qwen3-MoE"][1])


def fuse(tensors: dict[str, torch.Tensor]) -> None:
    """All experts of a layer in one tensor, as Qwen3.5's files have them."""
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}.{e}.{name}_proj.weight") for e in range(8)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{at}.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{at}.down_proj"] = down


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Qwen3.5"])
def test_experts_in_one_tensor(family: str, tmp_path: Path) -> None:
    model = save_qwen3_moe(tmp_path) if family == "Qwen3-MoE" else save("mixture", tmp_path)
    rewrite(tmp_path, fuse)
    assert_parity(model, tmp_path, ROOMY, prompts=FEW, limit=2e-4)


@pytest.mark.parametrize("count", [6, 10])
@pytest.mark.parametrize("kind", ["halves", "in turns"])
def test_another_number_of_experts_than_the_config_says(
    kind: str, count: int, tmp_path: Path
) -> None:
    if kind == "halves":
        save_qwen3_moe(tmp_path)
        rewrite(tmp_path, fuse)
        edit_json(tmp_path / "config.json", num_experts=count)
    else:
        save_windowed("gpt-oss", tmp_path)
        edit_json(tmp_path / "config.json", num_local_experts=count)

    def fit_routers(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith(("mlp.gate.weight", "router.weight", "router.bias")):
                tensors[name] = tensor[:1].repeat(count, *[1] * (tensor.dim() - 1))

    rewrite(tmp_path, fit_routers)
    with pytest.raises(ValueError, match="in the file"):
        load(tmp_path)


NAMED = [
    ("an extra expert", EXPERT.format(8), "no place for: .*experts.8"),
    ("MTP, not announced", "mtp.fc.weight", "no place for: .*mtp.fc"),
    ("an encoder, not announced", "model.visual.pos_embed.weight", "no place for: .*pos_embed"),
]


@pytest.mark.parametrize(("what", "name", "words"), NAMED)
def test_extra_weights_are_named(what: str, name: str, words: str, tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path) if "expert" in what else save("dense", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("name", [EXPERT.format(3), "model.layers.1.linear_attn.dt_bias"])
def test_a_missing_weight_is_named(name: str, tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path) if "expert" in name else save("dense", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    ours = name.split(".")[-2:] if "expert" in name else [name.split(".")[-1]]
    with pytest.raises(ValueError, match="lacks 1 weight.*" + ".".join(ours)):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_layers_for_mtp_only_if_announced(kind: str, tmp_path: Path) -> None:
    if kind == "glm4_moe":
        model, last = save_family(kind, tmp_path, **GLM), 4
    else:
        model, last = save_mixture(kind, tmp_path, **V3 | GROUPS), 3
    names = f"model.layers.{last}.eh_proj.weight", f"model.layers.{last}.self_attn.q_a_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(1, 1) for name in names}))
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=None, num_mtp_layers=1)
    assert_parity(model, tmp_path, ROOMY, prompts=FEW)
    for number in (0, None):  # transformers says 1 where the file says nothing
        edit_json(tmp_path / "config.json", num_nextn_predict_layers=number, num_mtp_layers=number)
        with pytest.raises(ValueError, match=rf"no place for: .*layers\.{last}"):
            load(tmp_path)


def wrap(kind: str, folder: Path, **more: Any) -> Any:
    """A decoder in a model with an image encoder, as it is published."""
    torch.manual_seed(0)
    text = dict(SMALL)
    if "moe" in kind:
        del text["intermediate_size"]
        text |= EXPERTS
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(
        kind, text_config=text | more, vision_config=vision, tie_word_embeddings=True
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    spread_weights(model).save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_decoder_in_a_wrapper(kind: str, tmp_path: Path) -> None:
    """Its names have a prefix; vision and MTP are left out; the wrapper's config says that the embedding is the head."""
    model = wrap(kind, tmp_path, mtp_num_hidden_layers=1)
    names = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight")
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2) for name in names}))
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("model.language_model.") for name in names)
    spec = EngineArgs(str(tmp_path)).spec
    assert spec.tie_word_embeddings and spec.dtype == "float32"
    assert_parity(model, tmp_path, ROOMY, prompts=FEW, limit=2e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """An expert or two: another copy of a layer would take 25 MB, one of all 300."""
    shape = {"vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 12}
    shape |= {"num_attention_heads": 8, "max_position_embeddings": 512, "intermediate_size": 256}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    save_family("qwen3_moe", tmp_path, **shape, **experts)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    peak = measure_loading(tmp_path)["peak"]
    assert weights > 250e6 and peak <= 1.1 * weights + 16 * 2**20
