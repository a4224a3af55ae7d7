"""The command line: what each command prints, what goes where, and what a mistake costs (one line and an exit code)."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from checkpoints import is_empty, save_checkpoint
from execnb.nbio import read_nb
from safetensors import safe_open

import atom_mini
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.__main__ import main
from atom_mini.options.command_line import (
    COMMANDS,
    EXAMPLES,
    SPINS,
    answer,
    figures,
    make_parser,
    parse,
    run_chat,
)
from atom_mini.options.help import HELP, given, help_of, kinds_in
from atom_mini.options.help import options_of as fields_of

TINY = Path(sys.modules["atom_mini"].__file__ or "").parent / "tiny"
CPU = ["--device", "cpu", "--num-kvcache-blocks", "200"]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
FIGURES = re.compile(r"prefill ([\d,]+) tokens/s, decode ([\d,]+) tokens/s, TTFT ([\d.,]+) ms, TPOT ([\d.,]+) ms\n")
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


def run_shell(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a real process."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "atom_mini", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=300)


def run_json(capsys: Capture, *arguments: str) -> Any:
    """The JSON document of a command, which prints nothing else on stdout."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def assert_figures(shown: str) -> None:
    """`shown` has the four figures, and they agree: a step generates at least one token."""
    found = FIGURES.search(shown)
    assert found is not None, shown
    prefill, decode, ttft, tpot = (float(text.replace(",", "")) for text in found.groups())
    assert prefill * ttft > 900 and decode * tpot > 900, shown  # tokens per second x milliseconds, rounded


# each command


