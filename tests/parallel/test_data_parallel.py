"""Several engines behind one front: the same tokens, requests where their beginnings are, deaths that stay small, and
in lockstep the same collectives on all ranks, whatever comes when."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint, save_family
from show import check_blocks
from test_engine_process import (  # noqa: F401
    PROMPTS,
    SMALL,
    SOON,
    answers,
    ask_from_eight_threads,
    each_gets_its_own,
    expect_end,
    facts,
    fake,
    front,
    interrupted_lines,
    listeners,
    processes,
    python,
    tidy,
    time_limit,
    wait_for,
)

from atom_mini import LLM, Config, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_core, make_runner
from atom_mini.parallel.engine_process import (
    Abort,
    Add,
    FromEngine,
    Output,
    Shutdown,
    Utility,
    Wave,
    decode,
    encode,
    pack_params,
)
from atom_mini.parallel.lockstep import (
    Agreement,
    LockstepProc,
    LockstepRunner,
    dummy_batch,
    make_member,
    with_spare_block,
)
from atom_mini.parallel.manager import EngineDead
from atom_mini.parallel.replicas import Replica, Replicas, chain, devices, longest_match, make_loop
from atom_mini.parallel.shards import open_group
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.sequence import Sequence, SequenceType

alone = pytest.mark.alone  # it starts processes or looks at the clock
PAIR: dict[str, Any] = {"data_parallel_size": 2, **SMALL}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}


def replicas_of(llm: LLM) -> Replicas:
    core: Any = llm.engine_core
    assert isinstance(core, Replicas)
    return core


def pids_of(core: Replicas) -> list[int]:
    return [engine.process.pid for engine in core.engines]


@pytest.fixture(scope="module")
def routed() -> Iterator[LLM]:
    with LLM("tiny", routing="prefix", **PAIR) as llm:
        yield llm


@pytest.fixture(scope="module")
def locked() -> Iterator[LLM]:
    with LLM("tiny", lockstep=True, **PAIR) as llm:
        yield llm


@pytest.fixture(params=["routed", "locked"])
def both(request: pytest.FixtureRequest) -> LLM:
    return request.getfixturevalue(request.param)


# Faithful


@pytest.fixture(scope="module")
def here() -> Any:
    with LLM("tiny", **SMALL) as llm:
        return answers(llm)


def expect_empty(core: Replicas) -> None:
    assert core.is_finished()
    whole = {"waiting": 0, "running": 0, "free_blocks": len(core.engines) * SMALL["num_kvcache_blocks"]}
    wait_for(lambda: whole.items() <= core.metrics().items())


@alone
@pytest.mark.smoke
def test_same_answers(both: LLM, here: Any) -> None:
    """Tokens, texts, log probabilities and reasons of one engine: greedy, seeded, with stop strings, in streams."""
    assert answers(both) == here
    core = replicas_of(both)
    assert min(engine.num_given for engine in core.engines) > 5
    expect_empty(core)


@alone
def test_same_answers_in_mixed_steps(here: Any) -> None:
    with LLM("tiny", enable_mixed_steps=True, max_num_batched_tokens=24, **PAIR) as llm:
        assert answers(llm) == here
        expect_empty(replicas_of(llm))


@alone
@pytest.mark.slow
def test_many_threads(locked: LLM) -> None:
    """Each gets the answers that it gets alone, and no wave is lost."""
    each_gets_its_own(locked)
    expect_empty(replicas_of(locked))


@alone
@pytest.mark.slow
def test_ctrl_c_at_any_line(both: LLM) -> None:
    """Nothing is left in an engine."""
    sampling = SamplingParams(max_tokens=5, stop="zebra", ignore_eos=True)
    assert len(interrupted_lines(both, PROMPTS[:3], sampling, at=5, stride=61)) > 5
    expect_empty(replicas_of(both))


@alone
@pytest.mark.slow
def test_ten_thousand_requests_of_eight_threads(fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Each gets all of its own tokens, while others are aborted: none is lost, doubled or swapped."""
    monkeypatch.setenv("FAKE_STEP", "0")
    llm = fake(kind=LLM, data_parallel_size=2, routing="prefix", num_kvcache_blocks=2000, max_num_seqs=512)
    assert ask_from_eight_threads(llm) == 10_000
    core = replicas_of(llm)
    whole = {"waiting": 0, "running": 0, "free_blocks": 4000}
    wait_for(lambda: whole.items() <= core.metrics().items())
    assert min(engine.num_given for engine in core.engines) > 1000
    llm.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@alone
