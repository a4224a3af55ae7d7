"""The asynchronous engine: the same tokens, one abort for each client that leaves, and no request hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from atom_mini import LLM, SamplingParams
from atom_mini.parallel.manager import EngineDead
from atom_mini.serving.async_llm import AsyncLLM
from atom_mini.text import TextPiece

alone = pytest.mark.alone  # it starts a process, or reads the clock
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 900, "max_num_seqs": 256}
STORY = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
PROMPT = "Once upon a time"


async def read(pieces: AsyncIterator[TextPiece]) -> tuple[str, str | None]:
    text = ""
    async for piece in pieces:
        text += piece.text
    return text, piece.finish_reason


async def leave(pieces: AsyncIterator[TextPiece], after: int) -> None:
    async for _ in pieces:
        after -= 1
        if not after:
            return


async def until_idle(engine: AsyncLLM) -> None:
    """Wait until the engine has no request; then every block must be free."""
    for _ in range(500):
        if await engine.submit(engine.llm.engine_core.is_finished):
            break
        await asyncio.sleep(0.01)
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


def test_several_prompts_in_one_call(engine: AsyncLLM, aborts: list[int]) -> None:
    """As `LLM.stream` answers them; leaving aborts all of them."""
    prompts = [PROMPT, "12 + 7 =", PROMPT]
    with LLM("tiny", **SMALL) as llm:
        solo = [out.text for out in llm.generate(prompts, options(3))]

    async def main() -> list[str]:
        texts = [""] * 3
        async for piece in engine.generate(prompts, options(3)):
            texts[piece.index] += piece.text
        await leave(engine.generate(prompts, options(3, max_tokens=500)), after=5)
        await until_idle(engine)
        return texts

    assert asyncio.run(main()) == solo and len(aborts) == 3


@pytest.mark.parametrize("how", ["break", "cancel"])
@pytest.mark.slow
def test_leaving_is_one_abort(engine: AsyncLLM, aborts: list[int], how: str) -> None:
    """100 of 200 clients leave in mid-stream: exactly 100 aborts, and all blocks are free again."""

    async def main() -> None:
        def client(number: int, params: SamplingParams) -> Any:
            stays = number % 2 or how == "cancel"  # until it is cancelled
            return (read if stays else partial(leave, after=3 + number % 5))(engine.generate(PROMPT, params))

        asked = enumerate(options(200, max_tokens=60))
        tasks = [asyncio.create_task(client(i, params)) for i, params in asked]
        if how == "cancel":
            while await engine.submit(lambda: min((len(s.requests[i].seq) for s, i in engine.streams.values()), default=0)) < 8:
                await asyncio.sleep(0.001)
            for task in tasks[::2]:
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [end[1] for end in ends[1::2]] == ["length"] * 100
        await until_idle(engine)

    asyncio.run(main())
    assert len(aborts) == len(set(aborts)) == 100


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
    """At most one piece waits for it, and the others finish first."""

    async def slow() -> list[int]:
        sizes = []
        async for piece in engine.generate(PROMPT, replace(STORY, max_tokens=120, seed=5)):
            sizes.append(len(piece.token_ids))
            await asyncio.sleep(0.1)
        return sizes

    async def main() -> None:
        task = asyncio.create_task(slow())
        await asyncio.sleep(0.05)
        await asyncio.gather(*(read(engine.generate(PROMPT, params)) for params in options(8)))
        assert not task.done()
        sizes = await task
        assert sum(sizes) == 120 and max(sizes) > 4 and len(sizes) < 60, sizes

    asyncio.run(main())


def test_a_partial_stop_string_never_leaks(engine: AsyncLLM) -> None:
    """vLLM #2577, SGLang #11446; across tokens, and the engine stops there."""
    whole, _ = asyncio.run(read(engine.generate(PROMPT, replace(STORY, seed=3))))
    stop = whole[20:31]
    pieces: list[TextPiece] = []

    async def main() -> None:
        async for piece in engine.generate(PROMPT, replace(STORY, seed=3, stop=[stop, "never said"])):
            pieces.append(piece)

    asyncio.run(main())
    text = "".join(piece.text for piece in pieces)
    assert text == whole[: whole.find(stop)] and pieces[-1].finish_reason == "stop"
    assert pieces[-1].output is not None and pieces[-1].output.stop_reason == stop


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
            assert go_on.wait(30)
        return plain(text, **more)

    async def last(prompt: str | list[int]) -> TextPiece:
        pieces = [piece async for piece in engine.generate(prompt, STORY)]
        return pieces[-1]

    async def main() -> None:
        other = asyncio.create_task(last([5, 6]))
        while not engine.streams:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(last("slow"))
        await asyncio.to_thread(tokenizing.wait, 30)
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


def test_tasks_of_several_loops(engine: AsyncLLM) -> None:
    """A loop that ends in mid-stream harms no other, and its requests are aborted."""
    found = []

    def short() -> None:
        async def main() -> None:
            asyncio.get_running_loop().create_task(read(engine.generate(PROMPT, replace(STORY, max_tokens=900))))
            await asyncio.sleep(0.05)

        asyncio.run(main())  # which cancels what is left

    def whole() -> None:
        found.append(asyncio.run(read(engine.generate(PROMPT, replace(STORY, seed=1)))))

    threads = [threading.Thread(target=work) for work in (short, whole, whole)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2 and found[0] == found[1]
    asyncio.run(until_idle(engine))


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


@alone
@pytest.mark.slow
def test_an_engine_killed_under_50_streams() -> None:
    """All clients get the error within two seconds, and so do later ones (ATOM #680: a silent hang)."""

    async def main() -> None:
        async with AsyncLLM("tiny", engine_process=True, **SMALL) as engine:
            made = [engine.generate(PROMPT, params) for params in options(50, max_tokens=500)]
            tasks = [asyncio.create_task(read(pieces)) for pieces in made]
            while len(engine.streams) < 50:
                await asyncio.sleep(0.01)
            core: Any = engine.llm.engine_core
            core.engines[0].process.kill()
            start = time.monotonic()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - start < 2 and [type(end) for end in ends] == [EngineDead] * 50
            with pytest.raises(EngineDead):
                await read(engine.generate(PROMPT))
            assert isinstance(engine.error, EngineDead)

    asyncio.run(main())
