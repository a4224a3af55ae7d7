"""A model on several ranks: the same logits, the same tokens on each, its share of the bytes, and no silent death."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_checkpoint, save_family
from recording import load_recorded_graph
from safetensors.torch import load_file, save_file

pytest.importorskip("msgspec", reason="the extra processes is not installed")
pytest.importorskip("zmq", reason="the extra processes is not installed")

from show import children, run_ranks
from side_by_side import SideBySide, in_this_process
from test_engine_process import (  # noqa: F401
    PROMPTS,
    SMALL,
    SOON,
    answers,
    ctrl_c,
    expect_empty,
    interrupted_lines,
    listeners,
    processes,
    python,
    tidy,
    time_limit,
    wait_for,
)
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
from atom_mini.gpu.graphs import GraphRunner, first_decodes
from atom_mini.model_runner import ModelRunner
from atom_mini.options import build
from atom_mini.options.build import make_runner
from atom_mini.parallel.engine_process import Ready, decode, encode
from atom_mini.parallel.experts import DealtMLP
from atom_mini.parallel.manager import EngineDead
from atom_mini.parallel.ranks import Leader, RankManager, Step, ToRank, pack_batch, unpack_batch
from atom_mini.parallel.shards import Group, cut_spec
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType
from atom_mini.speculation.verify import as_rows

alone = pytest.mark.alone  # it starts processes or looks at the clock
PAIR: dict[str, Any] = {"tensor_parallel_size": 2, **SMALL}
LIMIT = 90.0  # seconds: longer than anything here takes


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
MODELS: dict[str, tuple[Save, Any, dict[str, Any], int, bool]] = {  # how it is saved; ranks; whether experts are dealt
    "qwen3, untied, odd vocabulary": (save_checkpoint, PLAIN["qwen3, head_dim 24 of 64/4"], ODD, 2, False),
    "qwen3, tied, odd vocabulary, biases": (save_checkpoint, PLAIN["qwen3, attention bias, tied"], ODD, 4, False),
    "qwen2, biases": (save_checkpoint, PLAIN["qwen2, bias, tied"], {}, 2, False),
    "llama, biases on o and down": (save_checkpoint, PLAIN["llama, head_dim 32, biases"], {}, 2, False),
    "one K/V head for two": (save_checkpoint, PLAIN["llama, one K/V head"], {}, 2, False),
    "three ranks": (save_checkpoint, ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
                    {}, 3, False),
    "Qwen3-MoE, widths": (save_family, MIXTURES["Qwen3-MoE"], {}, 2, False),
    "Qwen3-MoE, dealt": (save_family, MIXTURES["Qwen3-MoE, dense layers"], {}, 2, True),
    "OLMoE, one norm over all heads": (save_family, MIXTURES["OLMoE, bias"], {}, 2, False),
    "OLMoE, dealt": (save_family, MIXTURES["OLMoE"], {}, 2, True),
    "Qwen2-MoE, a gated shared expert": (save_family, MIXTURES["Qwen2-MoE"], {}, 2, False),
    "Qwen2-MoE, dealt": (save_family, MIXTURES["Qwen2-MoE"], {}, 2, True),
    "Mixtral, dealt": (save_family, MIXTURES["Mixtral"], {}, 2, True),
    "GLM-4.5, groups, partly turned": (save_family, MIXTURES["GLM-4.5, groups"], {}, 2, False),
    "GLM-4.5, dealt, two shared": (save_family, MIXTURES["GLM-4.5"], {}, 2, True),
    "gpt-oss, sinks": (lambda kind, folder: save_windowed("gpt-oss", folder), WINDOWS["gpt-oss"], {}, 2, False),
    "gpt-oss, dealt": (lambda kind, folder: save_windowed("gpt-oss", folder), WINDOWS["gpt-oss"], {}, 2, True),
    "windows": (save_family, WINDOWS["Qwen3"], {}, 2, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.smoke
def test_logits_equal_transformers(name: str, tmp_path: Path, spread_out: Callable[..., None]) -> None:
    """Of every token, in whole prefills, chunks, decodes, after prefix hits and preemptions; and all ranks draw the
    same tokens, of a batch that three of four got over the wire."""
    save, (kind, options), more, n, is_dealt = MODELS[name]
    model = save(kind, tmp_path, **({} if "oss" in name else options | more))
    spread_out(n, is_dealt)
    assert_parity(model, tmp_path, packed=False)


LATENT: dict[str, tuple[str, int, bool]] = {
    "V2": ("V2, groups, biases", 2, False),
    "V3, dealt": ("V3", 2, True),
    "V2-Lite on four": ("V2-Lite", 4, False),
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


@pytest.mark.usefixtures("in_threads")
def test_quantized_files(tmp_path: Path) -> None:
    """FP8, and gpt-oss in MXFP4: made whole, then cut."""
    packed, _, _ = quantize(tmp_path / "fp8")
    assert_alike(likely(packed, tensor_parallel_size=2), likely(packed))
    for is_dealt in (False, True):
        _, packed = save_gpt_oss(tmp_path / f"oss {is_dealt}")
        ours = likely(packed, tensor_parallel_size=2, enable_expert_parallel=is_dealt)
        assert_alike(ours, likely(packed))


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"prefix_cache": "radix", "interleave_decode": True},
        {"enable_mixed_steps": True, "max_num_batched_tokens": 12},
        {"max_num_seqs": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_with_the_rest(options: dict[str, Any], tmp_path: Path) -> None:
    """Drafts, another cache, another policy; sampled with filters and penalties; log probabilities."""
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=2, vocab_size=301)
    sampling = [FEW, SamplingParams(max_tokens=9, temperature=0.9, seed=4, top_p=0.9, ignore_eos=True, logprobs=2),
            SamplingParams(max_tokens=9, temperature=0.7, seed=2**64 - 5, repetition_penalty=1.3, ignore_eos=True)]  # fmt: skip
    ours = likely(tmp_path, sampling=sampling, tensor_parallel_size=2, **options)
    assert_alike(ours, likely(tmp_path, sampling=sampling, **options))


@pytest.fixture
def by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank computes at a time, the others wait in collectives: Triton's interpreter is not for several threads."""
    lock, forward = threading.Lock(), ModelRunner.forward

    def waiting(call: Any) -> Any:
        def wait(self: Group, *args: Any) -> Any:
            if not (held := lock.locked() and owner[0] == threading.get_ident()):
                return call(self, *args)
            lock.release()
            try:
                return call(self, *args)
            finally:
                lock.acquire()
                owner[0] = threading.get_ident() if held else 0

        return wait

    def alone(self: ModelRunner, batch: ScheduledBatch) -> Any:
        with lock:
            owner[0] = threading.get_ident()
            return forward(self, batch)

    owner = [0]
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(Group, name, waiting(getattr(Group, name)))
    monkeypatch.setattr(ModelRunner, "forward", alone)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in the interpreter")
