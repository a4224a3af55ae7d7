"""quantization="int8": the logits of a float64 model that rounds alike, from floats and from files in int8, in torch and
compiled; refusals by name."""

from __future__ import annotations

import os
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, is_empty, recorded, save_checkpoint, save_family
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.cpu import int8_model
from atom_mini.cpu.int8 import Int8Spec
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


@pytest.mark.parametrize("rows", [0, 1, 3, 33])
def test_bytes_and_floats_give_the_same_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with instructions for products of bytes, and on others; a NaN stays in its row."""
    x, w = torch.randn(rows, 576), torch.randint(-127, 128, (200, 576), dtype=torch.int8)
    (codes, _), found = quantize_rows(x), []
    layer = Int8Linear(int8_model.Linear(576, {"w": 200}))
    layer.weight.copy_(w)
    layer.weight_scale.fill_(1)
    x[1:2, 5] = torch.nan
    for has_bytes in (True, False):
        monkeypatch.setattr(int8_model, "HAS_BYTES", has_bytes)
        assert torch.equal(int8_model.multiply_bytes(codes, w).long(), codes.long() @ w.long().T)
        found.append(layer(x))
    assert torch.equal(found[0].nan_to_num(7), found[1].nan_to_num(7))
    assert found[0][1:2].isnan().all() and found[0][2:].isfinite().all()


class Rounding(nn.Module):
    """A transformers layer in float64 that rounds weights and inputs by the definition."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias, weight = layer.bias, layer.weight.double()
        self.weight = self.nearest(weight)

    @staticmethod
    def nearest(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step

    def forward(self, x: Tensor) -> Tensor:
        out = self.nearest(x) @ self.weight.T
        return out if self.bias is None else out + self.bias


@torch.inference_mode()
def exact_logits(model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] float64 of a transformers model whose layers round as ours."""
    model = model.double()  # what is a `Rounding` already stays one
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
    """Nearly all tokens agree as float32 does. In a few, a number was next to the middle between two codes."""
    apart = (found - exact).abs().amax(-1) / exact.std()
    assert apart.median() < 2e-5 and apart.max() < 0.2, apart


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_a_float64_model_that_rounds_alike(name: str, tmp_path: Path) -> None:
    kind, shape = CASES[name]
    model = save_checkpoint(kind, tmp_path, num_hidden_layers=2, **shape)
    plain = logits(tmp_path, quantization=None)
    found = logits(tmp_path)
    exact = exact_logits(model, IDS)
    check(found, exact)
    assert (plain - exact).abs().median() > 1000 * (found - exact).abs().median()


def test_a_layer_is_the_sum_of_whole_numbers() -> None:
    """Codes, scales, and products, for numbers of any size; rows of zeros; and what is not a number stays that."""
    from atom_mini.models import Linear

    torch.manual_seed(1)
    x, w = torch.randn(9, 600) * torch.logspace(-20, 20, 9)[:, None], torch.randn(70, 600)
    x[4], w[5] = 0, 0
    layer = Int8Linear(Linear(600, {"up_proj": 70}, bias=True))
    codes, scales = quantize_rows(w)
    for target, value in ((layer.weight, codes), (layer.weight_scale, scales), (layer.bias, torch.zeros(70))):
        target.copy_(value)
    inner, outer = quantize_rows(x)
    assert inner.abs().amax(-1).tolist() == [127] * 4 + [0] + [127] * 4 and inner.equal(inner.round())
    assert ((inner * outer - x).abs() <= 0.5001 * outer).all()
    exact = (inner.long() @ codes.long().T).double() * outer.double() * scales.double().T
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-6, atol=0)
    x[0, 3], x[1, 7] = torch.nan, torch.inf
    assert (~layer(x).isfinite()).all(-1).tolist() == [True] * 2 + [False] * 7


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


@pytest.mark.parametrize("name", CASES)
def test_a_file_in_int8(name: str, tmp_path: Path) -> None:
    """Kept as it is, with the bits of its floats rounded while they are loaded; without the option, unpacked to floats."""
    kind, shape = CASES[name]
    save_checkpoint(kind, tmp_path / "float", num_hidden_layers=2, **shape)
    stored, whole = store(tmp_path / "float", tmp_path)
    assert logits(stored).equal(logits(tmp_path / "float"))
    assert logits(stored, quantization=None).equal(logits(whole, quantization=None))
    with LLM(str(stored), **INT8) as llm:
        model = llm.engine_core.runner.model
        layers = [m for m in model.modules() if isinstance(m, Int8Linear)]
        assert len(layers) == 8 and all(m.weight.dtype == torch.int8 for m in layers)
        assert model.head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.float32


def test_scales_in_16_bits_and_layers_that_are_not_converted(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "float", num_hidden_layers=2)
    stored, whole = store(tmp_path / "float", tmp_path, torch.bfloat16)
    assert logits(stored, quantization=None).equal(logits(whole, quantization=None))
    tensors, name = load_file(stored / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    before = logits(stored)
    tensors[name] = load_file(whole / "model.safetensors")[name]
    del tensors[f"{name}_scale"]
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    apart = (logits(stored) - before).abs().max()
    assert 0 <= apart < 0.05 * before.std()  # its scale was rounded to 16 bits


WRONG: dict[str, dict[str, Any]] = {
    "asymmetric": {"weights": GROUP["weights"] | {"symmetric": False}},
    "a scale per group": {"weights": GROUP["weights"] | {"strategy": "group", "group_size": 128}},
    "four bits": {"weights": GROUP["weights"] | {"num_bits": 4}},
    "static activations": {"input_activations": GROUP["input_activations"] | {"dynamic": False, "strategy": "tensor"}},
    "weights alone": {"input_activations": None},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_formats_of_compressed_tensors_are_refused(name: str, tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    edit_json(tmp_path / "config.json", quantization_config=STORED | {"config_groups": {"group_0": GROUP | WRONG[name]}})
    for option in (None, "int8"):
        with pytest.raises(ValueError, match="quant_method=compressed-tensors, format=int-quantized is not supported"):
            EngineArgs(str(tmp_path), device="cpu", quantization=option)


BROKEN: dict[str, dict[str, Any]] = {
    "no groups": {"config_groups": None},
    "a list of groups": {"config_groups": [GROUP]},
    "a named scheme": {"config_groups": {"W8A8": ["Linear"]}},
    "an empty group": {"config_groups": {"group_0": None}},
    "a rule that is a word": {"config_groups": {"group_0": GROUP | {"weights": "int8"}}},
    "rounded outputs": {"config_groups": {"group_0": GROUP | {"output_activations": GROUP["input_activations"]}}},
    "a group in another format": {"config_groups": {"group_0": GROUP | {"format": "pack-quantized"}}},
    "rotated activations": {"transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}},
    "a cache in eight bits": {"kv_cache_scheme": HALF},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_config_asks_for_is_never_ignored(name: str, tmp_path: Path) -> None:
    """What changes the numbers and is not computed here, and groups that are none, are refused before the weights are opened."""
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=1)
    group = GROUP | {"output_activations": None, "format": "int-quantized"}
    usual = STORED | {"transform_config": {}, "config_groups": {"group_0": group}}
    edit_json(tmp_path / "config.json", quantization_config=usual)
    assert EngineArgs(str(tmp_path), device="cpu", quantization="int8").spec.model_type == "qwen3"
    edit_json(tmp_path / "config.json", quantization_config=usual | BROKEN[name])
    for option in (None, "int8"):
        with pytest.raises(ValueError, match=r"quant_method=compressed-tensors, format=int-quantized.* is not supported"):
            EngineArgs(str(tmp_path), device="cpu", quantization=option)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_codes_of_another_type_are_refused(kind: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path / "float", num_hidden_layers=1)
    stored, _ = store(tmp_path / "float", tmp_path)
    tensors, name = load_file(stored / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(kind)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj\.weight is torch\.\w+: quantization='int8' needs int8 next to its weight_scale"):
        LLM(str(stored), **INT8)
    del tensors[f"{name}_scale"]
    tensors[name] = tensors[name].to(torch.uint8)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj\.weight is torch\.uint8: quantization='int8' needs 16 or 32 bits without one"):
        LLM(str(stored), **INT8)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization": "int4"}, r"quantization='int4' must be 'int8'"),
    ({"attention": "triton"}, "attention='triton' does not go with quantization='int8': set it to 'torch'"),
    ({"fuse_layers": True}, "does not go with"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with quantization='int8': set it to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=lambda value: str(value)[:30])
def test_it_is_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EngineArgs("tiny", **{"device": "cpu", "quantization": "int8"} | options)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in (None, "cuda"):
        with pytest.raises(ValueError, match=rf"is for a CPU, not for device={device!r}: set device='cpu', or leave it out"):
            EngineArgs("tiny", device=device, quantization="int8")
    assert type(EngineArgs("tiny", device="cpu", quantization="int8").spec) is Int8Spec


def test_other_layers_and_other_files_are_refused(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path / "moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32)
    with pytest.raises(ValueError, match="does not support the layers of 'qwen3_moe'"):
        EngineArgs(str(tmp_path / "moe"), device="cpu", quantization="int8")
    save_checkpoint("qwen3", tmp_path / "fp8", num_hidden_layers=1)
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_json(tmp_path / "fp8" / "config.json", quantization_config=how)
    with pytest.raises(ValueError, match="does not go with weights stored in fp8: leave it out"):
        EngineArgs(str(tmp_path / "fp8"), device="cpu", quantization="int8")
    slides = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    save_checkpoint("qwen2", tmp_path / "windows", num_hidden_layers=2, **slides)
    with pytest.raises(ValueError, match="quantization='int8' has no sliding windows: leave it out"):
        EngineArgs(str(tmp_path / "windows"), device="cpu", quantization="int8")


def test_the_built_in_model_keeps_its_texts() -> None:
    asked = ["12 + 7 =", "Ada lives in Rome. Ben likes plums. Mia has a red cat. What does Mia have?"]
    with LLM("tiny", **INT8) as llm:
        outs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    assert [out.text for out in outs] == [" 19", " Mia has a red cat."]


compiled = pytest.mark.skipif(find_spec("numba") is None, reason="Numba is not installed")


@compiled
@pytest.mark.parametrize("name", CASES)
def test_compiled_logits_are_those_of_the_float64_model(name: str, tmp_path: Path) -> None:
    """Of prompts of one token, so that all of it is compiled: 12 rows in one step."""
    from test_compiled import poison, run

    kind, shape = CASES[name]
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


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WAYS: dict[str, dict[str, Any]] = {
    "preempted": {}, "overlap": {"overlap": True}, "drafts": {"speculative_config": NGRAM}, "bfloat16": {"dtype": "bfloat16"},
    "turns": {"interleave_decode": True, "max_num_batched_tokens": 8},
    "mixed": {"enable_mixed_steps": True, "max_num_batched_tokens": 8},
    "chunks": {"max_num_batched_tokens": 16, "prefix_cache": "radix"}, "no cache": {"enable_prefix_caching": False},
}  # fmt: skip


def share_alike(ours: list[list[int]], wanted: list[list[int]]) -> float:
    """The share of tokens before the first that differs in its request."""
    alike = 0
    for one, other in zip(ours, wanted, strict=True):
        apart = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        alike += min(apart, default=len(other))
    return alike / sum(map(len, wanted))


@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(2))
def test_compiled_tokens_are_those_of_torch(way: str, seed: int) -> None:
    """With preemption, prefix hits, and drafts, in a pool that held NaN; a second time, with the same tokens. A number in
    the middle between two codes may be rounded either way, after which a text of random prompts can go on otherwise."""
    from test_compiled import prompts

    rng = random.Random(seed)
    asked = [p * rng.choice([1, 1, 3]) for p in prompts(seed, 12, 14)]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.randint(1, 24)) for _ in asked]
    plain = {"compiled": False, "device": "cpu", "num_kvcache_blocks": 200, "quantization": "int8"}
    tight = {"kv_cache_block_size": 4, "num_kvcache_blocks": 18, "max_num_seqs": 6, "compiled": True}
    with LLM("tiny", **plain | {k: v for k, v in WAYS[way].items() if k == "dtype"}) as llm:
        wanted = [list(out.token_ids) for out in llm.generate(asked, params, use_tqdm=False)]
    with LLM("tiny", **plain | tight | WAYS[way]) as llm:
        core = llm.engine_core
        getattr(core.runner, "runner", core.runner).kv_cache.fill_(torch.nan)
        for _ in range(2):
            found = [list(out.token_ids) for out in llm.generate(asked, params, use_tqdm=False)]
            assert share_alike(found, wanted) > 0.9
        assert is_empty(llm) and (core.scheduler.num_preemptions > 0 or way != "preempted")


@compiled
@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_number_of_threads_changes_no_bit(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any logits, in prompts and decodes, and in a second run."""
    monkeypatch.setattr("atom_mini.model_runner.SMALL_STEP", 0)  # even small steps use all threads
    # the head is in float32, and MKL's own products of few rows depend on the number of threads
    monkeypatch.setattr("atom_mini.models.is_intel", lambda: False)
    asked = [[(i * i + n) % 200 for i in range(n)] for n in (1, 40, 150, 3)]
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4, 1):
            torch.set_num_threads(count)
            with LLM("tiny", compiled=is_compiled, **INT8) as llm:
                runner, rows = llm.engine_core.runner, []
                run_model = runner.run_model
                monkeypatch.setattr(runner, "run_model", lambda *a, r=rows, f=run_model: (r.append(f(*a).clone()), r[-1])[1])
                llm.generate(asked, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
            found.append(torch.cat(rows))
    finally:
        torch.set_num_threads(before)
    assert found[0].isfinite().all() and all(each.equal(found[0]) for each in found)


PROCESSORS = {  # compiled for it, and not run: numbers in a vector, and the instruction
    "icelake-server": ("+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni", 16, "vpdpwssd"),
    "haswell": ("+avx,+avx2,+fma", 8, "vpmaddwd"),
}


@compiled
@pytest.mark.skipif("x86" not in os.uname().machine and "amd64" not in os.uname().machine, reason="those of x86")
@pytest.mark.parametrize("name", PROCESSORS)
def test_pairs_become_one_instruction(name: str, tmp_path: Path) -> None:
    from test_compiled import python

    code = """
from numba import types
from atom_mini.cpu.compiled_loops import LANES, code_tile
row, plane = ([types.Array(kind, n, "C") for kind in (types.float32, types.int8, types.int16)] for n in (1, 2))
code_tile.compile((plane[1], row[0], types.int64, plane[2], row[0], types.int64, row[0], plane[0]))
print(LANES, *"".join(code_tile.inspect_asm().values()).split())
"""
    features, lanes, instruction = PROCESSORS[name]
    names = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    used, *words = python(code, **names).split()
    assert int(used) == lanes and words.count(instruction) == 8 and "vpmulld" not in words


@compiled
@pytest.mark.skipif("x86" not in os.uname().machine and "amd64" not in os.uname().machine, reason="those of x86")
@pytest.mark.parametrize("features", ["", "+sse,+sse2,+sse3", "+avx,+avx2,+fma"], ids=["this one's", "SSE", "AVX2"])
def test_a_row_has_the_same_bits_in_every_batch(features: str, tmp_path: Path) -> None:
    """In int8, float32 and bfloat16, with vectors of every width: the compiler may not compute in another order for fewer
    rows."""
    from test_compiled import python

    if "avx2" in features and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    code = """
import numpy as np
from atom_mini.cpu.compiled_loops import linear
draw = np.random.default_rng(0)
for inputs, outputs in ((64, 16), (192, 124)):
    codes, scales = draw.integers(-127, 128, (outputs, inputs), "i1"), draw.random(outputs, "f4")
    x, bias = draw.standard_normal((11, inputs)).astype("f4"), draw.standard_normal(outputs).astype("f4")
    floats = draw.standard_normal((outputs, inputs)).astype("f4")
    short = (floats.view("u4") >> 16).astype("u2")  # bfloat16
    for w, each in ((codes, scales), (floats, None), (short, None)):
        found = np.empty((11, outputs), "f4")
        linear(np.zeros(16, "i8"), 3, x, w, bias, found, each)
        for rows in (1, 2, 5):
            part = np.empty((rows, outputs), "f4")
            linear(np.zeros(16, "i8"), 8, x[:rows], w, bias, part, each)
            assert np.array_equal(part, found[:rows]), (w.dtype, inputs, rows)
print("same")
"""
    names = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features} if features else {}
    assert python(code, **names, NUMBA_CACHE_DIR=str(tmp_path)) == "same\n"


@compiled
def test_a_shape_that_is_not_compiled(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, num_hidden_layers=1, intermediate_size=80)
    assert EngineArgs(str(tmp_path), device="cpu", compiled=True).compiled
    with pytest.raises(ValueError, match=r"compiled=True does not apply: in eight bits, the inputs .*80.* multiples of 32"):
        EngineArgs(str(tmp_path), device="cpu", quantization="int8", compiled=True)


@pytest.mark.slow
def test_without_numba() -> None:
    from test_compiled import python

    code = """
import sys
sys.modules["numba"] = None
from atom_mini import LLM, SamplingParams
with LLM("tiny", device="cpu", num_kvcache_blocks=50, quantization="int8") as llm:
    print(type(llm.engine_core.runner).__name__)
    print(llm.generate("12 + 7 =", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].text)
"""
    assert python(code).split() == ["ModelRunner", "19"]
