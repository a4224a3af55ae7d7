"""A checkpoint that is incomplete, broken or of another kind is refused by name; a whole one is read once."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import edit_json, save_checkpoint, spec_of
from safetensors.torch import load_file, save_file

import atom_mini
import atom_mini.loading
import atom_mini.models
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.checkpoint import ModelRegistry, ModelSpec, read_dense, read_rope, read_spec
from atom_mini.loading import load_model
from atom_mini.memory import kvcache_block_bytes

torch.set_num_threads(1)  # products this small are done before a second thread is awake
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a5e\nsize 1192135096\n"
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two whole checkpoints: of one file, and of several with an index."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("single", "sharded")}
    save_checkpoint("qwen3", folders["single"], **SHAPE)
    save_checkpoint("qwen3", folders["sharded"], max_shard_size="60KB", **SHAPE)
    return folders


@pytest.fixture
def single(saved: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved["single"], tmp_path / "single")


@pytest.fixture
def sharded(saved: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(saved["sharded"], tmp_path / "sharded")


def refusal(folder: Path | str, **options: Any) -> str:
    """The one line with which the checkpoint is refused."""
    with pytest.raises(ValueError) as caught:
        LLM(str(folder), **{"device": "cpu", "num_kvcache_blocks": 8, **options})
    assert type(caught.value) is ValueError, f"a {type(caught.value).__name__} says nothing to a user"
    message = str(caught.value)
    assert "\n" not in message
    return message


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("kind", "size"), [("single", None), ("sharded", 0), ("single", 100), ("sharded", -1)]
)
def test_partial_file(kind: str, size: int | None, saved: dict[str, Path], tmp_path: Path) -> None:
    """What an interrupted download or a clone without git-lfs leaves."""
    folder = shutil.copytree(saved[kind], tmp_path / "checkpoint")
    file = sorted(folder.glob("*.safetensors"))[-1]
    content = LFS_POINTER.encode() if size is None else file.read_bytes()[:size]
    file.write_bytes(content)
    message = refusal(folder)
    assert "partial download or LFS pointer" in message
    assert file.name in message and f"{len(content)} bytes" in message


def test_missing_shards_and_weights_of_shards(sharded: Path) -> None:
    """The index promises a tensor that the shard does not hold, then a shard that is not there."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][UP]
    save_file({name: tensor for name, tensor in load_file(file).items() if name != UP}, file)
    assert UP in refusal(sharded)
    file.unlink()
    assert file.name in refusal(sharded) and "1 shard" in refusal(sharded)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", None), ("config.json", "["), ("config.json", "[]"),
     ("generation_config.json", LFS_POINTER), ("model.safetensors.index.json", "{}"),
     ("model.safetensors.index.json", '{"weight_map": {"model.norm.weight": 7}}'),
     ("tokenizer.json", '{"model": '), ("tokenizer_config.json", '{"model": '),
     ("tokenizer.json", '{"model": {"type": "nobody knows"}}')],
)  # fmt: skip
def test_broken_json(name: str, content: str | None, single: Path) -> None:
    """Missing, cut off, of another kind: the file is named."""
    (single / name).unlink(missing_ok=True)
    if content is not None:
        (single / name).write_text(content)
    found = refusal(single)
    assert name in found or f"the tokenizer in {single} cannot be read" in found


