"""A decode as one compiled function, which all threads run together, and a runner that calls it (chapter 92)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import AttentionMetaData
from .compiled_loops import LANES, TALL, Weights, attend_prompts, decode_step
from .decode import CpuOps
from .products import lacks_products, prepare
from .int8_model import Int8Embedding, Int8Linear
from ..fields import EngineFields
from ..gpu.graphs import first_decodes
from ..model_runner import ModelRunner, made_up_batch
from ..models import Linear, SelfAttention
from ..sampler import Sampler, SamplingMetaData
from ..sequence import NO_TOKEN, SequenceType


class Threads:
    """`count` - 1 threads that make the same calls as the caller."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.start()

    def start(self) -> None:
        """Make the pool, for this process."""
        self.pool = ThreadPoolExecutor(self.count)
        self.process = os.getpid()
        self.is_interrupted = False  # a call was submitted and not made

    def run(self, function: Callable[..., None], *args: object) -> None:
        """function(*args) in all threads; returns when the work is done."""
        self.recover()
        self.is_interrupted = True
        for _ in range(self.count - 1):
            self.pool.submit(function, *args)
        function(*args)
        self.is_interrupted = False

    def recover(self) -> None:
        """Wait for the threads of an interrupted call, and then make new ones. In a forked
        process, make new ones as well."""
        is_mine = self.process == os.getpid()
        if self.is_interrupted and is_mine:
            self.pool.shutdown()
        if self.is_interrupted or not is_mine:
            self.start()


def as_numpy(x: Tensor) -> np.ndarray:
    """The same memory; bfloat16 as its 16 bits."""
    x = x.detach()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Empty memory that begins with a cache line. NumPy asks Linux for huge pages; torch does so
    only if an environment variable tells it to."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def stack(layers: list[Linear]) -> Tensor:
    """The weights [L, O, I] of L layers; each layer's weight becomes a view of it."""
    like = layers[0].weight
    whole = in_huge_pages((len(layers), *like.shape), like.dtype)
    for layer, part in zip(layers, whole, strict=True):
        part.copy_(layer.weight)
        layer.weight = nn.Parameter(part, requires_grad=False)  # frees the old one
    return whole


def scales_of(*layers: nn.Module) -> np.ndarray | None:
    """Scales [L, O] of weights in int8 (chapter 92b); None for floats."""
    int8 = [layer for layer in layers if isinstance(layer, Int8Linear | Int8Embedding)]
    return floats([layer.weight_scale[:, 0] for layer in int8]) if int8 else None


def bias_of(layer: Linear) -> Tensor:
    """[O]; zeros if the layer has no bias."""
    return torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias


def norms_of(attn: SelfAttention) -> Tensor:
    """The norms of queries and keys [2, D], or [2, 0]."""
    pair = [attn.q_norm, attn.k_norm] if attn.has_qk_norm else []
    return torch.stack([n.weight for n in pair]) if pair else torch.empty(2, 0)


def floats(parts: list[Tensor]) -> np.ndarray:
    """Small weights of all layers [L, ...] as float32."""
    return torch.stack([part.float() for part in parts]).numpy()


def collect(model: Any) -> Weights:
    """The weights of a `CausalLM`, whose matrices now lie in huge pages."""
    decoder, layers, head = model.model, [*model.model.layers], model.head.weight
    head.data = in_huge_pages(tuple(head.shape), head.dtype).copy_(head)  # the embedding's, too, if they share it
    norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
    attns, mlps = [x.self_attn for x in layers], [x.mlp for x in layers]
    kinds = [[a.qkv for a in attns], [a.o for a in attns], [m.gate_up for m in mlps], [m.down for m in mlps]]
    return Weights(
        table=as_numpy(decoder.embed_tokens.weight),
        table_scales=scales_of(decoder.embed_tokens),
        norms=floats([n.weight for n in [*norms, decoder.norm]]),
        head_norms=floats([*map(norms_of, attns)]),
        cos=decoder.rotary.cos.numpy(),
        sin=decoder.rotary.sin.numpy(),
        matrices=tuple(as_numpy(stack(kind)) for kind in kinds),
        biases=tuple(floats([bias_of(x) for x in kind]) for kind in kinds),
        scales=tuple(scales_of(*kind) for kind in kinds),
        head=as_numpy(head),
        head_scales=scales_of(model.head),
        no_bias=np.zeros(len(head), np.float32),
    )


