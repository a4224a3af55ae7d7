"""The whole interface: what goes in, what comes out, where it stops, and what a mistake leaves behind (nothing)."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, is_empty, plain_search, reference_logits, save_checkpoint
from show import new_tokens

from atom_mini import LLM, RequestOutput, SamplingParams
from atom_mini.sequence import Sequence
from atom_mini.text import TextPiece

torch.set_num_threads(1)  # products this small are done before a second thread is awake
TINY = Path(sys.modules["atom_mini"].__file__ or "").parent / "tiny"
VOCABULARY: int = json.loads((TINY / "config.json").read_text())["vocab_size"]
PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WILD = replace(GREEDY, temperature=1.5, seed=3)  # more kinds of tokens than the likeliest
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One engine for all tests; each must leave it empty."""
    yield shared
    assert is_empty(shared)


@pytest.fixture(scope="module")
def whole(shared: LLM) -> RequestOutput:
    """What is said to PROMPT."""
    return shared.generate(PROMPT, GREEDY)[0]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose embedding can be spoilt without its head."""
    folder = tmp_path_factory.mktemp("untied")
    save_checkpoint("qwen3", folder, tie_word_embeddings=False)
    return str(folder)


def tiny_folder(folder: Path, **generation_config: Any) -> str:
    """A copy of the built-in model with another generation_config."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    edit_json(folder / "generation_config.json", **generation_config)
    return str(folder)


def collect(pieces: Iterator[TextPiece]) -> dict[int, list[TextPiece]]:
    found: dict[int, list[TextPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return found


def check_pieces(pieces: list[TextPiece], out: RequestOutput) -> None:
    """The pieces of one prompt say together what `out` says at once."""
    assert "".join(p.text for p in pieces) == out.text
    assert [t for p in pieces for t in p.token_ids] == out.token_ids
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finish_reason == out.finish_reason
    last = pieces[-1].output
    assert last is not None and all(p.output is None for p in pieces[:-1])
    assert (last.text, last.token_ids, last.stop_reason) == (out.text, out.token_ids, out.stop_reason)


# what comes out


def test_prompts_of_every_kind(llm: LLM, whole: RequestOutput) -> None:
    """Text or ids, or dicts as vLLM takes them; one or a list; a single prompt returns a list too; order is kept."""
    ids, other, short = llm.tokenizer.encode(PROMPT), llm.tokenizer.encode("12 + 7 ="), replace(GREEDY, max_tokens=5)
    text, named = {"prompt": PROMPT}, {"prompt_token_ids": ids}
    prompts: list[Any] = [PROMPT, text, [PROMPT], [text], ids, [ids], tuple(ids), named, [named]]
    for i, prompt in enumerate(prompts):
        (out,) = llm.generate(prompt, short)
        assert (out.prompt_token_ids, out.prompt) == (ids, PROMPT if i < 4 else None)
        assert out.token_ids == whole.token_ids[:5]
    outs = llm.generate([named, other, text, PROMPT], GREEDY)
    assert [out.prompt_token_ids for out in outs] == [ids, other, ids, ids] and outs[1].prompt is None
    assert {outs[i].text for i in (0, 2, 3)} == {whole.text}
    assert "".join(piece.text for piece in llm.stream(named, GREEDY)) == whole.text
    assert llm.abort(llm.add_request(text, GREEDY))
    assert llm.generate([], GREEDY) == [] and list(llm.stream([], GREEDY)) == []


@pytest.mark.parametrize("processes", [False, True])
def test_no_max_tokens_is_the_rest_of_the_context(processes: bool) -> None:
    options = OPTIONS | {"max_model_len": 60} | ({"engine_process": True} if processes else {})
    with LLM("tiny", **options) as llm:
        (out,) = llm.generate([5] * 20, replace(GREEDY, max_tokens=None))
        assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (40, "length", "max_model_len")
        (out,) = llm.generate([5] * 20, SamplingParams(max_tokens=None, temperature=0))
        assert out.stop_reason == "eos" or len(out.token_ids) == 40
    assert SamplingParams().max_tokens == 64  # as before


def test_dtype_auto_means_none() -> None:
    for dtype in ("auto", None):
        with LLM("tiny", dtype=dtype, **OPTIONS) as llm:
            assert llm.config.dtype is None and next(llm.engine_core.runner.model.parameters()).dtype is torch.float32  # type: ignore[attr-defined]


def bring(llm: LLM, monkeypatch: pytest.MonkeyPatch, token_ids: Seq[int], at_once: int = 1) -> None:
    """Let every request's tokens be these, `at_once` of them a step, as a step with drafts brings them."""
    forward, done = llm.engine_core.runner.forward, dict[int, int]()

    def brought(batch: Any) -> Any:
        out = forward(batch)
        new = {}
        for i in out.token_ids:
            new[i] = tuple(token_ids[done.get(i, 0) :][:at_once])
            done[i] = done.get(i, 0) + at_once
        logprobs = {i: [{t: -float(t)} for t in new[i]] for i in out.logprobs}
        return replace(out, token_ids=new, logprobs=logprobs)

    monkeypatch.setattr(llm.engine_core.runner, "forward", brought)


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [3, 4, 5, 9])
def test_nothing_counts_behind_a_stop_string(
    at_once: int, max_tokens: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end in the middle of a step's tokens, and the request by max_tokens in the same step: the earlier one wins.

    Tokens, text, log probabilities and pieces are cut alike, and the engine holds nothing any more.
    """
    said = llm.tokenizer.encode(" a cat and a dog and a red hen")
    names = [llm.tokenizer.decode([i]) for i in said]
    n = next(n for n in range(len(names)) if " and" in "".join(names[: n + 1])) + 1
    bring(llm, monkeypatch, said, at_once)
    sampling = SamplingParams(max_tokens=max_tokens, stop=" and", ignore_eos=True, logprobs=0)
    (out,) = llm.generate(PROMPT, sampling)
    kept = min(n, max_tokens)
    assert out.token_ids == said[:kept] and [[*entry] for entry in out.logprobs or ()] == [[i] for i in said[:kept]]
    assert out.text == "".join(names[:kept]).removesuffix(" and")
    assert (out.finish_reason, out.stop_reason) == (("stop", " and") if n <= max_tokens else ("length", "max_tokens"))
    assert is_empty(llm)
    check_pieces(collect(llm.stream(PROMPT, sampling))[0], out)
    request = llm.add_request(PROMPT, sampling)
    finished: list[int] = []
    while not finished:
        step = llm.step()
        assert step is not None
        finished += [seq.id for seq in step.finished]
    assert finished == [request]


@pytest.mark.parametrize("after", [False, True], ids=["before the abort", "after it"])
def test_interrupted_where_a_text_is_read(after: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are in the books, and their text is not read, or not acted upon: the next step makes up for it."""
    bring(llm, monkeypatch, llm.tokenizer.encode(" a cat and a dog and a red hen"))
    sampling = SamplingParams(max_tokens=9, stop=" and", ignore_eos=True)
    (wanted,) = llm.generate(PROMPT, sampling)
    abort, request = llm.engine_core.abort, llm._prepare(PROMPT, sampling)[0]
    llm._add([request])

    def interrupted(*args: Any) -> Any:
        if after:
            abort(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine_core, "abort", interrupted)
        while llm.step():
            pass
    while not request.seq.is_finished:
        llm.step()
    out = llm.processor.postprocess(request)
    assert (out.text, out.token_ids, out.stop_reason) == (wanted.text, wanted.token_ids, " and")


def test_token_ids_of_every_kind(llm: LLM, whole: RequestOutput) -> None:
    """Whatever is a whole number, in lists and arrays; what comes back is int."""
    ids, short = llm.tokenizer.encode(PROMPT), replace(GREEDY, max_tokens=3)
    array = np.array(ids)
    prompts: list[Any] = [array, array.astype(np.uint16), list(array), [array], [list(array)], (*array,)]
    prompts += [torch.tensor(ids), [torch.tensor(ids)], list(torch.tensor(ids)), [ids[0], *array[1:]]]
    for prompt in prompts:
        (out,) = llm.generate(prompt, short)
        assert out.token_ids == whole.token_ids[:3] and out.prompt_token_ids == ids
        assert {type(i) for i in out.prompt_token_ids} == {int} and json.dumps(out.prompt_token_ids)
        (piece, *_) = llm.stream(prompt, replace(GREEDY, max_tokens=1))
        assert piece.token_ids == whole.token_ids[:1]
    outs = llm.generate(np.array([ids, ids[::-1]]), short)  # type: ignore[arg-type]
    assert [out.prompt_token_ids for out in outs] == [ids, ids[::-1]]
    for wrong, word in ((np.array([3, VOCABULARY]), "vocabulary"), (array / 2, "float"), (np.array(5), "int")):
        refused(partial(llm.generate, wrong, GREEDY), word)
    request = llm.add_request(array, GREEDY)  # type: ignore[arg-type]
    assert llm.engine_core.scheduler.seqs[request].token_ids == ids and llm.abort(request)


def test_completion_output(llm: LLM) -> None:
    (out,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=9))
    assert len(out.token_ids) == 9 and (out.finish_reason, out.stop_reason) == ("length", "max_tokens")
    assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert 0 < out.ttft < out.latency < 60 and out.tpot > 0 and out.ttft + 8 * out.tpot == pytest.approx(out.latency)
    assert out.logprobs is None
    for name in ("text", "token_ids", "finish_reason", "ttft", "tpot", "latency", "num_cached_tokens", "logprobs"):
        assert out[name] == getattr(out, name)
    assert llm.generate(PROMPT, replace(GREEDY, max_tokens=1))[0].tpot == 0


def test_default_sampling_is_the_checkpoints(llm: LLM, tmp_path: Path) -> None:
    """`None` is filled in from generation_config; what a request says itself counts more; greedy without do_sample."""
    asked = "Ada lives in Rome. Ben likes plums. Where does Ada live?"
    (out,) = llm.generate(asked)
    assert out.token_ids == llm.generate(asked, SamplingParams(temperature=0))[0].token_ids and len(out.token_ids) > 4
    authors = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    with LLM(tiny_folder(tmp_path, **authors), **OPTIONS) as other:
        for sampling, changed in (({}, {}), ({"top_k": 3, "temperature": 0.0}, {"top_k": 3, "temperature": 0.0})):
            other.add_request(PROMPT, SamplingParams(**sampling))  # type: ignore[arg-type]
            (seq,) = other.engine_core.scheduler.waiting
            used = {name: getattr(seq.sampling_params, name) for name in authors if name != "do_sample"}
            assert used == {k: v for k, v in (authors | changed).items() if k != "do_sample"}
            assert seq.sampling_params.min_p == 0
            assert other.abort(seq.id) and is_empty(other)
    with LLM(tiny_folder(tmp_path, do_sample=True, temperature=1.0, top_k=1), **OPTIONS) as other:
        assert other.generate(asked)[0].token_ids == out.token_ids  # the likeliest of one


def test_seeds(llm: LLM) -> None:
    """The same seed, the same tokens, in company too; none given, others each time."""
    samplings = [replace(WILD, seed=s) for s in (1, 2, 1, None, None)]
    tokens = [tuple(out.token_ids) for out in llm.generate([PROMPT] * 5, samplings)]
    assert tokens[0] == tokens[2] and len(set(tokens)) == 4
    assert llm.generate(PROMPT, samplings[1])[0].token_ids == list(tokens[1])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 1, "top_p": 0.9}], ids=str)
