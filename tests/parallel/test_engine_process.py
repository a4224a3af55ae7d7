"""The engine in its own process: the same tokens, and every waiting caller gets an error when it dies."""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from test_interrupt import Tripwire

import atom_mini
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.parallel import checks, manager
from atom_mini.parallel.core_client import EngineCoreClient
from atom_mini.parallel.engine_process import Abort, Add, Refused, Utility, encode
from atom_mini.parallel.manager import EngineDead
from atom_mini.scheduler import Scheduler
from atom_mini.sequence import Sequence

alone = pytest.mark.alone  # it starts processes or looks at the clock
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 60, "max_num_seqs": 4, "kv_cache_block_size": 4}
PROMPTS = ["Once upon a time", "12 + 7 =", "Once upon a day", "Mia has a red cat."]
SOON = 2.0  # seconds: everybody knows by then
LIMIT = 30.0  # seconds: longer than anything here takes


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a test that hangs, with a stack; its file may set `LIMIT`."""
    limit = getattr(request.module, "LIMIT", LIMIT)

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {limit} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def wait_for(holds: Callable[[], object], limit: float = 10.0) -> float:
    """Seconds until it holds; fails after `limit`."""
    start = time.perf_counter()
    while not holds():
        assert time.perf_counter() < start + limit, f"not so after {limit} s"
        time.sleep(0.005)
    return time.perf_counter() - start


def processes(kind: str = "load_engine", tag: str = "") -> dict[int, str]:
    """The process ids and command lines of all engines, or ranks (`load_rank`), that have `tag` in their environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            is_tagged = not tag or tag.encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if re.search(rf"atom_mini\.options\.process:{kind} \{{", line) and state != "Z" and is_tagged:
            found[int(path.name)] = line
    return found


def listeners(pid: int) -> set[str]:
    """Addresses (hexadecimal) on which a process listens."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.exists()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # tmp_path: is made first, elsewhere
    """A folder for temporary files that must be empty afterwards, without an engine or a rank left."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: sockets under a long path would lie elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    watching = lambda: [t for t in threading.enumerate() if t.name.startswith("engine")]  # noqa: E731
    threads = len(watching())
    yield folder
    gc.collect()
    wait_for(lambda: not processes("load_(engine|rank)", str(folder)))
    wait_for(lambda: len(watching()) <= threads)
    assert [*folder.iterdir()] == []
    folder.rmdir()


FAKE = """
import os, sys
if "parallel.start" in " ".join(sys.orig_argv):  # or a script that names it
    import time
    import atom_mini.config
    from atom_mini.checkpoint import ModelSpec
    from atom_mini.options import build
    from atom_mini.engine_core import EngineCore
    from atom_mini.scheduler import ScheduledBatchOutput

    class Counting:
        "The next token of a sequence is its length plus 100, after a while."
        def forward(self, batch):
            time.sleep(float(os.environ.get("FAKE_STEP", "0.001")))
            {in_forward}
            rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled)
            return ScheduledBatchOutput({{i: (100 + n,) for i, n, gets in rows if gets}})

    def make_core(config):
        {in_loading}
        return EngineCore(config, Counting(), build.make_scheduler(config))

    spec = ModelSpec("fake", 958, 1, 1, 1, 1, 1, 1, 2048, 1e-6, {{"rope_type": "default"}})
    atom_mini.config.read_model = lambda *args: spec
    atom_mini.config.read_defaults = lambda *args: ((), {{}})  # without transformers it starts in a moment
    build.make_core = make_core
"""


@pytest.fixture
def fake(tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineCoreClient]:
    """Makes a client whose engine only counts: it starts fast, and a test can make it fail."""
    (tmp_path / "sitecustomize.py").write_text(FAKE.format(in_forward="pass", in_loading="pass"))
    monkeypatch.syspath_prepend(tmp_path)

    def make(in_forward: str = "pass", in_loading: str = "pass", kind: Any = None, **options: Any) -> Any:
        text = FAKE.format(in_forward=in_forward, in_loading=in_loading)
        (tmp_path / "sitecustomize.py").write_text(text)
        options = {"engine_process": True, **SMALL, **options}
        made = kind("tiny", **options) if kind else EngineCoreClient(EngineArgs("tiny", **options))
        assert [*Path(tempfile.gettempdir()).iterdir()] == [], "the folder of the sockets is still there"
        return made

    return make


