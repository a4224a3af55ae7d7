"""Tokens per second on a CPU: atom_mini beside transformers' `generate` and its continuous batching.

All three run in one process, in turns (A B C A B C ...), on one random Qwen3 of 29 M parameters in float32, greedily,
without an end token; figures are medians of the rounds, generated tokens per second of wall time. Two workloads:

* 32 requests, prompts of 32 to 256 tokens and outputs of 32 to 256 (uniform, seeded), all there at the start;
* one request, 128 tokens in and 128 out.

`generate` gets all requests as one batch, left-padded, and runs to the longest output; only the tokens asked for count.
That is what a static batch costs. Continuous batching is timed from the first request added to the last one finished,
its cache and thread made before. No engine may keep anything of a round for the next: prefix caches are off.

The limit is what this machine could do at best: a schedule with no waiting, where a step takes the larger of (weights +
K/V read) / memory bandwidth and (flops of the matrices) / their rate at that many rows. Both rates are measured here,
before each round, medians again: a sum over 1 GiB; the matrices of one layer, again and again, through the faster of
`F.linear` and oneDNN with packed weights. Attention's own arithmetic, norms, sampling and Python count as free.

Run: `python tests/bench/cpu.py [--plain] [--openvino PYTHON] [--loops 0 2] [--json results.json]`. With `--loops` all of it
is done beside so many processes that want a core all the time.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from report import OtherLoad, busy_loops, machine, print_table, write_json
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config

import atom_mini
from atom_mini import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "initializer_range": 2 / 512**0.5,  # logits spread as widely as a trained model's
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Requests: prompts, and how many tokens each wants."""

    name: str
    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def random(cls, name: str, num: int, prompt: tuple[int, int], output: tuple[int, int], seed: int = 0) -> Workload:
        rng = random.Random(seed)
        prompts = [[rng.randrange(SHAPE["vocab_size"]) for _ in range(rng.randint(*prompt))] for _ in range(num)]
        return cls(name, prompts, [rng.randint(*output) for _ in range(num)])


Result = tuple[list[list[int]], float]  # token ids per request, seconds


class Generate:
    """transformers' `generate`: one static batch, left-padded."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def run(self, work: Workload) -> Result:
        start = time.perf_counter()
        longest = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in work.prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts])
        options = {"do_sample": False, "max_new_tokens": max(work.outputs), "eos_token_id": None, "pad_token_id": 0}
        out = self.model.generate(ids, attention_mask=mask, **options)
        tokens = [row[longest : longest + n].tolist() for row, n in zip(out, work.outputs, strict=True)]
        return tokens, time.perf_counter() - start


class ContinuousBatching:
    """transformers' continuous batching: a thread that schedules, a paged cache, scaled dot product attention."""

    # as many blocks of 256 as 32 requests of 512 tokens can use
    CONFIG: ClassVar[dict[str, Any]] = {"num_blocks": 64, "max_batch_tokens": 2048, "allow_block_sharing": False}

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(self, work: Workload) -> Result:
        options = {"continuous_batching_config": ContinuousBatchingConfig(**self.CONFIG)}
        with self.model.continuous_batching_context_manager(self.generation, **options) as manager:
            start, finished = time.perf_counter(), dict[str | None, list[int]]()
            ids = [manager.add_request(p, max_new_tokens=n) for p, n in zip(work.prompts, work.outputs, strict=True)]
            while len(finished) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    finished[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching stopped before all requests were finished")
            seconds = time.perf_counter() - start
        return [finished[i] for i in ids], seconds


class AtomMini:
    """This project."""

    def __init__(self, folder: Path, **options: Any) -> None:
        room = {"dtype": "float32", "max_num_seqs": 32, "num_kvcache_blocks": 1024, "enable_prefix_caching": False}
        self.llm = LLM(str(folder), device="cpu", **room | options)

    def run(self, work: Workload) -> Result:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.outputs]
        start = time.perf_counter()
        outs = self.llm.generate(work.prompts, params, use_tqdm=False)
        return [list(out.token_ids) for out in outs], time.perf_counter() - start


