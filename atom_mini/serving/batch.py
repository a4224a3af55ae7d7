"""Answers a file of requests in OpenAI's batch format, and continues after an interrupt (chapter 81b)."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from ..checkpoint import JsonObject
from ..errors import require
from ..options.args import EngineArgs
from ..options.build import choose_scheduler
from ..options.help import Batch, Serve, given
from .api import api_error
from .async_llm import AsyncLLM
from .protocol import read_request
from .server import ENDPOINTS, Server


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A request in a file of OpenAI's batch format."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: JsonObject


def read_work(source: Path, model: str) -> dict[str, Line]:
    """The requests in a file, by `custom_id`. ValueError names the first wrong line."""
    found: dict[str, Line] = {}
    for number, text in enumerate(source.read_bytes().splitlines(), 1):
        place = f"{source}, line {number}"
        try:
            line = msgspec.json.decode(text or b"null", type=Line | None)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if line is None:  # an empty line
            continue
        id, wanted = line.custom_id, line.body.get("model")
        require(id not in found, f"{place}: custom_id={id!r} is not unique")
        require(not line.body.get("stream"), f"{place}: stream=true in a file")
        require(wanted == model, f"{place}: model={wanted!r} must be {model!r}")
        found[id] = line
    return found


BEGIN = b'{"custom_id":'  # of an answer; a request's line also has a "method"


def read_answers(target: Path) -> dict[str, int]:
    """The status of each answer in a file, by `custom_id`. Removes a last line that was
    cut off. ValueError if the file holds anything else."""
    data = target.read_bytes() if target.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    rest = data[len(whole) :]
    wrong = f"{target} has a line that is not an answer: name another file"
    try:
        rows = msgspec.json.Decoder().decode_lines(whole)
        found = {row["custom_id"]: row["response"]["status_code"] for row in rows}
    except (ValueError, TypeError, KeyError):
        raise ValueError(wrong) from None
    is_ours = BEGIN.startswith(rest[: len(BEGIN)]) and b'"method"' not in rest
    require(is_ours, wrong)
    if rest:
        os.truncate(target, len(whole))
    return found


async def answer(server: Server, line: Line) -> bytes:
    """The line with the answer to `line`. RuntimeError if the engine has failed."""
    try:
        request = read_request(msgspec.json.encode(line.body), ENDPOINTS[line.url])
        (body,) = [part async for part in server.whole(request)]
        status = 200
    except Exception as error:
        known = api_error(error)
        if known.status >= 500:
            raise RuntimeError(str(known)) from error
        status, body = known.status, msgspec.json.encode(known.body())
    response = {"status_code": status, "body": msgspec.Raw(body)}
    row = {"custom_id": line.custom_id, "response": response, "error": None}
    return msgspec.json.encode(row) + b"\n"


async def answer_all(lines: list[Line], options: JsonObject, size: int, write: Callable[[bytes], object]) -> None:
    """Answer all lines, `size` at a time; `write` gets each answer's line."""
    rest = iter(lines)
    async with AsyncLLM(**options) as engine:
        server = Server(engine, Serve(max_queue=2**31))

        async def work() -> None:
            for line in rest:
                write(await answer(server, line))

        await asyncio.gather(*(work() for _ in range(size)))


def run_batch(args: argparse.Namespace) -> None:
    """Answer the requests that have no answer yet. OSError if answers are errors."""
    from tqdm import tqdm

    size = Batch(**given(args, Batch)).batch_size
    options = given(args, EngineArgs)
    config = EngineArgs(**options)
    choose_scheduler(config)  # raises ValueError for a wrong `scheduler_cls`
    work = read_work(args.source, str(config.model))
    answered = read_answers(args.target)
    left = [line for id, line in work.items() if id not in answered]
    count = {"total": len(work), "initial": len(work) - len(left)}
    with args.target.open("ab") as file, tqdm(**count, unit="requests") as bar:

        def write(row: bytes) -> None:
            file.write(row)
            file.flush()
            bar.update()

        if left:
            asyncio.run(answer_all(left, options, size, write))
    codes = read_answers(args.target)
    failed = sum(codes[id] != 200 for id in work)
    if failed:
        raise OSError(f"{failed} of {len(work)} answers are errors: see status_code in {args.target}")
