"""quantization="int8": the logits of a float64 model that rounds alike, from floats and from files in int8, in torch and
compiled; refusals by name."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, recorded, save_checkpoint, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.cpu import int8_model
from atom_mini.cpu.int8_model import Int8Linear, quantize_rows

INT8: dict[str, Any] = {"quantization": "int8", "device": "cpu", "num_kvcache_blocks": 100}
HALF = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": HALF | {"strategy": "channel", "dynamic": False},
    "input_activations": HALF | {"strategy": "token", "dynamic": True},
}
STORED = {  # as llm-compressor writes it, less what nobody needs to know
    "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 48}),
}
IDS = [(7 * i * i + 3) % 300 for i in range(30)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_bytes_and_floats_give_the_same_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with instructions for products of bytes, and on others; a NaN stays in its row."""
    x, w = torch.randn(rows, 576), torch.randint(-127, 128, (200, 576), dtype=torch.int8)
    (codes, _), found = quantize_rows(x, int8_model.largest_code(576)), []
    layer = Int8Linear(int8_model.Linear(576, {"w": 200}))
    layer.weight.copy_(w)
    layer.weight_scale.fill_(1)
    x[1:2, 5], x[2:3] = torch.nan, 0
    for has_bytes in (True, False):
        monkeypatch.setattr(int8_model, "HAS_BYTES", has_bytes)
        sums = codes.double() @ w.double().T
        torch.testing.assert_close(int8_model.multiply_bytes(codes, w).double(), sums, rtol=1e-6, atol=2e-6 * 2**31)
        found.append(layer(x))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5 * 127, equal_nan=True)
    assert found[0][1:2].isnan().all() and found[0][2:].isfinite().all()


@pytest.mark.parametrize("size", [576, 2048, 14336])
def test_the_largest_sum_fits_into_32_bits(size: int) -> None:
    """In torch and compiled: all weights and all activations are the largest."""
    x, wanted = torch.ones(2, size), torch.full((2, 8), 127.0 * size)
    layer = Int8Linear(int8_model.Linear(size, {"w": 8}))
    layer.weight.fill_(127)
    layer.weight_scale.fill_(1)
    torch.testing.assert_close(layer(x), wanted)
    if find_spec("numba") is not None:
        from atom_mini.cpu.compiled_loops import matmul

        ones, bias, found = np.ones(8, "f4"), np.zeros(8, "f4"), np.empty((2, 8), "f4")
        matmul(np.zeros(16, "i8"), 1, x.numpy(), layer.weight.numpy(), bias, found, ones)
        torch.testing.assert_close(torch.from_numpy(found), wanted)


def nearest(x: Tensor, largest: int = 127) -> Tensor:
    """The numbers that codes of up to `largest` mean."""
    step = x.abs().amax(-1, keepdim=True) / largest
    return (x / step).round() * step


