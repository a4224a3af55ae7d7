"""What the host costs per decode step: schedule, prepare, pack the sampling, look at the results; no model, no sampler.

Each figure is the median of the steps of one run, in milliseconds. Aims: 0.5 ms at 256 sequences, 1.0 ms at 512,
linear in the sequences, flat in their length. On a GPU decodes are replayed (chapter 12): there part of the work is done
while the device computes, and the last table shows what is left beside it. Run: `python tests/bench/host_step.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing is launched; without it the kernels refuse a CPU

import torch

from atom_mini.config import Config, SamplingParams
from atom_mini.graphs import GraphRunner
from atom_mini.model_runner import InputBuffer, ModelRunner, pack_output
from atom_mini.scheduler import ScheduledBatchOutput, Scheduler
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
        output = pack_output(batch, logits, runner.postprocess(batch, logits).tolist())
        scheduler.postprocess(list(seqs.values()), output)
        times.append(time.perf_counter() - start)
    gc.unfreeze()
    return 1e3 * statistics.median(times[1:])  # the first step is the prefill


class HollowGraph:
    """A recording of nothing: what a replay costs the host but for the call of the driver."""

    def __init__(self, size: int) -> None:
        self.outputs = torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64)

    def replay(self) -> None:
        pass


class HollowRunner(GraphRunner):
    """A `GraphRunner` on a CPU without kernels: inputs, guesses and outputs are real, the device's work is left out."""

    hidden = 0.0  # seconds that a device would have worked meanwhile

    def _capture(self, sizes: list[int]) -> list[int]:
        ops: Any = self.ops
        plan = ops.largest_decode_plan(sizes[-1], 8192, self.config.kv_cache_block_size)
        self.static = InputBuffer(self.device, 32 * sizes[-1] + plan.data.nbytes + 96, grows=False)
        self.graphs = {n: HollowGraph(n) for n in sizes}
        return []

    def _prepare(self, context_lens: Any, block_tables: Any) -> Any:
        start = time.perf_counter()
        guess = super()._prepare(context_lens, block_tables)
        self.hidden += time.perf_counter() - start
        return guess


def replayed_milliseconds(num_seqs: int, length: int, temperature: float, steps: int = 40) -> tuple[float, float]:
    """(median of what a replayed step costs the host, the part of it that runs while the device does)."""
    size, blocks = 16, num_seqs * (length // 16 + 8)
    config = Config("tiny", device="cpu", attention="triton", num_kvcache_blocks=num_seqs, max_num_seqs=num_seqs)
    runner = HollowRunner(config)
    config.num_kvcache_blocks, config.max_model_len, config.max_num_batched_tokens = blocks, None, 2**24
    scheduler, params = Scheduler(config), SamplingParams(temperature=temperature, seed=1, max_tokens=500, ignore_eos=True)
    for i in range(num_seqs):
        scheduler.add(Sequence([i % 900] * length, size, params))
    times, hidden = [], []
    gc.collect()
    gc.freeze()
    for step in range(steps + 1):
        runner.hidden, start = 0.0, time.perf_counter()
        scheduled = scheduler.schedule()
        assert scheduled is not None
        batch, seqs = scheduled
        output = ScheduledBatchOutput(dict.fromkeys(batch.req_ids, (7,))) if step == 0 else runner.forward(batch)
        scheduler.postprocess(list(seqs.values()), output)
        times.append(time.perf_counter() - start)
        hidden.append(runner.hidden)
    gc.unfreeze()
    return 1e3 * statistics.median(times[2:]), 1e3 * statistics.median(hidden[2:])


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
    print("\nreplayed on a GPU, temperature 0.6, context 1024: host ms per step, hidden behind the device, left beside it")
    for num_seqs in (64, 128, 256, 512):
        whole, hidden = replayed_milliseconds(num_seqs, 1024, 0.6)
        figures[f"replayed, {num_seqs}"] = [whole, hidden, whole - hidden]
        print(f"{num_seqs:9}  {whole:<15.2f}{hidden:<15.2f}{whole - hidden:<15.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