class Peer:
    """An engine in a process of the Python that has it: a script that prints a line about itself, then answers lines."""

    def __init__(self, python: str, script: str, folder: Path) -> None:
        command = [python, str(Path(__file__).with_name(script)), str(folder), str(torch.get_num_threads())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stdin, self.answer = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self.about = self.read()

    def read(self) -> Any:
        """The next line. RuntimeError if the process has ended."""
        if not (line := self.answer.readline()):
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} has ended: see above what it lacks")
        return json.loads(line)

    def ask(self, *question: Any) -> Result:
        """Token ids and seconds."""
        print(json.dumps(question), file=self.stdin, flush=True)
        tokens, seconds = self.read()
        return tokens, seconds

    def close(self) -> None:
        """End the process."""
        self.stdin.close()
        self.process.wait()


class OpenVino(Peer):
    """OpenVINO GenAI's continuous batching, in a process of the Python that has it."""

    def __init__(self, python: str, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):  # it wants one
            if not (folder / name).exists():
                shutil.copy(Path(atom_mini.__file__).parent / "tiny" / name, folder)
        super().__init__(python, "openvino_peer.py", folder)

    def run(self, work: Workload) -> Result:
        return self.ask(work.prompts, work.outputs)


OPENVINO = "OpenVINO GenAI"
ENGINES: dict[str, Callable[[Path], Any]] = {
    "transformers generate": Generate,
    "transformers continuous batching": ContinuousBatching,
    "atom_mini, compiled": partial(AtomMini, compiled=True),
}


def least_seconds(call: Callable[[], Any], together: float = 0.1) -> float:
    """Seconds of the fastest call, of at least 5 calls and `together` seconds."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < together:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def memory_bandwidth() -> float:
    """Bytes per second of a sum over 1 GiB."""
    data = torch.ones(2**28)
    return data.nbytes / least_seconds(data.sum)


class Limit:
    """The least time this machine needs for a workload, from its measured rates."""

    ROWS = (1, 2, 4, 8, 16, 24, 32, 512, 2048)

    def __init__(self) -> None:
        hidden, wide, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
        heads, kv = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
        self.layer = [((heads + 2 * kv) * dim, hidden), (hidden, heads * dim), (2 * wide, hidden), (hidden, wide)]
        self.layers, self.head = SHAPE["num_hidden_layers"], SHAPE["vocab_size"] * hidden
        self.weights = self.layers * sum(o * i for o, i in self.layer)  # without the head
        self.token_bytes = 4 * 2 * self.layers * kv * dim
        self.bandwidths: list[float] = []
        self.samples: list[list[float]] = []

    def measure(self) -> None:
        """Measure the rates once more: the machine is not the same all the time."""
        self.bandwidths.append(memory_bandwidth())
        self.samples.append([self.matrix_rate(rows) for rows in self.ROWS])

    @property
    def bandwidth(self) -> float:
        """Bytes per second, the median of the measurements."""
        return statistics.median(self.bandwidths)

    @property
    def rates(self) -> list[float]:
        """Flops per second by `ROWS`, the medians."""
        return [statistics.median(column) for column in zip(*self.samples, strict=True)]

    @torch.inference_mode()
    def matrix_rate(self, rows: int) -> float:
        """Flops per second of one layer's matrices at so many rows, the faster of two ways."""
        weights = [torch.randn(shape) for shape in self.layer]
        inputs = [torch.randn(rows, w.shape[1]) for w in weights]
        times = [least_seconds(lambda: [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)])]
        if torch.backends.mkldnn.is_available():
            ops = torch.ops.mkldnn
            packed = [ops._reorder_linear_weight(w, 32) for w in weights]
            pairs = list(zip(inputs, packed, strict=True))
            times.append(least_seconds(lambda: [ops._linear_pointwise(x, w, None, "none", [], "") for x, w in pairs]))
        return 2 * rows * sum(w.numel() for w in weights) / min(times)

    def step(self, rows: int, sampled: int, context: int) -> float:
        """Seconds of a step with so many new tokens, sampled ones, and tokens of K/V to read."""
        rate = float(np.interp(rows, self.ROWS, self.rates))
        reading = 4 * (self.weights + self.head) + self.token_bytes * context
        return max(reading / self.bandwidth, 2 * (rows * self.weights + sampled * self.head) / rate)

    def seconds(self, work: Workload) -> float:
        """All prompts in the first step, then a step per token for those that still want one."""
        lens = list(map(len, work.prompts))
        total = self.step(sum(lens), len(lens), 0)
        for i in range(1, max(work.outputs)):
            running = [n for n, output in zip(lens, work.outputs, strict=True) if output > i]
            total += self.step(len(running), len(running), sum(running) + i * len(running))
        return total


def make_checkpoint(folder: Path) -> None:
    """A random Qwen3 of `SHAPE`, saved by transformers."""
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)


