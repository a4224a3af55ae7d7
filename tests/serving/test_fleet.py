"""The fleet: what an engine's actor sends and who is chosen, without Ray; and with it (slow: `make test-ray`), the same tokens,
killed replicas, full queues, files of requests that outlive an interrupt."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atom_mini import LLM, SamplingParams
from atom_mini.instruments.command_line import main
from atom_mini.serving import fleet
from atom_mini.serving.fleet import BLOCK, Engine, Fleet, Front, Known, PrefixRouter, prompt_text, text_chain
from atom_mini.serving.server import Serve

SMALL: dict[str, Any] = {"model": "tiny", "device": "cpu", "num_kvcache_blocks": 400}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"
STORY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0.8, "ignore_eos": True, "seed": 1}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is 20 + 21?"}]}


def scope(path: str = TEXT) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


def running(work: Any) -> Any:
    """What `work(engine)` returns, beside an engine in this process."""

    async def main() -> Any:
        engine = Engine(SMALL, Serve())
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.app.engine.close()

    return asyncio.run(main())


def request(name: str, prompt: Any, url: str = TEXT, **more: Any) -> str:
    """A line of a file."""
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", "prompt": prompt} | more})


# An engine's actor


@pytest.mark.parametrize(("path", "asked"), [(TEXT, STORY | {"max_tokens": 20}), (TALK, CHAT)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_messages_are_those_of_the_server(path: str, asked: dict[str, Any], stream: bool) -> None:
    body = json.dumps(asked | {"stream": stream}).encode()

    async def work(engine: Engine) -> tuple[str, str]:
        messages = [m async for m in engine.exchange(scope(path), body, [])]
        assert [m["type"] for m in messages] == ["http.response.start"] + ["http.response.body"] * (len(messages) - 1)
        assert [m.get("more_body", False) for m in messages[1:]] == [True] * (len(messages) - 2) + [False]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(engine.app), base_url="http://localhost") as client:
            direct = await client.post(path, content=body, headers={"content-type": "application/json"})
        return b"".join(m["body"] for m in messages[1:]).decode(), direct.text

    def said(text: str) -> tuple[str, str]:
        """All text, and why it ends; how many pieces it comes in is a matter of time."""
        events = text.split("\n\n") if stream else [text]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event[-1:] == "}"]
        messages = [choice.get("delta") or choice.get("message") or {"content": choice.get("text", "")} for choice in choices]
        parts = [message.get("content", "") for message in messages]
        return "".join(parts), choices[-1]["finish_reason"]

    through, direct = running(work)
    assert said(through) == said(direct) and len(said(direct)[0]) > 5


def test_a_reader_who_leaves_is_an_abort() -> None:
    async def work(engine: Engine) -> tuple[int, int]:
        body = json.dumps(STORY | {"max_tokens": 1500, "stream": True}).encode()
        reading = engine.exchange(scope(), body, [])
        for _ in range(5):
            await anext(reading)
        await reading.aclose()
        manager = engine.app.engine.llm.engine_core.scheduler.block_manager
        while engine.app.streams or manager.num_free_blocks < 400:
            await asyncio.sleep(0.01)
        return engine.app.meters.num_steps, len(engine.app.engine.streams)

    steps, left = running(work)
    assert steps < 100 and left == 0


def test_what_the_application_raises_reaches_the_reader() -> None:
    async def failing(*_: Any) -> None:
        raise ZeroDivisionError

    async def work() -> None:
        engine = Engine.__new__(Engine)
        engine.app = failing
        with pytest.raises(ZeroDivisionError):
            async for _ in engine.exchange(scope(), b"", []):
                pass

    asyncio.run(work())


def test_a_dead_engine_is_an_unhealthy_replica() -> None:
    async def work(engine: Engine) -> None:
        await engine.check_health()
        engine.app.engine.error = RuntimeError("it broke")
        with pytest.raises(RuntimeError, match="it broke"):
            await engine.check_health()

    running(work)


# Who is chosen


def test_a_chain_has_the_blocks_that_two_texts_share() -> None:
    one = os.urandom(5 * BLOCK)
    for shared in range(6):
        two = one[: shared * BLOCK] + os.urandom(5 * BLOCK - shared * BLOCK + 7)
        both = zip(text_chain(one), text_chain(two), strict=True)
        assert [a == b for a, b in both] == [True] * shared + [False] * (5 - shared)
    assert text_chain(one[: BLOCK - 1]) == []


def test_a_conversations_turns_begin_alike() -> None:
    turn = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]
    first, second = (prompt_text(json.dumps(CHAT | {"messages": turn * n}).encode()) for n in (1, 2))
    assert second.startswith(first[:-1]) and text_chain(second)[: len(text_chain(first))] == text_chain(first)
    for body in (b"", b"{", b"[]", b"\xff", b'"x"'):
        assert prompt_text(body) == b""


def test_a_router_forgets_the_oldest_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST", 5)
    known = Known()
    known.note([1, 2, 3])
    known.note([11, 12, 13])
    assert known.match([1, 2, 3]) == 2 and known.match([11, 12, 13]) == 3  # the first one's end has gone
    known.note([1])
    known.note([21, 22])
    assert known.match([1, 2]) == 1 and known.match([11, 12, 13]) == 2 and known.load == (0, 4)


class Routed(PrefixRouter):
    """A router without Ray around it."""

    replica_queue_len_cache: Any = None

    def ask(self, count: int, text: bytes, *busy: int) -> int:
        self.replica_queue_len_cache = dict(enumerate(busy))
        replicas = [SimpleNamespace(replica_id=i) for i in range(count)]
        pending = SimpleNamespace(kwargs={"hashes": text_chain(text)}, routing_context=SimpleNamespace(should_backoff=False))
        (chosen,), rest = asyncio.run(self.choose_replicas(replicas, pending))
        assert rest == replicas and pending.routing_context.should_backoff
        self.on_request_routed(pending, chosen.replica_id, None)
        return chosen.replica_id


def make_router() -> Routed:
    router = Routed.__new__(Routed)
    router.initialize_state()
    return router


def test_a_text_goes_where_most_of_it_went() -> None:
    router, text = make_router(), b"a" * 4 * BLOCK
    assert [router.ask(3, bytes([i]) * 4 * BLOCK) for i in range(3)] == [0, 1, 2]  # nothing known: in turn
    where = router.ask(3, text)
    for more in range(1, 4):
        assert router.ask(3, text + b"b" * more * BLOCK) == where
    assert router.ask(3, b"a" * BLOCK + b"c" * 5 * BLOCK) != where  # less than half of it is known
    assert router.ask(3, b"short") in range(3)


def test_a_busy_engine_is_avoided_and_a_gone_one_forgotten() -> None:
    router, text = make_router(), b"a" * 4 * BLOCK
    assert router.ask(2, text) == 0 and router.ask(2, text, 32, 0) == 0
    assert router.ask(2, text, 33, 0) == 1  # more than FEW above, and more than a tenth
    assert router.ask(1, text) == 0 and [*router.known] == [0]
    assert asyncio.run(router.choose_replicas([1, 2])) == [[1, 2]]  # Ray asks for nobody in particular


@pytest.mark.parametrize("route", ["prefix", "session"])
def test_a_route_that_this_ray_has_not_is_refused_by_name(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RequestRouter", None)
    with pytest.raises(ValueError, match=rf"route='{route}' needs a router that is not here.*set route='load'"):
        fleet.routing(route)


# The door


class Handle:
    """What a deployment's handle is to its callers: it yields `messages`, then raises `error`."""

    def __init__(self, messages: list[Any], error: Exception | None = None, pause: float = 0.0) -> None:
        self.messages, self.error, self.pause = messages, error, pause
        self.exchange = SimpleNamespace(remote=self.call)
        self.given: dict[str, Any] = {}
        self.cancels = 0

    def options(self, **more: Any) -> Handle:
        self.given |= more
        return self

    def call(self, **given: Any) -> Handle:
        self.given |= given
        return self

    def broadcast(self, method: str) -> Any:
        async def results_async(timeout_s: float, return_exceptions: bool) -> Any:
            raise TimeoutError

        return SimpleNamespace(results_async=results_async)

    def cancel(self) -> None:
        self.cancels += 1
        if self.error:  # as Ray's
            raise self.error

    async def __aiter__(self) -> Any:
        await asyncio.sleep(self.pause)
        for message in self.messages:
            yield message
        if self.error:
            raise self.error


