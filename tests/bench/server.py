"""What the server adds: tokens per second and the time between two of a stream's tokens, over HTTP and without it.

The same requests (the built-in model, LENGTH tokens each) go to `LLM.stream`, to `AsyncLLM.generate`, and over HTTP to a server
that has its engine in a process of its own, as `atom-mini serve` has: in turns, after a round that does not count; figures
are medians. The client runs in a process of its own, too, and shares the machine's cores with both. `overhead` is the
server's time per token beyond that of `LLM.stream`. `memory` is what the server's process grows by, per open stream.
`first answer`: from the command to the end of a first small answer.

`where` is another run, of a server whose threads and inner functions have a clock: CPU seconds by what they are spent on.
`spared`: the same with a single thread for the engine.

Run: `python tests/bench/server.py [--json results/server.json] [--counts 1 32 256]`; chapter 81b draws that file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import signal
import statistics
import sys
import threading
import time
from asyncio import selector_events
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from atom_mini.__main__ import main as run_command
from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # as the command does: before torch is loaded, here and in the engine's process

import msgspec  # noqa: E402
from figures import stamp  # noqa: E402
from over_http import ask, serving  # noqa: E402
from report import OtherLoad, machine, print_table, write_json  # noqa: E402

from atom_mini import LLM, SamplingParams  # noqa: E402
from atom_mini.serving.async_llm import AsyncLLM, Stream  # noqa: E402

LENGTH = 64  # tokens
PROMPT = "Once upon a time"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
WISH = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)
HERE = (__file__, "--serve")


def options(count: int) -> dict[str, Any]:
    return {"device": "cpu", "compiled": True, "num_kvcache_blocks": 6 * count + 8, "max_num_seqs": min(count, 256)}


def rounds(count: int) -> int:
    """How often it is measured."""
    return 9 if count < 32 else 3 if count < 256 else 2 if count < 1024 else 1


def by_llm(llm: LLM, count: int) -> dict[str, float]:
    """Seconds for `count` requests in one `LLM.stream`; ms until half of them had a first piece."""
    start, came = time.perf_counter(), dict[int, float]()
    for piece in llm.stream([PROMPT] * count, WISH):
        came.setdefault(piece.index, time.perf_counter() - start)
    return {"plain": time.perf_counter() - start, "plain TTFT": 1e3 * statistics.median(came.values())}


async def by_tasks(engine: AsyncLLM, count: int) -> float:
    """Seconds for `count` tasks of one `AsyncLLM`, its engine in another process."""

    async def one() -> None:
        async for _ in engine.generate(PROMPT, WISH):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - start


def by_http(port: int, count: int) -> dict[str, float]:
    """Seconds from the first request to the last event, and the gaps between a stream's events, in ms."""
    times, cpu = ask(port, [(0.0, BODY)] * count)
    gaps = [1e3 * (b - a) for came in times for a, b in pairwise(came)]
    end, first = max(came[-1] for came in times), statistics.median(came[0] for came in times)
    late = statistics.quantiles(gaps, n=100)[98]
    return {"seconds": end, "TTFT ms": 1e3 * first, "ITL ms": statistics.median(gaps), "ITL p99 ms": late, "client": cpu}


def memory(pid: int) -> float:
    """KiB that a process has had in use at most."""
    with open(f"/proc/{pid}/status") as status:
        return float(next(line.split()[1] for line in status if line.startswith("VmHWM")))


async def measure(count: int) -> dict[str, float]:
    """One row."""
    tokens = count * LENGTH
    start, found = time.perf_counter(), list[dict[str, float]]()
    with serving("tiny", options(count)) as (server, port):
        ask(port, [(0.0, BODY | {"max_tokens": 1})])
        first, before = time.perf_counter() - start, memory(server.pid)
        with LLM("tiny", **options(count)) as llm:
            async with AsyncLLM("tiny", engine_process=True, **options(count)) as engine:
                for _ in range(1 + rounds(count)):
                    took = by_llm(llm, count) | {"tasks": await by_tasks(engine, count)}
                    found.append(took | await asyncio.to_thread(by_http, port, count))
        grown = (memory(server.pid) - before) / count
    middle = {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}
    return {
        "streams": count, "LLM.stream tok/s": tokens / middle["plain"], "AsyncLLM tok/s": tokens / middle["tasks"],
        "HTTP tok/s": tokens / middle["seconds"], "overhead us/token": 1e6 * (middle["seconds"] - middle["plain"]) / tokens,
        "LLM.stream TTFT ms": middle["plain TTFT"], "TTFT ms": middle["TTFT ms"], "ITL ms": middle["ITL ms"],
        "ITL p99 ms": middle["ITL p99 ms"], "KiB/stream": grown, "first answer s": first,
    }  # fmt: skip