@pytest.mark.usefixtures("in_threads", "by_turns")
@pytest.mark.parametrize("is_dealt", [False, True])
def test_kernels_of_a_rank(is_dealt: bool, tmp_path: Path) -> None:
    """Triton's attention, small kernels and grouped experts on the shapes of a rank."""
    save_family("qwen3_moe", tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=1)
    options = {"attention": "triton", "sampling": SamplingParams(max_tokens=2, temperature=0, logprobs=5)}
    n = {"tensor_parallel_size": 2, "enable_expert_parallel": is_dealt}
    ours = likely(tmp_path, LONG_PROMPTS[1:2], **n, **options)
    assert_alike(ours, likely(tmp_path, LONG_PROMPTS[1:2], **options))


MISTAKES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "the bias on every rank": ("biases", lambda p: p.setattr(shards, "read_zeros", lambda read: read())),
    "padding is sampled": ("odd", lambda p: p.setattr(shards.SharedHead, "forward", padded_logits)),
    "the same part on every rank": ("odd", lambda p: p.setattr(shards, "find_cut", first_part)),
    "no sum after the embedding": ("odd", lambda p: p.setattr(shards.SharedTable, "forward", unsummed_rows)),
    "a norm per rank": ("olmoe", lambda p: p.setattr(shards.SharedNorm, "forward", own_norm)),
    "foreign experts answer": ("moe", lambda p: p.setattr(DealtMLP, "compute", wrapped_ids)),
    "the first K/V head for all": ("kv", lambda p: p.setattr(shards, "find_cut", first_head)),
}
FIND = shards.find_cut


