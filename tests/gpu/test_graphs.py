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
from test_speculation import FromABook

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
    SamplingArrays,
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
from atom_mini.speculation.verify import SpecCore, as_rows

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


def run(
    runner: ModelRunner, samplings: list[dict[str, Any]], max_tokens: int = 5, seed: int = 0, overlap: bool = False,
    drafter: Any = None, everyone: list[Sequence] | None = None,
) -> Any:  # fmt: skip
    """(tokens, log probabilities) of one request per wish, and the engine they went through."""
    rng, core = random.Random(seed), EngineCore(runner.config, runner, make_scheduler(runner.config))
    if drafter:
        core = SpecCore(runner.config, runner, drafter)
    if overlap:
        core = OverlapCore(runner.config, Launcher(runner.config, lambda config: runner))
    seqs = []
    for i, sampling in enumerate(samplings):
        params = SamplingParams(max_tokens=max_tokens + i % 3, seed=i, ignore_eos=True, **sampling).resolve(PLAIN)
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 12))]
        seqs.append(Sequence(prompt, runner.config.kv_cache_block_size, params))
        core.add(seqs[-1])
    if everyone is not None:
        everyone += seqs
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


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 15, 16, 17, 20, 256, 512, 1000])
def test_ladder_ends_at_the_limit(limit: int) -> None:
    """Every batch that may run has a rung, and the last one is the limit itself."""
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit and sizes[0] == 1
    assert all(min(n for n in sizes if n >= count) - count < max(16, count) for count in range(1, limit + 1))


@pytest.mark.slow
def test_replays_equal_eager_steps(folder: Path, record: Any) -> None:
    """Greedy and random requests; more of them than may run, so that batches shrink and grow; tight pools preempt."""
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.3}, {}, {"temperature": 0.4}]
    config = make_config(folder, num_kvcache_blocks=9)
    runner = graph_runner(config, record)
    counts = count_replays(runner)
    replayed, core = run(runner, samplings, max_tokens=9)
    eager, _ = run(plain_runner(folder, num_kvcache_blocks=9), samplings, max_tokens=9)
    assert replayed == eager
    assert all(counts[n] > 0 for n in (1, 2, 3)) and core.scheduler.num_preemptions > 0


def test_a_mixed_step_is_not_replayed(folder: Path, record: Any) -> None:
    """Decodes beside chunks go through the eager path; steps of decodes alone are replayed; the tokens are the same."""
    options = {"enable_mixed_steps": True, "max_num_batched_tokens": 5}
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.3}, {}, {"temperature": 0.4}]
    runner = graph_runner(make_config(folder, **options), record)
    counts, kinds, launch = count_replays(runner), list[str](), runner.launch

    def watched(batch: ScheduledBatch, *args: Any) -> Any:
        before = sum(counts.values())
        found = launch(batch, *args)
        kinds.append(batch.type.name)
        assert (sum(counts.values()) > before) is (batch.type is SequenceType.DECODE)
        return found

    runner.launch = watched  # type: ignore[method-assign]
    replayed, _ = run(runner, samplings, max_tokens=9)
    assert {*kinds} == {"PREFILL", "MIXED", "DECODE"}
    assert replayed == run(plain_runner(folder), samplings, max_tokens=9)[0]


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
    for i, lens in enumerate(([33], [17, 16], [64, 1, 31], [48, 2])):
        if i == 3:
            del runner.graphs[2]  # now a padded rung
        batch = ragged_decode(runner, lens)
        fill_pools([runner, plain], batch)
        with torch.inference_mode():
            poison(runner)
        (logits, tokens), (wanted, wanted_tokens) = (r.launch(batch) for r in (runner, plain))
        assert torch.allclose(logits, wanted, atol=1e-4) and tokens.tolist() == wanted_tokens.tolist(), lens


