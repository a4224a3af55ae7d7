"""The simulator runs the engine's own scheduler: its steps are those of a real engine, its clock is nobody's, and what it
leaps over would have happened."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.instruments.command_line import main
from atom_mini.serving.capacity import Arrival, Cost, Costs, Engine, fit, fit_cost, serve
from atom_mini.serving.replicas_needed import (
    TRAFFIC,
    Plan,
    draw,
    figures,
    read_csv,
    read_sheet,
    replay,
    serve_all,
    smallest,
)

FLAT = Costs(0.0, Cost((1,), (0.5,)), Cost((1,), (0.5,)))
NOISE = (0.8, 0.9, 1.0, 1.1, 1.7)
COSTS = Costs(3e-4, Cost((0, 100), (2e-3, 4e-3), 1e-8, NOISE), Cost((1, 4, 32), (4e-3, 4.1e-3, 6e-3), 1e-7, NOISE))
TIGHT: dict[str, Any] = {"num_kvcache_blocks": 24, "kv_cache_block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 40}
MIXED: dict[str, Any] = {"enable_mixed_steps": True}
ONE = EngineArgs(num_kvcache_blocks=8, max_num_seqs=1, max_model_len=16)
SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip


def poisson(rate: float, count: int, seed: int = 0, longest: int = 30, answer: int = 20) -> list[Arrival]:
    """Every third prompt begins as the two before it."""
    rng, now, jobs = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        jobs.append(Arrival(now, rng.randint(1, longest), rng.randint(1, answer), 2 + i // 3))
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of an 8 B model, without weights."""
    home = tmp_path_factory.mktemp("eight")
    (home / "config.json").write_text(json.dumps(SHAPE))
    return home


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_a_constant_cost_is_m_d_1(load: float) -> None:
    """Within 2 %; a hundred thousand requests, one token each, one at a time."""
    waits = []
    for seed in range(5):
        jobs = poisson(load / 0.5, 20_000, seed, longest=1, answer=1)
        waits += [out.latency - 0.5 for out in serve(Engine(ONE, FLAT), jobs)]
    assert fmean(waits) == pytest.approx(load * 0.5 / 2 / (1 - load), rel=0.02)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"interleave_decode": True}, MIXED], ids=str)
def test_the_steps_are_those_of_a_real_engine(options: dict[str, Any]) -> None:
    """With preemptions, chunks and cached prefixes: as many steps, of the same kinds and tokens. Prompts of a session are
    the same here, and so are, greedily, the answers, as the simulator's are."""
    lengths = [job.num_prompt_tokens for job in poisson(1.0, 40, seed=4)]
    jobs = [job._replace(at=0.0, num_prompt_tokens=lengths[job.session]) for job in poisson(1.0, 30, seed=4)]
    with LLM("tiny", device="cpu", trace=True, compiled=False, **TIGHT, **options) as llm:
        wishes = [SamplingParams(max_tokens=job.num_tokens, ignore_eos=True, temperature=0) for job in jobs]
        llm.generate([[job.session] * job.num_prompt_tokens for job in jobs], wishes, use_tqdm=False)
        real = [(step.kind, sorted(step.tokens.values())) for step in llm.trace.steps]
        steps_of_run = llm.trace.steps
    engine, steps = Engine(EngineArgs(max_model_len=2048, **TIGHT, **options), COSTS, may_leap=False), []
    plain = engine.scheduler.schedule

    def schedule() -> Any:
        if (scheduled := plain()) is not None:
            batch = scheduled[0]
            steps.append((batch.type.name.lower(), sorted(batch.num_scheduled_tokens.tolist())))
        return scheduled

    engine.scheduler.schedule = schedule
    for job in jobs:
        engine.add(job)
    engine.advance()
    assert engine.scheduler.num_preemptions > 0 and sum(out.num_cached_tokens for out in engine.served) > 0
    assert steps == real
    assert min(min(cost.seconds) for cost in fit(steps_of_run)[1:]) >= 0


