"""What runs together over several processes: ranks, engines, a step ahead and drafts. Each gives the plain engine's tokens,
among preemptions and requests that are taken back, and its deaths are noticed as those of each alone."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from show import children
from test_engine_process import tidy as tidy
from test_mtp import save_module
from test_tensor_parallel import LONG, until_dead

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.options.build import bytes_beside
from atom_mini.parallel.manager import EngineDead

SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 40, "max_num_seqs": 6, "kv_cache_block_size": 4}
EAGLE = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}
MODEL = {"speculative_config": {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 2}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
NGRAM = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}
TOGETHER: dict[str, dict[str, Any]] = {
    "a step ahead over ranks": {"tensor_parallel_size": 2, "overlap": True},
    "EAGLE over ranks": {"tensor_parallel_size": 2, **EAGLE},
    "a draft model over ranks": {"tensor_parallel_size": 2, **MODEL},
    "MTP over ranks": {"tensor_parallel_size": 2, **MTP},
    "MTP over ranks with dealt experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True, **MTP},
    "engines with ranks, a step ahead": {"data_parallel_size": 2, "tensor_parallel_size": 2, "overlap": True},
    "engines with ranks and dealt experts": {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
    "EAGLE in lockstep": {"data_parallel_size": 2, "lockstep": True, **EAGLE},
    "MTP in lockstep": {"data_parallel_size": 2, "lockstep": True, **MTP},
    "lookups in lockstep with dealt experts": {
        "data_parallel_size": 2, "lockstep": True, "enable_expert_parallel": True, **NGRAM},
}  # fmt: skip
TEXTS = ["Once upon a time", "12 + 7 =", "Once upon a day", "Ada lives in Rome. Mia has a red cat. What does Mia have?"]


def requests(count: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that often begin alike; greedy and not, with penalties, log probabilities and stops."""
    rng, stem = random.Random(0), random.Random(1)
    stems = [[stem.randrange(5, vocabulary) for _ in range(n)] for n in (4, 9, 20, 33)]
    made = []
    for n in range(count):
        prompt = rng.choice(stems)[: rng.randint(1, 33)] + [
            rng.randrange(5, vocabulary) for _ in range(rng.randint(0, 3))
        ]
        params = SamplingParams(
            temperature=rng.choice([0, 0.9]), seed=n, max_tokens=rng.randint(1, 24), logprobs=rng.choice([None, 2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]), stop_token_ids=rng.choice([(), (7,)]), ignore_eos=True,
        )  # fmt: skip
        made.append((prompt, params))
    return made


def run(llm: LLM, asked: list[tuple[list[int], SamplingParams]], rng: random.Random | None) -> dict[int, Any]:
    """Place -> (token ids, number of log probabilities, reason), twelve at a time; with `rng`, some are aborted."""
    waiting, alive, found = [*enumerate(asked)], dict[int, Any](), dict[int, Any]()
    while waiting or alive:
        for place, (prompt, params) in waiting[:12]:
            id = llm.add_request(prompt, params)
            alive[place] = llm.engine_core.scheduler.seqs[id]
        del waiting[:12]
        if rng is not None and alive and rng.random() < 0.4:
            llm.abort(alive[rng.choice([*alive])].id)
        for _ in range(rng.randint(1, 9) if rng else 9):
            llm.step()
        for place, seq in [*alive.items()]:
            if seq.is_finished:
                found[place] = (seq.completion_token_ids, len(seq.logprobs), seq.leave_reason)
                del alive[place]
    return found


def nudge(params: SamplingParams) -> SamplingParams:
    """The same but for a ten-thousandth of the temperature: answers that this changes hang on the last bits of a sum, which are
    others in another batch or on another CPU."""
    return replace(params, temperature=params.temperature * 1.0001)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_module("GLM-4.5", folder)
    return folder


