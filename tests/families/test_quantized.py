"""Packed weights are unpacked lazily, by their formats; other formats are refused before a file is opened."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    CONFIGS,
    edit_json,
    recorded,
    reference_logits,
    save_checkpoint,
    save_family,
)
from safetensors.torch import load_file, save_file
from test_families import GLM
from test_family_files import load, wrap
from test_latent import GROUPS, V3, save_mixture
from torch import Tensor

import atom_mini.families.quantized as quantized
import atom_mini.loading
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.families.quantized import dequantize_fp8, dequantize_mxfp4
from atom_mini.families.specs import Storage
from atom_mini.loading import checkpoint_files, read_tensor
from atom_mini.options.info import describe

# As in config.json of Qwen/Qwen3-8B-FP8, less the list of modules that were not converted.
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "tie_word_embeddings": False}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
IDS = [(7 * i * i + 3) % 300 for i in range(30)]


def plain_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., G, 16], [..., G] -> [..., 32 G] in float64, number by number."""
    codes = torch.tensor(VALUES + [-value for value in VALUES], dtype=torch.float64)
    both = torch.stack([codes[blocks.long() % 16], codes[blocks.long() // 16]], -1).flatten(-2)
    return (both * torch.pow(2.0, scales.double() - 127)[..., None]).flatten(-2)


def plain_fp8(weight: Tensor, scale: Tensor, size: int = 128) -> Tensor:
    """w[i, j] x s[i // 128, j // 128], by indices."""
    i, j = (torch.arange(n) // size for n in weight.shape)
    return weight.float() * scale.float()[i[:, None], j[None]]


def save_fp8_twin(home: Path, is_packed: Callable[[str], bool], size: int = 16) -> None:
    """Pack some weights of the checkpoint `home`/plain in squares, as `home`/fp8; plain gets the rounded weights."""
    shutil.copytree(home / "plain", home / "fp8")
    plain = load_file(home / "plain" / "model.safetensors")
    packed = dict(plain)
    for name in filter(is_packed, [*plain]):
        packed[name], packed[name + "_scale_inv"] = to_fp8(plain[name], size)
        plain[name] = plain_fp8(packed[name], packed[name + "_scale_inv"], size)
    for folder, tensors in (("plain", plain), ("fp8", packed)):
        save_file(tensors, home / folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(home / "fp8" / "config.json", quantization_config=FP8 | {"weight_block_size": [size, size]})


def to_fp8(weight: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> e4m3 and its scales, square by square."""
    grid = torch.zeros([-(-n // size) for n in weight.shape])
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            square = (slice(i * size, i * size + size), slice(j * size, j * size + size))
            grid[i, j] = weight[square].abs().max() / 448
            packed[square] = (weight[square] / grid[i, j]).to(packed.dtype)
    return packed, grid


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and a.view(torch.int16).equal(b.view(torch.int16))


def test_all_codes_and_scales() -> None:
    """Bit by bit; 2^-128 is below the smallest normal bfloat16, and exact all the same."""
    blocks = torch.arange(256).byte().view(16, 16).expand(256, 16, 16)
    scales = torch.arange(256).byte()[:, None].expand(256, 16)
    ours, wanted = dequantize_mxfp4(blocks[:255], scales[:255]), plain_mxfp4(blocks, scales)[:255]
    assert same_bits(ours, wanted.to(torch.bfloat16))
    fits = wanted.abs() < 2.0**128  # beyond it there is only infinity
    assert ours.double()[fits].equal(wanted[fits]) and ours[~fits].isinf().all()
    assert dequantize_mxfp4(blocks[255], scales[255]).isnan().all()
    turned = blocks[:255].flip(-2).contiguous().flip(-2)  # strides do not matter
    assert same_bits(dequantize_mxfp4(turned, scales[:255]), ours)


PACKED, GRID = to_fp8(torch.ones(300, 130))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "blocks": (
        lambda: dequantize_mxfp4(torch.zeros(4, 2, 8).byte(), torch.zeros(4, 2).byte()),
        r"blocks=\[4, 2, 8\] .* need \[4, 2, 16\]"),
    "a grid transposed": (lambda: dequantize_fp8(PACKED, GRID.T), r"\[300, 130\].* give \[3, 2\]"),
    "another block": (lambda: dequantize_fp8(PACKED, GRID, (64, 128)), r"give \[5, 2\]"),
    "one scale": (lambda: dequantize_fp8(PACKED, torch.ones(())), r"give \[3, 2\]"),
    "int8": (lambda: dequantize_fp8(PACKED.to(torch.int8), GRID), "weights in torch.int8"),
    "e5m2": (lambda: dequantize_fp8(PACKED.to(torch.float8_e5m2), GRID), "torch.float8_e5m2"),
    "e8m0": (lambda: dequantize_fp8(PACKED, GRID.to(torch.uint8)), "scales in torch.uint8"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_shapes_and_types_that_do_not_fit(what: str) -> None:
    call, words = WRONG[what]
    with pytest.raises(ValueError, match=words):
        call()


# Whole checkpoints


def quantize(folder: Path, kind: str = "qwen3", size: int = 128, **options: Any) -> tuple[Path, Path, Any]:
    """(folder in FP8, the same weights whole, transformers' model of them)."""
    whole = folder / "plain"
    if kind in CONFIGS:
        save_checkpoint(kind, whole, **SHAPE | {"head_dim": 32} | options)
    else:
        save_family(kind, whole, **options)
    save_fp8_twin(folder, lambda name: name.endswith("_proj.weight"), size)
    return folder / "fp8", whole, transformers.AutoModelForCausalLM.from_pretrained(whole).eval()


def logits(folder: Path) -> Tensor:
    """Ours [30, vocabulary], through the engine."""
    with LLM(str(folder), device="cpu", num_kvcache_blocks=8) as llm, recorded(llm) as recorder:
        llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return torch.stack([row for (_, i), row in sorted(recorder.every.items()) if i < len(IDS)])


def save_twin(kind: str, home: Path) -> Any:
    """A checkpoint in FP8 as `home`/fp8, and transformers' model of the same weights whole."""
    if kind == "deepseek_v3":
        save_mixture(kind, home / "plain", **V3 | GROUPS)
        save_fp8_twin(home, lambda name: name.endswith(("_proj.weight", "_mqa.weight")))
    elif kind == "qwen3_5":
        wrap(kind, home / "plain")
        save_fp8_twin(home, lambda name: name.endswith("_proj.weight") and "visual" not in name)
        return transformers.AutoModelForImageTextToText.from_pretrained(home / "plain").eval()
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
        options = {"qwen3_moe": experts | {"head_dim": 32}, "llama": {"attention_bias": True}}
        quantize(home, kind, size=32 if kind == "llama" else 128, **options.get(kind, {}))
    return transformers.AutoModelForCausalLM.from_pretrained(home / "plain").eval()


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "deepseek_v3", "qwen3_5"])
def test_fp8_checkpoint(kind: str, tmp_path: Path) -> None:
    """Split and sorted after unpacking: transformers' logits for the same weights unpacked."""
    model = save_twin(kind, tmp_path)
    assert EngineArgs(str(tmp_path / "fp8")).spec.storage.method == "fp8"
    limit = 2e-4 if kind == "qwen3_5" else 1e-4
    ours = logits(tmp_path / "fp8")
    torch.testing.assert_close(ours, reference_logits(model, IDS), atol=limit, rtol=0)


def test_transformers_unpacks_the_same(tmp_path: Path) -> None:
    """transformers' code for the format, on shapes that are multiples of 128, as published models are."""
    packed, _, _ = quantize(tmp_path, hidden_size=256, intermediate_size=384, num_attention_heads=8)
    options = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True), "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(packed, **options)
    torch.testing.assert_close(logits(packed), reference_logits(theirs, IDS), atol=1e-4, rtol=0)


def test_modules_that_are_not_converted(tmp_path: Path) -> None:
    """A tensor without a scale is read as it is, listed or not."""
    packed, whole, _ = quantize(tmp_path)
    small, tensors = (load_file(folder / "model.safetensors") for folder in (packed, whole))
    name = "model.layers.1.mlp.down_proj"
    small[f"{name}.weight"] = tensors[f"{name}.weight"]
    del small[f"{name}.weight_scale_inv"]
    save_file(small, packed / "model.safetensors")
    edit_json(packed / "config.json", quantization_config=FP8 | {"modules_to_not_convert": ["lm_head", name]})
    assert logits(packed).equal(logits(whole))


@pytest.mark.parametrize("lost", ["weight", "weight_scale_inv"])
def test_half_a_pair(lost: str, tmp_path: Path) -> None:
    packed, _, _ = quantize(tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{lost}"
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        logits(packed)


REFUSED = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "compressed-tensors, format=float-quantized": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "None": {"bits": 8},
    "weight_block_size=None": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "weight_block_size=[64, 0]": FP8 | {"weight_block_size": [64, 0]},
    "weight_block_size=64": FP8 | {"weight_block_size": "64"},
    "activation_scheme=static": FP8 | {"activation_scheme": "static"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a tensor is opened, with what to do instead."""
    folder = tmp_path / "whole"
    save_checkpoint("qwen3", folder, **SHAPE)
    edit_json(folder / "config.json", quantization_config=REFUSED[name])
    opened = []
    monkeypatch.setattr(atom_mini.loading, "safe_open", lambda *a, **k: opened.append(a))
    with pytest.raises(ValueError) as error:
        LLM(str(folder), device="cpu", num_kvcache_blocks=8)
    assert name in str(error.value) and "in 16 bits" in str(error.value) and not opened


def test_the_layout_of_transformers() -> None:
    """transformers' unpacking of MXFP4 gives the same bits in the same orientation."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    g = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=g).byte()
    scales = torch.randint(100, 140, (3, 8, 4), generator=g).byte()
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert same_bits(quantized.read_mxfp4(lambda p: blocks, lambda p: scales, Storage("mxfp4")).contiguous(), theirs)


def save_gpt_oss(tmp_path: Path, **options: int) -> tuple[Path, Path]:
    """Two checkpoints of the same numbers, the experts whole and in MXFP4."""
    whole, packed = tmp_path / "whole", tmp_path / "mxfp4"
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96}
    save_family("gpt_oss", whole, **sizes | options)
    shutil.copytree(whole, packed)
    tensors, g = load_file(whole / "model.safetensors"), torch.Generator().manual_seed(0)
    small = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj") and ".experts." in n]:
        count, size, rows = tensors[name].shape
        blocks = torch.randint(0, 256, (count, rows, size // 32, 16), generator=g).byte()
        scales = torch.randint(122, 125, blocks.shape[:3], generator=g).byte()
        tensors[name] = plain_mxfp4(blocks, scales).mT.float().contiguous()
        del small[name]
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    assert len(small) > len(tensors)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    save_file(small, packed / "model.safetensors", {"format": "pt"})
    edit_json(packed / "config.json", quantization_config=MXFP4)
    return whole, packed


def test_gpt_oss(tmp_path: Path) -> None:
    """Experts in MXFP4: the logits of the same experts stored whole, exactly, and transformers' to 1e-4."""
    whole, packed = save_gpt_oss(tmp_path)
    ours = logits(packed)
    assert ours.equal(logits(whole))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager").eval()
    torch.testing.assert_close(ours, reference_logits(theirs, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["GLM-4.5", "gpt-oss in MXFP4"])
def test_every_number_is_read_once(kind: str, tmp_path: Path) -> None:
    """Whatever tensors the file's are split into: an expert is read without the others."""
    if kind == "GLM-4.5":
        save_family("glm4_moe", tmp_path, **GLM)
    else:
        _, tmp_path = save_gpt_oss(tmp_path)
    read = Counter[str]()

    def counted(file: Path, name: str, part: Any = None) -> torch.Tensor:
        found = read_tensor(file, name, part)
        read[name] += found.numel()
        return found

    files = checkpoint_files(tmp_path).items()
    readers = {name: partial(counted, file, name) for name, file in files}
    for reader in load(tmp_path).weight_readers(readers).values():
        reader()
    tensors = load_file(tmp_path / "model.safetensors")
    assert read == {name: tensor.numel() for name, tensor in tensors.items()}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in the interpreter")
@pytest.mark.slow
def test_gpt_oss_stays_packed(tmp_path: Path) -> None:
    """With a kernel that reads MXFP4 the experts stay packed; the logits are those of unpacked ones."""
    found, rooms = [], {"device": "cpu", "attention": "triton", "dtype": "bfloat16", "num_kvcache_blocks": 8}
    for folder in save_gpt_oss(tmp_path, num_hidden_layers=2):
        with LLM(str(folder), **rooms) as llm, recorded(llm) as recorder:  # type: ignore[arg-type]
            llm.generate([IDS[:9]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
            model: Any = llm.engine_core.runner.model  # type: ignore[attr-defined]
        found.append(([row for _, row in sorted(recorder.every.items())], model))
    (whole, plain), (packed, small) = found
    spread = torch.stack(whole).std()
    assert spread > 0.5 and (torch.stack(whole) - torch.stack(packed)).abs().max() < 0.02 * spread
    sizes = [sum(w.nbytes for w in m.model.layers[0].mlp.gate_up.parameters() if w.dim() > 1) for m in (plain, small)]
    assert sizes[1] == sizes[0] * 4.25 / 16
    report = describe(EngineArgs(str(tmp_path / "mxfp4"), **rooms))  # type: ignore[arg-type]
    assert report["weight_bytes"] == sum(w.nbytes for w in small.parameters())
