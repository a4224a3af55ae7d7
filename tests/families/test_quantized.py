"""Packed weights are unpacked lazily, by their formats; other formats are refused before a file is opened."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import (
    CONFIGS,
    edit_json,
    measure_loading,
    recorded,
    reference_logits,
    save_checkpoint,
    save_family,
    spec_of,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import atom_mini.families.quantized as quantized
import atom_mini.loading
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.families.quantized import dequantize_fp8, dequantize_mxfp4, unpack
from atom_mini.families.specs import Storage
from atom_mini.loading import load_model, read_tensor
from atom_mini.options.info import describe

# As in config.json of Qwen/Qwen3-8B-FP8, less the list of modules that were not converted.
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "tie_word_embeddings": False}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
IDS = [(7 * i * i + 3) % 300 for i in range(30)]


def plain_value(byte: int, high: bool) -> float:
    code = byte // 16 if high else byte % 16
    return -VALUES[code - 8] if code >= 8 else VALUES[code]


def plain_mxfp4(blocks: Tensor, scales: Tensor, bias: int = 127, high_first: bool = False) -> Tensor:
    """[..., G, 16], [..., G] -> [..., 32 G] in float64, number by number. The options plant an error."""
    low = torch.tensor([plain_value(b, high_first) for b in range(256)], dtype=torch.float64)
    high = torch.tensor([plain_value(b, not high_first) for b in range(256)], dtype=torch.float64)
    both = torch.stack([low[blocks.long()], high[blocks.long()]], -1).flatten(-2)
    return (both * torch.pow(2.0, scales.double() - bias)[..., None]).flatten(-2)


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


def every_pair() -> tuple[Tensor, Tensor]:
    """All bytes with all scales: blocks [256, 16, 16], scales [256, 16]."""
    blocks = torch.arange(256).byte().view(16, 16).expand(256, 16, 16)
    return blocks, torch.arange(256).byte()[:, None].expand(256, 16)


def test_all_codes_and_scales() -> None:
    """256 bytes x 255 scales, bit by bit; 2^-128 is below the smallest normal bfloat16, and exact all the same."""
    blocks, scales = (t[:255] for t in every_pair())
    ours, wanted = dequantize_mxfp4(blocks, scales), plain_mxfp4(blocks, scales)
    assert same_bits(ours, wanted.to(torch.bfloat16))
    fits = wanted.abs() < 2.0**128  # beyond it there is only infinity
    assert ours.double()[fits].equal(wanted[fits]) and ours[~fits].isinf().all()
    assert ours[0].unique()[-3:].double().tolist() == [3 * 2.0**-127, 4 * 2.0**-127, 6 * 2.0**-127]


def test_scale_255_is_nan() -> None:
    blocks, scales = every_pair()
    assert dequantize_mxfp4(blocks[255], scales[255]).isnan().all()


@pytest.mark.parametrize("wrong", [{"bias": 126}, {"high_first": True}], ids=str)
def test_planted_errors_of_mxfp4(wrong: dict[str, Any]) -> None:
    blocks, scales = (t[100:150] for t in every_pair())
    ours = dequantize_mxfp4(blocks, scales).double()
    assert ours.equal(plain_mxfp4(blocks, scales))
    assert not ours.equal(plain_mxfp4(blocks, scales, **wrong))


@pytest.mark.parametrize("shape", [(2880,), (6, 2880), (2, 3, 96), (0, 64)], ids=str)
def test_shapes_of_mxfp4(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    rows = [*shape[:-1], shape[-1] // 32]
    blocks, scales = (torch.randint(0, 255, s, generator=g).byte() for s in ([*rows, 16], rows))
    ours = dequantize_mxfp4(blocks, scales)
    assert ours.shape == shape and same_bits(ours, plain_mxfp4(blocks, scales).to(torch.bfloat16))
    transposed = dequantize_mxfp4(blocks.flip(-2).contiguous().flip(-2), scales)  # strides do not matter
    assert same_bits(transposed, ours)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[4, 2, 8\].*\[4, 2, 16\]"):
        dequantize_mxfp4(torch.zeros(4, 2, 8).byte(), torch.zeros(4, 2).byte())
    packed, _ = to_fp8(torch.randn(300, 130))
    for grid, block in ((torch.ones(2, 3), (128, 128)), (torch.ones(3, 2), (64, 128)), (torch.ones(()), (128, 128))):
        with pytest.raises(ValueError, match=r"300, 130"):
            dequantize_fp8(packed, grid, block)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 192), (128, 128), (1, 1), (384, 192), (129, 511), (256, 256)], ids=str)
def test_fp8_formula(shape: tuple[int, int], kind: torch.dtype) -> None:
    torch.manual_seed(0)
    packed, grid = to_fp8(torch.randn(shape) * torch.logspace(-2, 2, shape[1]))
    before, grid = packed.clone(), grid.to(kind)
    ours = dequantize_fp8(packed, grid)
    assert ours.dtype == torch.float32 and ours.equal(plain_fp8(packed, grid))
    assert packed.view(torch.uint8).equal(before.view(torch.uint8))


def test_other_block_sizes() -> None:
    packed, grid = to_fp8(torch.randn(100, 70), 32)
    assert dequantize_fp8(packed, grid, (32, 32)).equal(plain_fp8(packed, grid, 32))
    wide = torch.rand(100, 3)  # 1 x 32
    wanted = packed.float() * wide.repeat_interleave(32, 1)[:, :70]
    assert dequantize_fp8(packed, wide, (1, 32)).equal(wanted)


def test_planted_errors_of_fp8() -> None:
    """A transposed grid of scales is refused where its shape shows it, and gives other numbers where it does not."""
    packed, grid = to_fp8(torch.randn(256, 256) * torch.logspace(0, 3, 256))
    assert not dequantize_fp8(packed, grid.T).equal(plain_fp8(packed, grid))
    packed, grid = to_fp8(torch.randn(384, 256))
    with pytest.raises(ValueError, match="scales"):
        dequantize_fp8(packed, grid.T)


@pytest.mark.parametrize("kind", ["int8", "float8_e5m2"])
def test_weights_of_other_types_are_refused(kind: str) -> None:
    weight = torch.ones(128, 128).to(getattr(torch, kind))
    with pytest.raises(ValueError, match=f"weights in torch.{kind} are not supported"):
        dequantize_fp8(weight, torch.ones(1, 1))


@pytest.mark.parametrize("kind", ["uint8", "float8_e8m0fnu"])
def test_e8m0_scales_are_refused(kind: str) -> None:
    packed, grid = to_fp8(torch.randn(128, 128))
    if not hasattr(torch, kind):
        pytest.skip(f"this torch has no {kind}")
    with pytest.raises(ValueError, match=kind):
        dequantize_fp8(packed, grid.to(getattr(torch, kind)))


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"size": 32}),
        ("qwen2", {}),
        ("llama", {"attention_bias": True}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "head_dim": 32}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:20],
)
def test_fp8_checkpoint(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its logits equal those of the same weights stored unpacked, and transformers' for these to 1e-4."""
    packed, whole, model = quantize(tmp_path, kind, **options)
    assert EngineArgs(str(packed)).spec.storage.method == "fp8"
    ours = logits(packed)
    assert ours.equal(logits(whole))
    torch.testing.assert_close(ours, reference_logits(model, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("error", ["transposed", "inverse", "none", "size by shape"])
def test_planted_errors_in_a_checkpoint(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices these errors."""
    packed, _, model = quantize(tmp_path, num_attention_heads=8)  # q_proj: 2 x 2 squares
    right = dequantize_fp8
    wrong: dict[str, Callable[..., Tensor]] = {
        "transposed": lambda w, s, b: right(w, s.T.contiguous() if s.shape[0] == s.shape[1] else s, b),
        "inverse": lambda w, s, b: right(w, 1 / s, b),
        "none": lambda w, s, b: right(w, torch.ones_like(s), b),
        "size by shape": lambda w, s, b: right(w, s, [-(-n // k) for n, k in zip(w.shape, s.shape, strict=True)]),
    }
    assert (logits(packed) - reference_logits(model, IDS)).abs().max() < 1e-4
    monkeypatch.setattr(quantized, "dequantize_fp8", wrong[error])
    assert (logits(packed) - reference_logits(model, IDS)).abs().max() > 1e-2


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
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors, format=float-quantized": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "quark": {"quant_method": "quark"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
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


def test_the_rest_of_the_config_is_still_checked(tmp_path: Path) -> None:
    packed, _, _ = quantize(tmp_path)
    edit_json(packed / "config.json", layer_types=None, hidden_act="gelu")
    with pytest.raises(ValueError, match="gelu"):
        logits(packed)


def test_reading_changes_no_config(tmp_path: Path) -> None:
    packed, _, _ = quantize(tmp_path)
    cfg = transformers.AutoConfig.from_pretrained(packed)
    before = dict(vars(cfg))
    assert spec_of(cfg).storage.block == tuple(FP8["weight_block_size"])
    assert vars(cfg) == before and cfg.quantization_config == FP8


@pytest.mark.slow
def test_peak_memory(tmp_path: Path) -> None:
    """Loading takes a tensor or two in addition to the weights. Reading the whole file first would take 66 MB."""
    shape = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 512}
    packed, _, _ = quantize(tmp_path, **shape | {"num_hidden_layers": 24, "head_dim": 64})
    measured = measure_loading(packed)
    assert measured["peak"] < 1.1 * measured["weights"] + 16 * 2**20, measured  # 18 MiB more for a file that is whole


def test_unpacking_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, whole, _ = quantize(tmp_path)
    with caplog.at_level(logging.INFO, logger="atom_mini"):
        for folder in (whole, packed):
            model = load_model(EngineArgs(str(folder)).spec, folder, 64, torch.device("cpu"), torch.float32)
            assert len(caplog.records) == (folder is packed)
    (record,) = caplog.records
    scales = [name for name in load_file(packed / "model.safetensors") if name.endswith("_scale_inv")]
    assert model and record.getMessage() == f"{len(scales)} weights are unpacked as they are read"


# Experts in MXFP4, as gpt-oss stores them

EXPERTS, OUT, IN = 5, 12, 96
NAME = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def experts(tmp_path: Path) -> tuple[dict[str, Any], Tensor, list]:
    """The loader's readers of a file with one packed tensor, what they should make [E, in, out], and what was read."""
    g, reads = torch.Generator().manual_seed(0), []
    tensors = {f"{NAME}_blocks": torch.randint(0, 256, (EXPERTS, OUT, IN // 32, 16), generator=g).byte()}
    tensors |= {f"{NAME}_scales": torch.randint(110, 130, (EXPERTS, OUT, IN // 32), generator=g).byte()}
    tensors |= {f"{NAME}_bias": torch.randn(EXPERTS, OUT).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")

    def reader(name: str) -> Callable[..., Tensor]:
        def read(part: Any = None) -> Tensor:
            tensor = read_tensor(tmp_path / "model.safetensors", name, part)
            reads.append((name, tensor.numel()))
            return tensor

        return read

    wanted = plain_mxfp4(tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]).mT.to(torch.bfloat16)
    return {name: reader(name) for name in tensors}, wanted, reads


@pytest.mark.parametrize("part", [None, 0, 4, slice(1, 3), slice(4, 5), slice(3, None), slice(None)], ids=str)
def test_parts_of_experts(part: Any, experts: tuple) -> None:
    """A part selects from the 16-bit layout, and other experts are not read."""
    readers, wanted, reads = experts
    adapted = unpack(readers, Storage("mxfp4"))
    assert adapted.keys() == {NAME, f"{NAME}_bias"} and not reads
    ours = adapted[NAME]() if part is None else adapted[NAME](part)
    assert same_bits(ours, wanted if part is None else wanted[part])
    count = 1 if isinstance(part, int) else EXPERTS if part is None else len(range(EXPERTS)[part])
    assert sum(n for name, n in reads if name.endswith("_blocks")) == count * OUT * IN // 2


def test_other_tensors_stay(experts: tuple) -> None:
    readers, _, _ = experts
    bias = f"{NAME}_bias"
    adapted = unpack(readers, Storage("mxfp4"))
    assert adapted[bias]().equal(readers[bias]()) and adapted[bias](slice(2)).equal(readers[bias](slice(2)))


def test_blocks_without_scales(experts: tuple) -> None:
    """Blocks without scales keep their name, which the loader refuses; scales without blocks are refused."""
    readers, _, _ = experts
    alone = {name: read for name, read in readers.items() if not name.endswith("_scales")}
    adapted = unpack(alone, Storage("mxfp4"))
    assert f"{NAME}_blocks" in adapted
    with pytest.raises(ValueError, match="without scales"):
        adapted[f"{NAME}_blocks"]()
    alone = {name: read for name, read in readers.items() if not name.endswith("_blocks")}
    with pytest.raises(ValueError, match=f"{NAME}_scales"):
        unpack(alone, Storage("mxfp4"))


def test_the_layout_of_transformers() -> None:
    """transformers' unpacking of MXFP4 gives the same bits in the same orientation."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    g = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=g).byte()
    scales = torch.randint(100, 140, (3, 8, 4), generator=g).byte()
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert same_bits(quantized.read_mxfp4(lambda p: blocks, lambda p: scales, Storage("mxfp4")).contiguous(), theirs)


def test_tiny_in_fp8(tmp_path: Path) -> None:
    """The built-in model has 192 columns; its texts survive eight bits."""
    from atom_mini.checkpoint import resolve_model

    folder = shutil.copytree(resolve_model("tiny"), tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=FP8)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == FP8
    with LLM(str(folder), device="cpu") as llm:
        out = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0]
    assert len(out.token_ids) == 24 and out.text.startswith(" there was a")


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
    for folder, model in zip(("whole", "mxfp4"), (plain, small), strict=True):  # as `info` says it
        report = describe(EngineArgs(str(tmp_path / folder), **rooms))  # type: ignore[arg-type]
        assert report["weight_bytes"] == sum(w.nbytes for w in model.parameters())
        assert report["parameters"] == sum(w.numel() for w in plain.parameters())
    again = {n: w for n, w in small.named_parameters() if n.endswith("mlp.down.weight")}
    stored = load_file(tmp_path / "mxfp4" / "model.safetensors")
    for name, weight in again.items():
        blocks = stored[name.replace("mlp.down.weight", "mlp.experts.down_proj_blocks")]
        assert weight.equal(blocks.flatten(2).flatten(0, 1))