@pytest.mark.slow
def test_idle_engines_sleep(both: LLM) -> None:
    """Without work they take less than a twentieth of a core, and they wake up."""
    both.generate("Once", SamplingParams(max_tokens=4))
    pids = pids_of(replicas_of(both))
    time.sleep(0.2)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(2)
    used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    assert max(used) < 0.1, used
    assert both.generate("Once", SamplingParams(max_tokens=4))[0].token_ids


@alone
def test_it_listens_on_loopback_alone(both: LLM) -> None:
    for pid in (os.getpid(), *pids_of(replicas_of(both))):
        assert listeners(pid) <= {"0100007F", "0" * 24 + "01000000"}


# Routing


def on_page(config: Config, runner: Any) -> Any:
    """The loop of a replica, without sockets: its messages are in `sent`."""
    sent: list[Any] = []
    outbox = SimpleNamespace(send=lambda frame: sent.append(decode(frame, FromEngine)))
    loop = make_loop(EngineCore(config, runner), None, outbox)
    loop.sent = sent
    return loop


class Counting:
    """The next token of a sequence is its length plus 100."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled, strict=True)
        return ScheduledBatchOutput({i: (100 + n,) for i, n, gets in rows if gets})


def near_config(**options: Any) -> Config:
    config = EngineArgs(**{"data_parallel_size": 2, "routing": "prefix", **SMALL, **options})
    return config.changed(recipe={"number": 0, "meeting": ""})


@pytest.mark.parametrize("seed", range(8))
def test_the_fronts_hashes_are_those_of_the_index(seed: int) -> None:
    """After every step the front's set equals the index, after adds, aborts, preemptions, and rollbacks."""
    rng = random.Random(seed)
    loop = on_page(near_config(num_kvcache_blocks=rng.choice([12, 40]), max_num_batched_tokens=24), Counting())
    core, known = loop.core, SimpleNamespace(hashes=set[int]())
    core.scheduler.eos_token_ids = ()
    dropped, texts = 0, [[rng.randint(1, 3)] * rng.randint(1, 30) for _ in range(6)]
    for _ in range(400):
        if rng.random() < 0.3 and len(core.scheduler.seqs) < 8:
            text = rng.choice(texts)[: rng.randint(1, 30)] + [rng.randint(5, 9)] * rng.randint(0, 6)
            core.add(Sequence(text, 4, SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True)))
        if rng.random() < 0.1 and core.scheduler.seqs:
            core.abort(rng.choice([*core.scheduler.seqs]))
        if rng.random() < 0.02:
            core.rollback()
        if not (step := core.step()):
            continue
        loop.steps += 1
        loop._report(step)
        for message in loop.sent:
            if isinstance(message, Output):
                Replica.note(known, message)  # type: ignore[arg-type]
                dropped += sum(not is_there for is_there in message.blocks.values())
        loop.sent.clear()
        assert known.hashes == {*core.scheduler.block_manager.index.hash_to_block_id}
    assert dropped > 5


@alone
def test_without_prefix_routing_nothing_is_noted(locked: LLM) -> None:
    loop = on_page(near_config(routing="load"), Counting())
    assert type(loop.core.scheduler.block_manager.index).__name__ == "PrefixIndex"
    loop.core.add(Sequence([1] * 20, 4))
    loop._report(loop.core.step())
    (output,) = loop.sent
    assert isinstance(output, Output) and not output.blocks and not output.is_new
    assert not any(engine.hashes for engine in replicas_of(locked).engines)


@alone
def test_the_chain_is_that_of_the_block_manager(routed: LLM) -> None:
    """A prompt that has just been computed is found at the front, block by block, and there alone."""
    core, text = replicas_of(routed), [7, 8, 9, 10] * 6
    routed.generate([text], SamplingParams(max_tokens=1))
    hashes = [*chain(Sequence([*text, 1], 4))]
    matches = sorted(engine.match(hashes) for engine in core.engines)
    assert matches == [0, 6] and len(hashes) == 6
    changed = [*chain(Sequence([*text[:9], 1, *text[10:], 1], 4))]
    assert max(engine.match(changed) for engine in core.engines) == 2