def test_logprobs_equal_transformers(llm: LLM, sampling: dict[str, Any]) -> None:
    """Of the model's own distribution, the k likeliest and always the sampled one, for each token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for k in (0, 1, 5):
        (out,) = llm.generate(PROMPT, SamplingParams(**sampling, max_tokens=12, ignore_eos=True, logprobs=k))
        wanted = reference_logits(model, out.prompt_token_ids + out.token_ids).log_softmax(-1)
        assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
        for i, (token, got) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
            row = wanted[len(out.prompt_token_ids) + i - 1]
            likeliest = set(row.topk(k).indices.tolist())
            assert set(got) == likeliest | {token}
            assert all(abs(value - row[id].item()) <= 1e-4 for id, value in got.items())


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    """Ids work; text is refused with the reason."""
    save_checkpoint("llama", tmp_path, num_hidden_layers=1)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (out,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
        assert len(out.token_ids) == 3 and out.text == ""
        pieces = collect(llm.stream([1, 2, 3], SamplingParams(max_tokens=3)))[0]
        assert [t for p in pieces for t in p.token_ids] == out.token_ids
        actions: list[Callable[[], Any]] = [
            lambda: llm.generate("a"),
            lambda: llm.generate([1], SamplingParams(stop="a")),
            lambda: llm.chat([{"role": "user", "content": "hi"}]),
        ]
        for action in actions:
            with pytest.raises(ValueError, match="token"):
                action()
        assert is_empty(llm)


def test_metrics_count_tokens() -> None:
    with LLM("tiny", **OPTIONS) as llm:
        llm.generate([[5] * 10, [6] * 7], replace(GREEDY, max_tokens=4))
        metrics = llm.metrics
        assert (metrics.num_steps, metrics.num_prefill_tokens, metrics.num_decode_tokens) == (4, 17, 6)
        assert metrics.prefill_tokens_per_second > 0 and metrics.decode_tokens_per_second > 0


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """Only where asked, or on a terminal; never on stdout."""
    for use_tqdm in (None, False, True):
        llm.generate(PROMPT, replace(GREEDY, max_tokens=2), use_tqdm=use_tqdm)
        shown = capsys.readouterr()
        assert shown.out == "" and ("requests" in shown.err) == bool(use_tqdm)


# streaming


@pytest.mark.parametrize(
    "sampling", [GREEDY, WILD, replace(WILD, seed=5, stop=["e", "th"])], ids=["greedy", "wild", "stop"]
)
def test_stream_equals_generate(llm: LLM, sampling: SamplingParams) -> None:
    """Alone and several at once, by index."""
    prompts: list[Any] = [PROMPT, "12 + 7 =", "Ada lives in Rome.", [5, 6, 7, 900, 901]]
    outs = llm.generate(prompts, sampling)
    found = collect(llm.stream(prompts, sampling))
    assert sorted(found) == [0, 1, 2, 3]
    for index, out in enumerate(outs):
        check_pieces(found[index], out)
        check_pieces(collect(llm.stream(prompts[index], sampling))[0], out)


def test_stream_comes_while_it_runs(llm: LLM) -> None:
    """The first piece is there before the last token is computed; a stream that nobody reads costs nothing."""
    untouched = llm.stream(PROMPT)
    assert is_empty(llm)
    del untouched
    steps = llm.metrics.num_steps
    pieces = llm.stream(PROMPT, GREEDY)
    next(pieces)
    assert llm.metrics.num_steps - steps < 5
    assert len(list(pieces)) > 10


def test_generate_between_two_pieces(llm: LLM) -> None:
    """Both go through the same engine, and neither notices."""
    wanted, between = llm.generate([PROMPT, "12 + 7 ="], GREEDY)
    for when in (0, 7):
        pieces = []
        for i, piece in enumerate(llm.stream(PROMPT, GREEDY)):
            pieces.append(piece)
            if i == when:
                (out,) = llm.generate("12 + 7 =", replace(GREEDY, max_tokens=30))
                assert out.token_ids[:24] == between.token_ids
        check_pieces(pieces, wanted)


def test_two_streams_open(llm: LLM) -> None:
    """Taken in turn, and with one left lying until the other has ended."""
    wanted = llm.generate([PROMPT, "12 + 7 ="], [GREEDY, WILD])
    streams = [llm.stream(PROMPT, GREEDY), llm.stream("12 + 7 =", WILD)]
    pairs = list(itertools.zip_longest(*streams))
    for i, out in enumerate(wanted):
        check_pieces([pair[i] for pair in pairs if pair[i] is not None], out)
    first, second = llm.stream(PROMPT, GREEDY), llm.stream("12 + 7 =", WILD)
    start = next(first)
    check_pieces(list(second), wanted[1])
    check_pieces([start, *first], wanted[0])


@pytest.mark.parametrize("how", ["close", "throw", "break"])
def test_dropped_stream_is_taken_back(llm: LLM, how: str) -> None:
    """Whatever ends the consumer, its prompts leave the engine, and others in it go on."""
    wanted = llm.generate([PROMPT, "12 + 7 ="], GREEDY)
    other = llm.stream("12 + 7 =", GREEDY)
    start = next(other)
    prompts: list[Any] = [PROMPT, "Ada lives", [5] * 40]
    pieces: Any = llm.stream(prompts, GREEDY)
    next(pieces)
    assert len(llm.engine_core.scheduler.running) == 4
    if how == "close":
        pieces.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
    else:
        for _ in pieces:
            break
        del pieces
    assert len(llm.engine_core.scheduler.running) == 1
    check_pieces([start, *other], wanted[1])
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted[0].token_ids


def test_chat_equals_generate_on_the_template(llm: LLM) -> None:
    """One conversation or several; special tokens of the template become ids, once."""
    one = [{"role": "user", "content": "Where does Ada live?"}]
    two = [*one, {"role": "assistant", "content": "In Rome."}, {"role": "user", "content": "And Ben?"}]
    ids = [llm.tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in (one, two)]
    wanted = llm.generate(ids, GREEDY)
    assert [out.token_ids for out in llm.chat([one, two], GREEDY)] == [out.token_ids for out in wanted]
    (out,) = llm.chat(one, GREEDY)
    assert (out.token_ids, out.prompt_token_ids) == (wanted[0].token_ids, ids[0])
    assert llm.tokenizer.convert_tokens_to_ids("<|im_start|>") == out.prompt_token_ids[0]
    with pytest.raises(ValueError, match="message"):
        llm.chat([])


def test_chat_adds_no_second_first_token(tmp_path: Path) -> None:
    """Where the tokenizer puts a token before every text, as Llama's does, and the template has it too: once."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = tiny_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = "<|im_end|>"
    pair = (first, tokenizer.convert_tokens_to_ids(first))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[pair])
    tokenizer.chat_template = first + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with LLM(folder, **OPTIONS) as llm:
        text = llm.generate("12 + 7 =", GREEDY)[0].prompt_token_ids
        chat = llm.chat([{"role": "user", "content": "12 + 7 ="}], GREEDY)[0].prompt_token_ids
    assert text[0] == pair[1] and text.count(pair[1]) == 1 and chat == text