def padded_logits(self: Any, hidden: Any) -> Any:
    parts = self.shard.group.all_gather(self.own(hidden))
    return parts.transpose(0, 1).flatten(1).contiguous()


def own_norm(self: Any, x: Any, residual: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps), x


def first_part(whole: list[int], mine: list[int], shard: Any) -> Any:
    """Of what is cut by columns, as `down_proj` is."""
    found = FIND(whole, mine, shard)
    return found if found is None or found[0] == 0 else (1, 0, mine[1])


def first_head(whole: list[int], mine: list[int], shard: Any) -> Any:
    """Of `k_proj` and `v_proj`, by their size."""
    found, cfg = FIND(whole, mine, shard), shard.whole
    is_kv = whole[0] * cfg.num_attention_heads == cfg.num_key_value_heads * cfg.hidden_size
    return found if found is None or not is_kv else (0, 0, mine[0])


def unsummed_rows(self: Any, ids: Any) -> Any:
    ids = ids - self.shard.rank * len(self.weight)
    return torch.nn.functional.embedding(ids.clamp(0, len(self.weight) - 1), self.weight)


def wrapped_ids(self: Any, x: Any, ids: Any, weights: Any) -> Any:
    return self.run_experts(x, ids % self.gate_up.count, weights)


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these changes a token or a log probability."""
    kind, plant = MISTAKES[mistake]
    options: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 301}
    if kind in ("olmoe", "moe"):
        name = {"olmoe": "olmoe", "moe": "qwen3_moe"}[kind]
        save_family(name, tmp_path, num_experts=4, num_experts_per_tok=2, **options)
    else:
        more = {"attention_bias": True, "mlp_bias": True} if "bias" in kind else {}
        save_checkpoint("llama", tmp_path, tie_word_embeddings=False, **options, **more)
    n = {"tensor_parallel_size": 2, "enable_expert_parallel": kind == "moe"}
    right = likely(tmp_path)
    assert_alike(likely(tmp_path, **n), right)
    plant(monkeypatch)
    try:
        wrong = likely(tmp_path, **n)
    except (AssertionError, IndexError, ValueError):
        return  # the ranks themselves drew different tokens, or one that there is not
    with pytest.raises(AssertionError):
        assert_alike(wrong, right)


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


# Messages


def test_a_step_crosses_whole() -> None:
    """Every field, with drafts and without; a frame that is not a step is a ValueError."""
    params = [SamplingParams(temperature=0.5, seed=2**64 - 3, top_k=4), SamplingParams(repetition_penalty=1.5, logprobs=2)]
    batch = ScheduledBatch(
        SequenceType.DECODE, [7, 9], np.array([1, 5, 6, 2]), np.array([3, 1], np.int32), np.array([8, 30], np.int32),
        np.arange(16, dtype=np.int32).reshape(2, 8), np.array([True, True]), params, {1: [4, 2]}, [0, 3],
    )  # fmt: skip
    for sent in (batch, as_rows(batch)):
        found = cross(sent)
        assert type(found) is type(sent) and found.type is sent.type
        for name, value in vars(sent).items():
            other = getattr(found, name)
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype and np.array_equal(value, other)
            elif name == "sampling_params":
                assert [p.seed and p.seed % 2**64 for p in value] == [p.seed for p in other]
                assert [p.top_k for p in value] == [p.top_k for p in other]
            elif name != "whole":
                assert value == other
    large = replace(batch, block_tables=np.arange(500_000, dtype=np.int32).reshape(2, -1))
    assert np.array_equal(cross(large).block_tables, large.block_tables)
    frame = pack_batch(batch)
    for bad in (pickle.dumps(batch), frame[:-1], b""):
        with pytest.raises(ValueError):
            decode(bad, ToRank)
    step: Any = decode(frame, Step)
    *arrays, last = step.arrays
    for wrong in (arrays, [*step.arrays, b""], [b"\0" * 7, *arrays[1:], last], [*arrays, last[:-4]]):
        step.arrays = wrong
        with pytest.raises(ValueError):
            unpack_batch(decode(encode(step), ToRank))


def cross(batch: ScheduledBatch) -> ScheduledBatch:
    """What a rank makes of what a leader sends."""
    return unpack_batch(decode(pack_batch(batch), ToRank))


def test_equal_parameters_are_made_once() -> None:
    """A rank validates the parameters of a request in its first step only."""
    params = SamplingParams(temperature=0.3, seed=12345)
    batch = replace(first_decodes(2), sampling_params=[params, SamplingParams()], rows=[0, 1])
    first, second = cross(batch), cross(batch)
    assert all(a is b for a, b in zip(first.sampling_params, second.sampling_params, strict=True))


def test_four_ranks_have_the_same_bits() -> None:
    """Of a sum of numbers whose order matters: two ranks cannot show it, because a + b = b + a."""
    numbers = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0))
    assert not (numbers[0] + numbers[1] + numbers[2] + numbers[3]).equal(numbers[3] + numbers[2] + numbers[1] + numbers[0])
    folder = tempfile.mkdtemp()
    sums = run_ranks(4, lambda r: shards.open_group(folder, r, 4, LIMIT).all_reduce(numbers[r].clone()))
    assert all(one.equal(sums[0]) for one in sums)


# Processes


NOTING = """
import os, sys
line = " ".join(sys.orig_argv)
if "atom_mini.options.process:load_rank" in sys.orig_argv:
    {early}
