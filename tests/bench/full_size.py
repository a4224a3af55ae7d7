"""Published sizes on a CPU: load time, memory while loading, and logits against transformers.

Qwen3-0.6B's and Llama-3.2-1B's shapes with random weights, saved in bfloat16 (as their authors do) in shards of 500 MB,
are loaded by atom_mini in float32 in a process of their own. Measured there, from before `LLM(...)` to after it:

* seconds (files in the page cache, as they were just written);
* the peak of anonymous memory, sampled every 5 ms, and the peak resident set, which counts mapped files too, both
  beyond what the process held before, in units of the weights' own bytes (float32). The K/V cache is 16 blocks.

Then the logits of one prompt, in one prefill, beside transformers' in float32: the largest |difference| must be 1e-4 or
less. Run: `python tests/bench/full_size.py [--json results.json]`; it needs 6 GB of disk and 10 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, print_table, write_json
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from checkpoints import LLAMA32_1B, QWEN3_06B, random_model, recorded, reference_logits

from atom_mini import LLM, SamplingParams

SHAPES = {"Qwen3-0.6B": ("qwen3", QWEN3_06B), "Llama-3.2-1B": ("llama", LLAMA32_1B)}
NUM_BLOCKS, PROMPT = 16, 96
MOST = 1e-4


def status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes (0 where there is none): RssAnon, VmRSS, or VmHWM, the peak of VmRSS."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


class AnonymousPeak(threading.Thread):
    """Samples this process's anonymous memory while its block runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.peak = status_bytes("RssAnon")
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, status_bytes("RssAnon"))

    def __enter__(self) -> AnonymousPeak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.join()


def prefill_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: logits of every token of one prompt."""
    with recorded(llm) as recorder:
        llm.generate([token_ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return torch.stack([row for _, row in sorted(recorder.every.items())])


def make_prompt(folder: Path) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(AutoConfig.from_pretrained(folder).vocab_size) for _ in range(PROMPT)]


def load_and_measure(folder: Path) -> None:
    """What the inner process does: load, print the figures as JSON, leave the logits in `folder`."""
    before = status_bytes("VmRSS")
    with AnonymousPeak() as memory:
        start = time.perf_counter()
        llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=1, num_kvcache_blocks=NUM_BLOCKS)
        seconds = time.perf_counter() - start
    figures = {
        "seconds": seconds, "anonymous": memory.peak - memory.first, "resident": status_bytes("VmHWM") - before,
        "kept": status_bytes("RssAnon") - memory.first,
    }  # fmt: skip
    torch.save(prefill_logits(llm, make_prompt(folder)), folder / "logits.pt")
    print(json.dumps(figures))


def run_inner(folder: Path, threads: int) -> dict[str, float]:
    """`load_and_measure` in a process of its own."""
    command = [sys.executable, __file__, "--load", str(folder), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def bench(name: str) -> dict[str, Any]:
    """Make the checkpoint, load it, compare: the figures of one shape."""
    kind, shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = random_model(kind, torch.bfloat16, **shape)
        weights = 4 * sum(p.numel() for p in model.parameters())  # tied ones once
        model.save_pretrained(folder, max_shard_size="500MB")
        del model
        figures = run_inner(folder, torch.get_num_threads())
        start = time.perf_counter()
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        theirs = time.perf_counter() - start
        difference = (reference_logits(reference, make_prompt(folder)) - torch.load(folder / "logits.pt")).abs().max()
    shares = {f"{part}_share": figures[part] / weights for part in ("anonymous", "kept", "resident")}
    error = {"largest_logit_difference": difference.item(), "equal": bool(difference <= MOST)}
    return {"weights_bytes": weights, "transformers_seconds": theirs, **figures, **shares, **error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.load:
        return load_and_measure(args.load)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    results = {name: bench(name) for name in SHAPES if args.only in (None, name)}
    columns = {
        "weights, GB": lambda r: r["weights_bytes"] / 1e9, "load, s": lambda r: r["seconds"],
        "transformers, s": lambda r: r["transformers_seconds"], "peak / weights": lambda r: r["anonymous_share"],
        "kept / weights": lambda r: r["kept_share"], "with files": lambda r: r["resident_share"],
        "logits differ by": lambda r: r["largest_logit_difference"],
    }  # fmt: skip
    print_table(["", *columns], [[name, *(get(r) for get in columns.values())] for name, r in results.items()])
    write_json(args.json, results)
    if not all(r["equal"] for r in results.values()):
        sys.exit(f"logits differ from transformers by more than {MOST}")


if __name__ == "__main__":
    main()