@pytest.mark.alone
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.slow
def test_the_plain_engines_tokens(name: str, mixture: Path) -> None:
    options, model = TOGETHER[name], "tiny"
    if "MTP" in name or "dealt" in name:
        model = str(mixture)
    small = SMALL | {"num_kvcache_blocks": 24} | ({"dtype": "float32"} if model != "tiny" else {})
    asked = requests(120 if model == "tiny" else 80, 290)
    with LLM(model, **small | {"num_kvcache_blocks": 400}) as plain:
        expected = run(plain, asked, None)
        nudged = run(plain, [(prompt, nudge(params)) for prompt, params in asked], None)
    firm = {place for place in expected if expected[place] == nudged[place]}
    assert len(firm) > 0.9 * len(asked)
    with LLM(model, **small, **options) as llm:
        found = run(llm, asked, random.Random(name))
        core: Any = llm.engine_core
        numbers = core.metrics()
    assert numbers["preemptions"] > 10 and numbers["waiting"] == numbers["running"] == 0
    assert numbers["free_blocks"] == 24 * options.get("data_parallel_size", 1)
    taken_back = [place for place, (_, _, why) in found.items() if why == "abort"]
    assert len(taken_back) > 10
    for place in firm:
        (tokens, count, why), (whole, length, reason) = found[place], expected[place]
        if why == "abort":
            assert tokens == whole[: len(tokens)], (place, tokens, whole)
        else:
            assert (tokens, count, why) == (whole, length, reason), place


@pytest.mark.alone
@pytest.mark.slow
def test_a_rank_of_one_engine_dies(tidy: Path) -> None:
    """Its engine ends with the cause; the other engine, with its own rank, runs on."""
    llm = LLM("tiny", **SMALL, data_parallel_size=2, tensor_parallel_size=2)
    core: Any = llm.engine_core
    first, second = (engine.process.pid for engine in core.engines)
    assert all(len(children(pid)) == 1 for pid in (first, second))
    os.kill(children(first)[0], signal.SIGKILL)
    with pytest.warns(UserWarning, match="rank 1 is dead: killed by SIGKILL"):
        outs = llm.generate(TEXTS * 4, SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
        while len(core.engines) > 1:
            outs = llm.generate(TEXTS, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert {out.finish_reason for out in outs} <= {"length", "abort"}
    outs = llm.generate(TEXTS, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert [out.finish_reason for out in outs] == ["length"] * 4
    os.kill(children(second)[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"(?s)rank 1 is dead.*rank 1 is dead"):
        for _ in range(50):
            llm.generate(TEXTS, LONG, use_tqdm=False)
    llm.close()


@pytest.mark.alone
@pytest.mark.parametrize(("name", "blow"), [("a step ahead over ranks", signal.SIGKILL), ("EAGLE over ranks", signal.SIGSTOP)])
@pytest.mark.slow
def test_a_rank_dies(name: str, blow: int, tidy: Path) -> None:
    """A killed rank is named; a stopped one is noticed within the group's limit."""
    llm = LLM("tiny", **SMALL, **TOGETHER[name], collective_timeout=5.0)
    llm.generate(TEXTS, SamplingParams(max_tokens=4), use_tqdm=False)
    core: Any = llm.engine_core
    os.kill(children(core.engines[0].process.pid)[0], blow)
    until_dead(llm, "rank 1 is dead: killed by SIGKILL" if blow == signal.SIGKILL else "5000ms", 11)
    llm.close()


@pytest.mark.alone
@pytest.mark.slow
def test_death_in_lockstep_with_drafts(tidy: Path) -> None:
    llm = LLM("tiny", **SMALL, **TOGETHER["EAGLE in lockstep"])
    llm.generate(TEXTS, SamplingParams(max_tokens=4), use_tqdm=False)
    core: Any = llm.engine_core
    os.kill(core.engines[1].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="engine 1 is dead: killed by SIGKILL"):
        llm.generate(TEXTS, LONG, use_tqdm=False)
    llm.close()


def test_a_drafters_bytes_are_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of all ranks is smaller by what rank 0 needs for the head, and by the two matrices that it reads again."""
    from side_by_side import SideBySide

    sizes = {}
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", 48 * 2**20)
    for name, options in (("plain", {}), ("EAGLE", EAGLE)):
        config = EngineArgs("tiny", device="cpu", max_num_seqs=400, tensor_parallel_size=2, **options)
        both = SideBySide(config, bytes_beside(config))
        sizes[name] = [runner.block_bytes for runner in both.runners], both.num_kvcache_blocks
    drafter: Any = __import__("atom_mini.speculation.eagle", fromlist=["EagleDrafter"]).EagleDrafter
    in_all, block = drafter.memory(config, torch.float32)
    (each, _), blocks = sizes["plain"]
    assert sizes["EAGLE"] == ([each, each], (24 * 2**20 - in_all) // (each + block))
    assert blocks == 24 * 2**20 // each and in_all > 958 * 192 * 4
