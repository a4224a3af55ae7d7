"""Messages between processes: each arrives whole, and nothing else is accepted."""

from __future__ import annotations

import ast
import importlib
import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq
from deployed import SMALL, expect_empty, finish, request, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

import atom_mini.parallel
from atom_mini import EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.parallel.engine_process import (
    MAX_FRAME,
    Abort,
    Add,
    EngineCoreProc,
    FromEngine,
    Message,
    Ready,
    Refused,
    Row,
    Shutdown,
    ToEngine,
    Utility,
    UtilityOutput,
    decode_frame,
    encode,
    open_sockets,
    pack_params,
    read_id,
)
from atom_mini.parallel.ranks import Step, ToRank, pack_batch, unpack_batch
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.verify import as_rows

UNSAFE = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "copyreg"}
UNSAFE |= {"send_pyobj", "recv_pyobj", "allow_pickle", "eval", "exec", "__reduce__"}
KINDS = [*get_args(ToEngine), *get_args(FromEngine)]

counts, texts = st.integers(0, 2**62), st.text(max_size=20)
floats, flags = st.floats(allow_nan=False), st.booleans()
scores = st.lists(st.dictionaries(counts, floats, max_size=3), max_size=3)
rows = st.builds(
    Row, counts, counts, st.lists(counts, max_size=5), counts, st.none() | texts, scores
)
FIELDS: dict[Any, Any] = {
    "token_ids": st.lists(counts), "core": texts, "why": texts, "rows": st.lists(rows),
    "params": st.dictionaries(texts, flags | counts | floats | st.lists(counts)),
    "type": st.sampled_from(SequenceType), "values": st.dictionaries(texts, counts | floats),
    "is_refusal": flags, "is_running": flags, "is_new": flags, "seconds": floats,
    "blocks": st.dictionaries(st.integers(0, 2**64 - 1), flags),
}  # fmt: skip


def messages(kind: Any) -> st.SearchStrategy[Message]:
    names = kind.__struct_fields__
    return st.builds(kind, **{name: FIELDS.get(name, counts) for name in names})


anything = st.one_of([messages(kind) for kind in KINDS])


@settings(max_examples=100, deadline=None)
@given(anything)
def test_every_message_arrives_at_its_own_end(message: Message) -> None:
    """And the other end refuses it."""
    frame = encode(message)
    own, other = ToEngine, FromEngine
    if type(message) not in get_args(ToEngine):
        own, other = other, own
    found = decode_frame(frame, own)
    assert found == message and type(found) is type(message) and read_id(frame) == message.id
    with pytest.raises(ValueError, match="not a valid message"):
        decode_frame(frame, other)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64) | anything.map(encode), st.data())
def test_garbage_is_a_value_error(frame: bytes, data: st.DataObject) -> None:
    """Random bytes, cut frames, one byte changed: no other error is raised."""
    changed = bytearray(frame[: data.draw(st.integers(1, max(1, len(frame))))])
    if changed and data.draw(flags):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for kind in (ToEngine, FromEngine, ToRank):
        try:
            found = decode_frame(bytes(changed), kind)
        except ValueError:
            continue
        if isinstance(found, Add):  # another request, and a whole one
            assert all(type(i) is int and i >= 0 for i in found.token_ids)
    assert type(read_id(bytes(changed))) is int