def everything(engine: Engine) -> tuple[Any, ...]:
    scheduler = engine.scheduler
    return (engine.served, engine.gaps, engine.most_blocks, engine.clock.now, engine.clock.steps, scheduler.num_preemptions,
            len(scheduler.block_manager.index.hash_to_block_id), scheduler.block_manager.num_free_blocks)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"interleave_decode": True}, MIXED, {"prefix_cache": "radix"}, {"max_num_seqs": 3},
                                     {"num_kvcache_blocks": 60}, {"kv_cache_block_size": 1}], ids=str)  # fmt: skip
def test_a_leap_is_what_would_have_happened(options: dict[str, Any], seed: int) -> None:
    """To the last bit: times, gaps, steps, preemptions, what can be found."""
    config = EngineArgs(**{"num_kvcache_blocks": 200, "kv_cache_block_size": 4, "max_model_len": 300} | options)
    jobs = poisson(12.0, 80, seed, longest=120, answer=90)
    exact, leaping = (Engine(config, COSTS, may_leap=leap, seed=seed) for leap in (False, True))
    leaps, plain = [], leaping._visit
    leaping._visit = lambda seqs, count: (leaps.append(count), plain(seqs, count))  # type: ignore[method-assign,assignment]
    for engine in (exact, leaping):
        serve(engine, jobs)
    assert everything(leaping) == everything(exact) and len(exact.served) == 80
    assert sum(leaps) > leaping.clock.steps / 10


SPYRE = {"scheduler": "spyre", "chunk_size": 16, "max_batch_tkv_limit": 256}


