"""A request's callback gets every piece in order, outside any transaction, and can end only its own request."""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import is_empty

from atom_mini import LLM, SamplingParams
from atom_mini.text import TextPiece
from atom_mini.trace.callbacks import Callbacks, Log, StreamParams

torch.set_num_threads(1)
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_block_size": 4, "num_kvcache_blocks": 14, "max_num_seqs": 8}
TEXTS = ["Once upon a time", "Mia has a red cat. What does Mia have?", "12 + 7 =", "Ben", "There was a girl"] * 3
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
STOP = ("a", "ed c")
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, STOP),
    ({"overlap": True}, ()),
    ({"speculative_config": DRAFTS}, STOP),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """A pool that forces preemptions; each test leaves it empty."""
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


def open_requests(llm: Any) -> dict[Any, Any]:
    """The requests whose functions will be called again."""
    return next(each for each in llm.listeners if isinstance(each, Callbacks))._requests


def params_of(calls: list[Callable[[TextPiece], Any]], **options: Any) -> list[StreamParams]:
    options["ignore_eos"] = True
    return [StreamParams(max_tokens=4 + 9 * (i % 4), stream_callback=call, **options) for i, call in enumerate(calls)]


def plain(llm: LLM, **options: Any) -> list[tuple[str, list[int], str]]:
    params = [SamplingParams(max_tokens=4 + 9 * (i % 4), ignore_eos=True, **options) for i in range(len(TEXTS))]
    return [(out.text, out.token_ids, out.finish_reason) for out in llm.generate(TEXTS, params, use_tqdm=False)]


@pytest.mark.parametrize(("options", "stop"), CASES, ids=str)
def test_the_pieces_are_the_text(options: dict[str, Any], stop: tuple[str, ...]) -> None:
    """In order and once each, the last with the whole result; with preemption, drafts, overlap, and stop strings."""
    with LLM("tiny", **OPTIONS | options) as llm:
        wanted = plain(llm, stop=stop)
        heard: list[list[TextPiece]] = [[] for _ in TEXTS]

        def hear(i: int, piece: TextPiece) -> None:
            assert not llm.engine_core.is_torn, "called inside a transaction"
            heard[i].append(piece)

        calls = [lambda piece, i=i: hear(i, piece) for i in range(len(TEXTS))]
        outs = llm.generate(TEXTS, params_of(calls, stop=stop), use_tqdm=False)
        assert stop or llm.engine_core.scheduler.num_preemptions > 0
        assert is_empty(llm) and not open_requests(llm)
    for out, pieces, (text, token_ids, reason) in zip(outs, heard, wanted, strict=True):
        assert ("".join(p.text for p in pieces), [i for p in pieces for i in p.token_ids]) == (text, token_ids)
        assert all(p.text or p.finished for p in pieces)
        assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
        assert pieces[-1].finish_reason == reason and {p.index for p in pieces} == {out.request_id}
        assert pieces[-1].output == replace(out, prompt=None)


def test_what_it_raises_ends_its_request_alone(llm: LLM) -> None:
    """Some fail, at random pieces, the last one included; the others' tokens are those of a run without functions."""
    rng, wanted, count = random.Random(0), plain(llm), [0] * len(TEXTS)
    fails_at = [rng.choice([1, 2, 3, 99, -1]) for _ in TEXTS]

    def call(i: int, piece: TextPiece) -> None:
        count[i] += 1
        if count[i] == fails_at[i] or (piece.finished and fails_at[i] == -1):
            raise KeyError(f"no {i}")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls = [lambda piece, i=i: call(i, piece) for i in range(len(TEXTS))]
        outs = llm.generate(TEXTS, params_of(calls), use_tqdm=False)
    failed = 0
    for i, (out, (text, token_ids, reason)) in enumerate(zip(outs, wanted, strict=True)):
        if fails_at[i] == -1 or count[i] == fails_at[i]:
            failed += 1
            assert (out.finish_reason, out.stop_reason) == ("error", f"error: KeyError: 'no {i}'")
            assert token_ids[: len(out.token_ids)] == out.token_ids
        else:
            assert (out.text, out.token_ids, out.finish_reason) == (text, token_ids, reason)
    assert 0 < failed < len(TEXTS) and sum("failed" in str(w.message) for w in caught) >= failed
    assert is_empty(llm) and not open_requests(llm)


