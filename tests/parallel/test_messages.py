"""Messages between processes: each is encoded and decoded, and nothing else is accepted."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import atom_mini.parallel
from atom_mini import SamplingParams
from atom_mini.parallel.engine_process import (
    MAX_FRAME,
    Add,
    FromEngine,
    Message,
    Row,
    ToEngine,
    decode,
    encode,
    pack_params,
    read_id,
)
from atom_mini.sequence import SequenceType

FOLDER = Path(atom_mini.parallel.__file__).parent
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "copyreg", "joblib"}
KINDS = [*get_args(ToEngine), *get_args(FromEngine)]

counts, texts = st.integers(0, 2**62), st.text(max_size=20)
floats, hashes = st.floats(allow_nan=False), st.integers(0, 2**64 - 1)
rows = st.builds(
    Row, counts, counts, st.lists(counts, max_size=5), counts, st.none() | texts,
    st.lists(st.dictionaries(counts, floats, max_size=3), max_size=3),
)  # fmt: skip
FIELDS: dict[Any, Any] = {
    "token_ids": st.lists(counts), "params": st.dictionaries(texts, st.booleans() | counts | floats | st.lists(counts)),
    "core": texts, "type": st.sampled_from(SequenceType), "rows": st.lists(rows),
    "values": st.dictionaries(texts, counts | floats), "why": texts, "is_refusal": st.booleans(), "is_running": st.booleans(),
    "seconds": floats, "is_new": st.booleans(), "blocks": st.dictionaries(hashes, st.booleans()),
}  # fmt: skip


def messages(kind: type) -> st.SearchStrategy[Message]:
    return st.builds(kind, **{name: FIELDS.get(name, counts) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


anything = st.one_of([messages(kind) for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_message_survives(kind: type) -> None:
    @settings(max_examples=40, deadline=None)
    @given(messages(kind))
    def check(message: Message) -> None:
        frame, union = encode(message), ToEngine if kind in get_args(ToEngine) else FromEngine
        assert decode(frame, union) == message and type(decode(frame, union)) is kind
        assert read_id(frame) == message.id

    check()


def test_each_end_reads_only_what_may_come_to_it() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert sorted(tags) == sorted({*tags}), "a tag names one message"
    assert {"ADD", "ABORT", "SHUTDOWN", "READY", "OUTPUT", "UTILITY", "UTILITY_RESPONSE", "ENGINE_DEAD", "START_DP_WAVE"} <= {*tags}

    @settings(max_examples=60, deadline=None)
    @given(anything)
    def check(message: Message) -> None:
        wrong = FromEngine if type(message) in get_args(ToEngine) else ToEngine
        with pytest.raises(ValueError, match="not a valid message"):
            decode(encode(message), wrong)

    check()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64) | st.builds(lambda m, n: encode(m)[:-n], anything, st.integers(1, 30)))
def test_garbage_and_truncated_frames(frame: bytes) -> None:
    """Random bytes are a ValueError or, by chance, a message; no other error is raised."""
    for kind in (ToEngine, FromEngine):
        try:
            assert isinstance(decode(frame, kind), Message)
        except ValueError as error:
            assert "not a valid message" in str(error)
    assert type(read_id(frame)) is int


@settings(max_examples=200, deadline=None)
@given(anything, st.data())
def test_one_byte_changed(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for kind in (ToEngine, FromEngine):
        try:
            found = decode(bytes(frame), kind)
        except ValueError:
            continue
        if isinstance(found, Add):  # another request, and a whole one
            assert all(type(i) is int and i >= 0 for i in found.token_ids)


WENT_OFF: list[str] = []


class Bomb:
    """Unpickling this class runs code."""

    def __reduce__(self) -> Any:
        return WENT_OFF.extend, (["bang"],)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", None)
    frame = pickle.dumps(Bomb(), protocol=protocol)
    for kind in (ToEngine, FromEngine):
        with pytest.raises(ValueError, match="not a valid message"):
            decode(frame, kind)
    assert read_id(frame) == 0 and not WENT_OFF


def test_there_is_no_pickle_in_the_part() -> None:
    """No module imports code that runs its input, or sends Python objects through a socket."""
    files = [*FOLDER.rglob("*.py")]
    assert len(files) >= 4
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & UNSAFE, f"{path.name}:{node.lineno}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                bad = {"send_pyobj", "recv_pyobj", "allow_pickle", "eval", "exec", "__reduce__"}
                assert name not in bad, f"{path.name}:{node.lineno} uses {name}"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: decode(bytes(MAX_FRAME + 1), ToEngine), f"MAX_FRAME={MAX_FRAME}"),
        (lambda: encode(Add(1, [2**40] * (MAX_FRAME // 9), {})), f"MAX_FRAME={MAX_FRAME}"),
    ],
)
def test_sizes_are_limited(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def raw(ids: Any = (7,), id: Any = 5, more: Any = ()) -> bytes:
    return msgspec.msgpack.encode(["ADD", id, ids, {}, *more])


@pytest.mark.parametrize(
    "frame",
    [
        raw("text"), raw(b"\0\0\0\0"), raw(7), raw(None), raw({"a": 1}), raw([[7]]), raw([1.5]), raw([-1]), raw(["7"]),
        raw([True]), raw([None]), raw([2**63, -(2**63)]), raw(more=[1]), msgspec.msgpack.encode(["EVAL", 5, "1 + 1"]),
        msgspec.msgpack.encode(["ADD", 5]), msgspec.msgpack.encode(["UTILITY", 5, "__class__"]),
        msgspec.msgpack.encode(["ADD", 5, [0], {"stop": {"a": 1}}]),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_and_the_id_is_read(frame: bytes) -> None:
    assert isinstance(decode(raw(), ToEngine), Add)
    with pytest.raises(ValueError, match="not a valid message"):
        decode(frame, ToEngine)
    assert read_id(frame) == 5


@pytest.mark.parametrize("frame", [b"", b"\x91" * 100_000, b"\x93\xa3ADD\xcb", b"\xdd\xff",
                                   *(raw(id=id) for id in ("five", None, True, -1, 2**63))])  # fmt: skip
def test_no_id_to_read(frame: bytes) -> None:
    assert read_id(frame) == 0
    with pytest.raises(ValueError, match="not a valid message"):
        decode(frame, ToEngine)


@given(st.integers(0) | st.none(), st.integers(1, 10**6), st.none() | st.integers(0, 20))
def test_params_arrive(seed: int | None, max_tokens: int, logprobs: int | None) -> None:
    """All parameters but the stop strings arrive, and the 64 bits of a seed that count."""
    asked = SamplingParams(seed=seed, max_tokens=max_tokens, logprobs=logprobs, stop=["x"], stop_token_ids=[1, 2], min_p=0.5)
    add: Any = decode(encode(Add(1, [0], pack_params(asked))), ToEngine)
    got = SamplingParams(**add.params)
    mask = 2**64 - 1
    assert (got.seed is None) == (seed is None) and (got.seed or 0) & mask == (seed or 0) & mask
    assert vars(got) | {"seed": 0, "stop": ()} == vars(asked) | {"seed": 0, "stop": ()}


def test_large_params_cross() -> None:
    """Any number that is valid in-process can be sent, and means the same."""
    asked = SamplingParams(max_tokens=10**30, top_k=2**70, temperature=10**30, stop_token_ids=[3, 2**70], ignore_eos=True)
    add: Any = decode(encode(Add(1, [0], pack_params(asked))), ToEngine)
    got, most = SamplingParams(**add.params), 2**64 - 1
    assert [got.max_tokens, got.top_k, got.temperature, *got.stop_token_ids] == [most, most, 1e30, 3, most]
    assert got.ignore_eos is True and got.min_p is None


@pytest.mark.parametrize("name", ["cls", "self", "nothing"])
def test_a_parameter_of_an_unknown_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"no option '{name}'"):
        SamplingParams(**{name: 1})
