"""The command line: what each command prints, what goes where, and what a mistake costs (one line and an exit code)."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import is_empty, save_checkpoint
from safetensors import safe_open

import atom_mini
from atom_mini import LLM, SamplingParams
from atom_mini.__main__ import main
from atom_mini.options.command_line import (
    COMMANDS,
    EXAMPLES,
    SPINS,
    parse,
    print_answer,
    run_chat,
)
from atom_mini.options.help import HELP, help_of
from atom_mini.options.help import options_of as fields_of

TINY = Path(sys.modules["atom_mini"].__file__ or "").parent / "tiny"
CPU = ["--device", "cpu", "--num-kvcache-blocks", "200"]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
DRAFTS = ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']
FIGURES = re.compile(r"prefill ([\d,]+) tokens/s, decode ([\d,]+) tokens/s, TTFT ([\d.,]+) ms, TPOT ([\d.,]+) ms\n")
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


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
    assert main(["generate", "--chat", "What is 20 + 21?", *CPU]) == 0
    assert capsys.readouterr().out == "20 + 21 = 41.\n"
    options = ["--model", "tiny", "--max-tokens", "6", *CPU]
    for arguments in (["Once upon", *options], [*options, "Once upon"]):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert shown.out == f"Once upon{one}\n"
        assert_figures(shown.err)


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


def test_trace(capsys: Capture, tmp_path: Path) -> None:
    """It generates like `generate`, and the name says in which form the timeline comes."""
    for name, begins in (("a.html", "<!doctype html"), ("a.json", "{")):
        file = str(tmp_path / name)
        (out,) = run_json(capsys, "trace", "12 + 7 =", "--output", file, "--max-tokens", "2", *CPU)
        assert out["prompt"] == "12 + 7 ="
        assert (tmp_path / name).read_text().lstrip().lower().startswith(begins)
    assert main(["trace", "a", "--output", str(tmp_path / "none" / "a.json"), *CPU]) == 1
    assert "none" in capsys.readouterr().err


def test_bench(capsys: Capture) -> None:
    """The sums add up, with all answers to a prompt; the seed decides; and what drafts did is in
    the report, without the request before the clock starts."""
    size = ["bench", "--num-requests", "6", "--input-len", "40", "--max-tokens", "30"]
    size += ["--temperature", "0"]
    names = {"tokens_per_step", "accepted_by_place", "steps_by_accepted"}
    report, plain = run_json(capsys, *size, *CPU, *DRAFTS), run_json(capsys, *size, *CPU)
    assert plain["requests"] == 6 and plain["num_steps"] == 30 and plain["num_prefill_tokens"] > 6
    assert names <= set(report) and not names & set(plain)
    assert report["num_decode_tokens"] == plain["num_decode_tokens"] == 6 * 29
    parts = sum(report["steps_by_accepted"])
    accepted = sum(n * steps for n, steps in enumerate(report["steps_by_accepted"]))
    assert accepted + parts == 6 * 29 and report["tokens_per_step"] == pytest.approx(6 * 29 / parts)
    other = run_json(capsys, *size, *CPU, "--seed", "5", "--n", "2")
    assert other["requests"] == 12 and other["num_decode_tokens"] == 12 * 29
    assert other["num_prefill_tokens"] != plain["num_prefill_tokens"]
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


def test_info_on_a_gpu_of_shards_in_the_hub_cache(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    """A tied head counts once; the checkpoint's own type; the allowed share of the memory, less
    what others and the weights hold; a hub id is found where the hub's client puts it."""
    home = tmp_path / "models--some--model"
    save = {"max_shard_size": "100KB", "tie_word_embeddings": True, "dtype": torch.bfloat16}
    model = save_checkpoint("llama", home / "snapshots" / "abc", **save)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("atom_mini.model_runner.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70_000_000, 100_000_000))
    report = run_json(capsys, "info", "some/model", "--gpu-memory-utilization", "0.8")
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    left = 80_000_000 - 30_000_000 - report["weight_bytes"]
    assert (report["model"], report["dtype"]) == ("some/model", "bfloat16")
    assert report["weight_bytes"] == 2 * report["parameters"]
    assert report["fitting_tokens"] == left // report["kvcache_bytes_per_token"]


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
    message = print_answer(llm, messages, params)
    assert capsys.readouterr().out == message["content"] + " [stopped]\n" and is_empty(llm)
    assert message["role"] == "assistant" and len(message["content"]) > 5
    follow = print_answer(llm, [*messages, message, {"role": "user", "content": "Go on."}], params)
    assert len(follow["content"]) > len(message["content"]) and "[stopped]" not in capsys.readouterr().out


# mistakes


MISTAKES: list[tuple[str, str]] = [  # what is typed, and what the one line says
    ("--temperature -1", "temperature=-1.0 must be a number from 0: set --temperature"),
    ("--scheduler fifo", "scheduler='fifo'"),
    ("--seed -3", "seed=-3 must be a whole number from 0"),
    ("--speculative-config ngram", "is not JSON"),
    ("chat --n 2", "n=2 must be 1 with chat"),
    ("--model tiny info", "put the command first: atom-mini info --model tiny"),
    ("bench --num-requests 0", "num_requests"),
    ("--model .", "config.json"),
    ("info no/such-model", "no/such-model"),
    ("info tiny --scheduler-cls builtins:int", "scheduler_cls=<class 'int'> must be a subclass"),
    ("word " * 3000, "max_model_len=2048"),
    ("sevre", "'sevre' is not a command: did you mean serve?"),
    ("gen Once", "atom-mini generate gen"),
]
UNREADABLE: list[tuple[str, str]] = [
    ("Hi --seed x", "--seed: invalid int value: 'x'"),
    ("Hi --num 2", "unrecognized arguments: --num"),  # it could mean several options
    ("Hi --temprature 1", "(did you mean --temperature?)"),
    ("Hi --no-ignore-oes", "(did you mean --no-ignore-eos?)"),
    ("chat --json", "--json"),
]


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[typed[:20] for typed, _ in MISTAKES])
def test_mistakes(
    typed: str, words: str, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    """One line and nothing on stdout; with --debug the error itself."""
    monkeypatch.chdir(tmp_path)
    arguments = typed.split() if len(typed) < 99 else [typed]
    if words[:1] != "'" and "gen" not in words:
        arguments += ["--device", "cpu"]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if not line.startswith("[transformers]")]
    assert shown.out == "" and len(lines) == 1 and lines[0].startswith("error: ")
    assert words in lines[0]
    with pytest.raises(ValueError):
        main([*arguments, "--debug"])


