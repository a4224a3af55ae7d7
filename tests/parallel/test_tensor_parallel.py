"""A model on several ranks: the same logits, the same tokens on each, and its share of the bytes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint, save_family
from recording import load_recorded_graph
from safetensors.torch import load_file, save_file

pytest.importorskip("msgspec", reason="the extra processes is not installed")
pytest.importorskip("zmq", reason="the extra processes is not installed")

from deployed import EAGLE, SMALL
from show import run_ranks
from side_by_side import SideBySide, in_this_process
from test_families import CASES as MIXTURES
from test_latent import CASES as LATENTS
from test_latent import save_mixture
from test_parity import CASES as PLAIN
from test_parity import assert_parity
from test_quantized import quantize, save_gpt_oss
from test_windows import MODELS as WINDOWS
from test_windows import save as save_windowed
from torch.utils._python_dispatch import _get_current_dispatch_mode

import atom_mini.parallel.ranks as ranks
import atom_mini.parallel.shards as shards
from atom_mini import LLM, Config, EngineArgs, SamplingParams, loading
from atom_mini.families.specs import Experts, FamilySpec
from atom_mini.gpu.graphs import GraphRunner
from atom_mini.options import build
from atom_mini.options.build import bytes_beside
from atom_mini.parallel.engine_process import Ready
from atom_mini.parallel.ranks import Leader, RankManager
from atom_mini.parallel.shards import Group, cut_spec

# What is computed: all ranks in one process


@pytest.fixture
def spread_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on an LLM in `assert_parity` has n ranks, in threads of this process."""

    def spread(n: int, is_dealt: bool = False) -> None:
        options = {"tensor_parallel_size": n, "enable_expert_parallel": is_dealt}
        in_this_process(monkeypatch)
        monkeypatch.setattr("test_parity.LLM", lambda *args, **more: LLM(*args, **options, **more))

    return spread


Save = Callable[..., Any]
ODD = {"vocab_size": 301}
SIX = ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3})


def save_oss(kind: str, folder: Path, **options: Any) -> Any:
    return save_windowed("gpt-oss", folder)


# how it is saved; more options; ranks; whether experts are dealt
MODELS: dict[str, tuple[Save, Any, dict[str, Any], int, bool]] = {
    "qwen3, untied, odd vocabulary": (
        save_checkpoint, PLAIN["qwen3, head_dim 24 of 64/4"], ODD, 2, False,
    ),
    "qwen3, tied, odd vocabulary, biases": (
        save_checkpoint, PLAIN["qwen3, attention bias, tied"], ODD, 4, False,
    ),
    "llama, biases on o and down": (
        save_checkpoint, PLAIN["llama, head_dim 32, biases"], {}, 2, False,
    ),
    "three ranks": (save_checkpoint, SIX, {}, 3, False),
    "Qwen3-MoE, dealt": (save_family, MIXTURES["Qwen3-MoE, dense layers"], {}, 2, True),
    "OLMoE, one norm over all heads": (save_family, MIXTURES["OLMoE, bias"], {}, 2, False),
    "GLM-4.5, groups, partly turned": (save_family, MIXTURES["GLM-4.5, groups"], {}, 2, False),
    "gpt-oss, sinks, dealt": (save_oss, WINDOWS["gpt-oss"], {}, 2, True),
}  # fmt: skip
MORE: dict[str, tuple[Save, Any, dict[str, Any], int, bool]] = {
    "one K/V head for two": (save_checkpoint, PLAIN["llama, one K/V head"], {}, 2, False),
    "Qwen2-MoE, a gated shared expert": (save_family, MIXTURES["Qwen2-MoE"], {}, 2, False),
    "Qwen2-MoE, dealt": (save_family, MIXTURES["Qwen2-MoE"], {}, 2, True),
    "Mixtral, dealt": (save_family, MIXTURES["Mixtral"], {}, 2, True),
    "GLM-4.5, dealt, two shared": (save_family, MIXTURES["GLM-4.5"], {}, 2, True),
    "gpt-oss, sinks": (save_oss, WINDOWS["gpt-oss"], {}, 2, False),
    "windows": (save_family, WINDOWS["Qwen3"], {}, 2, False),
}
NAMES = [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: re.sub("[ ,]+", "-", name))
def test_logits_equal_transformers(name: str, tmp_path: Path, spread_out: Callable[..., None]) -> None:
    """Of every token, in whole prefills, chunks, decodes, after prefix hits and preemptions; and all ranks draw the
    same tokens, of a batch that three of four got over the wire."""
    save, (kind, options), more, n, is_dealt = (MODELS | MORE)[name]
    model = save(kind, tmp_path, **options | more)
    spread_out(n, is_dealt)
    assert_parity(model, tmp_path, packed=False)


