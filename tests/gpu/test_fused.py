"""Fused layers: each kernel against torch in float32, models against plain layers, and the launches of a decode step."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from torch import Tensor
from torch.nn.functional import rms_norm

pytest.importorskip("triton", reason="Triton is not installed")  # conftest.py has chosen between GPU and interpreter


from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.gpu import fused
from atom_mini.gpu.fused import MOST_ROWS, FusedLayer, FusedOps, fused_spec
from atom_mini.models import Linear, TorchOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of the relative error, as for chapter 11's
TWIN, EPS, S = TorchOps(), 1e-6, 4
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered:RuntimeWarning")
# rows, numbers in, columns, bias, units of the GPU (more of them: fewer columns per program), dtype
PRODUCTS = [(1, 64, 96, True, 1, torch.float32), (5, 200, 72, False, 3, torch.bfloat16), (17, 96, 64, True, 100, torch.float16),
            (MOST_ROWS, 200, 48, False, 1, torch.float32)]  # fmt: skip


def error(ours: Tensor, wanted: Tensor) -> float:
    found = ((ours.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return found if found == found else float("inf")


def make_ops(units: int, dtype: torch.dtype) -> FusedOps:
    ops = FusedOps(DEVICE, 4, 2, 64, dtype)
    ops.units = units
    return ops


def matrix(rows: int, size: int, bias: bool, dtype: torch.dtype) -> Linear:
    linear = Linear(size, {"w": rows}, bias).to(DEVICE)
    linear.weight.data.normal_(0, size**-0.5)
    if linear.bias is not None:
        linear.bias.data.normal_()
    return linear.to(dtype)


def in_float32(linear: Linear) -> Linear:
    return deepcopy(linear).float()


def normed(x: Tensor) -> Tensor:
    return rms_norm(x.float(), x.shape[1:], eps=EPS)


def product_errors(rows: int, size: int, columns: int, bias: bool, units: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of the product with the residual, and of that with the norm and the activation."""
    torch.manual_seed(0)
    ops, x = make_ops(units, dtype), (3 * torch.randn(rows, size, device=DEVICE)).to(dtype)
    linear, residual = matrix(columns, size, bias, dtype), torch.randn(rows, columns, device=DEVICE).to(dtype)
    wanted = residual.float() + in_float32(linear)(x.float())
    added = error(ops.add_product(x, linear, residual), wanted)
    linear = matrix(2 * columns, size, bias, dtype)
    wanted = TWIN.silu_and_mul(in_float32(linear)(normed(x)))
    return added, error(ops.gated_product(x, linear, EPS), wanted)


@pytest.mark.parametrize(("rows", "size", "columns", "bias", "units", "dtype"), PRODUCTS)
def test_products(rows: int, size: int, columns: int, bias: bool, units: int, dtype: torch.dtype) -> None:
    """Sizes that are not those of tiles."""
    assert max(product_errors(rows, size, columns, bias, units, dtype)) < LIMITS[dtype]


# rows, head size, has norms, dtype, bias
HEADS = [(1, 24, True, torch.float32, True), (5, 64, False, torch.bfloat16, False),
         (17, 128, True, torch.float16, False), (MOST_ROWS, 24, False, torch.float32, True)]  # fmt: skip