# Where the time goes: in the server's process

SPENT: Counter[str] = Counter()  # what -> CPU seconds of the threads that did it


def clock(owner: Any, name: str, what: str) -> None:
    """Count the seconds that a function takes of its thread."""
    plain = getattr(owner, name)

    def run(*args: Any, **more: Any) -> Any:
        start = time.thread_time()
        found = plain(*args, **more)
        SPENT[what] += time.thread_time() - start
        return found

    async def wait(*args: Any, **more: Any) -> Any:
        start = time.thread_time()
        await plain(*args, **more)
        SPENT[what] += time.thread_time() - start

    setattr(owner, name, wait if inspect.iscoroutinefunction(plain) else run)


def threads(pid: int) -> Counter[str]:
    """CPU seconds of each thread of a process, by the name that the system has for it."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found[task.name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def tell(*_: Any) -> None:
    """Print what has been spent, here and by the engine's process."""
    every = threading.enumerate()
    names = {str(thread.native_id): thread.name.removesuffix("_0") for thread in every}  # an executor's have a number
    found: Counter[str] = Counter(SPENT)
    for id, seconds in threads(os.getpid()).items():
        found[names.get(id, "others")] += seconds
    for task in Path("/proc/self/task").iterdir():  # each thread has children of its own
        for child in (task / "children").read_text().split():
            found["engine's process"] += sum(threads(int(child)).values())
    print(json.dumps(found), flush=True)


def serve_here(words: list[str]) -> None:
    """`atom-mini serve`, with clocks; it tells what they say when it is sent SIGUSR1."""
    from uvicorn.protocols.http import auto

    from atom_mini.parallel.core_client import EngineCoreClient

    cycle = sys.modules[auto.AutoHTTPProtocol.__module__].RequestResponseCycle
    clock(msgspec.json, "encode", "JSON")
    clock(selector_events._SelectorSocketTransport, "write", "socket")  # type: ignore[attr-defined]
    clock(cycle, "send", "HTTP and socket")
    clock(Stream, "put", "merge")
    clock(LLM, "_next_piece", "text")
    clock(EngineCoreClient, "_use", "rows")
    began = [0.0]

    def collect(phase: str, _: Any) -> None:
        if phase == "stop":
            SPENT["collector"] += time.thread_time() - began[0]
        began[0] = time.thread_time()

    gc.callbacks.append(collect)
    signal.signal(signal.SIGUSR1, tell)
    run_command(["serve", *words])


def where(count: int) -> dict[str, float]:
    """Microseconds of CPU per token, by what they are spent on."""
    with serving("tiny", options(count), HERE) as (server, port):

        def spent() -> Counter[str]:
            server.send_signal(signal.SIGUSR1)
            assert server.stdout is not None
            return Counter(json.loads(server.stdout.readline()))

        by_http(port, count)
        before = spent()
        runs = [by_http(port, count) for _ in range(rounds(count))]
        after = spent()
    took = {name: after[name] - before[name] for name in after}
    loop = took["MainThread"] - took["JSON"] - took["HTTP and socket"] - took["merge"]
    border = took["engine 0"] + took["others"] + took["rows"]
    parts = {
        "engine": took["engine's process"], "border": border, "text": took["text"] + took["tokenizer"],
        "thread": took["engine loop"] - took["text"] - took["rows"], "merge": took["merge"], "JSON": took["JSON"],
        "HTTP": took["HTTP and socket"] - took["socket"], "socket": took["socket"], "tasks": loop,
        "of these, collector": took.get("collector", 0.0),
    }  # fmt: skip
    parts |= {"client": sum(run["client"] for run in runs), "wall": sum(run["seconds"] for run in runs)}
    tokens = len(runs) * count * LENGTH
    return {"streams": count} | {name: 1e6 * value / tokens for name, value in parts.items()}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve_here(sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--only", choices=["rows", "where"])
    args = parser.parse_args()
    others, found = OtherLoad(), {"rows": list[Any](), "where": list[Any]()}
    for count in args.counts:  # some minutes: each row as soon as it is there
        if args.only != "where":
            found["rows"].append(asyncio.run(measure(count)))
        if args.only != "rows":
            found["where"].append(where(count))
        for rows in found.values():
            if rows:
                print_table([*rows[-1]], [[*rows[-1].values()]])
    os.environ["OMP_NUM_THREADS"] = "1"  # of two: the other is the loop's
    found["spared"] = [where(256)]
    write_json(args.json, stamp(machine()) | found | {"others": others.share()})


if __name__ == "__main__":
    main()
