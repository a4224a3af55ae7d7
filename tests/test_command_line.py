"""The command line: what each command prints, what goes where, and what a mistake costs (one line and an exit code)."""

from __future__ import annotations

import io
import json
import os
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

from atom_mini import LLM, SamplingParams
from atom_mini.command_line import ABOUT, Chat, main
from atom_mini.model_runner import kvcache_block_bytes
from atom_mini.trace import Trace

TINY = Path(sys.modules["atom_mini"].__file__ or "").parent / "tiny"
CPU = ["--device", "cpu", "--num-kvcache-blocks", "200"]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


def run_shell(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A real process."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "atom_mini", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=300)


def run_json(capsys: Capture, *arguments: str) -> Any:
    """What a command says with --json, and that it says nothing else on stdout."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# each command


def test_generate(capsys: Capture, llm: LLM) -> None:
    """Texts on stdout, in order; figures on stderr; without a command it is meant."""
    one, two = (out.text for out in llm.generate(["Once upon", "12 + 7 ="], GREEDY))
    assert main(["generate", "Once upon", "--max-tokens", "6", "12 + 7 =", "--temperature", "0", *CPU]) == 0
    shown = capsys.readouterr()
    assert shown.out.split("\n\n") == [f"[0] Once upon{one}", f"[1] 12 + 7 ={two}", ""]
    assert "tokens/s" in shown.err and "TTFT" in shown.err
    assert main(["Once upon", "--max-tokens", "6", *CPU]) == 0
    assert capsys.readouterr().out == f"Once upon{one}\n"


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


def test_prompts_from_a_file_and_stdin(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    lines = "Once upon\n\n12 + 7 =\n"
    (tmp_path / "prompts.txt").write_text(lines)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    for source in (["--file", str(tmp_path / "prompts.txt")], ["-"]):
        outs = run_json(capsys, "generate", *source, "--max-tokens", "2", *CPU)
        assert [out["prompt"] for out in outs] == ["Once upon", "12 + 7 ="]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["-", *CPU]) == 1 and "no prompt" in capsys.readouterr().err


def test_examples_and_template(capsys: Capture) -> None:
    assert main(["--max-tokens", "2", *CPU]) == 0
    assert "Once upon a time" in capsys.readouterr().out
    assert main(["Where is Ada?", "--chat", "--max-tokens", "3", "--seed", "1", "--top-p", "0.9", *CPU]) == 0
    assert "Where is Ada? -> " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.html", "a.json", "a.perfetto.json"])
def test_trace(capsys: Capture, tmp_path: Path, name: str) -> None:
    """It generates like `generate`, and the name says in which form the timeline comes."""
    (out,) = run_json(capsys, "trace", "12 + 7 =", "--output", str(tmp_path / name), "--max-tokens", "2", *CPU)
    text = (tmp_path / name).read_text()
    assert out["prompt"] == "12 + 7 ="
    if name == "a.json":
        assert len(Trace.from_json(text).steps) == 2
    else:
        assert text.lstrip().lower().startswith("<!doctype html") if name == "a.html" else json.loads(text)["traceEvents"]
    assert main(["trace", "a", "--output", str(tmp_path / "none" / name), *CPU]) == 1
    assert "none" in capsys.readouterr().err


def test_bench(capsys: Capture) -> None:
    """The sums add up, the seed decides, and what hits the prefix cache is not computed."""
    size = ["--num-requests", "9", "--input-len", "10:40", "--output-len", "5:9", "--prefix-len", "32", "--seed", "4"]
    report, again = (run_json(capsys, "bench", *size, *CPU) for _ in range(2))
    assert report["requests"] == 9 and 9 * 42 <= report["input_tokens"] <= 9 * 72
    assert report["prefill_tokens"] == report["input_tokens"] - report["prefix_hit_tokens"]
    assert report["decode_tokens"] == report["output_tokens"] - 9 and 9 * 5 <= report["output_tokens"] <= 9 * 9
    assert report["prefix_hit_tokens"] == 8 * 32 and report["preemptions"] == 0 and 6 <= report["steps"] <= 10
    for times in (report["ttft_ms"], report["tpot_ms"]):
        assert 0 < times["p50"] <= times["p99"] <= 1e3 * report["seconds"] and 0 < times["mean"] <= times["p99"]
    assert {"name", "python", "torch"} == set(report["machine"])
    assert all(again[name] == report[name] for name in ("input_tokens", "output_tokens"))
    tight = run_json(capsys, "bench", *size[:6], "--device", "cpu", "--num-kvcache-blocks", "5")
    assert tight["preemptions"] > 0 and tight["prefill_tokens"] > tight["input_tokens"] - tight["prefix_hit_tokens"]
    assert main(["bench", "--num-requests", "2", "--input-len", "8", "--output-len", "3", *CPU]) == 0
    assert "ttft ms" in capsys.readouterr().out


def test_info(capsys: Capture, llm: LLM, monkeypatch: Patch) -> None:
    """What it says without the weights is what a loaded engine has."""
    monkeypatch.setattr("atom_mini.models.load_weights", None)
    options = ["--max-num-seqs", "4", "--max-model-len", "100", "--kv-cache-block-size", "8", "--device", "cpu"]
    report = run_json(capsys, "info", "tiny", *options, "--context", "64")
    monkeypatch.undo()
    with LLM("tiny", max_num_seqs=4, max_model_len=100, kv_cache_block_size=8, device="cpu") as other:
        runner: Any = other.engine_core.runner
        assert report["num_kvcache_blocks"] == other.config.num_kvcache_blocks == 52
        assert f"torch.{report['dtype']}" == str(runner.dtype)
        assert report["kvcache_bytes_per_block"] == kvcache_block_bytes(other.config.hf_config, 8, runner.dtype)
        assert report["sampling_defaults"] == other.config.sampling_defaults
    with safe_open(TINY / "model.safetensors", framework="pt") as tensors:
        counted = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert report["parameters"] == counted and report["weight_bytes"] == 4 * counted
    assert report["disk_bytes"] == (TINY / "model.safetensors").stat().st_size
    assert (report["fitting_tokens"], report["fitting_sequences"]) == (52 * 8, 4)
    assert (report["context_limit"], report["max_model_len"], report["chat_template"]) == (2048, 100, True)
    speed, per_token = report["memory_bytes_per_second"], report["kvcache_bytes_per_token"]
    ideal = {f"{n} x 64 tokens": n * speed / (4 * counted + n * 64 * per_token) for n in (1, 4)}
    assert report["ideal_decode_tokens_per_second"] == pytest.approx(ideal)
    half = run_json(capsys, "info", "--dtype", "bfloat16", "--device", "cpu")
    assert half["weight_bytes"] == 2 * counted and half["kvcache_bytes_per_token"] == per_token // 2


def test_info_on_a_gpu(capsys: Capture, monkeypatch: Patch) -> None:
    """The checkpoint's own type, and of the memory the share that is asked for, less what others and weights hold."""
    monkeypatch.setattr("atom_mini.model_runner.choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70_000_000, 100_000_000))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("atom_mini.command_line.memory_bandwidth", lambda device: 1e12)
    report = run_json(capsys, "info", "--gpu-memory-utilization", "0.8")
    left = 80_000_000 - 30_000_000 - report["weight_bytes"]
    assert report["dtype"] == "float32" and report["machine"]["name"] == "a GPU"
    assert report["num_kvcache_blocks"] == left // report["kvcache_bytes_per_block"]


@pytest.mark.parametrize("tie", [True, False])
def test_info_of_shards_in_the_hub_cache(capsys: Capture, monkeypatch: Patch, tmp_path: Path, tie: bool) -> None:
    """Shards are summed, a tied head counts once, and a hub id is found where the hub's client puts it."""
    folder = tmp_path / "models--some--model" / "snapshots" / "abc"
    model = save_checkpoint("llama", folder, max_shard_size="100KB", tie_word_embeddings=tie)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    report = run_json(capsys, "info", "some/model", "--device", "cpu")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert report["chat_template"] is False and report["model"] == "some/model"
    embedding = 0 if tie else 4 * model.get_input_embeddings().weight.numel()  # looked up, not read
    seconds = 1 / report["ideal_decode_tokens_per_second"]["1 x 256 tokens"]
    read = report["weight_bytes"] - embedding + 256 * report["kvcache_bytes_per_token"]
    assert seconds == pytest.approx(read / report["memory_bytes_per_second"])
    assert main(["info", "some/other"]) == 1
    assert "some/other" in capsys.readouterr().err


# chat


def test_chat(capsys: Capture, monkeypatch: Patch, llm: LLM) -> None:
    """Questions, commands, the end of the input; each turn sends all before it."""
    chat, question = Chat(llm, GREEDY), {"role": "user", "content": "What is 20 + 21?"}
    lines = iter([question["content"], "", "/stats", "/nonsense", "/trace"])
    chat.run(lambda prompt: next(lines, "/exit"))
    (out,) = llm.chat([question], GREEDY)
    shown = capsys.readouterr().out
    assert shown.startswith(out.text) and "/nonsense is no command" in shown and "start with --trace" in shown
    assert all(word in shown for word in ("TTFT", "prompt tokens cached", "blocks: 200 of 16 tokens, 0 in use"))
    assert chat.messages == [question, {"role": "assistant", "content": out.text}]
    assert chat.last is not None and chat.last.token_ids == out.token_ids
    chat.answer("And 1 + 2?")
    (follow,) = llm.chat(chat.messages[:3], GREEDY)
    assert chat.messages[3]["content"] == follow.text and chat.last.prompt_token_ids == follow.prompt_token_ids
    lines = iter(["/reset"])
    chat.run(lambda prompt: next(lines, "/exit"))
    assert chat.messages == [] and chat.last is None and is_empty(llm)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 20 + 21?\n"))
    assert main(["chat", "--max-tokens", "6", *CPU]) == 0  # EOF is a way to leave
    assert out.text in capsys.readouterr().out


def test_chat_outgrows_the_context(capsys: Capture, monkeypatch: Patch) -> None:
    """It says so, and /reset helps; an answer that was cut says where."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello?\n" + "Tell me more. " * 9 + "\n/reset\nHello?\n"))
    assert main(["chat", "--max-model-len", "48", "--max-tokens", "3", "--ignore-eos", *CPU]) == 0
    shown = capsys.readouterr().out
    assert "47 fit" in shown and "/reset" in shown and shown.count("[max_tokens]") == 2


def test_chat_interrupted(capsys: Capture, monkeypatch: Patch, llm: LLM) -> None:
    """Ctrl-C in a step ends the answer, keeps what came, and the engine goes on."""
    chat, forward, steps = Chat(llm, SamplingParams(max_tokens=40, ignore_eos=True)), llm.engine_core.runner.forward, []

    def interrupted(batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        return forward(batch)

    monkeypatch.setattr(llm.engine_core.runner, "forward", interrupted)
    chat.answer("Tell me a story.")
    assert capsys.readouterr().out == chat.messages[-1]["content"] + " [stopped]\n" and is_empty(llm)
    assert len(chat.messages[-1]["content"]) > 5
    chat.answer("Go on.")
    assert chat.last is not None and len(chat.last.token_ids) == 40


def test_chat_writes_its_trace(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    file = tmp_path / "a file.html"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"Hello?\n/trace {file}\n/trace {tmp_path}/none/a.html\n"))
    assert main(["chat", "--trace", "--max-tokens", "3", *CPU]) == 0
    assert "<title>" in file.read_text() and "No such file" in capsys.readouterr().out


# mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-tokens", "0"], 2, "max_tokens=0"),
        (["--temperature", "-1"], 2, "temperature=-1"),
        (["--top-p", "2"], 2, "top_p=2"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs=0"),
        (["--seed", "x"], 2, "--seed: invalid int value: 'x'"),
        (["--temprature", "1"], 2, "did you mean --temperature?"),
        (["--max-token", "1"], 2, "did you mean --max-tokens?"),
        (["bench", "--input-len", "9:3"], 2, "--input-len"),
        (["bench", "--num-requests", "0"], 2, "num_requests=0"),
        (["genrate"], 2, "did you mean generate?"),
        (["chat", "--json"], 2, "does not take --json"),
        (["--model", "."], 1, "config.json"),
        (["info", "no/such-model"], 1, "no/such-model"),
        (["--file", "none.txt"], 1, "none.txt"),
        (["--file", str(TINY / "model.safetensors")], 1, "model.safetensors"),
        ([""], 1, "empty prompt"),
    ],
    ids=str,
)
def test_mistakes(
    arguments: list[str], code: int, words: str, capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    """One line, nothing on stdout; with --debug the traceback before it."""
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--device", "cpu"]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.strip().splitlines()) == 1 and words in shown.err
    assert main([*arguments, "--device", "cpu", "--debug"]) == code
    shown = capsys.readouterr()
    assert "Traceback" in shown.err and words in shown.err.splitlines()[-1]


def test_interrupted(capsys: Capture, monkeypatch: Patch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("atom_mini.model_runner.ModelRunner.forward", interrupt)
    assert main(["Once", *CPU]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", ["", *ABOUT])
def test_help_fits_a_screen(command: str, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if command:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
    else:
        assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 3 < len(lines) <= 24 and all(len(line) <= 80 for line in lines)


# in a shell


def test_in_a_shell() -> None:
    """Each command as a process."""
    done = run_shell("Once upon", "12 + 7 =", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0 and "Once upon" in done.stdout and "12 + 7 =" in done.stdout
    assert "tokens/s" in done.stderr
    done = run_shell("chat", "--max-tokens", "5", stdin="What is 20 + 21?\n/stats\n")
    assert done.returncode == 0 and "blocks:" in done.stdout and done.stderr == ""
    done = run_shell("bench", "--num-requests", "2", "--output-len", "3", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["output_tokens"] == 6
    done = run_shell("info", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["architecture"] == "Qwen3ForCausalLM"
    done = run_shell("--model", "no/such-model")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "no/such-model" in done.stderr
    assert run_shell("trace", "--outptu", "a.html").returncode == 2


def test_whoever_reads_may_stop() -> None:
    """As in `atom-mini ... | head -1`: no traceback, nothing to be said."""
    command = [sys.executable, "-m", "atom_mini", "info", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 1