@pytest.mark.parametrize(("typed", "words"), UNREADABLE)
def test_arguments_that_cannot_be_read(typed: str, words: str, capsys: Capture) -> None:
    """The usage, and one line."""
    with pytest.raises(SystemExit, match="2"):
        main(typed.split())
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("usage: atom-mini") and words in shown.err


def test_interrupted(capsys: Capture, monkeypatch: Patch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atom_mini.model_runner.ModelRunner.forward", interrupt)
    assert main(["Once", *CPU]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Capture, monkeypatch: Patch) -> None:
    """Every option in a group, with a line about it and its default; and no line is about
    an option that is gone."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()) and "SUPPRESS" not in shown
    text = " ".join(shown.split())
    for name in options_of(command):
        group, line = help_of(name)
        assert line and f"{group}:" in shown and line in text, f"{name} has no line in HELP"
    assert "(default: 512)" in text and "--max-num-seqs INT" in text
    names = {name for command in COMMANDS for name in options_of(command)}
    assert {name for lines in HELP.values() for name in lines} <= names


def test_help_and_version(capsys: Capture) -> None:
    for words, says in (("--version", atom_mini.__version__), ("--help", [*COMMANDS][-1])):
        with pytest.raises(SystemExit, match="0"):
            main([words])
        assert says in capsys.readouterr().out


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


# in a shell


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


@pytest.mark.parametrize(
    ("way", "theirs"),
    [("python -m atom_mini", {}), ("atom-mini", {}), ("library", {}),
     ("atom-mini", {"GOMP_SPINCOUNT": "7"}), ("atom-mini", {"OMP_WAIT_POLICY": "active"})],
)  # fmt: skip
def test_how_threads_wait(way: str, theirs: Env, tmp_path: Path) -> None:
    """The command line says so before torch loads, unless the user did; a library leaves the
    environment as it is."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in names} | theirs
    command = [sys.executable, "-c", SPY + WAYS_IN[way]]
    where: Any = {"env": env, "cwd": tmp_path, "timeout": 60}
    done = subprocess.run(command, capture_output=True, text=True, **where)
    wanted = {"GOMP_SPINCOUNT": SPINS} if way != "library" and not theirs else theirs
    assert done.stdout == f"{wanted}\n", done.stderr


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