def post(handle: Handle, body: Any, path: str = TEXT, headers: Any = None, **settings: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        front = Front(handle, Fleet(**settings))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost") as client:
            if path in ("/health", "/metrics"):
                return await client.get(path)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(work())


START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


class BackPressureError(Exception):
    """Ray's, by its name."""


def test_what_an_engine_answers_is_passed_on() -> None:
    handle = Handle([START, PIECE, LAST])
    text = "x" * 600
    assert post(handle, X | {"prompt": text}, headers={"x-session-id": "me"}).text == "data: 1\n\ndata: [DONE]\n\n"
    assert handle.given["hashes"] == text_chain(json.dumps(text).encode()) and handle.cancels == 1
    assert handle.given["session_id"] == "me" and set(handle.given["scope"]) == {"type", "method", "path", "headers"}
    post(handle, X | {"prompt": text}, route="load")
    assert handle.given["hashes"] == []


X: dict[str, Any] = {"model": "tiny", "prompt": "x"}


def test_a_death_is_told_before_and_within_an_answer() -> None:
    got = post(Handle([], RuntimeError("gone")), X)
    assert got.status_code == 503 and got.json()["error"]["code"] == "engine_dead" and got.headers["retry-after"] == "5"
    events = post(Handle([START, PIECE], RuntimeError("gone")), X).text.split("\n\n")
    assert events[0] == "data: 1" and events[2:] == ["data: [DONE]", ""]
    assert json.loads(events[1][6:])["error"]["code"] == "engine_dead"


def test_the_door_has_limits_a_key_and_no_page() -> None:
    handle = Handle([START, LAST])
    full = post(Handle([], BackPressureError()), X, max_queue=7)
    assert full.status_code == 429 and "max_queue=7" in full.text and full.headers["retry-after"] == "1"
    assert post(handle, X | {"prompt": "x" * 2000}, max_body=1000).status_code == 413
    assert post(handle, X, api_key="k").status_code == 401 and not handle.given.get("body")
    assert post(handle, X, api_key="k", headers={"authorization": "Bearer k"}).status_code == 200
    for path in ("/", "/events"):
        assert post(handle, X, path).status_code == 404
    assert post(handle, X, "/health", api_key="k").status_code == 200
    for path in ("/health", "/metrics"):
        late = post(Handle([START, LAST], pause=5.0), X, path, health_timeout=0.05)
        assert late.status_code == 503 and "health_timeout=0.05" in late.text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"replicas": 0}, "replicas=0"), ({"replicas": 3, "max_replicas": 2}, "max_replicas=2 is below replicas=3"),
     ({"route": "random"}, "route='random'"), ({"port": 0}, "port=0"), ({"cpus": -1}, "cpus=-1"),
     ({"max_ongoing": 0}, "max_ongoing=0"), ({"max_queue": 0}, "max_queue=0")],
)  # fmt: skip
def test_impossible_fleets_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fleet(**wrong)


