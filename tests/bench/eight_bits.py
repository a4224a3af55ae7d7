"""What eight bits cost on a real model: SmolLM2-135M-Instruct (`make real`), beside the same weights in float32.

Nothing here is a time, so the machine may be busy.

* How likely the model finds three texts (tests/real_prompts.py): the mean log probability of their tokens, the
  perplexity, and by how much the log probabilities differ from those in float32. Also at how many places the likeliest
  token is the same.
* The same, computed in float32 with rounded numbers, of two other ways to round: activations in eight bits as well; and
  weights and activations with a scale for each 32 numbers, as in llama.cpp's Q8_0.
* The greedy answers to 24 prompts, 32 tokens each at most: how many are the same, and how many of all tokens come
  before an answer's first different token. The products of prompts go through torch here, and decodes
  through the compiled function.
* The relative error of every layer's product on the first text, beside the error that the rounding predicts (chapter
  92b).

Then a fault is planted: the scales of one matrix move by one row. The texts become less likely, and the error of that
layer is many times the predicted one.

Run: `python tests/bench/eight_bits.py [--json tests/bench/results/eight_bits.json]`
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from report import machine, print_table, write_json
from torch import Tensor
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from real_prompts import TEXTS, prompts
from real_weights import FOLDER, is_whole

from atom_mini import LLM, SamplingParams
from atom_mini.cpu.int8_model import largest_code, quantize_rows

OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8 and bfloat16": {"quantization": "int8", "dtype": "bfloat16"},
}
FAULT = "int8, a wrong scale"
FAULTY = "model.layers.15.mlp.down"  # the matrix whose scales are moved
MAX_TOKENS = 32


def engine(**options: Any) -> LLM:
    """The real model on the CPU, in float32 unless an option says otherwise."""
    sizes = {"max_num_batched_tokens": 4096, "num_kvcache_blocks": 1024, "enable_prefix_caching": False}
    return LLM(str(FOLDER), device="cpu", **{"dtype": "float32", "compiled": True} | sizes | options)


def model_of(llm: LLM) -> Any:
    return llm.engine_core.runner.model


def plant(llm: LLM) -> None:
    """Give every row of one matrix the scale of the row before."""
    scales = model_of(llm).get_submodule(FAULTY).weight_scale
    scales.copy_(scales.roll(1, 0))


def projections(llm: LLM) -> dict[str, Any]:
    """The layers that have eight bits with the option, by name."""
    names = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down", "head")
    return {name: module for name, module in model_of(llm).named_modules() if name.endswith(names)}


def in_groups(x: Tensor, size: int = 32) -> Tensor:
    """x with its numbers rounded to eight bits, a scale for each `size` of them."""
    codes, scales = quantize_rows(x.reshape(-1, size))
    return (codes * scales).view_as(x)


def both_in_eight(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    rounded = [codes * scales for codes, scales in (quantize_rows(x), quantize_rows(w))]
    return torch.nn.functional.linear(*rounded, bias)


def groups_of_32(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(in_groups(x), in_groups(w), bias)


ROUNDED: dict[str, Callable[..., Tensor]] = {"activations too": both_in_eight, "in groups of 32": groups_of_32}


@contextmanager
def multiplying(llm: LLM, multiply: Callable[..., Tensor]) -> Iterator[None]:
    """In here the layers of an engine in float32 multiply by this function."""
    layers = projections(llm).values()
    before = [layer.multiply for layer in layers]
    for layer in layers:
        layer.multiply = multiply
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.multiply = own


@dataclass
class Scores:
    """Of each token of a text but the first: its log probability, and the token that was likeliest in its place."""

    logprobs: Tensor
    choices: Tensor

    @classmethod
    def join(cls, parts: list[Scores]) -> Scores:
        return cls(torch.cat([p.logprobs for p in parts]), torch.cat([p.choices for p in parts]))


@torch.inference_mode()
def score(llm: LLM, ids: list[int]) -> Scores:
    """A text as one prompt; its logits come from the hidden states that the model returns."""
    model, hidden = model_of(llm), list[Tensor]()
    hook = model.register_forward_hook(lambda module, args, output: hidden.append(output))
    try:
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    finally:
        hook.remove()
    (rows,) = hidden  # a single step
    logits = model.compute_logits(rows[:-1]).float()
    return Scores(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0], logits.argmax(-1))


def score_texts(llm: LLM, tokenizer: Any) -> Scores:
    return Scores.join([score(llm, tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS.values()])


def compare(found: Scores, exact: Scores) -> dict[str, Any]:
    """Perplexities and differences of log probabilities, in nats."""
    apart = found.logprobs - exact.logprobs
    return {
        "tokens": len(apart), "perplexity": found.logprobs.mean().neg().exp().item(),
        "mean_logprob": found.logprobs.mean().item(), "mean_difference": apart.mean().item(),
        "mean_absolute_difference": apart.abs().mean().item(), "largest_difference": apart.abs().max().item(),
        "same_choice": (found.choices == exact.choices).float().mean().item(),
    }  # fmt: skip


def answers(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    outs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return [out.token_ids for out in outs]


def agree(found: list[list[int]], exact: list[list[int]]) -> dict[str, Any]:
    """Answers that are the same, and tokens up to the first one that is not."""
    pairs = [zip(a, b, strict=False) for a, b in zip(found, exact, strict=True)]
    before = sum(len([*takewhile(lambda p: p[0] == p[1], pair)]) for pair in pairs)
    same = sum(a == b for a, b in zip(found, exact, strict=True))
    return {"answers": len(exact), "same_answers": same, "same_tokens": before / sum(map(len, exact))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def crest(x: Tensor) -> Tensor:
    """[R, 1]: the largest number of each row of x [R, size], over the root of the mean of the squares."""
    return x.abs().amax(-1, keepdim=True) / x.square().mean(-1, keepdim=True).sqrt()


def predicted_error(x: Tensor, w: Tensor) -> float:
    """The relative error of x @ w.T that rounding to steps t and s predicts: a variance of t**2 / 12 in each number of x,
    times the squares of the weights that multiply it, and the same of w."""
    t, s = quantize_rows(x, largest_code(x.shape[1]))[1], quantize_rows(w)[1]
    variance = (t.square() * w.square().sum(1) + x.square().sum(1, keepdim=True) * s.square().T) / 12
    return (variance.sum().sqrt() / (x @ w.T).norm()).item()


def layer_errors(exact: LLM, eight: LLM, ids: list[int]) -> dict[str, list[float]]:
    """Of each projection, on its inputs in float32: [its error in eight bits, the predicted one, the median crest]."""
    found: dict[str, list[float]] = {}
    small, hooks = projections(eight), []

    @torch.inference_mode()
    def note(name: str, module: Any, args: tuple[Tensor], out: Tensor) -> None:
        x, w = args[0], module.weight
        found[name] = [relative_error(small[name](x), x @ w.T), predicted_error(x, w), crest(x).median().item()]

    for name, module in projections(exact).items():
        hooks.append(module.register_forward_hook(partial(note, name)))
    try:
        score(exact, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def largest_ratio(errors: dict[str, list[float]]) -> float:
    """Of a layer's error to the predicted one. Smaller ones are right, too: beside a number that is far larger than all
    others, most are rounded to zero, and then an error is not larger than the number itself."""
    return max(measured / predicted for measured, predicted, _ in errors.values())


def by_kind(errors: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians over the layers."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(name.rpartition(".")[2] for name in errors):
        columns = [*zip(*(row for name, row in errors.items() if name.rpartition(".")[2] == kind), strict=True)]
        found[kind] = dict(zip(("measured", "predicted", "crest"), map(statistics.median, columns), strict=True))
    return found


def measure_products(tokenizer: Any) -> dict[str, Any]:
    """The errors of all layers, before and after a fault is planted, and what the texts say of that fault."""
    ids = tokenizer.encode(next(iter(TEXTS.values())), add_special_tokens=False)
    with engine() as exact, engine(quantization="int8") as eight:
        layers = layer_errors(exact, eight, ids)
        plant(eight)
        faulty = layer_errors(exact, eight, ids)
        scores = {FAULT: score_texts(eight, tokenizer)}
        for name, multiply in ROUNDED.items():
            with multiplying(exact, multiply):
                scores[name] = score_texts(exact, tokenizer)
    ratios = {"largest_ratio": largest_ratio(layers), "with_a_wrong_scale": largest_ratio(faulty)}
    return {"layers": by_kind(layers), **ratios, "scores": scores}


def measure() -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    asked = [*prompts(tokenizer).values()]
    scores: dict[str, Scores] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name, options in OPTIONS.items():
        with engine(**options) as llm:
            scores[name], tokens[name] = score_texts(llm, tokenizer), answers(llm, asked)
    products = measure_products(tokenizer)
    scores |= products.pop("scores")
    costs = {name: compare(found, scores["float32"]) for name, found in scores.items()}
    for name, found in tokens.items():
        costs[name] |= agree(found, tokens["float32"])
    return {"costs": costs, **products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if not is_whole():
        raise SystemExit("no real weights in build/smollm2: run make real")
    torch.set_num_threads(args.threads)
    results = measure()
    head = ["perplexity", "mean difference", "mean |difference|", "same choice", "same answers", "same tokens"]
    keys = ["perplexity", "mean_difference", "mean_absolute_difference", "same_choice", "same_answers", "same_tokens"]
    print_table(["", *head], [[name, *(row.get(key, "") for key in keys)] for name, row in results["costs"].items()])
    print("\nrelative errors of products, medians over the layers")
    print_table(["", *results["layers"]["qkv"]], [[kind, *row.values()] for kind, row in results["layers"].items()])
    right, wrong = results["largest_ratio"], results["with_a_wrong_scale"]
    print(f"\nthe largest of a layer's error to the predicted one: {right:.2f}; with a wrong scale {wrong:.1f}")
    write_json(args.json, {"machine": machine(), **results})


if __name__ == "__main__":
    main()
