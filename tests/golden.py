"""The golden file: what the engine answered once, so that a rewrite which changes a token is noticed in a minute.

    python tests/golden.py    # records tests/data/golden.json anew, of a change that is meant to change tokens

It holds, for small models of every family, for the built-in model and for the real one (`make real`), the greedy tokens
of each prompt and the tokens sampled with seeds. tests/engine/test_golden.py compares. The weights of the small models are drawn
here, each tensor from a seed of its own, so that they do not depend on how transformers initializes a model; their
checksum is recorded too. Greedy tokens are kept up to the first one that won by less than HAIR: behind it rounding on
another processor may choose another text.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folders  # noqa: F401  before the tests
import test_families
import test_latent
import test_parity
import test_state
import test_windows
import torch
import transformers
from checkpoints import SMALL
from real_prompts import prompts
from real_weights import FOLDER, is_whole
from safetensors.torch import load_file

from atom_mini import LLM, SamplingParams

FILE = Path(__file__).with_name("data") / "golden.json"
HAIR = 1e-3  # of a log probability
BUILT_IN, REAL = "tiny", "SmolLM2-135M-Instruct"
NUM_TOKENS = 16
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = (
    {f"dense: {name}": case for name, case in test_parity.CASES.items() if name != "sharded"}
    | test_families.CASES
    | {f"latent: {name}": (kind, test_latent.SMALL | more) for name, (kind, more) in test_latent.CASES.items()}
    | {f"windows: {name}": case for name, case in test_windows.MODELS.items()}
    | {f"state: {name}": case for name, case in test_state.CASES.items()}
)
OF_THREE = {"qwen3", "qwen2", "llama", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"}  # kinds with three layers, not four
# In two ways: with room for all, and through chunks, prefix hits and preemptions. Both must give the same.
ROOMY: dict[str, Any] = {"num_kvcache_blocks": 256, "enable_prefix_caching": False}
TIGHT: dict[str, Any] = {"kv_cache_block_size": 4, "num_kvcache_blocks": 32, "max_num_batched_tokens": 22}
Answers = dict[str, list[list[int]]]  # "greedy", "sampled" -> tokens of each prompt


def fill(model: torch.nn.Module) -> None:
    """Give every weight values that show: normal, each tensor from a seed that is made of its name."""
    spreads = {"A_log": 1.0, "dt_bias": 1.0, "e_score_correction_bias": 0.1, "sinks": 1.0}
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        kind = name.split(".")[-1]
        if "inv_freq" in name:
            continue
        mean = {"A_log": -2.0, "sinks": 2.0}.get(kind, float("norm" in name))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.normal_(weight, mean, spreads.get(kind, 0.2), generator)


def save(name: str, folder: Path) -> None:
    """The small model `name` as a checkpoint."""
    kind, options = FAMILIES[name]
    options = {key: value for key, value in options.items() if key != "max_shard_size"}
    shape = test_state.SMALL if name.startswith("state") else SMALL | {"num_hidden_layers": 3 if kind in OF_THREE else 4}
    config = transformers.AutoConfig.for_model(kind, **shape | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    fill(model)
    model.save_pretrained(folder)


def checksum(folder: Path) -> int:
    """CRC-32 of all weights of a checkpoint, in the order of their names."""
    found = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            found = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, zlib.crc32(name.encode(), found))
    return found


def answers(llm: LLM, asked: list[list[int]], logprobs: int | None = None) -> tuple[Answers, list[int]]:
    """The tokens of every prompt, and of each how many of the greedy ones won by at least HAIR (with `logprobs=2`)."""
    end = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    greedy = llm.generate(asked, SamplingParams(temperature=0, logprobs=logprobs, **end), use_tqdm=False)
    wild = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, **end}
    params = [SamplingParams(seed=seed, **wild) for seed in range(len(asked))]
    sampled = llm.generate(asked, params, use_tqdm=False)
    found = {"greedy": [o.token_ids for o in greedy], "sampled": [o.token_ids for o in sampled]}
    return found, [sure(o.logprobs) for o in greedy]


def sure(logprobs: list[dict[int, float]] | None) -> int:
    """How many tokens there are before the first whose likeliest rival is within HAIR."""
    for place, likely in enumerate(logprobs or []):
        first, second, *_ = sorted(likely.values(), reverse=True)
        if first - second < HAIR:
            return place
    return len(logprobs or [])


def asked_of(name: str) -> list[list[int]]:
    """The prompts of a model, as token ids."""
    if name == REAL:
        return [*prompts(transformers.AutoTokenizer.from_pretrained(FOLDER)).values()]
    return test_parity.make_prompts()


def record(name: str, folder: Path | str) -> dict[str, Any]:
    """What the golden file says of one model."""
    where = Path(sys.modules["atom_mini"].__file__ or "").parent / "tiny" if folder == BUILT_IN else Path(folder)
    with LLM(str(folder), device="cpu", dtype="float32", **ROOMY) as llm:  # the compiled decode is held to it
        found, certain = answers(llm, asked_of(name), logprobs=2)
    found["greedy"] = [tokens[:n] for tokens, n in zip(found["greedy"], certain, strict=True)]
    return {"weights": checksum(where), **found}


def check(name: str, known: dict[str, Any], found: Answers) -> None:
    """AssertionError with the first prompt and token in which `found` leaves what is `known`."""
    for way in ("greedy", "sampled"):
        for number, (before, now) in enumerate(zip(known[way], found[way], strict=True)):
            now = now[: len(before)]
            place = next((i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b), None)
            assert place is None, f"{name}, {way}, prompt {number}: token {place} is {now[place]}, was {before[place]}"


def models() -> Iterator[tuple[str, Path | str]]:
    """Every model, and where it is for as long as it is its turn."""
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save(name, Path(folder))
            yield name, Path(folder)
    yield BUILT_IN, BUILT_IN
    if is_whole():
        yield REAL, FOLDER


def main() -> None:
    """Record all models; the real one stays as it was where its weights are not there."""
    torch.set_num_threads(1)
    before = json.loads(FILE.read_text())["models"] if FILE.exists() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    found = {name: record(name, folder) for name, folder in models()}
    kept = {name: known for name, known in before.items() if name == REAL and name not in found}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(known)}" for name, known in (found | kept).items())
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f'{{"versions": {json.dumps(versions)}, "models": {{\n{lines}\n}}}}\n')
    print(f"{FILE.name}: {len(found)} models recorded")


if __name__ == "__main__":
    main()
