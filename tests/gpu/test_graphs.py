"""Replayed decodes give what plain torch gives: through the chapter's recorder on a CPU, through real graphs on a GPU.

On a CPU the kernels run in Triton's interpreter, so models and runs are small.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_one_layer

pytest.importorskip("triton", reason="Triton is not installed")

from recording import graph_runner
from show import check_blocks

from atom_mini import EngineArgs
from atom_mini.config import Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.gpu import triton_attention
from atom_mini.gpu.graphs import (
    DeviceGraph,
    GraphRunner,
    first_decodes,
    graph_sizes,
    no_garbage_collection,
)
from atom_mini.gpu.triton_attention import FEW_TOKENS
from atom_mini.model_runner import ModelRunner, made_up_batch
from atom_mini.options.build import make_runner, make_scheduler
from atom_mini.scheduler import ScheduledBatch
from atom_mini.scheduling.launcher import Launcher
from atom_mini.scheduling.overlap import OverlapCore
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.verify import as_rows

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PLAIN = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_one_layer(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def record() -> Any:
    if ON_GPU:
        return DeviceGraph
    from recording import load_recorded_graph

    return load_recorded_graph()


def make_config(folder: Path, **options: Any) -> Config:
    shape = {"num_kvcache_blocks": 60, "kv_cache_block_size": 4, "max_num_seqs": 3, "max_model_len": 64}
    return EngineArgs(str(folder), **{"device": DEVICE, "dtype": "float32", "attention": "triton"} | shape | options)


def plain_runner(folder: Path, **options: Any) -> ModelRunner:
    """No kernels, no graphs."""
    return make_runner(make_config(folder, attention="torch", **options))


def run(runner: ModelRunner, samplings: list[dict[str, Any]], max_tokens: int, overlap: bool = False) -> Any:
    """(tokens, log probabilities) of one request per wish, and the engine they went through."""
    rng, core = random.Random(0), EngineCore(runner.config, runner, make_scheduler(runner.config))
    if overlap:
        core = OverlapCore(runner.config, Launcher(runner.config, lambda config: runner))
    seqs = []
    for i, sampling in enumerate(samplings):
        params = SamplingParams(max_tokens=max_tokens + i, seed=i, ignore_eos=True, **sampling).resolve(PLAIN)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 12))]
        seqs.append(Sequence(prompt, runner.config.kv_cache_block_size, params))
        core.add(seqs[-1])
    while core.step():
        check_blocks(core.scheduler.block_manager, core.scheduler.running)
    return [(s.completion_token_ids, s.logprobs) for s in seqs], core


def count_replays(runner: GraphRunner) -> dict[int, int]:
    """How often each size is replayed from now on."""
    counts = dict.fromkeys(runner.graphs, 0)
    for size, graph in runner.graphs.items():

        def counting(replay: Any = graph.replay, size: int = size) -> None:
            counts[size] += 1
            replay()

        graph.replay = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("limit", [1, 3, 16, 20, 1000])
def test_ladder_ends_at_the_limit(limit: int) -> None:
    """Every batch that may run has a rung, and the last one is the limit itself."""
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit and sizes[0] == 1
    assert all(min(n for n in sizes if n >= count) - count < max(16, count) for count in range(1, limit + 1))


WISHES: list[dict[str, Any]] = [
    {}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}, {"logprobs": 2},
    {"temperature": 1.5, "min_p": 0.1}, {"repetition_penalty": 1.4}, {},
]  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.slow
def test_replays_equal_eager_steps(overlap: bool, folder: Path, record: Any) -> None:
    """More requests than may run, so that batches shrink and grow; tight pools preempt. Penalties and log probabilities are
    sampled outside of a replay; a step ahead, its inputs come from the token pool."""
    runner = graph_runner(make_config(folder, num_kvcache_blocks=9), record)
    counts = count_replays(runner)
    replayed, core = run(runner, WISHES, max_tokens=7, overlap=overlap)
    eager, _ = run(plain_runner(folder, num_kvcache_blocks=9), WISHES, max_tokens=7)
    assert [tokens for tokens, _ in replayed] == [tokens for tokens, _ in eager]
    for (_, ours), (_, theirs) in zip(replayed, eager, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert all(counts[n] > 0 for n in (1, 2, 3)), counts
    assert core.scheduler.num_preemptions > 0


def ragged_decode(runner: ModelRunner, lens: list[int]) -> ScheduledBatch:
    """One new token of each of `len(lens)` sequences, whose blocks lie scattered in the pool; greedy and random."""
    rng, size = np.random.default_rng(len(lens)), runner.config.kv_cache_block_size
    width = -(-max(lens) // size)
    tables = rng.permutation(runner.num_kvcache_blocks)[: len(lens) * width].reshape(len(lens), width)
    batch = made_up_batch(SequenceType.DECODE, 1, tables.astype(np.int32))
    params = [SamplingParams(temperature=i % 2, seed=i) for i in range(len(lens))]
    ids = rng.integers(0, 90, len(lens))
    return replace(batch, context_lens=np.array(lens, np.int32), scheduled_tokens=ids, sampling_params=params)


def fill_pools(runners: list[ModelRunner], batch: ScheduledBatch) -> None:
    """The same keys and values where `batch` has tokens, but the new one's; NaN everywhere else, in the spare block, too."""
    size, shape = runners[0].config.kv_cache_block_size, runners[0].kv_cache.shape
    values = torch.randn(shape[0], 2, shape[3], size, shape[5], generator=torch.Generator().manual_seed(0))
    for runner in runners:
        runner.kv_cache.fill_(torch.nan)
        for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True):
            for i, block in enumerate(table[: -(-length // size)].tolist()):
                known = min(size, length - 1 - i * size)
                runner.kv_cache[:, :, block, :, :known] = values[:, :, :, :known].to(DEVICE) * (1 + block % 7)


def poison(runner: GraphRunner) -> None:
    """NaN in all that a replay should write before it is read: logits, outputs, partial results."""
    runner.logits.fill_(torch.nan)
    for graph in runner.graphs.values():
        hidden, tokens = graph.outputs
        hidden.fill_(torch.nan)
        tokens.fill_(-7)
        for launch in getattr(graph, "launches", []):  # the recorder's; nobody can name those of a real graph
            kernel, *arguments = launch.args
            if getattr(getattr(kernel, "fn", None), "__name__", "") == "paged_attention_kernel":
                for partial in arguments[3:5]:
                    partial.fill_(torch.nan)


def test_every_rung_equals_eager_on_ragged_contexts(folder: Path, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part and several, whole rungs and padded ones, over a pool of NaN, with NaN in all that a replay writes."""
    monkeypatch.setattr(triton_attention, "SPLIT_KEYS", 16)
    runner, plain = graph_runner(make_config(folder), record), plain_runner(folder)
    for i, lens in enumerate(([33], [17, 16], [64, 1, 31], [48, 2], [9, 8, 7])):
        if i == 3:
            del runner.graphs[2]  # now a padded rung
        if i == 4:
            del runner.graphs[3]  # and none, so the step is eager
        batch = ragged_decode(runner, lens)
        fill_pools([runner, plain], batch)
        with torch.inference_mode():
            poison(runner)
        (logits, tokens), (wanted, wanted_tokens) = (r.launch(batch) for r in (runner, plain))
        assert torch.allclose(logits, wanted, atol=1e-4) and tokens.tolist() == wanted_tokens.tolist(), lens


@pytest.mark.slow
def test_what_is_not_replayed(folder: Path, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over `FEW_TOKENS` new tokens of a sequence get large tiles, which no graph has: eager, with the logits of the plain path.
    So are steps with decodes beside chunks."""
    monkeypatch.setattr("atom_mini.gpu.graphs.graph_sizes", lambda most: [most])
    runner, plain = graph_runner(make_config(folder, max_num_seqs=FEW_TOKENS + 1), record), plain_runner(folder)
    counts = count_replays(runner)
    for tokens, replays in ((FEW_TOKENS, 1), (FEW_TOKENS + 1, 1)):
        prompt = made_up_batch(SequenceType.PREFILL, tokens, np.arange(5)[None])
        rows = as_rows(replace(prompt, type=SequenceType.DECODE, scheduled_tokens=np.arange(tokens)))
        logits, wanted = (r.launch(rows)[0].cpu() for r in (runner, plain))
        assert torch.allclose(logits, wanted, atol=1e-4)
        assert sum(counts.values()) == replays
    runner.launch(replace(first_decodes(2), type=SequenceType.MIXED))
    assert sum(counts.values()) == 1


def test_memory_is_measured_by_the_sort(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that sample need no memory, but drafts and penalties do: it must be left for them."""
    runner, sorted_shapes = make_runner(make_config(folder, enforce_eager=True)), list[tuple[int, ...]]()
    monkeypatch.setattr("atom_mini.sampler.keep_mask", lambda x, *_: sorted_shapes.append(x.shape) or torch.ones_like(x) > 0)
    runner._sample_most()
    assert sorted_shapes == [(runner.config.max_decode_rows, runner.config.spec.vocab_size)]


def test_padding_rows_touch_nothing(folder: Path, record: Any) -> None:
    """One sequence in a graph of three writes one slot of its own; the two rows beside it write to the spare block. The
    inputs never move."""
    runner = graph_runner(make_config(folder), record)
    del runner.graphs[1], runner.graphs[2]
    runner.kv_cache.fill_(7.0)
    runner.forward(first_decodes(1))
    changed = (runner.kv_cache != 7).transpose(0, 2)  # [blocks, 2, layers, heads, slots, numbers]
    assert len(changed) == 61 and changed.flatten(1).any(1).nonzero().flatten().tolist() == [0, 60]
    assert changed[0].any(-1).flatten(0, -2).any(0).tolist() == [True, False, False, False]
    with pytest.raises(AssertionError):  # a recording knows addresses
        runner.static.upload([np.zeros(10**7)])


def test_no_collection_during_a_capture() -> None:
    """Off inside, as it was outside, whatever happens."""
    assert gc.isenabled()
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.skipif(ON_GPU, reason="about a CPU")
def test_kernels_that_cannot_run_say_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the extra is named; on a CPU without the interpreter, its switch; and the way without both."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1.*attention='torch'"):
        make_runner(make_config(folder))
    monkeypatch.setattr("atom_mini.assemble.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\.\[triton\].* in the clone of .*, or set attention='torch'"):
        make_runner(make_config(folder))
    make_runner(make_config(folder, attention="torch"))
