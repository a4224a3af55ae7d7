"""The kernel for latents against torch, through the engine, recorded and with drafts; small sizes in the interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter

import test_graphs
from recording import graph_runner
from show import reference_attention
from test_graphs import count_replays, record, run
from test_kernels import DEVICE, DTYPES, FULL, LIMITS, Lens, Step, make_lens, relative_error
from test_latent import CASES, TIGHT, V3, generate, make_prompts, save_mixture

import atom_mini.families.latent as latent
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.families.latent_kernel import LATENT_CONFIGS, LatentOps
from atom_mini.gpu import tile_configs
from atom_mini.models import TorchOps
from atom_mini.options.build import make_runner

__all__ = ["record"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")
SHAPES = {16: (64, 16), 20: (32, 16), 128: (16, 32), 4: (32, 16), 3: (128, 64)}  # heads -> latent, rotated part
if FULL:
    SHAPES = dict.fromkeys((4, 16, 20, 64, 128), (512, 64))


class LatentStep(Step):
    """A `Step` over rows of latents; the rows in unused slots are NaN."""

    def __init__(self, lens: Lens, block_size: int, heads: int, dtype: torch.dtype) -> None:
        self.latent, self.rope = SHAPES[heads]
        super().__init__(lens, block_size, 1, heads, self.latent + self.rope, dtype)
        self.pool = self.pool[:1].expand(2, -1, -1, -1, -1)
        self.ops = LatentOps(torch.device(DEVICE), heads, self.latent, self.rope, dtype)

    def wanted(self) -> Tensor:
        """The oracle's result, in float32."""
        args = self.q.float(), self.pool.float(), self.meta(), self.q.shape[-1] ** -0.5
        return reference_attention(*args)[..., : self.latent]

    def off(self) -> float:
        return relative_error(self.attend(self.ops), self.wanted())


def lens_of(kind: str, size: int, heads: int) -> Lens:
    """Around the borders of tiles, blocks and splits; fewer in the interpreter, which is slow."""
    if FULL:
        return make_lens(kind, size)
    if heads == 128:
        return {"decode": [(1, 1), (1, 300)], "several": [(5, 40)], "mixed": [(7, 20)]}[kind]
    decode = [(1, n) for n in (1, 15, 16, 17, 256, 257, 700 if heads == 16 else 300)]
    return {"decode": decode, "several": [(2, 17), (5, 270), (1, 1)], "mixed": [(20, 20), (17, 40), (1, 33)]}[kind]
KINDS = ["decode", "several", "mixed"]
GRID = [(h, size, kind, d) for h in SHAPES for size, kind, d in zip((16, 1, 32), KINDS, DTYPES, strict=True)]
GRID += [(16, 16, kind, torch.bfloat16) for kind in ("decode", "several")]


@pytest.mark.parametrize(("heads", "size", "kind", "dtype"), GRID, ids=str)
def test_kernel_equals_torch(heads: int, size: int, kind: str, dtype: torch.dtype) -> None:
    """Contexts of 1 to 700 tokens, cut at 256; 1 to 8 queries, chunks and prompts; NaN where nothing was stored."""
    step = LatentStep(lens_of(kind, size, heads), size, heads, dtype)
    assert step.off() < LIMITS[dtype]


def test_torch_takes_the_same_view() -> None:
    """The torch path on the view that shows the memory twice: the result is cut to the latent."""
    step = LatentStep([(1, 70), (3, 20)], 16, 16, torch.float32)
    out = latent.attend_latent(TorchOps(), step.latent, step.q, step.pool[:1], step.meta(), step.q.shape[-1] ** -0.5)
    assert relative_error(out, step.wanted()) < 1e-6


def test_alone_and_among_others() -> None:
    """Exactly the same numbers, whatever else is in the batch."""
    step = LatentStep([(1, 300), (1, 530), (5, 40)], 16, 16, torch.float32)
    together = step.attend(step.ops)
    assert torch.equal(step.pick([1]).attend(step.ops)[0], together[1])
    assert torch.equal(step.pick([2, 1]).attend(step.ops)[:5], together[2:])