def test_it_may_abort_itself_and_others(llm: LLM) -> None:
    """An aborted request gets no more calls; the third request is not affected."""
    alone = llm.generate(TEXTS[2], SamplingParams(max_tokens=12), use_tqdm=False)[0]
    heard: dict[int, list[TextPiece]] = defaultdict(list)
    ids: list[int] = []

    def hear(piece: TextPiece) -> None:
        heard[piece.index].append(piece)
        if piece.index == ids[0] and len(heard[ids[0]]) == 2:
            assert llm.abort(ids[1]) and llm.abort(ids[0]) and not llm.abort(ids[0])

    for text in TEXTS[:3]:
        ids.append(llm.add_request(text, StreamParams(max_tokens=12, stream_callback=hear)))
    while llm.step():
        pass
    assert [len(heard[i]) for i in ids[:2]] == [2, 1] and "".join(p.text for p in heard[ids[2]]) == alone.text
    assert is_empty(llm) and not open_requests(llm)


def test_it_may_ask_for_more(llm: LLM) -> None:
    """A function may call `generate`, which runs steps inside the call; all texts are right."""
    first, second = (llm.generate(t, SamplingParams(max_tokens=8), use_tqdm=False)[0].text for t in TEXTS[:2])
    inner: list[str] = []
    heard: list[str] = []

    def hear(piece: TextPiece) -> None:
        heard.append(piece.text)
        if len(heard) == 2:
            inner.append(llm.generate(TEXTS[1], SamplingParams(max_tokens=8), use_tqdm=False)[0].text)

    out = llm.generate(TEXTS[0], StreamParams(max_tokens=8, stream_callback=hear), use_tqdm=False)[0]
    assert (out.text, inner, "".join(heard)) == (first, [second], first) and is_empty(llm)


def test_an_interrupt_in_it_leaves_an_engine_that_is_right(llm: LLM) -> None:
    """Ctrl-C is not an error of a request: it reaches the caller, and all requests are removed."""
    wanted = plain(llm)

    def interrupted(piece: TextPiece) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, params_of([interrupted] * len(TEXTS)), use_tqdm=False)
    assert is_empty(llm) and plain(llm) == wanted


@pytest.mark.slow
def test_in_front_of_another_process() -> None:
    """The function runs in the caller's process; an error ends the request there, too."""
    pytest.importorskip("zmq")
    texts: list[str] = []

    def hear(piece: TextPiece) -> None:
        texts.append(piece.text)

    def fails(piece: TextPiece) -> None:
        raise ValueError("no")

    with LLM("tiny", engine_process=True, **OPTIONS) as llm, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = llm.generate(TEXTS[:2], params_of([hear, fails]), use_tqdm=False)
        assert "".join(texts) == outs[0].text and outs[0].finish_reason == "length"
        assert (outs[1].finish_reason, outs[1].stop_reason) == ("error", "error: ValueError: no")


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"stream_callback='print' must be callable"):
        StreamParams(stream_callback="print")  # type: ignore[arg-type]


def test_a_limit_of_the_engine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With the request and the option; a text that ends at its own limit is not logged."""
    options: dict[str, Any] = {"num_kvcache_blocks": 6, "max_model_len": 16}
    with LLM("tiny", device="cpu", kv_cache_block_size=4, **options) as llm:
        short, long = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 40))
        out = llm.generate([[5, 6, 7], [5, 6, 8]], [short, long], use_tqdm=False)[1]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "atom_mini"]
    assert f"request {out.request_id} " in line and "max_model_len" in line


def test_acceptance_is_logged_every_thousand_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """At the level INFO, with the numbers of the statistics."""
    proposed, accepted = Counter({1: 0}), Counter({1: 300})
    stats = SimpleNamespace(proposed=proposed, accepted=accepted, tokens_per_step=1.3)
    core = SimpleNamespace(scheduler=SimpleNamespace(spec_stats=stats))
    log = Log(SimpleNamespace(engine_core=core))
    step: Any = SimpleNamespace(finished=[])
    with caplog.at_level("INFO", "atom_mini"):
        for drafts in (0, 999, 1000, 1999, 3001, 3999):
            proposed[1] = drafts
            log.record(step)
    lines = [r.getMessage() for r in caplog.records]
    assert [line.split()[0] for line in lines] == ["1000", "3001"] and "300 accepted" in lines[0]
