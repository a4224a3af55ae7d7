"""A server as a user starts it, and a client in a process of its own that notes when each event of its streams comes.

As a program it is that client: it reads `[port, [[seconds, body], ...]]` from its input, sends each request at its
time, and prints `[times of each request's events, its CPU seconds]`. No torch here.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Times = list[list[float]]  # of each request, when its events came, in seconds since the start
SERVE = ("-m", "atom_mini", "serve")


async def read(port: int, body: dict[str, Any], start: float) -> list[float]:
    """One stream over a socket: when its events came."""
    data, times = json.dumps(body | {"stream": True}).encode(), list[float]()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{head}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(head.encode() + data)
    while (line := await reader.readline()) and b"[DONE]" not in line:
        if line.startswith(b'data: {"error"') or line.startswith(b"HTTP/1.1 4"):
            raise ValueError(line.decode())
        if line.startswith(b"data:"):
            times.append(time.perf_counter() - start)
    writer.close()
    return times


async def read_all(port: int, asked: list[tuple[float, dict[str, Any]]]) -> Times:
    """Each at its time."""
    start = time.perf_counter()

    async def one(at: float, body: dict[str, Any]) -> list[float]:
        await asyncio.sleep(at - (time.perf_counter() - start))
        return await read(port, body, start)

    return await asyncio.gather(*(one(*pair) for pair in asked))


def ask(port: int, asked: list[tuple[float, dict[str, Any]]]) -> tuple[Times, float]:
    """What the client's process says."""
    said = subprocess.run([sys.executable, __file__], input=json.dumps([port, asked]), capture_output=True, text=True, check=True)
    times, cpu = json.loads(said.stdout)
    return times, cpu


@contextmanager
def serving(model: str, options: dict[str, Any], program: tuple[str, ...] = SERVE) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server's process, and its port."""
    words = [f"--{'no-' * (value is False)}{name.replace('_', '-')}" + f"={value}" * (not isinstance(value, bool))
             for name, value in options.items()]  # fmt: skip
    command = [sys.executable, *program, model, "--port", "0", "--log-level", "warning", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r":(\d+)$", server.stdout.readline().strip())
            assert found is not None, f"it did not start: {command}"
            yield server, int(found[1])
        finally:
            server.terminate()


if __name__ == "__main__":
    port, asked = json.load(sys.stdin)
    before = time.process_time()
    print(json.dumps([asyncio.run(read_all(port, asked)), time.process_time() - before]))
