"""A mixture of experts on a CPU: tokens per second beside transformers' `generate`, and how many experts a step reads.

The model is a random OLMoE-1B-7B (16 layers of 64 experts, 8 per token, hidden 2,048, width 1,024, vocabulary 50,304;
6.9 billion weights) made smaller so that two copies in float32 fit into 16 GB: half as wide everywhere (hidden 1,024,
experts of 512), 8 layers, vocabulary 8,192: 0.84 billion weights. Experts and choices per token stay.

1, 8 and 32 requests of 16 tokens in and 32 out, in one process, in turns, greedily; medians of the rounds. The limit is
the time to read, at this machine's measured bandwidth, the weights and the expected number of experts of each step (a
prompt step counts as one that reads all). Then the experts that atom_mini's steps really read, beside the formula
E (1 - (1 - k / E)^B), which takes every choice as even and independent.

Run: `python tests/bench/families.py [--json results.json]`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from cpu import AtomMini, Generate, Workload, measure, memory_bandwidth
from report import OtherLoad, machine, print_table, write_json

from atom_mini.families import mixture

SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048, "num_experts": 64,
    "num_experts_per_tok": 8, "initializer_range": 2 / 1024**0.5,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
BATCHES = (1, 8, 32)


def distinct(tokens: int) -> float:
    """Experts that so many tokens touch, if choices are even and independent."""
    count, top_k = SHAPE["num_experts"], SHAPE["num_experts_per_tok"]
    return count * (1 - (1 - top_k / count) ** tokens)


class ReadingLimit:
    """The least seconds for a workload whose steps only read: weights, experts, K/V."""

    def __init__(self) -> None:
        hidden, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
        self.expert = 4 * layers * 3 * hidden * SHAPE["intermediate_size"]  # bytes, in all layers
        self.others = 4 * (layers * (4 * hidden**2 + hidden * SHAPE["num_experts"]) + SHAPE["vocab_size"] * hidden)
        self.token = 4 * 2 * layers * hidden
        self.bandwidths: list[float] = []

    def measure(self) -> None:
        self.bandwidths.append(memory_bandwidth())

    def seconds(self, work: Workload) -> float:
        """One step for all prompts, then one per token for all."""
        rows, steps = len(work.prompts), max(work.outputs) - 1
        read = self.others + self.expert * SHAPE["num_experts"]
        read += steps * (self.others + self.expert * distinct(rows))
        read += self.token * sum(rows * (len(work.prompts[0]) + i) for i in range(steps))
        return read / statistics.median(self.bandwidths)


@contextmanager
def counted() -> Iterator[dict[int, list[int]]]:
    """Tokens of a layer's step -> the different experts of each such step."""
    seen, route = defaultdict(list), mixture.route

    def counting(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(logits, *rest)
        seen[len(ids)].append(len(ids.unique()))
        return weights, ids

    mixture.route = counting
    try:
        yield seen
    finally:
        mixture.route = route


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    others, limit, results = OtherLoad(), ReadingLimit(), {}
    works = [Workload.random(f"{n} requests", n, (16, 16), (32, 32)) for n in BATCHES]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SHAPE)).save_pretrained(folder)
        engines = {"transformers generate": Generate(Path(folder)), "atom_mini, packed": AtomMini(Path(folder), packed=True)}
        for work in works:
            results[work.name] = measure(engines, work, args.rounds, limit)
        with counted() as seen:
            for work in works:
                engines["atom_mini, packed"].run(work)
    print("\ndifferent experts in a layer's step, of", SHAPE["num_experts"])
    rows = [[n, statistics.mean(seen[n]), distinct(n)] for n in BATCHES]
    print_table(["tokens", "counted", "by formula"], rows)
    if (share := others.share()) is not None:
        print(f"\nother processes used {share:.0%} of the processors meanwhile" + " (too much)" * (share > 0.05))
    curve = {n: [counted_, formula] for n, counted_, formula in rows}
    write_json(args.json, {"shape": SHAPE, "other_load": share, "experts": curve} | results)


if __name__ == "__main__":
    main()
