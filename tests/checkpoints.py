"""Small random checkpoints, saved by transformers itself, and the logits of both sides on every token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import atom_mini.families.models  # noqa: F401 - fills MODELS
from atom_mini import LLM
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput

# The benchmarks import this file, too: by its path. Appended: a folder of ours hides no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "nbs" / "_book"))
from show import check_blocks

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
}
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # logits of a few units: an error in the fourth digit shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Published shapes. The initialiser is scaled so that logits and attention scores have a spread of about 1.
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "initializer_range": 1024**-0.5,
}
LLAMA32_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "initializer_range": 2048**-0.5,
}

FULL_SIZE = {"Qwen3-0.6B": ("qwen3", QWEN3_06B), "Llama-3.2-1B": ("llama", LLAMA32_1B)}


def random_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Any:
    """A transformers model of `kind` with random weights; norms and biases too, whose ones and zeros hide mistakes."""
    default = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**SMALL | options)).eval()
    finally:
        torch.set_default_dtype(default)
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    return model


def save_checkpoint(kind: str, folder: Path, max_shard_size: str = "50GB", seed: int = 0, **options: Any) -> Any:
    """Save a `random_model` to `folder` and return it."""
    model = random_model(kind, seed=seed, **options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def spec_of(cfg: Any) -> Any:
    """What the engine reads in a transformers config, of any family, whatever scales its rotation."""
    from atom_mini.families.specs import read_family
    from atom_mini.rope import check_rope

    spec = read_family(cfg)
    check_rope(spec.rope)
    return spec


def save_family(kind: str, folder: Path, seed: int = 0, **options: Any) -> Any:
    """Save a small model of one of `families.FAMILY_CASES`' kinds, every weight visible, and return it."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SMALL | {"num_hidden_layers": 4} | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            torch.nn.init.normal_(weight, float("norm" in name), 0.1 if "correction" in name else 0.2)
    model.save_pretrained(folder)
    return model


def save_full_size(name: str, folder: Path) -> None:
    """A checkpoint of a published shape as its authors store it, bfloat16 and in shards, with random weights."""
    kind, shape = FULL_SIZE[name]
    save_checkpoint(kind, folder, max_shard_size="400MB", dtype=torch.bfloat16, **shape)


def measure_loading(folder: Path, dtype: str = "float32") -> dict[str, float]:
    """What loading takes in a fresh process: `seconds`, `weights` and `peak`, bytes over what it had before (Linux)."""
    code = """
import json, re, sys, time
from pathlib import Path
import torch, transformers

import atom_mini.families.models
from atom_mini import EngineArgs
from atom_mini.loading import load_model
config = EngineArgs(sys.argv[1], max_model_len=512)
def peak():  # not getrusage's: that one remembers the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before, start = peak(), time.perf_counter()
model = load_model(config.spec, config.folder, 512, torch.device("cpu"), getattr(torch, sys.argv[2]))
seconds = time.perf_counter() - start
weights = sum(w.numel() * w.element_size() for w in model.parameters())
print(json.dumps({"seconds": seconds, "weights": weights, "peak": peak() - before}))
"""
    command = [sys.executable, "-c", code, str(folder), dtype]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def edit_json(file: Path, **changes: Any) -> None:
    """Set some keys of a JSON file; `None` removes one."""
    raw = json.loads(file.read_text()) if file.is_file() else {}
    raw = {name: value for name, value in (raw | changes).items() if value is not None}
    file.write_text(json.dumps(raw))


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Transformers' logits [tokens, vocabulary] of one sequence, in one forward pass without a cache."""
    ids = torch.tensor([token_ids], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0].float().cpu()


@dataclass
class Recorder:
    """What one engine computed: logits by (request id, position), of every token and of those that were sampled."""

    every: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    sampled: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    batches: list[ScheduledBatch] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        """Pieces of prompts that did not end them."""
        return sum(int((~batch.is_sampled).sum()) for batch in self.batches)

    @property
    def num_decode_steps(self) -> int:
        return sum(int((batch.num_scheduled_tokens == 1).all()) for batch in self.batches)

    def errors(self, model: Any, sequences: dict[int, list[int]]) -> dict[str, float]:
        """The largest |difference| to transformers' logits: of all tokens, and of the sampled ones."""
        wanted = {i: reference_logits(model, ids) for i, ids in sequences.items()}
        return {
            name: max((row - wanted[i][position]).abs().max().item() for (i, position), row in record.items())
            for name, record in (("every", self.every), ("sampled", self.sampled))
        }


@contextmanager
def recorded(llm: LLM) -> Iterator[Recorder]:
    """Record all logits of `llm` in this block; a position computed twice must come out the same to 1e-4."""
    runner: Any = llm.engine_core.runner
    recorder, hidden = Recorder(), []
    forward, sample = runner.forward, runner.sample
    hook = runner.model.register_forward_hook(lambda module, args, output: hidden.append(output))

    def note(record: dict[tuple[int, int], Tensor], key: tuple[int, int], row: Tensor) -> None:
        if key in record:
            torch.testing.assert_close(row, record[key], atol=1e-4, rtol=0)
        record[key] = row

    @torch.inference_mode()
    def noting_forward(batch: ScheduledBatch) -> ScheduledBatchOutput:
        output = forward(batch)
        recorder.batches.append(batch)
        logits = iter(runner.model.compute_logits(hidden.pop()).float().cpu())
        for i, n, length in zip(batch.req_ids, batch.num_scheduled_tokens, batch.context_lens, strict=True):
            for position in range(length - n, length):
                note(recorder.every, (i, position), next(logits).clone())
        return output

    def noting_sample(batch: ScheduledBatch, logits: Tensor, *rest: Tensor) -> Tensor:
        keys = [(i, int(n) - 1) for i, n in zip(batch.req_ids, batch.context_lens, strict=True)]
        keys = [key for key, is_sampled in zip(keys, batch.is_sampled, strict=True) if is_sampled]
        for key, row in zip(keys, logits.float().cpu(), strict=True):
            note(recorder.sampled, key, row.clone())
        return sample(batch, logits, *rest)

    runner.forward, runner.sample = noting_forward, noting_sample
    try:
        yield recorder
    finally:
        hook.remove()
        del runner.forward, runner.sample  # the methods of the class show again


def is_empty(llm: LLM) -> bool:
    """Whether nobody is in the engine and every block is free, the books balanced."""
    scheduler = llm.engine_core.scheduler
    check_blocks(scheduler.block_manager, [*scheduler.running, *scheduler.waiting])
    free = scheduler.block_manager.num_free_blocks == llm.config.num_kvcache_blocks
    return not scheduler.waiting and not scheduler.running and not scheduler.seqs and free


def plain_search(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before the stop string that is complete first, that string), reading letter by letter."""
    for end in range(1, len(text) + 1):
        reached = [s for s in stops if text[:end].endswith(s)]
        if reached:
            longest = max(reached, key=len)
            return text[: end - len(longest)], longest
    return None


def save_one_layer(folder: Path) -> Path:
    """A Qwen3 of one layer, 3 query heads for one K/V head of 16; the folder."""
    shape = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90}
    save_checkpoint("qwen3", folder, num_hidden_layers=1, max_position_embeddings=320, **shape)
    return folder