if "atom_mini.options.process" in line and "-c" in sys.orig_argv and "TOKENS" in os.environ:
    import zmq
    import atom_mini.model_runner as m
    is_rank = "atom_mini.options.process:load_rank" in sys.orig_argv
    forward, path = m.ModelRunner.forward, os.environ["TOKENS"] + str(int(is_rank))
    def noting(self, batch):
        if is_rank:
            {in_step}
        found = forward(self, batch)
        with open(path, "a") as file:
            print(sorted(found.token_ids.items()), file=file)
        return found
    m.ModelRunner.forward = noting
"""


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def start(folder: Path, patch: pytest.MonkeyPatch, early: str = "pass", in_step: str = "pass", **options: Any) -> LLM:
    """The built-in model on two ranks; rank 1 records its tokens, and a test can make it fail."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(NOTING.format(early=early, in_step=in_step))
    patch.syspath_prepend(folder)
    patch.setenv("TOKENS", str(folder / "tokens"))
    try:
        return LLM("tiny", **PAIR, **options)
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, module_patch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, Path]]:
    folder = tmp_path_factory.mktemp("pair")
    with start(folder, module_patch) as llm:
        yield llm, folder


def engine_of(llm: LLM) -> int:
    """The process of the engine, which is rank 0."""
    core: Any = llm.engine_core
    return core.engines[0].process.pid


def rank_of(llm: LLM) -> int:
    """Rank 1's process."""
    (rank,) = children(engine_of(llm))
    return rank


@alone
@pytest.mark.slow
def test_same_answers_and_the_same_tokens_on_all_ranks(pair: tuple[LLM, Path]) -> None:
    """Calls, streams, chats; greedy and sampled, filters, penalties, log probabilities, stop strings; a pool that is too
    small for all. Rank 1, in its process, draws what rank 0 draws."""
    llm, folder = pair
    found = answers(llm)
    with LLM("tiny", **SMALL) as one:
        assert found == answers(one)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)  # by then the last step is written down
    own, theirs = ((folder / f"tokens{rank}").read_text().splitlines() for rank in (0, 1))
    n = min(len(own), len(theirs)) - 1
    assert n > 100 and own[:n] == theirs[:n]