class Rounding(nn.Module):
    """A transformers layer in float64 that rounds weights and inputs by the definition."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias, weight = layer.bias, layer.weight.double()
        self.weight = nearest(weight)

    def forward(self, x: Tensor) -> Tensor:
        out = nearest(x, int8_model.largest_code(x.shape[-1])) @ self.weight.T
        return out if self.bias is None else out + self.bias


@torch.inference_mode()
def exact_logits(model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] float64 of a transformers model whose layers round as ours."""
    model = model.double()  # what is a `Rounding` already stays one
    if isinstance(model.lm_head, nn.Linear):
        table = nearest(model.model.embed_tokens.weight)
        model.lm_head = Rounding(model.lm_head)
        model.model.embed_tokens.weight = nn.Parameter(table)
    for layer in model.model.layers:
        for half in (layer.self_attn, layer.mlp):
            for name, child in [*half.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(half, name, Rounding(child))
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def logits(folder: Path, **options: Any) -> Tensor:
    """Ours [30, vocabulary], all of them of one prompt."""
    with LLM(str(folder), **INT8 | options) as llm, recorded(llm) as recorder:
        llm.generate([IDS], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    return torch.stack([row for (_, i), row in sorted(recorder.every.items()) if i < len(IDS)])


def check(found: Tensor, exact: Tensor) -> None:
    """They agree to a few steps of 15 bits: where a number is next to the middle between two codes, float32 may take the other
    one, and all later numbers are a little different."""
    apart = (found - exact).abs().amax(-1) / exact.std()
    assert apart.median() < 1e-3 and apart.max() < 5e-3, apart


@pytest.mark.parametrize("name", ["qwen3", "llama, biases"])
def test_the_logits_are_those_of_a_float64_model_that_rounds_alike(name: str, tmp_path: Path) -> None:
    kind, shape = CASES[name]
    model = save_checkpoint(kind, tmp_path, num_hidden_layers=2, **shape)
    plain = logits(tmp_path, quantization=None)
    found = logits(tmp_path)
    exact = exact_logits(model, IDS)
    check(found, exact)
    assert (plain - exact).abs().median() > 30 * (found - exact).abs().median()


def store(folder: Path, home: Path, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """The same weights in int8, as compressed-tensors stores them, and as the floats that these mean."""
    tensors = load_file(folder / "model.safetensors")
    small, whole = dict(tensors), dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes, scales = quantize_rows(tensors[name])
        small[name], small[f"{name}_scale"] = codes.to(torch.int8), scales.to(dtype)
        whole[name] = codes * scales.to(dtype).float()
    for kind, weights in (("int8", small), ("whole", whole)):
        shutil.copytree(folder, home / kind)
        save_file(weights, home / kind / "model.safetensors", {"format": "pt"})
    edit_json(home / "int8" / "config.json", quantization_config=STORED)
    return home / "int8", home / "whole"


def test_a_file_in_int8(tmp_path: Path) -> None:
    """Kept as it is, with the bits of its floats rounded while they are loaded; without the option, unpacked to floats."""
    kind, shape = CASES["llama, biases"]
    save_checkpoint(kind, tmp_path / "float", num_hidden_layers=2, **shape)
    stored, whole = store(tmp_path / "float", tmp_path)
    assert logits(stored).equal(logits(tmp_path / "float"))
    assert logits(stored, quantization=None).equal(logits(whole, quantization=None))
    with LLM(str(stored), **INT8) as llm:
        model = llm.engine_core.runner.model
        layers = [m for m in model.modules() if isinstance(m, Int8Linear)]
        assert len(layers) == 9 and all(m.weight.dtype == torch.int8 for m in layers)  # with the head
        assert model.model.embed_tokens.weight.dtype == torch.int8


BROKEN: dict[str, dict[str, Any]] = {
    "asymmetric": {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | {"symmetric": False}}}},
    "static activations": {"config_groups": {"group_0": GROUP | {"input_activations": {"dynamic": False}}}},
    "no groups": {"config_groups": None},
    "rounded outputs": {"config_groups": {"group_0": GROUP | {"output_activations": GROUP["input_activations"]}}},
    "rotated activations": {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}},
    "a cache in eight bits": {"kv_cache_scheme": HALF},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_config_asks_for_is_never_ignored(name: str, tmp_path: Path) -> None:
    """What changes the numbers and is not computed here is refused before the weights are opened."""
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    edit_json(tmp_path / "config.json", quantization_config=STORED)
    assert EngineArgs(str(tmp_path), device="cpu", quantization="int8").spec.model_type == "qwen3"
    edit_json(tmp_path / "config.json", quantization_config=STORED | BROKEN[name])
    with pytest.raises(ValueError, match=r"quant_method=compressed-tensors, format=int-quantized.* is not supported"):
        EngineArgs(str(tmp_path), device="cpu", quantization="int8")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization": "int4"}, r"quantization='int4' must be 'int8'"),
    ({"attention": "triton"}, "attention='triton' does not go with quantization='int8': set it to 'torch'"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with quantization='int8': set it to 1"),
    ({"device": None}, "is for a CPU, not for device=None: set device='cpu', or leave it out"),
]


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=str)
def test_it_is_refused_by_name(options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "device" in options)  # then there is a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=match):
        EngineArgs("tiny", **{"device": "cpu", "quantization": "int8"} | options)


def test_other_layers_and_other_files_are_refused(tmp_path: Path) -> None:
    small = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    save_family("qwen3_moe", tmp_path / "qwen3_moe", **small)
    save_checkpoint("qwen3", tmp_path / "fp8", num_hidden_layers=1)
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_json(tmp_path / "fp8" / "config.json", quantization_config=how)
    slides = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    save_checkpoint("qwen2", tmp_path / "windows", num_hidden_layers=2, **slides)
    for name in ("qwen3_moe", "fp8", "windows"):
        with pytest.raises(ValueError, match=f"quantization='int8' .*{name}.*leave it out"):
            EngineArgs(str(tmp_path / name), device="cpu", quantization="int8")


