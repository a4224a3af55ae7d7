"""The same logits as transformers, whatever path a token takes through the engine; never only the same argmax."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import recorded, reference_logits, save_checkpoint, spec_of

from atom_mini import LLM, SamplingParams
from atom_mini.loading import load_model
from atom_mini.models import rotary_frequencies

torch.set_num_threads(1)  # products this small are done before a second thread is awake
THETA = {"rope_theta": 10000.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, head_dim 24 of 64/4": ("qwen3", {"head_dim": 24, "tie_word_embeddings": False}),
    "qwen3, attention bias, tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen2, bias, tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama, untied": ("llama", {"tie_word_embeddings": False}),
    "llama, one K/V head": ("llama", {"num_key_value_heads": 1}),
    "llama, 3 heads for each K/V head": ("llama", {"hidden_size": 96, "num_attention_heads": 6}),
    "llama, head_dim 32, biases": ("llama", {"head_dim": 32, **BIASES}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear rope": ("llama", {"rope_parameters": THETA | {"rope_type": "linear", "factor": 2.0}}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "head_dim": 16}),
    "qwen2, yarn, attention_factor": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "llama, yarn, mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama, yarn, betas": (
        "llama",
        {"head_dim": 32, "rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}},
    ),
    "sharded": ("llama", {"max_shard_size": "40KB"}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
ROOMY = {"kv_cache_block_size": 16, "num_kvcache_blocks": 200, "enable_prefix_caching": False}
TIGHT = {"kv_cache_block_size": 4, "num_kvcache_blocks": 26, "max_num_batched_tokens": 22}


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 66 tokens; some share their beginning, some are the beginning of another, two are equal."""
    rng = random.Random(seed)
    stem = [rng.randrange(300) for _ in range(66)]
    prompts = [stem[:n] + [rng.randrange(300) for _ in range(extra)] for n, extra in
               ((8, 3), (8, 3), (20, 1), (0, 1), (33, 0), (66, 0), (0, 17))]  # fmt: skip
    return [*prompts, prompts[0]]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """No TF32 on a GPU: it has 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def assert_parity(model: Any, folder: Path, device: str = "cpu", *, packed: bool = True) -> None:
    """All logits of the engine on the checkpoint in `folder` are those of `model`, to 1e-4; on a CPU also with the
    packed products, unless `packed` is False (they are of one process)."""
    prompts, texts = make_prompts(), []
    for engine in (ROOMY, TIGHT, *([TIGHT | {"packed": True}] if packed and device == "cpu" else [])):
        options = {"device": device, "dtype": "float32", "enforce_eager": True}  # a replay calls no hooks
        with LLM(str(folder), **options, **engine) as llm, recorded(llm) as recorder:
            runner: Any = llm.engine_core.runner
            runner.kv_cache.fill_(math.nan)  # what was not stored is not read
            outs = llm.generate(prompts, GREEDY, use_tqdm=False)
            scheduler = llm.engine_core.scheduler
        sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
        # every token but the last one has a row, except where a prefix hit saved the work
        computed = {key for key in recorder.every if key[0] in sequences}
        everything = {(i, p) for i, ids in sequences.items() for p in range(len(ids) - 1)}
        cached = {(out.request_id, p) for out in outs for p in range(out.num_cached_tokens)}
        assert everything - cached <= computed <= everything
        sampled = {(out.request_id, len(out.prompt_token_ids) + n - 1) for out in outs for n in range(20)}
        assert recorder.sampled.keys() == sampled
        hits = sum(out.num_cached_tokens > 0 for out in outs)
        happened = (recorder.num_chunks > 0, hits > 0, scheduler.num_preemptions > 0, recorder.num_decode_steps > 0)
        assert happened == ((False, False, False, True) if engine is ROOMY else (True, True, True, True))
        spread = torch.stack(list(recorder.every.values())).std()
        assert 1 < spread < 20, f"logits with a spread of {spread} would show no error, or too much rounding"
        errors = recorder.errors(model, sequences)
        assert max(errors.values()) <= 1e-4, errors
        texts.append([out.token_ids for out in outs])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, device: str, tmp_path: Path) -> None:
    """Every token of the prefill, every decode step, with room for all and through chunks, prefix hits, preemptions."""
    kind, options = CASES[case]
    model = save_checkpoint(kind, tmp_path, **options)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (case == "sharded")
    assert_parity(model, tmp_path, device)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test above runs the kernels on the GPU")
@pytest.mark.slow
def test_kernels_in_the_interpreter_equal_transformers(tmp_path: Path) -> None:
    """The engine on its Triton kernels, through chunks and decodes; fewer tokens, since the interpreter is slow."""
    shape = {"head_dim": 24, "num_attention_heads": 6, "num_hidden_layers": 2}
    model = save_checkpoint("qwen3", tmp_path, **shape)
    with LLM(str(tmp_path), device="cpu", attention="triton", **TIGHT) as llm, recorded(llm) as recorder:
        llm.engine_core.runner.kv_cache.fill_(math.nan)  # type: ignore[attr-defined]
        outs = llm.generate([make_prompts()[n] for n in (1, 4)], replace(GREEDY, max_tokens=4), use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    assert recorder.num_chunks > 0 and recorder.num_decode_steps > 0
    assert max(recorder.errors(model, sequences).values()) <= 1e-4


@pytest.mark.parametrize("case", ["qwen3, head_dim 24 of 64/4", "qwen2, bias, tied", "llama, llama3 rope"])
def test_bfloat16_is_as_close_as_transformers(case: str, tmp_path: Path) -> None:
    """In bfloat16 log probabilities are off by what the type costs transformers too, not by more."""
    kind, options = CASES[case]
    model = save_checkpoint(kind, tmp_path, **options | {"initializer_range": 0.15})
    prompts = make_prompts()[4:6]
    with LLM(str(tmp_path), device="cpu", dtype="bfloat16", **ROOMY) as llm, recorded(llm) as recorder:
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    exact = {i: reference_logits(model, ids).log_softmax(-1) for i, ids in sequences.items()}
    model.bfloat16()
    theirs = {i: reference_logits(model, ids).log_softmax(-1) for i, ids in sequences.items()}
    off = [(row.log_softmax(-1) - exact[i][p]).abs().mean().item() for (i, p), row in recorder.every.items()]
    allowed = [(theirs[i][p] - exact[i][p]).abs().mean().item() for i, p in recorder.every]
    assert sum(off) <= 1.3 * sum(allowed) and sum(off) / len(off) < 0.1


@pytest.mark.parametrize("case", ["llama, llama3 rope", "qwen3, yarn"])
def test_rotary_table_does_not_depend_on_the_dtype(case: str, tmp_path: Path) -> None:
    """Frequencies are computed in float32 also for a bfloat16 model: 8 bits of a frequency are lost by position 256."""
    kind, options = CASES[case]
    model = save_checkpoint(kind, tmp_path, **options)
    tables = [load_model(spec_of(model.config), tmp_path, 256, torch.device("cpu"), dtype).model.rotary
              for dtype in (torch.float32, torch.bfloat16)]  # fmt: skip
    assert torch.equal(tables[0].cos, tables[1].cos) and torch.equal(tables[0].sin, tables[1].sin)


@pytest.mark.parametrize(
    ("dim", "theta"), [(16, 10_000.0), (48, 123_457.0), (64, 1_000_000.0), (128, 500_000.0)]
)
def test_plain_frequencies_are_those_of_transformers_to_the_bit(dim: int, theta: float) -> None:
    """Position 5,000 multiplies the difference of a last bit by 5,000."""
    cfg = transformers.LlamaConfig(hidden_size=2 * dim, num_attention_heads=2, rope_theta=theta)
    right = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(cfg).inv_freq
    assert torch.equal(rotary_frequencies(spec_of(cfg), dim)[0], right)


