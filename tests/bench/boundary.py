"""What a process of its own costs, and how soon a death is noticed: `LLM("tiny")` here against `engine_process=True`.

A step's time is the median over the decodes of a batch, from one `LLM.step` to the next. `here` and `across` compute the
same; `message` is what the border itself takes of it: a step's results encoded, decoded, and put where they belong, on
one thread. Across, the front's share overlaps with the engine's next step if there are two cores that have nothing else
to do. A death's time is from the blow until the one who waits has the error (or, for the front's, until the engine is
gone); of a stopped engine, without the ping limit of 1 s.

Run: `python tests/bench/boundary.py [--json results.json]`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import OtherLoad, machine, print_table, write_json

from atom_mini import LLM, SamplingParams
from atom_mini.parallel.core_client import EngineCoreClient
from atom_mini.parallel.engine_process import FromEngine, Output, Row, decode_frame, encode
from atom_mini.parallel.manager import EngineDead
from atom_mini.sequence import Sequence, SequenceType

BATCHES = (1, 64, 256)
LENGTH = 48  # tokens
FRONT = """
import time
from atom_mini import Config
from atom_mini.parallel.core_client import EngineCoreClient
core = EngineCoreClient(EngineArgs("tiny", engine_process=True, device="cpu", num_kvcache_blocks=8))
print(core.engines[0].process.pid, flush=True)
time.sleep(60)
"""


def options(count: int) -> dict[str, Any]:
    return {"device": "cpu", "compiled": True, "num_kvcache_blocks": 6 * count + 8, "max_num_seqs": count}


def step_ms(llm: LLM, count: int) -> float:
    """Median milliseconds from step to step, decodes only."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0)
    for _ in range(count):
        llm.add_request([40, 206, 75], params)
    times, start = [], time.perf_counter()
    while (step := llm.step()) is not None and llm.engine_core.scheduler.seqs:
        now = time.perf_counter()
        if step.batch.type.name == "DECODE":
            times.append(1e3 * (now - start))
        start = now
    return statistics.median(times)


def message_ms(count: int) -> float:
    """Median milliseconds for a step's results: there, and into their sequences."""
    books, times = EngineCoreClient.__new__(EngineCoreClient), []  # without an engine
    seqs = [Sequence([1, 2, 3], 16) for _ in range(count)]
    for place in range(LENGTH):
        start = time.perf_counter()
        rows = [Row(seq.id, place, [5], 0, None) for seq in seqs]
        output = decode_frame(encode(Output(place, SequenceType.DECODE, count, 0.0, rows)), FromEngine)
        for seq, row in zip(seqs, output.rows, strict=True):
            books.take(seq, row)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def blow_seconds(blow: Callable[[int], object], **more: Any) -> float:
    """Seconds until the one who waits has the error."""
    with LLM("tiny", engine_process=True, **options(4), **more) as llm:
        core: Any = llm.engine_core
        llm.add_request("Once", SamplingParams(max_tokens=90, ignore_eos=True))
        llm.step()
        start = time.perf_counter()
        blow(core.engines[0].process.pid)
        try:
            while llm.step():
                pass
        except EngineDead:
            return time.perf_counter() - start
    raise AssertionError("it lives")


def is_alive(pid: int) -> bool:
    """Not gone, and not a zombie that its new parent has yet to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def front_seconds() -> float:
    """Seconds from the front's end to the engine's."""
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    start = time.perf_counter()
    front.kill()
    while is_alive(pid):
        time.sleep(0.001)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    others, steps, starts = OtherLoad(), [], {"here": [], "across": []}  # type: ignore[var-annotated]
    for count in BATCHES:
        row = []
        for name in starts:
            begun = time.perf_counter()
            with LLM("tiny", engine_process=name == "across", **options(count)) as llm:
                starts[name].append(time.perf_counter() - begun)
                step_ms(llm, count)
                row.append(step_ms(llm, count))
        steps.append([count, *row, row[1] - row[0], message_ms(count)])
    print("\nms per decode step")
    print_table(["sequences", "here", "across", "difference", "message"], steps)
    ready = [[name, statistics.median(times)] for name, times in starts.items()]
    print("\nseconds to make an LLM (here the first one imports torch, too)")
    print_table(["engine", "seconds"], ready)
    deaths = [
        ["engine: SIGKILL", blow_seconds(lambda pid: os.kill(pid, signal.SIGKILL))],
        ["engine: SIGTERM", blow_seconds(lambda pid: os.kill(pid, signal.SIGTERM))],
        ["engine: SIGSTOP", blow_seconds(lambda pid: os.kill(pid, signal.SIGSTOP), ping_timeout=1.0) - 1],
        ["front: SIGKILL", front_seconds()],
    ]
    print("\nseconds to notice a death")
    print_table(["who, how", "seconds"], deaths)
    if args.json:
        write_json(args.json, {"steps": steps, "ready": ready, "deaths": deaths} | machine() | {"others": others.share()})


if __name__ == "__main__":
    main()
