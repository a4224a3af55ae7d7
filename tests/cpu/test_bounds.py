"""Compiled loops load and store by address, so a step of every small shape runs with each array between two pages that
nobody may touch: at the end of its own pages, and at their beginning. A read or write outside ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.cpu.compiled import why_not

pytest.importorskip("numba")
Shape = tuple[int, ...]  # rows, query heads, K/V heads, head dim, hidden, inner, vocabulary, block size
SHAPES: list[Shape] = [
    (1, 1, 1, 16, 16, 16, 4, 1), (2, 2, 1, 16, 32, 48, 5, 3), (3, 3, 1, 48, 16, 32, 7, 2), (4, 4, 2, 32, 48, 16, 6, 1),
    (5, 5, 5, 16, 48, 80, 9, 4), (7, 7, 1, 16, 16, 16, 4, 16), (9, 6, 3, 80, 112, 48, 301, 5), (64, 1, 1, 16, 16, 16, 4, 1),
]  # fmt: skip


class Guarded:
    """Makes arrays that fill the end (or the beginning) of a mapping whose first and last pages are forbidden."""

    def __init__(self, at_end: bool) -> None:
        self.at_end, self.maps, self.rng = at_end, list[mmap.mmap](), np.random.default_rng(0)

    def empty(self, shape: Shape, dtype: Any) -> np.ndarray:
        size, page = int(np.prod(shape)) * np.dtype(dtype).itemsize, mmap.PAGESIZE
        whole = -(-size // page) * page
        self.maps.append(mmap.mmap(-1, whole + 2 * page))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.maps[-1]))
        for at in (start, start + page + whole):
            assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(at), page, 0) == 0
        offset = page + (whole - size if self.at_end else 0)
        return np.frombuffer(self.maps[-1], np.dtype(dtype), int(np.prod(shape)), offset).reshape(shape)

    def zeros(self, *shape: int, dtype: Any = np.int64) -> np.ndarray:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def floats(self, *shape: int) -> np.ndarray:
        array = self.empty(shape, np.float32)
        array[...] = self.rng.standard_normal(shape) / 4
        return array

    def weights(self, kind: str, *shape: int) -> np.ndarray:
        """In float32, as the bits of bfloat16, or in int8."""
        found = self.floats(*shape)
        if kind == "float32":
            return found
        array = self.empty(shape, np.uint16 if kind == "bfloat16" else np.int8)
        array[...] = found.view(np.uint32) >> 16 if kind == "bfloat16" else np.clip(100 * found, -127, 127)
        return array

    def indices(self, values: Any, dtype: Any) -> np.ndarray:
        array = self.empty(np.shape(values), dtype)
        array[...] = values
        return array


def decode(shape: Shape, kind: str, has_norms: bool, at_end: bool) -> np.ndarray:
    """The logits of a decode of two layers."""
    from atom_mini.cpu.compiled_loops import Weights, decode_step

    rows, heads, kv_heads, dim, size, inner, vocab, block = shape
    make, plain = Guarded(at_end), "float32" if kind == "int8" else kind
    lens = np.arange(1, rows + 1)
    blocks = -(-rows // block)  # of the longest
    qkv, wide = (heads + 2 * kv_heads) * dim, heads * dim
    matrices = [(qkv, size), (size, wide), (2 * inner, size), (size, inner)]
    w = Weights(
        table=make.weights(kind, vocab, size), table_scales=make.floats(1, vocab) if kind == "int8" else None,
        norms=make.floats(5, size),
        head_norms=make.floats(2, 2, dim if has_norms else 0), cos=make.floats(rows, dim), sin=make.floats(rows, dim),
        matrices=tuple(make.weights(kind, 2, *m) for m in matrices),
        biases=tuple(make.floats(2, m[0]) for m in matrices),
        scales=tuple(make.floats(2, m[0]) if kind == "int8" else None for m in matrices),
        head=make.weights(kind, vocab, size), head_scales=make.floats(1, vocab) if kind == "int8" else None,
        no_bias=make.zeros(vocab, dtype=np.float32),
    )  # fmt: skip
    ids = make.indices(np.arange(rows) % vocab, np.int64)
    cache = make.weights(plain, 2, 2, rows * blocks, kv_heads, block, dim)
    tables = make.indices(np.arange(rows * blocks)[::-1].reshape(rows, blocks), np.int32)
    buffers = tuple(make.floats(rows, n) for n in (size, size, size, qkv, wide, 2 * inner, inner, vocab))
    where = make.indices(lens, np.int32), tables, buffers
    decode_step(make.zeros(21, 16), 4, w, np.float32(1e-6), ids, cache, *where)
    return buffers[-1].copy()


def prompt(shape: Shape, kind: str, at_end: bool) -> np.ndarray:
    """Attention of a chunk of a prompt, with its scratch between pages, too."""
    from atom_mini.cpu.compiled_loops import TALL, attend_piece

    rows, heads, kv_heads, dim, *_, block = shape
    make, seen = Guarded(at_end), rows + 95 * (rows > 4)
    count = min(rows, TALL // (heads // kv_heads))
    q, out = make.floats(count, heads, dim), make.zeros(count, heads, dim, dtype=np.float32)
    cache = make.weights(kind, 2, -(-seen // block), kv_heads, block, dim)
    table = make.indices(np.arange(cache.shape[1])[::-1], np.int32)
    shapes = (-(-seen // TALL) * TALL, TALL), (dim, TALL), (TALL, dim), (TALL, dim), (TALL, dim), (TALL,), (TALL,)
    for head in range(kv_heads):
        attend_piece(q, cache, table, head, seen, tuple(make.floats(*s) for s in shapes), out)
    return out.copy()


def trial(kind: str) -> None:
    """All shapes; the results do not depend on where the arrays lie."""
    from atom_mini.cpu.compiled_loops import LANES

    for shape in SHAPES:
        if kind == "int8":  # its inputs have pairs of vectors, so they are multiples of 32
            rows, heads, kv_heads, dim, size, inner, *rest = shape
            shape = (rows, heads, kv_heads, -(-dim // 32) * 32, -(-size // 32) * 32, -(-inner // 32) * 32, *rest)
        for has_norms in (False, True):
            found = [decode(shape, kind, has_norms, at_end) for at_end in (False, True)]
            assert np.isfinite(found).all() and np.array_equal(*found), shape
        if kind != "int8" and LANES > 4:  # where prompts are compiled
            found = [prompt(shape, kind, at_end) for at_end in (False, True)]
            assert np.isfinite(found).all() and np.array_equal(*found), shape


@pytest.mark.skipif(os.name != "posix" or sys.platform == "darwin", reason="mprotect as Linux has it")
def test_nothing_outside_an_array_is_touched() -> None:
    here = Path(__file__).resolve().parent
    code = "import test_bounds; [test_bounds.trial(kind) for kind in ('float32', 'bfloat16', 'int8')]"
    path = os.pathsep.join(map(str, (here, here.parent, os.environ.get("PYTHONPATH", ""))))
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("vocab", [3, 4, 5])
def test_small_vocabularies(vocab: int, tmp_path: Path) -> None:
    """A compiled product computes four outputs at a time."""
    save_checkpoint("llama", tmp_path, num_hidden_layers=1, vocab_size=vocab, bos_token_id=None, eos_token_id=None)
    path, reason = str(tmp_path), None
    if vocab < 4:
        reason = f"a vocabulary of {vocab} tokens must have at least 4"
        with pytest.raises(ValueError, match=f"compiled=True does not apply: {reason}"):
            EngineArgs(path, device="cpu", compiled=True)
    assert why_not(EngineArgs(path, device="cpu")) == reason
    params, found = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), []
    for compiled in (reason is None, False):
        with LLM(path, device="cpu", num_kvcache_blocks=20, compiled=compiled) as llm:
            outs = llm.generate([[i % vocab] for i in range(3)], params, use_tqdm=False)
            found.append([out.token_ids for out in outs])
    assert found[0] == found[1]
