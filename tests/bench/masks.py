"""What the masks of a form cost, and what they force.

* Three vocabularies: the built-in model's (958 tokens), SmolLM2's (49,152; `make real`), and the built-in one padded with
  pairs of its tokens to 151,936, as many as Qwen3 has. For each: the time of a new mask along an answer, that of a mask
  that is kept, and that of applying masks to logits, the fastest of several runs.
* Two models, at 1 and 8 requests: the time of a decode step with masks over that without, in turns.
* How many tokens of SmolLM2's answers to a schema were the only ones that the schema allowed.
* Where XGrammar is installed: the time in which each library reads the schema and gives its first mask, and the mean
  time of a mask along the answer, without our states and copies. Built-in and SmolLM2's tokenizer.

All times are processor time of one thread, so the machine may be busy.

Run: `python tests/bench/masks.py [--json tests/bench/results/masks.json]`
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import machine, print_table, write_json

sys.path.append(str(Path(__file__).resolve().parents[1]))
from real_weights import FOLDER, is_whole

from atom_mini import LLM, Config, SamplingParams, StructuredOutputsParams
from atom_mini.forms import Vocabulary, keep_only, stacked
from atom_mini.structured.matcher import Masks
from atom_mini.structured.params import masks_of
from atom_mini.structured.vocabulary import read_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "bear"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"], "additionalProperties": False,
}  # fmt: skip
ANSWER = '{"name": "Greta", "age": 31, "pets": ["cat", "bear"]}'
FORM = StructuredOutputsParams(json=PERSON)
WORDS = StructuredOutputsParams(regex="[a-z ]{600}")
SIZE = 151_936  # of Qwen3's logits
STEPS = 16


def padded(folder: Path, size: int) -> Vocabulary:
    """The built-in tokenizer, in `folder`, with pairs of its tokens up to `size`. They are no merges, so it encodes as before."""
    home = Config("tiny").folder
    assert home is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(home / name, folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab, rng = raw["model"]["vocab"], random.Random(0)
    words = [word for word in vocab if not word.startswith("<|")]
    while len(vocab) < size:
        vocab.setdefault(rng.choice(words) + rng.choice(words), len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return Vocabulary(folder, size, Config("tiny").vocabulary.ends)


def fastest(action: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return min(times)


def walk(masks: Masks, tokens: tuple[int, ...]) -> None:
    for n in range(len(tokens) + 1):
        assert masks.after(tokens[:n]) is not None


def cost(vocabulary: Vocabulary) -> dict[str, float]:
    """Microseconds: a new mask, one that is kept, and masks applied to the logits of 1 and 8 rows; seconds of the first form."""
    start = time.thread_time()
    masks = masks_of(FORM, vocabulary)
    first = time.thread_time() - start
    tokens = tuple(read_vocabulary(vocabulary).tokenize_str(ANSWER))
    new = []
    for _ in range(20):
        Masks.kept.clear()
        new.append(fastest(lambda: walk(masks, tokens), 1))
    kept = fastest(lambda: [masks.after(tokens) for _ in range(len(tokens) + 1)], 50)
    found = {"tokens": len(tokens), "first form": first}
    found |= {"new": 1e6 * statistics.median(new) / len(tokens), "kept": 1e6 * kept / (len(tokens) + 1)}
    mask = FORM.mask(vocabulary, tokens[:3])
    assert mask is not None
    found["bytes"] = len(mask)
    for R in (1, 8):
        logits, arrays = torch.randn(R, vocabulary.size), map(torch.from_numpy, stacked(dict.fromkeys(range(R), mask)))
        found[f"apply {R}"] = 1e6 * fastest(partial(keep_only, logits, *arrays), 50)
    return found


def step(llm: LLM, R: int, form: StructuredOutputsParams | None) -> float:
    """Seconds of a step of R requests, each with its own prompt."""
    more: dict[str, Any] = {"structured_outputs": form} if form else {"ignore_eos": True}
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=STEPS, **more)
    Masks.kept.clear()
    prompts: Any = [[50 + i] * 8 for i in range(R)]
    start = time.thread_time()
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(out.token_ids) == STEPS for out in outs)
    return (time.thread_time() - start) / STEPS


def ratios(model: str, rounds: int) -> dict[str, float]:
    """A step with masks over one without, in turns: medians."""
    found = {}
    with LLM(model, device="cpu", dtype="float32", num_kvcache_blocks=300, max_num_seqs=8, enable_prefix_caching=False) as llm:
        for R in (1, 8):
            step(llm, R, WORDS), step(llm, R, None)
            pairs = [(step(llm, R, WORDS), step(llm, R, None)) for _ in range(rounds)]
            found[str(R)] = statistics.median(a / b for a, b in pairs)
    return found


def forced(llm: LLM) -> dict[str, Any]:
    """Of answers to the schema: their tokens, and those that no other token could have replaced."""
    ask = "Describe a person with a name, an age, and pets (cat, dog or bear) as JSON."
    prompt = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": ask}], tokenize=False, add_generation_prompt=True)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=100, structured_outputs=FORM) for i in range(8)]
    vocabulary, total, alone, texts = llm.config.vocabulary, 0, 0, []
    for out in llm.generate([prompt] * 8, params, use_tqdm=False):
        assert out.finish_reason == "stop" and json.loads(out.text)
        texts.append(out.text)
        for n in range(len(out.token_ids)):
            mask = FORM.mask(vocabulary, tuple(out.token_ids[:n]))
            assert mask is not None
            total, alone = total + 1, alone + (int(np.unpackbits(mask).sum()) == 1)
    return {"tokens": total, "forced": alone, "texts": texts}


def of_library(start: Callable[[], Any], mask: str, take: str, tokens: list[int], *args: Any) -> dict[str, float]:
    """Microseconds in which a library makes a matcher and its first mask, and of a mask after it."""
    reading, masks = [], []
    for _ in range(10):
        begin = time.thread_time()
        matcher = start()
        getattr(matcher, mask)(*args)
        reading.append(time.thread_time() - begin)
        begin = time.perf_counter()
        for token in tokens:
            assert getattr(matcher, take)(token)
            getattr(matcher, mask)(*args)
        masks.append((time.perf_counter() - begin) / len(tokens))
    return {"read": 1e6 * min(reading), "mask": 1e6 * min(masks)}


def beside_xgrammar(folder: Path, size: int) -> dict[str, dict[str, float]]:
    """Both libraries on a tokenizer. Each mask's time has that of taking a token."""
    import xgrammar
    from llguidance import LLMatcher
    from transformers import AutoTokenizer

    tokenizer, schema = AutoTokenizer.from_pretrained(folder), json.dumps(PERSON)
    tokens = tokenizer.encode(ANSWER, add_special_tokens=False)
    ours = read_vocabulary(Vocabulary(folder, size, (tokenizer.eos_token_id,)))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler, bits = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False), xgrammar.allocate_token_bitmask(1, size)
    return {
        "llguidance": of_library(lambda: LLMatcher(ours, LLMatcher.grammar_from_json_schema(schema)), "compute_bitmask",
                                 "consume_token", tokens),
        "xgrammar": of_library(lambda: xgrammar.GrammarMatcher(compiler.compile_json_schema(schema)), "fill_next_token_bitmask",
                               "accept_token", tokens, bits),
    }  # fmt: skip