@pytest.mark.slow
def test_replays_a_step_ahead(folder: Path, record: Any) -> None:
    """The inputs of a replay come from the token pool; penalties are sampled outside of it."""
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"repetition_penalty": 1.4},
        {"top_k": 5, "temperature": 1.0},
    ]
    runner = graph_runner(make_config(folder, num_kvcache_blocks=9), record)
    counts = count_replays(runner)
    for chosen in (samplings[:2] * 2, samplings):
        ahead, core = run(runner, chosen, max_tokens=9, overlap=True)
        eager, _ = run(plain_runner(folder, num_kvcache_blocks=9), chosen, max_tokens=9)
        assert [tokens for tokens, _ in ahead] == [tokens for tokens, _ in eager]
        assert core.scheduler.num_preemptions > 0 and sum(counts.values()) > 8


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.slow
def test_drafts_on_the_kernels(graphs: bool, folder: Path, record: Any) -> None:
    """Verify steps, replayed and not: several queries of a sequence in one tile, and the tokens of the plain path."""
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"repetition_penalty": 1.4},
        {"top_k": 5, "temperature": 1.0},
    ]
    eager, _ = run(plain_runner(folder, num_kvcache_blocks=30), samplings, max_tokens=9)
    config = make_config(folder, num_kvcache_blocks=30, speculative_config={"num_speculative_tokens": 3},
                         enforce_eager=not graphs)  # fmt: skip
    runner = graph_runner(config, record) if graphs else make_runner(config)
    sizes: list[int] = []
    plan = runner.ops.plan
    runner.ops.plan = lambda *args: sizes.append(int(args[0].max())) or plan(*args)  # type: ignore[func-returns-value]
    drafter = FromABook({}, gap=5)
    propose = drafter.propose

    def with_books(seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        texts = {s.id: tokens for s, (tokens, _) in zip(everyone, eager, strict=True)}
        drafter.books = {tuple(s.token_ids[: s.num_prompt_tokens]): texts[s.id] for s in seqs}
        return propose(seqs, most)

    drafter.propose = with_books  # type: ignore[method-assign]
    everyone: list[Sequence] = []
    drafted, core = run(runner, samplings, max_tokens=9, drafter=drafter, everyone=everyone)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in eager]
    stats = core.scheduler.spec_stats
    assert stats.accepted.total() > 5 and stats.proposed.total() > stats.accepted.total() and 4 in sizes
    assert not graphs or max(runner.graphs) == 12  # type: ignore[attr-defined]


