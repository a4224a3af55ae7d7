"""Each deployment over processes gives the plain engine's answers, survives Ctrl-C, and dies so
that everybody is told and nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployed import (
    COMBINED,
    DEPLOYMENTS,
    LONG,
    PROMPTS,
    SMALL,
    answers,
    core_of,
    expect_empty,
    listeners,
    processes,
    python,
    random_requests,
    run,
    wait_for,
)
from show import children
from test_interrupt import Tripwire
from test_mtp import save_module

from atom_mini import LLM, SamplingParams
from atom_mini.parallel.manager import EngineDead

pytestmark = pytest.mark.processes
slow = pytest.mark.slow
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


SLOW = {"lockstep": slow}  # it starts as the engines do, and steps as the ranks do
PARAMS = [pytest.param(name, marks=SLOW.get(name, ())) for name in DEPLOYMENTS]


@pytest.fixture(scope="module", params=PARAMS)
def deployed(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny", **SMALL, **DEPLOYMENTS[request.param]) as llm:
        yield llm


@pytest.fixture(scope="module")
def here() -> Any:
    with LLM("tiny", **SMALL) as llm:
        return answers(llm)


def pids_of(llm: LLM) -> list[int]:
    return [engine.process.pid for engine in core_of(llm).engines]


# Parity


def test_same_answers(deployed: LLM, here: Any) -> None:
    """Tokens, texts, log probabilities and reasons, from a pool that is too small for all; and
    every engine has worked. None listens but on the loopback interface."""
    assert answers(deployed) == here
    core = core_of(deployed)
    assert all(getattr(engine, "num_given", 9) > 5 for engine in core.engines)
    expect_empty(core)
    pids = [os.getpid(), *pids_of(deployed)]
    pids += [rank for engine in pids_of(deployed) for rank in children(engine)]
    for pid in pids:
        assert listeners(pid) <= {"0100007F", "0" * 24 + "01000000"}


def test_ends_and_refusals(deployed: LLM) -> None:
    """Stop strings, dropped streams and aborts end requests there, too; errors are the plain
    engine's."""
    (out,) = deployed.generate(PROMPTS[0], replace(LONG, stop="a"))
    assert out.finish_reason == "stop" and "a" not in out.text
    stream = deployed.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()
    asked = deployed.add_request("Once", LONG)
    deployed.step()
    assert deployed.abort(asked) and not deployed.abort(asked)
    expect_empty(core_of(deployed))
    for prompt, says in (([5] * 300, "prompt of 300 tokens"), ([10**6], "vocabulary")):
        with pytest.raises(ValueError, match=says):
            deployed.generate([prompt])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_step(deployed: LLM) -> None:
    """A real signal at any moment of a step: engines and ranks go on together. A terminal's
    signal does not reach them."""
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=1, ignore_eos=True)
    expected = [out.token_ids for out in deployed.generate(PROMPTS, sampling)]
    main, rng = threading.main_thread().ident or 0, random.Random(0)
    for _ in range(4):
        strike = threading.Timer(
            rng.uniform(0.005, 0.08), lambda: signal.pthread_kill(main, signal.SIGINT)
        )
        with pytest.raises(KeyboardInterrupt):
            strike.start()
            while True:
                deployed.generate(PROMPTS, LONG)
        assert [out.token_ids for out in deployed.generate(PROMPTS, sampling)] == expected
    assert all(os.getpgid(pid) != os.getpgid(0) for pid in pids_of(deployed))
    expect_empty(core_of(deployed))


@slow
def test_ctrl_c_at_any_line(deployed: LLM) -> None:
    """In the caller's thread: the next call is right, and nothing is left in an engine."""
    sampling = SamplingParams(max_tokens=5, stop="zebra", ignore_eos=True)

    def call() -> list[Any]:
        return [(out.text, out.token_ids) for out in deployed.generate(PROMPTS[:3], sampling)]

    expected, places, at = call(), set(), 3
    while (wire := Tripwire(at)).run(call):
        places.add(wire.where)
        assert call() == expected, wire.where
        at += 67
    assert any("core_client" in place for place in places) and len(places) > 5
    expect_empty(core_of(deployed))


