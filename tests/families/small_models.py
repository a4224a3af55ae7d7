"""How the tests of the families run a small model, and compare it with transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from checkpoints import Recorder, recorded, reference_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom_mini import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ROOMY: dict[str, Any] = {
    "num_kvcache_blocks": 200,
    "max_num_seqs": 40,
    "enable_prefix_caching": False,
}
# Chunks, preemptions, more requests than may run, and prefix hits where a model has them.
TIGHT: dict[str, Any] = {
    "kv_cache_block_size": 4,
    "num_kvcache_blocks": 31,
    "max_num_batched_tokens": 22,
    "max_num_seqs": 5,
}
SEVENS: dict[str, Any] = TIGHT | {"max_num_batched_tokens": 7}


def make_prompts() -> list[list[int]]:
    """1 to 100 tokens: YaRN's 64 lie within; some begin alike, two are equal."""
    rng = random.Random(0)
    stem = [rng.randrange(300) for _ in range(100)]
    return [stem, stem[:33], [*stem[:40], 7, 8], stem[:33], stem[50:51], stem[60:77]]


def generate(
    folder: Path, prompts: list[list[int]], **engine: Any
) -> tuple[Recorder, dict[int, list[int]], LLM]:
    """All logits of a run, the tokens by request, and the engine; what was never stored is NaN."""
    options = {"device": "cpu", "dtype": "float32"} | engine
    with LLM(str(folder), **options) as llm, recorded(llm) as recorder:
        runner: Any = llm.engine_core.runner
        states = vars(getattr(runner, "pool", SimpleNamespace())).values()
        for tensor in (runner.kv_cache, *states):
            tensor.fill_(math.nan)
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return recorder, {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}, llm


def assert_parity(
    model: Any,
    folder: Path,
    *engines: dict[str, Any],
    prompts: list[list[int]] | None = None,
    limit: float = 1e-4,
) -> None:
    """All logits of each engine are those of `model`, and all engines say the same."""
    said: list[list[int]] = []
    right: list[Tensor] = []
    for engine in engines:
        recorder, sequences, llm = generate(folder, prompts or make_prompts(), **engine)
        if not said:
            said = [*sequences.values()]
            right = [reference_logits(model, ids) for ids in said]
        assert [*sequences.values()] == said
        rows, wanted = recorder.every, dict(zip(sequences, right, strict=True))
        errors = torch.stack([(row - wanted[i][at]).abs().max() for (i, at), row in rows.items()])
        assert errors.max() <= limit, f"{engine}: {errors.max()}"  # NaN is not
        spread = torch.stack([*rows.values()]).std()
        assert 1 < spread < 20, f"a spread of {spread} shows no error, or too much rounding"
        assert recorder.num_decode_steps > 0
        if "max_num_batched_tokens" in engine:
            scheduler: Any = llm.engine_core.scheduler
            assert recorder.num_chunks > 0 and scheduler.num_preemptions > 0


def texts(folder: Path, prompts: list[list[int]], **engine: Any) -> list[list[int]]:
    """The tokens of each prompt."""
    with LLM(str(folder), device="cpu", **engine) as llm:
        return [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]


def rewrite(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint's file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