def spoiled(weight: torch.Tensor, value: float) -> torch.Tensor:
    """The same weight with one other number."""
    weight = weight.clone()
    weight.view(-1)[3] = value
    return weight


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, Any]], list[str]]] = {
    "missing": (lambda w: {UP: None}, ["lacks 1 weight", UP]),
    "extra": (
        lambda w: {BIAS: torch.zeros(64), "score.weight": torch.zeros(2, 64)},
        ["2 weight(s)", BIAS, "score.weight"],
    ),
    "renamed": (
        lambda w: {NORM: None, "model.final_norm.weight": w[NORM]},
        [f"lacks 1 weight(s): {NORM}", "place for: model.final_norm.weight"],
    ),
    "one number": (lambda w: {NORM: torch.ones(1)}, [NORM, "[1]", "[64]"]),  # would be broadcast
    "transposed": (lambda w: {UP: w[UP].T.contiguous()}, [UP, "[64, 96]", "[96, 64]"]),
    "a row short": (lambda w: {UP: w[UP][:-1].clone()}, [UP, "[95, 64]", "[96, 64]"]),
    "NaN": (lambda w: {UP: spoiled(w[UP], float("nan"))}, [UP, "NaN or inf"]),
    "inf": (lambda w: {NORM: spoiled(w[NORM], -float("inf"))}, [NORM, "NaN or inf"]),
    "large": (lambda w: {NORM: spoiled(w[NORM], 1e5)}, [NORM, "torch.float16", "set dtype"]),
    "whole numbers": (lambda w: {UP: (w[UP] * 100).long()}, [UP, "torch.int64", "scales"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_weights_that_are_not_the_models(case: str, single: Path) -> None:
    """Missing, without a place, of another shape or type, not finite: each by its name. And the
    default dtype is as before."""
    file = single / "model.safetensors"
    change, words = CHANGES[case]
    weights = load_file(file)
    changed = weights | change(weights)
    save_file({name: weight for name, weight in changed.items() if weight is not None}, file)
    message = refusal(single, dtype="float16")
    assert all(word in message for word in words), message
    assert torch.get_default_dtype() is torch.float32
    if case == "large":
        LLM(str(single), device="cpu", num_kvcache_blocks=8, dtype="bfloat16").close()


def test_what_old_checkpoints_have_besides(tmp_path: Path) -> None:
    """A tied matrix that is there twice, of which the embedding counts, and rotary buffers."""
    model = save_checkpoint("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights |= {"lm_head.weight": torch.zeros_like(embedding)}
    weights |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(weights, tmp_path / "model.safetensors")
    device = torch.device("cpu")
    ours = load_model(spec_of(model.config), tmp_path, 64, device, torch.float32)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(ours.compute_logits(hidden), hidden @ embedding.T, atol=1e-4, rtol=0)


def test_pickle_is_refused(single: Path) -> None:
    """A folder with only `pytorch_model.bin` is not loaded."""
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "no model.safetensors" in refusal(single)


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ("config.json", {"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ("config.json", {"layer_types": ["full_attention", "sliding_attention"],
                         "sliding_window": 32}, "sliding"),
        ("config.json", {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}, "'dynamic'.*yarn"),
        ("config.json", {"rope_parameters": LINEAR | {"rope_theta": "x"}}, "rope_theta='x'"),
        ("config.json", {"rope_parameters": LINEAR | {"rope_type": ["linear"]}}, "rope_type="),
        ("config.json", {"rope_parameters": LINEAR | {"factor": 0}}, "factor=0"),
        ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ("config.json", {"hidden_size": "64"}, "hidden_size='64'"),
        ("config.json", {"vocab_size": True}, "vocab_size=True"),
        ("config.json", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ("config.json", {"architectures": [3]}, r"architectures=\[3\]"),
        ("config.json", {"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\]"),
        ("config.json", LLAMA | {"num_attention_heads": 5}, "refused by transformers"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2'"),
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_cannot_be_computed(
    file: str, changes: dict[str, Any], words: str, single: Path
) -> None:
    """File, field and value are named, before a weight is read."""
    edit_json(single / file, **changes)
    (single / "model.safetensors").write_text(LFS_POINTER)
    message = refusal(single)
    assert re.search(words, message), message
    assert "pointer" not in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers with .*sliding"),
        ({"use_sliding_window": True}, "layers with sliding-window attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_the_evenings_reader_refuses_what_its_model_does_not_compute(
    changes: dict[str, Any], words: str, single: Path
) -> None:
    """Without the families, which read more."""
    from transformers import AutoConfig

    edit_json(single / "config.json", **{"sliding_window": 32, "max_window_layers": 1} | changes)
    with pytest.raises(ValueError, match=words):
        read_dense(AutoConfig.from_pretrained(single))


def test_remote_code_is_not_run(single: Path) -> None:
    """Python files of a checkpoint stay unread, whatever its config asks for."""
    for name in ("configuration_x.py", "modeling_x.py", "tokenization_x.py"):
        (single / name).write_text(f"open({str(single / 'exploded')!r}, 'w')\nclass X: pass\n")
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit_json(single / "config.json", auto_map=code)
    edit_json(single / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    with contextlib.suppress(ValueError):  # refusing is as good
        LLM(str(single), device="cpu", num_kvcache_blocks=8).close()
    assert not (single / "exploded").exists()


def test_source_neither_pickles_nor_trusts() -> None:
    """Nowhere in the package."""
    for file in set(Path(atom_mini.models.__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))  # what is said in a message does nothing
        used = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute | ast.Name | ast.alias)}
        used |= {str(n.arg) for n in nodes if isinstance(n, ast.keyword)}
        used |= {str(n.module) for n in nodes if isinstance(n, ast.ImportFrom)}
        found = used & {"trust_remote_code", "pickle", "torch.load"}
        assert not found, f"{file.name}: {found}"


def test_a_program_registers_a_model_of_its_own(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class overrides what differs: here no layer has an MLP, and the file's weights for them are left out."""

    class Quiet(atom_mini.models.CausalLM):
        def make_mlp(self, layer: int) -> torch.nn.Module:
            return torch.nn.Identity()

        def weight_readers(self, readers: dict[str, Any]) -> dict[str, Any]:
            return {name: read for name, read in readers.items() if ".mlp." not in name}

    class QuietSpec(ModelSpec):
        pass

    monkeypatch.setitem(atom_mini.models.MODELS, QuietSpec, Quiet)
    monkeypatch.setattr(ModelRegistry, "readers", dict(ModelRegistry.readers))
    ModelRegistry.register_model("QuietForCausalLM", lambda cfg, raw: read_spec(cfg, QuietSpec))
    edit_json(single / "config.json", architectures=["QuietForCausalLM"])
    with LLM(str(single), device="cpu", num_kvcache_blocks=8) as llm:
        runner: Any = llm.engine_core.runner
        assert type(runner.model) is Quiet
        assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(ValueError, match=r"quantization='int8' does not support the layers"):  # ours would replace its class
        EngineArgs(str(single), device="cpu", quantization="int8")


def test_rope_of_older_configs(single: Path) -> None:
    """`rope_scaling` and `rope_theta`, as configs before transformers 5 have them, mean the same."""
    parameters = {"rope_theta": 5e3, "rope_type": "linear", "factor": 2.0}
    edit_json(single / "config.json", rope_parameters=parameters)
    new = EngineArgs(str(single)).spec
    edit_json(
        single / "config.json", rope_parameters=None, rope_theta=5e3, rope_scaling={"type": "linear", "factor": 2.0}
    )
    old = EngineArgs(str(single)).spec
    ours = [load_model(c, single, 64, torch.device("cpu"), torch.float32).model.rotary.cos for c in (new, old)]
    assert torch.equal(*ours)
    cfg = SimpleNamespace(max_position_embeddings=64)
    with pytest.raises(ValueError, match="neither rope_parameters nor rope_theta"):
        read_rope(cfg)
    cfg.rope_theta, cfg.rope_scaling = 5e5, {"type": "linear", "factor": 2.0}
    assert read_rope(cfg)["rope_type"] == "linear" and read_rope(cfg)["rope_theta"] == 5e5


@pytest.mark.parametrize("how", ["offline", "nobody answers"])
def test_hub_id_that_cannot_be_fetched(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line, and at once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    message = refusal("nobody/has-such-a-model")
    assert "'nobody/has-such-a-model'" in message and "'tiny'" in message
    assert "'not a/hub/id'" in refusal("not a/hub/id")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """A CPU computes in float32 unless asked; weights are converted once, while they are copied."""
    save_checkpoint("llama", tmp_path, num_hidden_layers=1, dtype=dtype)
    for asked, wanted in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        with LLM(str(tmp_path), device="cpu", dtype=asked, num_kvcache_blocks=8) as llm:
            runner: Any = llm.engine_core.runner
            assert {w.dtype for w in runner.model.parameters()} == {wanted} == {runner.kv_cache.dtype}
            assert len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("said", "ends", "sampling"),
    [
        ({"eos_token_id": [7, 250]}, (7, 250), {"temperature": 0, "top_k": 0}),
        ({"eos_token_id": 7, "do_sample": True}, (7,), {}),
        ({"eos_token_id": []}, (), {"temperature": 0, "top_k": 0}),
        ({"eos_token_id": None, "do_sample": True, "temperature": None}, (11,), {}),
        ({"do_sample": None, "temperature": 0.5}, (11,), {"temperature": 0, "top_k": 0}),
        (None, (11,), {"temperature": 0, "top_k": 0}),
    ],
    ids=str,
)
def test_end_tokens_and_sampling_of_generation_config(
    said: dict[str, Any] | None, ends: tuple[int, ...], sampling: dict[str, Any], single: Path
) -> None:
    """What it leaves out is transformers' default; one that does not sample is greedy. Without an
    end token the model's config decides."""
    from transformers import GenerationConfig

    edit_json(single / "config.json", eos_token_id=11)
    file = single / "generation_config.json"
    file.unlink(missing_ok=True)
    if said is not None:
        file.write_text(json.dumps(said))
    theirs = GenerationConfig._get_default_generation_params() | {"min_p": 0.0}
    config = EngineArgs(str(single))
    wanted = {name: theirs[name] for name in config.sampling_defaults}
    assert (config.eos_token_ids, config.sampling_defaults) == (ends, wanted | sampling)


def num_blocks(folder: Path | str, **options: Any) -> int | None:
    with LLM(str(folder), device="cpu", **options) as llm:
        return llm.config.num_kvcache_blocks


def test_the_size_of_the_pool(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free, at most 4 GiB, at most what is of use; or what is asked for, up to all
    that is free. Bytes free and bytes needed are both named."""
    needed = kvcache_block_bytes(EngineArgs(str(single)).spec, 16, torch.float32)
    assert needed == 2 * 2 * 2 * 16 * 16 * 4  # K and V, 2 layers, 2 heads of 16 numbers of 4 bytes
    assert num_blocks("tiny") == 8 * 2048 // 16  # eight contexts
    assert num_blocks("tiny", max_model_len=64) == 16384 // 16  # the tokens of a step
    assert num_blocks("tiny", max_model_len=64, max_num_seqs=3) == 3 * 4
    free = [2 * (needed - 1)]
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: free[0])
    message = refusal(single, num_kvcache_blocks=None)
    assert f"{needed - 1} bytes" in message and str(needed) in message
    free[0] = 64 * needed
    assert num_blocks(single) == 32 and num_blocks(single, num_kvcache_blocks=64) == 64
    message = refusal(single, num_kvcache_blocks=65)
    assert str(65 * needed) in message and "65 block(s)" in message
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", 20 * needed)
    assert num_blocks(single) == 20


