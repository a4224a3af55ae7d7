"""Products in 16 bits on a CPU: rounded once, and not several times slower than in float32."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atom_mini import cpu_products
from atom_mini.cpu_products import lacks_products, multiply, multiply_short, prepare, uses_onednn
from atom_mini.models import Linear

SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", SHORT)
def test_a_widened_product_is_rounded_once(dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To half a step of the dtype, of any number of rows, and in tiles that do not divide the weight."""
    torch.manual_seed(0)
    monkeypatch.setattr(cpu_products, "TILE", 40)
    for rows in (1, 2, 17, 40):
        x, w = torch.randn(rows, 96).to(dtype), torch.randn(100, 96).to(dtype)
        bias = torch.randn(100).to(dtype) if has_bias else None
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        found = multiply_short(x, w, bias)
        assert found.dtype == dtype and found.shape == exact.shape
        step = torch.finfo(dtype).eps  # relative, of the sum and of what was rounded in its terms
        assert ((found - exact).abs() <= 0.51 * step * exact.abs() + 1e-4).all() or rows == 1


@pytest.mark.parametrize("dtype", [*SHORT, torch.float32])
def test_it_is_chosen_by_what_the_processor_has(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never by a measurement, which could choose otherwise in the next run."""
    for lacks, wanted in ((True, multiply_short), (False, F.linear)):
        monkeypatch.setattr(cpu_products, "lacks_products", lambda x, lacks=lacks: lacks and x.dtype in SHORT)
        model = nn.Sequential(Linear(32, {"o_proj": 32}).to(dtype))
        prepare(model)
        is_float = dtype == torch.float32 and uses_onednn(model[0].weight)
        assert model[0].multiply is (multiply if is_float else wanted if dtype in SHORT else F.linear)
    assert not lacks_products(torch.zeros(1)) and not lacks_products(torch.zeros(1, dtype=torch.int8))
    assert not lacks_products(torch.zeros(1, dtype=dtype, device="meta"))


def best(product: Callable[[], object]) -> float:
    """Seconds of this thread's processor time."""
    times = []
    for _ in range(6):
        start = time.thread_time()
        product()
        times.append(time.thread_time() - start)
    return min(times[1:])


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("rows", [16, 128])
def test_it_is_not_several_times_slower_than_float32(dtype: torch.dtype, rows: int) -> None:
    """Torch's own product takes 5 to 8 times as long without instructions for it; 3 leaves room for a busy machine."""
    x, w = torch.randn(rows, 512), torch.randn(1024, 512)
    short = Linear(512, {"up_proj": 1024}).to(dtype)
    short.weight.copy_(w)
    prepare(short)
    y = x.to(dtype)
    assert best(lambda: short(y)) < 3 * best(lambda: F.linear(x, w))
