"""The server reports what the engine did, keeps its limits, and notices clients that leave. Tests name the public threads of
the faults that they cover."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from atom_mini import SamplingParams
from atom_mini.errors import NOT_HERE
from atom_mini.serving.async_llm import AsyncLLM
from atom_mini.serving.protocol import NEUTRAL, Offsets
from atom_mini.serving.server import GracefulServer, Serve, Server

processes = pytest.mark.processes
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 900, "max_num_seqs": 256}
PROMPT = "Once upon a time"
STORY = {"model": "tiny", "prompt": PROMPT, "temperature": 0.8, "ignore_eos": True, "seed": 1}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is 20 + 21?"}]}
X: dict[str, Any] = {"model": "tiny", "prompt": "x"}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)


class Served:
    """A server on a free port, in a thread, and a client."""

    def __init__(self, **settings: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = SMALL | settings.pop("engine", {})
        self.engine = AsyncLLM(settings.pop("model", "tiny"), **options)
        self.app = Server(self.engine, Serve(**settings))
        self.graceful = GracefulServer(self.app)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        self.thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    async def run(self) -> None:
        await self.graceful.serve([self.listener])
        await self.engine.close()

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """What a stream says, without its end, which must be there."""
        return events(self.post(path, body | {"stream": True}))

    def close(self) -> None:
        self.client.close()
        self.graceful.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def wait_idle(self) -> None:
        manager = self.engine.llm.engine_core.scheduler.block_manager
        for _ in range(1000):
            left = self.engine.streams or self.app.streams
            if not left and manager.num_free_blocks == SMALL["num_kvcache_blocks"]:
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.engine.streams} are left, {manager.num_free_blocks} blocks are free")


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream"), response.text
    *found, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    served = Served(**settings)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def aborts(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found, plain = [], served.engine.llm.engine_core.abort

    def counted(request_id: int, why: str = "abort") -> Any:
        found.append(request_id)
        return plain(request_id, why)

    monkeypatch.setattr(served.engine.llm.engine_core, "abort", counted)
    return found


def complain(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """It is an error in OpenAI's shape, all four fields there; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]


# Truth