def test_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the heads, so half of the bytes of a block."""
    in_this_process(monkeypatch)
    with LLM("tiny", **PAIR) as two, LLM("tiny", **SMALL) as one:
        parts, whole = two.engine_core.runner.runners, one.engine_core.runner  # type: ignore[attr-defined]
        assert [part.kv_cache.nbytes * 2 for part in parts] == [whole.kv_cache.nbytes] * 2  # type: ignore[attr-defined]
        weights = [sum(w.nbytes for w in r.model.parameters()) for r in (*parts, whole)]  # type: ignore[attr-defined]
    assert all(0.5 <= part / weights[-1] < 0.51 for part in weights[:-1])


@alone
def test_a_rank_is_small(pair: tuple[LLM, Path]) -> None:
    llm, _ = pair
    rss = [int(line.split()[1]) for line in Path(f"/proc/{rank_of(llm)}/status").read_text().splitlines()
           if line.startswith("RssAnon")]  # fmt: skip
    assert rss and rss[0] < 600_000, "kB: torch, and 4 MB of weights"


@alone
@pytest.mark.slow
def test_two_engines_in_one_process(pair: tuple[LLM, Path]) -> None:
    """Side by side: each with its own group."""
    llm, _ = pair
    sampling = SamplingParams(max_tokens=8)
    expected = llm.generate(PROMPTS, sampling, use_tqdm=False)
    with LLM("tiny", **PAIR) as other, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(x.generate, PROMPTS, sampling, False) for x in (llm, other) for _ in range(2)]
        assert all([o.text for o in f.result()] == [o.text for o in expected] for f in both)
    assert [o.text for o in llm.generate(PROMPTS, sampling, use_tqdm=False)] == [o.text for o in expected]


@alone
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.slow
def test_ctrl_c_in_steps(pair: tuple[LLM, Path]) -> None:
    """At many moments of a step, also between sending it and running it: the engine and its ranks go on together."""
    llm, _ = pair
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
    expected = [o.token_ids for o in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    main, rng = threading.main_thread().ident or 0, random.Random(0)
    for _ in range(12):
        timer = threading.Timer(rng.uniform(0.005, 0.08), lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        assert [o.token_ids for o in llm.generate(PROMPTS, sampling, use_tqdm=False)] == expected
    expect_empty(llm.engine_core)  # type: ignore[arg-type]


@alone
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.slow
def test_ctrl_c_at_any_line(pair: tuple[LLM, Path]) -> None:
    places = interrupted_lines(pair[0], PROMPTS[:2], SamplingParams(max_tokens=4, ignore_eos=True), at=1, stride=31)
    assert any("core_client" in place for place in places)


@alone
def test_it_listens_on_loopback_alone(pair: tuple[LLM, Path]) -> None:
    llm, _ = pair
    assert not listeners(os.getpid())
    for pid in (engine_of(llm), rank_of(llm)):
        assert listeners(pid) <= {"0100007F"}
    core: Any = llm.engine_core
    assert not os.path.exists(core.engines[0].recipe["meeting"])


def ranks_alive(tag: Path) -> list[int]:
    return [*processes("load_rank", str(tag))]


LONG = SamplingParams(max_tokens=200, ignore_eos=True)


def until_dead(llm: LLM, match: str, limit: float = SOON, notes: Path | None = None) -> str:
    """The error of a running call and of all later ones; the time counts from rank 1's last entry in `notes`."""
    began = time.time()
    with pytest.raises(EngineDead, match=match) as caught:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    took = time.time() - max(began, notes.stat().st_mtime if notes else 0)
    for call in (lambda: llm.generate("x", use_tqdm=False), lambda: [*llm.stream("x")]):
        began = time.perf_counter()
        with pytest.raises(EngineDead, match=match):
            call()
        assert time.perf_counter() - began < 0.5
    assert took < limit
    return str(caught.value)


