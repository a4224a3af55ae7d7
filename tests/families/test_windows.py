"""Sinks and windows: both kinds of attention against an extra column, and families with them against transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, recorded, save_checkpoint, save_family, spec_of
from recording import graph_runner
from test_parity import GREEDY, ROOMY, TIGHT, assert_parity, make_prompts
from torch import Tensor

from atom_mini import LLM, EngineArgs
from atom_mini.attention import gather_kv
from atom_mini.families import mixture, windows
from atom_mini.families.mixture import split_experts
from atom_mini.families.specs import read_gpt_oss
from atom_mini.families.windows import kernel_attention, windowed_attention
from atom_mini.loading import load_model
from atom_mini.models import TorchOps

torch.set_num_threads(1)
HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language as tl
    from test_kernels import DEVICE, LIMITS, Step, make_lens, make_ops, poisoned_memory, relative_error

    from atom_mini.gpu import triton_attention
with_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")
Attend = Callable[..., Tensor]


# Both ways to attend


def by_column(step: Step, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """The oracle, in float64: all scores in one row, masked ones -inf, a sink as an extra score."""
    out = []
    rows = zip(step.q.cpu().double().split([n for n, _ in step.lens]), step.tables, step.lens, strict=True)
    for q, table, (n, length) in rows:
        k, v = gather_kv(step.pool.cpu().double(), torch.from_numpy(table), length)
        k, v = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
        scores = torch.einsum("nhd,hld->hnl", q, k) * q.shape[-1] ** -0.5
        for row, i in enumerate(range(length - n, length)):
            scores[:, row, i + 1 :] = -math.inf
            scores[:, row, : max(0, i - window + 1) if window else 0] = -math.inf
        if sinks is not None:
            column = sinks.cpu().double()[:, None, None].expand(-1, n, 1)
            scores, v = torch.cat([scores, column], -1), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def in_torch(step: Step, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    return windowed_attention(step.q, step.pool, step.meta(), step.q.shape[-1] ** -0.5, window, sinks)


def in_triton(
    step: Step, window: int = 0, sinks: Tensor | None = None, change: Callable[[Any, Any], object] | None = None
) -> Tensor:
    """`change(ops, plan)` may enlarge the plan."""
    kv_heads, dim = step.pool.shape[2], step.q.shape[-1]
    ops = make_ops(kv_heads, step.q.shape[1] // kv_heads, dim, step.q.dtype)
    plan = ops.plan(*np.array(step.lens).T, step.tables)
    if change:
        change(ops, plan)
    plan.data = torch.from_numpy(plan.data).to(DEVICE)
    with poisoned_memory():
        return kernel_attention(ops, step.q, step.pool, step.meta(plan), dim**-0.5, window, sinks)


def some_sinks(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From almost no weight to almost all."""
    return torch.linspace(-4, 7, heads).to(dtype).to(DEVICE)


SHAPES = [(16, 2, 1, 64), (256, 1, 3, 96), (1, 1, 2, 64), (16, 1, 8, 32), (32, 1, 7, 64)] if HAS_TRITON else []
LOOKS = [(0, True), (1, False), (5, True), (37, False), (128, True), (300, True)]  # window, sinks
KINDS = ["decode", "several", "mixed"]


@with_triton
@pytest.mark.parametrize(("shape", "kind"), [*itertools.product(SHAPES, KINDS)], ids=str)
def test_torch_equals_a_column_more(shape: tuple[int, int, int, int], kind: str) -> None:
    """Windows shorter than a block, not a multiple of one, and longer than the context."""
    step = Step(make_lens(kind, shape[0]), *shape, torch.float32)
    for window, has_sinks in LOOKS:
        sinks = some_sinks(shape[1] * shape[2]) if has_sinks else None
        assert relative_error(in_torch(step, window, sinks), by_column(step, window, sinks)) < 1e-5, (window, has_sinks)


CASES = list(itertools.product(enumerate(SHAPES), enumerate(KINDS), enumerate(LOOKS)))
CASES = [(s, k, look) for (i, s), (j, k), (m, look) in CASES if (i + 2 * j + 3 * m) % 6 == 0]