@pytest.mark.parametrize("after", [0, 3])
def test_a_failure_is_never_a_stop(served: Served, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """lattice #933: before the first piece it is status 500, after it the stream's last event; and the next one is served."""
    runner: Any = served.engine.llm.engine_core.runner
    plain, steps = runner.forward, []

    def failing(batch: Any) -> Any:
        steps.append(batch)
        return plain(batch) if len(steps) <= after else 1 / 0

    with monkeypatch.context() as patched:
        patched.setattr(runner, "forward", failing)
        response = served.post(TEXT, STORY | {"stream": True})
        assert served.client.get("/health").status_code == 503
    if after:
        *pieces, last = events(response)
        assert all(piece["choices"][0]["finish_reason"] is None for piece in pieces) and pieces
        assert "ZeroDivisionError" in last["error"]["message"] and last["error"]["type"] == "server_error"
    else:
        assert "ZeroDivisionError" in complain(response, 500)
    assert served.post(TEXT, {"model": "tiny", "prompt": "12 + 7 ="}).json()["choices"][0]["text"] == " 19"
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_internal_error_is_a_500(served: Served, monkeypatch: pytest.MonkeyPatch, is_stream: bool) -> None:
    """Whatever a handler raises: a document with status 500, or a stream's last event."""

    def broken(_: Any) -> None:
        raise KeyError

    with monkeypatch.context() as patched:
        patched.setattr(served.app.meters, "finish", broken)
        response = served.post(TEXT, STORY | {"stream": is_stream, "max_tokens": 3})
    assert "KeyError" in (events(response)[-1]["error"]["message"] if is_stream else complain(response, 500))
    served.wait_idle()


def test_usage_is_counted_only_when_asked_for(served: Served) -> None:
    """vLLM #36379 (`{}` was answered with usage), ATOM #1711 (its chunk must have choices: []);
    vLLM's `continuous_usage_stats` count over all answers in each chunk."""
    for options in ({}, {"include_usage": False}, {"continuous_usage_stats": True}):
        chunks = served.events(TALK, CHAT | {"stream_options": options})
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    *chunks, last = served.events(TALK, CHAT | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    whole = served.post(TALK, CHAT).json()["usage"]
    cached = {"prompt_tokens_details": 0}  # now they are
    assert last["usage"] | cached == whole | cached
    body = {"prompt": [*range(100, 164)], "max_tokens": 1}
    counts = [served.post(TEXT, body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in counts] == [0, 48]
    asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = served.events(TEXT, STORY | asked | {"max_tokens": 6, "n": 2})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]} == {4}


def test_the_shape_of_a_chat(served: Served) -> None:
    """OpenAI's schemas, whose null fields are there. The role comes first, with an empty content,
    once for each answer (ATOM #1803)."""
    found = served.post(TALK, CHAT).json()
    assert found["id"].startswith("chatcmpl-") and found["choices"][0]["message"]["refusal"] is None
    fields = {"index", "message", "logprobs", "finish_reason"}
    assert {*found} >= {"object", "created", "model", "usage"} and {*found["choices"][0]} == fields
    chunks = served.events(TALK, CHAT | {"n": 2, "seed": 1})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all({*choice} == fields - {"message"} | {"delta"} for choice in choices)
    deltas = [choice["delta"] for choice in choices]
    assert deltas[:2] == [{"role": "assistant", "content": ""}] * 2
    assert {choice["index"] for choice in choices[:2]} == {0, 1}
    assert not any("role" in delta for delta in deltas[2:])


def test_several_answers(served: Served) -> None:
    """To text, texts, ids, or lists of ids: `n` to each, in order, with one count of each prompt.
    With a seed they are different, and the same again. Without `max_tokens` an answer may be as
    long as the context."""
    ids = served.engine.llm.tokenizer.encode("12 + 7 =")
    for prompt in (["12 + 7 ="], ids, [ids]):
        found = served.post(TEXT, X | {"prompt": prompt}).json()
        assert found["choices"][0]["text"] == " 19"
    found = served.post(TEXT, X | {"prompt": ["12 + 7 =", "5 + 4 ="], "n": 2}).json()
    assert [choice["text"] for choice in found["choices"]] == [" 19", " 19", " 9", " 9"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 2 * len(ids) - 1
    body = STORY | {"n": 3, "max_tokens": 12}
    first, again = (served.post(TEXT, body).json()["choices"] for _ in range(2))
    assert first == again and len({choice["text"] for choice in first}) == 3
    found = served.post(TEXT, X | {"prompt": [7] * 2000, "ignore_eos": True}).json()
    assert found["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize("path", [TEXT, TALK])
def test_logprobs_streamed_are_those_of_the_whole(served: Served, path: str) -> None:
    body = STORY | {"max_tokens": 9, "logprobs": 2} if path == TEXT else CHAT | {"logprobs": True, "top_logprobs": 2}
    served.post(path, body)  # so that both find the same blocks in the prefix cache: the last digit depends on it
    found = served.post(path, body).json()
    whole = found["choices"][0]["logprobs"]
    chunks = [event["choices"][0] for event in served.events(path, body)]
    parts = [chunk["logprobs"] for chunk in chunks]
    reason = "length" if path == TEXT else "stop"  # mlx-vlm #1215 (always "stop"), GenieX #1246
    assert found["choices"][0]["finish_reason"] == chunks[-1]["finish_reason"] == reason
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}
    if path == TEXT:
        assert "".join(chunk["text"] for chunk in chunks) == found["choices"][0]["text"]
    for name, values in whole.items():
        joined = [value for part in parts if part for value in part[name] or ()]
        assert joined == (values or []), name
    tops = whole["top_logprobs"] if path == TEXT else [row["top_logprobs"] for row in whole["content"]]
    if path == TEXT:  # with the chosen token, as OpenAI documents it
        for top, name, value in zip(tops, whole["tokens"], whole["token_logprobs"], strict=True):
            assert top[name] == value and len(top) == max(2, 1 + [*top].index(name))
    else:
        assert tops and all(len(top) == 2 for top in tops)


def test_no_likely_token_is_lost_behind_another_of_its_text(served: Served) -> None:
    """Parts of a character all have the text U+FFFD: in a completion their bytes tell them apart."""
    body = {"prompt": "\U0001f600\U0001f389 emoji: \U0001f600", "max_tokens": 4, "logprobs": 5}
    found = served.post(TEXT, body).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [rf"bytes:\x{byte}" for byte in ("f0", "9f", "98", "80")]
    assert [max(top, key=top.get) for top in found["top_logprobs"]] == found["tokens"]
    assert all(len(top) == 5 for top in found["top_logprobs"])


def test_offsets_are_places_in_the_text(served: Served) -> None:
    """The tokens of one emoji have its place, in a stream, too; a special token has no characters."""
    body = {"prompt": "\U0001f600\U0001f389 emoji: \U0001f600\U0001f389\U0001f600", "max_tokens": 20, "logprobs": 0}
    whole = served.post(TEXT, body).json()["choices"][0]
    assert whole["text"] == 5 * "\U0001f600"  # four tokens each
    assert whole["logprobs"]["text_offset"] == [i // 4 for i in range(20)]
    parts = [event["choices"][0]["logprobs"] for event in served.events(TEXT, body)]
    assert [at for part in parts if part for at in part["text_offset"]] == [i // 4 for i in range(20)]
    tokenizer, offsets = served.engine.llm.tokenizer, Offsets()
    assert tokenizer is not None
    for text, end in (("a", 1), ("<|im_end|>", 1), ("\xe9", 2), (" ", 3)):
        for id in tokenizer.encode(text):
            offsets.next(tokenizer, id)
        assert offsets.size == end, text


def test_metrics_have_vllms_names(served: Served) -> None:
    def read() -> list[float]:
        text = served.client.get("/metrics").text
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        names = ("generation_tokens_total", "prompt_tokens_total")
        names += ("time_to_first_token_seconds_count", "num_requests_waiting")
        return [float(found[f'vllm:{name}{{model_name="tiny"}}']) for name in names]

    before = read()
    served.post(TEXT, STORY | {"max_tokens": 7})
    assert [b - a for a, b in zip(before, read(), strict=True)] == [7, 4, 1, 0]


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_count_the_second_pool(process: bool) -> None:
    """Tokens found on the device, and those that came back from host memory, under vLLM's names."""
    engine = {"num_kvcache_blocks": 10, "kv_offloading_size": 0.01, "engine_process": process}
    first, other = [[n + i % 50 for i in range(130)] for n in (5, 60)]
    with serving(engine=engine) as server:
        for prompt in (first, first, other, first):
            server.post(TEXT, {"model": "tiny", "prompt": prompt, "max_tokens": 1})
        text = server.client.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    names = ("prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits")
    counted = [int(float(found[f'vllm:{name}_total{{model_name="tiny"}}'])) for name in names]
    assert counted[0] + counted[2] == 2 * 128 and counted[1] == 4 * 130 - counted[0]
    assert 128 <= counted[0] < 256


def test_unserved_fields_are_refused_by_name(served: Served) -> None:
    """Never ignored; null, and a value that asks for nothing, pass. Fields that change nothing do,
    too, and what vLLM's clients send; what is never served has its reason."""
    for name in NEUTRAL:
        assert name in complain(served.post(TALK, CHAT | {name: [{"type": "x"}]}), 400, name)
    nothing: dict[str, Any] = dict.fromkeys(NOT_HERE) | dict.fromkeys(NEUTRAL)
    assert served.post(TALK, CHAT | nothing | {"max_tokens": 1}).status_code == 200
    nothing = {name: values[-1] for name, values in NEUTRAL.items() if values}
    nothing |= {"metadata": {"a": "b"}, "store": True, "tool_choice": "none", "guided_json": None}
    assert served.post(TALK, CHAT | nothing | {"max_tokens": 1}).status_code == 200
    for name, value in (("guided_decoding", 5), ("best_of", 5), ("skip_special_tokens", False)):
        assert NOT_HERE[name] in complain(served.post(TEXT, X | {name: value}), 400, name)


PARTS = [{"type": "text", "text": "Look"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
WRONG: list[tuple[dict[str, Any], str]] = [  # of a completion; of a chat, if it has messages
    (X | {"tempreature": 1}, "tempreature"), (X | {"tempreature": None}, "tempreature"),
    (X | {"n": 0}, "n"), (X | {"temperature": -1}, "temperature"), (X | {"seed": 0.5}, "seed"),
    (X | {"max_tokens": 0}, "max_tokens"), (X | {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"model": "tiny"}, "prompt"), (X | {"prompt": []}, "prompt"), (X | {"stop": [""]}, "stop"),
    (X | {"stop": ["x"] * 17}, "stop"), (X | {"stop": "x" * 1025}, "stop"),
    (CHAT | {"stop": ["x", "y" * 1025]}, "stop"), (X | {"logprobs": 21}, "logprobs"),
    (X | {"presence_penalty": 3}, "presence_penalty"), (X | {"seed": "9" * 10**6}, "seed"),
    (X | {"tools": "9" * 10**6}, "tools"),
    (X | {"stop_token_ids": [10**9]}, "stop_token_ids"), (X | {"prompt": [10**9]}, "prompt"),
    (X | {"min_tokens": 5000, "max_tokens": 6000}, "min_tokens"),
    (X | {"prompt": [1] * 2049}, "prompt"), (X | {"prompt": "a" * 10**6}, "prompt"),
    (X | {"prompt": [7] * 2049, "stream": True}, "prompt"),  # no first chunk (ATOM #1710)
    (X | {"stream_options": {"x": 1}}, "stream_options"), (X | {"prompt": {"a": 1}}, "prompt"),
    (CHAT | {"stream": True, "temperature": -1}, "temperature"),
    (CHAT | {"messages": []}, "messages"), (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT | {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT | {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    (CHAT | {"messages": [{"role": "user", "content": PARTS}]}, "messages"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    (CHAT | {"logprobs": 1}, "logprobs"), (CHAT | {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    (CHAT | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_wrong_field_is_a_400_that_names_it(
    served: Served, body: dict[str, Any], param: str
) -> None:
    """No template comes from a request (CVE-2025-62426), and a misspelt field is not ignored."""
    response = served.post(TALK if "messages" in body else TEXT, body)
    assert "SamplingParams" not in complain(response, 400, param)  # which a client does not have
    assert len(response.content) < 3000  # it does not repeat a megabyte


BODIES = [b"", b"[]", b'{"prompt": NaN}', b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}',
          b"[" * 100_000, b'{"model": "tiny", "prompt": 1e999}']  # fmt: skip


def test_an_invalid_body_is_a_400(served: Served) -> None:
    for body in BODIES:
        response = served.client.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400 and response.json()["error"]["message"], body[:20]


def test_a_chat_in_channels_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gpt-oss: the error says why, and completions are answered."""
    monkeypatch.setattr(served.engine.llm.tokenizer, "chat_template", "<|start|>assistant<|channel|>final<|message|>")
    answer = served.post(TALK, CHAT)
    assert answer.status_code == 400 and "harmony" in answer.json()["error"]["message"]
    assert served.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200


def test_requests_of_vllm_users(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answers are the engine's own: penalties, a least length, a template's options;
    no model is the model, a developer's message the system's, and text comes in parts."""
    llm = served.engine.llm
    for asked in ({"presence_penalty": 1.5}, {"frequency_penalty": -0.5}, {"min_tokens": 20, "stop": ["."]}):
        out = llm.generate(PROMPT, SamplingParams(max_tokens=30, **asked))[0]  # type: ignore[arg-type]
        found = served.post(TEXT, {"prompt": PROMPT, "max_tokens": 30} | asked).json()
        assert (found["model"], found["choices"][0]["text"]) == ("tiny", out.text)
    template = "{% if enable_thinking is false %}12 + 7 ={% endif %}{% if add_generation_prompt %} {% endif %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    more = {"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}}
    assert served.post(TALK, CHAT | more).json()["choices"][0]["message"]["content"] == " 19"
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[0]['role'] }}{{ messages[1]['content'] }}")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    talk = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    found = served.post(TALK, CHAT | {"messages": talk, "max_tokens": 1}).json()
    assert found["usage"]["prompt_tokens"] == len(llm.tokenizer.encode("systemone two"))


def test_paths_methods_models_and_types(served: Served) -> None:
    assert "/nope" in complain(served.client.get("/nope"), 404, code="not_found")
    wrong = served.client.get(TEXT)
    assert TEXT in complain(wrong, 405) and wrong.headers["allow"] == "POST"
    assert "gpt-7" in complain(served.post(TEXT, {"model": "gpt-7", "prompt": "x"}), 404, "model", "model_not_found")
    body, kind = json.dumps(X | {"max_tokens": 1}).encode(), {"content-type": "Application/JSON; charset=utf-8"}
    assert served.client.post(TEXT, content=body, headers=kind).status_code == 200  # media types have no case
    form = {"content-type": "text/plain"}  # what another site's page may send
    complain(served.client.post(TEXT, content=json.dumps(STORY), headers=form), 415)
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and set(model) >= {"id", "object", "created", "owned_by"}
    found = served.client.get("/v1/models/tiny").json()
    assert found | {"created": 0} == model | {"created": 0}
    assert "'a/b'" in complain(served.client.get("/v1/models/a/b"), 404, "model", "model_not_found")


# Hosts


def test_only_known_hosts_are_answered(served: Served) -> None:
    """A page elsewhere whose name is made to mean 127.0.0.1 (DNS rebinding) sends its own name, and learns nothing."""
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", f"127.0.0.1:{served.port}", "[::1]", "[::1]:8000"):
        assert served.client.get("/v1/models", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "[::2]"):
        for path in ("/", "/health", "/v1/models", "/metrics", "/nope"):
            assert served.client.get(path, headers={"host": host}).status_code == 400, host
        assert served.post(TEXT, X, headers={"host": host}).status_code == 400


def test_hosts_that_the_user_adds() -> None:
    with serving(host="::", allowed_host=["box.lan", "*.example.com"], api_key="k") as served:
        key = {"authorization": "Bearer k"}
        for host, status in (("box.lan:8000", 200), ("a.example.com", 200), ("[::]", 200), ("lan", 400), ("example.com", 400)):
            assert served.client.get("/v1/models", headers=key | {"host": host}).status_code == status, host
        assert served.client.get("/v1/models", headers={"host": "box.lan"}).status_code == 401
    for wrong in ("box.lan", ["box.lan:8000"], ["http://box"], ["a*"], [""], [5]):
        with pytest.raises(ValueError, match=r"allowed_host=.* must be"):
            Serve(allowed_host=wrong)  # type: ignore[arg-type]
    Serve(allowed_host=("*", "[fe80::1]"))


def test_pages_of_origins_that_the_user_allows(served: Served) -> None:
    """A browser asks first, without the key; no other page may read an answer."""
    asks = {"origin": "http://a.lan:3000", "access-control-request-method": "POST"}
    assert served.client.options(TALK, headers=asks).status_code == 405
    with serving(allowed_origins=["http://a.lan:3000"], api_key="k") as open_to_a:
        for origin, allowed in (("http://a.lan:3000", "http://a.lan:3000"), ("http://b.lan", None)):
            found = open_to_a.client.options(TALK, headers=asks | {"origin": origin})
            assert found.headers.get("access-control-allow-origin") == allowed
            found = open_to_a.client.get("/v1/models", headers={"origin": origin, "authorization": "Bearer k"})
            assert found.headers.get("access-control-allow-origin") == allowed
        assert open_to_a.client.get("/v1/models", headers={"origin": "http://a.lan:3000"}).status_code == 401
    with pytest.raises(ValueError, match=r"allowed_origins=.* without a path"):
        Serve(allowed_origins=["http://a.lan/chat"])


# Bounds


def test_bounds() -> None:
    """Body (413), `n` (CVE-2026-34756), prompts (CVE-2026-73559), queue (429 with Retry-After)."""
    with serving(max_body=1000, max_choices=2, max_prompts=3, max_queue=3) as served:
        assert "max_body=1000" in complain(served.post(TEXT, {"model": "tiny", "prompt": "x" * 1000}), 413)
        assert "max_choices=2" in complain(served.post(TEXT, {"model": "tiny", "prompt": "x", "n": 3}), 400, "n")
        assert "max_prompts=3" in complain(served.post(TEXT, {"model": "tiny", "prompt": ["x"] * 4}), 400, "prompt")
        response = served.post(TEXT, {"model": "tiny", "prompt": ["x"] * 2, "n": 2})
        assert "max_queue=3" in complain(response, 429, code="queue_full") and response.headers["retry-after"]
        assert served.post(TEXT, {"model": "tiny", "prompt": ["x"] * 3, "max_tokens": 1}).status_code == 200


def request_of(body: dict[str, Any]) -> bytes:
    """As it goes over a socket."""
    data = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def send(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own."""
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(request_of(body))
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
def test_half_of_the_clients_leave(served: Served, aborts: list[int], is_stream: bool) -> None:
    """ATOM #1562 (no handler is cancelled that does not stream), vLLM #54947, SGLang #37833: exactly 40 aborts, and all blocks
    are back. ATOM #1589: clients that read to the end cause none."""
    bodies = [STORY | {"stream": is_stream, "seed": i, "max_tokens": 60} for i in range(80)]
    connections = [send(served, body) for body in bodies]
    while len(served.engine.streams) < 80:
        time.sleep(0.001)
    for connection in connections[::2]:
        connection.close()
    for connection in connections[1::2]:
        said = b""
        while b"length" not in said:
            part = connection.recv(65536)
            assert part, said
            said += part
        connection.close()
    served.wait_idle()
    assert len(aborts) == len(set(aborts)) == 40


def test_a_key_is_asked_for_on_every_route_but_health() -> None:
    """CVE-2025-59425: compared in constant time. A browser's dialogue will do, too."""
    with serving(api_key="s3cret") as served:
        assert served.client.get("/health").status_code == 200
        for route in served.app.routes:
            for headers in ({}, {"authorization": "Bearer s3cre"}, {"authorization": "Bearer s3crets"}, {"authorization": "x"}):
                if route.path != "/health":
                    (method,) = route.methods - {"HEAD"}
                    response = served.client.request(method, route.path, headers=headers)
                    complain(response, 401, code="invalid_api_key")
        assert served.client.get("/nope").status_code == 401
        assert served.client.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert served.client.get("/", auth=("anybody", "s3cret")).status_code == 200


def test_shutdown_ends_unfinished_answers() -> None:
    """Answers under way get `grace` seconds, then an error; a new one is refused."""
    served = Served(grace=0.5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.events, TEXT, STORY | {"max_tokens": 1900})
        while not served.engine.streams:
            time.sleep(0.001)
        served.graceful.should_exit = True
        *_, last = waiting.result(20)
    assert last["error"]["code"] == "leaving"
    served.close()


def test_a_refusal_does_not_wait_for_the_tokenizer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one thread, and others wait for it; a text that is too long never gets there."""
    served.post(TEXT, X | {"max_tokens": 1})  # which finds the longest token
    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "tokenizing", None)
        for path, body, param in ((TALK, CHAT | {"n": 17}, "n"), (TALK, CHAT | {"top_p": 2}, "top_p"),
                                  (TEXT, X | {"prompt": ["x"] * 129}, "prompt")):  # fmt: skip
            complain(served.post(path, body), 400, param)
    monkeypatch.setattr(type(served.engine.llm.tokenizer), "encode", None)
    assert "characters" in complain(served.post(TEXT, X | {"prompt": "a" * 10**6}), 400, "prompt")


def test_log_probabilities_need_a_tokenizer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens have no text without one: refused before an answer is computed."""
    monkeypatch.setattr(served.engine.llm, "tokenizer", None)
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}
    assert "no tokenizer" in complain(served.post(TEXT, body), 400, "logprobs")


def test_a_server_that_waits_for_ever_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("atom_mini.serving.server.MARGIN", 0.01)
    monkeypatch.setattr("atom_mini.serving.server.end_process", lambda seconds: ended.set())
    app = Server(served.engine, Serve(grace=0.01))
    served.engine.llm.listeners.remove(app.meters)
    server = GracefulServer(app)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and ended.wait(5)


# In a process of its own, as a user starts it


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`atom-mini serve`, and its address."""
    words = [sys.executable, "-m", "atom_mini", "serve", "--port", "0", "--device", "cpu", "--num-kvcache-blocks", "900"]
    words += ["--log-level", "warning"]  # nothing reads the pipes
    process = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"tiny is served at (http://\S+)", line)
        assert found, (line, process.stderr and process.stderr.read())
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@processes
def test_a_stopped_engine_is_hung_and_a_killed_one_ends_50_streams() -> None:
    """ATOM #680 (a silent hang), vLLM #36451 (hung, and 200), #24897: /health asks the loop; all
    clients get an error, and /health is 503."""
    options = ("--health-timeout", "1")
    with command(*options) as (process, url), ThreadPoolExecutor(50) as pool:
        words = ["pgrep", "-P", str(process.pid)]
        (engine,) = map(int, subprocess.run(words, capture_output=True, text=True).stdout.split())
        text = httpx.post(f"{url}{TEXT}", json={"prompt": "12 + 7 ="}).json()["choices"][0]["text"]
        assert text == " 19"
        os.kill(engine, signal.SIGSTOP)
        hung = httpx.get(f"{url}/health", timeout=20)
        assert "health_timeout" in complain(hung, 503, code="engine_hung")
        assert httpx.get(f"{url}/v1/models").status_code == 200  # which says nothing about it
        os.kill(engine, signal.SIGCONT)
        assert httpx.get(f"{url}/health", timeout=20).json()["status"] == "ok"

        def one(seed: int) -> Any:
            with httpx.Client(base_url=url, timeout=60) as client:
                body = STORY | {"seed": seed, "max_tokens": 2000, "stream": True}
                return events(client.post(TEXT, json=body))[-1]

        futures = [pool.submit(one, seed) for seed in range(50)]
        while httpx.get(f"{url}/health", timeout=20).json()["running"] < 50:
            time.sleep(0.02)
        os.kill(engine, signal.SIGKILL)
        for future in futures:
            assert future.result(30)["error"]["code"] == "engine_dead"
        complain(httpx.get(f"{url}/health"), 503, code="engine_dead")
        response = httpx.post(f"{url}{TEXT}", json=STORY)
        complain(response, 503, code="engine_dead")
        assert response.headers["retry-after"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_client_that_reads_nothing_delays_no_other(served: Served) -> None:
    """One piece waits for it, and fifty others get their whole answers. Then it leaves, and its
    request is aborted."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", served.port))
    slow.sendall(request_of(STORY | {"stream": True, "n": 16, "max_tokens": 1500}))
    while len(served.engine.streams) < 16:
        time.sleep(0.01)

    def one(seed: int) -> str:
        body = STORY | {"seed": seed, "max_tokens": 20}
        with httpx.Client(base_url=served.url, timeout=60) as client:
            return client.post(TEXT, json=body).json()["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(25) as pool:
        assert set(pool.map(one, range(50))) == {"length"}
    slow.close()
    served.wait_idle()


@processes
@pytest.mark.slow
@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_what_runs_and_ends_with_0(number: signal.Signals) -> None:
    """Right after the start, too, before uvicorn's own handlers are there. An IPv6 address has
    brackets."""
    options = ["--no-engine-process", "--host", "::1"]
    with command(*options) as (process, _):
        process.send_signal(number)
        assert process.wait(20) == 0
    if number == signal.SIGTERM:
        with command(*options) as (process, url), ThreadPoolExecutor(1) as pool:
            assert url.startswith("http://[::1]:")
            body = STORY | {"max_tokens": 300, "stream": True}
            future = pool.submit(httpx.post, f"{url}{TEXT}", json=body, timeout=60)
            while httpx.get(f"{url}/health").json()["running"] < 1:
                time.sleep(0.01)
            process.send_signal(number)
            assert events(future.result(60))[-1]["choices"][0]["finish_reason"] == "length"
            assert process.wait(20) == 0


def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [sys.executable, "-m", "atom_mini", "serve", "--port", str(taken.getsockname()[1])]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "in use" in result.stderr, result.stderr


# Tests and clients of others


@pytest.fixture
def openai() -> Any:
    return pytest.importorskip("openai", reason="no client of OpenAI's: pip install openai")


def test_openais_client(served: Served, openai: Any) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    chat: Any = CHAT["messages"]
    answer = client.chat.completions.create(model="tiny", messages=chat)
    assert answer.choices[0].message.content == "20 + 21 = 41." and answer.usage.completion_tokens > 3
    again = [*chat, answer.choices[0].message.model_dump(), {"role": "user", "content": "What is 12 + 7?"}]
    assert client.chat.completions.create(model="tiny", messages=again).choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(model="tiny", messages=chat, stream=True, stream_options={"include_usage": True})
    chunks = [*stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "20 + 21 = 41."
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    found = client.completions.create(model="tiny", prompt="12 + 7 =", logprobs=1, extra_body={"top_k": 1})
    assert found.choices[0].text == " 19" and found.choices[0].logprobs.tokens[0] == " "
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=chat, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=chat)


def test_llm_comply() -> None:
    """OpenAI's schemas, checked by others. Tools, images and reasoning fail, as refused; and the built-in model does not find
    an end for one of the prompts, which is not "stop"."""
    if importlib.util.find_spec("llm_comply") is None:
        pytest.skip("no llm-comply: pip install llm-comply")
    with serving(engine={"max_model_len": 256}) as served:
        words = [str(Path(sys.executable).with_name("llm-comply")), "run", "-u", f"{served.url}/v1", "-m", "tiny", "-k", "x"]
        result = subprocess.run([*words, "--format", "openai-chat", "--json"], capture_output=True, text=True, timeout=120)
    found = {test["id"]: test for test in json.loads(result.stdout)["results"]}
    failed = {name for name, test in found.items() if test["status"] != "passed"}
    refused = {"chat-tool-calling", "chat-image-input", "chat-reasoning-summary"}
    assert len(found) == 9 and refused <= failed <= refused | {"chat-basic-response"}, found
    if "chat-basic-response" in failed:
        assert found["chat-basic-response"]["errors"] == ["finish_reason: expected 'stop', got 'length'"]


@pytest.mark.large
def test_schemathesis(served: Served, tmp_path: Path) -> None:
    """Whatever its document allows, and what it does not: no 500."""
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("no schemathesis: pip install schemathesis")
    words = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{served.url}/openapi.json", "--max-examples", "60"]
    words += ["--checks", "not_a_server_error", "--exclude-path", "/events", "--suppress-health-check", "all"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    served.wait_idle()


# The page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@processes
@pytest.mark.slow
def test_the_page_chats_and_shows_the_engine(served: Served, browser: Any) -> None:
    """It loads nothing from other sites; its answer is the engine's; its timeline moves, and shows why the first request waits."""
    page, asked, wrong = browser.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(served.url)
    page.locator("#model", has_text="tiny").wait_for()
    assert "built-in model" in page.locator("#about").inner_text() and page.locator("#try button").count() == 3
    page.locator("#try button", has_text="30 + 75").click()
    page.locator("#said .assistant", has_text="30 + 75 = 105.").wait_for()
    assert page.locator("#start").count() == 0
    page.fill("#line", "What is 20 + 21?")
    page.press("#line", "Enter")
    page.locator("#said .assistant", has_text="20 + 21 = 41.").wait_for()
    page.locator("#counts", has_text="decode").wait_for()
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
    assert page.locator("canvas").evaluate(drawn)
    connection = send(served, STORY | {"prompt": [[i] * 1500 for i in range(9, 29)], "max_tokens": 400})
    page.locator("#why", has_text="The first one waits: its prompt fills 94 blocks").wait_for()
    connection.close()
    page.close()
    served.wait_idle()
    assert not wrong and asked and all(url.startswith(served.url) for url in asked)
    for _ in range(100):
        if not served.app.meters.num_pages:  # the page is closed, and no steps are recorded for it
            return
        time.sleep(0.05)
    raise AssertionError("the server still counts the page")


@pytest.mark.parametrize("wrong", [{"api_key": ""}, {"port": -1}, {"max_queue": 0}, {"grace": 0}, {"health_timeout": True}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    """An empty key would admit every client."""
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"{name}=.* must .*: set Serve\({name}="):
        Serve(**wrong)