class PlainOps(CpuOps):
    """`CpuOps` that keep the weights' order, and attend in `threads`."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    def prepare(self, model: nn.Module) -> None:
        """Let oneDNN compute the products of a loaded model."""
        prepare(model, keeps_order=True)

    def attend(self, q: Tensor, kv_cache: Tensor, meta: AttentionMetaData, scale: float) -> Tensor:
        """`paged_attention`: q [T, H, D] -> [T, H, D]."""
        most = TALL // (q.shape[1] // kv_cache.shape[2])  # tokens of a piece
        if max(meta.query_lens) == 1 or LANES == 4 or most == 0:
            return super().attend(q, kv_cache, meta, scale)
        if meta.plan is None:
            meta.plan = parts_of_step(meta, most)
        x, tables = q.float().contiguous(), meta.block_tables.contiguous().numpy()
        out, counts = torch.empty_like(x), np.zeros(16, np.int64)
        args = counts, x.numpy(), as_numpy(kv_cache), tables, meta.plan, out.numpy()
        if torch.get_num_threads() == 1:
            attend_prompts(*args)
        else:
            self.threads.run(attend_prompts, *args)
        return out.to(q.dtype)


class OneThreadSampler(Sampler):
    """A `Sampler` that does not wake torch's threads."""

    def __call__(self, logits: Tensor, meta: SamplingMetaData) -> Tensor:
        """As `Sampler`: logits [B, V] -> token ids [B], int64."""
        if meta.temperature is None and meta.mask_rows is None:
            rows = logits.float().numpy()
            tokens = rows.argmax(-1)  # a NaN counts as the largest
            largest = np.take_along_axis(rows, tokens[:, None], -1)[:, 0]
            return torch.from_numpy(np.where(np.isfinite(largest), tokens, NO_TOKEN))
        count = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            return super().__call__(logits, meta)
        finally:
            torch.set_num_threads(count)


class CompiledRunner(ModelRunner):
    """A `ModelRunner` on a CPU whose decodes are one compiled function.

    Steps of more than `most_rows` sequences go through torch: with so many, a product that splits all three dimensions
    is faster. Where torch's products are slow, they are computed in groups. The next step overwrites the logits.
    """

    most_rows = 64
    pieces_per_thread = 4  # of a product
    ops: PlainOps

    def __init__(self, config: EngineFields, beside: tuple[int, int] = (0, 0)) -> None:
        super().__init__(config, PlainOps(Threads(torch.get_num_threads())), OneThreadSampler(), beside)
        self.weights = collect(self.model)
        self.eps = np.float32(config.spec.rms_norm_eps)
        qkv, o, gate_up, down = self.weights.matrices
        # x, residual, normed, qkv, attended, gate_up, act, and logits
        hidden = qkv.shape[2]
        sizes = [hidden] * 3 + [qkv.shape[1], o.shape[2], gate_up.shape[1], down.shape[2], config.spec.vocab_size]
        self.buffers = [np.empty((self.most_rows, n), np.float32) for n in sizes]
        is_int8 = self.weights.scales[0] is not None
        self.in_groups = is_int8 or lacks_products(self.model.head.weight)
        prompt = made_up_batch(SequenceType.PREFILL, 2, np.zeros((1, 2), np.int32))
        for batch in (first_decodes(1), prompt):  # compiles, or loads
            self.run_model(*self.prepare_model(batch))

    @torch.inference_mode()
    def decode(self, ids: Tensor, meta: AttentionMetaData) -> Tensor:
        """Logits [B, vocabulary] float32 of one token of each sequence; stores its K/V."""
        buffers = tuple(x[: len(ids)] for x in self.buffers)
        counters = np.zeros((9 * len(self.kv_cache) + 3, 16), np.int64)
        where = meta.context_lens.numpy(), meta.block_tables.contiguous().numpy()
        args = ids.numpy(), as_numpy(self.kv_cache), *where, buffers
        threads = self.ops.threads
        threads.run(decode_step, counters, self.pieces_per_thread * threads.count, self.weights, self.eps, *args)
        return torch.from_numpy(buffers[-1])

    def decode_in_groups(self, ids: Tensor, meta: AttentionMetaData) -> Tensor:
        """`decode` of any number of rows. Of one request's rows, the earlier ones, whose
        keys the later ones read, come first."""
        found = []
        for start in range(0, len(ids), self.most_rows):
            rows = slice(start, start + self.most_rows)
            where = meta.context_lens[rows], meta.block_tables[rows]
            part = replace(meta, context_lens=where[0], block_tables=where[1])
            found.append(self.decode(ids[rows], part).clone())
        return torch.cat(found)

    def run_model(self, ids: Tensor, positions: Tensor, meta: AttentionMetaData, last: Tensor) -> Tensor:
        """As `ModelRunner.run_model`."""
        self.ops.threads.recover()
        if len(ids) == len(meta.lens) == len(last):
            if len(ids) <= self.most_rows:
                return self.decode(ids, meta)
            if self.in_groups:
                return self.decode_in_groups(ids, meta)
        return super().run_model(ids, positions, meta, last)

    def close(self) -> None:
        """End the threads."""
        self.ops.threads.pool.shutdown()


def parts_of_step(meta: AttentionMetaData, most: int) -> np.ndarray:
    """The `parts` [P, 4] of `attend_prompts`, of at most `most` tokens each."""
    parts, at = [], 0
    for b, (count, length) in enumerate(zip(meta.query_lens, meta.lens, strict=True)):
        for start in range(0, count, most):
            end = min(start + most, count)
            parts.append((length - count + end, b, at + start, at + end))
        at += count
    return np.array(sorted(parts, reverse=True))
