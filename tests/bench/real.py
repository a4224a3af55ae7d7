"""Tokens per second on a CPU, atom_mini beside its peers: SmolLM2-135M-Instruct (`make real`), and cpu.py's random Qwen3.

All engines of a model run on the same weights, in turns (A B C A B C ...), greedily and without an end token: 1, 8 and 32
requests, 64 tokens in and 64 out, of English text for SmolLM2. Figures are medians of the rounds, generated tokens per
second of wall time, prefill included.

* transformers' `generate` in float32: the requests as one batch;
* atom_mini in float32: as it is by default, with `packed=True`, and with `compiled=True`; compiled in bfloat16; compiled with
  `quantization="int8"`; and with both, so that embedding, head and cache have 16 bits, too;
* OpenVINO GenAI in float32, with `--openvino PYTHON` (a Python that has openvino-genai and optimum-intel);
* zentorch, AMD's plugin of torch, in float32, with `--zentorch PYTHON` (a Python that has zentorch and transformers), where
  the processor has AVX-512: without, the plugin changes nothing;
* llama.cpp, with `--llama PYTHON` (a Python that has llama-cpp-python, gguf and safetensors): files of F32, BF16, Q8_0 and
  Q4_1, made of the same checkpoint; requests are decoded together, as its server does.

`of bandwidth` is the time that memory alone would take, over the time taken: each step reads all weights, in as many bytes
as the engine has them, and the keys and values so far, at the rate of a sum over 1 GiB that is measured before each
round. At one request memory decides; at 32 arithmetic does, and the share says little. OpenMP's threads wait
as those of `atom-mini` do (docs/machines.md).

With `--loops N` everything runs beside N processes that keep a core busy.

Run: `python tests/bench/real.py [--rounds 3] [--loops N] [--json results.json]`, and the peers as above
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # as `atom-mini` does, before torch reads it

import torch  # noqa: E402
import transformers  # noqa: E402
from cpu import (  # noqa: E402
    OPENVINO,
    AtomMini,
    Generate,
    OpenVino,
    Peer,
    Result,
    Workload,
    agreement,
    make_checkpoint,
    memory_bandwidth,
)
from report import OtherLoad, busy_loops, machine, print_table, write_json  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))
from real_prompts import HANDBOOK, STREETS  # noqa: E402
from real_weights import FOLDER, is_whole  # noqa: E402

INPUT, OUTPUT, BATCHES = 64, 64, [1, 8, 32]
OURS: dict[str, dict[str, Any]] = {
    "atom_mini": {},
    "atom_mini, packed": {"packed": True},
    "atom_mini, compiled": {"compiled": True},
    "atom_mini, compiled, bfloat16": {"compiled": True, "dtype": "bfloat16"},
    "atom_mini, compiled, int8": {"compiled": True, "quantization": "int8"},
    "atom_mini, compiled, int8 and bfloat16": {"compiled": True, "quantization": "int8", "dtype": "bfloat16"},
}
GENERATE, REAL, RANDOM = "transformers generate", "SmolLM2-135M", "random Qwen3, 29 M"


@dataclass(frozen=True)
class Engine:
    """What runs a workload, the bytes of the weights that each step reads, and of a number in the K/V cache."""

    run: Callable[[Workload], Result]
    weights: float
    number: int


def work_name(num: int) -> str:
    return f"{num} request{'s' * (num > 1)}"


def text(num: int, output: int) -> Workload:
    """`num` requests: windows of a text, each a little further on."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer.encode(f"{HANDBOOK} {' '.join(STREETS)}", add_special_tokens=False)
    return Workload(work_name(num), [ids[16 * i : 16 * i + INPUT] for i in range(num)], [output] * num)


def noise(num: int, output: int) -> Workload:
    """`num` requests: random tokens."""
    return Workload.random(work_name(num), num, (INPUT, INPUT), (output, output))


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """The checkpoint of one of the two models."""
    if name == REAL:
        yield FOLDER
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        yield Path(folder)


def ours(folder: Path, options: dict[str, Any]) -> Engine:
    engine = AtomMini(folder, **options)
    runner = engine.llm.engine_core.runner
    return Engine(engine.run, sum(w.nbytes for w in runner.model.parameters()), runner.dtype.itemsize)