class Bomb:
    """Unpickling this class runs code."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it went off",)


def raw(ids: Any = (7,), id: Any = 5, more: Any = ()) -> bytes:
    return msgspec.msgpack.encode(["ADD", id, ids, {}, *more])


BAD: dict[str, tuple[bytes, int]] = {  # the frame, and the id that can be read in it
    "a pickle": (pickle.dumps(Bomb()), 0),
    "text for ids": (raw("text"), 5),
    "bytes for ids": (raw(b"\0\0\0\0"), 5),
    "a list in ids": (raw([[7]]), 5),
    "a fraction": (raw([1.5]), 5),
    "below 0": (raw([-1]), 5),
    "a flag for an id": (raw([True]), 5),
    "over 64 bits": (raw([2**63, -(2**63)]), 5),
    "a field too many": (raw(more=[1]), 5),
    "a field too few": (msgspec.msgpack.encode(["ADD", 5]), 5),
    "an unknown tag": (msgspec.msgpack.encode(["EVAL", 5, "1 + 1"]), 5),
    "a wrong parameter": (msgspec.msgpack.encode(["ADD", 5, [0], {"stop": {"a": 1}}]), 5),
    "nothing": (b"", 0),
    "very deep": (b"\x91" * 100_000, 0),
    "an id of words": (raw(id="five"), 0),
    "an id that is a flag": (raw(id=True), 0),
    "an id that is too large": (raw(id=2**63), 0),
    "too large": (bytes(MAX_FRAME + 1), 0),
}


@pytest.mark.parametrize("name", BAD, ids=lambda name: name.replace(" ", "-"))
def test_a_bad_frame_is_refused(name: str) -> None:
    frame, id = BAD[name]
    with pytest.raises(ValueError, match="MAX_FRAME" if name == "too large" else "not a valid"):
        decode_frame(frame, ToEngine)
    assert read_id(frame) == id


def test_no_module_runs_its_input() -> None:
    """None imports or calls what makes Python objects of bytes, or runs them."""
    files = [*Path(atom_mini.parallel.__file__ or "").parent.rglob("*.py")]
    assert len(files) >= 4
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, "attr", ""), getattr(node, "id", "")}
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {part for alias in node.names for part in alias.name.split(".")}
                names |= {*(getattr(node, "module", None) or "").split(".")}
            assert not names & UNSAFE, f"{path.name}: {ast.unparse(node)}"


def sent(**options: Any) -> SamplingParams:
    add: Any = decode_frame(encode(Add(1, [0], pack_params(SamplingParams(**options)))), ToEngine)
    return SamplingParams(**add.params)


def test_parameters_arrive() -> None:
    """All but the stop strings, which the front searches for; of a seed the 64 bits that count;
    and of any number over 64 bits one that means the same."""
    options = {"max_tokens": 7, "logprobs": 2, "stop_token_ids": [1, 2], "min_p": 0.5, "n": 1}
    asked = SamplingParams(seed=5, stop=["x"], **options)  # type: ignore[arg-type]
    assert vars(sent(seed=5, stop=["x"], **options)) == vars(asked) | {"stop": ()}
    most = 2**64 - 1
    assert sent(seed=2**70 + 3).seed == 3 and sent(seed=0).seed == 0 and sent().seed is None
    got = sent(max_tokens=10**30, top_k=2**70, temperature=10**30, stop_token_ids=[3, 2**70])
    assert [got.max_tokens, got.top_k, got.temperature] == [most, most, 1e30]
    assert [*got.stop_token_ids] == [3, most]
    with pytest.raises(ValueError, match="no option 'cls'"):
        SamplingParams(**{"cls": 1})


def cross(batch: ScheduledBatch) -> ScheduledBatch:
    """What a rank makes of what a leader sends."""
    return unpack_batch(decode_frame(pack_batch(batch), ToRank))


def test_a_step_crosses_whole() -> None:
    """Every field, with drafts and without; parameters are made once, as a rank validates them;
    arrays that do not fit are a ValueError."""
    params = [
        SamplingParams(temperature=0.5, seed=2**64 - 3, top_k=4),
        SamplingParams(repetition_penalty=1.5, logprobs=2),
    ]
    batch = ScheduledBatch(
        SequenceType.DECODE, [7, 9], np.array([1, 5, 6, 2]), np.array([3, 1], np.int32),
        np.array([8, 30], np.int32), np.arange(16, dtype=np.int32).reshape(2, 8),
        np.array([True, True]), params, {1: [4, 2]}, [0, 3],
    )  # fmt: skip
    for given_batch in (batch, as_rows(batch)):
        found, again = cross(given_batch), cross(given_batch)
        assert type(found) is type(given_batch) and found.type is given_batch.type
        pairs = zip(found.sampling_params, again.sampling_params, strict=True)
        assert all(one is other for one, other in pairs)
        for name, value in vars(given_batch).items():
            other = getattr(found, name)
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype and np.array_equal(value, other)
            elif name == "sampling_params":
                assert [(p.seed, p.top_k) for p in value] == [(p.seed, p.top_k) for p in other]
            elif name != "whole":
                assert value == other
    step: Any = decode_frame(pack_batch(batch), Step)
    *arrays, last = step.arrays
    for wrong in (arrays, [*step.arrays, b""], [b"\0" * 7, *arrays[1:], last], [*arrays, last[:-4]]):
        step.arrays = wrong
        with pytest.raises(ValueError):
            unpack_batch(decode_frame(encode(step), ToRank))
    tokens, counts, lens, *others = arrays
    for wrong in ([tokens[:-8], counts, lens], [tokens, counts[:-4], lens], [tokens, counts, lens[:-4]]):
        step.arrays = [*wrong, *others, last]
        with pytest.raises(ValueError, match="fit together"):
            unpack_batch(decode_frame(encode(step), ToRank))
    step.arrays, step.params = [*arrays, last], step.params[:-1]
    with pytest.raises(ValueError, match="fit together"):
        unpack_batch(decode_frame(encode(step), ToRank))


@pytest.mark.processes
def test_bad_frames_do_not_end_an_engine(fake: Callable[..., Any]) -> None:
    """Each is refused with a warning; a running request of the same id gets all its tokens. What
    the front accepted by mistake ends, and the others go on."""
    core, rng = fake(), random.Random(0)
    large = msgspec.msgpack.encode(["ADD", 10**6, [0], {"temperature": [100] * 2**24}])
    seq = request(core, max_tokens=200)
    bad = Sequence([5], 4)
    bad.token_ids = [10**6]
    core.add(bad)
    frames = [
        encode(Add(seq.id, [0], {})), raw("x", id=seq.id), encode(Refused(seq.id, "x"))[:-1],
        rng.randbytes(30), encode(Abort(seq.id))[:3], pickle.dumps(Bomb()), raw([], id=10**6),
        msgspec.msgpack.encode(["ADD", 10**6, [0], {"cls": 1}]), raw([2**40], id=10**6), large,
    ]  # fmt: skip
    with pytest.warns(UserWarning) as warned:
        for frame in frames:
            core.step()
            with core.engines[0].sending:
                core.engines[0].outbox.send(frame)
        finish(core, seq, bad)

        def are_all_refused() -> bool:
            core.step()
            return len([w for w in warned if "refused" in str(w.message)]) == len(frames) + 1

        wait_for(are_all_refused)
    assert seq.completion_token_ids == [103 + i for i in range(200)]
    assert bad.leave_reason == "abort"
    with pytest.raises((ValueError, OverflowError)):  # and nothing is queued
        core.add(Sequence([5], 4, id=2**70))
    with pytest.raises(ValueError, match="id 7 is in use"):
        for _ in range(2):
            core.add(Sequence([5], 4, id=7))
    core.abort(7)
    expect_empty(core)
    core.close()


@pytest.mark.processes
def test_an_abort_does_not_overtake_its_request(fake: Callable[..., Any]) -> None:
    """So no block is lost and nothing runs on."""
    core = fake(num_kvcache_blocks=600)
    for i in range(100):
        seq = request(core, max_tokens=2000)
        if i % 3 == 0:
            core.step()
        assert core.abort(seq.id) is seq and seq.leave_reason == "abort"
    expect_empty(core)
    late = request(core, max_tokens=4)
    finish(core, late)
    assert late.completion_token_ids == [103, 104, 105, 106]
    core.close()


@pytest.mark.processes
def test_a_row_without_a_token_crosses(fake: Callable[..., Any]) -> None:
    """The request keeps its tokens and ends with an error; the others run on."""
    found = "{i: (-1,) if n == 6 else (n,) for i, n in both}"
    both = "both = zip(batch.req_ids, batch.context_lens.tolist())"
    core = fake(in_forward=f"{both}; return ScheduledBatchOutput({found})")
    short, long = request(core, 3, max_tokens=9), request(core, 2, max_tokens=4)
    finish(core, short, long)
    assert (short.leave_reason, short.completion_token_ids) == ("not_finite", [3, 4, 5])
    assert (long.leave_reason, long.completion_token_ids) == ("max_tokens", [2, 3, 4, 5])
    core.close()


@pytest.mark.processes
@pytest.mark.slow
def test_an_engine_does_not_run_ahead(
    fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses while the front does not read, answers questions, and goes on when it reads."""
    monkeypatch.setenv("FAKE_STEP", "0")
    core = fake(num_kvcache_blocks=1200)
    seq = request(core, max_tokens=2000)
    wait_for(lambda: len(core.engines[0].messages) >= 16)
    time.sleep(1)  # it could run many steps
    assert 16 < core.metrics()["steps"] < 1000
    finish(core, seq)
    assert seq.completion_token_ids == [103 + i for i in range(2000)]
    core.close()


