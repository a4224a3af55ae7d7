"""From the names and the layout of a checkpoint's weights to ours: rename, split experts, sort rows (chapter 60)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from ..loading import Readers
from .specs import FamilySpec

RENAMED = {
    ".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.",
    ".w2.": ".down_proj.", ".router.": ".gate.", ".shared_expert.": ".shared.",
    ".shared_experts.": ".shared.", ".gate.e_score_correction_bias": ".correction",
}  # fmt: skip
FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj_?(bias|blocks|scales|)")
PARTS = {"gate_up": ["gate_proj", "up_proj"], "down": ["down_proj"]}


def rename(name: str) -> str:
    """Our name of a weight, from the checkpoint's name."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def is_announced(name: str, spec: FamilySpec) -> bool:
    """Whether a weight belongs to an MTP layer that the config announces."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    last = spec.num_hidden_layers
    return found is not None and last <= int(found[1]) < last + spec.mtp_layers


def rename_weights(readers: Readers, spec: FamilySpec) -> Readers:
    """The checkpoint's weights under our names, without those of MTP layers."""
    return {rename(n): r for n, r in readers.items() if not is_announced(n, spec)}


def read_expert(read: Callable[..., Tensor], e: int, count: int) -> Tensor:
    """Expert `e` [1, ...] of a tensor [count, ...]. The last slice is open, so that a tensor
    with more experts has a wrong shape and is refused."""
    return read(part=slice(e, e + 1 if e + 1 < count else None))


def in_halves(read: Callable[[], Tensor], i: int, n: int) -> Tensor:
    """Part i of the n contiguous parts of an expert [1, all rows, size]."""
    return read().chunk(n, 1)[i].flatten(0, 1)


def interleaved(read: Callable[[], Tensor], i: int, n: int) -> Tensor:
    """Rows i, i + n, ... of an expert.

    The expert is [1, size, all rows] (transposed), a bias [1, all rows], or packed bytes
    [1, all rows, ...], whose groups are joined.
    """
    expert = read()
    is_packed = expert.dtype == torch.uint8
    rows = expert.flatten(2) if is_packed else expert.movedim(-1, 1)
    return rows[:, i::n].flatten(0, 1)


def split_experts(readers: Readers, spec: FamilySpec) -> Readers:
    """`readers`, with one per expert and part instead of one for all experts."""
    if (experts := spec.experts) is None:
        return readers
    take = interleaved if experts.is_interleaved else in_halves
    split = Readers()
    read_one = lru_cache(maxsize=1)(read_expert)  # for gate, then up
    for name, read in readers.items():
        if not (match := FUSED.fullmatch(name)):
            split[name] = read
            continue
        where, fused, kind = match.groups()
        ours = kind if kind in ("bias", "scales") else "weight"
        parts = PARTS[fused]
        for e, (i, part) in product(range(experts.count), enumerate(parts)):
            one = partial(read_one, read, e, experts.count)
            split[f"{where}.{e}.{part}.{ours}"] = partial(take, one, i, len(parts))
    return split


def permute_rows(read: Callable[..., Tensor], order: Tensor) -> Tensor:
    """The rows of q or k, or a norm's weights, sorted by `order` within each head."""
    return read().unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def sort_rows(readers: Readers, orders: dict[str, Tensor]) -> Readers:
    """`readers` that sort the rows of some modules: `orders` is name -> order."""
    ours = dict(readers)
    for name in ours:
        if (order := orders.get(name.split(".")[-2:][0])) is not None:
            ours[name] = partial(permute_rows, ours[name], order)
    return ours