# Files


@pytest.mark.parametrize(
    ("lines", "says"),
    [(["{"], "line 1"), ([request("a", "x"), "[]"], "line 2"), ([request("a", "x")] * 2, "line 2: custom_id='a'"),
     ([request("a", "x", url="/v1/embeddings")], "embeddings"), ([request("a", "x", stream=True)], "line 1: stream=true"),
     (['{"custom_id": "a"}'], "method"), ([request("a", "x", model="gpt")], "line 1: model='gpt': here it is 'tiny'"),
     ([request("a", "x")[:-1] + ', "priority": 1}'], "line 1: .*priority")],
)  # fmt: skip
def test_a_line_that_is_no_request_is_refused_by_its_number(lines: list[str], says: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=says):
        fleet.read_work(source, "tiny")


def test_empty_lines_and_all_that_text_may_be(tmp_path: Path) -> None:
    """U+2028 and U+0085 end lines for Python, not for JSON."""
    source, text = tmp_path / "in.jsonl", "a\u2028b\x85c"
    line = json.dumps(json.loads(request("a", text)), ensure_ascii=False)
    source.write_text(f"\n{line}\r\n\n", encoding="utf-8")
    work = fleet.read_work(source, "tiny")
    assert [*work] == ["a"] and json.loads(work["a"])["body"]["prompt"] == text