@pytest.mark.processes
def test_a_full_queue_stops_only_the_steps(tidy: Path) -> None:
    """While the front does not read, the loop handles every message: answers and refusals wait, and
    SHUTDOWN ends it. Once the front reads, they arrive in their order."""
    context, path = zmq.Context(), str(tidy / "e")
    front_in, front_out = open_sockets(context, path, is_engine=False)
    inbox, outbox = open_sockets(context, path, is_engine=True)
    core = EngineCore(EngineArgs("tiny", **SMALL), SimpleNamespace())  # type: ignore[arg-type]
    loop, full = EngineCoreProc(core, inbox, outbox), 0
    while outbox.poll(50, zmq.POLLOUT):
        outbox.send(encode(Ready(0)))
        full += 1
    add = Add(1, [5], {})

    def start(*messages: Message) -> threading.Thread:
        for message in messages:
            front_out.send(encode(message))
        loop.is_open, loop.is_done = True, False
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        return thread

    thread = start(add, Utility(2), Utility(3), add, Abort(1), Shutdown(0))
    thread.join(5)
    assert not thread.is_alive() and not core.scheduler.seqs
    for _ in range(full):
        front_in.recv()
    thread = start()
    received = [decode_frame(front_in.recv(), FromEngine) for _ in range(3)]
    assert [(type(m), m.id) for m in received] == [(UtilityOutput, 2), (UtilityOutput, 3), (Refused, 1)]
    front_out.send(encode(Shutdown(0)))
    thread.join(5)
    assert not thread.is_alive()
    context.destroy(linger=0)
    (tidy / "e.in").unlink(missing_ok=True)
    (tidy / "e.out").unlink(missing_ok=True)


@pytest.mark.processes
@pytest.mark.parametrize("by_name", [True, False])
def test_a_scheduler_of_the_users_own_crosses(
    by_name: bool, fake: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class is sent by name: requests end in its order."""
    name = f"own_{by_name}"
    (tmp_path / f"{name}.py").write_text(
        "from atom_mini.scheduler import Scheduler\nclass NewestFirst(Scheduler):\n"
        "    def add(self, seq):\n        super().add(seq)\n"
        "        self.waiting.appendleft(self.waiting.pop())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = f"{name}:NewestFirst" if by_name else importlib.import_module(name).NewestFirst
    core = fake(max_num_seqs=1, scheduler_cls=own)
    first = request(core, max_tokens=100)
    while first.num_completion_tokens == 0:  # the others come while the only place is taken
        core.step()
    seqs = [request(core, max_tokens=2) for _ in range(3)]
    ends: list[int] = []
    while not all(seq.is_finished for seq in seqs):
        ends += [seq.id for seq in core.step().finished]
    core.close()
    assert ends == [first.id, *(seq.id for seq in reversed(seqs))]