@pytest.mark.parametrize(
    "options", [{}, {"overlap": True}, {"interleave_decode": True}, MIXED, SPYRE], ids=lambda o: next(iter(o), "")
)
def test_the_hosts_clock_does_not_leak_in(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, jobs = EngineArgs(**{"max_model_len": 64} | TIGHT | options), poisson(30.0, 100)
    plain = [engine.served for engine in serve_all(config, COSTS, jobs, 2)]
    for name in ("perf_counter", "time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: random.random() * 1e6)
    assert [engine.served for engine in serve_all(config, COSTS, jobs, 2)] == plain
    assert sum(map(len, plain)) == 100


@pytest.mark.parametrize(("option", "says"), [({"scheduler_delay_factor": 0.5}, "0.5: its gate asks the host's clock"),
                                              ({"num_kvcache_blocks": None}, "num_kvcache_blocks=None")], ids=str)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Engine(EngineArgs(**{"max_model_len": 64} | TIGHT | option), COSTS)


def test_overlap_hides_the_host() -> None:
    """Of two that decode alone, the host's seconds are seen in one."""
    costs = Costs(1e-3, Cost((1,), (5e-3,)), Cost((1,), (5e-3,)))
    took = [serve(Engine(EngineArgs(max_model_len=64, overlap=overlap, **TIGHT), costs), [Arrival(0.0, 4, 20, 0)])[0].latency
            for overlap in (False, True)]  # fmt: skip
    assert took == pytest.approx([20 * 6e-3, 1e-3 + 20 * 5e-3])


def test_everybody_is_served_and_times_are_in_order() -> None:
    jobs = poisson(80.0, 300, seed=1)
    engines = serve_all(EngineArgs(max_model_len=64, **TIGHT), COSTS, jobs, 3)
    outs = [out for engine in engines for out in engine.served]
    assert sorted(out.job for out in outs) == jobs
    assert all(0 < out.ttft <= out.latency and out.stall <= out.latency - out.ttft + 1e-9 for out in outs)
    assert sum(sum(engine.gaps.values()) for engine in engines) == sum(job.num_tokens - 1 for job in jobs)


@pytest.mark.parametrize("truth", [Cost((1, 700), (2e-3, 9e-3), 1e-8), Cost((1,), (1e-3,)), Cost((1,), (1e-3,), 1e-7)], ids=str)
def test_costs_are_found_again(truth: Cost) -> None:
    rng = random.Random(3)
    steps = [(n, n * rng.randint(1, 900)) for n in (1, 2, 5, 9, 30, 200, 700) for _ in range(9)]
    found = fit_cost([(*step, truth.of(*step)) for step in steps])
    assert all(found.of(*step) == pytest.approx(truth.of(*step), rel=1e-6) for step in steps)
    noisy = fit_cost([(*step, truth.of(*step) * rng.choice((0.9, 1.2))) for step in steps * 20])
    # least squares of relative errors lie at (1/0.9 + 1/1.2) / (1/0.9**2 + 1/1.2**2)
    assert np.quantile(noisy.noise, [0.25, 0.75]) == pytest.approx([0.9 / 1.008, 1.2 / 1.008], rel=0.03)
    assert min(fit_cost([(n, n, 1e-3 - 1e-6 * n) for n in range(1, 50)]).seconds) >= 0
    with pytest.raises(ValueError, match="2 steps of a kind: a curve needs at least three"):
        fit_cost([(1, 1, 1.0)] * 2)


def test_smallest_is_the_least_number() -> None:
    for least in (1, 2, 10, 34, 10_000):
        for start in (1, 7, 5000):
            assert smallest(lambda n, m=least: n >= m, start) == least  # type: ignore[misc]
    with pytest.raises(ValueError, match="not with 64 replicas either"):
        smallest(lambda n: False, most=64)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_sample_stands_for_all(load: float) -> None:
    """Of a thousand replicas 16 and 32 are simulated: p99 moves by less than 3 %."""

    def even(rate: float, seed: int) -> list[Arrival]:
        return poisson(rate, round(rate * 10_000), seed, longest=1, answer=1)

    plan = Plan(ONE, FLAT, even, 1000 * load / 0.5)
    few, more = (figures(replace(plan, sample=sample).fleet(1000, 0))["latency_p99_ms"] for sample in (16, 32))
    assert more == pytest.approx(few, rel=0.03)


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_is_as_published(name: str) -> None:
    traffic = TRAFFIC[name]
    jobs = [job for seed in range(3) for job in draw(traffic, 20.0, 600.0, seed)]
    assert len(jobs) / 1800 == pytest.approx(20.0, rel=0.1)
    assert fmean(job.num_prompt_tokens for job in jobs) == pytest.approx(traffic.prompt, rel=0.08)
    assert fmean(job.num_tokens for job in jobs) == pytest.approx(traffic.answer, rel=0.05)
    if traffic.calls == 1:
        assert np.quantile([job.num_prompt_tokens for job in jobs], 0.99) == pytest.approx(traffic.p99, rel=0.1)


def test_a_session_finds_the_share_that_is_published() -> None:
    """In a pool that holds all, of sessions that were there from their beginning."""
    jobs = draw(TRAFFIC["copilot-agents"], 0.1, 1500.0, seed=1)
    config = EngineArgs(num_kvcache_blocks=20_000, kv_cache_block_size=256, max_model_len=200_000)
    assert figures(serve_all(config, COSTS, jobs, 1))["hit_rate"] == pytest.approx(0.857, abs=0.06)


def test_a_file_is_replayed_at_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.9799600,{i + 1},{i % 7 + 1},{i // 2}" for i in range(1200)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens,Session", *rows]))
    own = read_csv(path)
    assert own[3] == Arrival(pytest.approx(3.0), 4, 4, 1) and len(own) == 1200
    for rate in (0.3, 1.0, 3.7):
        more = replay(own, rate, 900.0, seed=2)
        assert len(more) / 900 == pytest.approx(rate, rel=0.1) and more == sorted(more)


@pytest.mark.parametrize(
    ("text", "says"),
    [("t,p,a\n1.5,3,x\n", "line 2, needs .*'x'"), ("t,p,a\n1,0,5", "line 2"), ("t,p,a\n1,5,0", "line 2"), ("t\n1", "line 2"),
     ("t,p,a\n2023-11-16 18:00:00,5,5\n,5,5", "line 3"), ("", "has no request"), ("t,p,a\n", "has no request"),
     ('{"timestamp": 0, "input_length": 5}\n' * 2, "line 2"), ("1,5,5\nnan,5,5", "line 2")],
)  # fmt: skip
def test_a_line_that_is_no_request_is_refused_by_its_number(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"own.csv.*{says}"):
        read_csv(path)


DATED = "t,p,a,s\n2024-05-10 00:00:00.009930+00:00,5,9,me\n2024-05-10 00:00:01.509930+00:00,7,9,you"


@pytest.mark.parametrize("text", ["0,5,9,me\r\n1.5,7,9,you\r\n\r\n", "t\xe9,p,a,s\n0,5,9,me\n1.5,7,9,you", DATED])
def test_files_as_they_are_found(text: str, tmp_path: Path) -> None:
    """With and without a heading, with names for sessions, Azure's dates of 2023 and 2024, ends of lines of either kind."""
    path = tmp_path / "own.csv"
    path.write_bytes(text.encode("latin-1"))
    assert read_csv(path) == [Arrival(0.0, 5, 9, 0), Arrival(pytest.approx(1.5), 7, 9, 1)]


def test_a_data_sheet(folder: Path) -> None:
    from atom_mini.serving.replicas_needed import DEVICES

    costs, blocks = read_sheet(EngineArgs(folder, dtype="bfloat16"), DEVICES["MI300X"])
    weights = 2 * 8.19e9  # bytes
    assert costs.decode.of(1, 0) == pytest.approx(weights / 0.7 / 5.3e12, rel=0.01)
    assert costs.prefill.of(4096, 0) == pytest.approx(4096 * weights / 0.5 / 1307e12, rel=0.02)
    assert blocks == pytest.approx((0.9 * 192e9 - weights) / (16 * 2 * 2 * 36 * 8 * 128), rel=0.01)
    with pytest.raises(ValueError, match="GB of weights do not fit 10 GB"):
        read_sheet(EngineArgs(folder, dtype="bfloat16"), DEVICES["H100"]._replace(memory=10e9))


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a data sheet and from a run; one JSON document; what is wrong is said in a line, with code 2."""
    sheet = "--gpu MI300X --rate 30 --ttft 1 --tpot 0.05 --price 2 --seconds 10 --draws 2 --dtype bfloat16 --json"
    assert main(["capacity", str(folder), *sheet.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 1 <= report["replicas_from"] <= report["replicas"] <= report["replicas_to"] <= 8
    assert report["price_per_hour"] == 2 * report["replicas"] and report["ttft_p99_ms"] < 1000
    many = "--gpu MI300X --rate 20000 --replicas 2000 --seconds 2 --dtype bfloat16 --json"
    assert main(["capacity", str(folder), *many.split()]) == 0
    assert 200 < json.loads(capsys.readouterr().out)["requests"] < 500  # of 16 of them
    run = tmp_path / "run.json"
    assert main(["trace", *"abcd", "--max-num-seqs", "1", "--max-tokens", "20", "--device", "cpu", "--output", str(run)]) == 0
    own = tmp_path / "own.csv"
    own.write_text("t,p,a\n" + "\n".join(f"{i / 5},{20 + i % 9},{9}" for i in range(100)))
    capsys.readouterr()
    words = ["capacity", "tiny", "--recorded", str(run), "--trace", str(own), "--seconds", "15"]
    words += ["--ttft", "1000", "--tpot", "100"]  # which any machine keeps
    assert main(words) == 0 and "run.json" in capsys.readouterr().out
    assert main([*words, "--num-kvcache-blocks", "7", "--replicas", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["blocks_of_a_replica"] == 7  # what was asked, not what was recorded
    for more, says in (
        (["--gpu", "A100", "--rate", "1"], "gpu='A100' must be one of ['MI300X'"), (["--rate", "1"], "give either"),
        (["--gpu", "H100", "--recorded", str(run)], "give either"), (["--recorded", str(own)], "is no run that"),
        (["--gpu", "H100", "--trace", "conv"], "trace='conv' is no file"), (["--gpu", "H100"], "rate=0.0: how many"),
        (["--gpu", "H100", "--rate", "1", "--ttft", "0"], "ttft=0"), (["--gpu", "H100", "--rate", "inf"], "rate=inf"),
        (["--gpu", "H100", "--rate", "1", "--seconds", "inf"], "seconds=inf"), (["--gpu", "H100", "--rate", "nan"], "rate=nan"),
        (["--gpu", "H100", "--rate", "1e9", "--replicas", "9"], "requests are too many"),
        (["--gpu", "H100", "--rate", "1", "--seconds", "1"], "no request comes in this time"),
        (["--gpu", "H100", "--rate", "5", "--ttft", "0.01"], "alone on a replica a request takes"),
    ):  # fmt: skip
        assert main(["capacity", str(folder), "--dtype", "bfloat16", *more]) == 2
        assert says in capsys.readouterr().err