@pytest.mark.slow
def test_many_drafts_of_one_sequence_are_not_replayed(folder: Path, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over `FEW_TOKENS` new tokens get large tiles, which no graph has: eager, with the logits of the plain path."""
    monkeypatch.setattr("atom_mini.gpu.graphs.graph_sizes", lambda most: [most])
    runner, plain = graph_runner(make_config(folder, max_num_seqs=FEW_TOKENS + 1), record), plain_runner(folder)
    counts = count_replays(runner)
    for tokens, replays in ((FEW_TOKENS, 1), (FEW_TOKENS + 1, 1)):
        prompt = made_up_batch(SequenceType.PREFILL, tokens, np.arange(5)[None])
        rows = as_rows(replace(prompt, type=SequenceType.DECODE, scheduled_tokens=np.arange(tokens)))
        logits, wanted = (r.launch(rows)[0].cpu() for r in (runner, plain))
        assert torch.allclose(logits, wanted, atol=1e-4)
        assert sum(counts.values()) == replays


def test_a_launch_returns_logits_whoever_runs_it(folder: Path, record: Any) -> None:
    """Not hidden states, where nobody asked for more than a token; a replay of another size leaves its rows alone."""
    runner, plain = graph_runner(make_config(folder), record), plain_runner(folder)
    for count in (1, 3, 2):
        (logits, token_ids), (wanted, wanted_ids) = (r.launch(first_decodes(count)) for r in (runner, plain))
        assert logits.shape == wanted.shape == (count, runner.config.spec.vocab_size)  # type: ignore[union-attr]
        assert torch.allclose(logits, wanted, atol=1e-4) and token_ids.tolist() == wanted_ids.tolist()


@pytest.mark.slow
def test_filters_are_sampled_inside(folder: Path, record: Any) -> None:
    """A decode with filters is not sampled again after its replay, and its tokens are those of the sort."""
    samplings: list[dict[str, Any]] = [{"temperature": 1.0, "top_k": 5, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.1}, {}]
    runner = graph_runner(make_config(folder), record)
    sampled, counts, sample = list[SequenceType](), count_replays(runner), runner.sample

    def noting(batch: ScheduledBatch, *args: Any) -> Any:
        sampled.append(batch.type)
        return sample(batch, *args)

    runner.sample = noting  # type: ignore[method-assign]
    replayed, _ = run(runner, samplings)
    assert [tokens for tokens, _ in replayed] == [tokens for tokens, _ in run(plain_runner(folder), samplings)[0]]
    assert sum(counts.values()) > 3 and SequenceType.DECODE not in sampled


def test_memory_is_measured_by_the_sort(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that sample need no memory, but drafts and penalties do: it must be left for them."""
    runner, sorted_shapes = make_runner(make_config(folder, enforce_eager=True)), list[tuple[int, ...]]()
    monkeypatch.setattr("atom_mini.sampler.keep_mask", lambda x, *_: sorted_shapes.append(x.shape) or torch.ones_like(x) > 0)
    runner._sample_most()
    assert sorted_shapes == [(runner.config.max_decode_rows, runner.config.spec.vocab_size)]


@pytest.mark.slow
def test_penalties_and_logprobs_are_sampled_outside(folder: Path, record: Any) -> None:
    """And so are the filters beside them: each request gets what it gets from the plain runner."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 5},
        {"logprobs": 2},
        {"temperature": 0.8, "top_p": 0.7},
    ]
    samplings += [{"temperature": 1.0, "min_p": 0.1}, {"repetition_penalty": 1.4}, {}]
    runner = graph_runner(make_config(folder), record)
    counts = count_replays(runner)
    replayed, _ = run(runner, samplings)
    eager, _ = run(plain_runner(folder), samplings)
    assert [tokens for tokens, _ in replayed] == [tokens for tokens, _ in eager] and sum(counts.values()) > 4
    for (_, ours), (_, theirs) in zip(replayed, eager, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.slow
def test_one_runner_many_batches(folder: Path, record: Any) -> None:
    """The same requests with other wishes, then other requests with the same: nothing of the last batch is left."""
    runner, plain = graph_runner(make_config(folder), record), plain_runner(folder)
    for seed, sampling in enumerate([{}, {"temperature": 1.0}, {"temperature": 1.0}, {}]):
        options: Any = {"max_tokens": 3, "seed": seed // 3}
        assert run(runner, [sampling] * 2, **options)[0] == run(plain, [sampling] * 2, **options)[0]


def test_padding_rows_touch_nothing(folder: Path, record: Any) -> None:
    """One sequence in a graph of three writes one slot of its own; the two rows beside it write to the spare block."""
    runner = graph_runner(make_config(folder), record)
    del runner.graphs[1], runner.graphs[2]
    runner.kv_cache.fill_(7.0)
    runner.forward(first_decodes(1))
    changed = (runner.kv_cache != 7).transpose(0, 2)  # [blocks, 2, layers, heads, slots, numbers]
    assert len(changed) == 61 and changed.flatten(1).any(1).nonzero().flatten().tolist() == [0, 60]
    assert changed[0].any(-1).flatten(0, -2).any(0).tolist() == [True, False, False, False]


def test_a_step_larger_than_the_ladder_runs_eagerly(folder: Path, record: Any) -> None:
    """Never an error: without a rung the step is not replayed."""
    runner = graph_runner(make_config(folder), record)
    del runner.graphs[3]
    samplings: list[dict[str, Any]] = [{}] * 3
    assert run(runner, samplings)[0] == run(plain_runner(folder), samplings)[0]


def test_static_inputs_never_move(folder: Path, record: Any) -> None:
    """A recording knows addresses: an upload that does not fit is our mistake and says so."""
    runner = graph_runner(make_config(folder), record)
    with pytest.raises(AssertionError):
        runner.static.upload([np.zeros(10**7)])
    longest = first_decodes(3)
    views = runner._upload(longest, 3)
    assert [v.data_ptr() for v in views] == [v.data_ptr() for v in runner._upload(first_decodes(2), 3)]


def test_only_penalties_and_logprobs_are_not_simple() -> None:
    """A temperature and filters are part of a graph; options that are not set count as off."""
    inside = [SamplingParams(temperature=0.7, top_k=-1), SamplingParams(top_k=3, top_p=0.9, min_p=0.1)]
    assert SamplingArrays(inside).is_simple
    assert SamplingArrays(inside).filters.T.tolist() == [[0, 1, 0], pytest.approx([3, 0.9, 0.1])]
    for sampling in ({"repetition_penalty": 1.1}, {"logprobs": 0}):
        assert not SamplingArrays([SamplingParams(), SamplingParams(**sampling)]).is_simple  # type: ignore[arg-type]


def test_no_collection_during_a_capture() -> None:
    """Off inside, as it was outside, whatever happens."""
    assert gc.isenabled()
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_runner_is_chosen_by_config(folder: Path) -> None:
    """Graphs only on a GPU, and only where they are not turned off."""
    for options in ({"enforce_eager": True}, {"attention": "torch"}):
        assert type(make_runner(make_config(folder, **options))) is ModelRunner
    if not ON_GPU:
        assert type(make_runner(make_config(folder))) is ModelRunner


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


@pytest.mark.parametrize("breakage", ["stale table", "wrong spare slot", "stale sampling", "stale filters", "frozen plan"])
@pytest.mark.slow
def test_comparison_can_fail(breakage: str, folder: Path, record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ways in which graphs go wrong, each noticed by comparing tokens."""
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.2, "top_k": 3}, {"temperature": 1.2}]
    eager, _ = run(plain_runner(folder), samplings, max_tokens=6)
    runner = graph_runner(make_config(folder), record)
    upload = runner.static.upload

    def broken(arrays: list[np.ndarray]) -> list[torch.Tensor]:
        ids, positions, slots, temperature, u, filters, plan = arrays
        if breakage == "stale table":
            plan = np.concatenate([plan[:-1], [0]]).astype(np.int32)
        elif breakage == "wrong spare slot":
            slots = np.where(slots == slots.max(), 0, slots)
        elif breakage == "stale sampling":
            temperature = np.zeros_like(temperature)
        elif breakage == "stale filters":
            filters = np.zeros_like(filters)
            filters[1] = 1
        else:
            plan = plan.copy()
            plan[plan[2] + 5] -= 1
        return upload([ids, positions, slots, temperature, u, filters, plan])

    monkeypatch.setattr(runner.static, "upload", broken)
    assert run(runner, samplings, max_tokens=6)[0] != eager