def strike(llm: LLM, pid: int, blow: int) -> None:
    """Once some steps have run."""
    steps = llm.metrics.num_steps

    def when_it_runs() -> None:
        wait_for(lambda: llm.metrics.num_steps > steps + 3)
        os.kill(pid, blow)

    threading.Thread(target=when_it_runs).start()


@alone
@pytest.mark.smoke
def test_kill_a_rank(tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """With open streams: each caller gets the cause and the end of the log; a new engine starts at once."""
    llm = start(tmp_path / "noted", monkeypatch, early="print('here I am', flush=True)")
    strike(llm, rank_of(llm), signal.SIGKILL)
    text = until_dead(llm, "rank 1 is dead: killed by SIGKILL", notes=tmp_path / "noted" / "tokens1")
    assert "here I am" in text
    assert not {"gloo", "GLHF", "third_party"} & {*re.findall(r"\w+", text)}, text
    llm.close()
    llm.close()


@alone
def test_stop_a_rank(tidy: Path) -> None:  # noqa: F811
    """A stopped rank is noticed within the group's limit, by the engine and by its front."""
    llm = LLM("tiny", collective_timeout=2.0, **PAIR)
    assert [*tidy.iterdir()] == []
    strike(llm, rank_of(llm), signal.SIGSTOP)
    until_dead(llm, "2000ms", 2 + SOON + 2)
    llm.close()


@alone
@pytest.mark.slow
def test_kill_a_rank_of_an_idle_engine(tidy: Path) -> None:  # noqa: F811
    """An idle engine ends with its rank."""
    llm = LLM("tiny", **PAIR)
    manager: Any = llm.engine_core.engines[0]  # type: ignore[attr-defined]
    os.kill(*ranks_alive(tidy), signal.SIGKILL)
    wait_for(lambda: manager.dead, SOON)
    with pytest.raises(EngineDead, match="rank 1 is dead: killed by SIGKILL"):
        llm.generate("x", use_tqdm=False)
    llm.close()


@alone
def test_a_stopped_rank_ends_with_the_engine(tidy: Path) -> None:  # noqa: F811
    """Killing the engine's process group also ends a stopped rank."""
    llm = LLM("tiny", **PAIR)
    os.kill(rank_of(llm), signal.SIGSTOP)
    llm.close()
    assert not ranks_alive(tidy)


@alone
def test_kill_rank_0(tidy: Path) -> None:  # noqa: F811
    """The other ranks end, too."""
    llm = LLM("tiny", **PAIR)
    strike(llm, engine_of(llm), signal.SIGKILL)
    until_dead(llm, "engine 0 is dead: killed by SIGKILL")
    assert not ranks_alive(tidy)
    llm.close()


@alone
@pytest.mark.smoke
def test_an_error_on_a_rank(tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A rank raises in a step: its traceback is in the error."""
    fails = "if max(batch.context_lens) > 30: raise MemoryError('no room for 3 GiB')"
    llm = start(tmp_path / "noted", monkeypatch, in_step=fails)
    text = until_dead(llm, "(?s)rank 1 is dead: MemoryError: no room for 3 GiB", notes=tmp_path / "noted" / "tokens1")
    assert "Traceback" in text
    llm.close()


@alone
@pytest.mark.parametrize("how", ["dies", "refuses"])
@pytest.mark.slow
def test_a_rank_ends_while_loading(how: str, tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    early = "os._exit(3)" if how == "dies" else "import atom_mini.loading as x; x.checkpoint_files = lambda f: {}"
    kind: Any = EngineDead if how == "dies" else ValueError
    began = time.perf_counter()
    with pytest.raises(kind, match="exit code 3" if how == "dies" else "lacks .* weight"):
        start(tmp_path / "noted", monkeypatch, early=early)
    assert time.perf_counter() - began < 30


def test_a_rank_refuses_before_all_have_loaded() -> None:
    """One rank is ready and the other refuses: rank 0 raises its error and opens no group."""
    leader, config = Leader.__new__(Leader), EngineArgs("tiny", tensor_parallel_size=2)
    leader.managers = [RankManager(rank, config.recipe, config) for rank in (1, 2)]
    leader.managers[0].ready, leader.managers[1].dead = Ready(0), ValueError("no such weight")
    with pytest.raises(ValueError, match="no such weight"):
        leader.meet(torch.device("cpu"))


@alone
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_loading(tidy: Path) -> None:  # noqa: F811
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        LLM("tiny", **PAIR)


FRONT = """
import json, sys, time
from atom_mini import LLM
llm = LLM("tiny", **json.loads(sys.argv[1]))
print("ready", flush=True)
{then}
"""


@alone
@pytest.mark.parametrize("how", ["kill", "exit", "kill while it loads", "kill the engine"])
@pytest.mark.slow
def test_no_rank_stays_behind(how: str, tidy: Path) -> None:  # noqa: F811
    then = "" if how == "exit" else "time.sleep(60)"
    with python(FRONT.format(then=then), PAIR) as process:
        try:
            if how == "kill while it loads":
                wait_for(lambda: ranks_alive(tidy), 60)  # two processes import torch, one after the other
            else:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            if how == "exit":
                assert process.wait(20) == 0
            elif how == "kill the engine":
                os.kill(*children(process.pid), signal.SIGKILL)
            else:
                assert how == "kill while it loads" or len(ranks_alive(tidy)) == 1
                process.kill()
            wait_for(lambda: not ranks_alive(tidy), SOON)
        finally:
            process.kill()


STUCK = """
import json, os, signal, sys, threading
from atom_mini import LLM
llm = LLM("tiny", **json.loads(sys.argv[1]))
from show import children, run_ranks
(rank,) = children(llm.engine_core.engines[0].process.pid)
os.kill(rank, signal.SIGSTOP)
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
try:
    llm.generate("x", use_tqdm=False)
except KeyboardInterrupt:
    print("stuck", flush=True)
"""
GONE = """
import sys
if "atom_mini.options.process:load_rank" in sys.orig_argv:
    import os, zmq, atom_mini.parallel.shards as shards
    shards.open_group = lambda *where: os._exit(3)
"""


@alone
@pytest.mark.parametrize("how", ["stopped", "gone as it joins"])
@pytest.mark.slow
def test_python_ends_though_rank_0_waits_for_another(how: str, tidy: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its collective would wait for 300 seconds: the exit does not."""
    if how != "stopped":
        (tmp_path / "sitecustomize.py").write_text(GONE)
    process = python(STUCK, PAIR, tmp_path, stderr=subprocess.PIPE)
    out, errors = process.communicate(timeout=LIMIT / 2)
    assert out == "stuck\n" if how == "stopped" else "rank 1 is dead: exit code 3" in errors


# The options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number from 1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide num_attention_heads=4: set it to 2"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "qwen3 has no experts"),
        ({"enable_expert_parallel": True}, "needs several ranks or engines: raise tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "collective_timeout": 0}, "collective_timeout=0 must be a number above 0"),
        ({"tensor_parallel_size": 2, "collective_timeout": 1e300}, r"collective_timeout=1e\+300 must be a number above 0"),
        ({"collective_timeout": 5.0}, "collective_timeout has no effect with tensor_parallel_size=1: change that"),
        ({"tensor_parallel_size": 2, "scheduler": "spyre"}, "scheduler='spyre' does not go with"),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "eagle3"}, "enforce_eager": False},
            "enforce_eager=False does not go with EAGLE or MTP over ranks",
        ),
    ],
)
def test_bad_knobs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs("tiny", **options)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method=awq is not supported"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "activation_scheme=static"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_a_refused_option_starts_no_rank(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that ranks do not support is refused before a rank starts."""
    save_family("qwen3_moe", tmp_path, **MIXTURES["Qwen3-MoE"][1])
    edit_json(tmp_path / "config.json", **changes)
    monkeypatch.setattr(ranks, "Leader", None)
    with pytest.raises(ValueError, match=words):
        make_runner(EngineArgs(str(tmp_path), device="cpu", tensor_parallel_size=2))


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