@slow
def test_ten_thousand_requests_of_eight_threads(
    fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets all of its own tokens, while others are aborted: none is lost or swapped."""
    monkeypatch.setenv("FAKE_STEP", "0")
    options = {"routing": "prefix", "num_kvcache_blocks": 2000, "max_num_seqs": 512}
    llm = fake(kind=LLM, data_parallel_size=2, **options)

    def ask(thread: int) -> int:
        rng, good = random.Random(thread), 0
        for _ in range(25):
            shapes = [(rng.randint(1, 60), rng.randint(1, 3)) for _ in range(50)]
            samplings = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in shapes]
            taken_back = [llm.add_request([9], SamplingParams(max_tokens=50)) for _ in range(2)]
            outs = llm.generate([[thread + 1] * size for size, _ in shapes], samplings)
            for out, (size, n) in zip(outs, shapes, strict=True):
                good += out.token_ids == [100 + size + i for i in range(n)]
            for request_id in taken_back:
                llm.abort(request_id)
        return good

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 10_000
    expect_empty(core_of(llm))
    assert min(engine.num_given for engine in core_of(llm).engines) > 1000
    llm.close()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_module("GLM-4.5", folder)
    return folder


@slow
@pytest.mark.parametrize("name", COMBINED)
def test_combined_deployments_give_the_plain_engines_tokens(name: str, mixture: Path) -> None:
    """Among preemptions and requests that are taken back. Answers that a ten-thousandth of the
    temperature changes hang on the last bits of a sum, which are others in another batch."""
    options, model, count = COMBINED[name], "tiny", 60
    small = SMALL | {"num_kvcache_blocks": 24, "max_num_seqs": 6}
    if "MTP" in name or "dealt" in name:
        model, count = str(mixture), 40
        small |= {"dtype": "float32"}
    if "engines" in name:  # which one gets a request, and so who runs out of blocks, is chance
        count, small["num_kvcache_blocks"] = 80, 18
    asked = random_requests(count)
    nudged = [(ids, replace(p, temperature=p.temperature * 1.0001)) for ids, p in asked]
    with LLM(model, **small | {"num_kvcache_blocks": 400}) as plain:
        expected, other = run(plain, asked), run(plain, nudged)
    firm = {place for place in expected if expected[place] == other[place]}
    assert len(firm) > 0.9 * count
    with LLM(model, **small, **options) as llm:
        found = run(llm, asked, random.Random(name))
        expect_empty(core_of(llm))
        assert core_of(llm).metrics()["preemptions"] > 3
    assert sum(why == "abort" for _, _, why in found.values()) > 3
    for place in firm:
        (tokens, length, why), (whole, *rest) = found[place], expected[place]
        if why == "abort":
            assert tokens == whole[: len(tokens)], place
        else:
            assert (tokens, length, why) == (whole, *rest), place


# Deaths


def rank_of(llm: LLM) -> int:
    """Rank 1's process."""
    (rank,) = children(pids_of(llm)[0])
    return rank


IDS = ["killed", "stopped", "rank", "idle", "stopped-rank", "ahead", "lockstep"]
DEATHS: list[Any] = [  # deployment, more options, who is struck, how, what everybody is told
    ("process", {}, "engine", KILL, "engine 0 is dead: killed by SIGKILL"),
    ("process", {"ping_timeout": 1.0}, "engine", STOP, r"ping_timeout=1\.0"),
    ("ranks", {}, "rank", KILL, "rank 1 is dead: killed by SIGKILL"),
    pytest.param("ranks", {}, "idle rank", KILL, "rank 1 is dead: killed by", marks=slow),
    pytest.param("EAGLE over ranks", {"collective_timeout": 2.0}, "rank", STOP, "2000ms",
                 marks=slow),
    pytest.param("a step ahead over ranks", {}, "rank", KILL, "rank 1 is dead: killed", marks=slow),
    pytest.param("EAGLE in lockstep", {}, "last engine", KILL, "engine 1 is dead: killed by",
                 marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "who", "blow", "says"), DEATHS, ids=IDS)
def test_everybody_is_told_of_a_death(
    name: str, more: dict[str, Any], who: str, blow: int, says: str,
    fake: Callable[..., Any], tidy: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Every waiting call and stream, and every later call; no process is left (`tidy`)."""
    options = (DEPLOYMENTS | COMBINED)[name] | more
    if name == "process":
        llm = fake(kind=LLM, **options)
    else:
        (tmp_path / "sitecustomize.py").write_text("")
        llm = LLM("tiny", **SMALL, **options)
    errors: list[str] = []

    def ask(i: int) -> None:
        try:
            while True:
                [*llm.stream([[5, 6]], LONG)] if i % 2 else llm.generate([[5, 6]] * 2, LONG)
        except EngineDead as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask, args=[i], daemon=True) for i in range(6)]
    victim = {"rank": rank_of, "idle rank": rank_of}.get(who, lambda llm: pids_of(llm)[-1])(llm)
    if who == "idle rank":
        os.kill(victim, blow)
        wait_for(lambda: core_of(llm).engines[0].dead)
    for thread in threads:
        thread.start()
    if who != "idle rank":
        wait_for(lambda: llm.metrics.num_steps > 5)
        os.kill(victim, blow)
    for thread in threads:
        thread.join(20)
    assert len(errors) == 6 and all(said == errors[0] for said in errors)
    for call in (lambda: llm.generate([[5]]), lambda: [*llm.stream([[5]])]):
        with pytest.raises(EngineDead, match=says):
            call()
    llm.close()
    llm.close()


def test_a_replica_dies(fake: Callable[..., Any]) -> None:
    """Its requests end with "abort" and one warning, the others get their tokens, and it gets
    nothing more. The numbers are of those that live. With the last one everything ends."""
    llm = fake(kind=LLM, data_parallel_size=3)
    core, sampling = core_of(llm), SamplingParams(max_tokens=150, ignore_eos=True)
    *_, idle = core.engines
    os.kill(idle.process.pid, KILL)
    wait_for(lambda: idle.dead)
    with pytest.warns(UserWarning, match="SIGKILL"):
        assert core.metrics()["free_blocks"] == 2 * SMALL["num_kvcache_blocks"]
    ids = [llm.add_request([5] * (i + 1), sampling) for i in range(6)]
    seqs = [core.scheduler.seqs[id] for id in ids]
    dead, alive = core.engines
    lost = [*dead.seqs.values()]
    llm.step()
    os.kill(dead.process.pid, KILL)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while llm.step():
            pass
    assert len(lost) == 3 and core.engines == [alive] and len(warned) == 1
    for i, seq in enumerate(seqs):
        if seq in lost:
            assert seq.leave_reason == "abort"
        else:
            assert seq.completion_token_ids == [101 + i + n for n in range(150)]
    given = dead.num_given
    (out,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert out.token_ids == [102, 103, 104] and dead.num_given == given
    os.kill(alive.process.pid, KILL)
    for call in (lambda: llm.generate([[5]], LONG), lambda: llm.add_request([5])):
        with pytest.raises(EngineDead, match=r"(?s)SIGKILL.*SIGKILL.*SIGKILL"):
            while True:
                call()
    llm.close()


LOADING: list[tuple[dict[str, Any], str, Any, str]] = [
    ({}, "print('now I die', flush=True); os._exit(3)", EngineDead, r"(?s)exit code 3\nnow I die$"),
    ({}, "raise OSError('no such disk')", EngineDead, r"(?s)OSError: no such disk.*Traceback"),
    ({}, "raise ValueError('too small by 7')", ValueError, r"^too small by 7$"),
    ({"ready_timeout": 1.5}, "time.sleep(60)", EngineDead, r"ready_timeout=1\.5"),
    ({"data_parallel_size": 3}, "os._exit(3) if config.recipe['number'] == 1 else 0",
     EngineDead, "engine 1 is dead: exit code 3"),
    ({"data_parallel_size": 2, "lockstep": True, "ready_timeout": 0.5}, "pass", EngineDead,
     "ready_timeout"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "kind", "says"), LOADING,
    ids=["exits", "fails", "refuses", "hangs", "one-of-three", "alone-in-lockstep"],
)  # fmt: skip
def test_an_engine_that_does_not_start(
    options: dict[str, Any], code: str, kind: Any, says: str, fake: Callable[..., Any]
) -> None:
    """The cause, or the loader's own ValueError; and all that have started end."""
    with pytest.raises(kind, match=says):
        fake(kind=LLM, in_loading=code, **options)


IN_A_RANK = """
import os, sys
if "atom_mini.options.process:load_rank" in sys.orig_argv:
    {code}
"""
STEP = "import atom_mini.scheduler as x; x.ScheduledBatch.__init__ = None"


@slow
@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("import atom_mini.loading as x; x.checkpoint_files = lambda f: {}", ValueError, "lacks"),
        (STEP, EngineDead, "(?s)Traceback.*rank 1 is dead: TypeError"),
    ],
    ids=["refuses its checkpoint", "fails in a step"],
)
def test_a_rank_that_fails(
    code: str, kind: Any, says: str, tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_A_RANK.format(code=code))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind, match=says), LLM("tiny", **SMALL, **DEPLOYMENTS["ranks"]) as llm:
        llm.generate(PROMPTS, LONG)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("name", ["process", "ranks"])
