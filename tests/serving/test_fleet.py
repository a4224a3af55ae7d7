"""The fleet: an engine's replica and files of requests, without Ray; and on Ray (`make test-ray`), the same tokens, killed
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


def request(name: str, prompt: Any, url: str = TEXT, **more: Any) -> str:
    """A line of a file."""
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", "prompt": prompt} | more})


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


# Files


@pytest.mark.parametrize(
    ("lines", "says"),
    [(["{"], "line 1"), ([request("a", "x"), "[]"], "line 2"), ([request("a", "x")] * 2, "line 2: custom_id='a' is not unique"),
     ([request("a", "x", url="/v1/embeddings")], "embeddings"), ([request("a", "x", stream=True)], "line 1: stream=true"),
     (['{"custom_id": "a"}'], "method"), ([request("a", "x", model="gpt")], "line 1: model='gpt' must be 'tiny'"),
     ([request("a", "x")[:-1] + ', "priority": 1}'], "line 1: .*priority")],
)  # fmt: skip
def test_a_wrong_line_is_refused_by_its_number(lines: list[str], says: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=says):
        fleet.read_work(source, "tiny")


def test_files_of_answers(tmp_path: Path) -> None:
    """A last line that was cut off is removed. Any other file stays as it is, above all the file of
    requests, if it is named twice. U+2028 and U+0085 end lines for Python, not for JSON."""
    target, row = tmp_path / "out.jsonl", '{"custom_id": "%s", "response": {"status_code": 200}}\n'
    assert fleet.read_answers(target) == {}
    for rest in ("", "{", '{"custom_id": "c"', row % "c"):  # without its line end it may be cut, too
        target.write_text(row % "a" + row % "b" + rest[:-1])
        assert fleet.read_answers(target) == {"a": 200, "b": 200}
        assert target.read_text() == row % "a" + row % "b"
    for text in ("something else\n", "something else", request("a", "x"), request("a", "x") + "\n", "[]"):
        target.write_text(text)
        with pytest.raises(ValueError, match="has a line that is not an answer: name another file"):
            fleet.read_answers(target)
        assert target.read_text() == text
    line = json.dumps(json.loads(request("a", "a\u2028b\x85c")), ensure_ascii=False)
    target.write_text(f"\n{line}\r\n\n", encoding="utf-8")
    assert fleet.read_work(target, "tiny")["a"].body["prompt"] == "a\u2028b\x85c"


def answers(lines: list[str], source: Path) -> list[Any]:
    """The answers to `lines`, by `fleet.answer_all`."""
    source.write_text("\n".join(lines))
    rows: list[bytes] = []
    work = fleet.read_work(source, "tiny").values()
    asyncio.run(asyncio.wait_for(fleet.answer_all([*work], SMALL, 10, rows.append), 100))
    return sorted(map(json.loads, rows), key=lambda row: row["custom_id"])


def test_the_server_answers_a_line(tmp_path: Path) -> None:
    lines = [request("a", "12 + 7 ="), request("b", "x", temperature=-1), request("c", "x", tools=[1])]
    lines += [json.dumps(json.loads(request("d", "", TALK)) | {"body": CHAT})]
    a, b, c, d = answers(lines, tmp_path / "in.jsonl")
    assert [x["custom_id"] for x in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert [x["response"]["status_code"] for x in (a, b, c, d)] == [200, 400, 400, 200]
    assert a["response"]["body"]["choices"][0]["text"] == " 19" and b["response"]["body"]["error"]["param"] == "temperature"
    assert d["response"]["body"]["choices"][0]["message"]["content"] == "20 + 21 = 41."
    assert a["error"] is None
    many = [request(str(i), ["x"] * 128, max_tokens=1, n=4) for i in range(10)]  # over max_queue
    found = answers(many, tmp_path / "in.jsonl")
    assert [len(row["response"]["body"]["choices"]) for row in found] == [512] * 10


def test_wrong_options_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "start_ray", lambda address: pytest.fail("it starts"))
    monkeypatch.setattr(fleet, "AsyncLLM", lambda **_: pytest.fail("it starts"))
    monkeypatch.setitem(sys.modules, "ray", None)
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x", model="gpt"))
    batch = ["batch", str(source), str(tmp_path / "out.jsonl")]
    for words, says in (
        (["fleet", "--num-kvcache-blocks", "0"], "num_kvcache_blocks=0"),
        (["fleet", "--model", "/nowhere"], "'/nowhere' is not a folder"),
        (["fleet", "--max-replicas", "0"], "max_replicas=0"), (batch, "line 1: model='gpt' must be 'tiny'"),
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
    rows = [json.dumps({"custom_id": name, "response": {"status_code": code, "body": {}}}) for name, code in codes.items()]

    async def answer_all(lines: Any, options: Any, size: int, write: Any) -> None:
        for row in rows:
            write(row.encode() + b"\n")

    monkeypatch.setattr(fleet, "answer_all", answer_all)
    for _ in range(2):
        assert main(["batch", str(source), str(target)]) == (1 if failed else 0)
        said = capsys.readouterr().err
        assert (f"{failed} of 2 answers are errors" in said) == (failed > 0)
    assert len(target.read_text().splitlines()) == 2


COMMAND = [sys.executable, "-m", "atom_mini"]
ONE = ["--model", "tiny", "--device", "cpu", "--num-kvcache-blocks", "400"]
ENV = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
alone = pytest.mark.alone  # it starts a process


@alone
def test_a_file_of_1000_requests_outlives_a_kill(tmp_path: Path) -> None:
    """Killed without warning in the middle, and its last line torn: the same command goes on. Equal to `generate`."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"{i % 40} + {i // 40} =" for i in range(1000)]
    source.write_text("\n".join(request(str(i), text, max_tokens=8) for i, text in enumerate(prompts)))
    command = [*COMMAND, "batch", str(source), str(target), *ONE, "--batch-size", "50"]
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
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in map(json.loads, lines)}
    with LLM(**SMALL) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=8), use_tqdm=False)
    assert [found[str(i)] for i in range(1000)] == [out.text for out in outs]
    again = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0 and len(target.read_text().splitlines()) == 1000 and "1000/1000" in again.stderr


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
    """Both are killed under twenty streams and ten whole answers: each client gets an error, soon; then they serve again."""
    before = processes("ServeReplica:atom_mini:engine")
    assert len(before) == 2
    long = STORY | {"max_tokens": 1900}

    def read(number: int) -> tuple[bool, float]:
        try:
            failed = served.post(TEXT, long | {"seed": number, "stream": number < 20}).status_code >= 500
        except httpx.RemoteProtocolError:  # in the middle of a stream
            failed = True
        return failed, time.perf_counter()

    with ThreadPoolExecutor(30) as pool:
        reading = [pool.submit(read, number) for number in range(30)]
        time.sleep(1.5)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        ends = [one.result() for one in reading]
    assert all(failed for failed, _ in ends), ends
    assert max(at for _, at in ends) - killed < 5
    assert served.post(TEXT, X | {"prompt": "12 + 7 ="}).json()["choices"][0]["text"] == " 19"
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
