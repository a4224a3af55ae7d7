"""The scorecard: one load, run on every rung from a loop around a model to this engine behind its server.

64 requests come at random times (Poisson, the same for all), prompts of 24 to 96 random tokens of which half share their
first 48, outputs of 12 to 36, greedy, without an end token, in float32: to a random Qwen3 of 29 M parameters, 120 a second,
and to the built-in model, 480 a second. Every rung serves them as they come. *small* is the engine of the first evening;
each rung below it adds one thing. The loop computes everything again for each
token, so it gets the first requests only. The padded batch takes who waits, up to 16, as `generate` does. A request meets
the objective if its first token comes within a time, and the others at a pace on average: 1 s and 100 ms, a fifth of both
for the built-in model. Bytes are the weights once a step and the keys and values of those who got a token. The server is
asked over HTTP, by a client in a process of its own.

Rungs that need a GPU are in the file, empty, on a machine without one.

Run: `python tests/bench/score.py [--rounds 1]`. It writes results/score_MACHINE.json; scorecard.py makes README's
table and figure of it, and the lines in the chapters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # as the command does, before torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from cpu import make_checkpoint, memory_bandwidth  # noqa: E402
from figures import stamp  # noqa: E402
from over_http import Times, ask, serving  # noqa: E402
from report import OtherLoad, machine  # noqa: E402
from scorecard import RUNGS, file_for, write_pages  # noqa: E402
from tokenizers import Tokenizer, decoders  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from atom_mini import LLM, EngineArgs, SamplingParams, small  # noqa: E402

LOOPED = 3  # requests that the loop gets
RATES = 120.0, 480.0  # requests a second, for the two models: more than two cores can serve
POOL = 4096  # tokens of K/V, on every rung of ours


class Model(NamedTuple):
    """A checkpoint, how many requests come in a second, and the objective, in seconds."""

    folder: str
    rate: float
    ttft: float
    tpot: float
    vocab: int
    weights: int  # bytes that a step reads
    token: int  # bytes of K/V

    @classmethod
    def read(cls, folder: str, rate: float, ttft: float, tpot: float) -> Model:
        """With the sizes that its config says, in float32."""
        shape = json.loads((Path(folder) / "config.json").read_text())
        vocab, wide, layers = (shape[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers"))
        query, kv = (shape["head_dim"] * shape[f"num_{name}_heads"] for name in ("attention", "key_value"))
        layer = 2 * query * wide + 2 * kv * wide + 3 * wide * shape["intermediate_size"]
        return cls(folder, rate, ttft, tpot, vocab, 4 * (vocab * wide + layers * layer), 4 * 2 * layers * kv)


class Request(NamedTuple):
    """Who comes when, and wants how much."""

    arrival: float
    prompt: list[int]
    output: int


def make_load(about: Model, count: int = 64) -> list[Request]:
    """The load, the same each time."""
    rng, now, found = random.Random(0), 0.0, []
    shared = [rng.randrange(about.vocab) for _ in range(48)]
    for i in range(count):
        own = [rng.randrange(about.vocab) for _ in range(rng.randint(24, 48))]
        found.append(Request(now, (shared if i % 2 else []) + own, rng.randint(12, 36)))
        now += rng.expovariate(about.rate)
    return found


def write_words(folder: str, vocab: int) -> None:
    """A tokenizer of words w0, w1 ... for a random model: a server sends text."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def wait(until: float, start: float) -> None:
    time.sleep(max(0.0, until - (time.perf_counter() - start)))


@torch.inference_mode()
def loop(model: Any, load: list[Request]) -> Times:
    """One request at a time, all of it computed again for each token."""
    times, start = [], time.perf_counter()
    for request in load:
        wait(request.arrival, start)
        ids, came = list(request.prompt), []
        for _ in range(request.output):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            came.append(time.perf_counter() - start)
        times.append(came)
    return times