def test_interrupted_while_it_starts(name: str, tidy: Path, fake: Callable[..., Any]) -> None:
    main = threading.main_thread().ident or 0
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        fake(kind=LLM, in_loading="time.sleep(60)", **DEPLOYMENTS[name])
    timer.join()


FRONT = """  # its engines are parallel.start
import json, os, signal, sys, threading
from atom_mini import EngineArgs, SamplingParams
from atom_mini.options.build import make_engine_core as make_front
from atom_mini.sequence import Sequence
core = make_front(EngineArgs("tiny", **json.loads(sys.argv[1])))
core.add(Sequence([5, 6, 7], 4, SamplingParams(max_tokens=200, ignore_eos=True)))
assert core.step() is not None
print(*[engine.process.pid for engine in core.engines], flush=True)
{then}
"""
WAIT = "signal.pause()"
FORK = "if os.fork() == 0: os.setsid(); signal.alarm(20)\nsignal.pause()"
STRICT = "import warnings\nwarnings.simplefilter('error')\ncore.close()"
DROPPED = "engine = core.engines[0]; del core; assert engine.dead"
IN_A_FORK = """
from atom_mini.parallel.manager import EngineDead
if os.fork() == 0:
    signal.alarm(20)
    for call in (core.step, core.metrics, core.engines[0].check_alive):
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
STUCK = """
from show import children
(rank,) = children(core.engines[0].process.pid)
os.kill(rank, signal.SIGSTOP)
signal.signal(signal.SIGINT, signal.default_int_handler)
main = threading.main_thread().ident
threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
try:
    while core.step():
        pass
