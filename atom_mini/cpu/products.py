"""Matrix products on a CPU through oneDNN, with weights stored in the order in which it reads them (chapter 92)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import Linear


PRIVATE = "_linear_pointwise", "_reorder_linear_weight"  # of torch.ops.mkldnn


def uses_onednn(x: Tensor) -> bool:
    """Whether products with `x` go through oneDNN: float32 on a CPU."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32
    has_ops = all(hasattr(torch.ops.mkldnn, name) for name in PRIVATE)
    return is_plain and has_ops and torch.backends.mkldnn.is_available()


def round_rows(n: int) -> int:
    """`n` rounded up to one of eight sizes per doubling: at most an eighth more.

    oneDNN generates code for every number of rows and caches it: with fewer sizes, the cache stays small."""
    step = 1 << max(0, n.bit_length() - 4)
    return -(-n // step) * step


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias -> [T, out], by oneDNN; all float32."""
    spare = round_rows(len(x)) - len(x)
    x = F.pad(x, (0, 0, 0, spare)) if spare else x
    out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out[: len(out) - spare]


def reorder(weight: Tensor) -> Tensor:
    """The weight [out, in] as oneDNN reads it: a copy, for `multiply` only."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 32)


def pack(layer: Linear, keeps_order: bool = False) -> None:
    """Let oneDNN compute `layer`, and reorder its weight unless `keeps_order`."""
    layer.multiply = multiply
    if own := getattr(layer, "pack", None):
        own(reorder)
    elif not keeps_order:
        layer.weight = nn.Parameter(reorder(layer.weight.data), requires_grad=False)


def keep_freed_memory() -> None:
    """Let glibc keep up to 62 MiB of freed memory for the next tensors.

    It takes a large block from the system, and each of its pages costs a page fault when it is touched. After a
    large block was freed, glibc serves blocks of up to that size from its heap, and keeps twice as much free there."""
    torch.empty(31 << 20, dtype=torch.uint8)


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def lacks_products(x: Tensor) -> bool:
    """Whether `x` has 16 bits per number, and this CPU no instructions for products."""
    if x.device.type != "cpu" or x.dtype not in SHORT:
        return False
    name = f"_is_mkldnn_{SHORT[x.dtype]}_supported"
    known = hasattr(torch.ops.mkldnn, name) and getattr(torch.ops.mkldnn, name)()
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # private
    emulated = is_wide and not has_bf16
    return not known or (emulated and x.dtype == torch.bfloat16)


TILE = 512  # rows of a weight that are widened at a time


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] @ weight [out, in].T + bias in float32 -> [T, out], rounded to x's dtype."""
    wide = x.float()
    product = multiply if uses_onednn(wide) else F.linear
    out = torch.cat([product(wide, tile.float()) for tile in weight.split(TILE)], 1)
    return (out if bias is None else out + bias).to(x.dtype)


def multiply_short(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`multiply_wide`, or torch's own product for one row."""
    return (F.linear if len(x) == 1 else multiply_wide)(x, weight, bias)


def prepare(model: nn.Module, keeps_order: bool = False) -> None:
    """`pack` every float32 `Linear` on a CPU, and widen 16-bit ones where that is faster."""
    keep_freed_memory()
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    for layer in model.modules():
        if isinstance(layer, Linear) and uses_onednn(layer.weight):
            pack(layer, keeps_order or any(layer.weight is table for table in tables))
        elif isinstance(layer, Linear) and lacks_products(layer.weight):
            layer.multiply = multiply_short