# where it stops


@pytest.mark.slow
def test_every_cut_of_a_text_as_stop_string(llm: LLM) -> None:
    """Wherever the stop string begins and ends, within a token or across many, it stops there and none of it shows."""
    for sampling in (GREEDY, WILD):
        (whole,) = llm.generate(PROMPT, sampling)
        cuts = {whole.text[i : i + n] for n in (1, 3, 11) for i in range(len(whole.text) - n + 1)}
        stops = sorted(cuts)
        assert len(stops) > 100
        samplings = [replace(sampling, stop=s) for s in stops]
        found = collect(llm.stream([PROMPT] * len(stops), samplings))
        for i, stop in enumerate(stops):
            out = found[i][-1].output
            assert out is not None
            check_pieces(found[i], out)
            wanted = plain_search(whole.text, [stop])
            assert wanted is not None and (out.text, out.stop_reason) == wanted, stop
            assert out.finish_reason == "stop" and out.token_ids == whole.token_ids[: len(out.token_ids)]
            if whole.text.isascii():  # no token waits for the rest of a character
                texts = [llm.tokenizer.decode(out.token_ids[:n]) for n in (-1, len(out.token_ids))]
                assert [stop in text for text in texts] == [False, True], "it stops at once"


def test_several_stop_strings(llm: LLM, whole: RequestOutput) -> None:
    """The one that is complete first wins, not the first in the list; of two that end together the longer is hidden."""
    text = whole.text
    cases = [
        [text[20:40], text[25:28]],
        [text[10:13], text[30:33]],
        [text[30:33], text[10:13]],
        [text[16:20], text[12:20]],
        [text[12:20], text[16:20], "never in it"],
        [text[-4:] + "!", text[8:12]],
    ]
    outs = llm.generate([PROMPT] * len(cases), [replace(GREEDY, stop=stops) for stops in cases])
    assert [(out.text, out.stop_reason) for out in outs] == [plain_search(text, stops) for stops in cases]


def test_held_back_text_comes_at_the_end(llm: LLM, whole: RequestOutput) -> None:
    """The beginning of a stop string that never ends is shown after all."""
    for n in (1, 2, 5, 20):
        sampling = replace(GREEDY, stop=whole.text[-n:] + "\0")
        pieces = collect(llm.stream(PROMPT, sampling))[0]
        check_pieces(pieces, whole)
        assert not any(p.text.endswith(whole.text[-n:]) for p in pieces[:-1])


def test_stop_token_ids(llm: LLM, whole: RequestOutput) -> None:
    """The first of them ends it; its own token is the last one and belongs to the output."""
    tokens = [*set(whole.token_ids)]
    samplings = [replace(GREEDY, stop_token_ids=[token, VOCABULARY - 1]) for token in tokens]
    for token, out in zip(tokens, llm.generate([PROMPT] * len(tokens), samplings), strict=True):
        assert out.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", token)


def test_eos_ids(whole: RequestOutput, tmp_path: Path) -> None:
    """Every id of the list in generation_config ends a text, unless ignored; then stop_token_ids still count."""
    late, early = whole.token_ids[12], whole.token_ids[6]
    first = min(whole.token_ids.index(late), whole.token_ids.index(early))
    ends = SamplingParams(temperature=0, max_tokens=24)
    for eos in ([VOCABULARY - 1, late, early], [early, VOCABULARY - 1]):
        with LLM(tiny_folder(tmp_path, eos_token_id=eos), **OPTIONS) as other:
            (out,) = other.generate(PROMPT, ends)
            last = out.token_ids[-1]
            assert (out.finish_reason, out.stop_reason) == ("stop", "eos" if last == eos[0] else last)
            assert out.token_ids == whole.token_ids[: first + 1]
            assert other.generate(PROMPT, GREEDY)[0].token_ids == whole.token_ids
            (out,) = other.generate(PROMPT, replace(GREEDY, stop_token_ids=[early]))
            assert (out.finish_reason, out.stop_reason) == ("stop", early)
    with LLM(tiny_folder(tmp_path, eos_token_id=early), **OPTIONS) as other:
        assert len(other.generate(PROMPT, ends)[0].token_ids) == whole.token_ids.index(early) + 1