def request(core: EngineCoreClient | EngineCore, length: int = 3, **sampling: Any) -> Sequence:
    seq = Sequence([5, 6, 7][:length], 4, SamplingParams(**{"ignore_eos": True, **sampling}))
    core.add(seq)
    return seq


def finish(core: EngineCoreClient, *seqs: Sequence) -> None:
    while not all(s.is_finished for s in seqs):
        core.step()


# Faithful


SAMPLINGS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=20, temperature=0.9, seed=5, top_p=0.9),
    SamplingParams(max_tokens=20, temperature=1.1, seed=2**70 + 3, logprobs=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=30, stop=["the", "."], logprobs=2),
    SamplingParams(max_tokens=16, ignore_eos=True, min_p=0.1, temperature=0.7, seed=2),
    SamplingParams(max_tokens=12, stop_token_ids=[19, 27]),
    SamplingParams(max_tokens=40, temperature=0.8, seed=11, stop="a"),
]
TIMES = {"ttft", "tpot", "latency", "request_id", "num_cached_tokens", "metrics"}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "interleave_decode": True},
    "mixed": {"enable_mixed_steps": True, "max_num_batched_tokens": 24},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


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
    """Calls, streams, and chats."""
    prompts = [p for p in PROMPTS for _ in SAMPLINGS] + [[40, 206, 75]]
    found = [facts(out) for out in llm.generate(prompts, SAMPLINGS * len(PROMPTS) + SAMPLINGS[:1])]
    pieces = [(p.index, p.text, p.finish_reason) for p in llm.stream(PROMPTS, SAMPLINGS[3])]
    streams = ["".join(text for i, text, _ in pieces if i == index) for index in range(4)]
    found += [streams, sorted(p for p in pieces if p[2])]
    chat = [{"role": "user", "content": "What is 20 + 21?"}]
    found.append(facts(llm.chat(chat, SamplingParams(max_tokens=12))[0]))
    return found


@pytest.fixture(scope="module")
def remote() -> Iterator[LLM]:
    with LLM("tiny", engine_process=True, **SMALL) as llm:
        yield llm


@alone
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.smoke
def test_same_answers(name: str, remote: LLM) -> None:
    """Tokens, texts, log probabilities and reasons, from a pool that is too small for all."""
    with LLM("tiny", **SMALL, **OPTIONS[name]) as here:
        expected = answers(here)
    if name == "plain":
        assert answers(remote) == expected
    else:
        with LLM("tiny", engine_process=True, **SMALL, **OPTIONS[name]) as other:
            assert answers(other) == expected
            if name == "drafts":  # what later parts count crosses, too
                outs = other.generate("one two three one two three one two", SAMPLINGS[0])
                assert outs[0].metrics["num_draft_tokens"] > 0


def each_gets_its_own(llm: LLM) -> None:
    """Eight threads, in calls and streams, some dropped: each gets the answers that it gets alone."""
    jobs = [(random.Random(i).choice(PROMPTS), SAMPLINGS[i % len(SAMPLINGS)]) for i in range(20)]
    alone = [facts(llm.generate(*job)[0]) for job in jobs]

    def ask(i: int) -> Any:
        if i % 4 == 1:
            stream = llm.stream("Once", SamplingParams(max_tokens=200, ignore_eos=True))
            next(stream)
            stream.close()
        if i % 3 == 0:
            *_, last = llm.stream(*jobs[i])
            return facts(last.output)
        return facts(llm.generate(*jobs[i])[0])

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, range(len(jobs)))] == alone


@alone
@pytest.mark.slow
def test_many_threads(remote: LLM) -> None:
    each_gets_its_own(remote)
    expect_empty(remote.engine_core)  # type: ignore[arg-type]


def expect_empty(core: EngineCoreClient) -> None:
    """The engine has no request, and every block is free."""
    assert core.is_finished()
    whole = {"waiting": 0, "running": 0, "free_blocks": core.config.num_kvcache_blocks}
    wait_for(lambda: whole.items() <= core.metrics().items())