@with_triton
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_kernel_equals_a_column_more(number: int) -> None:
    """Decodes cut along the keys, several queries, prefills; blocks larger and smaller than a tile; three types."""
    shape, kind, (window, has_sinks) = CASES[number]
    dtype = list(LIMITS)[number % 3]
    step, sinks = Step(make_lens(kind, shape[0]), *shape, dtype), some_sinks(shape[1] * shape[2], dtype)
    given = sinks if has_sinks else None
    assert relative_error(in_triton(step, window, given), by_column(step, window, given)) < LIMITS[dtype]


def planted(step: Step, query: int, ahead: int) -> Step:
    """The same step with a huge value in each sequence, `ahead` of the key at the position of its query `query`."""
    other = step.pick(list(range(len(step.lens))))
    other.pool, size = step.pool.clone(), step.pool.shape[3]
    for table, (n, length) in zip(step.tables, step.lens, strict=True):
        place = length - n + min(query, n - 1) - ahead
        if place >= 0:
            other.pool[1, table[place // size], :, place % size] = 1e4
    return other


def moved(attend: Attend, step: Step, window: int, query: int, ahead: int) -> tuple[bool, bool]:
    """Whether that huge value changes (any, every) output of these queries."""
    lens = [(n, length, min(query, n - 1)) for n, length in step.lens]
    ends = np.cumsum([n for n, _ in step.lens])
    rows = [end - n + i for end, (n, length, i) in zip(ends, lens, strict=True) if length - n + i >= ahead]
    changes = attend(planted(step, query, ahead), window)[rows] != attend(step, window)[rows]
    by_row = changes.flatten(1).any(1)
    assert rows
    return bool(by_row.any()), bool(by_row.all())


WAYS = [pytest.param(in_triton, marks=with_triton), in_torch]
PLANTS = [  # sequences, block size, window, which query
    ([(1, 40), (1, 257), (1, 530), (1, 600)], 16, 20, 0),
    ([(1, 40), (1, 300)], 1, 16, 0),
    ([(1, 300), (1, 513)], 256, 256, 0),
    ([(1, 300), (1, 777)], 32, 257, 0),
    ([(3, 40), (8, 270), (5, 530)], 16, 33, 0),
    ([(3, 40), (8, 270), (5, 530)], 16, 33, 99),
    ([(20, 20), (18, 60)], 16, 12, 1),
    ([(20, 20), (18, 60)], 8, 17, 99),
]


@with_triton
@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize(("lens", "block_size", "window", "query"), PLANTS)
def test_the_edge_of_the_window(
    lens: list[tuple[int, int]], block_size: int, window: int, query: int, attend: Attend
) -> None:
    """A huge value at i - W is not seen, one at i - W + 1 is: across blocks, tiles, parts, queries."""
    step = Step(lens, block_size, 1, 2, 32, torch.float32)
    assert moved(attend, step, window, query, ahead=window) == (False, False)
    assert moved(attend, step, window, query, ahead=window - 1) == (True, True)
    assert moved(attend, step, window + 1, query, ahead=window)[1]  # so a key too many would be seen,
    assert not moved(attend, step, window - 1, query, ahead=window - 1)[0]  # and one too few


@with_triton
@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize(("lens", "window"), [([(1, 600)], 100), ([(4, 300)], 20), ([(33, 290)], 40)])
def test_what_lies_before_the_window_is_not_read(lens: list[tuple[int, int]], window: int, attend: Attend) -> None:
    """Only the window of the first query and at most a tile before it: all other keys may be NaN."""
    step = Step(lens, 16, 1, 2, 32, torch.float32)
    wanted, (n, length) = attend(step, window, some_sinks(2)), lens[0]
    tile = max(make_ops(1, 2, 32, torch.float32).tiles)[1]
    lost = (length - n + 1 - window) // tile * tile // 16
    step.pool[:, step.tables[0, :lost]] = math.nan
    assert lost and torch.equal(attend(step, window, some_sinks(2)), wanted)


@with_triton
def test_all_parts_empty_but_one() -> None:
    """A window of 1 at the start of the last part: every other part of the keys has weight 0, and does not give NaN."""
    step = Step([(1, 257), (1, 1025), (2, 770)], 16, 1, 2, 32, torch.float32)
    for sinks in (None, some_sinks(2)):
        assert relative_error(in_triton(step, 1, sinks), by_column(step, 1, sinks)) < 1e-5


@with_triton
@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize("lens", [[(1, 40), (1, 600), (2, 300)], [(6, 6), (20, 100), (18, 64)]], ids=str)
def test_alone_or_among_others_bitwise(lens: list[tuple[int, int]], attend: Attend) -> None:
    step, sinks = Step(lens, 16, 1, 3, 64, torch.float32), some_sinks(3)
    together = attend(step, 50, sinks).split([n for n, _ in lens])
    for order in (*([i] for i in range(3)), [2, 1, 0]):
        alone = attend(step.pick(order), 50, sinks).split([lens[i][0] for i in order])
        assert all(torch.equal(out, together[i]) for out, i in zip(alone, order, strict=True))


@with_triton
def test_launched_for_a_larger_decode() -> None:
    """As in a recorded graph, whose counts are those of the largest plan."""

    def enlarge(ops: Any, plan: Any) -> None:
        largest = ops.largest_decode_plan(num_seqs=4, longest=600, block_size=16)
        largest.data[: len(plan.data)] = plan.data
        plan.__dict__.update(vars(largest))

    step, sinks = Step([(1, 300), (1, 40), (1, 1)], 16, 1, 4, 64, torch.float32), some_sinks(4)
    assert torch.equal(in_triton(step, 50, sinks, enlarge), in_triton(step, 50, sinks))


if HAS_TRITON:

    @triton.jit
    def start_of_every_split(begin, head, sink_ptr):  # type: ignore[no-untyped-def]
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        return sink, sink * 0 + 1


@with_triton
@pytest.mark.parametrize("mistake", ["missing", "twice", "in every split"])
@pytest.mark.parametrize("window", [0, 300])
def test_a_wrong_sink_is_seen(mistake: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink counts once, in the first of three splits of the keys, even where that split lies before the window."""
    step, sinks = Step([(1, 600)], 16, 1, 4, 32, torch.float32), some_sinks(4)
    wanted = by_column(step, window, sinks)

    assert relative_error(in_triton(step, window, sinks), wanted) < 1e-5
    if mistake == "in every split":
        if DEVICE != "cpu":
            pytest.skip("the interpreter looks a kernel's functions up when it runs")
        monkeypatch.setattr(triton_attention, "_start", start_of_every_split)
    given = {"missing": None, "twice": sinks + math.log(2)}.get(mistake, sinks)
    assert relative_error(in_triton(step, window, given), wanted) > 0.05


@with_triton
def test_the_long_prompt_is_cut() -> None:
    """More queries than a piece of the torch path has, with and without a window."""
    step = Step([(600, 700)], 16, 1, 2, 16, torch.float32)
    for window in (0, 40, 300):
        assert relative_error(in_torch(step, window), by_column(step, window)) < 1e-5


# Whole models

SLIDES = {"sliding_window": 16, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
YARN |= {"original_max_position_embeddings": 64}
OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16, "rope_parameters": YARN}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", OSS),
    "Mistral 7B v0.1": ("mistral", {"sliding_window": 16}),
    "Mixtral": ("mixtral", {"sliding_window": 9, "num_local_experts": 4}),
    "Qwen2": ("qwen2", {**SLIDES, "max_window_layers": 2}),
    "Qwen3": ("qwen3", {**SLIDES, "max_window_layers": 1, "head_dim": 24}),
    "SmolLM3": ("smollm3", {**SLIDES, "no_rope_layers": [1, 0, 1, 0]}),
    "Qwen2-MoE": ("qwen2_moe", {**SLIDES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                "shared_expert_intermediate_size": 48, "max_window_layers": 3}),
}  # fmt: skip


def save(name: str, folder: Path, **changes: Any) -> Any:
    """A small model, its sinks where a head's softmax feels them."""
    kind, options = MODELS[name]
    model = save_family(kind, folder, **options | changes)
    for weight_name, weight in model.named_parameters():
        if "sinks" in weight_name:
            torch.nn.init.normal_(weight, 2.0, 1.0)
    model.save_pretrained(folder)
    return model


def largest_error(model: Any, folder: Path, prompts: list[list[int]] | None = None, **options: Any) -> float:
    with LLM(str(folder), device="cpu", **ROOMY | options) as llm, recorded(llm) as recorder:
        outs = llm.generate(prompts or make_prompts()[4:6], GREEDY, use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    return max(recorder.errors(model, sequences).values())


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prefill, chunks, decodes, prefix hits, preemptions: `assert_parity`."""
    assert_parity(save(name, tmp_path), tmp_path)


def test_chunks_of_seven_and_thirty_two_at_once(tmp_path: Path) -> None:
    model = save("gpt-oss", tmp_path)
    many = make_prompts() + make_prompts(1) + make_prompts(2) + make_prompts(3)
    for prompts, options in ((many[:2], {"max_num_batched_tokens": 7}), (many, {}), (many[5:6], {})):
        assert largest_error(model, tmp_path, prompts, **options) <= 1e-4


@with_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.slow
def test_kernels_in_the_interpreter_equal_transformers(tmp_path: Path) -> None:
    model = save("gpt-oss", tmp_path, num_hidden_layers=2)
    few, prompts = replace(GREEDY, max_tokens=3), [make_prompts()[n] for n in (1, 4)]
    with LLM(str(tmp_path), device="cpu", attention="triton", **TIGHT) as llm, recorded(llm) as recorder:
        outs = llm.generate(prompts, few, use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    assert recorder.num_chunks > 0 and recorder.num_decode_steps > 0
    assert max(recorder.errors(model, sequences).values()) <= 1e-4


def window_off(by: int) -> Callable[..., Tensor]:
    def attend(*args: Any, window: int, sinks: Tensor | None) -> Tensor:
        return windowed_attention(*args, window + by if window else 0, sinks)

    return attend


INTERLEAVED = mixture.interleaved


def take_halves(read: Any, i: int, n: int) -> Tensor:
    """As if gate and up were contiguous in the file."""
    return INTERLEAVED(read, 0, 1).chunk(n)[i]


def route_over_all(logits: Tensor, routing: Any, correction: Any = None) -> tuple[Tensor, Tensor]:
    return ROUTE(logits, type(routing)(**vars(routing) | {"scoring": "softmax"}))


ROUTE, ACTIVATE = mixture.route, mixture.activate
ATTEND: dict[str, Attend] = {
    "no sinks": lambda *args, window, sinks: windowed_attention(*args, window),
    "sinks twice": lambda *args, window, sinks: windowed_attention(*args, window, sinks + math.log(2)),
    "one key more": window_off(1),
    "one key less": window_off(-1),
}
MISTAKES = {name: (windows, "windowed_attention", attend) for name, attend in ATTEND.items()}
MISTAKES["plain SwiGLU"] = (mixture, "activate", lambda gate_up, limit: ACTIVATE(gate_up))
MISTAKES["halves, not interleaved"] = (mixture, "interleaved", take_halves)
MISTAKES["softmax over all"] = (mixture, "route", route_over_all)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_moves_a_logit(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake moves some logit by more than 1."""
    model = save("gpt-oss", tmp_path)
    monkeypatch.setattr(*MISTAKES[mistake])
    assert largest_error(model, tmp_path) > 1


@pytest.mark.parametrize("limit", [7.0, 1e9])
def test_the_clamp(limit: float, tmp_path: Path) -> None:
    """Activations beyond the limit, which random weights never reach: right with the clamp, wrong without it."""
    model = save("gpt-oss", tmp_path)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data *= 8
        layer.mlp.experts.down_proj.data /= 8
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", swiglu_limit=limit)
    error = largest_error(model, tmp_path)
    assert error <= 1e-3 if limit == 7 else error > 1, error


def test_a_config_may_leave_the_limit_out() -> None:
    """Transformers' own had no such field in 5.17, and clamped at 7."""
    config = SimpleNamespace(num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=1, intermediate_size=8)
    assert read_gpt_oss(config)["experts"].limit == 7


# Loading, and the rest of the engine


def test_every_weight_finds_its_place_in_bfloat16(tmp_path: Path) -> None:
    model = save("gpt-oss", tmp_path)
    ours = load_model(spec_of(model.config), tmp_path, 64, torch.device("cpu"), torch.bfloat16).model.layers[1]
    theirs = model.model.layers[1]
    assert torch.equal(ours.self_attn.sinks, theirs.self_attn.sinks.bfloat16())
    assert torch.equal(ours.mlp.router.bias, theirs.mlp.router.bias)
    gate_up, _, biases = ours.mlp.gate_up.stacked()
    file = theirs.mlp.experts.gate_up_proj.bfloat16()  # [E, H, 2I]
    for half, turn in zip(gate_up.chunk(2, 1), (0, 1), strict=True):
        assert torch.equal(half, file[..., turn::2].mT)
    assert torch.equal(biases[3, 96:], theirs.mlp.experts.gate_up_proj_bias[3, 1::2].bfloat16())
    assert torch.equal(ours.mlp.down.stacked()[0], theirs.mlp.experts.down_proj.mT.bfloat16())


def test_every_expert_is_read_once(tmp_path: Path) -> None:
    """The slices cover the file; another number of experts is a wrong shape."""
    model = save("gpt-oss", tmp_path)
    file = torch.arange(8 * 4 * 6.0).view(8, 4, 6)
    adapted = split_experts({"x.experts.gate_up_proj": lambda part: file[part]}, spec_of(model.config))
    assert torch.equal(torch.cat([read().flatten() for read in adapted.values()]).sort().values, file.flatten())
    for count in (6, 10):
        edit_json(tmp_path / "config.json", num_local_experts=count)
        with pytest.raises(ValueError, match="in the file"):
            LLM(str(tmp_path), device="cpu", **ROOMY)


@pytest.mark.parametrize("other", [
    {"prefix_cache": "radix"}, {"overlap": True}, {"trace": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
])  # fmt: skip
def test_with_the_rest(other: dict[str, Any], tmp_path: Path) -> None:
    """The same tokens with each of the engine's other options."""
    save("gpt-oss", tmp_path)
    texts = []
    for chosen in ({}, other):
        with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=64, **chosen) as llm:
            texts.append([out.token_ids for out in llm.generate(make_prompts(), GREEDY, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    save("gpt-oss", tmp_path)
    options = {"scheduler": "spyre", "max_model_len": 128, "max_num_batched_tokens": 512}
    with pytest.raises(ValueError, match=r"scheduler='spyre' does not support windows or sinks"):
        LLM(str(tmp_path), device="cpu", **options)
    edit_json(tmp_path / "config.json", hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act='gelu' is not supported"):
        LLM(str(tmp_path), device="cpu")


def test_a_dense_model_takes_the_plain_path(tmp_path: Path) -> None:
    """Qwen3 without a window: the operations' own way to attend."""
    save_checkpoint("qwen3", tmp_path)
    config = EngineArgs(str(tmp_path), max_model_len=64)
    ops = TorchOps()
    model = load_model(config.spec, tmp_path, 64, torch.device("cpu"), torch.float32, ops)
    assert all(layer.self_attn.attn.attend == ops.attend for layer in model.model.layers)


@with_triton
@pytest.mark.slow
def test_replays_equal_eager_steps(tmp_path: Path) -> None:
    """Recorded decodes of layers with and without a window."""
    import test_graphs as graphs

    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90, "num_hidden_layers": 2}
    save_checkpoint("qwen2", tmp_path, **shape, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    record = graphs.DeviceGraph
    if not graphs.ON_GPU:
        from recording import load_recorded_graph

        record = load_recorded_graph()
    runner = graph_runner(graphs.make_config(tmp_path, max_num_seqs=2), record)
    counts, options = graphs.count_replays(runner), [{}, {"temperature": 0.9}]
    replayed, _ = graphs.run(runner, options, max_tokens=5)
    eager, _ = graphs.run(graphs.plain_runner(tmp_path), options, max_tokens=5)
    assert replayed == eager and sum(counts.values()) > 3