def test_special_tokens_are_not_in_the_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end token is in token_ids and not in text."""
    special = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    bring(llm, monkeypatch, [special] * 5)
    (out,) = llm.generate(PROMPT, SamplingParams(max_tokens=5))
    assert (out.token_ids, out.text, out.stop_reason) == ([special], "", "eos")
    (out,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    assert (out.token_ids, out.text, out.stop_reason) == ([special] * 5, "", "max_tokens")
    check_pieces(collect(llm.stream(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True)))[0], out)


def test_max_tokens_is_exact(llm: LLM) -> None:
    lengths = list(itertools.product((1, 15, 16, 17), (1, 2, 3, 17)))
    outs = llm.generate([[*range(m)] for m, _ in lengths], [replace(GREEDY, max_tokens=n) for _, n in lengths])
    assert [len(out.token_ids) for out in outs] == [n for _, n in lengths]
    assert {(out.finish_reason, out.stop_reason) for out in outs} == {("length", "max_tokens")}


def test_length_by_max_model_len(llm: LLM) -> None:
    whole = llm.generate(list(range(9)), GREEDY)[0].token_ids
    with LLM("tiny", max_model_len=20, **OPTIONS) as short:
        for n in (1, 9, 19):
            (out,) = short.generate(list(range(n)), replace(GREEDY, max_tokens=500))
            assert len(out.token_ids) == 20 - n and (out.finish_reason, out.stop_reason) == ("length", "max_model_len")
            assert n != 9 or out.token_ids == whole[:11]


@pytest.mark.parametrize("size", [1, 16])
def test_length_by_the_pool(size: int, llm: LLM) -> None:
    """A lone sequence may fill the pool, and one token more, whose K/V nobody needs."""
    whole = llm.generate(list(range(9)), GREEDY)[0].token_ids
    with LLM("tiny", device="cpu", kv_cache_block_size=size, num_kvcache_blocks=32 // size) as small:
        for n in (1, 9, 31, 32):
            (out,) = small.generate(list(range(n)), replace(GREEDY, max_tokens=500))
            assert len(out.token_ids) == 33 - n and (out.finish_reason, out.stop_reason) == ("length", "kv_cache")
            assert n != 9 or out.token_ids == whole
        assert is_empty(small)


# what is refused


def refused(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert all(re.search(word, message) for word in words), f"{message!r} lacks one of {words}"
    assert "\n" not in message


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", num_kvcache_blocks=100) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty prompt", "0 tokens", "at least 1"]),
        ([[]], ["empty prompt", "0 tokens", "at least 1"]),
        ([5] * 2048, ["2048", "max_model_len=2048"]),
        ([5] * 5000, ["5000", "max_model_len=2048"]),
        ([5] * 1601, ["1601", "100 blocks x 16", "num_kvcache_blocks"]),
        ([1, VOCABULARY], ["prompt", f"vocabulary of {VOCABULARY}"]),
        ([2**40], [str(2**40), str(VOCABULARY)]),
        ([3, -1], ["-1", "prompt", "from 0"]),
        ([True, 3], ["True"]),
        ([3, True], ["True", "type bool"]),
        ([3, 1.5], ["1.5", "type float"]),
        ([3, "a"], ["'a'", "type str"]),
        ([3, None], ["None", "type NoneType"]),
        ([3, [4]], ["type list"]),
        ([3, np.float64(4)], ["type float"]),
        ([3, np.True_], ["type bool"]),
        ([np.int64(3), np.int64(-1)], ["-1", "prompt", "from 0"]),
        ("a\ud800b", ["ud800", "position 1", "surrogate"]),
        ([PROMPT, "\udfff"], ["udfff", "position 0", "surrogate"]),
        ([1.5], ["float"]),
        ([None], ["NoneType"]),
        (5, ["int"]),
        (1.5, ["float"]),
        (None, ["NoneType"]),
        (b"ab", ["bytes"]),
        ({"prompt": "a", "multi_modal_data": {}}, ["multi_modal_data", "'prompt'"]),
        ([{"prompt_token_ids": [5]}, {"text": "a"}], ["text", "'prompt_token_ids'"]),
        ({}, [r"\[\]", "'prompt'"]),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, list) or len(value) < 9 else f"{len(value)} tokens",
)
def test_bad_prompts(prompt: Any, words: list[str], small: LLM, whole: RequestOutput) -> None:
    """Number, limit and knob; alone, in the middle of a list of good ones, streamed, and by add_request."""
    steps = small.metrics.num_steps
    refused(lambda: small.generate(prompt, GREEDY), *words)
    refused(lambda: small.stream(prompt, GREEDY), *words)
    one = prompt[0] if prompt == [[]] else prompt
    if isinstance(one, str) or (isinstance(one, list) and one and isinstance(one[0], int)) or one == []:
        refused(lambda: small.generate([PROMPT, one, PROMPT], GREEDY), *words)
        refused(lambda: small.stream([PROMPT, one, PROMPT], GREEDY), *words)
        refused(lambda: small.add_request(one, GREEDY), *words)
    assert is_empty(small)
    assert small.metrics.num_steps == steps
    assert small.generate(PROMPT, replace(GREEDY, max_tokens=3))[0].token_ids == whole.token_ids[:3]


NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "logprobs",
           "presence_penalty", "frequency_penalty", "min_tokens", "n"]  # fmt: skip
COUNTS = ["kv_cache_block_size", "num_kvcache_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"]
KNOBS = [*COUNTS, "gpu_memory_utilization", "scheduler_delay_factor", "tensor_parallel_size", "data_parallel_size"]
HUGE = 10**400
OUTSIDE = {
    "temperature": (-0.1, -1, math.nan, math.inf, -math.inf),
    "top_p": (0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf),
    "top_k": (-2, 1.5, 5.0, math.nan, math.inf),
    "min_p": (-0.01, 1.01, math.nan, math.inf),
    "repetition_penalty": (0, -1.0, math.nan, math.inf),
    "max_tokens": (0, -1, 1.5, 16.0, math.nan, math.inf),
    "logprobs": (-1, 21, 1.0, math.nan),
    "presence_penalty": (-2.1, 2.1, math.nan, math.inf),
    "frequency_penalty": (-2.1, 2.1, math.nan, math.inf),
    "min_tokens": (-1, 1.5, 16.0, math.nan),
    "n": (0, -1, 1.5, 1025, math.nan),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in OUTSIDE[name]])
def test_sampling_params_out_of_range(name: str, value: float) -> None:
    limit = {"top_p": "1", "min_p": "1", "logprobs": "20", "max_tokens": "1", "top_k": "-1", "n": "1"}.get(name, "0")
    options: dict[str, Any] = {name: value}
    limit = "2" if name in ("presence_penalty", "frequency_penalty") else limit
    refused(lambda: SamplingParams(**options), re.escape(f"{name}={value!r}"), limit, "set SamplingParams")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, "1", [1], "a", b"1", {}], ids=repr)
def test_no_numbers(name: str, value: Any) -> None:
    refused(lambda: SamplingParams(**{name: value}), re.escape(f"{name}={value!r}"), "number")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": ""}, ["stop", "empty"]),
        ({"stop": ["a", ""]}, ["stop", "empty"]),
        ({"stop": [1]}, ["stop", "1"]),
        ({"stop": 5}, ["stop", "5"]),
        ({"stop": True}, ["stop", "True"]),
        ({"stop": [b"a"]}, ["stop"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"stop_token_ids": [True]}, ["stop_token_ids", "True"]),
        ({"stop_token_ids": [1.0]}, ["stop_token_ids", "1.0"]),
        ({"stop_token_ids": ["1"]}, ["stop_token_ids", "'1'"]),
        ({"stop_token_ids": 5}, ["stop_token_ids", "5"]),
        ({"stop_token_ids": "12"}, ["stop_token_ids"]),
        ({"seed": 1.5}, ["seed=1.5"]),
        ({"seed": True}, ["seed=True"]),
        ({"seed": "1"}, ["seed='1'"]),
        ({"ignore_eos": "no"}, ["ignore_eos='no'"]),
        ({"temprature": 1.0}, ["'temprature'", "'temperature'"]),
        ({"top_pp": 1.0}, ["'top_pp'", "'top_p'"]),
        ({"xyzzy": 2}, ["'xyzzy'", "temperature"]),
        ({"max_token": 2}, ["'max_token'", "'max_tokens'"]),
    ],
    ids=str,
)
def test_bad_sampling_params(options: dict[str, Any], words: list[str]) -> None:
    refused(lambda: SamplingParams(**options), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({name: value}, [re.escape(f"{name}={value!r}"), "whole number from 1"])
            for name in COUNTS
            for value in (0, -1, 1.5, True, "16", math.nan)
        ),
        *(({"gpu_memory_utilization": v}, [f"utilization={v!r}", "above 0 to 1"]) for v in (0, 1.1, math.nan, "1", True)),
        *(({"scheduler_delay_factor": v}, [f"scheduler_delay_factor={v!r}", "from 0"]) for v in (-1, math.nan, math.inf, "1")),
        *(({"dtype": v}, ["dtype", "float32"]) for v in ("int8", "fp32", 32)),
        *(({"enable_prefix_caching": v}, ["enable_prefix_caching", repr(v)]) for v in ("no", 2)),
        *(({"prefix_cache": v}, ["prefix_cache", repr(v), "'radix'"]) for v in ("tree", True)),
        ({"enable_prefix_caching": False, "prefix_cache": "radix"}, ["enable_prefix_caching=False", "'radix'", "set it to True"]),
        ({"enable_prefix_caching": True, "prefix_cache": "none"}, ["enable_prefix_caching=True", "'none'", "set it to False"]),
        ({"max_model_len": 2049}, ["2049", "2048"]),
        ({"max_num_seq": 4}, ["'max_num_seq'", "did you mean 'max_num_seqs'"]),
        ({"block_size": 4}, ["'block_size'", "'kv_cache_block_size'"]),  # not the `chunk_size` that looks more alike
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size"]),
        ({"device": "gpu"}, ["device", "'gpu'", "cpu"]),
        ({"device": 5}, ["device", "5"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
         ["max_model_len=2048", "max_num_batched_tokens=100", "enable_chunked_prefill=True"]),
        *(({name: HUGE}, [f"{name}=1000"]) for name in KNOBS),
        ({"max_num_seqs": 2**31}, ["max_num_seqs=2147483648"]),
        ({"data_parallel_size": 10**9}, ["data_parallel_size=1000000000"]),
        ({"data_parallel_place": [0, "", 1], "data_parallel_size": 2}, ["no option 'data_parallel_place'"]),
        ({"data_parallel_place": [0, "", 1], "data_parallel_size": 2, "lockstep": True}, ["no option"]),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_options(options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a weight is read, with number, limit and knob, or the nearest name."""
    monkeypatch.delattr("atom_mini.model_runner.load_model")
    refused(lambda: LLM("tiny", **options), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is one")
def test_no_gpu_here() -> None:
    refused(lambda: LLM("tiny", device="cuda"), "device", "'cuda'", "cpu")


def test_bad_requests(llm: LLM) -> None:
    """What needs the engine to be judged, and lists that do not match."""
    refused(
        lambda: llm.generate(PROMPT, SamplingParams(stop_token_ids=[VOCABULARY])),
        str(VOCABULARY),
        "stop_token_ids",
        "vocabulary",
    )
    many: Any
    refused(lambda: llm.generate(PROMPT, SamplingParams(stop=["a", "b\udc80"])), "udc80", "position 1", "surrogate")
    refused(lambda: llm.chat([{"role": "user", "content": "\ud8ff"}]), "ud8ff", "surrogate")
    for many in ([], [GREEDY], [GREEDY] * 3):
        words = "2 prompts", f"{len(many)} sampling_params"
        refused(partial(llm.generate, ["a", "b"], many), *words)
        refused(partial(llm.stream, ["a", "b"], many), *words)
    for many in ({"max_tokens": 3}, 5, "greedy", [{"max_tokens": 3}], [None]):
        refused(partial(llm.generate, PROMPT, many), "SamplingParams")
    refused(lambda: llm.add_request(5), "prompt", "int")
    for role in (None, 5, ["user"]):
        refused(partial(llm.chat, [{"role": role, "content": "x"}]), "role", re.escape(repr(role)), "string")


def test_no_error_repeats_a_megabyte(llm: LLM) -> None:
    long = "x" * 2**20
    for ask in (
        lambda: LLM("tiny", device=long), lambda: LLM(long), lambda: LLM("tiny", **{long: 1}),
        lambda: SamplingParams(stop=[long, 1]), lambda: LLM("tiny", speculative_config=long), lambda: llm.generate(long),
        lambda: llm.chat([{"role": long, "content": 5}]),
    ):  # fmt: skip
        with pytest.raises(ValueError) as info:
            ask()
        assert len(str(info.value)) < 3000


def test_sampling_params_stay_as_they_are(llm: LLM) -> None:
    """One object for many prompts, used again; the caller's lists too."""
    stop, ids = ["zz", "qq"], [900]
    params = SamplingParams(temperature=1.0, max_tokens=6, stop=stop, stop_token_ids=ids)
    before = copy.deepcopy(params)
    prompts: list[Any] = [PROMPT, "12 + 7 =", [5, 6]]
    llm.generate(prompts, params)
    list(llm.stream(PROMPT, params))
    assert params == before and (stop, ids) == (["zz", "qq"], [900])
    stop.append("xx")
    assert params == before
    with pytest.raises(AttributeError):
        params.max_tokens = 5  # type: ignore[misc]


# steps, aborts, interrupts, the end


def test_step_and_add_request(llm: LLM, whole: RequestOutput) -> None:
    """Everything that `generate` does can be done by hand."""
    assert llm.step() is None
    ids = [llm.add_request(PROMPT, GREEDY), llm.add_request([5, 6, 7], replace(GREEDY, max_tokens=3))]
    assert len(set(ids)) == 2 and len(llm.engine_core.scheduler.waiting) == 2
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    finished: dict[int, str | None] = {}
    while (step := llm.step()) is not None:
        assert step.seconds > 0 and step.batch.total_seqs_num >= 1
        for new in new_tokens(step):
            tokens[new.request_id] += new.tokens
        finished |= {seq.id: seq.leave_reason for seq in step.finished}
    assert finished == dict.fromkeys(ids, "max_tokens")
    assert tokens[ids[0]] == whole.token_ids and len(tokens[ids[1]]) == 3
    assert isinstance(llm.add_request(PROMPT, SamplingParams(max_tokens=5)), int)
    llm.generate("12 + 7 =", replace(GREEDY, max_tokens=8))  # which runs the other one to its end as well


def test_abort(llm: LLM, whole: RequestOutput) -> None:
    """Waiting or running, once; the rest goes on."""
    stays, goes, waits = (llm.add_request(PROMPT, GREEDY) for _ in range(3))
    assert llm.abort(waits) and not llm.abort(waits)
    for _ in range(3):
        llm.step()
    assert llm.abort(goes) and not llm.abort(goes) and not llm.abort(10**9)
    assert [seq.id for seq in llm.engine_core.scheduler.running] == [stays]
    tokens = list(llm.engine_core.scheduler.running[0].completion_token_ids)
    while (step := llm.step()) is not None:
        tokens += [token for new in new_tokens(step) for token in new.tokens]
    assert tokens == whole.token_ids and not llm.abort(stays)


def test_abort_of_a_stream(llm: LLM, whole: RequestOutput) -> None:
    """The stream ends with what there was, and says so."""
    pieces = llm.stream(PROMPT, GREEDY)
    taken = [next(pieces) for _ in range(3)]
    (request_id,) = llm.engine_core.scheduler.seqs
    assert llm.abort(request_id)
    taken += pieces
    out = taken[-1].output
    assert out is not None and (out.finish_reason, out.stop_reason, taken[-1].finish_reason) == ("abort",) * 3
    check_pieces(taken, out)
    assert whole.token_ids[: len(out.token_ids)] == out.token_ids and 3 <= len(out.token_ids) < 24


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after it"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_interrupted_step(
    call: int, after: bool, error: type[BaseException], shared: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C within a step: the interrupted requests are gone, others lose nothing, and the next call is right."""
    prompts: list[Any] = [PROMPT, [5] * 40, "12 + 7 =", [5] * 33]
    *outs, alone = shared.generate([*prompts, "Ada lives in"], GREEDY)
    wanted = [out.token_ids for out in outs]
    options = {"device": "cpu", "num_kvcache_blocks": 12, "max_num_batched_tokens": 32}  # chunks and preemptions too
    with LLM("tiny", **options) as llm:
        runner: Any = llm.engine_core.runner
        runner.kv_cache.fill_(math.nan)  # a block that is taken for computed and is not will show
        forward, calls = runner.forward, itertools.count(1)

        def failing(batch: Any) -> Any:
            fails = next(calls) == call
            if fails and not after:
                raise error
            output = forward(batch)
            if fails:
                raise error
            return output

        bystander = llm.stream("Ada lives in", GREEDY)
        pieces = [next(bystander)]
        monkeypatch.setattr(runner, "forward", failing)
        with pytest.raises(error):
            llm.generate(prompts, GREEDY)
        assert len(llm.engine_core.scheduler.seqs) == 1
        check_pieces(pieces + list(bystander), alone)
        assert is_empty(llm)
        assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == wanted
        calls = itertools.count(1)
        with pytest.raises(error):
            list(llm.stream(prompts, GREEDY))
        assert is_empty(llm)
        assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == wanted


def test_close() -> None:
    """Afterwards every use says why not; closing twice is no mistake; what ran is aborted."""
    llm = LLM("tiny", **OPTIONS)
    untouched = llm.stream(PROMPT, GREEDY)
    request = llm.add_request(PROMPT, GREEDY)
    llm.step()
    runner = weakref.ref(llm.engine_core.runner)
    assert llm.close() is None  # type: ignore[func-returns-value]
    assert is_empty(llm)
    gc.collect()
    assert runner() is None, "something still holds the memory"
    actions: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT),
        lambda: llm.stream(PROMPT),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.add_request(PROMPT),
        lambda: llm.step(),
        lambda: next(untouched),
    ]
    for action in actions:
        refused(action, "closed")
    assert not llm.abort(request)
    llm.close()
    with LLM("tiny", **OPTIONS) as other:
        other.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_taken", [1, 2, 3, 4, 9])
def test_close_in_a_stream(num_taken: int, overlap: bool) -> None:
    """Each prompt gets its last piece: the finished one its own, the others "abort", with what they have."""
    prompts: list[Any] = [PROMPT, "12 + 7 =", "Ada lives in"]
    samplings = [GREEDY, replace(GREEDY, max_tokens=2), replace(GREEDY, stop="never")]
    with LLM("tiny", overlap=overlap, **OPTIONS) as llm:
        wanted = llm.generate(prompts, samplings)
        pieces = llm.stream(prompts, samplings)
        taken = list(itertools.islice(pieces, num_taken))
        llm.close()
        assert not llm.engine_core.scheduler.seqs
        found = collect(iter([*taken, *pieces]))
        assert sorted(found) == [0, 1, 2]
        for index, whole in enumerate(wanted):
            out = found[index][-1].output
            assert out is not None and out.token_ids == whole.token_ids[: len(out.token_ids)]
            check_pieces(found[index], out)
            is_whole = len(out.token_ids) == len(whole.token_ids)
            assert out.finish_reason == (whole.finish_reason if is_whole else "abort")
            assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert found[0][-1].finish_reason == "abort"
        assert found[1][-1].finish_reason == ("length" if num_taken > 3 else "abort")


@pytest.mark.parametrize("copies", [pickle.dumps, copy.deepcopy, copy.copy], ids=lambda copies: copies.__name__)
def test_an_engine_is_not_copied(copies: Callable[[Any], Any], llm: LLM) -> None:
    """A pickle would hold the pool; what a request brings back can be pickled."""
    with pytest.raises(TypeError, match=r"LLM.*make it in the process that uses it"):
        copies(llm)
    out = llm.generate("12 + 7 =", use_tqdm=False)[0]
    assert pickle.loads(pickle.dumps(out)) == out and pickle.loads(pickle.dumps(SamplingParams(seed=3))).seed == 3


def said_in_a_fork(calls: list[Callable[[], Any]]) -> list[str]:
    """What each call says in a fork of this process; the fork ends as a process does."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        for call in calls:
            try:
                said = f"returned {call()}"
            except ValueError as error:
                said = str(error)
            os.write(write, f"{said}\n".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        lines = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0, lines
    return lines


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"compiled": True}, {"overlap": True}, {"engine_process": True}], ids=str)
def test_a_fork_is_refused(options: dict[str, Any]) -> None:
    """Torch's threads are not copied, and an engine's process is its owner's. Nothing hangs, and nothing ends there."""
    ask, params = {"role": "user", "content": "What is 20 + 21?"}, SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, max_num_seqs=4, **options) as llm:
        wanted = llm.generate("Once", params, use_tqdm=False)[0].text
        pieces = llm.stream("Once", params)
        text = next(pieces).text
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("Once", use_tqdm=False), lambda: llm.chat([ask], use_tqdm=False), lambda: llm.format_chat([ask]),
            lambda: next(llm.stream("Once")), lambda: llm.add_request("Once"), llm.step, lambda: llm.abort(0),
            lambda: next(pieces), llm.close,
        ]  # fmt: skip
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with llm._lock:  # another thread is in a step: in the fork nobody would release it
                entered.set()
                leave.wait(30)

        other = threading.Thread(target=hold)
        other.start()
        entered.wait(30)
        *refused, closed = said_in_a_fork(calls)
        leave.set()
        other.join()
        assert len(refused) == 8 and closed == "returned None"
        for line in refused:
            assert f"process {os.getpid()} made this LLM" in line and "fork" in line and "make a new LLM" in line
        assert text + "".join(piece.text for piece in pieces) == wanted
        assert llm.generate("Once", params, use_tqdm=False)[0].text == wanted


