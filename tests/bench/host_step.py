"""What the host costs per decode step of `LLM.generate`: no model and no sampler, all the rest.

That is what passes from one call of the runner to the next: locks, the loop of `generate`, the transaction, schedule,
prepare, pack the sampling, look at the results. Each figure is the median of the steps of one run, in milliseconds.
Aims: 0.5 ms at 256 sequences, 1.0 ms at 512, linear in the sequences, flat in their length. On a GPU decodes are
replayed (chapter 12a): the last table is about them. Run: `python tests/bench/host_step.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing is launched; without it the kernels refuse a CPU

import torch
from report import write_json

from atom_mini import LLM, EngineArgs
from atom_mini.config import SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.gpu.graphs import GraphRunner
from atom_mini.model_runner import ModelRunner
from atom_mini.options.build import choose_ops, make_runner
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.sequence import SequenceType
from atom_mini.uploads import InputBuffer

AIMS = {256: 0.5, 512: 1.0}


class Noting:
    """`runner`, and when it was called for a decode. The prefill is not run: all get token 7."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.called: list[float] = []

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        if batch.type is SequenceType.PREFILL:
            return ScheduledBatchOutput(dict.fromkeys(batch.req_ids, (7,)))
        self.called.append(time.perf_counter())
        return self.runner.forward(batch)


class HollowModel:
    """`runner` without its model: inputs are prepared, and tokens taken from the same logits each time."""

    def __init__(self, runner: ModelRunner, num_seqs: int) -> None:
        self.runner, self.logits = runner, torch.rand(num_seqs, 64)

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.runner.prepare_model(batch)
        return self.runner.pack_output(batch, self.logits, self.runner.sample(batch, self.logits).tolist())


def generate_milliseconds(llm: LLM, runner: Any, num_seqs: int, length: int, params: SamplingParams) -> list[float]:
    """The decode steps of `llm.generate` with another runner: `num_seqs` prompts of `length` tokens."""
    blocks, noting = num_seqs * (length // 16 + 8), Noting(runner)
    config = EngineArgs(num_kvcache_blocks=blocks, max_num_seqs=num_seqs, max_num_batched_tokens=2**24)
    llm.engine_core = EngineCore(config, noting)
    gc.collect()
    gc.freeze()
    llm.generate([[i % 900] * length for i in range(num_seqs)], params, use_tqdm=False)
    gc.unfreeze()
    return [1e3 * (end - start) for start, end in pairwise(noting.called)]


def host_milliseconds(llm: LLM, runner: ModelRunner, num_seqs: int, length: int, params: SamplingParams) -> float:
    """Median decode step of `num_seqs` sequences of `length` tokens, without the forward pass."""
    hollow = HollowModel(runner, num_seqs)
    return statistics.median(generate_milliseconds(llm, hollow, num_seqs, length, params))


class HollowGraph:
    """A recording of nothing: what a replay costs the host but for the call of the driver."""

    def __init__(self, size: int) -> None:
        self.outputs = torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64)

    def replay(self) -> None:
        pass


class HollowRunner(GraphRunner):
    """A `GraphRunner` on a CPU without kernels: inputs and outputs are real, the device's work is left out."""

    def _capture(self, sizes: list[int]) -> list[int]:
        ops: Any = self.ops
        plan = ops.largest_decode_plan(sizes[-1], 8192, self.config.kv_cache_block_size)
        self.static = InputBuffer(self.device, 44 * sizes[-1] + plan.data.nbytes + 112, grows=False)
        self._make_logits(sizes[-1])
        self.graphs = {n: HollowGraph(n) for n in sizes}
        return []


def replayed_milliseconds(llm: LLM, num_seqs: int, length: int, params: SamplingParams) -> float:
    """Median of what a replayed step costs the host."""
    config = EngineArgs("tiny", device="cpu", attention="triton", num_kvcache_blocks=num_seqs, max_num_seqs=num_seqs)
    runner = HollowRunner(config, *choose_ops(config))
    return statistics.median(generate_milliseconds(llm, runner, num_seqs, length, params)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    llm = LLM("tiny", device="cpu", num_kvcache_blocks=1)  # for its `generate`
    runner = make_runner(EngineArgs("tiny", device="cpu", num_kvcache_blocks=1))
    runner.sampler = lambda logits, meta: logits.argmax(-1)  # type: ignore[assignment]  # the device's work, not the host's
    kinds = {"greedy": SamplingParams(temperature=0, max_tokens=42, ignore_eos=True),
             "temperature 0.6, top-p 0.9": SamplingParams(temperature=0.6, top_p=0.9, top_k=0, min_p=0.0, seed=1,
                                                          repetition_penalty=1.0, max_tokens=42, ignore_eos=True)}
    figures = {}
    for kind, params in kinds.items():
        print(f"\nhost ms per decode step, {kind}\nsequences  " + "".join(f"context {n:<7}" for n in (128, 1024, 4096)))
        for num_seqs in (64, 128, 256, 512):
            row = [host_milliseconds(llm, runner, num_seqs, length, params) for length in (128, 1024, 4096)]
            figures[f"{kind}, {num_seqs}"] = row
            aim = f"aim {AIMS[num_seqs]}" if num_seqs in AIMS else ""
            print(f"{num_seqs:9}  " + "".join(f"{ms:<15.2f}" for ms in row) + aim)
    print("\nreplayed on a GPU, temperature 0.6, context 1024: host ms per step")
    replayed = SamplingParams(temperature=0.6, seed=1, max_tokens=42, ignore_eos=True)
    for num_seqs in (64, 128, 256, 512):
        figures[f"replayed, {num_seqs}"] = [replayed_milliseconds(llm, num_seqs, 1024, replayed)]
        print(f"{num_seqs:9}  {figures[f'replayed, {num_seqs}'][0]:.2f}")
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
