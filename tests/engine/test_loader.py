"""A checkpoint that is incomplete, broken or of another kind is refused by name; a whole one is read once."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import edit_json, save_checkpoint, spec_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import atom_mini
import atom_mini.loading
import atom_mini.models
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.checkpoint import SECOND_COPIES, WANTED, ModelRegistry, ModelSpec, read_spec
from atom_mini.loading import load_model, open_file
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


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of the single file; `None` removes one."""
    file = folder / "model.safetensors"
    tensors = {name: t for name, t in (load_file(file) | changes).items() if t is not None}
    save_file(tensors, file)


def test_whole_checkpoints_load(single: Path, sharded: Path) -> None:
    """Both kinds, and to the same weights; nothing below means anything otherwise."""
    assert len(list(sharded.glob("*.safetensors"))) > 2
    texts = []
    for folder in (single, sharded):
        with LLM(str(folder), device="cpu", num_kvcache_blocks=8) as llm:
            texts.append(llm.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=0))[0].token_ids)
    assert texts[0] == texts[1]


def test_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(sharded) and "1 shard" in refusal(sharded)


@pytest.mark.parametrize("kind", ["single", "sharded"])
@pytest.mark.parametrize("content", ["pointer", "empty", "header cut", "data cut", "one byte cut", "noise"])
def test_partial_file(kind: str, content: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """What an interrupted download or a clone without git-lfs leaves."""
    folder = shutil.copytree(saved[kind], tmp_path / "checkpoint")
    file = sorted(folder.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    parts = {
        "pointer": LFS_POINTER.encode(),
        "empty": b"",
        "header cut": whole[:100],
        "data cut": whole[: len(whole) // 2],
        "one byte cut": whole[:-1],
        "noise": bytes(range(256)) * 8,
    }
    file.write_bytes(parts[content])
    message = refusal(folder)
    assert "partial download or LFS pointer" in message
    assert file.name in message and f"{len(parts[content])} bytes" in message


@pytest.mark.parametrize("content", ["", "{", LFS_POINTER, "{}", "[]"])
def test_broken_index(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(sharded)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", '{"architectures": ', LFS_POINTER, "[]"])
def test_broken_config(name: str, content: str, single: Path) -> None:
    (single / name).write_text(content)
    assert name in refusal(single)


UP, BIAS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({UP: None}, ["lacks 1 weight", UP]),
        ({BIAS: torch.zeros(64), "score.weight": torch.zeros(2, 64)}, ["2 weight(s)", BIAS, "score.weight"]),
        (
            {"model.norm.weight": None, "model.final_norm.weight": torch.ones(64)},
            ["lacks 1 weight(s): model.norm.weight", "has 1 weight(s)", "place for: model.final_norm.weight"],
        ),
        ({"model.norm.weight": torch.ones(1)}, ["model.norm.weight"]),  # would be broadcast
        ({"model.norm.weight": torch.ones(1, 64)}, ["model.norm.weight"]),
    ],
    ids=["missing", "extra", "renamed", "one number", "one row"],
)
def test_weights_that_are_not_the_models(changes: dict[str, Any], words: list[str], single: Path) -> None:
    rewrite(single, **changes)
    message = refusal(single)
    assert all(word in message for word in words), message


def test_missing_weight_of_a_shard(sharded: Path) -> None:
    """The index promises a tensor that the shard does not hold."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    file = sharded / index["weight_map"][UP]
    save_file({name: tensor for name, tensor in load_file(file).items() if name != UP}, file)
    assert UP in refusal(sharded)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_misshaped_weight(name: str, single: Path) -> None:
    """Transposed, or one row short: `copy_` would broadcast or fail without a name."""
    tensor = load_file(single / "model.safetensors")[name]
    for wrong in (tensor.T.contiguous(), tensor[:-1].clone(), tensor[:1].clone()):
        rewrite(single, **{name: wrong})
        message = refusal(single)
        assert name in message and str(list(wrong.shape)) in message and str(list(tensor.shape)) in message


def test_other_class_of_the_family(single: Path, tmp_path: Path) -> None:
    """Qwen3's weights as Llama (no q/k norm): a peer loads them, and the logits are wrong."""
    edit_json(single / "config.json", architectures=["LlamaForCausalLM"], model_type="llama")
    assert re.search(r"(q|k)_norm", refusal(single))
    other = tmp_path / "llama"
    save_checkpoint("llama", other, **SHAPE)
    edit_json(other / "config.json", architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert re.search(r"(q|k)_norm", refusal(other))


def test_pickle_is_refused(single: Path) -> None:
    """A folder with only `pytorch_model.bin` is not loaded, and the file not even opened."""
    (single / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (single / "exploded",))

    torch.save({"model.norm.weight": Bomb()}, single / "pytorch_model.bin")
    assert "model.safetensors" in refusal(single)
    assert not (single / "exploded").exists()


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


@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "GPT2LMHeadModel", "BertModel", "Qwen3ForCausalLMX"]
)
def test_unknown_architecture(architecture: str, single: Path) -> None:
    edit_json(single / "config.json", architectures=[architecture])
    message = refusal(single)
    assert architecture in message and all(name in message for name in ModelRegistry.readers)


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


def test_config_without_architectures(single: Path) -> None:
    edit_json(single / "config.json", architectures=None, model_type="gpt2")
    assert "gpt2" in refusal(single)


def test_no_config(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("rope", ["longrope", "dynamic", "proportional"])
def test_unknown_rope_type(rope: str, single: Path) -> None:
    extra = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8} if rope == "longrope" else {}
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    edit_json(single / "config.json", rope_parameters=parameters | extra)
    message = refusal(single)
    assert repr(rope) in message and "yarn" in message


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
    factors = {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    edit_json(single / "config.json", rope_scaling={"type": "longrope", "factor": 2.0, **factors})
    assert "'longrope'" in refusal(single)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, "sliding"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant"),
        ({"hidden_act": "gelu"}, "gelu"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_feature_that_is_not_computed(changes: dict[str, Any], word: str, single: Path) -> None:
    """What the decoder does not compute is refused before weights are read, not ignored."""
    edit_json(single / "config.json", **changes)
    (single / "model.safetensors").write_text(LFS_POINTER)
    assert word in refusal(single)


@pytest.mark.parametrize("how", ["offline", "nobody answers"])
def test_hub_id_that_cannot_be_fetched(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line, and at once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    start = time.perf_counter()
    message = refusal("nobody/has-such-a-model")
    assert "'nobody/has-such-a-model'" in message and "'tiny'" in message
    assert time.perf_counter() - start < 20
    assert "'not a/hub/id'" in refusal("not a/hub/id")


def test_hub_id_in_the_cache(single: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was downloaded once is found offline."""
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(single, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with LLM("someone/small", device="cpu", num_kvcache_blocks=8) as llm:
        assert len(llm.generate([1], SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize(("eos", "wanted"), [([7, 250], (7, 250)), (7, (7,)), ([], ()), (None, (11,))])
def test_eos_ids_of_generation_config(eos: Any, wanted: tuple[int, ...], single: Path) -> None:
    """All of a list count; without one the model's config decides."""
    edit_json(single / "config.json", eos_token_id=11)
    edit_json(single / "generation_config.json", eos_token_id=eos)
    assert EngineArgs(str(single)).eos_token_ids == wanted


def test_null_in_generation_config_says_nothing(single: Path) -> None:
    """A file that writes `null` for a field leaves it to the model's config, and to the default."""
    edit_json(single / "config.json", eos_token_id=11)
    path = single / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": None, "do_sample": True, "temperature": None}))
    config = EngineArgs(str(single))
    assert config.eos_token_ids == (11,) and config.sampling_defaults["temperature"] == 1


def test_unsaid_sampling_is_transformers(single: Path) -> None:
    """A checkpoint that samples and says nothing more samples as in transformers; one that does not sample is greedy, and
    a request with a temperature of its own is filtered by nothing that nobody has asked for."""
    from transformers import GenerationConfig

    theirs = GenerationConfig._get_default_generation_params()  # its constructor leaves them None, since transformers 5
    theirs["min_p"] = 0.0  # it has none, which is off
    (single / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    ours = EngineArgs(str(single)).sampling_defaults
    assert ours == {name: theirs[name] for name in ours} and ours["top_k"] == 50
    for said in ({}, {"do_sample": False}, {"do_sample": None, "temperature": 0.5}):
        (single / "generation_config.json").write_text(json.dumps(said))
        assert EngineArgs(str(single)).sampling_defaults == ours | {"temperature": 0, "top_k": 0}


def test_no_generation_config(single: Path) -> None:
    (single / "generation_config.json").unlink(missing_ok=True)
    edit_json(single / "config.json", eos_token_id=[3, 4])
    config = EngineArgs(str(single))
    assert config.eos_token_ids == (3, 4) and config.sampling_defaults["temperature"] in (0.0, 1.0)


def block_bytes(folder: Path, size: int = 16) -> int:
    return kvcache_block_bytes(EngineArgs(str(folder)).spec, size, torch.float32)


def test_block_bytes(single: Path) -> None:
    """Keys and values, 2 layers, 2 heads of 16 numbers of 4 bytes; the pool has as many."""
    assert block_bytes(single) == 2 * 2 * 2 * 16 * 16 * 4
    with LLM(str(single), device="cpu", num_kvcache_blocks=5) as llm:
        pool = llm.engine_core.runner.kv_cache  # type: ignore[attr-defined]
        assert pool.numel() * pool.element_size() == 5 * block_bytes(single)


def test_pool_too_small_for_one_block(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes free and bytes needed, both."""
    needed = block_bytes(single)
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 2 * (needed - 1))
    message = refusal(single, num_kvcache_blocks=None)
    assert f"{needed - 1} bytes" in message and str(needed) in message and "kv_cache_block_size" in message
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 2 * needed)
    with LLM(str(single), device="cpu") as llm:
        assert llm.config.num_kvcache_blocks == 1


def test_pool_larger_than_memory(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = block_bytes(single)
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 100 * needed)
    message = refusal(single, num_kvcache_blocks=101)
    assert str(101 * needed) in message and "101 block(s)" in message and "num_kvcache_blocks" in message
    assert str(2**50 * needed) in refusal(single, num_kvcache_blocks=2**50)


def test_pool_by_itself(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is free, at most 4 GiB, at most what max_num_seqs sequences of max_model_len tokens can use."""
    needed = block_bytes(single)
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 64 * needed)
    assert num_blocks(single) == 32
    assert num_blocks(single, max_num_seqs=2, max_model_len=100) == 2 * 7
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 2**50)
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", 50 * needed)
    assert num_blocks(single) == 50


def test_pool_is_no_larger_than_it_is_useful() -> None:
    """On a CPU a few full contexts, or the tokens of a step if these are more: for the built-in model 1,024 blocks."""
    assert num_blocks("tiny") == 8 * 2048 // 16 == 1024
    assert num_blocks("tiny", max_num_batched_tokens=2048) == 1024  # eight contexts
    assert num_blocks("tiny", max_model_len=64) == 1024  # a step's 16,384 tokens
    assert num_blocks("tiny", max_model_len=64, max_num_seqs=3) == 3 * 4
    assert num_blocks("tiny", num_kvcache_blocks=3000) == 3000


def num_blocks(folder: Path | str, **options: Any) -> int | None:
    with LLM(str(folder), device="cpu", **options) as llm:
        return llm.config.num_kvcache_blocks


@pytest.mark.parametrize("same", [True, False])
def test_tied_checkpoint_that_stores_the_head_too(same: bool, tmp_path: Path) -> None:
    """Some authors save the tied matrix twice; the config says that it is one, so the embedding's counts."""
    model = save_checkpoint("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone() if same else torch.zeros_like(embedding)
    rewrite(tmp_path, **{"lm_head.weight": head})
    ours = load_model(spec_of(model.config), tmp_path, 64, torch.device("cpu"), torch.float32)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(ours.compute_logits(hidden), hidden @ embedding.T, atol=1e-4, rtol=0)


def test_rotary_buffers_of_old_checkpoints_are_skipped(single: Path) -> None:
    rewrite(single, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    LLM(str(single), device="cpu", num_kvcache_blocks=8).close()


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_each_weight_is_read_once(kind: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()

    class Counting:
        def __init__(self, file: Path, **options: Any) -> None:
            self.inner = safe_open(file, **options)

        def __enter__(self) -> Counting:
            self.inner.__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self.inner.__exit__(*exc)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            reads[name] += 1
            return self.inner.get_tensor(name)

    monkeypatch.setattr(atom_mini.loading, "safe_open", Counting)
    LLM(str(saved[kind]), device="cpu", num_kvcache_blocks=8).close()
    stored = {name for file in saved[kind].glob("*.safetensors") for name in load_file(file)}
    assert reads == Counter(stored)


def test_every_weight_reaches_the_model(saved: dict[str, Path]) -> None:
    """Nothing is left as memory happened to be: the model's numbers are the file's, all of them."""
    config = EngineArgs(str(saved["single"]))
    with torch.device("cpu"):
        model = atom_mini.models.CausalLM(config.spec, 64, atom_mini.models.TorchOps())
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    atom_mini.loading.load_weights(model, saved["single"])
    stored = load_file(saved["single"] / "model.safetensors")
    assert not any(weight.isnan().any() for weight in model.parameters())
    ours = sum(weight.double().sum().item() for weight in model.parameters())
    assert ours == pytest.approx(sum(t.double().sum().item() for t in stored.values()), abs=1e-9)
    assert sum(w.numel() for w in model.parameters()) == sum(t.numel() for t in stored.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    """A CPU computes in float32 unless asked; weights are converted once, while they are copied."""
    save_checkpoint("llama", tmp_path, num_hidden_layers=1, dtype=dtype)
    for asked, wanted in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        with LLM(str(tmp_path), device="cpu", dtype=asked, num_kvcache_blocks=8) as llm:
            runner: Any = llm.engine_core.runner
            assert {w.dtype for w in runner.model.parameters()} == {wanted} == {runner.kv_cache.dtype}
            assert len(llm.generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3


def test_loading_leaves_no_trace(single: Path) -> None:
    """The default dtype is as before, also when loading fails."""
    LLM(str(single), device="cpu", dtype="bfloat16", num_kvcache_blocks=8).close()
    assert torch.get_default_dtype() is torch.float32
    (single / "model.safetensors").write_text(LFS_POINTER)
    refusal(single, dtype="bfloat16")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("changes", [{"num_attention_heads": 5}, {"rope_parameters": {"rope_type": "yarn"}}])
def test_config_that_contradicts_itself(changes: dict[str, Any], saved: dict[str, Path], tmp_path: Path) -> None:
    """What transformers refuses is refused in one line, too, with the file's name."""
    folder = shutil.copytree(saved["single"], tmp_path / "llama")
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    edit_json(folder / "config.json", **llama, **changes)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ("config.json", {"max_position_embeddings": -1}, "max_position_embeddings=-1"),
        ("config.json", {"num_key_value_heads": -1}, "num_key_value_heads=-1"),
        ("config.json", {"hidden_size": "64"}, "hidden_size='64'"),
        ("config.json", {"vocab_size": True}, "vocab_size=True"),
        ("config.json", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta='x'"),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
        ("config.json", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "factor='2'"),
        ("config.json", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "factor=0"),
        ("config.json", {"rope_parameters": {"rope_type": ["linear"], "rope_theta": 1e4}}, r"rope_type=\['linear'\]"),
        ("config.json", {"architectures": {"a": 1}}, "architectures={'a': 1}"),
        ("config.json", {"architectures": 3}, "architectures=3"),
        ("config.json", {"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM'"),
        ("config.json", {"architectures": [3]}, r"architectures=\[3\]"),
        ("config.json", {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ("config.json", {"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\]"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id=-1"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id='2'"),
    ],
)
def test_fields_that_say_the_impossible(file: str, changes: dict[str, Any], words: str, single: Path) -> None:
    """File, field and value are named, before anything is loaded."""
    edit_json(single / file, **changes)
    message = refusal(single)
    assert file in message and re.search(words, message), message


def test_an_index_with_a_number_for_a_file(sharded: Path) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map={"model.norm.weight": 7})
    message = refusal(sharded)
    assert "model.safetensors.index.json" in message and "('model.norm.weight', 7)" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_has_broken_off(name: str, tmp_path: Path) -> None:
    """The realistic partial download: which file, and that it is not valid JSON."""
    tiny = Path(atom_mini.__file__).parent / "tiny"
    folder = shutil.copytree(tiny, tmp_path / "tiny", ignore=shutil.ignore_patterns("eagle3"))
    (folder / name).write_text((folder / name).read_text()[:99])
    assert f"{folder / name} is not valid JSON" in refusal(folder)
    (folder / name).write_text('{"model": {"type": "nobody knows"}}')
    if name == "tokenizer.json":  # JSON, and no tokenizer
        assert f"the tokenizer in {folder} cannot be read" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers(name: str, value: float, single: Path) -> None:
    weight = load_file(single / "model.safetensors")[name].clone()
    weight.view(-1)[len(weight) // 2] = value
    rewrite(single, **{name: weight})
    message = refusal(single)
    assert name in message and str(single) in message and "NaN or inf" in message


def test_a_weight_that_does_not_fit_its_dtype(single: Path) -> None:
    """Finite in the file, inf in float16."""
    norm = load_file(single / "model.safetensors")["model.norm.weight"].clone()
    norm[3] = 1e5
    rewrite(single, **{"model.norm.weight": norm})
    message = refusal(single, dtype="float16")
    assert "model.norm.weight" in message and "torch.float16" in message and "dtype" in message
    LLM(str(single), device="cpu", num_kvcache_blocks=8, dtype="bfloat16").close()


def test_a_weight_of_whole_numbers(single: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(single, **{name: (load_file(single / "model.safetensors")[name] * 100).long()})
    message = refusal(single)
    assert name in message and "torch.int64" in message


ROWS = """
import sys, torch
from atom_mini.models import Linear
from atom_mini.cpu.products import pack
with torch.no_grad():
    layers = [Linear(192, {"a": n}) for n in (512, 1024)]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        pack(layer)
    def held():
        return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
    most = torch.randn(1500, 192)
    [layer(most) for layer in layers]
    before = held()
    for n in range(1, 1501):
        [layer(most[:n]) for layer in layers]
    print(held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read a process's memory from")
@pytest.mark.slow
def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    """oneDNN keeps code for each; 1,500 of them took 1.9 GB."""
    done = subprocess.run([sys.executable, "-c", ROWS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200, f"{done.stdout} MiB"


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each cause asks for something else: a license, another name, a mirror."""
    from huggingface_hub import errors

    (tmp_path / "my-qwen").mkdir()
    (tmp_path / "my-qwen" / "config.json").touch()
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 401})()
    http = {"response": response}
    causes = {
        "meta/Llama": (errors.GatedRepoError("no", **http), r"gated: accept its license at .*/meta/Llama.* HF_TOKEN$"),
        "tinny": (errors.RepositoryNotFoundError("no", **http), "not a folder, and not a model .* did you mean 'tiny'"),
        f"{tmp_path}/my-qwem": (errors.HFValidationError("no"), "did you mean '.*/my-qwen'"),
        "Qwen/Qwen3": (errors.LocalEntryNotFoundError("no"), r"cannot be reached: set HF_ENDPOINT .*make real`"),
        "a/b": (OSError("No space left\non device"), "could not be fetched from the hub: OSError: No space left$"),
    }
    for model, (error, said) in causes.items():
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
        assert re.search(said, refusal(model)), refusal(model)


def test_no_second_copy_of_the_weights_is_downloaded() -> None:
    """Whose names the hub's client matches with `*` for slashes, too."""
    from huggingface_hub.utils import filter_repo_objects

    whole = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    twice = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors", "fp16/model.safetensors"]
    patterns = {"allow_patterns": WANTED, "ignore_patterns": SECOND_COPIES}
    assert [*filter_repo_objects([*whole, *twice], **patterns)] == whole


def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CPUs has no GPU on any machine."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(r"set device to one of cpu, or install a torch for GPUs \(this is \d", refusal("tiny", device="cuda"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.safetensors \(0 bytes\) is not a complete safetensors file"):
        open_file(tmp_path / "gone.safetensors")