def padded(model: Any, load: list[Request], most: int = 16) -> Times:
    """Who waits, in one rectangle, until the longest is done."""
    times, start, left = list[list[float]](), time.perf_counter(), list(load)
    while left:
        wait(left[0].arrival, start)
        now = time.perf_counter() - start
        group = [r for r in left[:most] if r.arrival <= now] or left[:1]
        left = left[len(group) :]
        width, came = max(len(r.prompt) for r in group), list[float]()
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in group])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in group])

        def note(ids: torch.Tensor, *_: Any, came: list[float] = came, rows: int = len(group), **__: Any) -> torch.Tensor:
            came.append(time.perf_counter() - start)
            return torch.zeros(rows, dtype=torch.bool)

        options = {"max_new_tokens": max(r.output for r in group), "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, do_sample=False, stopping_criteria=[note], **options)
        times += [came[: r.output] for r in group]
    return times


def serve(llm: LLM, load: list[Request]) -> Times:
    """This engine, whatever it is made of."""
    times: Times = [[] for _ in load]
    number: dict[int, int] = {}
    start, unfinished, coming = time.perf_counter(), 0, list(enumerate(load))
    while coming or unfinished:
        while coming and coming[0][1].arrival <= time.perf_counter() - start:
            i, request = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=request.output, ignore_eos=True)
            number[llm.add_request(request.prompt, params)] = i
            unfinished += 1
        if not unfinished:
            wait(coming[0][1].arrival, start)
        elif step := llm.step():
            now = time.perf_counter() - start
            for id, new in step.output.token_ids.items():
                times[number[id]] += [now] * len(new)
            unfinished -= len(step.finished)
    return times


def serve_small(llm: small.LLM, load: list[Request]) -> Times:
    """The small engine of the first evening."""
    times: Times = [[] for _ in load]
    seqs: list[small.Sequence] = []
    start = time.perf_counter()
    while len(seqs) < len(load) or not all(seq.finish_reason for seq in seqs):
        while len(seqs) < len(load) and load[len(seqs)].arrival <= time.perf_counter() - start:
            request = load[len(seqs)]
            params = small.SamplingParams(temperature=0, max_tokens=request.output, ignore_eos=True)
            seqs += llm.add_requests(request.prompt, params)
        if not llm.step():
            wait(load[len(seqs)].arrival, start)
        now = time.perf_counter() - start
        for came, seq in zip(times, seqs, strict=False):
            came += [now] * (len(seq) - seq.num_prompt_tokens - len(came))
    return times


def over_http(port: int, load: list[Request], model: str) -> Times:
    """The server. An event may bring several tokens: those that the count lacks came with the last one."""
    params = {"model": model, "temperature": 0, "ignore_eos": True}
    asked = [(r.arrival, params | {"prompt": r.prompt, "max_tokens": r.output}) for r in load]
    came, _ = ask(port, asked)
    return [[*times, *[times[-1]] * (r.output - len(times))] for times, r in zip(came, load, strict=True)]


