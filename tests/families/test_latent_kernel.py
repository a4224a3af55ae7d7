"""The kernel for latents against torch, through the engine, recorded and with drafts; small sizes in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter

import test_graphs
from recording import graph_runner
from show import reference_attention
from small_models import TIGHT, assert_parity, make_prompts
from test_graphs import count_replays, record, run
from test_kernels import DEVICE, FULL, LIMITS, Lens, Step, make_lens, relative_error
from test_latent import CASES, V3, save_mixture

from atom_mini import EngineArgs
from atom_mini.families.latent_kernel import LatentOps
from atom_mini.gpu import tile_configs
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
    several, mixed = [(2, 17), (5, 270), (1, 1)], [(20, 20), (17, 40), (1, 33)]
    return {"decode": decode, "several": several, "mixed": mixed}[kind]


GRID = [
    (16, 16, "decode", torch.bfloat16),
    pytest.param(20, 32, "decode", torch.float16, marks=pytest.mark.slow),
    pytest.param(20, 16, "mixed", torch.float32, marks=pytest.mark.slow),
    (4, 1, "several", torch.float16),
    (4, 32, "mixed", torch.bfloat16),
    (64 if FULL else 3, 16, "decode", torch.float32),
    (128, 32, "mixed", torch.bfloat16),
]


@pytest.mark.parametrize(("heads", "size", "kind", "dtype"), GRID, ids=str)
def test_kernel_equals_torch(heads: int, size: int, kind: str, dtype: torch.dtype) -> None:
    """Contexts of 1 to 700 tokens, cut at 256; 1 to 8 queries, chunks and prompts; NaN where nothing was stored."""
    step = LatentStep(lens_of(kind, size, heads), size, heads, dtype)
    assert step.off() < LIMITS[dtype]


def test_alone_and_among_others() -> None:
    """Exactly the same numbers, whatever else is in the batch."""
    step = LatentStep([(1, 300), (1, 530), (5, 40)], 16, 16, torch.float32)
    together = step.attend(step.ops)
    assert torch.equal(step.pick([1]).attend(step.ops)[0], together[1])
    assert torch.equal(step.pick([2, 1]).attend(step.ops)[:5], together[2:])


@pytest.mark.parametrize("case", ["V3, dense, no query rank", "GLM-4.7-Flash"])
@pytest.mark.slow
def test_engine_on_the_kernel_equals_transformers(case: str, tmp_path: Path) -> None:
    """Chunks, decodes, preemptions, through the kernel alone, and with that of the experts."""
    kind, options = CASES[case]
    model = save_mixture(kind, tmp_path, **options | {"num_hidden_layers": 2})
    how: dict[str, Any] = {"device": DEVICE, "attention": "triton", "enforce_eager": True}
    how |= TIGHT | {"num_kvcache_blocks": 13}
    made = make_runner(EngineArgs(str(tmp_path), dtype="float32", **how))
    assert type(made.ops) is LatentOps  # type: ignore[attr-defined]
    assert_parity(model, tmp_path, how, prompts=[make_prompts()[2][:30], [3] * 9])


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


@pytest.mark.parametrize(
    ("arch", "latent", "dtype", "words"),
    [
        ("sm_90", 500, torch.bfloat16, "500 and 64 numbers"),
        ("gfx1100", 512, torch.bfloat16, "on gfx1100"),
        ("gfx1201", 512, torch.float32, "float32.* on gfx1201"),
    ],
)
def test_where_the_kernel_does_not_fit(
    arch: str, latent: int, dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd widths, RDNA 3, and float32 on RDNA 4 are refused with the option to change."""
    monkeypatch.setattr(tile_configs, "architecture", lambda device: arch)
    with pytest.raises(ValueError, match=f"{words}.*set attention='torch'"):
        LatentOps(torch.device("cpu"), 16, latent, 64, dtype)