def make_engines(folder: Path, more: dict[str, Callable[[Path], Any]]) -> dict[str, Any]:
    """All engines on one checkpoint, each warmed up."""
    make_checkpoint(folder)
    engines = {name: make(folder) for name, make in (ENGINES | more).items()}
    for engine in engines.values():
        engine.run(Workload.random("warm-up", 4, (16, 32), (4, 8), seed=1))
    return engines


def agreement(wanted: list[list[int]], got: list[list[int]]) -> tuple[int, str]:
    """(requests with the same tokens, where the first other one leaves)."""
    different = [i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b]
    if not different:
        return len(wanted), ""
    i = different[0]
    pairs = enumerate(zip(wanted[i], got[i], strict=False))
    place = next((k for k, (a, b) in pairs if a != b), min(len(wanted[i]), len(got[i])))
    return len(wanted) - len(different), f"request {i} differs from token {place} on"


def measure(engines: dict[str, Any], work: Workload, rounds: int, limit: Limit) -> dict[str, Any]:
    """Run the engines in turns; print and return the medians, the ratios, the agreement, the share of the limit."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(rounds):
        limit.measure()
        for name, engine in engines.items():
            tokens[name], elapsed = engine.run(work)
            seconds[name].append(elapsed)
    total, least = sum(work.outputs), limit.seconds(work)
    reference = next(iter(engines))
    rates = {name: total / statistics.median(times) for name, times in seconds.items()}
    peers = [name for name in (OPENVINO,) if name in engines]
    results, notes = {}, []
    for name, rate in rates.items():
        same, where = agreement(tokens[reference], tokens[name])
        notes += [f"{name}: {where}"] if where else []
        results[name] = {
            "tokens_per_second": rate, "ratio_to_generate": rate / rates[reference],
            "share_of_limit": rate * least / total, "requests_equal": same,
            **{f"ratio_to_{peer}": rate / rates[peer] for peer in peers}, "seconds": seconds[name],
        }  # fmt: skip
    print(f"\n{work.name}: {sum(map(len, work.prompts))} tokens in, {total} out; limit {total / least:.0f} tokens/s")
    rows = [[name, *list(r.values())[:-1]] for name, r in results.items()]
    head = ["", "tokens/s", "x generate", "of the limit", f"same tokens, of {len(work.prompts)}"]
    print_table([*head, *(f"x {peer}" for peer in peers)], rows)
    print(*notes, sep="\n", end="\n" if notes else "")
    return {"limit_tokens_per_second": total / least, "engines": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["many", "one"], help="one of the two workloads")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plain", action="store_true", help="atom_mini as it is by default, too")
    parser.add_argument("--loops", type=int, nargs="+", default=[0], help="busy processes beside it; default: 0")
    parser.add_argument("--openvino", metavar="PYTHON", help="one that has openvino-genai and optimum-intel: a peer")
    args = parser.parse_args()
    more: dict[str, Callable[[Path], Any]] = {}
    if args.plain:
        more["atom_mini"] = AtomMini
    if args.openvino:
        more[OPENVINO] = partial(OpenVino, args.openvino)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    many = Workload.random("32 requests", 32, (32, 256), (32, 256))
    one = Workload.random("one request", 1, (128, 128), (128, 128))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    others, results = OtherLoad(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        engines = make_engines(Path(folder), more)
        chosen = {"many": (many, args.rounds), "one": (one, 2 * args.rounds + 1)}
        for loops in args.loops:
            beside, limit = f" beside {loops} busy loops" * (loops > 0), Limit()
            with busy_loops(loops):
                for key, (work, rounds) in chosen.items():
                    if args.only in (None, key):
                        results[key + beside] = measure(engines, replace(work, name=work.name + beside), rounds, limit)
            rates = dict(zip(limit.ROWS, limit.rates, strict=True))
            print(f"\nmemory {limit.bandwidth / 1e9:.1f} GB/s; matrices, GFLOP/s by rows:", end=" ")
            print(", ".join(f"{rows}: {rate / 1e9:.0f}" for rows, rate in rates.items()))
    if (share := others.share()) is not None:
        print(f"\nother processes used {share:.0%} of the processors meanwhile" + " (too much)" * (share > 0.05))
    figures = {"shape": SHAPE, "other_load": share, "bandwidth": limit.bandwidth, "matrix_rates": rates}
    write_json(args.json, figures | results)


if __name__ == "__main__":
    main()