def test_only_a_torn_end_is_taken_out(tmp_path: Path) -> None:
    target, told = tmp_path / "out.jsonl", '{"custom_id": "%s", "response": {"status_code": 200}}\n'
    assert fleet.read_answers(target) == {}
    for torn in ("", "{", '{"custom_id": "c"', told % "c"):  # without its line end it may be torn, too
        target.write_text(told % "a" + told % "b" + torn[:-1])
        assert fleet.read_answers(target) == {"a": 200, "b": 200}
        assert target.read_text() == told % "a" + told % "b"


@pytest.mark.parametrize("text", ["something else\n", "something else", request("a", "x"), request("a", "x") + "\n", "[]\n", "[]"])
def test_what_is_no_file_of_answers_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    """Above all the requests themselves, named twice."""
    target = tmp_path / "out.jsonl"
    target.write_text(text)
    with pytest.raises(ValueError, match="has a line that is no answer: name another"):
        fleet.read_answers(target)
    assert target.read_text() == text


def test_a_line_is_answered_by_the_server() -> None:
    lines = [request("a", "12 + 7 ="), request("b", "x", temperature=-1), request("c", "x", tools=[1])]
    lines += [json.dumps(json.loads(request("d", "", TALK)) | {"body": CHAT})]

    async def work(engine: Engine) -> list[Any]:
        return [json.loads(line) for line in (await engine({"line": lines}))["line"]]

    a, b, c, d = running(work)
    assert [x["custom_id"] for x in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert [x["response"]["status_code"] for x in (a, b, c, d)] == [200, 400, 400, 200]
    assert a["response"]["body"]["choices"][0]["text"] == " 19" and b["response"]["body"]["error"]["param"] == "temperature"
    assert d["response"]["body"]["choices"][0]["message"]["content"] == "20 + 21 = 41." and a["error"] is None


def test_a_failed_engine_is_no_answer() -> None:
    async def work(engine: Engine) -> None:
        engine.app.is_leaving = True
        with pytest.raises(RuntimeError, match="the server ends"):
            await engine.answer(request("a", "x"))

    running(work)


def test_without_ray_the_commands_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(request("a", "x"))
    for words in (["fleet", "--port", str(free_port())], ["batch", str(source), str(target)]):
        assert main(words) == 2
        assert 'pip install -e ".[ray]"' in capsys.readouterr().err


def test_what_is_wrong_is_said_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "start_ray", lambda address: pytest.fail("it starts"))
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x", model="gpt"))
    batch = ["batch", str(source), str(tmp_path / "out.jsonl")]
    for words, says in (
        (["fleet", "--num-kvcache-blocks", "0"], "num_kvcache_blocks=0"),
        (["fleet", "--model", "/nowhere"], "'/nowhere' is no folder"),
        (["fleet", "--max-replicas", "0"], "max_replicas=0"), (batch, "line 1: model='gpt': here it is 'tiny'"),
        ([*batch, "--num-kvcache-blocks", "0"], "num_kvcache_blocks=0"), ([*batch, "--batch-size", "0"], "batch_size=0"),
    ):  # fmt: skip
        assert main([*words, *(["--port", str(free_port())] if "fleet" in words else [])]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(("codes", "failed"), [({"a": 200, "b": 200}, 0), ({"a": 200, "b": 400}, 1), ({"a": 404, "b": 400}, 2)])
def test_answers_that_are_errors_are_counted(
    codes: dict[str, int], failed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, however many; and again, when nothing is left to ask."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(request(name, "x") for name in codes))
    told = [json.dumps({"custom_id": name, "response": {"status_code": code, "body": {}}}) for name, code in codes.items()]
    monkeypatch.setattr(fleet, "start_ray", lambda address: None)
    monkeypatch.setattr(fleet, "answers", lambda *_: iter([told[:1], told[1:]]))
    for _ in range(2):
        assert main(["batch", str(source), str(target)]) == (1 if failed else 0)
        said = capsys.readouterr().err
        assert (f"{failed} of 2 answers are errors" in said) == (failed > 0)
    assert len(target.read_text().splitlines()) == 2


# On Ray

slow = pytest.mark.slow
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray installs it")
ENV = os.environ | {"TOKENIZERS_PARALLELISM": "false"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def processes(title: str) -> list[int]:
    """Of Ray's, by their titles."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().decode(errors="replace").startswith(f"ray::{title}"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            pass
    return found


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


class Served:
    """A fleet of two engines in this session, and a client."""

    def __init__(self) -> None:
        from ray import serve

        fleet.start_ray(None)
        self.serve, self.port = serve, free_port()
        serve.start(proxy_location="HeadOnly", http_options={"port": self.port})
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=100)

    def run(self, **more: Any) -> None:
        args = SMALL | {"engine_process": False, "replicas": 2, "cpus": 0.5} | more
        self.serve.run(fleet.build(args), name="atom_mini", route_prefix="/")
        self.wait_for(args["replicas"])

    def wait_for(self, replicas: int) -> None:
        """So many engines run, and no others start or end."""
        for _ in range(300):
            engines = self.serve.status().applications["atom_mini"].deployments["engine"]
            if engines.replica_states == {"RUNNING": replicas}:
                return
            time.sleep(0.2)
        raise AssertionError(engines)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def events(self, body: dict[str, Any]) -> list[Any]:
        *found, last, end = self.post(TEXT, body | {"stream": True}).text.split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in found]

    def wait_idle(self) -> None:
        """Both engines: nobody runs. Each is asked ten times, or so."""
        for _ in range(100):
            states = [self.client.get("/health").json() for _ in range(20)]
            if all(state["running"] == 0 and state["free_blocks"] == 400 for state in states):
                return
            time.sleep(0.1)
        raise AssertionError(states)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    import ray

    served = Served()
    served.run()
    yield served
    served.client.close()
    served.serve.shutdown()
    ray.shutdown()


@slow
@needs_ray
def test_the_same_tokens_through_ray(served: Served) -> None:
    """As `generate`: text and chat, streamed or whole, one by one and forty at once."""
    with LLM(**SMALL) as llm:
        wishes = [SamplingParams(seed=i, max_tokens=30, temperature=0.8, ignore_eos=True) for i in range(40)]
        texts = [out.text for out in llm.generate([STORY["prompt"]] * 40, wishes, use_tqdm=False)]
        (told,) = llm.chat(CHAT["messages"])
    assert served.post(TALK, CHAT).json()["choices"][0]["message"]["content"] == told.text
    bodies = [STORY | {"seed": i, "max_tokens": 30} for i in range(40)]
    with ThreadPoolExecutor(40) as pool:
        whole = [*pool.map(lambda body: served.post(TEXT, body).json()["choices"][0]["text"], bodies)]
        streamed = [*pool.map(lambda body: "".join(e["choices"][0]["text"] for e in served.events(body)), bodies)]
    assert whole == streamed == texts
    assert served.post(TEXT, X | {"n": 0}).status_code == 400 and served.post("/nope", X).status_code == 404


@slow
@needs_ray
def test_a_client_that_leaves_is_an_abort(served: Served) -> None:
    with served.client.stream("POST", TEXT, json=STORY | {"max_tokens": 1900, "stream": True}) as got:
        for _, _ in zip(range(5), got.iter_lines(), strict=False):
            pass
    served.wait_idle()


@slow
@needs_ray
def test_a_killed_replica_is_told_and_comes_back(served: Served) -> None:
    """Both are killed under twenty streams and ten whole answers: each client gets an error, soon; then they serve again."""
    before = processes("ServeReplica:atom_mini:engine")
    assert len(before) == 2
    long = STORY | {"max_tokens": 1900}

    def read(number: int) -> tuple[str, float]:
        got = served.post(TEXT, long | {"seed": number, "stream": number < 20})
        return got.text, time.perf_counter()

    with ThreadPoolExecutor(30) as pool:
        reading = [pool.submit(read, number) for number in range(30)]
        time.sleep(1.5)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        ends = [one.result() for one in reading]
    assert all("engine_dead" in text for text, _ in ends), ends
    assert all(text.endswith("data: [DONE]\n\n") for text, _ in ends[:20] if text.startswith("data"))
    assert max(at for _, at in ends) - killed < 5
    assert served.post(TEXT, X | {"prompt": "12 + 7 ="}).json()["choices"][0]["text"] == " 19"
    served.wait_for(2)
    assert not set(before) & set(processes("ServeReplica:atom_mini:engine"))


def hit_rate(served: Served, kind: str) -> float:
    """Sixteen conversations of six turns, eight at a time; a turn is everybody's before the next one, in another order."""
    texts, used, order = dict.fromkeys(range(16), ""), [], list(range(16))

    def say(number: int) -> None:
        texts[number] += f"Mia-{kind}-{number} has {len(texts[number])} cats. " * 12
        body = X | {"prompt": texts[number], "max_tokens": 16}
        got = served.post(TEXT, body, headers={"x-session-id": f"{kind}-{number}"}).json()
        texts[number] += got["choices"][0]["text"]
        used.append(got["usage"])

    with ThreadPoolExecutor(8) as pool:
        for turn in range(6):
            random.Random(turn).shuffle(order)
            [*pool.map(say, order)]
    return sum(u["prompt_tokens_details"]["cached_tokens"] for u in used) / sum(u["prompt_tokens"] for u in used)


@slow
@needs_ray
def test_routes_and_full_queues(served: Served) -> None:
    """By prefix and by session more is cached than by load; where no more may wait, a client is told 429."""
    rates = {}
    for route in ("load", "prefix", "session"):
        served.run(route=route)
        rates[route] = hit_rate(served, route)
    assert min(rates["prefix"], rates["session"]) > rates["load"] + 0.1, rates
    served.run(replicas=1, max_ongoing=1, max_queue=2)
    with ThreadPoolExecutor(12) as pool:
        found = [*pool.map(lambda i: served.post(TEXT, STORY | {"seed": i, "max_tokens": 100}), range(12))]
    codes = sorted(got.status_code for got in found)
    assert codes[0] == 200 and codes[-1] == 429 and set(codes) == {200, 429}
    assert all("max_queue=2" in got.json()["error"]["message"] for got in found if got.status_code == 429)


@slow
@needs_ray
def test_numbers_are_those_of_all_engines(served: Served) -> None:
    """In Prometheus' format, each with the engine's name; together they have counted every token."""
    from prometheus_client.parser import text_string_to_metric_families

    served.run(route="load")
    bodies = [STORY | {"seed": i, "max_tokens": 20} for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        tokens = sum(pool.map(lambda body: served.post(TEXT, body).json()["usage"]["completion_tokens"], bodies))
    text = served.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counts = {s.labels["replica"]: s.value for s in families["vllm:generation_tokens"].samples if s.name.endswith("_total")}
    assert len(counts) == 2 and min(counts.values()) > 0 and sum(counts.values()) == tokens == 480
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert len(families["vllm:num_requests_running"].samples) == 2


@slow
@needs_ray
def test_more_load_has_more_engines_and_less_has_fewer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 2, which both answer, and back; with shorter delays than a fleet's."""
    plain = fleet.scaling
    short = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 11}  # numbers come every 10 s
    monkeypatch.setattr(fleet, "scaling", lambda settings: plain(settings) | short)
    served.run(replicas=1, max_replicas=2, max_ongoing=4)

    def busy(number: int) -> None:
        while not enough:
            assert served.post(TEXT, STORY | {"seed": number, "max_tokens": 100}).status_code == 200

    enough: list[bool] = []
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(busy, number) for number in range(8)]
        try:
            served.wait_for(2)
            time.sleep(2)
            lines = served.client.get("/metrics").text.splitlines()
            samples = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
        finally:
            enough.append(True)
        [one.result() for one in asking]
    assert len(samples) == 2 and all(float(line.split()[-1]) > 0 for line in samples)
    served.wait_for(1)
    assert served.post(TEXT, X).status_code == 200


@slow
@needs_ray
def test_an_engine_whose_process_is_killed_is_replaced_in_seconds(served: Served) -> None:
    """Meanwhile its replica answers 503 for it."""
    served.run(engine_process=True)
    (engine, *_) = children(processes("ServeReplica:atom_mini:engine")[0])
    os.kill(engine, signal.SIGKILL)
    killed = last = time.perf_counter()
    codes = []
    while time.perf_counter() < killed + 20:
        codes.append(served.post(TEXT, X | {"prompt": f"{len(codes)} + 7 ="}).status_code)
        last = last if codes[-1] == 200 else time.perf_counter()
        time.sleep(0.05)
    assert set(codes) == {200, 503} and last - killed < 8
    served.wait_for(2)


@slow
@needs_ray
def test_who_has_no_token_is_refused(served: Served) -> None:
    """The cluster listens on every interface, so this is what closes it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init('{address}'); print('in')"
    assert address.startswith("127.0.0.2:")
    for more in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}):
        done = subprocess.run([sys.executable, "-c", code], env=ENV | more, capture_output=True, text=True, timeout=100)
        assert done.returncode != 0 and "in" not in done.stdout.split(), done.stdout
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@slow
@needs_ray
def test_an_address_where_nobody_answers_is_no_wait() -> None:
    with pytest.raises(OSError, match="refused"):
        fleet.start_ray(f"127.0.0.1:{free_port()}")


@slow
@needs_ray
def test_a_file_may_ask_for_more_than_a_server_queues(tmp_path: Path) -> None:
    """5,120 answers at once; two engines share what is less than a batch."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(request(str(i), ["x"] * 128, max_tokens=1, n=4, ignore_eos=True) for i in range(10)))
    command = [*COMMAND, "batch", str(source), str(target), *ONE, "--replicas", "2", "--cpus", "0.5", "--no-engine-process"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line)["response"] for line in target.read_text().splitlines()]
    assert [answer["status_code"] for answer in told] == [200] * 10
    assert all(len(answer["body"]["choices"]) == 512 for answer in told)


COMMAND = [sys.executable, "-m", "atom_mini"]
ONE = ["--model", "tiny", "--device", "cpu", "--num-kvcache-blocks", "400"]


@slow
@needs_ray
def test_a_file_of_1000_requests_outlives_a_kill(tmp_path: Path) -> None:
    """Killed without warning in the middle, and its last line torn: the same command goes on. Equal to `generate`."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"{i % 40} + {i // 40} =" for i in range(1000)]
    source.write_text("\n".join(request(str(i), text, max_tokens=8) for i, text in enumerate(prompts)))
    command = [*COMMAND, "batch", str(source), str(target), *ONE, "--batch-size", "50", "--cpus", "0.5", "--no-engine-process"]
    process = subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL)
    while not target.exists() or target.read_bytes().count(b"\n") < 200:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = target.read_text().splitlines(keepends=True)
    assert 200 <= len(kept) < 1000
    target.write_text("".join(kept[:-1]) + kept[-1][:30])
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = target.read_text().splitlines(keepends=True)
    assert len(lines) == 1000 and lines[: len(kept) - 1] == kept[:-1]
    found = {told["custom_id"]: told["response"]["body"]["choices"][0]["text"] for told in map(json.loads, lines)}
    with LLM(**SMALL) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=8), use_tqdm=False)
    assert [found[str(i)] for i in range(1000)] == [out.text for out in outs]
    again = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and len(target.read_text().splitlines()) == 1000 and "1000/1000" in again.stderr


@slow
@needs_ray
def test_the_command_serves_and_ends(tmp_path: Path) -> None:
    """A port that is taken is an error before anything starts; SIGTERM finishes answers or tells, then ends all, exit code 0."""
    port = free_port()
    command = [*COMMAND, "fleet", *ONE, "--port", str(port), "--cpus", "0.5", "--api-key", "k", "--grace", "4"]
    with socket.create_server(("127.0.0.1", port)):
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "in use" in done.stderr
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and f"http://127.0.0.1:{port}" in process.stdout.readline()
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"authorization": "Bearer k"})
    assert client.post(TEXT, json=X | {"prompt": "12 + 7 ="}).json()["choices"][0]["text"] == " 19"
    assert client.get("/v1/models", headers={"authorization": "Bearer x"}).status_code == 401
    long = STORY | {"stream": True}
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(lambda n: client.post(TEXT, json=long | {"max_tokens": n}).text, n) for n in (300, 300, 1900, 1900)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        texts = [one.result() for one in reading]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert all(("engine has died" in text) or ('"finish_reason":"length"' in text) for text in texts)
    with pytest.raises(httpx.ConnectError):
        client.get("/health")
    client.close()


@slow
@needs_ray
def test_what_has_no_room_is_refused(served: Served) -> None:
    """Ray would wait for a machine that never comes."""
    for more in ({"replicas": 64, "cpus": 1.0}, {"device": "cuda", "tensor_parallel_size": 2, "engine_process": True}):
        with pytest.raises(ValueError, match=r"need (64 CPU|4 GPU), here are"):
            served.run(**more)


@pytest.fixture
def commanded() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a fleet's process, with pipes for what it says."""
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [*COMMAND, "fleet", *ONE, "--cpus", "0.5", "--no-engine-process", *words]
        started.append(subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@slow
@needs_ray
def test_on_a_ray_that_it_joins_it_leaves_others_alone(served: Served, commanded: Callable[..., subprocess.Popen[str]]) -> None:
    """Serve runs there, at another port: refused. At that port: it serves, and what it takes back at the end is its own; also
    if it is ended while its engine starts."""
    import ray

    class Other:
        def __call__(self) -> str:
            return "another"

    def others() -> str:
        return served.client.get("/other").text

    served.serve.delete("atom_mini")
    other = served.serve.deployment(Other, ray_actor_options={"num_cpus": 0})
    served.serve.run(other.bind(), name="other", route_prefix="/other")
    words = ["--address", ray.get_runtime_context().gcs_address, "--grace", "2", "--port"]
    process = commanded(*words, str(free_port()))
    _, said = process.communicate(timeout=100)
    assert process.returncode == 2 and f"Ray Serve listens at port={served.port} there" in said and others() == "another", said

    process = commanded(*words, str(served.port))
    assert process.stdout is not None and f"http://127.0.0.1:{served.port}" in process.stdout.readline()
    assert served.post(TEXT, X | {"prompt": "12 + 7 ="}).json()["choices"][0]["text"] == " 19" and others() == "another"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and [*served.serve.status().applications] == ["other"] and others() == "another"

    process = commanded(*words, str(served.port))
    while "atom_mini" not in served.serve.status().applications:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130 and [*served.serve.status().applications] == ["other"] and others() == "another"
