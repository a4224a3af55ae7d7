"""The fleet: an engine's replica, without Ray; and on Ray (`make test-ray`), the same tokens, killed
replicas, and full queues."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from atom_mini import LLM, SamplingParams
from atom_mini.__main__ import main
from atom_mini.serving import fleet
from atom_mini.serving.fleet import Engine, Fleet
from atom_mini.serving.server import Serve

SMALL: dict[str, Any] = {"model": "tiny", "device": "cpu", "num_kvcache_blocks": 400}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"
STORY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0.8, "ignore_eos": True, "seed": 1}
X: dict[str, Any] = {"model": "tiny", "prompt": "x"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is 20 + 21?"}]}


# A replica


def replica(work: Any, **settings: Any) -> Any:
    """What `work(engine, client)` returns, for a replica in this process."""

    async def main() -> Any:
        engine = Engine(SMALL, Serve(**settings))
        transport = httpx.ASGITransport(fleet.make_app())
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await asyncio.wait_for(work(engine, client), 60)
        finally:
            await engine.server.engine.close()

    return asyncio.run(main())


def test_a_replica_is_a_server_without_the_routes_of_a_single_engine() -> None:
    async def work(engine: Engine, client: httpx.AsyncClient) -> None:
        got = await client.post(TALK, json=CHAT, headers={"authorization": "Bearer k"})
        assert got.json()["choices"][0]["message"]["content"] == "20 + 21 = 41."
        assert (await client.post(TALK, json=CHAT)).status_code == 401
        for path in ("/", "/events", "/metrics"):
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 404
        assert (await client.get("/health")).json()["running"] == 0
        await engine.check_health()
        engine.server.engine.error = RuntimeError("it broke")
        with pytest.raises(RuntimeError, match="it broke"):
            await engine.check_health()

    replica(work, api_key="k")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"replicas": 0}, "replicas=0"), ({"replicas": 3, "max_replicas": 2}, "max_replicas=2 is below replicas=3"),
     ({"port": 0}, "port=0"), ({"cpus": -1}, "cpus=-1"),
     ({"max_ongoing": 0}, "max_ongoing=0"), ({"max_queue": 0}, "max_queue=0")],
)  # fmt: skip
def test_impossible_fleets_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fleet(**wrong)


def test_wrong_options_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "start_ray", lambda address: pytest.fail("it starts"))
    monkeypatch.setattr(fleet, "AsyncLLM", lambda **_: pytest.fail("it starts"))
    monkeypatch.setitem(sys.modules, "ray", None)
    for words, says in (
        (["--num-kvcache-blocks", "0"], "num_kvcache_blocks=0"), (["--model", "/nowhere"], "'/nowhere' is not a folder"),
        (["--max-replicas", "0"], "max_replicas=0"),
    ):  # fmt: skip
        assert main(["fleet", *words, "--port", str(free_port())]) == 2
        assert says in capsys.readouterr().err


COMMAND = [sys.executable, "-m", "atom_mini"]
ONE = ["--model", "tiny", "--device", "cpu", "--num-kvcache-blocks", "400"]
ENV = os.environ | {"TOKENIZERS_PARALLELISM": "false"}


# On Ray

on_ray = pytest.mark.ray
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: make test-ray installs it")


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


class Served:
    """A fleet of two engines in this session, and a client."""

    def __init__(self) -> None:
        fleet.start_ray(None)  # before Ray is imported
        from ray import serve

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
        """Wait until both engines are idle. Each is asked about ten times."""
        for _ in range(100):
            states = [self.client.get("/health").json() for _ in range(20)]
            if all(state["running"] == 0 and state["free_blocks"] == 400 for state in states):
                return
            time.sleep(0.1)
        raise AssertionError(states)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    import ray

    served.run()
    yield served
    served.client.close()
    served.serve.shutdown()
    ray.shutdown()


@on_ray
@needs_ray
def test_the_same_tokens_through_ray(served: Served) -> None:
    """As `generate`: text and chat, streamed or whole, one by one and forty at once."""
    with LLM(**SMALL) as llm:
        params = [SamplingParams(seed=i, max_tokens=30, temperature=0.8, ignore_eos=True) for i in range(40)]
        texts = [out.text for out in llm.generate([STORY["prompt"]] * 40, params, use_tqdm=False)]
        (out,) = llm.chat(CHAT["messages"])
    assert served.post(TALK, CHAT).json()["choices"][0]["message"]["content"] == out.text
    bodies = [STORY | {"seed": i, "max_tokens": 30} for i in range(40)]
    with ThreadPoolExecutor(40) as pool:
        whole = [*pool.map(lambda body: served.post(TEXT, body).json()["choices"][0]["text"], bodies)]
        streamed = [*pool.map(lambda body: "".join(e["choices"][0]["text"] for e in served.events(body)), bodies)]
    assert whole == streamed == texts
    assert served.post(TEXT, X | {"n": 0}).status_code == 400 and served.post("/nope", X).status_code == 404


@on_ray
@needs_ray
def test_a_killed_replica_breaks_its_answers_and_comes_back(served: Served) -> None:
    """Both are killed under twenty streams and ten whole answers: each client gets an error, and then they serve again."""
    before = processes("ServeReplica:atom_mini:engine")
    assert len(before) == 2
    long, order = STORY | {"max_tokens": 1900}, list[str]()

    def read(number: int) -> None:
        try:
            failed = served.post(TEXT, long | {"seed": number, "stream": number < 20}).status_code >= 500
        except httpx.RemoteProtocolError:  # in the middle of a stream
            failed = True
        order.append("an error" if failed else "an answer")

    def ask() -> None:
        """Until an engine is there again. Nobody may wait that long for an error."""
        while (got := served.post(TEXT, X | {"prompt": "12 + 7 ="})).status_code != 200:
            time.sleep(0.1)
        order.append(got.json()["choices"][0]["text"])

    with ThreadPoolExecutor(31) as pool:
        asked = [pool.submit(read, number) for number in range(30)]
        time.sleep(1.5)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        asked.append(pool.submit(ask))
        for one in asked:
            one.result()
    assert order == ["an error"] * 30 + [" 19"]
    served.wait_for(2)
    assert not set(before) & set(processes("ServeReplica:atom_mini:engine"))


@on_ray
@needs_ray
def test_a_full_queue_is_a_503(served: Served) -> None:
    served.run(replicas=1, max_ongoing=1, max_queue=2)
    with ThreadPoolExecutor(12) as pool:
        found = [*pool.map(lambda i: served.post(TEXT, STORY | {"seed": i, "max_tokens": 100}), range(12))]
    assert {got.status_code for got in found} == {200, 503}
    assert all("max_queued_requests=2" in got.text for got in found if got.status_code == 503)


@on_ray
@needs_ray
def test_a_wrong_token_is_refused(served: Served) -> None:
    """The cluster listens on every interface, so this is what closes it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    code = f"import ray; ray.init('{address}'); print('in')"
    for more in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}):
        done = subprocess.run([sys.executable, "-c", code], env=ENV | more, capture_output=True, text=True, timeout=100)
        assert done.returncode != 0 and "in" not in done.stdout.split(), done.stdout
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@on_ray
@needs_ray
def test_the_command_serves_and_ends(tmp_path: Path) -> None:
    """A port that is taken is an error before anything starts; SIGTERM gives answers time, then ends all, exit code 0."""
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

    def read(count: int) -> str:
        try:
            return client.post(TEXT, json=STORY | {"stream": True, "max_tokens": count}).text
        except httpx.RemoteProtocolError:
            return "broken"

    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(read, count) for count in (300, 300, 1900, 1900)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        texts = [one.result() for one in reading]
    assert all(text == "broken" or '"finish_reason":"length"' in text for text in texts), texts
    with pytest.raises(httpx.ConnectError):
        client.get("/health")
    client.close()
