"""Sinks and windows: both kinds of attention against an extra column, and small models."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_checkpoint, save_family
from recording import graph_runner
from small_models import ROOMY, assert_parity
from torch import Tensor

from atom_mini import LLM
from atom_mini.attention import gather_kv
from atom_mini.families.windows import kernel_attention, windowed_attention

torch.set_num_threads(1)
HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from test_kernels import DEVICE, LIMITS, Step, make_lens, make_ops, poisoned_memory, relative_error
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


def in_triton(step: Step, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    kv_heads, dim = step.pool.shape[2], step.q.shape[-1]
    ops = make_ops(kv_heads, step.q.shape[1] // kv_heads, dim, step.q.dtype)
    plan = ops.plan(*np.array(step.lens).T, step.tables)
    plan.data = torch.from_numpy(plan.data).to(DEVICE)
    with poisoned_memory():
        return kernel_attention(ops, step.q, step.pool, step.meta(plan), dim**-0.5, window, sinks)


def some_sinks(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From almost no weight to almost all."""
    return torch.linspace(-4, 7, heads).to(dtype).to(DEVICE)


FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
# lengths; block size, K/V heads, queries for each, size of a head; window; with sinks?; dtype
GRID = [
    ("decode", (16, 2, 1, 64), 0, True, FLOAT),
    ("decode", (256, 1, 3, 96), 37, False, HALF),
    ("decode", (1, 1, 2, 64), 300, True, BRAIN),
    ("decode", (16, 1, 8, 32), 128, True, FLOAT),
    ("several", (16, 2, 1, 64), 5, True, BRAIN),
    pytest.param("several", (32, 1, 7, 64), 128, True, FLOAT, marks=pytest.mark.slow),
    ("several", (1, 1, 2, 64), 37, False, HALF),
    ("mixed", (16, 1, 8, 32), 1, False, FLOAT),
    pytest.param("mixed", (256, 1, 3, 96), 300, True, FLOAT, marks=pytest.mark.slow),
    pytest.param("mixed", (32, 1, 7, 64), 5, True, HALF, marks=pytest.mark.slow),
]


@with_triton
@pytest.mark.parametrize(("kind", "shape", "window", "has_sinks", "dtype"), GRID, ids=str)
def test_attention_equals_a_column_more(
    kind: str,
    shape: tuple[int, int, int, int],
    window: int,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    """Decodes cut along the keys, several queries, prefills; windows shorter than a block and
    longer than the context."""
    step = Step(make_lens(kind, shape[0]), *shape, dtype)
    sinks = some_sinks(shape[1] * shape[2], dtype) if has_sinks else None
    wanted = by_column(step, window, sinks)
    for attend in (in_triton, in_torch):
        assert relative_error(attend(step, window, sinks), wanted) < LIMITS[dtype]


WAYS = [pytest.param(in_triton, marks=with_triton), in_torch]


@with_triton
@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize(("lens", "window"), [([(1, 600)], 100), ([(33, 290)], 40)])
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
def test_alone_or_among_others_bitwise(attend: Attend) -> None:
    lens = [(1, 40), (1, 600), (20, 300)]
    step, sinks = Step(lens, 16, 1, 3, 64, torch.float32), some_sinks(3)
    together = attend(step, 50, sinks).split([n for n, _ in lens])
    for order in (*([i] for i in range(3)), [2, 1, 0]):
        alone = attend(step.pick(order), 50, sinks).split([lens[i][0] for i in order])
        assert all(torch.equal(out, together[i]) for out, i in zip(alone, order, strict=True))


@with_triton
def test_the_long_prompt_is_cut() -> None:
    """More queries than a piece of the torch path has, with and without a window."""
    step = Step([(600, 700)], 16, 1, 2, 16, torch.float32)
    for window in (0, 300):
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


@pytest.mark.parametrize("limit", [7.0, 1e9])
def test_the_clamp(limit: float, tmp_path: Path) -> None:
    """Activations beyond the limit, which random weights never reach: right with the clamp, wrong without it."""
    model = save("gpt-oss", tmp_path)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data *= 8
        layer.mlp.experts.down_proj.data /= 8
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", swiglu_limit=limit)
    if limit == 7:
        assert_parity(model, tmp_path, ROOMY, limit=1e-3)
    else:
        with pytest.raises(AssertionError):
            assert_parity(model, tmp_path, ROOMY, limit=1)


def test_spyre_is_refused(tmp_path: Path) -> None:
    save("gpt-oss", tmp_path)
    options: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 512}
    with pytest.raises(ValueError, match=r"scheduler='spyre' does not support windows or sinks"):
        LLM(str(tmp_path), device="cpu", scheduler="spyre", **options)


@with_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.slow
def test_kernels_in_the_interpreter_equal_transformers(tmp_path: Path) -> None:
    model = save("gpt-oss", tmp_path, num_hidden_layers=2)
    options = ROOMY | {"attention": "triton", "num_kvcache_blocks": 9, "max_model_len": 24}
    prompts = [[7 * n % 300 for n in range(size)] for size in (20, 21)]
    assert_parity(model, tmp_path, options, prompts=prompts)


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