@alone
def test_a_stop_string_ends_the_request_there_too(remote: LLM) -> None:
    """The front cuts at the stop string, drops later tokens, and aborts the request."""
    (out,) = remote.generate("Once upon a time", SamplingParams(max_tokens=200, stop="a", ignore_eos=True))
    assert out.finish_reason == "stop" and "a" not in out.text
    expect_empty(remote.engine_core)  # type: ignore[arg-type]
    while remote.engine_core.step():  # what it did in vain
        pass


@alone
def test_dropped_and_aborted(remote: LLM) -> None:
    stream = remote.stream("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    asked = remote.add_request("Once", SamplingParams(max_tokens=500, ignore_eos=True))
    remote.step()
    assert remote.abort(asked) and not remote.abort(asked)
    expect_empty(remote.engine_core)  # type: ignore[arg-type]


@alone
def test_refusals_are_those_of_the_engine_here(remote: LLM) -> None:
    with pytest.raises(ValueError, match="prompt of 300 tokens"):
        remote.generate([[5] * 300])
    with pytest.raises(ValueError, match="vocabulary"):
        remote.generate([[10**6]])
    with pytest.raises(ValueError, match="id 7 is in the engine"):
        for _ in range(2):
            remote.engine_core.add(Sequence([5], 4, id=7))
    remote.abort(7)


def interrupted_lines(llm: LLM, prompts: list[str], sampling: SamplingParams, at: int, stride: int) -> set[str]:
    """As in `test_interrupt`: where a call was interrupted, in the caller's thread; the next call is right."""

    def call() -> list[Any]:
        return [(out.text, out.token_ids) for out in llm.generate(prompts, sampling, use_tqdm=False)]

    expected, places = call(), set()
    while (wire := Tripwire(at)).run(call):
        places.add(wire.where)
        assert call() == expected, wire.where
        at += stride
    return places


@alone
@pytest.mark.slow
def test_ctrl_c_at_any_line(remote: LLM) -> None:
    sampling = SamplingParams(max_tokens=6, stop="zebra", ignore_eos=True)
    places = interrupted_lines(remote, PROMPTS[:3], sampling, at=1, stride=23)
    assert sum("core_client" in place for place in places) > 5
    expect_empty(remote.engine_core)  # type: ignore[arg-type]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises an exception, even if the tests' parent ignores it, as a shell does for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@alone
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_it_waits(remote: LLM) -> None:
    """A real signal, to the whole group as a terminal sends it, while a step is awaited."""
    expected = remote.generate("12 + 7 =", SamplingParams(max_tokens=8))[0].text
    steps = remote.metrics.num_steps

    def strike() -> None:
        wait_for(lambda: remote.metrics.num_steps > steps + 5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(KeyboardInterrupt):
        remote.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    striker.join()
    assert os.getpgid(manager_of(remote).process.pid) != os.getpgid(0), "a terminal's Ctrl-C would reach it"
    assert remote.generate("12 + 7 =", SamplingParams(max_tokens=8))[0].text == expected
    expect_empty(remote.engine_core)  # type: ignore[arg-type]


def manager_of(llm: LLM) -> Any:
    core: Any = llm.engine_core
    return core.engines[0]


# Messages


@alone
@pytest.mark.slow
def test_ten_thousand_bad_frames(fake: Callable[..., EngineCoreClient]) -> None:
    """Random, cut, wrongly tagged, oversized and pickled frames: a running request gets its tokens."""
    core, rng = fake(), random.Random(0)
    seq = request(core, max_tokens=200)
    good = [encode(Abort(seq.id)), encode(Utility(3))]
    kinds: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randint(0, 40)),
        lambda: rng.choice(good)[: rng.randint(0, 6)],
        lambda: pickle.dumps({"x": rng.random()}),
        lambda: b"\x92\xa4EVAL" + rng.randbytes(3),
        lambda: b"\x94\xa3ADD" + bytes([rng.randint(0, 127)]) + rng.randbytes(9),
        lambda: encode(Refused(seq.id, "x"))[:-1],  # under the id of a request that runs
        lambda: encode(Add(seq.id, [0], {})),  # an id that is taken
        lambda: msgspec.msgpack.encode(["ADD", seq.id, "no prompt"]),
    ]
    with pytest.warns(UserWarning, match="refused"):
        for i in range(10_000):
            with core.engines[0].sending:
                core.engines[0].outbox.send(kinds[i % len(kinds)]())
            if i % 100 == 0 and not seq.is_finished:
                core.step()
        finish(core, seq)
        assert seq.completion_token_ids == [103 + i for i in range(200)] and seq.leave_reason == "max_tokens"
        assert core.metrics()["free_blocks"] == SMALL["num_kvcache_blocks"]
        core.step()
    core.close()


