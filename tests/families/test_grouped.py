"""The product with the chosen experts: the grouped kernel against its definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import recorded, save_family
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter

from drawn import example, given, settings, st
from test_kernels import poisoned_memory, relative_error

from atom_mini import LLM, SamplingParams
from atom_mini.families import grouped
from atom_mini.families.grouped import sort_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of the relative error
E = 33
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Exponentials that overflow on the way to a right result, of which the interpreter's NumPy complains.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class Layer:
    """Random experts whose sizes are not multiples of a tile, and T tokens with k different ones each."""

    def __init__(
        self, tokens: int, k: int = 4, hidden: int = 40, inner: int = 24, biased: bool = True, limit: float = 0.0,
        experts: int = E, dtype: torch.dtype = torch.float32, device: str = DEVICE,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(tokens)
        self.ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :k].to(device)
        self.weights, self.limit = torch.rand(tokens, k, generator=g).to(device), limit

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=g)).to(device, dtype)

        self.x = random(tokens, hidden)
        self.mats: list[Any] = [random(experts, 2 * inner, hidden, scale=hidden**-0.5)]
        self.mats.append(random(experts, hidden, inner, scale=inner**-0.5))
        self.biases = [random(experts, 2 * inner), random(experts, hidden)] if biased else [None, None]

    def run(self) -> Tensor:
        """Through the kernels."""
        with poisoned_memory():
            args = self.x, self.ids, self.weights, *self.stacks(), self.limit
            return grouped.grouped_experts(*args)

    def stacks(self) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Weights, scales, biases of both products."""
        pairs = [w if isinstance(w, tuple) else (w, None) for w in self.mats]
        return [(*pair, bias) for pair, bias in zip(pairs, self.biases, strict=True)]

    def expert(self, rows: Tensor, e: int) -> Tensor:
        """One expert's output in float32, the formulas written out."""
        biases = [0 if b is None else b[e].float() for b in self.biases]
        gate, up = (rows.float() @ self.mats[0][e].float().T + biases[0]).chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit) + 1
        inner = gate / (1 + torch.exp(-(1.702 if self.limit else 1.0) * gate)) * up
        return inner @ self.mats[1][e].float().T + biases[1]

    def wanted(self) -> Tensor:
        """The definition, in float32: choices of padding add nothing."""
        out = torch.zeros_like(self.x, dtype=torch.float32)
        for e in self.ids[self.ids < len(self.mats[0])].unique().tolist():
            token, choice = (self.ids == e).nonzero(as_tuple=True)
            out.index_add_(0, token, self.weights[token, choice, None] * self.expert(self.x[token], e))
        return out


CASES = [
    (1, torch.float32),
    (5, torch.bfloat16),
    pytest.param(70, torch.float16, marks=pytest.mark.slow),
    pytest.param(300, torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tokens", "dtype"), CASES, ids=str)
def test_grouped(tokens: int, dtype: torch.dtype) -> None:
    """Decodes and prompts, in small tiles and (70 tokens with 8 experts, 300) in large ones."""
    is_odd = tokens % 2 == 1
    layer = Layer(tokens, 8 if tokens == 70 else 2, biased=not is_odd, limit=float(is_odd), dtype=dtype)
    before = [t.clone() for t in (layer.x, layer.ids, layer.weights)]
    out = layer.run()
    assert relative_error(out, layer.wanted()) < LIMITS[dtype] and out.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip((layer.x, layer.ids, layer.weights), before, strict=True))


@pytest.mark.parametrize(("hidden", "inner"), [(65, 33), (300, 1)])
def test_sizes_on_and_off_the_tile(hidden: int, inner: int) -> None:
    """Both sizes: each is the length of a sum in one product and the number of columns in the other."""
    layer = Layer(2, 3, hidden, inner, dtype=torch.float32)
    assert relative_error(layer.run(), layer.wanted()) < LIMITS[layer.x.dtype]


def test_padding_rows_fetch_nothing() -> None:
    """Their rows are 0. Their x is NaN and does not affect other rows. Alone they read nothing."""
    layer, rows = Layer(6), [1, 4, 5]
    layer.ids = layer.ids.to(torch.int32)
    wanted = Layer(6).wanted()
    layer.ids[rows], layer.x[rows], layer.weights[rows] = E, math.nan, math.nan
    unused = [e for e in range(E) if e not in layer.ids]
    for w in (*layer.mats, *layer.biases):
        w[unused] = math.nan
    out = layer.run()
    assert not out[rows].any() and relative_error(out[[0, 2, 3]], wanted[[0, 2, 3]]) < 1e-5
    layer.ids[:] = E
    for w in (*layer.mats, *layer.biases):
        w[:] = math.nan
    assert not layer.run().any()


def test_one_choice_of_no_expert() -> None:
    """A single choice may be the padding id: its weight and its row add nothing."""
    layer = Layer(5)
    layer.ids[2, 1], layer.weights[2, 1] = E, math.nan
    out = layer.run()
    layer.weights[2, 1] = 0
    assert relative_error(out, layer.wanted()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 8])