def libraries() -> dict[str, Any]:
    """Both, on two tokenizers; nothing without XGrammar."""
    if find_spec("xgrammar") is None:
        return {}
    home = Config("tiny").folder
    assert home is not None
    found: dict[str, Any] = {str(n): beside_xgrammar(folder, n) for folder, n in ((home, 958), (FOLDER, 49152))}
    return found | {"versions": {name: version(name) for name in ("llguidance", "xgrammar")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if not is_whole():
        raise SystemExit("no real weights in build/smollm2: run make real")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        costs = {
            "958": cost(Config("tiny").vocabulary), "49152": cost(Config(str(FOLDER)).vocabulary),
            "151936": cost(padded(Path(folder), SIZE)),
        }  # fmt: skip
    print_table(["vocabulary", *costs["958"]], [[name, *row.values()] for name, row in costs.items()])
    steps = {"tiny": ratios("tiny", args.rounds), "SmolLM2": ratios(str(FOLDER), 3)}
    print_table(["a step with masks / without", "1", "8"], [[name, *row.values()] for name, row in steps.items()])
    with LLM(str(FOLDER), device="cpu", dtype="float32", num_kvcache_blocks=300, max_num_seqs=8) as llm:
        found = forced(llm)
    print(f"{found['forced']} of {found['tokens']} tokens were forced: {found['texts'][0]}")
    record = {"machine": machine(), "costs": costs, "steps": steps, "forced": found, "libraries": libraries()}
    print(json.dumps(record["libraries"], indent=1))
    write_json(args.json, record)


if __name__ == "__main__":
    main()