@alone
@pytest.mark.slow
def test_the_engine_checks_requests_itself(fake: Callable[..., EngineCoreClient]) -> None:
    """A request that cannot be sent is not queued; one that the front accepted by mistake ends, and the others go on."""
    core = fake()
    with pytest.raises((ValueError, OverflowError)):
        core.add(Sequence([5], 4, id=2**70))
    assert core.is_finished() and core.step() is None
    fine, bad = request(core, max_tokens=5), Sequence([5], 4)
    bad.token_ids = [10**6]
    core.add(bad)
    with pytest.warns(UserWarning, match=f"message {bad.id}: token id 1000000"):
        finish(core, fine, bad)
    assert bad.leave_reason == "abort" and fine.num_completion_tokens == 5
    core.close()


@alone
@pytest.mark.slow
def test_bad_frames_do_not_end_the_engine(fake: Callable[..., EngineCoreClient]) -> None:
    """Well-formed frames with one wrong value are refused, and a running request gets its tokens."""
    core, prompt = fake(), [0]
    seq = request(core, max_tokens=200)
    frames = [
        ["XX", True], ["ADD", True, prompt, {}], ["ADD", 2**63, prompt, {}], ["START_DP_WAVE", 2**63], ["ABORT", -1000],
        ["ADD", 10**6, [float("inf")], {}], ["ADD", 10**6, [0.5], {}], ["ADD", 10**6, [2**63], {}], ["ADD", 10**6, [], {}],
        ["ADD", 10**6, prompt, {"cls": 1}], ["ADD", 10**6, prompt, {"temperature": [100] * 2**24}],
    ]  # fmt: skip
    for frame in frames:
        core.step()
        with core.engines[0].sending:
            core.engines[0].outbox.send(msgspec.msgpack.encode(frame))
    with pytest.warns(UserWarning) as warned:
        finish(core, seq)
        wait_for(lambda: len(core.engines[0].messages) + len(warned) >= len(frames))
        core.step()
    assert len([w for w in warned if "refused" in str(w.message)]) == len(frames)
    assert seq.completion_token_ids == [103 + i for i in range(200)]
    expect_empty(core)
    core.close()


@alone
@pytest.mark.slow
def test_added_and_aborted_at_once(fake: Callable[..., EngineCoreClient]) -> None:
    """A thousand times: an abort does not overtake its request, so no block is lost and nothing runs on."""
    core = fake(num_kvcache_blocks=20)
    for i in range(1000):
        seq = request(core, max_tokens=10)
        if i % 3 == 0:
            core.step()
        assert core.abort(seq.id) is seq and seq.leave_reason == "abort"
    expect_empty(core)
    late = request(core, max_tokens=4)
    finish(core, late)
    assert late.completion_token_ids == [103, 104, 105, 106]
    core.close()


def ask_from_eight_threads(llm: LLM) -> int:
    """How many of 10,000 requests got all of their own tokens, while others are aborted."""

    def ask(thread: int) -> int:
        rng, good = random.Random(thread), 0
        for _ in range(25):
            shapes = [(rng.randint(1, 60), rng.randint(1, 3)) for _ in range(50)]
            samplings = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in shapes]
            taken_back = [llm.add_request([9], SamplingParams(max_tokens=50)) for _ in range(2)]
            outs = llm.generate([[thread + 1] * size for size, _ in shapes], samplings, use_tqdm=False)
            good += sum(o.token_ids == [100 + s + i for i in range(n)] for o, (s, n) in zip(outs, shapes, strict=True))
            for request_id in taken_back:
                llm.abort(request_id)
        return good

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(ask, range(8)))