def heads_error(rows: int, dim: int, has_norm: bool, dtype: torch.dtype, bias: bool) -> float:
    """Of q and of the whole pool; infinity if a slot of no token has lost its sevens."""
    torch.manual_seed(0)
    H, K, size = 4, 2, 72
    x, linear = torch.randn(rows, size, device=DEVICE).to(dtype), matrix((H + 2 * K) * dim, size, bias, dtype)
    qk_norm = torch.randn(2, dim, device=DEVICE).to(dtype) if has_norm else None
    angles = 3 * torch.randn(rows, 1, dim // 2, device=DEVICE)
    cos, sin = (torch.cat([a, b], -1).to(dtype) for a, b in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    cache = torch.full((2, 20, K, S, dim), 7.0, dtype=dtype, device=DEVICE)
    slots, exact = torch.randperm(20 * S, device=DEVICE)[:rows], cache.float().clone()
    q = make_ops(4, dtype).heads_product(x, linear, EPS, qk_norm, EPS, cos, sin, cache, slots)
    heads = in_float32(linear)(normed(x)).view(rows, -1, dim)
    norm = None if qk_norm is None else (qk_norm[0].float(), qk_norm[1].float())
    wanted = TWIN.rotate_and_store(heads, norm, EPS, cos.float(), sin.float(), exact, slots)
    is_kept = int((cache == 7).sum()) >= 2 * (20 * S - rows) * K * dim
    return max(error(q, wanted), error(cache, exact)) if is_kept else float("inf")


@pytest.mark.parametrize(("rows", "dim", "has_norm", "dtype", "bias"), HEADS)
def test_heads(rows: int, dim: int, has_norm: bool, dtype: torch.dtype, bias: bool) -> None:
    assert heads_error(rows, dim, has_norm, dtype, bias) < LIMITS[dtype]


GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
MODELS = {
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": False, "num_hidden_layers": 2}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
}


@pytest.mark.parametrize("case", MODELS)
def test_same_tokens_and_logits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of more than `MOST_ROWS` tokens runs in plain layers, one of fewer and all decodes in fused ones."""
    monkeypatch.setattr(fused, "MOST_ROWS", 6)
    kind, options = MODELS[case]
    save_checkpoint(kind, tmp_path, **options)
    prompts = [[(7 * i) % 300 for i in range(8)], [5, 6, 7, 8]]
    engine: dict[str, Any] = {"num_kvcache_blocks": 16, "enable_prefix_caching": False, "max_num_seqs": 2}
    engine |= {"device": DEVICE.type, "dtype": "float32", "enforce_eager": True}
    found, kinds = [], []
    for more in ({"attention": "torch"}, {"fuse_layers": True}):
        with LLM(str(tmp_path), **engine, **more) as llm:
            runner: Any = llm.engine_core.runner
            rows: list[Tensor] = []
            compute = runner.model.compute_logits
            runner.model.compute_logits = lambda hidden, rows=rows, compute=compute: rows.append(compute(hidden)) or rows[-1]
            outs = [llm.generate(prompts[n : n + 1], GREEDY, use_tqdm=False)[0].token_ids for n in (0, 1)]
            kinds.append({type(layer) for layer in runner.model.model.layers})
            found.append((outs, torch.cat(rows)))
    assert FusedLayer not in kinds[0] and kinds[1] == {FusedLayer}
    assert found[0][0] == found[1][0]
    assert (found[0][1] - found[1][1]).abs().max() < 1e-4 < found[0][1].std()


@pytest.mark.parametrize(("options", "named"), [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size"), ({"scheduler": "spyre"}, "scheduler"),
    ({"attention": "torch"}, "attention"), ({"packed": True}, "packed"),
])  # fmt: skip
def test_refused_options(options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing could run it: the option that is in the way is named."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"{named}=.* does not go with"):
        EngineArgs("tiny", fuse_layers=True, **options)


def test_refused_models_and_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EngineArgs("tiny", device="cpu").spec
    with pytest.raises(ValueError, match="heads of up to 128 numbers, not 256"):
        fused_spec(replace(spec, head_dim=256))
    with pytest.raises(ValueError, match="does not support the layers of"):
        fused_spec(fused_spec(spec))  # any class but ModelSpec itself
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="fuse_layers=True needs Triton and a GPU"):
        EngineArgs("tiny", device="cpu", fuse_layers=True)


def test_weights_too_large_to_fold() -> None:
    from atom_mini.gpu.fused import fold
    from atom_mini.models import RMSNorm

    norm, linear = RMSNorm(8, EPS, TWIN).half(), matrix(8, 8, False, torch.float16)
    norm.weight.data.fill_(6e4)
    linear.weight.data.fill_(2)
    with pytest.raises(ValueError, match=r"first norm of layer 3 .* too large for torch\.float16: set fuse_layers=False"):
        fold(norm.to(DEVICE), linear, "first norm of layer 3")