def options_of(rung: str) -> dict[str, Any]:
    """What each of our rungs sets: one thing more than the rung before, unless the two exclude each other."""
    pool = {"device": "cpu", "dtype": "float32", "max_num_seqs": 32, "max_model_len": 256}
    pieces = pool | {"kv_cache_block_size": 256, "num_kvcache_blocks": POOL // 256}
    blocks = pool | {"kv_cache_block_size": 16, "num_kvcache_blocks": POOL // 16}
    chunks = blocks | {"max_num_batched_tokens": 128, "interleave_decode": True}
    guesses = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    compiled = chunks | {"compiled": True}
    return {
        "continuous": pieces | {"enable_prefix_caching": False},
        "paged": blocks | {"enable_prefix_caching": False},
        "prefix cache": blocks,
        "chunked": chunks,
        "compiled": compiled,
        "overlapped": compiled | {"overlap": True},
        "drafted": compiled | guesses,
        "own process": compiled | {"engine_process": True},
        "server": compiled | {"engine_process": True},
        "ranks": chunks | {"tensor_parallel_size": 2},
    }[rung]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bytes_read(about: Model, load: list[Request], times: Times, is_cached: bool) -> int:
    """Weights once for each moment at which tokens came, and the K/V of those who got one."""
    reads: dict[float, set[tuple[int, int]]] = {}
    for i, came in enumerate(times):
        for n, at in enumerate(came):
            reads.setdefault(at, set()).add((i, len(load[i].prompt) + n))
    kept = (sum(dict(sorted(who)).values()) for who in reads.values())  # the last of several tokens of a step
    return len(reads) * about.weights + (about.token * sum(kept) if is_cached else 0)


def figures(about: Model, load: list[Request], times: Times, bandwidth: float, is_cached: bool = True) -> dict[str, Any]:
    """What the scorecard says of a run; no share where `bandwidth` is 0, as a client does not see whose step it was."""
    load = load[: len(times)]
    assert [len(came) for came in times] == [r.output for r in load], "a request has not got what it asked for"
    end, tokens = max(came[-1] for came in times), sum(map(len, times))
    first = [came[0] - r.arrival for r, came in zip(load, times, strict=True)]
    gaps = [b - a for came in times for a, b in pairwise(came)]
    means = [(came[-1] - came[0]) / (len(came) - 1) for came in times]
    met = sum(a <= about.ttft and b <= about.tpot for a, b in zip(first, means, strict=True))
    read = bytes_read(about, load, times, is_cached)
    return {
        "tokens per second": tokens / end, "TTFT p50": percentile(first, 0.5), "TTFT p99": percentile(first, 0.99),
        "ITL p50": percentile(gaps, 0.5), "ITL p99": percentile(gaps, 0.99), "goodput": met / end,
        "share of bandwidth": read / end / bandwidth if bandwidth else None,
    }  # fmt: skip


def warm(load: list[Request]) -> list[Request]:
    """Some requests before the clock runs, none of which leaves a prefix that helps."""
    return [r._replace(arrival=0.0, prompt=r.prompt[::-1]) for r in load[:4]]


def runs(about: Model, load: list[Request]) -> Iterator[tuple[str, Callable[[], Times]]]:
    """Each rung that this machine can run, as something to call; made one after the other, warmed up."""
    folder = about.folder
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loop(model, load[:1])
    yield "naive loop", lambda: loop(model, load[:LOOPED])
    padded(model, load[:2])
    yield "padded batch", lambda: padded(model, load)
    little = small.LLM(folder, num_kvcache_blocks=POOL // 16, max_num_seqs=32)
    serve_small(little, warm(load))
    yield "small", lambda: serve_small(little, load)
    for rung in [rung for rung, needs in RUNGS.items() if needs == "" and rung not in ("small", "server")]:
        with LLM(folder, **options_of(rung)) as llm:
            serve(llm, warm(load))
            yield rung, lambda llm=llm: serve(llm, load)
    with serving(folder, options_of("server") | {"served_model_name": "it"}) as (_, port):
        over_http(port, warm(load), "it")
        yield "server", lambda: over_http(port, load, "it")


def measure(about: Model, rounds: int, bandwidth: float) -> dict[str, Any]:
    """The medians of some rounds, by rung; the loop is run once."""
    load = make_load(about)
    found: dict[str, Any] = dict.fromkeys(RUNGS)
    for rung, run in runs(about, load):
        is_loop = rung == "naive loop"
        seen = 0.0 if rung == "server" else bandwidth
        each = [figures(about, load, run(), seen, not is_loop) for _ in range(1 if is_loop else rounds)]
        found[rung] = {name: value and statistics.median(run[name] for run in each) for name, value in each[0].items()}
        print(f"{rung:14}", *(f"{name} {value or 0:.3g}" for name, value in found[rung].items()), sep="  ", flush=True)
    return {"rungs": found, "objective": {"TTFT": about.ttft, "TPOT": about.tpot}, "rate": about.rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where, others, bandwidth = machine(), OtherLoad(), memory_bandwidth()
    result: dict[str, Any] = stamp(where) | {"versions": where, "looped": LOOPED, "bandwidth": bandwidth}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        random_one = Model.read(folder, RATES[0], 1.0, 0.1)
        write_words(folder, random_one.vocab)
        result |= measure(random_one, args.rounds, bandwidth)
    tiny = Model.read(str(EngineArgs("tiny").folder), RATES[1], 0.2, 0.02)
    result |= {"built-in": measure(tiny, args.rounds, bandwidth), "other_load": others.share()}
    path = file_for(where)
    path.write_text(json.dumps(result, indent=1) + "\n")
    write_pages()
    print(f"recorded in {path}")


if __name__ == "__main__":
    main()
