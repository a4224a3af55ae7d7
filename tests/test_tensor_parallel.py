"""A model on several ranks: the same logits, the same tokens on each, its share of the bytes, and no silent death."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint, save_family
from side_by_side import SideBySide
from test_families import CASES as MIXTURES
from test_latent import CASES as LATENTS
from test_latent import save_mixture
from test_parity import CASES as PLAIN
from test_parity import assert_parity
from test_windows import MODELS as WINDOWS
from test_windows import save as save_windowed

import atom_mini.processes.shards as shards
from atom_mini import LLM, Config, SamplingParams
from atom_mini.models import FAMILIES
from atom_mini.processes.cuts import TensorParallel, cut_config

SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 60, "max_num_seqs": 4, "kv_cache_block_size": 4}
PROMPTS = ["Once upon a time", "12 + 7 =", "Once upon a day", "Mia has a red cat."]
SOON = 2.0  # seconds: everybody knows by then
LIMIT = 60.0  # seconds: longer than anything here takes


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A test that hangs is ended, with a stack."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# What is computed: all ranks in one process


@pytest.fixture
def spread_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From now on an LLM in `assert_parity` has n ranks, in threads of this process."""

    def spread(n: int, is_dealt: bool = False) -> None:
        options = {"tensor_parallel_size": n, "enable_expert_parallel": is_dealt}
        monkeypatch.setattr(TensorParallel, "make_runner", staticmethod(SideBySide))
        monkeypatch.setattr("test_parity.LLM", lambda *args, **more: LLM(*args, **options, **more))

    return spread


Save = Callable[..., Any]
ODD = {"vocab_size": 301}
MODELS: dict[str, tuple[Save, Any, dict[str, Any], int, bool]] = {  # how it is saved; ranks; whether experts are dealt
    "qwen3, untied, odd vocabulary": (save_checkpoint, PLAIN["qwen3, head_dim 24 of 64/4"], ODD, 2, False),
    "qwen3, tied, odd vocabulary, biases": (save_checkpoint, PLAIN["qwen3, attention bias, tied"], ODD, 4, False),
    "qwen2, biases": (save_checkpoint, PLAIN["qwen2, bias, tied"], {}, 2, False),
    "llama, biases on o and down": (save_checkpoint, PLAIN["llama, head_dim 32, biases"], {}, 2, False),
    "one K/V head for four": (save_checkpoint, PLAIN["llama, one K/V head"], {}, 4, False),
    "three ranks": (save_checkpoint, ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}),
                    {}, 3, False),
    "Qwen3-MoE, widths": (save_family, MIXTURES["Qwen3-MoE"], {}, 2, False),
    "Qwen3-MoE, dealt": (save_family, MIXTURES["Qwen3-MoE, dense layers"], {}, 2, True),
    "OLMoE, one norm over all heads": (save_family, MIXTURES["OLMoE, bias"], {}, 4, False),
    "OLMoE, dealt": (save_family, MIXTURES["OLMoE"], {}, 2, True),
    "Qwen2-MoE, a gated shared expert": (save_family, MIXTURES["Qwen2-MoE"], {}, 2, False),
    "Qwen2-MoE, dealt": (save_family, MIXTURES["Qwen2-MoE"], {}, 4, True),
    "Mixtral, dealt": (save_family, MIXTURES["Mixtral"], {}, 2, True),
    "GLM-4.5, groups, partly turned": (save_family, MIXTURES["GLM-4.5, groups"], {}, 2, False),
    "GLM-4.5, dealt, two shared": (save_family, MIXTURES["GLM-4.5"], {}, 2, True),
    "gpt-oss, sinks": (lambda kind, folder: save_windowed("gpt-oss", folder), WINDOWS["gpt-oss"], {}, 2, False),
    "gpt-oss, dealt": (lambda kind, folder: save_windowed("gpt-oss", folder), WINDOWS["gpt-oss"], {}, 2, True),
    "windows": (save_family, WINDOWS["Qwen3"], {}, 2, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path, spread_out: Callable[..., None]) -> None:
    """Of every token, in whole prefills, chunks, decodes, after prefix hits and preemptions; and all ranks draw the
    same tokens, of a batch that three of four got over the wire."""
    save, (kind, options), more, n, is_dealt = MODELS[name]
    model = save(kind, tmp_path, **({} if "oss" in name else options | more))
    spread_out(n, is_dealt)
    assert_parity(model, tmp_path)