@pytest.mark.parametrize("mistake", ["scale", "rotated part", "mask", "heads"])
def test_the_comparison_can_fail(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = LatentStep([(1, 70), (3, 260)], 16, 4 if mistake == "mask" else 20, torch.float32)
    right = step.attend(step.ops)
    if mistake == "scale":
        wrong = step.ops.attend(step.q, step.pool, planned(step), 0.9 * step.q.shape[-1] ** -0.5)
    elif mistake == "rotated part":
        step.q[..., step.latent :] = 0
        wrong = step.attend(step.ops)
    elif mistake == "mask":  # the first of three queries sees the last

        def unmask(plan: Any) -> None:
            at = plan.data[2] + 8 * np.arange(plan.num_items)
            plan.data[at + 2] = plan.data[at + 5] - 1

        wrong = step.attend(step.ops, unmask)
    else:  # the second tile of 20 heads is left out
        step.ops.tiles = [(16, 16)] * 2
        wrong = step.ops.attend(step.q, step.pool, planned(step, rows=20), step.q.shape[-1] ** -0.5)
    assert not relative_error(wrong, right) < 1e-3


def planned(step: LatentStep, rows: int = 0) -> Any:
    tiles, step.ops.tiles = step.ops.tiles, [(rows, 16)] * 2 if rows else step.ops.tiles
    plan = step.ops.plan(*np.array(step.lens).T, step.tables)
    plan.data, step.ops.tiles = torch.from_numpy(plan.data).to(DEVICE), tiles
    return step.meta(plan)


EXPERTS = pytest.mark.skipif(find_spec("atom_mini.families.grouped") is None, reason="no kernel for experts")


@pytest.mark.parametrize("case", ["V3, dense, no query rank", pytest.param("GLM-4.7-Flash", marks=EXPERTS)])
@pytest.mark.smoke
def test_engine_on_the_kernel_equals_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes, prefix hits, through the kernel alone, and with that of the experts."""
    kind, options = CASES[case]
    model = save_mixture(kind, tmp_path, **options | {"num_hidden_layers": 2})
    how: dict[str, Any] = {"device": DEVICE, "attention": "triton", "enforce_eager": True, **TIGHT}
    assert type(make_runner(EngineArgs(str(tmp_path), dtype="float32", **how)).ops) is LatentOps
    recorder, sequences, _ = generate(tmp_path, [make_prompts()[1][:30], [3] * 9], **how)
    assert recorder.num_chunks > 0 and recorder.num_decode_steps > 0
    assert max(recorder.errors(model, sequences).values()) <= 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dense layer: the loop over experts cannot be recorded."""
    path = tmp_path_factory.mktemp("dense")
    shape = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 90, "max_position_embeddings": 320}
    save_mixture("deepseek_v3", path, **V3 | {"n_group": 1, "topk_group": 1} | shape)
    return path


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.slow
def test_replays_equal_eager_steps(overlap: bool, folder: Path, record: Any) -> None:
    """Recorded decodes, batches that shrink and grow, preemption."""
    options: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 1.3}, {}]
    runner = graph_runner(test_graphs.make_config(folder, num_kvcache_blocks=9), record)
    counts = count_replays(runner)
    replayed, core = run(runner, options, max_tokens=9, overlap=overlap)
    eager, _ = run(test_graphs.plain_runner(folder, num_kvcache_blocks=9), options, max_tokens=9)
    assert [tokens for tokens, _ in replayed] == [tokens for tokens, _ in eager]
    assert sum(counts.values()) > 3 and core.scheduler.num_preemptions > 0
    assert type(runner.ops) is LatentOps


def test_drafts_on_the_kernel(folder: Path) -> None:
    """Verify steps have several queries per sequence: the same tokens as in torch without drafts."""
    drafts: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    prompts, texts, params = [[5, 6, 7] * 6, [1, 2]], [], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for kind, options in (("torch", {}), ("triton", drafts)):
        with LLM(str(folder), attention=kind, dtype="float32", num_kvcache_blocks=60, **options) as llm:
            texts.append([out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_where_the_kernel_does_not_fit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """RDNA 3, float32 on RDNA 4 and odd widths are refused with the option to change. An explicit attention='torch' works
    without a message."""
    with pytest.raises(ValueError, match=r"500 and 64 numbers .* set attention='torch'"):
        LatentOps(torch.device("cpu"), 16, 500, 64, torch.bfloat16)
    monkeypatch.setattr(tile_configs, "architecture", lambda device: "gfx1100")
    with pytest.raises(ValueError, match="on gfx1100: set attention='torch'"):
        LatentOps(torch.device("cpu"), 16, 512, 64, torch.bfloat16)
    monkeypatch.setattr(tile_configs, "architecture", lambda device: "gfx1201")
    assert LatentOps(torch.device("cpu"), 16, 512, 64, torch.bfloat16).configs == LATENT_CONFIGS["gfx1201"]
    with pytest.raises(ValueError, match=r"float32\) on gfx1201: set attention='torch'"):
        LatentOps(torch.device("cpu"), 16, 512, 64, torch.float32)
    config = EngineArgs(str(folder), attention="torch", device="cpu", num_kvcache_blocks=9)
    assert not isinstance(make_runner(config).ops, LatentOps)


def test_every_target_of_the_paged_kernel_is_named() -> None:
    """Or refused on purpose."""
    assert tile_configs.TILE_CONFIGS.keys() - LATENT_CONFIGS.keys() == {"gfx1100", "gfx1102", "float32 gfx1"}
    assert all(config.rows in (16, 32) for pair in LATENT_CONFIGS.values() for config in pair)