def conversations(llm: LLM, policy: str) -> float:
    """The hit rate of ten conversations of five turns each, in a random order."""
    core, rng, found, asked = replicas_of(llm), random.Random(3), 0, 0
    core.config = core.config.changed(routing=policy)
    texts = {i: [i + 1 + 50 * (policy == "load")] * 20 for i in range(10)}
    for i in rng.sample([*texts] * 5, 50):
        texts[i] += [rng.randint(1, 90) for _ in range(9)]
        (out,) = llm.generate([texts[i]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        found, asked = found + out.num_cached_tokens, asked + len(texts[i])
        texts[i] = texts[i] + out.token_ids
    return found / asked


@alone
@pytest.mark.slow
def test_prefix_routing_beats_least_load(fake: Callable[..., Any]) -> None:  # noqa: F811
    llm = fake(kind=LLM, data_parallel_size=2, routing="prefix", num_kvcache_blocks=500)
    rates = {policy: conversations(llm, policy) for policy in ("load", "prefix")}
    assert rates["prefix"] > rates["load"] + 0.1, rates
    given = [engine.num_given for engine in replicas_of(llm).engines]
    assert min(given) > 25, given
    llm.close()


@alone
@pytest.mark.slow
def test_prefix_routing_starves_nobody(fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """All prompts begin alike, and one replica has the beginning: it gets little more than its share."""
    monkeypatch.setenv("FAKE_STEP", "0.002")
    llm = fake(kind=LLM, data_parallel_size=2, routing="prefix", num_kvcache_blocks=500)
    core, popular = replicas_of(llm), [3] * 40
    llm.generate([popular], SamplingParams(max_tokens=1), use_tqdm=False)
    sampling, loads = SamplingParams(max_tokens=6, ignore_eos=True), []
    for i in range(300):
        llm.add_request([*popular, i % 90], sampling)
        loads.append([engine.load[0] for engine in core.engines])
    assert max(abs(a - b) for a, b in loads) <= 33
    assert min(loads[-1]) > 100
    while llm.step():
        pass
    llm.close()


def stub(unfinished: int, *known: Sequence) -> Any:
    made = SimpleNamespace(load=(unfinished, 0), hashes={hash for seq in known for hash in chain(seq)})
    made.match = lambda hashes: Replica.match(made, hashes)
    return made


@pytest.mark.parametrize(
    ("loads", "length", "where"),
    [
        ((5, 0), 16, 0),  # all of it is known there
        ((32, 0), 16, 0),
        ((33, 0), 16, 1),  # too busy
        ((363, 330), 16, 0),  # by 33, which is a tenth
        ((364, 330), 16, 1),
        ((5, 0), 33, 1),  # 16 of 33: not half
        ((5, 0), 31, 0),
        ((0, 5), 99, 0),
    ],
)
def test_the_rule(loads: tuple[int, int], length: int, where: int) -> None:
    known = Sequence([1] * 17, 4)
    pair = [stub(loads[0], known), stub(loads[1])]
    prompt = Sequence([1] * 17 + [2] * 90, 4).token_ids[:length]
    assert pair.index(longest_match(pair, Sequence(prompt, 4))) == where


# Deaths


@alone
@pytest.mark.slow
def test_a_replica_dies(fake: Callable[..., Any]) -> None:  # noqa: F811
    """The numbers are of those that live. A dead one's requests end with "abort" and a warning, the others get their
    tokens, and it gets nothing more."""
    llm = fake(kind=LLM, data_parallel_size=3)
    core, sampling = replicas_of(llm), SamplingParams(max_tokens=150, ignore_eos=True)
    *_, idle = core.engines
    os.kill(idle.process.pid, signal.SIGKILL)
    wait_for(lambda: idle.dead)
    with pytest.warns(UserWarning, match="SIGKILL"):
        assert core.metrics()["free_blocks"] == 2 * SMALL["num_kvcache_blocks"]
    results: list[Any] = [None] * 6

    def ask(i: int) -> None:
        (out,) = llm.generate([[5] * (i + 1)], sampling, use_tqdm=False)
        results[i] = out.finish_reason, out.token_ids, time.perf_counter()

    threads = [threading.Thread(target=ask, args=[i], daemon=True) for i in range(6)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for thread in threads:
            thread.start()
        wait_for(lambda: len(core.scheduler.seqs) == 6 and llm.metrics.num_steps > 10)
        dead, alive = core.engines
        lost = {seq.num_prompt_tokens - 1 for seq in [*dead.seqs.values()]}
        start = time.perf_counter()
        os.kill(dead.process.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert len(lost) == 3 and core.engines == [alive]
    for i, (reason, token_ids, when) in enumerate(results):
        if i in lost:
            assert reason == "abort" and when < start + SOON
        else:
            assert token_ids == [101 + i + n for n in range(150)]
    assert ["SIGKILL" in str(w.message) for w in warned if "engine 0 is dead" in str(w.message)] == [True]
    given = dead.num_given
    (out,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert out.token_ids == [102, 103, 104] and dead.num_given == given
    os.kill(alive.process.pid, signal.SIGKILL)
    for call in (lambda: llm.generate([[5]], sampling), lambda: [*llm.stream([[5]], sampling)], lambda: llm.add_request([5])):
        with pytest.raises(EngineDead, match=r"(?s)SIGKILL.*SIGKILL.*SIGKILL"):
            while True:
                call()
    llm.close()


@alone
@pytest.mark.slow
def test_a_stopped_replica_dies(fake: Callable[..., Any]) -> None:  # noqa: F811
    llm = fake(kind=LLM, data_parallel_size=2, ping_timeout=1.0)
    core = replicas_of(llm)
    ids = [llm.add_request([5], SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(2)]
    seqs = [core.scheduler.seqs[i] for i in ids]
    os.kill(core.engines[0].process.pid, signal.SIGSTOP)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="ping_timeout"):
        while llm.step():
            pass
    assert [seq.leave_reason for seq in seqs] == ["abort", "max_tokens"] and time.perf_counter() - start < 1 + SOON
    llm.close()


@alone
@pytest.mark.slow
def test_one_does_not_start(fake: Callable[..., Any]) -> None:  # noqa: F811
    """All end, and nothing is left of any (`tidy` looks)."""
    with pytest.raises(EngineDead, match="exit code 3"):
        fake(kind=LLM, data_parallel_size=3, in_loading="os._exit(3) if config.recipe['number'] == 1 else 0")
    with pytest.raises(ValueError, match=r"^too small$"):
        fake(kind=LLM, data_parallel_size=2, in_loading="raise ValueError('too small')")


FRONT = """  # its engines are parallel.start
import json, signal, sys
from atom_mini import EngineArgs
from atom_mini.parallel.replicas import make_front
from atom_mini.sequence import Sequence
core = make_front(EngineArgs("tiny", **json.loads(sys.argv[1])))
core.add(Sequence([5, 6, 7], 4))
print(*[engine.process.pid for engine in core.engines], flush=True)
{then}
"""


@alone
@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.slow
def test_death_of_the_front(how: str, fake: Callable[..., Any]) -> None:  # noqa: F811
    process, engines = front("signal.pause()" if how == "kill" else "", FRONT, PAIR)
    assert len(engines) == 2
    expect_end(process, engines, how == "kill")


@alone
@pytest.mark.slow
def test_death_of_the_front_as_replicas_start(tidy: Path, tmp_path: Path) -> None:  # noqa: F811
    """The replicas end, and no folder is left, neither for sockets nor for the group."""
    slow = 'import sys, time\nif "atom_mini.options.process:load_engine" in sys.orig_argv:\n    time.sleep(2)\n'
    (tmp_path / "sitecustomize.py").write_text(slow)
    with python(FRONT.format(then=""), PAIR | {"lockstep": True}, tmp_path) as process:
        try:
            wait_for(lambda: [*tidy.iterdir()] and len(processes(tag=str(tidy))) == 2, 18)
            assert len([*tidy.iterdir()]) == 1
        finally:
            process.kill()
    wait_for(lambda: not [*tidy.iterdir()])


@alone
@pytest.mark.slow
def test_death_in_lockstep_is_the_death_of_all(tidy: Path) -> None:  # noqa: F811
    llm = LLM("tiny", lockstep=True, **PAIR)
    assert [*tidy.iterdir()] == []
    core = replicas_of(llm)
    pids, errors = pids_of(core), list[tuple[float, str]]()

    def ask(i: int) -> None:
        try:
            llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        except EngineDead as error:
            errors.append((time.perf_counter(), str(error)))

    threads = [threading.Thread(target=ask, args=[i], daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: llm.metrics.num_decode_tokens > 20)
    start = time.perf_counter()
    os.kill(pids[1], signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and max(when for when, _ in errors) < start + SOON
    assert all("SIGKILL" in text for _, text in errors), errors
    wait_for(lambda: not {*pids} & processes().keys())
    with pytest.raises(EngineDead):
        llm.generate("x")
    llm.close()


# Lockstep


class Inbox:
    """The part of a socket that a loop uses."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.news = threading.Condition()

    def put(self, *messages: Any) -> None:
        with self.news:
            self.frames.extend(map(encode, messages))
            self.news.notify()

    def poll(self, timeout: int | None = None) -> bool:
        with self.news:
            if timeout is None:
                self.news.wait_for(lambda: self.frames)
            return bool(self.frames)

    def recv(self) -> bytes:
        return self.frames.popleft()


class Outbox:
    """Collects its messages, as long as the front reads."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.num_read = 0

    def send(self, frame: bytes) -> None:
        self.sent.append(decode(frame, FromEngine))

    def poll(self, timeout: float, flags: int) -> bool:
        return len(self.sent) < self.num_read + 16


class Noting(Counting):
    """Counts, and notes for every step the graphs it may replay and the rows of its collectives."""

    num_spare_blocks = 1
    on_device = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.graphs = dict.fromkeys((1, 2, 4), "a recording")
        self.notes: list[Any] = []
        self.ranks: Any = None
        self.real = 0

    def note(self) -> None:
        self.notes.append((*self.graphs, self.ranks.num_rows))
        self.ranks.gather(torch.zeros(1, 1))  # a layer

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        assert self.ranks.num_rows >= batch.total_tokens_num
        self.note()
        self.real += 1
        return super().forward(batch)

    def launch(self, batch: ScheduledBatch) -> None:
        assert batch.block_tables.tolist() == [[SMALL["num_kvcache_blocks"]]]
        self.note()


class Together:
    """Ranks as threads, with a real group; the front is the test's thread."""

    def __init__(self, size: int = 2, limit: float = 10.0) -> None:
        self.folder, self.size = tempfile.mkdtemp(), size
        self.inboxes = [Inbox() for _ in range(size)]
        self.loops: list[Any] = [None] * size
        self.errors: list[BaseException] = []
        self.limit, self.num_waves = limit, 0
        self.threads = [threading.Thread(target=self.live, args=[rank], daemon=True) for rank in range(size)]
        for thread in self.threads:
            thread.start()
        wait_for(lambda: self.errors or all(self.loops))

    def make_core(self, rank: int) -> EngineCore:
        config = near_config(lockstep=True, routing="load").changed(spec=SimpleNamespace(vocab_size=1000))
        runner = Noting()
        runner.ranks = Agreement(open_group(self.folder, rank, self.size, self.limit))
        return EngineCore(config, LockstepRunner(runner, runner.ranks))

    def live(self, rank: int) -> None:
        try:
            outbox = Outbox()
            core = self.make_core(rank)
            core.scheduler.eos_token_ids = ()
            loop: Any = LockstepProc(core, self.inboxes[rank], outbox)
            loop.sent, self.loops[rank] = outbox.sent, loop
            loop.run()
        except BaseException as error:
            self.errors.append(error)

    def wake(self, pause: Callable[[], None] = lambda: None) -> None:
        self.num_waves += 1
        for inbox in random.sample(self.inboxes, self.size):
            pause()
            inbox.put(Wave(self.num_waves))

    def add(self, rank: int, id: int, length: int = 3, **sampling: Any) -> None:
        self.inboxes[rank].put(Add(id, [5] * length, pack_params(SamplingParams(**{"ignore_eos": True, **sampling}))))

    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for loop in self.loops:
            for message in [*loop.sent]:
                for row in message.rows if isinstance(message, Output) else ():
                    found.setdefault(row.id, []).extend(row.token_ids)
        return found

    def take(self) -> None:
        """Read all results."""
        for loop in self.loops:
            loop.outbox.num_read = len(loop.sent)
        self.wake()

    def serve(self, holds: Callable[[], bool], limit: float = 20.0) -> None:
        start = time.perf_counter()
        while not holds():
            assert not self.errors, self.errors
            assert time.perf_counter() < start + limit, "they hang"
            self.take()
            time.sleep(0.002)

    def is_asleep(self) -> bool:
        """All waves have reached all ranks, and they wait for a message."""
        return all(loop.slept == self.num_waves and not loop.inbox.frames for loop in self.loops)

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(Shutdown(0))
        for thread in self.threads:
            thread.join(self.limit + 2)
            assert not thread.is_alive(), "a rank hangs"
        assert not self.errors, self.errors


@alone
@pytest.mark.parametrize("seed", range(3))
def test_the_same_collectives_on_all_ranks(seed: int) -> None:
    """Requests, aborts, pings and waves, in any order and at any time."""
    rng, together = random.Random(seed), Together(2 + seed % 2)
    pause = lambda: time.sleep(rng.choice([0, 0, 0.0005, 0.003]))  # noqa: E731
    wanted = {}
    for id in range(1, 60):
        rank, n = rng.randrange(together.size), rng.randint(1, 12)
        together.add(rank, id, rng.randint(1, 30), max_tokens=n)
        wanted[id] = n
        pause()
        if rng.random() < 0.8:
            together.wake(pause)
        if rng.random() < 0.2:
            together.inboxes[rng.randrange(together.size)].put(Utility(id))
        if rng.random() < 0.1:
            together.inboxes[rank].put(Abort(id))
            del wanted[id]
        pause()
    together.serve(lambda: all(len(together.tokens().get(id, ())) == n for id, n in wanted.items()))
    wait_for(together.is_asleep)
    calls = {loop.ranks.num_calls for loop in together.loops}
    assert len(calls) == 1 and calls.pop() > 40
    notes = [loop.runner.notes for loop in together.loops]
    assert all(note == notes[0] for note in notes), "they did not run the same"
    assert {len(note) for note in notes[0]} == {1, 2}, "eager steps and graphs"
    assert sum(loop.num_dummies for loop in together.loops) > 0 and all(loop.runner.real for loop in together.loops)
    together.close()


@alone
def test_a_dummy_is_not_noticed() -> None:
    """Rank 1 has no work: its dummy steps change no count but their own."""
    together = Together()
    loop = together.loops[1]
    manager, before = loop.core.scheduler.block_manager, loop.metrics()
    together.add(0, 1, max_tokens=9)
    together.wake()
    together.serve(lambda: len(together.tokens().get(1, ())) == 9)
    wait_for(together.is_asleep)
    after = loop.metrics()
    assert after.pop("dummies") == 9 and after.pop("collectives") == together.loops[0].metrics()["collectives"]
    assert after.items() <= before.items() and loop.sent == [] and loop.steps == 0
    assert manager.num_free_blocks == SMALL["num_kvcache_blocks"] and not manager.index.hash_to_block_id
    check_blocks(manager, [])
    together.close()


@alone
def test_a_message_to_one_wakes_only_that_one() -> None:
    """A ping is answered, and a request without its wave waits: no rank starts alone. The wave starts it."""
    together = Together(limit=1.0)
    calls = together.loops[0].ranks.num_calls
    together.inboxes[0].put(Utility(7))
    together.add(0, 1, max_tokens=2)
    wait_for(lambda: together.loops[0].sent and together.loops[0].core.scheduler.seqs)
    time.sleep(1.3)  # longer than the group's limit
    assert together.loops[0].ranks.num_calls == calls and not together.errors
    together.wake()
    together.serve(lambda: len(together.tokens().get(1, ())) == 2)
    together.close()


@alone
def test_a_wave_that_comes_late_to_one_rank() -> None:
    """The next wave has reached one rank when both agree that none has work: they go on until it has reached both."""
    together = Together()
    for id in range(1, 6):
        first, last = Wave(together.num_waves + 1), Wave(together.num_waves + 2)
        together.num_waves += 2
        together.inboxes[1].put(first, last)
        together.inboxes[0].put(first)
        time.sleep(0.05)
        together.add(0, id, max_tokens=1)
        together.inboxes[0].put(last)
        wait_for(lambda id=id: id in together.tokens())  # type: ignore[misc]
        wait_for(together.is_asleep)
    together.close()


@alone
def test_shutdown_waits_for_the_others() -> None:
    together = Together()
    together.inboxes[1].put(Shutdown(0))
    together.num_waves += 1
    together.inboxes[0].put(Wave(together.num_waves))
    together.add(0, 1, max_tokens=3)
    together.inboxes[0].put(Wave(together.num_waves))
    wait_for(lambda: len(together.tokens().get(1, ())) == 3)
    assert together.threads[1].is_alive()
    together.close()


@alone
def test_it_does_not_run_ahead_nor_spin() -> None:
    """An engine with a full queue of results sleeps, and goes on when the front reads."""
    together = Together()
    together.add(0, 1, max_tokens=60)
    together.wake()
    wait_for(lambda: together.loops[0].steps == 16 and together.is_asleep())
    calls = together.loops[0].ranks.num_calls
    time.sleep(0.3)
    assert together.loops[0].steps == 16 and together.loops[0].ranks.num_calls == calls
    together.serve(lambda: len(together.tokens()[1]) == 60)
    together.close()


def test_the_dummy_writes_to_the_spare_block_alone() -> None:
    config = EngineArgs("tiny", **SMALL)
    runner = with_spare_block(make_runner(config))
    runner.kv_cache.fill_(7.0)
    runner.launch(dummy_batch(SMALL["num_kvcache_blocks"]))
    changed = (runner.kv_cache != 7.0).sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert changed == [SMALL["num_kvcache_blocks"]]


@pytest.mark.slow
def test_an_idle_rank_replays_the_others_graph(tmp_path: Path) -> None:
    """An idle rank replays the graph for four rows, and no block changes."""
    pytest.importorskip("triton")
    from recording import graph_runner, load_recorded_graph

    shape = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90}
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=1, max_position_embeddings=320, **shape)
    size = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_model_len": 32}
    config = EngineArgs(str(tmp_path), attention="triton", device="cpu", **size)
    runner = graph_runner(config, load_recorded_graph())
    replays: list[int] = []
    for n, graph in runner.graphs.items():
        graph.replay = lambda n=n, replay=graph.replay: (replays.append(n), replay())
    others = [3, 0, 3, -3, 1]  # another rank decodes three
    ranks: Any = SimpleNamespace(agree=lambda *mine: [*map(max, mine, others)], num_rows=0)
    loop = LockstepProc(EngineCore(config, LockstepRunner(runner, ranks)), None, None)
    runner.kv_cache.fill_(7.0)
    loop.idle()
    changed = (runner.kv_cache != 7.0).sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert replays == [4] and loop.ranks.num_rows == 4 and changed == [8]
    others[1] = 1  # it prefills: all run eagerly
    loop.idle()
    assert replays == [4] and loop.ranks.num_rows == 3


@alone
def test_engines_that_cannot_meet_end(tidy: Path) -> None:  # noqa: F811
    """If a rank does not join the group, the others wait for `ready_timeout`."""
    start = time.perf_counter()
    with pytest.raises(EngineDead, match="ready_timeout"):
        LLM("tiny", lockstep=True, ready_timeout=0.5, **PAIR)
    assert time.perf_counter() - start < 0.5 + SOON


# Experts over ranks


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_family("qwen3_moe", folder, **MOE)
    return folder


IDS = [[5, 6, 7], [8] * 9, [20, 30, 40, 50, 3], [9, 8, 7, 6, 5], [77, 3]] * 2
HOW = [SamplingParams(max_tokens=4 + 3 * i, temperature=0.8 * (i % 2), seed=i, logprobs=1) for i in range(10)]


@alone
@pytest.mark.slow
def test_experts_over_ranks(mixture: Path) -> None:
    """The tokens of one engine with all experts, also if one rank has no request."""
    with LLM(str(mixture), **SMALL) as llm:
        expected = [facts(out) for out in llm.generate(IDS, HOW)]
    with LLM(str(mixture), enable_expert_parallel=True, routing="prefix", **PAIR) as llm:
        assert [facts(out) for out in llm.generate(IDS, HOW)] == expected
        assert facts(llm.generate(IDS[:1], HOW[:1])[0]) == expected[0]
        core = replicas_of(llm)
        wait_for(lambda: len({e.ask()["collectives"] for e in core.engines}) == 1)
        assert min(e.ask()["dummies"] for e in core.engines) >= 0 < core.metrics()["dummies"]
        assert all(e.ask()["free_blocks"] == SMALL["num_kvcache_blocks"] and e.hashes for e in core.engines)


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "glm4_moe"])
def test_each_rank_has_its_own_experts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens no other's experts, and the logits over three ranks are those of one."""
    import atom_mini.loading as loading

    options: dict[str, Any] = {"olmoe": {"num_experts": 6, "num_experts_per_tok": 2}, "qwen3_moe": MOE}.get(kind, {})
    if kind == "glm4_moe":
        options = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
        options |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    save_family(kind, tmp_path, **options)
    opened: dict[str, set[Any]] = {}
    own, read = threading.local(), loading.read_tensor

    def reading(file: Path, name: str, part: Any = None) -> torch.Tensor:
        opened.setdefault(own.rank, set()).add((name, str(part)))
        return read(file, name, part)

    monkeypatch.setattr(loading, "read_tensor", reading)
    folder, results = tempfile.mkdtemp(), list[Any]([None] * 3)
    ids = [[5, 6, 7, 8], [9, 4], [3, 3, 3, 3, 3, 3]]

    def run(rank: int) -> None:
        own.rank = str(rank)
        config = EngineArgs(str(tmp_path), data_parallel_size=3, enable_expert_parallel=True, **SMALL)
        config = config.changed(recipe={"number": rank, "meeting": folder}, ready_timeout=20.0)
        core = make_member(config, make_core)
        runner: Any = core.runner
        runner.ranks.num_rows = 6
        results[rank] = runner.runner, logits(runner.runner, ids[rank])

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own.rank = "whole"
    whole = make_runner(EngineArgs(str(tmp_path), **SMALL))
    for (runner, found), mine in zip(results, ids, strict=True):
        torch.testing.assert_close(found, logits(whole, mine), atol=1e-4, rtol=0)
        layers = [m for m in runner.model.modules() if hasattr(m, "gate_up") and hasattr(m, "router")]
        assert layers and all(m.gate_up.count == 2 for m in layers)
    experts = [{key for key in opened[str(rank)] if ".experts." in key[0]} for rank in range(3)]
    assert all(len(keys) > 0 for keys in experts)
    assert not experts[0] & experts[1] and not experts[1] & experts[2] and not experts[0] & experts[2]


@torch.inference_mode()
def logits(runner: Any, ids: list[int]) -> torch.Tensor:
    n = len(ids)
    lens = np.array([n], np.int32)
    batch = ScheduledBatch(
        type=SequenceType.PREFILL, req_ids=[0], sampling_params=[], scheduled_tokens=np.array(ids), is_sampled=lens > 0,
        num_scheduled_tokens=lens, context_lens=lens, block_tables=np.arange(8, dtype=np.int32)[None],
    )  # fmt: skip
    return runner.run_model(*runner.prepare_model(batch))


# The options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be a whole number from 1"),
        ({"routing": "prefix"}, "routing has no effect with data_parallel_size=1: change that"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"lockstep": True}, "lockstep has no effect with data_parallel_size=1: change that"),
        ({"data_parallel_size": 2, "routing": "round_robin"}, "routing='round_robin' must be 'load' or 'prefix'"),
        (
            {"data_parallel_size": 2, "routing": "prefix", "enable_prefix_caching": False},
            "enable_prefix_caching=False does not go with routing='prefix': set it to True",
        ),
        (
            {"data_parallel_size": 2, "routing": "prefix", "prefix_cache": "radix"},
            "prefix_cache='radix' does not go with routing='prefix': set it to 'hash'",
        ),
        ({"data_parallel_size": 2, "trace": True}, "trace=True does not go with engine_process=True"),
        (
            {"data_parallel_size": 2, "engine_process": False},
            "engine_process=False does not go with data_parallel_size above 1: set it to True",
        ),
        (
            {"data_parallel_size": 2, "lockstep": True, "overlap": True},
            "overlap=True does not go with lockstep=True: set it to False",
        ),
        (
            {"data_parallel_size": 2, "lockstep": True, "scheduler": "spyre"},
            "scheduler='spyre' does not go with lockstep=True: set it to 'atom'",
        ),
        (
            {"data_parallel_size": 2, "lockstep": True, "tensor_parallel_size": 2},
            "tensor_parallel_size=2 does not go with lockstep=True: set it to 1",
        ),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "qwen3 has no experts"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "lockstep": False},
            "lockstep=False does not go with enable_expert_parallel=True over engines: set it to True",
        ),
    ],
)
def test_bad_knobs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        LLM("tiny", device="cpu", **options)


def test_experts_must_divide(mixture: Path) -> None:
    with pytest.raises(ValueError, match="data_parallel_size=4 does not divide num_experts=6: set it to 3"):
        EngineArgs(str(mixture), data_parallel_size=4, enable_expert_parallel=True)
    assert EngineArgs(str(mixture), data_parallel_size=3, enable_expert_parallel=True).lockstep


def test_a_gpu_for_each() -> None:
    asks = lambda device, gpus: devices(EngineArgs(data_parallel_size=2, device=device), gpus)  # noqa: E731
    assert asks(None, 8) == asks("cuda", 2) == ["cuda:0", "cuda:1"]
    assert asks(None, 0) == [None, None] and asks("cpu", 8) == ["cpu", "cpu"]
    for device, gpus, words in ((None, 1, "2 needs 2 GPUs, and there are 1"), ("cuda:0", 8, "one device")):
        with pytest.raises(ValueError, match=words):
            asks(device, gpus)


def test_one_is_off() -> None:
    assert not EngineArgs("tiny", data_parallel_size=1).engine_process