def test_the_built_in_model_keeps_its_texts() -> None:
    asked = ["12 + 7 =", "Ada lives in Rome. Ben likes plums. Mia has a red cat. What does Mia have?"]
    with LLM("tiny", **INT8) as llm:
        outs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert [out.text for out in outs] == [" 19", " Mia has a red cat."]


def test_a_head_drafts_for_it() -> None:
    """An EAGLE-3 head shares the embedding, whose codes are no dtype to compute in."""
    params, asked = SamplingParams(temperature=0, max_tokens=16), ["12 + 7 =", "Once upon a time"]
    drafts = {"method": "eagle3", "num_speculative_tokens": 3}
    with LLM("tiny", **INT8) as plain, LLM("tiny", **INT8, speculative_config=drafts) as llm:
        wanted, found = (one.generate(asked, params, use_tqdm=False) for one in (plain, llm))
        assert [out.text for out in found] == [out.text for out in wanted]
        assert llm.engine_core.scheduler.spec_stats.accepted.total() > 0


compiled = pytest.mark.skipif(find_spec("numba") is None, reason="Numba is not installed")


@compiled
def test_compiled_logits_are_those_of_the_float64_model(tmp_path: Path) -> None:
    """Of prompts of one token, so that all of it is compiled: 12 rows in one step."""
    from test_compiled import poison, run

    kind, shape = CASES["qwen2"]
    model = save_checkpoint(kind, tmp_path, num_hidden_layers=2, **shape)
    asked = [[i] for i in range(1, 13)]
    with LLM(str(tmp_path), compiled=True, kv_cache_block_size=3, **INT8) as llm:
        assert type(llm.engine_core.runner).__name__ == "CompiledRunner"
        poison(llm)
        found, tokens = run(llm, asked, GREEDY)
    texts = [a + b for a, b in zip(asked, tokens, strict=True)]
    rows = [exact_logits(model, text) for text in texts]
    keys = sorted(found)
    check(torch.stack([found[key] for key in keys]), torch.stack([rows[i][n - 1] for i, n in keys]))


@compiled
@pytest.mark.skipif("x86" not in os.uname().machine and "amd64" not in os.uname().machine, reason="those of x86")
@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    """Compiled for a processor without AVX-512: the logits are torch's, and products in int8, float32 and bfloat16 are not
    computed in another order for fewer rows."""
    from test_compiled import python

    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    code = """
import sys
import folders
import numpy as np
from test_compiled import SMALL, largest_difference, prompts, run
from atom_mini import LLM
from atom_mini.cpu.compiled_loops import LANES, matmul
found = []
for compiled in (False, True):
    with LLM(sys.argv[1], compiled=compiled, kv_cache_block_size=3, **SMALL) as llm:
        found.append(run(llm, prompts(0, 9)))
assert found[0][1] == found[1][1] and largest_difference(found[0][0], found[1][0]) < 2e-5
draw = np.random.default_rng(0)
for inputs, outputs in ((64, 16), (192, 124)):
    codes, scales = draw.integers(-127, 128, (outputs, inputs), "i1"), draw.random(outputs, "f4")
    x, bias = draw.standard_normal((11, inputs)).astype("f4"), draw.standard_normal(outputs).astype("f4")
    floats = draw.standard_normal((outputs, inputs)).astype("f4")
    short = (floats.view("u4") >> 16).astype("u2")  # bfloat16
    for w, each in ((codes, scales), (floats, None), (short, None)):
        found = np.empty((11, outputs), "f4")
        matmul(np.zeros(16, "i8"), 3, x, w, bias, found, each)
        for rows in range(1, 11):
            part = np.empty((rows, outputs), "f4")
            matmul(np.zeros(16, "i8"), 8, x[:rows], w, bias, part, each)
            assert np.array_equal(part, found[:rows]), (w.dtype, inputs, rows)
print(LANES)
"""
    shape = {"attention_bias": True, "mlp_bias": True, "head_dim": 48, "initializer_range": 64**-0.5}
    save_checkpoint("llama", tmp_path / "model", num_hidden_layers=2, **shape)
    names = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(code, str(tmp_path / "model"), **names) == "8\n"
