"""What the server adds: tokens per second and the time between two of a stream's tokens, over HTTP and without it.

The same requests (the built-in model, LENGTH tokens each) go to `LLM.stream`, to `AsyncLLM.generate`, and over HTTP to a server
that has its engine in a process of its own, as `atom-mini serve` has. The client runs in a process of its own, too, and
shares the machine's cores with both. `overhead` is the server's time per token beyond that of `LLM.stream`. `memory` is
what the server's process grows by, per open stream. `first answer`: from the command to the end of a first small answer.

Run: `python tests/bench/server.py [--json results.json] [--counts 1 32 256]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from atom_mini.instruments.command_line import spin_less

spin_less(os.environ)  # as the command does: before torch is loaded, here and in the engine's process

from report import OtherLoad, print_table, write_json  # noqa: E402

from atom_mini import LLM, SamplingParams  # noqa: E402
from atom_mini.serving.async_llm import AsyncLLM  # noqa: E402

LENGTH = 32  # tokens
PROMPT = "Once upon a time"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0, "stream": True}


def options(count: int) -> dict[str, Any]:
    return {"device": "cpu", "num_kvcache_blocks": 4 * count + 8, "max_num_seqs": min(count, 256)}


def wish() -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)


def by_llm(count: int) -> float:
    """Seconds for `count` requests in one `LLM.stream`."""
    with LLM("tiny", **options(count)) as llm:
        llm.generate(PROMPT, wish())
        start = time.perf_counter()
        for _ in llm.stream([PROMPT] * count, wish()):
            pass
        return time.perf_counter() - start


def by_tasks(count: int) -> float:
    """Seconds for `count` tasks of one `AsyncLLM`, its engine in another process."""

    async def main() -> float:
        async with AsyncLLM("tiny", engine_process=True, **options(count)) as engine:

            async def one() -> None:
                async for _ in engine.generate(PROMPT, wish()):
                    pass

            await one()
            start = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(count)))
            return time.perf_counter() - start

    return asyncio.run(main())


async def read(port: int, gaps: list[float]) -> None:
    """One stream over a socket; the time before each event but the first."""
    data = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(head.encode() + data)
    last = 0.0
    while (line := await reader.readline()) and b"[DONE]" not in line:
        if line.startswith(b"data:"):
            now = time.perf_counter()
            gaps += [now - last] if last else []
            last = now
    writer.close()


def client(port: int, count: int) -> None:
    """The process that asks: prints seconds, and the gaps' median and p99."""

    async def main() -> None:
        gaps: list[float] = []
        start = time.perf_counter()
        await asyncio.gather(*(read(port, gaps) for _ in range(count)))
        took = time.perf_counter() - start
        print(json.dumps([took, statistics.median(gaps), statistics.quantiles(gaps, n=100)[98]]))

    asyncio.run(main())


def memory(pid: int) -> float:
    """KiB in use by a process."""
    with open(f"/proc/{pid}/status") as status:
        return float(next(line.split()[1] for line in status if line.startswith("VmHWM")))


def by_http(count: int) -> dict[str, float]:
    """The same over HTTP."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options(count).items()]
    start = time.perf_counter()
    command = [sys.executable, "-m", "atom_mini", "serve", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r":(\d+)$", server.stdout.readline().strip())
        assert found is not None
        port = int(found[1])
        small = json.dumps(BODY | {"max_tokens": 1, "stream": False}).encode()
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, small, kind)).read()
        first, before = time.perf_counter() - start, memory(server.pid)
        words = [sys.executable, __file__, "--client", str(port), "--counts", str(count)]
        took, median, late = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        grown = (memory(server.pid) - before) / count
        server.terminate()
    return {"seconds": took, "itl_ms": 1e3 * median, "itl_p99_ms": 1e3 * late, "kib": grown, "first": first}


def measure(count: int) -> dict[str, float]:
    """One row."""
    tokens = count * LENGTH
    plain, tasks, http = by_llm(count), by_tasks(count), by_http(count)
    return {
        "streams": count, "LLM.stream tok/s": tokens / plain, "AsyncLLM tok/s": tokens / tasks,
        "HTTP tok/s": tokens / http["seconds"], "overhead us/token": 1e6 * (http["seconds"] - plain) / tokens,
        "ITL ms": http["itl_ms"], "ITL p99 ms": http["itl_p99_ms"], "KiB/stream": http["kib"], "first answer s": http["first"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", type=int)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 32, 256, 1024])
    args = parser.parse_args()
    if args.client:
        return client(args.client, args.counts[0])
    others = OtherLoad()
    rows = []
    for count in args.counts:  # some minutes: each row as soon as it is there
        rows.append(measure(count))
        print_table([*rows[-1]], [[*rows[-1].values()]])
    write_json(args.json, {"rows": rows, "others": others.share()})


if __name__ == "__main__":
    main()
