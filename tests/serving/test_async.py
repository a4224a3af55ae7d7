"""The asynchronous engine: the same tokens, one abort for each client that leaves, and no request hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from atom_mini import LLM, SamplingParams
from atom_mini.serving.async_llm import AsyncLLM
from atom_mini.text import TextPiece

SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 900, "max_num_seqs": 256}
STORY = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PROMPT = "Once upon a time"


async def read(pieces: AsyncIterator[TextPiece]) -> tuple[str, str | None]:
    text = ""
    async for piece in pieces:
        text += piece.text
    return text, piece.finish_reason


async def until_idle(engine: AsyncLLM) -> None:
    """Wait until the engine has no request; then every block must be free."""
    for _ in range(500):
        if await engine.submit(engine.llm.engine_core.is_finished):
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("requests are left in the engine")
    manager = engine.llm.engine_core.scheduler.block_manager
    assert not engine.streams and manager.num_free_blocks == SMALL["num_kvcache_blocks"]


def options(count: int, **changes: Any) -> list[SamplingParams]:
    return [replace(STORY, seed=i, **changes) for i in range(count)]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("tiny", **SMALL)
    yield engine
    asyncio.run(engine.close())
    assert not any(thread.name.startswith("engine loop") for thread in threading.enumerate())


@pytest.fixture
def aborts(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests that were aborted."""
    found, plain = [], engine.llm.engine_core.abort

    def counted(request_id: int, why: str = "abort") -> Any:
        found.append(request_id)
        return plain(request_id, why)

    monkeypatch.setattr(engine.llm.engine_core, "abort", counted)
    return found


def test_each_of_many_gets_its_solo_text(engine: AsyncLLM, aborts: list[int]) -> None:
    """And a client that reads to the end causes no abort (ATOM #1589: 58,455 of them)."""
    with LLM("tiny", **SMALL) as llm:
        solo = [(out.text, "length") for out in llm.generate([PROMPT] * 50, options(50))]

    async def main() -> list[tuple[str, str | None]]:
        return await asyncio.gather(*(read(engine.generate(PROMPT, params)) for params in options(50)))

    assert asyncio.run(main()) == solo and aborts == []


def test_an_abort_never_overtakes_its_request(engine: AsyncLLM) -> None:
    """Cancelled at any moment from the first on: nothing is left in the engine."""

    async def main() -> None:
        for turns in range(40):
            task = asyncio.create_task(read(engine.generate(PROMPT, replace(STORY, max_tokens=500))))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until_idle(engine)

    asyncio.run(main())


def test_a_slow_reader_gets_larger_pieces_and_delays_no_other(engine: AsyncLLM) -> None:
    """While it does not read, one piece waits for it, and the others get their whole answers."""

    async def main() -> None:
        slow = engine.generate(PROMPT, replace(STORY, max_tokens=120, seed=5))
        first = await anext(slow)
        others = [read(engine.generate(PROMPT, params)) for params in options(8)]
        assert {reason for _, reason in await asyncio.gather(*others)} == {"length"}
        while engine.streams:
            await asyncio.sleep(0.01)
        rest = [piece async for piece in slow]
        assert len(rest) <= 2 and rest[-1].finished
        assert sum(len(piece.token_ids) for piece in (first, *rest)) == 120

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [([9] * 5000, None, "prompt of 5000 tokens"), ([10**9], None, "token id"), ("", None, "empty prompt"),
     (PROMPT, "hot", "is not a SamplingParams"), (None, None, "prompts must be strings or lists")],
)  # fmt: skip
def test_an_invalid_request_raises_where_it_was_made(engine: AsyncLLM, prompt: Any, params: Any, says: str) -> None:
    async def main() -> None:
        good = asyncio.create_task(read(engine.generate(PROMPT, replace(STORY, seed=1))))
        with pytest.raises(ValueError, match=says):
            await read(engine.generate(prompt, params))
        assert (await good)[1] == "length"
        await until_idle(engine)

    asyncio.run(main())


def test_tokenizing_does_not_delay_a_step(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests generate while a prompt is tokenized, and its text is in its output."""
    plain, tokenizing, go_on = engine.llm.processor.encode, threading.Event(), threading.Event()

    def slow(text: str, **more: Any) -> list[int]:
        if text == "slow":
            tokenizing.set()
            assert go_on.wait(10)
        return plain(text, **more)

    async def last(prompt: str | list[int]) -> TextPiece:
        pieces = [piece async for piece in engine.generate(prompt, STORY)]
        return pieces[-1]

    async def main() -> None:
        other = asyncio.create_task(last([5, 6]))
        while not engine.streams:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(last("slow"))
        await asyncio.to_thread(tokenizing.wait, 10)
        assert (await other).finished and not task.done()
        go_on.set()
        output = (await task).output
        assert output is not None and output.prompt == "slow"

    monkeypatch.setattr(engine.llm.processor, "encode", slow)
    asyncio.run(main())


def test_abort_by_name(engine: AsyncLLM) -> None:
    """A request ends even if no step has run since."""

    async def main() -> None:
        task = asyncio.create_task(read(engine.generate(PROMPT, replace(STORY, max_tokens=2000), request_id="x")))
        while not await engine.abort("x"):
            await asyncio.sleep(0)
        assert (await task)[1] == "abort"
        assert not await engine.abort("x")
        nameless = asyncio.create_task(read(engine.generate(PROMPT, replace(STORY, max_tokens=3))))
        with pytest.raises(ValueError, match="request_id=None"):  # which all that have no name have in common
            await engine.abort(None)
        assert (await nameless)[1] == "length"

    asyncio.run(main())


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = engine.llm.engine_core.runner

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(runner, "forward", lambda batch: 1 / 0)
            tasks = (read(engine.generate(PROMPT, params)) for params in options(10))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [ZeroDivisionError] * 10
            assert isinstance(engine.error, ZeroDivisionError)
        await until_idle(engine)
        assert (await read(engine.generate(PROMPT, STORY)))[1] == "length" and engine.error is None

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused(engine: AsyncLLM) -> None:
    """A fork has no engine thread, so a call would never return."""
    params = replace(STORY, seed=1)
    wanted = asyncio.run(read(engine.generate(PROMPT, params)))
    if (child := os.fork()) == 0:
        signal.alarm(20)
        code = 1
        try:
            asyncio.run(read(engine.generate(PROMPT, params)))
        except ValueError as error:
            code = 0 if "fork" in str(error) else 2
        asyncio.run(engine.close())
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(read(engine.generate(PROMPT, params))) == wanted


def test_close_ends_streams_and_twice_is_once() -> None:
    async def main() -> None:
        async with AsyncLLM("tiny", **SMALL) as engine:
            task = asyncio.create_task(read(engine.generate(PROMPT, replace(STORY, max_tokens=900))))
            await asyncio.sleep(0.05)
            await engine.close()
            assert (await task)[1] == "abort"
            with pytest.raises(ValueError, match="this AsyncLLM is closed"):
                await read(engine.generate(PROMPT))
            with pytest.raises(ValueError, match="this AsyncLLM is closed"):
                await engine.abort("x")

    asyncio.run(main())