@alone
@pytest.mark.slow
def test_ten_thousand_requests_of_eight_threads(fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets all of its own tokens, while others are aborted: none is lost, doubled or swapped."""
    monkeypatch.setenv("FAKE_STEP", "0")
    llm = fake(kind=LLM, num_kvcache_blocks=4000, max_num_seqs=512)
    assert ask_from_eight_threads(llm) == 10_000
    expect_empty(llm.engine_core)
    llm.close()


@alone
@pytest.mark.slow
def test_it_does_not_run_ahead(fake: Callable[..., EngineCoreClient]) -> None:
    """An engine whose front does not read pauses, and goes on when the front reads; if it dies with a full queue, the
    caller gets the error."""
    core = fake(num_kvcache_blocks=1200)
    seq = request(core, max_tokens=2000)
    time.sleep(3)  # for 2,000 steps
    assert manager.AHEAD < core.metrics()["steps"] < 1000, "the street was full; a question is answered all the same"
    finish(core, seq)
    assert seq.completion_token_ids == [103 + i for i in range(2000)]
    late = request(core, max_tokens=2000)
    wait_for(lambda: len(core.engines[0].messages) >= manager.AHEAD)
    os.kill(core.engines[0].process.pid, signal.SIGKILL)
    wait_for(lambda: core.engines[0].dead)
    with pytest.raises(EngineDead, match="SIGKILL"):
        finish(core, late)
    core.close()


@alone
def test_it_listens_on_no_port(remote: LLM) -> None:
    assert not listeners(os.getpid()) | listeners(manager_of(remote).process.pid)


# Deaths


@alone
@pytest.mark.smoke
def test_kill_the_engine_while_threads_wait(tidy: Path) -> None:
    """Every call and stream soon raises EngineDead with the end of the log; the next call does so at once."""
    llm = LLM("tiny", engine_process=True, **SMALL)
    sampling, errors = SamplingParams(max_tokens=200, ignore_eos=True), []

    def ask(i: int) -> None:
        try:
            [*llm.stream(PROMPTS, sampling)] if i % 2 else llm.generate(PROMPTS, sampling)
        except EngineDead as error:
            errors.append((time.perf_counter(), str(error)))

    threads = [threading.Thread(target=ask, args=[i]) for i in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: llm.metrics.num_decode_tokens > 4)
    os.kill(manager_of(llm).process.pid, signal.SIGKILL)
    start = time.perf_counter()
    for thread in threads:
        thread.join(SOON)
    assert len(errors) == 6 and max(when for when, _ in errors) - start < SOON
    assert all("SIGKILL" in text for _, text in errors)
    for call in (lambda: llm.generate("x"), lambda: [*llm.stream("x")], lambda: llm.add_request("x")):
        start = time.perf_counter()
        with pytest.raises(EngineDead, match="SIGKILL"):
            call()
        assert time.perf_counter() - start < 0.5
    llm.close()
    llm.close()


@alone
@pytest.mark.slow
def test_a_row_without_a_token_crosses(fake: Callable[..., EngineCoreClient]) -> None:
    """The request keeps its tokens and ends with an error; the others run on."""
    rows = "zip(batch.req_ids, batch.context_lens.tolist())"
    core = fake(in_forward=f"return ScheduledBatchOutput({{i: (-1,) if n == 6 else (n,) for i, n in {rows}}})")
    short, long = request(core, 3, max_tokens=9), request(core, 2, max_tokens=4)
    finish(core, short, long)
    assert (short.leave_reason, short.completion_token_ids) == ("not_finite", [3, 4, 5])
    assert (long.leave_reason, long.completion_token_ids) == ("max_tokens", [2, 3, 4, 5])
    core.close()


NEWEST_FIRST = """
from atom_mini.scheduler import Scheduler

class NewestFirst(Scheduler):
    def add(self, seq):
        super().add(seq)
        self.waiting.appendleft(self.waiting.pop())
"""


@alone
@pytest.mark.parametrize("by_name", [True, False])
def test_a_scheduler_of_the_users_own_crosses(
    by_name: bool, fake: Callable[..., EngineCoreClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler class is sent by name: requests end in the same order as in this process."""
    name = f"own_{by_name}"
    (tmp_path / f"{name}.py").write_text(NEWEST_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    own = f"{name}:NewestFirst" if by_name else importlib.import_module(name).NewestFirst
    core = fake(max_num_seqs=1, scheduler_cls=own)
    first = request(core, 3, max_tokens=100)
    while first.num_completion_tokens == 0:  # it runs, so the others come while the only place is taken
        core.step()
    seqs = [request(core, 3, max_tokens=2) for _ in range(3)]
    ends: list[int] = []
    while not all(s.is_finished for s in seqs):
        ends += [s.id for s in core.step().finished]
    core.close()
    assert ends == [first.id, *(s.id for s in reversed(seqs))]


def test_a_scheduler_without_a_module_is_refused() -> None:
    class Inner(Scheduler):
        """Another process cannot import it."""

    with pytest.raises(ValueError, match=r"Inner is defined in .*test_engine_process.*: move it .*engine_process=False"):
        EngineArgs("tiny", engine_process=True, scheduler_cls=Inner)
    EngineArgs("tiny", scheduler_cls=Inner)


@alone
@pytest.mark.slow
def test_its_last_words(fake: Callable[..., EngineCoreClient], capfd: pytest.CaptureFixture[str]) -> None:
    """An exception in a step: the cause, and the traceback from its log."""
    core = fake(in_forward="print('so far'); raise RuntimeError('out of memory: 3 GiB') if len(batch.req_ids) else 0")
    seq = request(core)
    with pytest.raises(EngineDead, match=r"(?s)RuntimeError: out of memory: 3 GiB.*Traceback.*in forward") as caught:
        finish(core, seq)
    assert "make_engine" not in str(caught.value) and not seq.is_finished
    assert core.abort(seq.id) is seq and core.step() is None
    with pytest.raises(EngineDead, match="out of memory"):
        core.metrics()
    core.close()


@alone
@pytest.mark.slow
def test_a_stopped_engine_is_noticed(fake: Callable[..., EngineCoreClient]) -> None:
    """SIGSTOP: no pipe ends and no exit code arrives, but a ping is not answered."""
    core = fake(ping_timeout=1.0)
    seq = request(core, max_tokens=200)
    core.step()
    os.kill(core.engines[0].process.pid, signal.SIGSTOP)
    start = time.perf_counter()
    with pytest.raises(EngineDead, match=r"ping_timeout=1\.0"):
        finish(core, seq)
    assert time.perf_counter() - start < 1 + SOON
    core.close()


@alone
@pytest.mark.slow
def test_a_stuck_engine_is_noticed_and_a_slow_one_is_not(fake: Callable[..., EngineCoreClient]) -> None:
    core = fake(in_forward="time.sleep(0.6 if len(batch.scheduled_tokens) == 2 else 0 if max(batch.context_lens) < 6 else 60)",
                ping_timeout=1.5)  # fmt: skip
    slow = request(core, length=2, max_tokens=3)
    finish(core, slow)
    stuck = request(core, max_tokens=9)
    with pytest.raises(EngineDead, match="ping"):
        finish(core, stuck)
    core.close()


@alone
@pytest.mark.slow
def test_an_idle_engine_lives_on(fake: Callable[..., EngineCoreClient]) -> None:
    """It answers pings: without requests for several times the limit, it is not declared dead. And it outlives the thread
    that made it: the kernel's signal is tied to a thread, which must not be the caller's."""
    made, heard = list[EngineCoreClient](), set[float]()
    thread = threading.Thread(target=lambda: made.append(fake(ping_timeout=0.4)))
    thread.start()
    thread.join()
    core = made.pop()
    wait_for(lambda: heard.add(core.engines[0].last_heard) or len(heard) > 5)
    seq = request(core, max_tokens=5)
    finish(core, seq)
    assert seq.num_completion_tokens == 5
    core.close()


@alone
@pytest.mark.slow
def test_no_ready_in_time(fake: Callable[..., EngineCoreClient]) -> None:
    start = time.perf_counter()
    with pytest.raises(EngineDead, match=r"ready_timeout=1\.5"):
        fake(in_loading="time.sleep(60)", ready_timeout=1.5)
    assert time.perf_counter() - start < 1.5 + SOON


@alone
@pytest.mark.slow
def test_dies_while_loading(fake: Callable[..., EngineCoreClient], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineDead, match=r"(?s)exit code 3\nnow I die$"):
        fake(in_loading="print('now I die', flush=True); os._exit(3)")
    with pytest.raises(EngineDead, match=r"(?s)OSError: no such disk.*Traceback"):
        fake(in_loading="raise OSError('no such disk')")
    with pytest.raises(ValueError, match=r"^too small by 7$"):
        fake(in_loading="raise ValueError('too small by 7')")


@alone
@pytest.mark.slow
def test_a_bad_checkpoint_is_refused_as_ever(tidy: Path, tmp_path: Path) -> None:
    """The loader's own error, from the other process."""
    shutil.copytree(Path(atom_mini.__file__).parent / "tiny", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    errors = []
    for where in (False, True):
        with pytest.raises(ValueError, match="norm") as caught:
            LLM(str(tmp_path / "model"), device="cpu", num_kvcache_blocks=8, **{"engine_process": True} if where else {})
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


FRONT = """  # its engine is parallel.start
import json, os, signal, sys, threading
from atom_mini import EngineArgs, SamplingParams
from atom_mini.parallel.core_client import EngineCoreClient
from atom_mini.sequence import Sequence
core = EngineCoreClient(EngineArgs("tiny", engine_process=True, **json.loads(sys.argv[1])))
core.add(Sequence([5, 6, 7], 4, SamplingParams(max_tokens=200, ignore_eos=True)))
assert core.step() is not None
print(core.engines[0].process.pid, flush=True)
{then}
"""


def python(script: str, options: dict[str, Any], *folders: Path, **more: Any) -> subprocess.Popen[str]:
    """Another process that runs the script; `folders` stand first in its path."""
    path = os.pathsep.join(str(place) or os.getcwd() for place in (*folders, *sys.path))
    command = [sys.executable, "-c", script, json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True, **more)


def front(then: str, script: str = FRONT, options: dict[str, Any] = SMALL) -> tuple[subprocess.Popen[str], list[int]]:
    """A front in another process, and its engines' process ids."""
    process = python(script.format(then=then), options)
    assert process.stdout is not None
    return process, [*map(int, process.stdout.readline().split())]


def expect_end(process: subprocess.Popen[str], engines: list[int], is_killed: bool) -> None:
    """The engines end soon after their front, which is killed or ends."""
    with process:
        if is_killed:
            assert {*engines} <= processes().keys()
            process.kill()
        else:
            assert process.wait(10) == 0
        assert wait_for(lambda: not {*engines} & processes().keys()) < SOON


@alone
@pytest.mark.parametrize("how", ["kill", "kill, and a fork holds the pipe", "exit", "del"])
@pytest.mark.slow
def test_death_of_the_front(how: str, fake: Callable[..., EngineCoreClient]) -> None:
    """The engine ends with its front; `tidy` checks what is left."""
    then = {
        "kill": "signal.pause()",
        "kill, and a fork holds the pipe": "if os.fork() == 0: os.setsid(); signal.alarm(5)\nsignal.pause()",
        "exit": "",
        "del": "engine = core.engines[0]; del core; assert engine.dead and not engine.is_alive()",
    }[how]
    process, engines = front(then)
    assert len(engines) == 1
    expect_end(process, engines, how.startswith("kill"))


@alone
@pytest.mark.parametrize("when", ["as it starts", "while it loads"])
@pytest.mark.slow
def test_death_of_the_front_before_ready(when: str, fake: Callable[..., EngineCoreClient], tidy: Path, tmp_path: Path) -> None:
    loading = f"open({str(tmp_path / 'loads')!r}, 'w').close(); time.sleep(60)"
    (tmp_path / "sitecustomize.py").write_text(FAKE.format(in_forward="pass", in_loading=loading))
    with python(FRONT.format(then=""), SMALL) as process:
        try:
            wait_for(lambda: [*tidy.iterdir()] and processes(tag=str(tidy)), LIMIT * 0.6)
            if when == "while it loads":
                wait_for(lambda: (tmp_path / "loads").exists())
        finally:
            process.kill()


@alone
@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_while_it_starts(fake: Callable[..., EngineCoreClient]) -> None:
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        fake(in_loading="time.sleep(60)")
    timer.join()


@alone
@pytest.mark.slow
def test_closed_where_warnings_are_errors(fake: Callable[..., EngineCoreClient]) -> None:
    """No socket is left to the garbage collector, which would warn and not close it."""
    with front("import warnings\nwarnings.simplefilter('error')\ncore.close()")[0] as process:
        assert process.wait(10) == 0


@alone
@pytest.mark.slow
def test_a_fork_has_no_engine(fake: Callable[..., EngineCoreClient]) -> None:
    """Every call in a fork raises an error, and the engine goes on for its owner."""
    then = """
from atom_mini.parallel.engine_process import EngineCoreProc
from atom_mini.parallel.manager import EngineDead
if os.fork() == 0:
    signal.alarm(5)
    for call in (core.step, core.metrics, core.engines[0].check_alive, lambda: core.add(Sequence([5], 4))):
        try:
            os._exit(call() is None)
        except EngineDead as error:
            assert "a fork" in str(error)
    core.abort(0), core.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
while core.step():
    pass
"""
    with front(then)[0] as process:
        assert process.wait(20) == 0


@alone
@pytest.mark.slow
def test_a_long_place_for_temporary_files(fake: Callable[..., Any], tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket is short."""
    place = tidy / ("x" * 110)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    fake().close()
    place.rmdir()


@alone
@pytest.mark.slow
def test_nothing_is_imported_from_the_current_folder(fake: Callable[..., EngineCoreClient], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "zmq.py").write_text("raise RuntimeError('not this one')")
    script = tmp_path / "parallel.start.py"  # a name that `FAKE` knows
    script.write_text(FRONT.format(then="core.close()"))
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    command = [sys.executable, str(script), json.dumps(SMALL)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path / "here", check=True)


def test_how_an_end_is_described() -> None:
    ends = [manager.describe_end(code) for code in (-9, -35, 3)]
    assert ends == ["killed by SIGKILL", "killed by signal 35", "exit code 3"]


def test_only_strings_of_sys_path_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/x"), "/y", "/z"])
    assert manager.environment()["PYTHONPATH"] == os.pathsep.join(["/y", "/z"])


# The options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine_process": True, "trace": True}, "trace=True does not go with engine_process=True: set it to False"),
        ({"engine_process": "yes"}, "engine_process='yes' must be True or False"),
        ({"engine_process": True, "ping_timeout": 0}, "ping_timeout=0 must be a number above 0"),
        ({"ping_timeout": 5.0}, "ping_timeout has no effect with engine_process=False: change that"),
        ({"engine_process": True, "device": Path("cpu")}, "device=.*must be a valid string"),
    ],
)
def test_bad_knobs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineArgs("tiny", **options)


@pytest.mark.parametrize(("option", "missing"), [("engine_process=True", "zmq"), ("tensor_parallel_size=2", "zmq"),
                                                 ("data_parallel_size=2", "msgspec")])  # fmt: skip
def test_without_the_extra(option: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(ValueError, match=rf'{option} needs {missing}: run pip install -e "\.\[processes\]"'):
        eval(f'EngineArgs("tiny", {option})')


def test_only_what_was_given_is_sent() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    config = EngineArgs("tiny", engine_process=True, max_num_seqs=3, speculative_config=drafts, ready_timeout=9)
    order = config.recipe
    assert order["model"] == "tiny" and order["options"].keys() == {"max_num_seqs", "speculative_config"}
    there = EngineArgs(order["model"], **json.loads(json.dumps(order["options"])))
    assert there.speculative_config == config.speculative_config and not there.engine_process


@alone
def test_importing_the_engine_brings_no_socket_along() -> None:
    code = "import sys, atom_mini; sys.exit(bool({'zmq', 'msgspec', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