LATENT: dict[str, tuple[str, int, bool]] = {
    "V2": ("V2, groups, biases", 2, False),
    "V3, dealt": ("V3", 2, True),
}
FEW = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=5)
LONG_PROMPTS = [[7 * i % 290 + 1 for i in range(n)] for n in (37, 12, 37)]


def likely(folder: Path, prompts: Any = LONG_PROMPTS, sampling: Any = FEW, **options: Any) -> list[Any]:
    """Tokens, and the log probabilities of the likeliest."""
    engine = {"device": "cpu", "kv_cache_block_size": 4, "num_kvcache_blocks": 40, "max_num_batched_tokens": 16}
    with LLM(str(folder), **engine | options) as llm:
        outs = llm.generate(prompts, sampling, use_tqdm=False)
    return [(out.token_ids, [[*entry.items()] for entry in out.logprobs or ()]) for out in outs]


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    for (tokens, entries), (others, wanted) in zip(ours, theirs, strict=True):
        assert tokens == others
        for entry, other in zip(entries, wanted, strict=True):
            assert dict(entry) == pytest.approx(dict(other), abs=1e-4)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("case", LATENT)
def test_latent_attention(case: str, tmp_path: Path) -> None:
    """Every rank keeps the whole latent, and has some of the heads that read it."""
    name, n, is_dealt = LATENT[case]
    kind, options = LATENTS[name]
    save_mixture(kind, tmp_path, **options)
    ours = likely(tmp_path, tensor_parallel_size=n, enable_expert_parallel=is_dealt)
    assert_alike(ours, likely(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("in_threads")
def test_quantized_files(tmp_path: Path) -> None:
    """FP8, and gpt-oss in MXFP4: made whole, then cut."""
    packed, _, _ = quantize(tmp_path / "fp8")
    assert_alike(likely(packed, tensor_parallel_size=2), likely(packed))
    for is_dealt in (False, True):
        _, packed = save_gpt_oss(tmp_path / f"oss {is_dealt}")
        ours = likely(packed, tensor_parallel_size=2, enable_expert_parallel=is_dealt)
        assert_alike(ours, likely(packed))


# Bytes


def test_a_rank_reads_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads 1/n of a dense checkpoint and the uncut weights; of dealt experts, only its own."""
    read, sizes = loading.read_tensor, {}

    def counting(file: Path, name: str, part: Any = None) -> torch.Tensor:
        tensor = read(file, name, part)
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
        return tensor

    monkeypatch.setattr(loading, "read_tensor", counting)
    monkeypatch.setattr(shards, "read_tensor", counting)
    save_checkpoint("llama", tmp_path / "dense")
    save_family("qwen3_moe", tmp_path / "moe", num_experts=4, num_experts_per_tok=2)
    for kind, is_dealt in (("dense", False), ("moe", True)):
        folder, found = tmp_path / kind, []
        for n in (1, 2):
            sizes.clear()
            shard = shards.Shard(n - 1, n, EngineArgs(str(folder)).spec, is_dealt)
            load = shard.load_model if n > 1 else partial(loading.load_model, shard.whole)
            model = load(folder, 64, torch.device("cpu"), torch.float32)
            weights = sum(4 * torch.Size(shape).numel() for shape in shards.shapes_of(model).values())
            assert "Shared" not in type(model).__name__, "not yet: it has no group"
            found.append((sum(sizes.values()), weights))
        (all_bytes, all_weights), (own_bytes, own_weights) = found
        assert all_bytes == all_weights, "each weight once"
        assert own_bytes == own_weights, "no more than it has a place for"
        assert 0.5 <= own_bytes / all_bytes < 0.52


@pytest.mark.parametrize("axis", ["rows", "columns", "vocabulary"])
@pytest.mark.parametrize("by", [-2, 2])
def test_a_tensor_of_another_size_is_refused(axis: str, by: int, tmp_path: Path) -> None:
    """A tensor that is too long or too short is refused by a rank, though slices are silently short."""
    save_checkpoint("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = {"rows": "layers.1.self_attn.q_proj", "columns": "layers.1.mlp.down_proj", "vocabulary": "embed_tokens"}[axis]
    old = tensors[f"model.{name}.weight"]
    shape = [old.shape[0] + by * (axis != "columns"), old.shape[1] + by * (axis == "columns")]
    tensors[f"model.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, path, {"format": "pt"})
    errors = []
    for rank in range(2):
        shard = shards.Shard(rank, 2, EngineArgs(str(tmp_path)).spec)
        try:
            shard.load_model(tmp_path, 64, torch.device("cpu"), torch.float32)
        except ValueError as error:
            errors.append(str(error))
    assert errors and name in errors[0]


def test_four_ranks_have_the_same_bits() -> None:
    """Of a sum of numbers whose order matters: two ranks cannot show it, because a + b = b + a."""
    numbers = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0))
    assert not (numbers[0] + numbers[1] + numbers[2] + numbers[3]).equal(numbers[3] + numbers[2] + numbers[1] + numbers[0])
    folder = tempfile.mkdtemp()
    sums = run_ranks(4, lambda r: shards.open_group(folder, r, 4, 60.0).all_reduce(numbers[r].clone()))
    assert all(one.equal(sums[0]) for one in sums)


def test_a_rank_refuses_before_all_have_loaded() -> None:
    """One rank is ready and the other refuses: rank 0 raises its error and opens no group."""
    leader, config = Leader.__new__(Leader), EngineArgs("tiny", tensor_parallel_size=2)
    leader.managers = [RankManager(rank, config.recipe, config) for rank in (1, 2)]
    leader.managers[0].ready, leader.managers[1].dead = Ready(0), ValueError("no such weight")
    with pytest.raises(ValueError, match="no such weight"):
        leader.meet(torch.device("cpu"))


def test_a_drafters_bytes_are_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of all ranks is smaller by what rank 0 needs for the head, and by the two matrices
    that it reads again."""
    sizes = {}
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", 48 * 2**20)
    for name, options in (("plain", {}), ("EAGLE", EAGLE)):
        more: Any = {"max_num_seqs": 400, "tensor_parallel_size": 2, **options}
        config = EngineArgs("tiny", device="cpu", **more)
        both = SideBySide(config, bytes_beside(config))
        sizes[name] = [runner.block_bytes for runner in both.runners], both.num_kvcache_blocks
    in_all, block = bytes_beside(config, torch.float32)
    (each, _), blocks = sizes["plain"]
    assert sizes["EAGLE"] == ([each, each], (24 * 2**20 - in_all) // (each + block))
    assert blocks == 24 * 2**20 // each and in_all > 958 * 192 * 4


@pytest.mark.parametrize(
    ("changes", "n", "is_dealt", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 510}, 3, False, "one must divide"),
        ({"intermediate_size": 510}, 4, False, "does not divide intermediate_size=510: set it to 3"),
        ({"vocab_size": 5}, 4, False, "a vocabulary of 5 can be cut into"),
        ({"experts": Experts(6, 8), "sparse": (True,)}, 4, True, "does not divide num_experts=6: set it to 3"),
    ],
)
def test_sizes_that_cannot_be_cut(changes: dict[str, Any], n: int, is_dealt: bool, words: str) -> None:
    usual = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 300}
    spec = replace(FamilySpec(**vars(EngineArgs("tiny").spec)), **usual | changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        cut_spec(spec, n, is_dealt)


def test_too_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs a GPU for each rank, and there are 1 GPUs"):
        ranks.Leader(EngineArgs("tiny", tensor_parallel_size=2))


# Graphs and GPUs


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU records real graphs")
@pytest.mark.slow
def test_recorded_decodes_contain_the_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a stand-in that records torch's and Triton's calls, and for this test collectives, of one rank: two a
    layer, one for the embedding, one for the head, in each size, and the tokens of an engine without graphs."""
    made: list[tuple[Any, str]] = []  # of modes that stay, for an id may be given twice

    def recorded(name: str) -> None:
        call = getattr(Group, name)

        def noting(self: Group, x: torch.Tensor, *op: Any) -> torch.Tensor:
            out = call(self, x, *op)
            if (mode := _get_current_dispatch_mode()) is not None:
                made.append((mode, name))
                mode.launches.append(lambda: out.copy_(call(self, x, *op)))  # type: ignore[attr-defined]
            return out

        monkeypatch.setattr(Group, name, noting)

    recorded("all_reduce")
    recorded("all_gather")
    graph = load_recorded_graph()
    monkeypatch.setattr(GraphRunner, "__init__", partialmethod(GraphRunner.__init__, record=graph))
    monkeypatch.setattr(shards, "choose_runner", lambda config: GraphRunner)
    monkeypatch.setattr(build, "make_runner", SideBySide)  # one rank is a group, too
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    options = {**SMALL, "attention": "triton", "max_num_seqs": 2, "num_kvcache_blocks": 12, "max_model_len": 32}
    prompt, sampling = [[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), **options) as llm:
        runner: Any = llm.engine_core.runner
        assert sorted(runner.runners[0].graphs) == [1, 2]
        each = [[name for mode, name in made if mode == one] for one in dict(made)]
        assert each == [["all_reduce"] * 5 + ["all_gather"]] * 2, "the same ones in the same order"
        found = llm.generate(prompt, sampling, use_tqdm=False)[0].token_ids
    monkeypatch.undo()
    with LLM(str(tmp_path), **{**options, "attention": "torch"}) as llm:
        assert llm.generate(prompt, sampling, use_tqdm=False)[0].token_ids == found


@pytest.mark.gpu
def test_nccl_with_one_rank_and_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collectives of a world of one, inside captured graphs: the tokens of an engine without them."""
    save_checkpoint("qwen3", tmp_path)
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(tmp_path), device="cuda", max_num_seqs=4) as llm:
        expected = [o.token_ids for o in llm.generate(LONG_PROMPTS, sampling, use_tqdm=False)]
    monkeypatch.setattr(build, "make_runner", SideBySide)  # one rank is a group, too
    with LLM(str(tmp_path), device="cuda", max_num_seqs=4) as llm:
        runner: Any = llm.engine_core.runner
        assert runner.runners[0].graphs and "nccl" in runner.model.shard.group.backend.name().lower()
        assert [o.token_ids for o in llm.generate(LONG_PROMPTS, sampling, use_tqdm=False)] == expected


@pytest.mark.gpu
def test_two_ranks_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses that; over Gloo they run eagerly, both on the first GPU."""
    save_checkpoint("qwen3", tmp_path)
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "enforce_eager": True}
    with LLM(str(tmp_path), **options) as llm:
        expected = [o.token_ids for o in llm.generate(LONG_PROMPTS, sampling, use_tqdm=False)]

    def on_the_first(config: Config, rank: int, meet: Any, beside: Any) -> Any:
        return shards.make_rank(config.changed(device="cuda:0"), rank, lambda device: meet("cpu"), beside)

    in_this_process(monkeypatch, partial(SideBySide, make=on_the_first))
    with LLM(str(tmp_path), tensor_parallel_size=2, **options) as llm:
        assert [o.token_ids for o in llm.generate(LONG_PROMPTS, sampling, use_tqdm=False)] == expected