def test_context_manager_closes_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), LLM("tiny", **OPTIONS) as llm:
        raise ZeroDivisionError
    refused(lambda: llm.generate(PROMPT), "closed")


def test_two_engines_at_once(llm: LLM, whole: RequestOutput) -> None:
    """Nothing is global: two models run step by step beside each other."""
    with LLM("tiny", device="cpu", kv_cache_block_size=4, num_kvcache_blocks=50) as other:
        pairs = list(zip(llm.stream(PROMPT, GREEDY), other.stream(PROMPT, GREEDY), strict=True))
    assert all(a.text == b.text for a, b in pairs)
    check_pieces([a for a, _ in pairs], whole)


# threads


def in_threads(actions: Seq[Callable[[], Any]]) -> list[Any]:
    """What each returns, all begun at once; an exception is raised here, and so is a thread that does not end."""
    results: list[Any] = [None] * len(actions)
    start = threading.Barrier(len(actions))

    def run(i: int) -> None:
        try:
            start.wait(60)
            results[i] = actions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns a thousand times more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


THREADS: list[tuple[list[Any], SamplingParams]] = [
    ([PROMPT, "12 + 7 ="], GREEDY),
    ([[5, 6, 7] * 9, PROMPT], WILD),
    (["Ada lives in Rome. Where does Ada live?"], replace(WILD, seed=5, stop=["e", "th"])),
    ([PROMPT, [5] * 40, "Ben likes"], replace(GREEDY, stop=[" her", "."], max_tokens=40)),
]


