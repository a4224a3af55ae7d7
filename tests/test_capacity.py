"""The simulator runs the engine's own scheduler: its steps are those of a real engine, its clock is nobody's."""

from __future__ import annotations

import random
import time
from statistics import fmean
from typing import Any

import pytest

from atom_mini import LLM, Config, SamplingParams
from atom_mini.sequence import SequenceType
from atom_mini.serving.capacity import Cost, Job, Served, Simulator, engines_needed, fit_cost, run_fleet

FLAT = {kind: Cost(0.5) for kind in SequenceType}
COSTS = {SequenceType.PREFILL: Cost(2e-3, 1e-5, 1e-8), SequenceType.DECODE: Cost(4e-3, 2e-5, 1e-7)}
TIGHT: dict[str, Any] = {"num_kvcache_blocks": 24, "kv_cache_block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 40}


def poisson(rate: float, count: int, seed: int = 0, longest: int = 30) -> list[Job]:
    rng, now, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(2, 9) for _ in range(rng.randint(1, longest))]
        jobs.append(Job(now, prompt, rng.randint(1, 20)))
    return jobs


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_a_constant_cost_is_m_d_1(load: float) -> None:
    """Within 2 %; a hundred thousand requests, one token each, one at a time."""
    config, waits = Config(num_kvcache_blocks=8, max_num_seqs=1, max_model_len=16), []
    for seed in range(10):
        jobs = [job._replace(prompt=[5], num_tokens=1) for job in poisson(load / 0.5, 10_000, seed)]
        waits += [out.latency - 0.5 for out in run_fleet(config, FLAT, jobs, 1)]
    assert fmean(waits) == pytest.approx(load * 0.5 / 2 / (1 - load), rel=0.02)


def test_the_steps_are_those_of_a_real_engine() -> None:
    """With preemptions, chunks and cached prefixes: as many steps, of the same kinds and tokens."""
    jobs = [job._replace(at=0.0) for job in poisson(1.0, 30, seed=4)]
    with LLM("tiny", device="cpu", trace=True, **TIGHT) as llm:
        wishes = [SamplingParams(max_tokens=job.num_tokens, ignore_eos=True, temperature=0) for job in jobs]
        outs = llm.generate([job.prompt for job in jobs], wishes, use_tqdm=False)
        real = [(step.kind, sorted(step.tokens.values())) for step in llm.trace.steps]
    simulator, steps = Simulator(Config(max_model_len=2048, **TIGHT), COSTS), []
    plain = simulator.scheduler.schedule

    def schedule() -> Any:
        if (scheduled := plain()) is not None:
            batch = scheduled[0]
            steps.append((batch.type.name.lower(), sorted(batch.num_scheduled_tokens.tolist())))
        return scheduled

    simulator.scheduler.schedule = schedule
    for job in jobs:
        simulator.add(job)
    simulator.advance()
    assert steps == real and simulator.scheduler.num_preemptions > 0
    assert sum(out.num_tokens for out in simulator.served) == sum(len(out.token_ids) for out in outs)


def test_the_hosts_clock_does_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    config, jobs = Config(max_model_len=64, **TIGHT), poisson(30.0, 200)
    plain = run_fleet(config, COSTS, jobs, 2)
    monkeypatch.setattr(time, "perf_counter", lambda: random.random() * 1e6)
    assert run_fleet(config, COSTS, jobs, 2) == plain
    with pytest.raises(ValueError, match="scheduler_delay_factor=0.5 asks the host's clock"):
        Simulator(Config(max_model_len=64, scheduler_delay_factor=0.5, **TIGHT), COSTS)


def test_everybody_is_served_and_times_are_in_order() -> None:
    jobs = poisson(80.0, 300, seed=1)
    outs = run_fleet(Config(max_model_len=64, **TIGHT), COSTS, jobs, 3)
    assert len(outs) == 300 and all(0 < out.ttft <= out.latency for out in outs)
    assert sorted(out.num_tokens for out in outs) == sorted(job.num_tokens for job in jobs)


def test_costs_are_found_again() -> None:
    rng = random.Random(3)
    for truth in (Cost(2e-3, 1e-5, 1e-8), Cost(1e-3), Cost(1e-3, 0.0, 1e-7)):
        steps = [(n, n * rng.randint(1, 900)) for n in (1, 2, 5, 9, 30, 200, 700) for _ in range(9)]
        assert fit_cost([(*step, truth.seconds(*step)) for step in steps]) == pytest.approx(truth, abs=1e-9)
    assert min(fit_cost([(n, n, 1e-3 - 1e-6 * n) for n in range(1, 50)])) >= 0


def test_engines_needed_is_the_least_number() -> None:
    def fleet(count: int) -> list[Served]:
        return [Served(10 / count, 20 / count, 2, 0)] * 5

    for ttft, count in ((10.0, 1), (5.0, 2), (1.0, 10), (0.3, 34)):
        assert engines_needed(fleet, ttft, 99.0) == count
    with pytest.raises(ValueError, match="not with 64 engines either"):
        engines_needed(fleet, 0.1, 99.0, most=64)
