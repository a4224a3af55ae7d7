"""What only a GPU can get wrong: bf16 through many layers, races, memory at the default sizes, pools beyond 32 bits.

Every test is small enough for a lent machine; together they are planned for a minute and a half.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import QWEN3_06B, save_checkpoint
from torch import Tensor

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.model_runner import ModelRunner, made_up_batch
from atom_mini.options.build import make_runner
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType
from atom_mini.uploads import InputBuffer

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPE = QWEN3_06B
BORDERS = [255, 256, 257, 511, 700, 1024, 2049, 4000]  # of parts of 256 keys
Step = Callable[[], Any]


def greedy(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, **{"temperature": 0.0, "ignore_eos": True} | options)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers of Qwen3-0.6B with random weights."""
    folder = tmp_path_factory.mktemp("qwen")
    save_checkpoint("qwen3", folder, **SHAPE | {"num_hidden_layers": 8, "vocab_size": 20000})
    return folder


def batch_of(tables: np.ndarray, before: list[int], new: list[list[int]]) -> ScheduledBatch:
    """A step of sequences with `before` computed tokens and `new` ones, all of which sample at temperature 0."""
    counts = np.array([len(ids) for ids in new], np.int32)
    kind = SequenceType.DECODE if counts.max() == 1 else SequenceType.PREFILL
    batch = made_up_batch(kind, 1, tables)
    ids = np.array([i for each in new for i in each], np.int64)
    return replace(batch, scheduled_tokens=ids, num_scheduled_tokens=counts, context_lens=np.array(before, np.int32) + counts)