def test_the_same_bits_again_alone_and_in_another_order(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's bits do not depend on the run, on the other rows, or on its place. In float32: 16 bits hide another order.
    In the interpreter a tile is multiplied row by row, since NumPy may give a row other bits at another place."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.stack([row @ b for row in a]).astype(dtype))
    layer = Layer(7, k, hidden=160)
    order = torch.tensor([4, 0, 2, 6, 1, 3, 5], device=DEVICE)
    together = layer.run()
    assert torch.equal(layer.run(), together)
    x, ids, weights = layer.x, layer.ids, layer.weights
    for rows in (order, order[:1], order[3:5]):
        layer.x, layer.ids, layer.weights = x[rows], ids[rows], weights[rows]
        assert torch.equal(layer.run(), together[rows])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
@example(700, 3, 5, 0)  # more ids than one chunk
def test_sort(tokens: int, k: int, experts: int, seed: int) -> None:
    """A stable sort by expert, with the padding pairs last, in one chunk of ids or several."""
    ids = torch.randint(0, experts + 1, (tokens, k), generator=torch.Generator().manual_seed(seed))
    starts, pairs = sort_pairs(ids.to(DEVICE), experts)
    assert pairs.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert starts.tolist() == [int((ids < e).sum()) for e in range(experts + 1)]


def pack(experts: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 weights: every byte, and scales of both signs."""
    g = torch.Generator().manual_seed(size)
    blocks = torch.randint(256, (experts, rows, size // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(119, 124, (experts, rows, size // 32), generator=g, dtype=torch.uint8)
    return blocks.to(DEVICE), scales.to(DEVICE)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers in float32, unpacked one by one."""
    halves = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).long().cpu()
    numbers = VALUES[halves % 8] * torch.where(halves < 8, 1.0, -1.0)
    return (numbers * torch.exp2(scales.cpu().float() - 127).repeat_interleave(32, -1)).to(blocks.device)


@pytest.mark.parametrize(
    ("tokens", "both", "dtype"),
    [(3, True, torch.float16), (3, False, torch.bfloat16)],
    ids=str,
)
def test_packed(tokens: int, both: bool, dtype: torch.dtype) -> None:
    """Packed weights give the results of the numbers they encode: near the loop, and in the interpreter the unpacked one's bits."""
    layer = Layer(tokens, 2, 160, 96, limit=1.0, experts=6, dtype=dtype)
    packed = [pack(6, 192, 160), pack(6, 160, 96)]
    layer.mats = [unpack(*w).to(dtype) for w in packed]
    wanted, plain = layer.wanted(), layer.run()
    layer.mats = packed if both else [packed[0], layer.mats[1]]
    out = layer.run()
    assert relative_error(out, wanted) < LIMITS[dtype]
    assert DEVICE == "cuda" or torch.equal(out, plain)


def test_packed_weights_are_not_for_float32() -> None:
    layer = Layer(3, 2, 64, 32)
    layer.mats[1] = pack(E, 64, 32)
    with pytest.raises(ValueError, match=r"dtype=torch.float32 does not go with packed experts; use bfloat16"):
        layer.run()


def test_matrices_of_another_size_are_refused() -> None:
    """They are not read beyond their ends. Packed rows look half as long."""
    layer = Layer(3, 2, 64, 32, dtype=torch.float16)
    layer.mats[1] = layer.mats[1][..., :0]
    with pytest.raises(ValueError, match="x has rows of 32 numbers, but the experts need 0"):
        layer.run()
    layer.mats[0] = pack(E, 64, 96)
    with pytest.raises(ValueError, match="x has rows of 64 numbers, but the experts need 96"):
        layer.run()


def test_experts_far_away() -> None:
    """The last expert begins 2**32 numbers after the first, which is NaN: in 32 bits the distance
    would be 0. Only the pages in use get memory on a CPU."""
    experts, size = (2**16, 2**10) if DEVICE == "cpu" else (2**6, 2**20)  # quick for an interpreter, or for a GPU
    try:
        w = torch.empty((experts + 1, 64, size), dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("8 GiB of address space are not to be had")
    g = torch.Generator().manual_seed(0)
    x, last = torch.randn(2, size, generator=g).half(), (torch.randn(64, size, generator=g) * size**-0.5).half()
    w[0], w[-1] = math.nan, last.to(DEVICE)
    starts = torch.zeros(experts + 2, dtype=torch.int32, device=DEVICE)
    starts[-1] = 2
    order = starts, torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    weights = torch.ones(2, 1, device=DEVICE)
    out = grouped.expert_product(x.to(DEVICE), (w, None, None), weights, order, 0.0, True).cpu()
    gate, up = (x.float() @ last.float().T).chunk(2, 1)
    assert relative_error(out, (torch.nn.functional.silu(gate) * up)[[1, 0]]) < 1e-2


def test_all_at_once() -> None:
    """Biases, a limit that clamps, 20 tokens of one expert, and a padding row, which must be 0."""
    layer = Layer(24, 2, biased=True, limit=0.5)
    layer.ids[:20, 0] = 5
    layer.ids[3] = E
    out, wanted = layer.run(), layer.wanted()
    assert not out[3].any()
    others = [n for n in range(24) if n != 3]
    assert relative_error(out[others], wanted[others]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_full_size_in_a_graph(packed: bool) -> None:
    """A layer as in Qwen3-30B-A3B, or packed as in gpt-oss-20b, recorded once, replayed with other ids."""
    experts, k, hidden, inner, dtype = (
        (32, 4, 2880, 2880, torch.bfloat16) if packed else (128, 8, 2048, 768, torch.bfloat16)
    )
    for tokens in (1, 64, 1000):
        layer = Layer(tokens, k, hidden, inner, packed, 7.0 * packed, experts, dtype)
        plain = layer.mats
        if packed:
            layer.mats = [pack(experts, 2 * inner, hidden), pack(experts, hidden, inner)]
            plain = [unpack(*w).to(dtype) for w in layer.mats]
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = layer.run()
        with torch.cuda.graph(graph, stream=side):
            out = grouped.grouped_experts(layer.x, layer.ids, layer.weights, *layer.stacks(), layer.limit)
        graph.replay()
        assert torch.equal(out, first)
        layer.ids.copy_(layer.ids.flip(0).roll(1, 1))
        layer.ids[tokens // 2] = experts
        graph.replay()
        layer.mats = plain
        wanted, rows = layer.wanted(), [i for i in range(tokens) if i != tokens // 2]
        assert not out[tokens // 2].any()
        assert not rows or relative_error(out[rows], wanted[rows]) < 1e-2


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for CPUs; with a GPU the kernels are the default")
@pytest.mark.slow
def test_an_engine_computes_with_it(tmp_path: Path) -> None:
    """A small Qwen3-MoE, all kernels in the interpreter: transformers' logits, in a prefill and in decodes."""
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    model = save_family("qwen3_moe", tmp_path, head_dim=32, num_hidden_layers=2, **shape)
    with LLM(str(tmp_path), device="cpu", attention="triton", num_kvcache_blocks=16) as llm, recorded(llm) as recorder:
        outs = llm.generate([[5, 6, 7, 8], [9, 10]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    assert max(recorder.errors(model, sequences).values()) < 1e-4
