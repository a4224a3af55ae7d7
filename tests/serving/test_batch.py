"""Files of requests: what is refused by its line, what an interrupt leaves, and how many answers are errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atom_mini import LLM, SamplingParams
from atom_mini.__main__ import main
from atom_mini.serving import batch

SMALL: dict[str, Any] = {"model": "tiny", "device": "cpu", "num_kvcache_blocks": 400}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "What is 20 + 21?"}]}


def request(name: str, prompt: Any, url: str = TEXT, **more: Any) -> str:
    """A line of a file."""
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", "prompt": prompt} | more})


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
        batch.read_work(source, "tiny")


def test_files_of_answers(tmp_path: Path) -> None:
    """A last line that was cut off is removed. Any other file stays as it is, above all the file of
    requests, if it is named twice. U+2028 and U+0085 end lines for Python, not for JSON."""
    target, row = tmp_path / "out.jsonl", '{"custom_id": "%s", "response": {"status_code": 200}}\n'
    assert batch.read_answers(target) == {}
    for rest in ("", "{", '{"custom_id": "c"', row % "c"):  # without its line end it may be cut, too
        target.write_text(row % "a" + row % "b" + rest[:-1])
        assert batch.read_answers(target) == {"a": 200, "b": 200}
        assert target.read_text() == row % "a" + row % "b"
    for text in ("something else\n", "something else", request("a", "x"), request("a", "x") + "\n", "[]"):
        target.write_text(text)
        with pytest.raises(ValueError, match="has a line that is not an answer: name another file"):
            batch.read_answers(target)
        assert target.read_text() == text
    line = json.dumps(json.loads(request("a", "a\u2028b\x85c")), ensure_ascii=False)
    target.write_text(f"\n{line}\r\n\n", encoding="utf-8")
    assert batch.read_work(target, "tiny")["a"].body["prompt"] == "a\u2028b\x85c"


def answers(lines: list[str], source: Path) -> list[Any]:
    """The answers to `lines`, by `batch.answer_all`."""
    source.write_text("\n".join(lines))
    rows: list[bytes] = []
    work = batch.read_work(source, "tiny").values()
    asyncio.run(asyncio.wait_for(batch.answer_all([*work], SMALL, 10, rows.append), 100))
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


def test_log_probabilities_without_a_tokenizer_are_an_answer_with_status_400(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end one line, as over HTTP, not the run."""
    monkeypatch.setattr("atom_mini.llm.load_tokenizer", lambda config: None)
    lines = [request("a", [5, 6, 7], max_tokens=2), request("b", [5, 6, 7], max_tokens=2, logprobs=1)]
    a, b = answers(lines, tmp_path / "in.jsonl")
    assert (a["response"]["status_code"], b["response"]["status_code"]) == (200, 400)
    assert b["response"]["body"]["error"]["param"] == "logprobs"


def test_a_wrong_file_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "AsyncLLM", lambda **_: pytest.fail("it starts"))
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x", model="gpt"))
    words = ["batch", str(source), str(tmp_path / "out.jsonl")]
    for more, says in (
        ([], "line 1: model='gpt' must be 'tiny'"), (["--num-kvcache-blocks", "0"], "num_kvcache_blocks=0"),
        (["--batch-size", "0"], "batch_size=0"),
    ):  # fmt: skip
        assert main([*words, *more]) == 2
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

    monkeypatch.setattr(batch, "answer_all", answer_all)
    for _ in range(2):
        assert main(["batch", str(source), str(target)]) == (1 if failed else 0)
        said = capsys.readouterr().err
        assert (f"{failed} of 2 answers are errors" in said) == (failed > 0)
    assert len(target.read_text().splitlines()) == 2


COMMAND = [sys.executable, "-m", "atom_mini"]
ONE = ["--model", "tiny", "--device", "cpu", "--num-kvcache-blocks", "400"]
ENV = os.environ | {"TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.processes
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
