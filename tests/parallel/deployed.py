"""Deployments of the engine over processes, what is asked of them, and how to look at their processes."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atom_mini import LLM, SamplingParams
from atom_mini.parallel.core_client import EngineCoreClient
from atom_mini.sequence import Sequence

SMALL: dict[str, Any] = {
    "device": "cpu", "num_kvcache_blocks": 60, "max_num_seqs": 4, "kv_cache_block_size": 4,
}  # fmt: skip
EAGLE = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
NGRAM = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}
ENGINES, LOCKSTEP = {"data_parallel_size": 2}, {"data_parallel_size": 2, "lockstep": True}
RANKS, DEALT = {"tensor_parallel_size": 2}, {"enable_expert_parallel": True}
APART = {"kv_transfer_config": [{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]}
P2P = {"kv_transfer_config": [role | {"kv_connector": "P2pNcclConnector"} for role in APART["kv_transfer_config"]]}
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "process": {"engine_process": True},
    "engines": {**ENGINES, "routing": "prefix"},
    "lockstep": LOCKSTEP,
    "ranks": RANKS,
    "apart": APART,
}
COMBINED: dict[str, dict[str, Any]] = {
    "a step ahead over ranks": {**RANKS, "overlap": True},
    "EAGLE over ranks": {**RANKS, **EAGLE},
    "MTP over ranks with dealt experts": {**RANKS, **DEALT, **MTP},
    "engines with ranks and dealt experts, a step ahead": {
        **ENGINES, **RANKS, **DEALT, "overlap": True,
    },
    "EAGLE in lockstep": {**LOCKSTEP, **EAGLE},
    "MTP in lockstep": {**LOCKSTEP, **MTP},
    "lookups in lockstep with dealt experts": {**LOCKSTEP, **DEALT, **NGRAM},
}  # fmt: skip
PROMPTS = ["Once upon a time", "12 + 7 =", "Once upon a day", "Mia has a red cat."]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SAMPLINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=20, temperature=0.9, seed=5, top_p=0.9),
    SamplingParams(
        max_tokens=20, temperature=1.1, seed=2**70 + 3, logprobs=3, repetition_penalty=1.2
    ),
    SamplingParams(max_tokens=30, stop=["the", "."], logprobs=2),
    SamplingParams(max_tokens=16, ignore_eos=True, min_p=0.1, temperature=0.7, seed=2),
    SamplingParams(max_tokens=12, stop_token_ids=[19, 27]),
]
TIMES = {"ttft", "tpot", "latency", "request_id", "num_cached_tokens", "metrics"}


class Close(float):
    """A log probability, whose last bits depend on the rest of the batch."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def facts(out: Any) -> dict[str, Any]:
    """The parts of an answer that do not depend on the clock."""
    found = {name: value for name, value in vars(out).items() if name not in TIMES}
    found["logprobs"] = [{i: Close(p) for i, p in entry.items()} for entry in out.logprobs or ()]
    return found


def answers(llm: LLM) -> list[Any]:
    """Calls, streams, and a chat: greedy, seeded, with filters, penalties and stop strings."""
    prompts = [prompt for prompt in PROMPTS for _ in SAMPLINGS]
    found: list[Any] = [facts(out) for out in llm.generate(prompts, SAMPLINGS * len(PROMPTS))]
    pieces = [(p.index, p.text, p.finish_reason) for p in llm.stream(PROMPTS, SAMPLINGS[3])]
    found += ["".join(text for i, text, _ in pieces if i == index) for index in range(4)]
    found.append(sorted(piece for piece in pieces if piece[2]))
    chat = [{"role": "user", "content": "What is 20 + 21?"}]
    found.append(facts(llm.chat(chat, SamplingParams(max_tokens=12))[0]))
    return found


def core_of(llm: LLM) -> Any:
    return llm.engine_core


def expect_empty(core: Any) -> None:
    """No engine has a request, and every block is free."""
    assert core.is_finished()
    blocks = len(core.engines) * core.config.num_kvcache_blocks
    whole = {"waiting": 0, "running": 0, "free_blocks": blocks}
    wait_for(lambda: whole.items() <= core.metrics().items())


def request(core: EngineCoreClient, length: int = 3, **sampling: Any) -> Sequence:
    params = SamplingParams(**{"ignore_eos": True, **sampling})
    seq = Sequence([5, 6, 7][:length], 4, params)
    core.add(seq)
    return seq


def finish(core: EngineCoreClient, *seqs: Sequence) -> None:
    while not all(seq.is_finished for seq in seqs):
        core.step()


def random_requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that often begin alike; greedy and not, with penalties, scores and stops."""
    rng, stem = random.Random(0), random.Random(1)
    stems = [[stem.randrange(5, 290) for _ in range(n)] for n in (4, 9, 20, 33)]
    made = []
    for n in range(count):
        own = [rng.randrange(5, 290) for _ in range(rng.randint(0, 3))]
        prompt = rng.choice(stems)[: rng.randint(1, 33)] + own
        params = SamplingParams(
            temperature=rng.choice([0, 0.9]), seed=n, max_tokens=rng.randint(1, 24),
            logprobs=rng.choice([None, 2]), repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            stop_token_ids=rng.choice([(), (7,)]), ignore_eos=True,
        )  # fmt: skip
        made.append((prompt, params))
    return made


def run(llm: LLM, asked: list[Any], rng: random.Random | None = None) -> dict[int, Any]:
    """Place -> (token ids, number of log probabilities, reason), twelve at a time; with `rng`,
    some are aborted."""
    waiting, alive, found = [*enumerate(asked)], dict[int, Any](), dict[int, Any]()
    while waiting or alive:
        for place, (prompt, params) in waiting[:12]:
            id = llm.add_request(prompt, params)
            alive[place] = core_of(llm).scheduler.seqs[id]
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


# Processes


def wait_for(holds: Callable[[], object], limit: float = 30.0) -> None:
    """Return when it holds; fail after `limit` seconds."""
    start = time.perf_counter()
    while not holds():
        assert time.perf_counter() < start + limit, f"not so after {limit} s"
        time.sleep(0.005)


def processes(kind: str = "load_engine", tag: str = "") -> list[int]:
    """The process ids of all engines, or ranks (`load_rank`), with `tag` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            is_tagged = not tag or tag.encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if re.search(rf"options\.process:{kind} \{{", line) and state != "Z" and is_tagged:
            found.append(int(path.name))
    return found


def listeners(pid: int) -> set[str]:
    """Addresses (hexadecimal) on which a process listens."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.add(address.split(":")[0])
    return found


def python(script: str, *arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Another process that runs the script, with our path."""
    path = os.pathsep.join(str(place) or os.getcwd() for place in sys.path)
    env = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", script, *arguments]
    more |= {"env": env, "cwd": "/"}  # where no package lies
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
