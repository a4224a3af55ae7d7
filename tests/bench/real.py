"""Tokens per second of a real model on a CPU: SmolLM2-135M-Instruct (`make real`), atom_mini beside its peers.

All engines run on the same weights, in turns, greedily and without an end token: 1, 8 and 32 requests of English text, 64
tokens in and 64 out. Figures are medians of the rounds, generated tokens per second of wall time, prefill included.

* transformers' `generate` in float32: the requests as one batch;
* atom_mini in float32 and bfloat16;
* OpenVINO GenAI in float32, with `--openvino PYTHON` (a Python that has openvino-genai and optimum-intel);
* llama.cpp with `--llama PYTHON` (a Python that has llama-cpp-python): the 4-bit file itself, so a fifth of the bytes, and
  one request only, since that binding has no batches.

`of bandwidth` is the time that memory alone would take, over the time taken: each step reads all weights and the keys and
values so far, at the rate of a sum over 1 GiB that is measured before each round. At one request memory decides; at 32
arithmetic does, and the share says little.

Run: `python tests/bench/real.py [--rounds 3] [--openvino PYTHON] [--llama PYTHON] [--json results.json]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
import transformers
from cpu import OPENVINO, AtomMini, Generate, OpenVino, Workload, agreement, memory_bandwidth
from report import OtherLoad, machine, print_table, write_json

sys.path.append(str(Path(__file__).resolve().parents[1]))
from real_prompts import HANDBOOK, STREETS
from real_weights import FOLDER, download, is_whole, unpack

INPUT, OUTPUT, BATCHES = 64, 64, (1, 8, 32)
LLAMA = "llama.cpp, 4 bits"
Engine = Any


def workload(num: int) -> Workload:
    """`num` requests: windows of a text, each a little further on."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer.encode(f"{HANDBOOK} {' '.join(STREETS)}", add_special_tokens=False)
    prompts = [ids[16 * i : 16 * i + INPUT] for i in range(num)]
    return Workload(f"{num} request{'s' * (num > 1)}", prompts, [OUTPUT] * num)


class Llama:
    """llama.cpp on the GGUF file, in a process of the Python that has its binding."""

    def __init__(self, python: str, folder: Path) -> None:
        self.home = tempfile.TemporaryDirectory()
        gguf = unpack(download(Path(self.home.name)), Path(self.home.name))
        command = [python, str(Path(__file__).with_name("llama_peer.py")), str(gguf), str(torch.get_num_threads())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask, self.answer = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        if self.answer.readline() != "ready\n":
            raise RuntimeError(f"{python} has no llama-cpp-python")

    def run(self, work: Workload) -> tuple[list[list[int]], float]:
        print(json.dumps([work.prompts, work.outputs]), file=self.ask, flush=True)
        tokens, seconds = json.loads(self.answer.readline())
        return tokens, seconds


def engines(openvino: str | None, llama: str | None) -> dict[str, Engine]:
    """Every engine that there is, on the real weights."""
    makers: dict[str, Callable[[Path], Engine]] = {
        "transformers generate": Generate,
        "atom_mini": AtomMini,
        "atom_mini, bfloat16": partial(AtomMini, dtype="bfloat16"),
    }
    if openvino:
        makers[OPENVINO] = partial(OpenVino, openvino)
    if llama:
        makers[LLAMA] = partial(Llama, llama)
    found = {name: make(FOLDER) for name, make in makers.items()}
    for engine in found.values():
        engine.run(workload(1))
    return found


def bytes_read(work: Workload, name: str) -> float:
    """What all steps of a workload read at least: the weights each time, and every key and value so far."""
    config = json.loads((FOLDER / "config.json").read_text())
    wide = 2 if "bfloat16" in name else 4
    weights = (FOLDER / "model.safetensors").stat().st_size * wide / 4
    token = wide * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    contexts = sum(INPUT * OUTPUT + OUTPUT * (OUTPUT - 1) // 2 for _ in work.prompts)
    return weights * OUTPUT + token * contexts


def measure(found: dict[str, Engine], work: Workload, rounds: int) -> dict[str, Any]:
    """Run the engines in turns; print and return the medians, the ratios and the share of the bandwidth."""
    one = len(work.prompts) == 1
    seconds: dict[str, list[float]] = {name: [] for name in found if one or name != LLAMA}
    tokens, rates = {}, []
    for _ in range(rounds):
        rates.append(memory_bandwidth())
        for name in seconds:
            tokens[name], elapsed = found[name].run(work)
            seconds[name].append(elapsed)
    base, total = statistics.median(seconds["transformers generate"]), sum(work.outputs)
    results = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        share = bytes_read(work, name) / statistics.median(rates) / middle if name != LLAMA else None
        same, _ = agreement(tokens["transformers generate"], tokens[name])
        results[name] = {
            "tokens_per_second": total / middle, "ratio_to_generate": base / middle, "share_of_bandwidth": share,
            "requests_equal": same, "seconds": times,
        }  # fmt: skip
    print(f"\n{work.name}, {INPUT} tokens in and {OUTPUT} out; {statistics.median(rates) / 1e9:.1f} GB/s")
    head = ["", "tokens/s", "x generate", "of bandwidth", f"same tokens, of {len(work.prompts)}"]
    print_table(head, [[name, *("" if v is None else v for v in [*r.values()][:-1])] for name, r in results.items()])
    return {"gigabytes_per_second": statistics.median(rates) / 1e9, "engines": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--openvino", metavar="PYTHON", help="one that has openvino-genai and optimum-intel: a peer")
    parser.add_argument("--llama", metavar="PYTHON", help="one that has llama-cpp-python: a peer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if not is_whole():
        raise SystemExit("no real weights in build/smollm2: run make real")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    others, found = OtherLoad(), engines(args.openvino, args.llama)
    results = {work.name: measure(found, work, args.rounds) for work in map(workload, BATCHES)}
    load = others.share()
    print(f"\nother processes used {load:.0%} of the processors" if load is not None else "")
    write_json(args.json, {"machine": machine(), **results, "other_load": load})


if __name__ == "__main__":
    main()