def forced_logits(runner: ModelRunner, texts: list[list[int]], num_forced: int) -> Tensor:
    """[sequences, num_forced + 1, vocabulary]: after a prefill, and after each of the last tokens of `texts` as a decode."""
    size = runner.config.kv_cache_block_size
    width = -(-max(map(len, texts)) // size)
    tables = np.random.default_rng(0).permutation(len(texts) * width).reshape(len(texts), width).astype(np.int32)
    rows = []
    prompts = [text[: len(text) - num_forced] for text in texts]
    for table, prompt in zip(tables, prompts, strict=True):
        rows.append(runner.launch(batch_of(table[None], [0], [prompt]))[0][0].float())
    found = [torch.stack(rows)]
    for i in range(num_forced):
        before = [len(prompt) + i for prompt in prompts]
        new = [[text[n]] for text, n in zip(texts, before, strict=True)]
        found.append(runner.launch(batch_of(tables, before, new))[0].float().clone())
    return torch.stack(found, 1)


def reference(folder: Path, texts: list[list[int]], num_forced: int, dtype: torch.dtype) -> Tensor:
    """The same logits by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    with torch.inference_mode():
        return torch.stack([
            model(torch.tensor([text], device=DEVICE), use_cache=False, logits_to_keep=num_forced + 1).logits[0].float()
            for text in texts
        ])  # fmt: skip


def test_bfloat16_decodes_are_as_exact_as_transformers(qwen: Path) -> None:
    """Prefills and 64 forced decodes through graphs: an error against float32 of at most 1.5 times transformers' own."""
    rng, num_forced = random.Random(0), 64
    texts = [[rng.randrange(20000) for _ in range(n + num_forced)] for n in BORDERS]
    room = {"max_model_len": 4096, "max_num_seqs": 8, "num_kvcache_blocks": 4000}
    runner = make_runner(EngineArgs(str(qwen), device=DEVICE, dtype="bfloat16", **room))  # type: ignore[arg-type]
    ours = forced_logits(runner, texts, num_forced)
    exact, rounded = (reference(qwen, texts, num_forced, dtype) for dtype in (torch.float32, torch.bfloat16))
    error, theirs = ((logits - exact).norm(dim=-1) / exact.norm(dim=-1) for logits in (ours, rounded))
    assert error.mean() <= 1.5 * theirs.mean() and error.max() <= 2 * theirs.max()


def slowly(step: Step, cycles: int = 2_000_000) -> Step:
    """`step` behind a pause of the device."""

    def late(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(cycles)
        return step(*args, **kwargs)

    return late


def test_the_same_batch_gives_the_same_bits(qwen: Path) -> None:
    """A hundred times, with contexts in several parts, some of them behind a pause of the device."""
    room = {"max_model_len": 4096, "max_num_seqs": 8, "num_kvcache_blocks": 4000}
    runner = make_runner(EngineArgs(str(qwen), device=DEVICE, dtype="bfloat16", **room))  # type: ignore[arg-type]
    runner.kv_cache.normal_()
    width = 4096 // runner.config.kv_cache_block_size
    tables = np.random.default_rng(0).permutation(8 * width).reshape(8, width).astype(np.int32)
    batch = batch_of(tables, BORDERS, [[i] for i in range(8)])
    first = runner.launch(batch)[0].clone()
    for i in range(100):
        launch = slowly(runner.launch) if i % 10 == 0 else runner.launch
        assert torch.equal(launch(batch)[0], first), i


def test_pauses_of_the_device_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each copy of a step's arrays, and before each replay; the host is steps ahead, or not."""
    prompts, samplings = [[i + 5] * (3 * i + 2) for i in range(12)], [greedy(30, temperature=i % 2, seed=i) for i in range(12)]
    found = []
    for is_slow in (False, True):
        if is_slow:
            monkeypatch.setattr(InputBuffer, "upload", slowly(InputBuffer.upload))
            monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", slowly(torch.cuda.CUDAGraph.replay))
        for ahead in (False, True):
            with LLM("tiny", device=DEVICE, dtype="float32", overlap=ahead, num_kvcache_blocks=60, max_num_seqs=8) as llm:
                found.append([out.token_ids for out in llm.generate(prompts, samplings, use_tqdm=False)])
    assert all(tokens == found[0] for tokens in found[1:])


def test_memory_at_the_default_sizes(qwen: Path) -> None:
    """512 sequences that sample with top-p at once, sixteen prompts of 1,024 tokens, and 32 tokens each behind one prefix."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, total = torch.cuda.mem_get_info()
    filtered = greedy(2, temperature=1.0, top_p=0.9)
    with LLM(str(qwen), device=DEVICE, dtype="bfloat16") as llm:
        outs = llm.generate([[i + 5] * 32 for i in range(512)], filtered, use_tqdm=False)
        outs += llm.generate([[i + 5] * 1024 for i in range(16)], filtered, use_tqdm=False)
        prefix = [7] * 16000
        llm.generate(prefix, greedy(1), use_tqdm=False)
        outs += llm.generate([[*prefix, *[i + 8] * 32] for i in range(512)], filtered, use_tqdm=False)
    assert all(len(out.token_ids) == 2 for out in outs)
    assert torch.cuda.max_memory_reserved() <= 0.93 * total


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_do_not_grow(ahead: bool) -> None:
    """The same requests again and again, some of them aborted, leave not a byte more on the device."""
    room: dict[str, Any] = {"device": DEVICE, "num_kvcache_blocks": 60, "max_num_seqs": 8, "overlap": ahead}
    with LLM("tiny", **room) as llm:
        for i in range(20):
            pieces = llm.stream([i + 5] * 9, greedy(50))
            next(pieces)
            pieces.close()
            llm.generate([[n + 5] * 9 for n in range(8)], greedy(30, temperature=1.0, seed=i), use_tqdm=False)
            if i == 2:
                gc.collect()
                before = torch.cuda.memory_allocated()
        gc.collect()
        assert torch.cuda.memory_allocated() <= before


def test_an_engine_goes_on_when_another_is_closed() -> None:
    """Both replay graphs; what the one gives back is nothing that the other's graphs use."""
    room: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "num_kvcache_blocks": 100, "max_num_seqs": 4}
    with LLM("tiny", **room) as llm:
        wanted = llm.generate("Once upon a time", greedy(60), use_tqdm=False)[0].text
        other = LLM("tiny", **room)
        pieces, others = (one.stream("Once upon a time", greedy(60)) for one in (llm, other))
        start = "".join(next(pieces).text + 0 * next(others).text for _ in range(10))
        other.close()
        gc.collect()
        torch.cuda.empty_cache()
        assert start + "".join(piece.text for piece in pieces) == wanted
        assert llm.generate("Once upon a time", greedy(60), use_tqdm=False)[0].text == wanted
