"""What tensor parallelism costs on this machine: `LLM("tiny")` and a wider random model, on one rank and on two.

A step's time is the median over the decodes of a batch, or that of a prefill of 512 tokens, as `LLM.step` sees it.
Two ranks are two processes beside this one. `start` is from the call to the engine
that is ready. The two ranks share this machine's cores, and a rank waits in Gloo by sleeping: two ranks win only if a
step computes far longer than two dozen wake-ups take.

Run: `python tests/bench/ranks.py [--json results.json]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoints import save_checkpoint
from report import OtherLoad, machine, print_table, write_json

from atom_mini import LLM, SamplingParams

WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16}
WIDE |= {"num_key_value_heads": 8, "vocab_size": 8192, "max_position_embeddings": 2048, "initializer_range": 0.03}
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 400, "enable_prefix_caching": False, "max_num_seqs": 64}
STEPS = [("decode of 1", 1, "DECODE"), ("decode of 16", 16, "DECODE"), ("prefill of 512 tokens", 2, "PREFILL")]


def measure(llm: LLM, count: int, kind: str) -> float:
    """Median milliseconds of a step."""
    prefill = kind == "PREFILL"
    params = SamplingParams(max_tokens=1 if prefill else 24, ignore_eos=True, temperature=0)
    times = []
    for again in range(5 if prefill else 1):
        for i in range(count):
            llm.add_request([40 + i, *range(again + 1, 512 // count)] if prefill else [40, 206, 75], params)
        while llm.engine_core.scheduler.seqs:
            start = time.perf_counter()
            step = llm.step()
            took = time.perf_counter() - start
            if step is not None and step.batch.type.name == kind:
                times.append(1e3 * took)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of one rank, and of each of two
    others, rows, starts = OtherLoad(), [], []
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint("qwen3", Path(folder), **WIDE)
        for name, model in (("tiny", "tiny"), ("1,024 wide", folder)):
            found: dict[int, list[float]] = {}
            for n in (1, 2):
                begun = time.perf_counter()
                with LLM(model, tensor_parallel_size=n, **OPTIONS) as llm:
                    starts.append([f"{name}, {n}", time.perf_counter() - begun])
                    found[n] = [measure(llm, count, kind) for _, count, kind in STEPS]
            for i, (what, *_) in enumerate(STEPS):
                rows.append([f"{name}: {what}", found[1][i], found[2][i]])
    print("\nms per step")
    print_table(["step", "1 rank", "2 ranks"], rows)
    print("\nseconds to make an LLM (the first one imports torch, too)")
    print_table(["model, ranks", "seconds"], starts)
    if args.json:
        write_json(args.json, {"steps": rows, "starts": starts} | machine() | {"others": others.share()})


if __name__ == "__main__":
    main()
