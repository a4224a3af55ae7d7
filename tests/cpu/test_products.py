"""Products in 16 bits on a CPU: which one is chosen, and that its result is rounded once. Chapter 92 times them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from atom_mini.cpu import products as cpu_products
from atom_mini.cpu.products import multiply_short

SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", SHORT)
def test_a_widened_product_is_rounded_once(dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To half a step of the dtype, also in tiles that do not divide the weight. One row is torch's own product."""
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_products, "TILE", 40)
    for rows in (1, 2, 17, 40):
        x, w = torch.randn(rows, 96).to(dtype), torch.randn(100, 96).to(dtype)
        bias = torch.randn(100).to(dtype) if has_bias else None
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        found = multiply_short(x, w, bias)
        assert found.dtype == dtype and found.shape == exact.shape
        step = torch.finfo(dtype).eps  # relative, of the sum and of what was rounded in its terms
        if rows == 1:
            assert found.equal(F.linear(x, w, bias))
        else:
            assert ((found - exact).abs() <= 0.51 * step * exact.abs() + 1e-4).all()