@contextmanager
def engines(folder: Path, args: argparse.Namespace, about: dict[str, str]) -> Iterator[dict[str, Engine]]:
    """Every engine that there is, on one checkpoint; the processes of the peers end with the block."""
    generate = Generate(folder)
    full = float(sum(w.nbytes for w in generate.model.parameters()))
    found = {GENERATE: Engine(generate.run, full, 4)}
    found |= {name: ours(folder, options) for name, options in OURS.items()}
    with ExitStack() as stack:
        if args.openvino:
            peer = OpenVino(args.openvino, folder)
            stack.callback(peer.close)
            about[OPENVINO] = peer.about["version"]
            found[OPENVINO] = Engine(peer.run, full, 4)
        if args.zentorch:
            plugin = Peer(args.zentorch, "zentorch_peer.py", folder)
            stack.callback(plugin.close)
            about["zentorch"] = plugin.about["version"]
            found["zentorch"] = Engine(lambda work: plugin.ask(work.prompts, work.outputs), full, 4)
        if args.llama:
            files = Peer(args.llama, "llama_peer.py", folder)
            stack.callback(files.close)
            about["llama.cpp"] = files.about["version"]
            for kind, size in files.about["bytes"].items():
                found[f"llama.cpp, {kind}"] = Engine(lambda work, k=kind: files.ask(k, work.prompts, work.outputs), size, 2)
        yield found


def bytes_read(engine: Engine, work: Workload, config: dict[str, Any]) -> float:
    """What all steps of a workload read at least: the weights each time, and every key and value so far."""
    token = engine.number * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    contexts = sum(len(p) * n + n * (n - 1) // 2 for p, n in zip(work.prompts, work.outputs, strict=True))
    return engine.weights * max(work.outputs) + token * contexts


def measure(found: dict[str, Engine], work: Workload, rounds: int, config: dict[str, Any]) -> dict[str, Any]:
    """Run the engines in turns; print and return the medians, the ratios and the share of the bandwidth."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    tokens, rates = {}, []
    for _ in range(rounds):
        rates.append(memory_bandwidth())
        for name, engine in found.items():
            tokens[name], elapsed = engine.run(work)
            seconds[name].append(elapsed)
    base, total, rate = statistics.median(seconds[GENERATE]), sum(work.outputs), statistics.median(rates)
    results = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        same, _ = agreement(tokens[GENERATE], tokens[name])
        results[name] = {
            "tokens_per_second": total / middle, "ratio_to_generate": base / middle,
            "share_of_bandwidth": bytes_read(found[name], work, config) / rate / middle, "requests_equal": same,
            "seconds": times,
        }  # fmt: skip
    print(f"\n{work.name}, {INPUT} tokens in and {work.outputs[0]} out; {rate / 1e9:.1f} GB/s")
    head = ["", "tokens/s", "x generate", "of bandwidth", f"same tokens, of {len(work.prompts)}"]
    print_table(head, [[name, *[*r.values()][:-1]] for name, r in results.items()])
    sys.stdout.flush()
    return {"gigabytes_per_second": rate / 1e9, "engines": results}


def measure_model(name: str, args: argparse.Namespace, about: dict[str, str]) -> dict[str, Any]:
    """All batches of one model."""
    work = text if name == REAL else noise
    with model_folder(name) as folder, engines(folder, args, about) as found:
        config = json.loads((folder / "config.json").read_text())
        for engine in found.values():  # each compiles or allocates what it needs for one, and for several
            engine.run(work(1, 4))
            engine.run(work(8, 4))
        print(f"\n{name}; megabytes of weights:", ", ".join(f"{n} {e.weights / 1e6:.0f}" for n, e in found.items()))
        with busy_loops(args.loops):
            return {work_name(n): measure(found, work(n, args.output), args.rounds, config) for n in args.batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens that each request generates")
    parser.add_argument("--loops", type=int, default=0, help="processes beside it that want a core all the time")
    parser.add_argument("--model", choices=[REAL, RANDOM], help="one of the two")
    parser.add_argument("--openvino", metavar="PYTHON", help="one that has openvino-genai and optimum-intel: a peer")
    parser.add_argument("--zentorch", metavar="PYTHON", help="one that has zentorch and transformers: a peer")
    parser.add_argument("--llama", metavar="PYTHON", help="one that has llama-cpp-python, gguf and safetensors: a peer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.model != RANDOM and not is_whole():
        raise SystemExit("no real weights in build/smollm2: run make real")
    instructions = torch.backends.cpu.get_cpu_capability()
    if args.zentorch and not instructions.startswith("AVX512"):
        raise SystemExit(f"zentorch changes nothing on {instructions}, it needs AVX512: measure without --zentorch")
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    others, about = OtherLoad(), dict[str, str]()
    results = {name: measure_model(name, args, about) for name in (REAL, RANDOM) if args.model in (None, name)}
    real = results.pop(REAL, {})
    load = others.share()
    print(f"\nother processes used {load:.0%} of the processors" if load is not None else "")
    sizes = {"input": INPUT, "output": args.output, "loops": args.loops, "peers": about}
    write_json(args.json, {"machine": machine(), **real, **results, **sizes, "other_load": load})


if __name__ == "__main__":
    main()