def test_generate(capsys: Capture, llm: LLM) -> None:
    """Texts on stdout, in order; figures on stderr; without a command it is meant."""
    one, two = (out.text for out in llm.generate(["Once upon", "12 + 7 ="], GREEDY))
    assert main(["generate", "Once upon", "12 + 7 =", "--max-tokens", "6", "--temperature", "0", *CPU]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"Once upon{one}\n\n12 + 7 ={two}\n"
    assert_figures(shown.err)
    first, second, means = shown.err.splitlines()[-3:]  # a line for each request
    assert re.match(r"1: \d+ prompt tokens \(0 cached\), 6 new, TTFT [\d.,]+ ms, TPOT [\d.,]+ ms, length", first)
    assert second.startswith("2: ") and means.startswith("prefill")
    options = ["--model", "tiny", "--max-tokens", "6", *CPU]
    for arguments in (["Once upon", *options], [*options, "Once upon"]):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert shown.out == f"Once upon{one}\n"
        assert_figures(shown.err)


def test_generate_asks_in_the_chat_template(capsys: Capture, llm: LLM) -> None:
    """`--chat`: each prompt is a user's message, and the answer alone is printed."""
    question = "What is 20 + 21?"
    assert main(["generate", "--chat", question, *CPU]) == 0
    wanted = llm.chat([{"role": "user", "content": question}], use_tqdm=False)[0]
    assert capsys.readouterr().out == f"{wanted.text}\n"
    assert main(["generate", "--chat", "--json", question, *CPU]) == 0
    assert json.loads(capsys.readouterr().out)[0]["prompt_token_ids"] == wanted.prompt_token_ids


def test_generate_json_equals_generate(capsys: Capture, llm: LLM) -> None:
    """All fields but the times and the number of the request; sampling options arrive."""
    options = ["--temperature", "1.2", "--seed", "3", "--top-k", "50", "--max-tokens", "9", "--logprobs", "1"]
    options += ["--stop", "zz", "--stop", "qq", "--stop-token-ids", "5", "--ignore-eos"]
    got = run_json(capsys, "Once upon", "12 + 7 =", *options, *CPU)
    ends: dict[str, Any] = {"stop": ["zz", "qq"], "stop_token_ids": [5], "ignore_eos": True}
    params = SamplingParams(temperature=1.2, seed=3, top_k=50, max_tokens=9, logprobs=1, **ends)
    wanted = json.loads(json.dumps([asdict(out) for out in llm.generate(["Once upon", "12 + 7 ="], params)]))
    assert [list(out) for out in got] == [list(out) for out in wanted]
    for out, want in zip(got, wanted, strict=True):
        for scores, others in zip(out.pop("logprobs"), want.pop("logprobs"), strict=True):
            assert scores == pytest.approx(others, abs=1e-4)
        for name in ("request_id", "ttft", "tpot", "latency", "num_cached_tokens"):
            assert type(out.pop(name)) is type(want.pop(name))
        assert out == want


def test_prompts_from_stdin(capsys: Capture, monkeypatch: Patch) -> None:
    """One per line; empty ones are none."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n\n12 + 7 =\n"))
    outs = run_json(capsys, "generate", "-", "--max-tokens", "2", *CPU)
    assert [out["prompt"] for out in outs] == ["Once upon", "12 + 7 ="]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run_json(capsys, "-", *CPU) == []
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))  # a pipe, without being asked for
    assert [out["prompt"] for out in run_json(capsys, "--max-tokens", "2", *CPU)] == ["Once upon"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    assert [out["prompt"] for out in run_json(capsys, "Hi", "--max-tokens", "2", *CPU)] == ["Hi"]
    for nothing in (io.StringIO(""), None):  # None: a process that was started without one (`<&-`)
        monkeypatch.setattr("sys.stdin", nothing)
        assert len(run_json(capsys, "--max-tokens", "2", *CPU)) == len(EXAMPLES)
        assert run_json(capsys, "-", *CPU) == []


def options_of(command: str) -> dict[str, Any]:
    """The fields that are options of a command; no two have one name."""
    found = [f for kind in COMMANDS[command].options for f in fields_of(kind)]
    assert len(found) == len({f.name for f in found})
    return {f.name: f for f in found}


def hints_of(command: str, name: str) -> set[Any]:
    """The plain types of an option."""
    (owner,) = [kind for kind in COMMANDS[command].options if any(f.name == name for f in fields_of(kind))]
    return kinds_in(get_type_hints(owner)[name])


def test_options_are_the_dataclasses() -> None:
    """Each field is an option, of its type; what is not typed is left to the dataclass."""
    for command in COMMANDS:
        parser, files = make_parser(command), ["a", "b"] if command == "batch" else []
        for f in options_of(command).values():
            if f.name != "model":
                flag, kinds = f.name.replace("_", "-"), hints_of(command, f.name)
                words = [f"--no-{flag}"] if bool in kinds else [f"--{flag}", "3"]
                want: Any = next((v for t, v in {bool: False, int: 3, float: 3.0}.items() if t in kinds), "3")
                got = getattr(parser.parse_args([command, *files, *words]), f.name)
                assert got == ([want] if f.default == () else want), (command, f.name)
                assert isinstance(got, type(want) if f.default != () else list)
    assert given(parse(["generate"]), SamplingParams) == {} and parse(["info"]).params == SamplingParams()
    assert given(parse(["bench"]), EngineArgs) == {"model": "tiny", "trace": False}
    assert parse(["chat"]).params == SamplingParams(max_tokens=512)  # an answer may be longer than a completion


def test_all_answers_are_counted(capsys: Capture, llm: LLM) -> None:
    """With several answers to a prompt, each has its line, and the means are those of all."""
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    (out,) = llm.generate("Once upon", params, use_tqdm=False)
    mean = 1e3 * sum(one.ttft for one in out.outputs) / 3
    assert figures(llm, [out])["mean_ttft_ms"] == pytest.approx(mean)
    assert main(["Once upon", "12 + 7 =", "--n", "2", "--max-tokens", "3", *CPU]) == 0
    *_, one, two, three, four, means = capsys.readouterr().err.splitlines()
    assert [line[:2] for line in (one, two, three, four)] == ["1:", "2:", "3:", "4:"] and means.startswith("prefill")
    report = run_json(capsys, "bench", "--num-requests", "3", "--input-len", "8", "--max-tokens", "5", "--n", "2", *CPU)
    assert report["requests"] == 6 and report["num_decode_tokens"] == 6 * 4


@pytest.mark.parametrize("name", ["a.html", "a.json"])
def test_trace(capsys: Capture, tmp_path: Path, name: str) -> None:
    """It generates like `generate`, and the name says in which form the timeline comes."""
    (out,) = run_json(capsys, "trace", "12 + 7 =", "--output", str(tmp_path / name), "--max-tokens", "2", *CPU)
    text = (tmp_path / name).read_text()
    assert out["prompt"] == "12 + 7 ="
    if name == "a.json":
        assert len(json.loads(text)["steps"]) == 2
    else:
        assert text.lstrip().lower().startswith("<!doctype html")
    assert main(["trace", "a", "--output", str(tmp_path / "none" / name), *CPU]) == 1
    assert "none" in capsys.readouterr().err


def test_bench(capsys: Capture) -> None:
    """The sums add up, and the seed decides."""
    size = ["--num-requests", "9", "--input-len", "40", "--max-tokens", "7", "--seed", "4"]
    report, again = (run_json(capsys, "bench", *size, *CPU) for _ in range(2))
    assert report["requests"] == 9 and 9 < report["num_prefill_tokens"] < 9 * 40
    assert report["num_decode_tokens"] == 9 * 6 and report["num_steps"] == 7  # each gets a token from its prefill
    assert 0 < report["prefill_seconds"] + report["decode_seconds"] <= report["seconds"]
    for kind in ("prefill", "decode"):
        speed = report[f"num_{kind}_tokens"] / report[f"{kind}_seconds"]
        assert report[f"{kind}_tokens_per_second"] == pytest.approx(speed)
    first, rest = report["mean_ttft_ms"], 6 * report["mean_tpot_ms"]
    steps = 1e3 * (report["prefill_seconds"] + report["decode_seconds"])
    assert first > 0 and rest > 0 and 0.9 * steps < first + rest < 1e3 * report["seconds"]
    assert again["num_prefill_tokens"] == report["num_prefill_tokens"]
    other = run_json(capsys, "bench", *size[:-1], "5", *CPU)
    assert other["num_prefill_tokens"] != report["num_prefill_tokens"]
    assert main(["bench", "--num-requests", "2", "--input-len", "8", "--max-tokens", "3", *CPU]) == 0
    assert "mean_ttft_ms " in capsys.readouterr().out


def test_info(capsys: Capture, monkeypatch: Patch) -> None:
    """The report, made without reading a weight, agrees with the files and with an engine."""
    monkeypatch.setattr("atom_mini.loading.load_weights", None)
    report = run_json(capsys, "info", "tiny", "--device", "cpu")
    half = run_json(capsys, "info", "--dtype", "bfloat16", "--device", "cpu")
    monkeypatch.undo()
    with safe_open(TINY / "model.safetensors", framework="pt") as tensors:
        counted = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert report["parameters"] == counted and report["weight_bytes"] == 4 * counted
    assert (report["model"], report["device"], report["dtype"]) == ("tiny", "cpu", "float32")
    assert half["dtype"] == "bfloat16" and half["weight_bytes"] == 2 * counted
    assert half["kvcache_bytes_per_token"] == report["kvcache_bytes_per_token"] // 2
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", 50 * 16 * report["kvcache_bytes_per_token"])
    tight = run_json(capsys, "info", "--device", "cpu")
    with LLM("tiny", device="cpu") as llm:
        runner: Any = llm.engine_core.runner
        assert tight["fitting_tokens"] == 16 * len(llm.engine_core.scheduler.block_manager.pool.blocks) == 50 * 16
        assert runner.kv_cache.nbytes == tight["kvcache_bytes_per_token"] * tight["fitting_tokens"]
    monkeypatch.setattr("atom_mini.model_runner.free_host_bytes", lambda: 1000)
    assert run_json(capsys, "info", "--device", "cpu")["fitting_tokens"] == 0
    assert main(["info", "--device", "cpu"]) == 0
    assert f"{counted:,}" in capsys.readouterr().out


def test_info_on_a_gpu(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    """The checkpoint's own type; the allowed share of the memory, less what others and the weights hold."""
    save_checkpoint("qwen3", tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr("atom_mini.model_runner.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70_000_000, 100_000_000))
    report = run_json(capsys, "info", str(tmp_path), "--gpu-memory-utilization", "0.8")
    left = 80_000_000 - 30_000_000 - report["weight_bytes"]
    assert (report["dtype"], report["device"]) == ("bfloat16", "cuda")
    assert report["weight_bytes"] == 2 * report["parameters"]
    assert report["fitting_tokens"] == left // report["kvcache_bytes_per_token"]


@pytest.mark.parametrize("tie", [True, False])
def test_info_of_shards_in_the_hub_cache(capsys: Capture, monkeypatch: Patch, tmp_path: Path, tie: bool) -> None:
    """A tied head counts once; a hub id is found where the hub's client puts it."""
    folder = tmp_path / "models--some--model" / "snapshots" / "abc"
    model = save_checkpoint("llama", folder, max_shard_size="100KB", tie_word_embeddings=tie)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = run_json(capsys, "info", "some/model", "--device", "cpu")
    assert report["parameters"] == sum(p.numel() for p in model.parameters()) and report["model"] == "some/model"
    assert report["weight_bytes"] == 4 * report["parameters"]
    assert main(["info", "tiny", "--scheduler-cls", "builtins:int"]) == 2
    assert "scheduler_cls=<class 'int'> must be a subclass" in capsys.readouterr().err
    assert main(["info", "some/other"]) == 2
    assert "some/other" in capsys.readouterr().err


# chat


def chat(*lines: str, arguments: tuple[str, ...] = ()) -> None:
    """`atom-mini chat` with typed lines."""
    typed = iter(lines)
    run_chat(parse(["chat", *CPU, *arguments]), lambda prompt: next(typed, "/exit"))


def test_chat(capsys: Capture, monkeypatch: Patch, llm: LLM) -> None:
    """Questions, commands, the end of the input; each turn sends all before it, until /reset."""
    real, seen = LLM.format_chat, []
    monkeypatch.setattr(LLM, "format_chat", lambda self, messages, *rest: seen.append(messages) or real(self, messages, *rest))
    ask = [{"role": "user", "content": text} for text in ("What is 20 + 21?", "And 1 + 2?")]
    (first,) = llm.chat(ask[:1], GREEDY)
    (second,) = llm.chat([ask[0], {"role": "assistant", "content": first.text}, ask[1]], GREEDY)
    turns = [seen.pop(0), seen.pop(0)]
    lines = [ask[0]["content"], "", "/stats", "/nonsense", ask[1]["content"], "/reset", "/stats", ask[0]["content"]]
    chat(*lines, arguments=("--max-tokens", "6", "--temperature", "0"))
    shown = capsys.readouterr().out
    greeting, talk = shown.split("\n", 1)
    assert greeting.startswith("tiny, ") and "/help" in greeting
    assert seen == [*turns, turns[0]] and talk.startswith(first.text) and second.text in talk
    assert "/nonsense is not a command" in shown and shown.count("num_decode_tokens") == 2
    assert shown.count("\n1: 18 prompt tokens") == 2 and shown.count("\n2: ") == 1  # what each answer took
    chat("/help")
    helped = capsys.readouterr().out
    assert all(word in helped for word in ("/reset", "/exit", "Ctrl-C"))
    counts = [line.split()[1] for line in shown.splitlines() if line.startswith("messages")]
    assert counts == ["2", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 20 + 21?\n"))
    assert main(["chat", "--max-tokens", "6", *CPU]) == 0  # EOF is a way to leave
    assert first.text in capsys.readouterr().out


def test_chat_outgrows_the_context(capsys: Capture) -> None:
    """It says so, and /reset helps; an answer that was cut says so."""
    options = ("--max-model-len", "48", "--max-tokens", "3", "--ignore-eos")
    chat("Hello?", "Tell me more. " * 9, "/reset", "Hello?", arguments=options)
    shown = capsys.readouterr().out
    assert "must fit max_model_len=48" in shown and shown.count("[cut by max_tokens or max_model_len]") == 2


def test_chat_interrupted(capsys: Capture, monkeypatch: Patch, llm: LLM) -> None:
    """Ctrl-C in a step ends the answer, keeps what came, and the engine goes on."""
    forward, steps = llm.engine_core.runner.forward, []
    messages, params = [{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=40, ignore_eos=True)

    def interrupted(batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        return forward(batch)

    monkeypatch.setattr(llm.engine_core.runner, "forward", interrupted)
    message = answer(llm, messages, params)
    assert capsys.readouterr().out == message["content"] + " [stopped]\n" and is_empty(llm)
    assert message["role"] == "assistant" and len(message["content"]) > 5
    follow = answer(llm, [*messages, message, {"role": "user", "content": "Go on."}], params)
    assert len(follow["content"]) > len(message["content"]) and "[stopped]" not in capsys.readouterr().out


def test_chat_writes_its_trace(capsys: Capture, tmp_path: Path) -> None:
    """If it was started with --trace."""
    lines = ("Hello?", f"/trace {tmp_path}/a file.html", f"/trace {tmp_path}/none/a.html")
    chat(*lines, arguments=("--max-tokens", "3", "--trace"))
    assert "<title>" in (tmp_path / "a file.html").read_text() and "No such file" in capsys.readouterr().out
    chat("/trace")
    assert "there is no trace" in capsys.readouterr().out


def test_chat_without_a_template(capsys: Capture, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        chat("Hello?", arguments=("--model", str(tmp_path)))
    assert capsys.readouterr().out == "", "before the first question"


# speculation

DRAFTS = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}']
REPEATS = "Mia has a red cat. Ben has a red cat. Mia has a"


def test_drafts_change_no_text(capsys: Capture, tmp_path: Path) -> None:
    """generate, trace and chat take the knob as JSON and say what they say without it; the trace has the verdicts."""
    options = ["--max-tokens", "24", "--temperature", "0", *CPU]
    plain, drafted = (run_json(capsys, REPEATS, *options, *more) for more in ([], DRAFTS))
    assert drafted[0]["token_ids"] == plain[0]["token_ids"]
    file = tmp_path / "a.json"
    (traced,) = run_json(capsys, "trace", REPEATS, "--output", str(file), *options, *DRAFTS)
    steps = json.loads(file.read_text())["steps"]
    verdicts = [e for step in steps for e in step["after"] if e["event"] == "verified"]
    assert traced["text"] == plain[0]["text"] and sum(e["accepted"] for e in verdicts) > 0
    shown = []
    for more in ((), DRAFTS):
        chat("Mia has a red cat. What does Mia have?", arguments=("--max-tokens", "9", "--temperature", "0", *more))
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert main([REPEATS, "--speculative-config", "ngram", *CPU]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_bench_counts_drafts(capsys: Capture) -> None:
    """What `SpecStats` has, without the request before the clock starts; nothing of it in an engine without drafts."""
    size = ["bench", "--num-requests", "6", "--input-len", "40", "--max-tokens", "30", "--temperature", "0"]
    names = {"tokens_per_step", "accepted_by_place", "steps_by_accepted"}
    report, plain = run_json(capsys, *size, *CPU, *DRAFTS), run_json(capsys, *size, *CPU)
    assert names <= set(report) and not names & set(plain)
    assert report["num_decode_tokens"] == plain["num_decode_tokens"] == 6 * 29
    parts, shares = sum(report["steps_by_accepted"]), report["accepted_by_place"]
    assert report["tokens_per_step"] == pytest.approx(6 * 29 / parts) and 1 < report["tokens_per_step"] <= 5
    accepted = sum(n * steps for n, steps in enumerate(report["steps_by_accepted"]))
    assert accepted + parts == 6 * 29 and len(shares) <= 4 and all(0 <= share <= 1 for share in shares)
    assert main([*size, *CPU, *DRAFTS]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["steps_by_accepted"].split() == [str(n) for n in report["steps_by_accepted"]]
    assert lines["accepted_by_place"].split() == [f"{round(share, 2):,}" for share in shares]
    none = run_json(capsys, "bench", "--num-requests", "1", "--input-len", "1", "--max-tokens", "1", *CPU, *DRAFTS)
    assert (none["tokens_per_step"], none["accepted_by_place"], none["steps_by_accepted"]) == (0, [], [])


def test_info_of_drafts(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    """The memory of a draft model, without reading a weight; 0 for a lookup."""
    draft = save_checkpoint("llama", tmp_path / "draft")
    monkeypatch.setattr("atom_mini.loading.load_weights", None)
    plain, ngram = (run_json(capsys, "info", "--device", "cpu", *more) for more in ([], DRAFTS))
    extra = {"draft_weight_bytes": 0, "draft_kvcache_bytes_per_token": 0}
    assert ngram.items() >= extra.items() and plain.items() >= extra.items()
    wanted = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(tmp_path / "draft")}
    asked = ["info", "--device", "cpu", "--max-model-len", "256", "--speculative-config", json.dumps(wanted)]
    report = run_json(capsys, *asked)
    alone = run_json(capsys, "info", str(tmp_path / "draft"), "--device", "cpu")
    assert report["draft_weight_bytes"] == alone["weight_bytes"] == 4 * sum(p.numel() for p in draft.parameters())
    assert report["draft_kvcache_bytes_per_token"] == alone["kvcache_bytes_per_token"]
    assert report["weight_bytes"] == plain["weight_bytes"]
    half = run_json(capsys, *asked, "--dtype", "bfloat16")
    assert half["draft_weight_bytes"] == report["draft_weight_bytes"] // 2
    off = run_json(capsys, "info", "--device", "cpu", "--speculative-config", '{"num_speculative_tokens": 0}')
    assert off.items() >= extra.items()


# mistakes


@pytest.mark.parametrize(
    ("arguments", "is_unreadable", "words"),
    [
        (["--max-tokens", "0"], False, "max_tokens=0"),
        (["--temperature", "-1"], False, "temperature=-1"),
        (["--top-p", "2"], False, "top_p=2"),
        (["--max-num-seqs", "0"], False, "max_num_seqs=0"),
        (["--scheduler", "fifo"], False, "scheduler='fifo'"),
        (["--seed", "x"], True, "--seed: invalid int value: 'x'"),
        (["--seed", "-3"], False, "seed=-3 must be a whole number from 0"),
        (["chat", "--n", "2"], False, "n=2 must be 1 with chat"),
        (["--model", "tiny", "info"], False, "put the command first: atom-mini info --model tiny"),
        (["--no-trace", "info", "tiny"], False, "put the command first: atom-mini info --no-trace tiny"),
        (["--temprature", "1"], True, "--temprature"),
        (["chat", "--json"], True, "--json"),
        (["bench", "--input-len", "a"], True, "--input-len"),
        (["bench", "--num-requests", "0"], False, "num_requests"),
        (["--model", "."], False, "config.json"),
        (["info", "no/such-model"], False, "no/such-model"),
        (["word " * 3000], False, "max_model_len=2048"),
        ([""], False, "empty prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes(
    arguments: list[str], is_unreadable: bool, words: str, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    """One line (after the usage, if arguments are unreadable), nothing on stdout; with --debug the error itself."""
    monkeypatch.chdir(tmp_path)
    arguments = [*arguments, "--device", "cpu"]
    if is_unreadable:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    else:
        assert main(arguments) == 2
    shown = capsys.readouterr()
    *before, last = [line for line in shown.err.splitlines() if not line.startswith("[transformers]")]
    assert shown.out == "" and "error: " in last and words in last and "Traceback" not in shown.err
    assert not before if not is_unreadable else before[0].startswith("usage: atom-mini") and len(before) <= 4
    if not is_unreadable:
        with pytest.raises(ValueError, match=re.escape(words)):
            main([*arguments, "--debug"])


def test_interrupted(capsys: Capture, monkeypatch: Patch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atom_mini.model_runner.ModelRunner.forward", interrupt)
    assert main(["Once", *CPU]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, capsys: Capture, monkeypatch: Patch) -> None:
    """Each command's help: every option in a group, with a line about it and its default."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()) and "SUPPRESS" not in shown
    text = " ".join(shown.split())
    for kind in COMMANDS[command].options if command else ():
        for f in fields_of(kind):
            group, line = help_of(f.name)
            assert line and len(line) <= 60 and f"{group}:" in shown and line in text, f"{f.name} has no line in HELP"
    if command:
        assert "(default: 512)" in text and "--max-num-seqs INT" in text
        if SamplingParams in COMMANDS[command].options:
            assert f"generated at most (default: {512 if command == 'chat' else 64})" in text
    else:
        assert all(name in shown for name in [*COMMANDS, "--version"])


def test_help_is_about_options_that_exist() -> None:
    names = {f.name for command in COMMANDS.values() for kind in command.options for f in fields_of(kind)}
    assert {name for lines in HELP.values() for name in lines} <= names


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"atom-mini {atom_mini.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["sevre"], "did you mean serve?"), (["help"], "did you mean --help?"), (["frobnicate", "--json"], "use generate, chat"),
     (["gen", "Once"], "atom-mini generate gen")],
)  # fmt: skip
def test_an_unknown_command_is_no_prompt(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and f"error: {arguments[0]!r} is not a command" in shown.err and words in shown.err


def test_options_are_not_abbreviated(capsys: Capture) -> None:
    """`--num` could mean several options; what is nearly right is suggested."""
    cases = {"--num": "unrecognized arguments: --num", "--temprature": "(did you mean --temperature?)"}
    cases |= {"--jsn": "(did you mean --json?)", "--chta": "(did you mean --chat?)", "--debgu": "(did you mean --debug?)"}
    cases |= {"--no-ignore-oes": "(did you mean --no-ignore-eos?)"}
    for option, text in cases.items():
        with pytest.raises(SystemExit, match="2"):
            main(["Hi", option, "2"])
        shown = capsys.readouterr().err
        assert text in shown and shown.startswith("usage: atom-mini generate [prompts] [options]")


def test_a_refusal_names_the_option_as_it_is_typed(capsys: Capture) -> None:
    """In a shell it is no field of a class."""
    assert main(["generate", "x", "--temperature", "-1"]) == 2
    assert capsys.readouterr().err.endswith("temperature=-1.0 must be a number from 0: set --temperature\n")


# extras

ALONE = """
import sys
for name in "msgspec zmq starlette uvicorn prometheus_client ray numba triton".split():
    sys.modules[name] = None
from atom_mini.__main__ import main
for words in sys.argv[1:]:
    try:
        print("exit code", main(words.split()))
    except SystemExit as end:
        print("exit code", end.code)
"""
OWN = {"serve": ["--port", "--api-key"], "fleet": ["--port", "--replicas", "--max-ongoing"], "batch": ["--batch-size", "target"]}


@pytest.mark.slow
def test_without_extras() -> None:
    """Every command's help is there with all of its options; what cannot run says how to install it in a clone."""
    work = ["serve", "fleet", "batch a b", "info --engine-process", "info --compiled"]
    helps = ["--help", *(f"{command} --help" for command in COMMANDS)]
    command = [sys.executable, "-c", ALONE, *helps, *work]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"TRITON_INTERPRET": "1"})
    *texts, rest = re.split(r"(?<=exit code 0\n)", done.stdout)[: len(helps) + 1]
    assert len(texts) == len(helps) and "exit code 0" not in rest, done.stderr
    for command, text in zip(COMMANDS, texts[1:], strict=True):
        assert f"usage: atom-mini {command}" in text and all(word in text for word in OWN.get(command, []))
    assert rest.count("exit code 2") == 5
    hints = re.findall(r'error: .*run pip install -e "\.\[(\w+)\]"', done.stderr)
    assert hints == ["server", "ray", "server", "processes", "cpu"], done.stderr


def test_hints_are_commands_that_work_in_a_clone() -> None:
    """One function writes them; the package is on no index."""
    root = TINY.parent.parent
    listed = (root / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = {*re.findall(r"(?m)^(\w+) = \[", listed)}
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("nbs/**/*.ipynb"), *TINY.parent.rglob("*.py")]
    for path in pages:
        text = "".join(cell.source for cell in read_nb(path).cells) if path.suffix == ".ipynb" else path.read_text()
        assert "atom_mini[" not in text, path.name
        if path.suffix == ".py":
            assert {*re.findall(r"\binstall\(['\"](\w+)['\"]\)", text)} <= extras, path.name


# in a shell


@pytest.mark.slow
def test_in_a_shell() -> None:
    """As a process: what goes to stdout and to stderr, and the exit code."""
    done = run_shell("Once upon", "12 + 7 =", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0 and "Once upon" in done.stdout and "12 + 7 =" in done.stdout
    assert "tokens/s" in done.stderr
    done = run_shell("chat", "--max-tokens", "5", stdin="What is 20 + 21?\n/stats\n")
    assert done.returncode == 0 and "num_decode_tokens" in done.stdout and done.stderr == ""
    done = run_shell("info", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["parameters"] > 1e6
    done = run_shell("--model", "no/such-model")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "no/such-model" in done.stderr
    done = run_shell("--model", "no/such-model", "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr
    assert run_shell("trace", "--outptu", "a.html").returncode == 2


SPY = """
import os, sys

class Spy:  # the first to be asked for any module
    def find_spec(self, name, *_):
        if name == "torch":
            print({k: os.environ[k] for k in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if k in os.environ})
            sys.stdout.flush()
            os._exit(0)

before = dict(os.environ)
sys.meta_path.insert(0, Spy())
import atom_mini
assert os.environ == before
sys.argv = ["atom-mini", "Once upon", "--device", "cpu"]
"""
WAYS_IN = {
    "python -m atom_mini": "import runpy; runpy.run_module('atom_mini', run_name='__main__')",
    "atom-mini": "from atom_mini.__main__ import main; sys.exit(main())",  # as [project.scripts] has it
    "library": "atom_mini.LLM('tiny', device='cpu')",
}
Env = dict[str, str]


@pytest.mark.parametrize("theirs", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}], ids=str)
@pytest.mark.parametrize("way", WAYS_IN)
def test_how_threads_wait(way: str, theirs: Env) -> None:
    """The command line says so before torch loads, unless the user did; a library leaves the environment as it is."""
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | theirs
    command = [sys.executable, "-c", SPY + WAYS_IN[way]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    wanted = {"GOMP_SPINCOUNT": SPINS} if way != "library" and not theirs else theirs
    assert done.stdout == f"{wanted}\n", done.stderr


def test_openmp_reads_it() -> None:
    """GNU's OpenMP says what it took from the environment when it was loaded."""
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-m", "atom_mini", "Hi", "--max-tokens", "1", *CPU]
    env["OMP_DISPLAY_ENV"] = "verbose"
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300).stderr
    if "GOMP_" not in shown:
        pytest.skip("torch's OpenMP is another one here")
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in shown


def test_the_environment_is_left_alone_once_torch_is_loaded(capsys: Capture, monkeypatch: Patch) -> None:
    """Who calls `main` from a program of his own has loaded torch: nothing would come of it. Without prompts, examples."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--max-tokens", "1", *CPU]) == 0 and "GOMP_SPINCOUNT" not in os.environ
    assert "Once upon a time" in capsys.readouterr().out


@pytest.mark.slow
def test_the_reader_may_close_the_pipe() -> None:
    """As in `atom-mini ... | head -1`: no traceback and no error line."""
    command = [sys.executable, "-m", "atom_mini", "info", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 1


def test_a_terminal_shows_what_is_loaded(capsys: Capture, monkeypatch: Patch) -> None:
    """In one line; a file or a pipe does not get it."""
    LLM("tiny", **OPTIONS).close()
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    LLM("tiny", **OPTIONS).close()
    assert re.search(r"^loading tiny \(8 MB\) \.\.\. 200 blocks, [\d.]+ s\n", capsys.readouterr().err)
    with pytest.raises(ValueError, match="num_kvcache_blocks"):
        LLM("tiny", device="cpu", num_kvcache_blocks=10**13)
    assert capsys.readouterr().err.endswith(" ... \n")