def essence(out: RequestOutput) -> tuple[Any, ...]:
    return out.prompt_token_ids, out.token_ids, out.text, out.finish_reason, out.stop_reason


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["generate", "stream", "step"])
def test_four_threads(how: str, overlap: bool) -> None:
    """Each gets what it gets alone; their requests are computed together, and counted once."""
    options = OPTIONS | {"overlap": overlap, "max_num_batched_tokens": 32, "num_kvcache_blocks": 24}
    with LLM("tiny", **options) as llm:
        wanted = [[essence(out) for out in llm.generate(*call)] for call in THREADS]
        before = copy.copy(llm.metrics)

        def serve(i: int) -> None:
            prompts, sampling = THREADS[i]
            for _ in range(3):
                if how == "generate" or (how == "step" and i < 2):
                    assert [essence(out) for out in llm.generate(prompts, sampling)] == wanted[i]
                elif how == "stream":
                    for index, pieces in collect(llm.stream(prompts, sampling)).items():
                        out = pieces[-1].output
                        assert out is not None and essence(out) == wanted[i][index]
                        check_pieces(pieces, out)
                else:
                    request = llm.add_request(prompts[0], sampling)
                    while request in llm.engine_core.scheduler.seqs:
                        llm.step()

        step, steps = llm.engine_core.step, []

        def recording() -> Any:
            steps.append(step())
            return steps[-1]

        llm.engine_core.step = recording  # type: ignore[assignment, method-assign]
        in_threads([partial(serve, i) for i in range(4)])
        assert is_empty(llm)
        batches = [s.batch for s in steps if s is not None]
        assert max(len(batch.req_ids) for batch in batches) > 3, "in one batch"
        counted = llm.metrics.num_prefill_tokens + llm.metrics.num_decode_tokens
        counted -= before.num_prefill_tokens + before.num_decode_tokens
        computed = sum(batch.total_tokens_num for batch in batches)
        assert counted == computed or (overlap and 0 < computed - counted < 100)  # steps in vain are not counted


