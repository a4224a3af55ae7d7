"""What the host costs per decode step: schedule, prepare, pack the sampling, look at the results; no model, no sampler.

Each figure is the median of the steps of one run, in milliseconds. Aims: 0.5 ms at 256 sequences, 1.0 ms at 512,
linear in the sequences, flat in their length. Run: `python tests/bench/host_step.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

from atom_mini.config import Config, SamplingParams
from atom_mini.model_runner import ModelRunner
from atom_mini.scheduler import Scheduler
from atom_mini.sequence import Sequence

AIMS = {256: 0.5, 512: 1.0}


def host_milliseconds(runner: ModelRunner, num_seqs: int, length: int, params: SamplingParams, steps: int = 40) -> float:
    """Median decode step of `num_seqs` sequences of `length` tokens, without the forward pass."""
    size = runner.config.kv_cache_block_size
    config = Config(kv_cache_block_size=size, num_kvcache_blocks=num_seqs * (length // size + 8), max_num_seqs=num_seqs,
                    max_num_batched_tokens=2**24)
    scheduler, logits = Scheduler(config), torch.rand(num_seqs, 64)
    for i in range(num_seqs):
        scheduler.add(Sequence([i % 900] * length, size, params))
    times = []
    gc.collect()
    gc.freeze()
    for _ in range(steps + 1):
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        assert scheduled is not None
        batch, seqs = scheduled
        runner.prepare_model(batch)
        output = runner.postprocess(batch, logits)
        scheduler.postprocess(list(seqs.values()), output)
        times.append(time.perf_counter() - start)
    gc.unfreeze()
    return 1e3 * statistics.median(times[1:])  # the first step is the prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    runner = ModelRunner(Config("tiny", device="cpu", num_kvcache_blocks=1))
    runner.sampler = lambda logits, meta: logits.argmax(-1)  # type: ignore[assignment]  # the device's work, not the host's
    kinds = {"greedy": SamplingParams(temperature=0, max_tokens=500, ignore_eos=True),
             "temperature 0.6, top-p 0.9": SamplingParams(temperature=0.6, top_p=0.9, top_k=0, min_p=0.0, seed=1,
                                                          repetition_penalty=1.0, max_tokens=500, ignore_eos=True)}
    figures = {}
    for kind, params in kinds.items():
        print(f"\nhost ms per decode step, {kind}\nsequences  " + "".join(f"context {n:<7}" for n in (128, 1024, 4096)))
        for num_seqs in (64, 128, 256, 512):
            row = [host_milliseconds(runner, num_seqs, length, params) for length in (128, 1024, 4096)]
            figures[f"{kind}, {num_seqs}"] = row
            aim = f"aim {AIMS[num_seqs]}" if num_seqs in AIMS else ""
            print(f"{num_seqs:9}  " + "".join(f"{ms:<15.2f}" for ms in row) + aim)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