except KeyboardInterrupt:
    pass
"""
ENDS = ["fork", "engines-killed", "killed-after-fork", "strict", "ends", "dropped"]
ENDS += ["engines-end", "ranks-killed", "stuck-rank", "apart-killed", "apart-end"]
FRONTS: list[Any] = [  # deployment, what the front does then; it is killed if that waits
    ("process", IN_A_FORK), ("engines", WAIT),
    pytest.param("process", FORK, marks=slow), pytest.param("process", STRICT, marks=slow),
    pytest.param("process", "", marks=slow), pytest.param("process", DROPPED, marks=slow),
    pytest.param("engines", "", marks=slow), pytest.param("ranks", WAIT, marks=slow),
    pytest.param("ranks", STUCK, marks=slow), ("apart", WAIT), pytest.param("apart", "", marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "then"), FRONTS, ids=ENDS)
def test_engines_end_with_their_front(
    name: str, then: str, tidy: Path, fake: Callable[..., Any], tmp_path: Path
) -> None:
    """However it ends, and whatever a rank waits for; `tidy` checks what is left."""
    if name == "ranks":
        (tmp_path / "sitecustomize.py").write_text("")
    options = json.dumps(SMALL | DEPLOYMENTS[name])
    with python(FRONT.format(then=then), options) as process:
        try:
            assert process.stdout is not None
            engines = [*map(int, process.stdout.readline().split())]
            assert engines
            if "pause" in then:
                assert {*engines} <= {*processes()}
                process.kill()
            else:
                assert process.wait(30) == 0
            wait_for(lambda: not {*engines} & {*processes()}, 15)
        finally:
            process.kill()


@slow
def test_engines_end_with_a_front_that_is_killed_while_they_load(
    tidy: Path, fake: Callable[..., Any], tmp_path: Path
) -> None:
    """No folder is left, neither for sockets nor for the group."""
    file, options = tmp_path / "sitecustomize.py", json.dumps(SMALL | DEPLOYMENTS["lockstep"])
    is_engine = 'if "atom_mini.options.process:load_engine" in sys.orig_argv'
    file.write_text(f"import sys, time\n{is_engine}:\n    time.sleep(4)\n")
    with python(FRONT.format(then=""), options) as process:
        try:
            wait_for(lambda: [*tidy.iterdir()] and len(processes(tag=str(tidy))) == 2)
        finally:
            process.kill()
    wait_for(lambda: not [*tidy.iterdir()])


@slow
def test_an_idle_engine_lives_on(fake: Callable[..., Any]) -> None:
    """It answers pings, and outlives the thread that made it, to which a signal could be tied."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(fake(kind=LLM, ping_timeout=0.4)))
    thread.start()
    thread.join()
    time.sleep(2)
    (out,) = made[0].generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert out.token_ids == [102, 103]
    made[0].close()


@slow
def test_places_and_paths(
    fake: Callable[..., Any], tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket is short; nothing is imported from the current folder; and what is
    no string in `sys.path` is left out."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "zmq.py").write_text("raise RuntimeError('not this one')")
    place = tidy / ("x" * 110)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/x")])
    monkeypatch.chdir(tmp_path / "here")
    fake().close()
    place.rmdir()