@pytest.mark.parametrize("overlap", [False, True])
def test_a_short_call_does_not_wait_for_a_long_one(overlap: bool) -> None:
    """Who has run a step lets the others in before the next, or a waiting thread would wait for its end."""
    with LLM("tiny", overlap=overlap, **OPTIONS) as llm:
        (alone,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=150))
        (short,) = llm.generate("12 + 7 =", replace(GREEDY, max_tokens=3))
        ended: list[str] = []

        def long() -> None:
            (out,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=150))
            ended.append("long")
            assert essence(out) == essence(alone)

        def several() -> None:
            while not llm.engine_core.scheduler.seqs:
                time.sleep(0.001)
            for _ in range(5):
                (out,) = llm.generate("12 + 7 =", replace(GREEDY, max_tokens=3))
                ended.append("short")
                assert essence(out) == essence(short)

        in_threads([long, several])
        assert ended == ["short"] * 5 + ["long"]


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
CORES: dict[str, dict[str, Any]] = {
    "plain": {}, "drafts": NGRAM, "radix": NGRAM | {"prefix_cache": "radix"}, "overlap": {"overlap": True},
    "process": {"engine_process": True},
}  # fmt: skip


class Held(deque[int]):
    """Whoever puts requests to be taken back into it waits until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.go = threading.Event(), threading.Event()

    def extend(self, ids: Iterable[int]) -> None:
        super().extend(ids)
        self.here.set()
        assert self.go.wait(60)


def ends_by_an_error(llm: LLM) -> None:
    """A `generate` whose second step fails."""
    step, count = llm.engine_core.step, itertools.count()

    def failing() -> Any:
        if next(count):
            raise RuntimeError("no more steps")
        return step()

    llm.engine_core.step = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no more steps"):
        llm.generate([PROMPT, "12 + 7 ="], replace(GREEDY, max_tokens=60))


def is_dropped(llm: LLM) -> None:
    """A stream that is dropped after its first piece."""
    pieces: Any = llm.stream([PROMPT, "12 + 7 ="], replace(GREEDY, max_tokens=60))
    next(pieces)
    pieces.close()


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", CORES)
@pytest.mark.parametrize("end", [is_dropped, ends_by_an_error])
def test_closed_before_it_takes_back(end: Callable[[LLM], None], name: str) -> None:
    """One thread has given up its requests and not yet taken them back, when another closes."""
    with LLM("tiny", **OPTIONS, **CORES[name]) as llm:
        llm._dropped = held = Held()

        def close() -> None:
            assert held.here.wait(60)
            llm.close()
            held.go.set()

        in_threads([partial(end, llm), close])
        assert not llm.engine_core.scheduler.seqs and not llm._dropped


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", CORES)
def test_a_closed_engine_refuses(name: str) -> None:
    """Also where nobody asks the LLM: the engine core itself knows that it is closed."""
    with LLM("tiny", **OPTIONS, **CORES[name]) as llm:
        core = llm.engine_core
        core.add(seq := llm._prepare([PROMPT], GREEDY)[0].seq)
        core.step()
    core.close()
    assert seq.leave_reason == "abort" and core.abort(seq.id) is None and core.is_finished()
    assert llm.abort(seq.id) is False
    for call in (core.step, lambda: core.add(Sequence([5, 6], 16))):
        with pytest.raises(ValueError, match="this engine is closed: make a new one"):
            call()


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", CORES)
def test_requests_of_threads_end_when_another_closes(name: str) -> None:
    """Dropped streams and whole ones, and generates, while it closes: each ends with what it has, or is told so."""
    sampling = replace(GREEDY, max_tokens=30)
    with LLM("tiny", **OPTIONS, **CORES[name]) as llm:
        (whole,) = llm.generate(PROMPT, sampling)
        ended: list[str | None] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            with pytest.raises(ValueError, match="this LLM is closed"):
                while True:
                    if rng.random() < 0.5:
                        (out,) = llm.generate(PROMPT, sampling)
                        assert out.token_ids == whole.token_ids[: len(out.token_ids)]
                        assert out.finish_reason == ("abort" if len(out.token_ids) < 30 else "length")
                        assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
                        ended.append(out.finish_reason)
                    else:
                        pieces: Any = llm.stream([PROMPT, "12 + 7 ="], sampling)
                        [*itertools.islice(pieces, rng.randrange(9))]
                        pieces.close()

        def close() -> None:
            while len(ended) < 4:
                time.sleep(0.0005)
            llm.close()

        in_threads([*(partial(work, seed) for seed in range(4)), close])
        assert not llm.engine_core.scheduler.seqs


@pytest.mark.parametrize("overlap", [False, True])
def test_stream_dropped_within_a_step(overlap: bool) -> None:
    """As the garbage collector may do it, in the thread that computes: the next step takes its prompts back."""
    with LLM("tiny", overlap=overlap, **OPTIONS) as llm:
        (wanted,) = llm.generate(PROMPT, GREEDY)
        pieces: Any = llm.stream(["12 + 7 =", "Ada lives in"], replace(GREEDY, max_tokens=200))
        next(pieces)
        scheduler = llm.engine_core.scheduler
        advance, left = scheduler.advance, []

        def dropping(seqs: Any) -> None:
            pieces.close()
            left.append(len(scheduler.seqs))
            advance(seqs)

        scheduler.advance = dropping  # type: ignore[method-assign]
        assert llm.generate(PROMPT, GREEDY)[0].token_ids == wanted.token_ids
        assert left[0] == 3 and left[-1] == 1 and is_empty(llm)


# the package


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)


def test_import_is_light() -> None:
    """`import atom_mini` and a `SamplingParams` need neither torch nor transformers."""
    code = (
        "import sys, json, atom_mini; atom_mini.SamplingParams(temperature=0.5); "
        "print(json.dumps([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules]))"
    )
    assert json.loads(run_python("-c", code).stdout) == []


BROKEN_MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "drafts": {"speculative_config": NGRAM["speculative_config"] | {"prompt_lookup_min": 1}},
    "radix": {"prefix_cache": "radix"},
    "turns": {"interleave_decode": True},
    "mixed": {"enable_mixed_steps": True},
    "spyre": {"scheduler": "spyre", "chunk_size": 16, "max_num_seqs": 4},
}
BROKEN_WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 0.8, "seed": 3, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.mark.parametrize("sampling", BROKEN_WISHES)
@pytest.mark.parametrize("mode", BROKEN_MODES)
def test_logits_that_are_no_numbers_end_one_request(mode: str, sampling: str, untied: str) -> None:
    """It ends with an error that says so; the others in the batch, and whoever comes later, get what they ever got."""
    params = SamplingParams(max_tokens=8, **BROKEN_WISHES[sampling])
    good, bad = [[5, 6, 5, 6, 5], [8, 9, 8, 9]], [5, 6, 7, 5, 6]
    with LLM(untied, device="cpu", num_kvcache_blocks=40, **BROKEN_MODES[mode]) as llm:
        wanted = [out.token_ids for out in llm.generate(good, params)]
        embedding = inner_model(llm).model.embed_tokens.weight
        with torch.no_grad():
            embedding[7] = torch.nan
        with pytest.warns(UserWarning, match=r"request \d+ failed: the model's logits"):
            first, broken, last = llm.generate([good[0], bad, good[1]], params)
        assert [first.token_ids, last.token_ids] == wanted
        assert (broken.finish_reason, broken.token_ids, broken.text) == ("error", [], "")
        assert "finite" in str(broken.stop_reason) and not broken.logprobs
        with pytest.warns(UserWarning, match="logits"):
            *_, piece = llm.stream([bad], params)
        assert piece.finished and piece.finish_reason == "error"
        assert [out.token_ids for out in llm.generate(good, params)] == wanted
        assert is_empty(llm)


def inner_model(llm: LLM) -> Any:
    runner: Any = llm.engine_core.runner
    return getattr(runner, "runner", runner).model


def test_logits_that_break_on_the_way(untied: str) -> None:
    """What was generated before stays in the result."""
    with LLM(untied, device="cpu", num_kvcache_blocks=40) as llm:
        fine = llm.generate([5, 6], replace(GREEDY, max_tokens=6))[0].token_ids
        with torch.no_grad():
            inner_model(llm).model.embed_tokens.weight[fine[3]] = torch.inf
        end = fine.index(fine[3]) + 1
        with pytest.warns(UserWarning, match="logits"):
            out = llm.generate([5, 6], replace(GREEDY, max_tokens=6))[0]
        assert (out.finish_reason, out.token_ids) == ("error", fine[:end])


@pytest.mark.parametrize("draft_sampling", [False, True])
def test_a_draft_model_whose_logits_are_no_numbers(draft_sampling: bool, untied: str) -> None:
    """Bad drafts do no harm, and neither do drafts that are no tokens."""
    with LLM(untied, device="cpu", num_kvcache_blocks=40) as llm:
        wanted = llm.generate([5, 6], replace(GREEDY, max_tokens=8))[0].token_ids
    drafts = {"method": "draft_model", "model": untied, "draft_sampling": draft_sampling}
    with LLM(untied, device="cpu", num_kvcache_blocks=40, speculative_config=drafts) as llm:
        drafter: Any = llm.engine_core.drafter  # type: ignore[attr-defined]
        with torch.no_grad():
            drafter.runner.model.model.embed_tokens.weight[5] = torch.nan
        assert llm.generate([5, 6], replace(GREEDY, max_tokens=8))[0].token_ids == wanted
        assert llm.generate([5, 6], replace(WILD, max_tokens=8))[0].finish_reason == "length"


@pytest.mark.parametrize("name", [*NUMBERS])
def test_integers_of_400_digits_in_a_wish(name: str) -> None:
    refused(lambda: SamplingParams(**{name: HUGE}), f"{name}=1000")


def test_a_seed_of_400_digits(llm: LLM) -> None:
    """Its last 64 bits count."""
    samplings = [replace(WILD, seed=seed) for seed in (HUGE + 5, (HUGE + 5) % 2**64, HUGE + 6)]
    outs = llm.generate(["Once"] * 3, samplings, use_tqdm=False)
    assert outs[0].token_ids == outs[1].token_ids != outs[2].token_ids


@pytest.mark.parametrize(("name", "value"), [("top_p", 7e-46), ("repetition_penalty", 1e-46), ("temperature", 1e308)])
def test_what_float32_cannot_hold(name: str, value: float) -> None:
    """Zero there: such a request got token 0 for ever, or a warning at every step."""
    refused(lambda: SamplingParams(**{name: value}), re.escape(f"{name}={value!r}"))


@pytest.mark.parametrize("model", [None, 3, b"tiny", ["tiny"]], ids=repr)
def test_a_model_is_a_text(model: Any) -> None:
    refused(lambda: LLM(model), f"model={re.escape(repr(model))}")


def test_a_model_is_a_path() -> None:
    with LLM(TINY, **OPTIONS) as llm:
        assert llm.config.model == str(TINY)


def test_chat_content_in_parts(llm: LLM) -> None:
    question = "What is 20 + 21?"
    parts = [{"type": "text", "text": question[:8]}, {"type": "text", "text": question[8:]}]
    plain = [{"role": "user", "content": question}]
    assert llm.format_chat([{"role": "user", "content": parts}]) == llm.format_chat(plain)
    for content in (
        [{"type": "image_url", "image_url": "x"}], [question], 5, None,
        [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "text", "text": None}], [{}],
    ):  # fmt: skip
        refused(lambda content=content: llm.chat([{"role": "user", "content": content}]), "chat message")
