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
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, is_empty, save_checkpoint

from atom_mini import LLM, RequestOutput, SamplingParams
from atom_mini.sequence import Sequence
from atom_mini.text import TextPiece

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


def tiny_folder(folder: Path, **generation_config: Any) -> str:
    """A copy of the built-in model with another generation_config."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    edit_json(folder / "generation_config.json", **generation_config)
    return str(folder)


def collect(pieces: Iterable[TextPiece]) -> dict[int, list[TextPiece]]:
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
    assert essence(last) == essence(out)


def essence(out: RequestOutput) -> tuple[Any, ...]:
    return out.prompt_token_ids, out.token_ids, out.text, out.finish_reason, out.stop_reason


def bring(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, token_ids: Seq[int], at_once: int = 1
) -> None:
    """Let every request's tokens be these, `at_once` of them a step, as a step with drafts does."""
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


# what goes in, and what comes out


def test_prompts_of_every_kind(llm: LLM, whole: RequestOutput) -> None:
    """Text, ids, arrays, and dicts as vLLM takes them; one or several; what comes back is int."""
    ids = llm.tokenizer.encode(PROMPT)
    array, named = np.array(ids), {"prompt_token_ids": ids}
    texts: list[Any] = [PROMPT, {"prompt": PROMPT}, [PROMPT], [{"prompt": PROMPT}]]
    others: list[Any] = [ids, [ids], tuple(ids), named, [named], array, array.astype(np.uint16)]
    others += [[array], list(array), torch.tensor(ids), [torch.tensor(ids)], [ids[0], *array[1:]]]
    short = replace(GREEDY, max_tokens=5)
    for i, prompt in enumerate([*texts, *others]):
        (out,) = llm.generate(prompt, short)
        assert (out.prompt_token_ids, out.prompt) == (ids, PROMPT if i < len(texts) else None)
        assert out.token_ids == whole.token_ids[:5] and json.dumps(out.prompt_token_ids)
    outs = llm.generate([named, array[::-1], PROMPT], short)
    assert [out.prompt_token_ids for out in outs] == [ids, ids[::-1], ids]
    assert "".join(piece.text for piece in llm.stream(array, GREEDY)) == whole.text  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == [] and list(llm.stream([], GREEDY)) == []
    for wrong, says in (([], "empty prompt"), ([[5], [6]], "of type list"), (["a"], "of type str"), (None, "not NoneType")):
        refused(partial(llm.generate, {"prompt_token_ids": wrong}, GREEDY), says)


def test_the_result_of_a_request(llm: LLM) -> None:
    (out,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=9))
    assert len(out.token_ids) == 9
    assert (out.finish_reason, out.stop_reason) == ("length", "max_tokens")
    assert out.text == llm.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    assert 0 < out.ttft < out.latency and out.ttft + 8 * out.tpot == pytest.approx(out.latency)
    assert out["text"] == out.text and out.logprobs is None
    assert pickle.loads(pickle.dumps(out)) == out
    with pytest.raises(TypeError, match=r"LLM.*make it in the process that uses it"):
        copy.copy(llm)


def test_default_sampling_is_the_checkpoints(llm: LLM, tmp_path: Path) -> None:
    """`None` is filled in from generation_config; what a request says itself counts more."""
    asked = "Ada lives in Rome. Ben likes plums. Where does Ada live?"
    assert llm.generate(asked)[0].text == llm.generate(asked, SamplingParams(temperature=0))[0].text
    authors = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    with LLM(tiny_folder(tmp_path, do_sample=True, **authors), **OPTIONS) as other:
        for own in ({}, {"top_k": 3, "temperature": 0.0}):
            other.add_request(PROMPT, SamplingParams(**own))  # type: ignore[arg-type]
            (seq,) = other.engine_core.scheduler.waiting
            used = {name: getattr(seq.sampling_params, name) for name in authors}
            assert used == authors | own and seq.sampling_params.min_p == 0
            assert other.abort(seq.id)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    """Ids work; text is refused with the reason."""
    save_checkpoint("llama", tmp_path, num_hidden_layers=1)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.config.model == str(tmp_path)
        (out,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=3))
        assert len(out.token_ids) == 3 and out.text == ""
        check_pieces(list(llm.stream([1, 2, 3], SamplingParams(max_tokens=3))), out)
        refused(lambda: llm.generate("a"), "no tokenizer")
        refused(lambda: llm.generate([1], SamplingParams(stop="a")), "no tokenizer")
        refused(lambda: llm.chat([{"role": "user", "content": "hi"}]), "no chat template")


def test_chat_equals_generate_on_the_template(llm: LLM) -> None:
    """One conversation or several; special tokens of the template become ids, once."""
    one = [{"role": "user", "content": "Where does Ada live?"}]
    two = [*one, {"role": "assistant", "content": "In Rome."}, {"role": "user", "content": "Ben?"}]
    apply = partial(llm.tokenizer.apply_chat_template, add_generation_prompt=True)
    ids = [apply(chat, return_dict=False) for chat in (one, two)]
    wanted = [essence(out) for out in llm.generate(ids, GREEDY)]
    assert [essence(out) for out in llm.chat([one, two], GREEDY)] == wanted
    assert essence(llm.chat(one, GREEDY)[0]) == wanted[0]
    assert llm.tokenizer.convert_tokens_to_ids("<|im_start|>") == ids[0][0]
    halves = [{"type": "text", "text": "Where does "}, {"type": "text", "text": "Ada live?"}]
    assert llm.format_chat([{"role": "user", "content": halves}]) == ids[0]


def test_chat_refuses_answers_in_channels(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss answers in harmony's format, which would come out as one text without its special tokens."""
    template = "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis or final #}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    for call in (llm.chat, llm.format_chat):
        refused(partial(call, [{"role": "user", "content": "hi"}]), "harmony's channels.*use generate.*openai-harmony")


def test_chat_adds_no_second_first_token(tmp_path: Path) -> None:
    """Where the tokenizer puts a token before every text, and the template has it too: once."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = tiny_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = "<|im_end|>"
    pair = (first, tokenizer.convert_tokens_to_ids(first))
    processor = TemplateProcessing(single=f"{first} $A", special_tokens=[pair])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.chat_template = first + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    with LLM(folder, **OPTIONS) as llm:
        text = llm.generate("12 + 7 =", GREEDY)[0].prompt_token_ids
        chat = llm.chat([{"role": "user", "content": "12 + 7 ="}], GREEDY)[0].prompt_token_ids
    assert text[0] == pair[1] and text.count(pair[1]) == 1 and chat == text


# streaming


@pytest.mark.parametrize(
    "sampling", [WILD, replace(WILD, seed=5, stop=["e", "th"])], ids=["wild", "stop"]
)
def test_stream_equals_generate(llm: LLM, sampling: SamplingParams) -> None:
    """Alone and several at once, by index."""
    prompts: list[Any] = [PROMPT, "12 + 7 =", "Ada lives in Rome.", [5, 6, 7, 900, 901]]
    outs = llm.generate(prompts, sampling)
    found = collect(llm.stream(prompts, sampling))
    assert sorted(found) == [0, 1, 2, 3]
    for index, out in enumerate(outs):
        check_pieces(found[index], out)
        check_pieces(list(llm.stream(prompts[index], sampling)), out)


@pytest.mark.parametrize("how", ["close", "throw", "forget"])
def test_dropped_stream_is_taken_back(llm: LLM, how: str) -> None:
    """Whatever ends the consumer, its prompts leave the engine, and others in it go on."""
    wanted = llm.generate("12 + 7 =", GREEDY)[0]
    other = llm.stream("12 + 7 =", GREEDY)
    start = next(other)
    pieces: Any = llm.stream([PROMPT, "Ada lives", [5] * 40], GREEDY)
    next(pieces)
    assert len(llm.engine_core.scheduler.running) == 4
    if how == "close":
        pieces.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
    else:
        del pieces
    assert len(llm.engine_core.scheduler.running) == 1
    check_pieces([start, *other], wanted)


@pytest.mark.parametrize("overlap", [False, True])
def test_stream_dropped_within_a_step(overlap: bool) -> None:
    """As the garbage collector may do it, in the thread that computes: the next step takes its
    prompts back."""
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


# where it stops


@pytest.mark.parametrize(("at_once", "max_tokens"), [(1, 3), (1, 9), (2, 4), (3, 4), (5, 9)])
def test_nothing_counts_behind_a_stop_string(
    at_once: int, max_tokens: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end in the middle of a step's tokens, and the request by max_tokens in the same step:
    the earlier one wins, and tokens, text, log probabilities and pieces are cut alike."""
    said = llm.tokenizer.encode(" a cat and a dog and a red hen")
    names = [llm.tokenizer.decode([i]) for i in said]
    n = next(n for n in range(len(names)) if " and" in "".join(names[: n + 1])) + 1
    bring(llm, monkeypatch, said, at_once)
    sampling = SamplingParams(max_tokens=max_tokens, stop=" and", ignore_eos=True, logprobs=0)
    (out,) = llm.generate(PROMPT, sampling)
    kept = min(n, max_tokens)
    assert out.token_ids == said[:kept]
    assert [[*entry] for entry in out.logprobs or ()] == [[i] for i in said[:kept]]
    assert out.text == "".join(names[:kept]).removesuffix(" and")
    why = ("stop", " and") if n <= max_tokens else ("length", "max_tokens")
    assert (out.finish_reason, out.stop_reason) == why
    check_pieces(list(llm.stream(PROMPT, sampling)), out)
    request = llm.add_request(PROMPT, sampling)
    finished: list[int] = []
    while step := llm.step():
        finished += [seq.id for seq in step.finished]
    assert finished == [request]


@pytest.mark.parametrize("after", [False, True], ids=["before the abort", "after it"])
def test_interrupted_where_a_text_is_read(
    after: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are in the books, and their text is not acted upon: the next step does it."""
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
    assert essence(llm.processor.postprocess(request)) == essence(wanted)


@pytest.mark.parametrize("options", [{}, {"engine_process": True}], ids=str)
def test_without_max_tokens_it_is_the_rest_of_the_context(options: dict[str, Any]) -> None:
    with LLM("tiny", **OPTIONS, **options, max_model_len=60) as llm:
        (out,) = llm.generate([5] * 20, replace(GREEDY, max_tokens=None))
        assert (len(out.token_ids), out.stop_reason) == (40, "max_model_len")


# what is refused


def refused(action: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert all(re.search(word, message) for word in words), f"{message!r} lacks one of {words}"
    assert "\n" not in message and len(message) < 3000


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty prompt", "0 tokens", "at least 1"]),
        ([5] * 2048, ["2048", "max_model_len=2048"]),
        ([5] * 1601, ["1601", "100 blocks x 16", "num_kvcache_blocks"]),
        ("x" * 2**20, ["1048576 characters", "max_model_len=2048"]),
        ([1, VOCABULARY], ["prompt", f"vocabulary of {VOCABULARY}"]),
        ([3, -1], ["-1", "prompt", "from 0"]),
        ([3, True], ["True", "type bool"]),
        ([3, 1.5], ["1.5", "type float"]),
        ([PROMPT, "\udfff"], ["udfff", "position 0", "surrogate"]),
        (np.array([1.5]), ["float"]),
        (5, ["int"]),
        (b"ab", ["bytes"]),
        ({"prompt": "a", "multi_modal_data": {}}, ["multi_modal_data", "'prompt'"]),
        ([{"prompt_token_ids": [5]}, {"text": "a"}], ["text", "'prompt_token_ids'"]),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_bad_prompts(prompt: Any, words: list[str]) -> None:
    """Number, limit and knob; generated, streamed, or in a list of good ones: nothing is queued."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=100) as llm:
        refused(lambda: llm.generate(prompt, GREEDY), *words)
        refused(lambda: llm.stream(prompt, GREEDY), *words)
        if isinstance(prompt, str) or (isinstance(prompt, list) and type(prompt[0]) is int):
            refused(lambda: llm.generate([PROMPT, prompt, PROMPT], GREEDY), *words)
            refused(lambda: llm.add_request(prompt, GREEDY), *words)
        assert is_empty(llm) and llm.step() is None


NAN, HUGE = math.nan, 10**400
OUTSIDE: dict[str, tuple[str, tuple[Any, ...]]] = {  # name -> limit, values
    "temperature": ("0", (-0.1, NAN, math.inf, 1e308)),
    "top_p": ("1", (0, 1.0001, NAN, 7e-46)),  # 7e-46 is 0 in float32
    "top_k": ("-1", (-2, 1.5, NAN)),
    "min_p": ("1", (-0.01, 1.01, NAN)),
    "repetition_penalty": ("0", (0, -1.0, math.inf, 1e-46)),
    "max_tokens": ("1", (0, 16.0, NAN)),
    "logprobs": ("20", (-1, 21, 1.0)),
    "presence_penalty": ("2", (-2.1, 2.1, NAN)),
    "frequency_penalty": ("2", (-2.1, 2.1, NAN)),
    "min_tokens": ("0", (-1, 1.5)),
    "n": ("1", (0, 1025, 1.5)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_sampling_params_out_of_range(name: str) -> None:
    """What is below or above the limit, what is no number, and what has too many digits."""
    limit, values = OUTSIDE[name]
    for value in values:
        said = re.escape(f"{name}={value!r}"), limit, "set SamplingParams"
        refused(lambda value=value: SamplingParams(**{name: value}), *said)
    for value in (True, "1", [1], {}):
        said = re.escape(f"{name}={value!r}"), "number"
        refused(lambda value=value: SamplingParams(**{name: value}), *said)
    refused(lambda: SamplingParams(**{name: HUGE}), f"{name}=1000")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": ["a", ""]}, ["stop", "empty"]),
        ({"stop": 5}, ["stop", "5"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"stop_token_ids": "12"}, ["stop_token_ids"]),
        ({"seed": 1.5}, ["seed=1.5"]),
        ({"seed": -3}, ["seed=-3"]),
        ({"ignore_eos": "no"}, ["ignore_eos='no'"]),
        ({"temprature": 1.0}, ["'temprature'", "'temperature'"]),
        ({"xyzzy": 2}, ["'xyzzy'", "temperature"]),
        ({"max_tokens": 8, "min_tokens": 9}, ["min_tokens=9", "max_tokens=8", "lower it"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_sampling_params(options: dict[str, Any], words: list[str]) -> None:
    refused(lambda: SamplingParams(**options), *words)


COUNTS = ["kv_cache_block_size", "num_kvcache_blocks", "max_num_seqs", "max_num_batched_tokens",
          "max_model_len"]  # fmt: skip
BELOW_ONE = ["tensor_parallel_size", "data_parallel_size", *COUNTS]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({name: 0}, [f"{name}=0", "whole number from 1"]) for name in BELOW_ONE),
        *(({name: HUGE}, [f"{name}=1000"]) for name in [*COUNTS, "gpu_memory_utilization"]),
        *(({"max_num_seqs": v}, [re.escape(f"max_num_seqs={v!r}")]) for v in (1.5, True, "16", NAN)),
        ({"gpu_memory_utilization": 1.1}, ["utilization=1.1", "above 0 to 1"]),
        ({"dtype": "int8"}, ["dtype", "float32"]),
        ({"enable_prefix_caching": "no"}, ["enable_prefix_caching", "'no'"]),
        ({"prefix_cache": "tree"}, ["prefix_cache", "'tree'", "'radix'"]),
        ({"enable_prefix_caching": False, "prefix_cache": "radix"},
         ["enable_prefix_caching=False", "'radix'", "set it to True"]),
        ({"max_model_len": 2049}, ["2049", "2048"]),
        ({"max_num_seq": 4}, ["'max_num_seq'", "did you mean 'max_num_seqs'"]),
        ({"block_size": 4}, ["'block_size'", "'kv_cache_block_size'"]),  # not `chunk_size`
        ({"x" * 2**20: 1}, ["no option"]),
        ({"device": "gpu"}, ["device", "'gpu'", "cpu"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
         ["max_model_len=2048", "max_num_batched_tokens=100", "enable_chunked_prefill=True"]),
        ({"enable_chunked_prefill": False, "enable_mixed_steps": True},
         ["enable_chunked_prefill=False", "enable_mixed_steps=True", "set it to True"]),
        ({"seed": -3}, ["seed=-3"]),  # random.Random(-3) would draw what 3 draws
        ({"model": None}, ["model=None"]),
        ({"model": ["tiny"]}, [r"model=\['tiny'\]"]),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_options(
    options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a weight is read, with number, limit and knob, or the nearest name."""
    monkeypatch.delattr("atom_mini.model_runner.load_model")
    refused(lambda: LLM(**{"model": "tiny"} | options), *words)


def test_bad_requests(llm: LLM) -> None:
    """What needs the engine to be judged, and lists that do not match."""
    generate = partial(llm.generate, PROMPT)
    ends = SamplingParams(stop_token_ids=[VOCABULARY])
    refused(lambda: generate(ends), str(VOCABULARY), "stop_token_ids", "vocabulary")
    refused(lambda: generate(SamplingParams(stop=["a", "b\udc80"])), "udc80", "position 1")
    least = SamplingParams(max_tokens=None, min_tokens=2049)
    refused(lambda: generate(least), "min_tokens=2049 is over max_model_len=2048: lower it")
    others = [i for i in range(VOCABULARY) if i not in llm.config.eos_token_ids]
    ends = SamplingParams(min_tokens=2, stop_token_ids=others)
    refused(lambda: generate(ends), "min_tokens=2 with all 958 tokens as ends", "leave some out")
    many: Any
    for many in ([], [GREEDY], [GREEDY] * 3):
        refused(partial(llm.stream, ["a", "b"], many), "2 prompts", f"{len(many)} sampling_params")
    for many in ({"max_tokens": 3}, "greedy", [None]):
        refused(partial(llm.generate, PROMPT, many), "SamplingParams")
    refused(lambda: llm.add_request(5), "prompt", "int")
    refused(lambda: llm.add_request(PROMPT, SamplingParams(n=2)), "n=2 with add_request: set n=1")
    refused(lambda: llm.chat([]), "message")
    refused(lambda: llm.chat([{"role": "user", "content": "\ud8ff"}]), "ud8ff", "surrogate")
    refused(lambda: llm.chat([{"role": 5, "content": "x"}]), "role", "5", "string")
    for content in (5, None, ["a"], ["text"], [{"type": "image_url"}], [{"type": "text", "text": 5}], [{}]):
        chat = [{"role": "user", "content": content}]
        refused(lambda chat=chat: llm.chat(chat), "chat message")


# steps, aborts, interrupts, the end


def test_close() -> None:
    """Afterwards every use says why not; closing twice is no mistake; the memory is free."""
    llm = LLM("tiny", **OPTIONS)
    core = llm.engine_core
    untouched = llm.stream(PROMPT, GREEDY)
    request = llm.add_request(PROMPT, GREEDY)
    llm.step()
    runner = weakref.ref(core.runner)
    llm.close()
    assert is_empty(llm)
    gc.collect()
    assert runner() is None, "something still holds the memory"
    actions: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT), lambda: llm.stream(PROMPT), lambda: next(untouched),
        lambda: llm.chat([{"role": "user", "content": "hi"}]), lambda: llm.add_request(PROMPT),
        lambda: llm.step(),
    ]  # fmt: skip
    for action in actions:
        refused(action, "closed")
    assert not llm.abort(request)
    refused(lambda: core.add(Sequence([5, 6], 16)), "this engine is closed: make a new one")
    llm.close()
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError


@pytest.mark.parametrize(("num_taken", "overlap"), [(1, False), (3, True), (9, False), (9, True)])
def test_close_in_a_stream(num_taken: int, overlap: bool) -> None:
    """Each prompt gets its last piece: a finished one its own, the others "abort"."""
    prompts: list[Any] = [PROMPT, "12 + 7 =", "Ada lives in"]
    samplings = [GREEDY, replace(GREEDY, max_tokens=2), replace(GREEDY, stop="never")]
    with LLM("tiny", overlap=overlap, **OPTIONS) as llm:
        wanted = llm.generate(prompts, samplings)
        pieces = llm.stream(prompts, samplings)
        taken = list(itertools.islice(pieces, num_taken))
        llm.close()
        found = collect([*taken, *pieces])
        assert sorted(found) == [0, 1, 2]
        for index, whole in enumerate(wanted):
            out = found[index][-1].output
            assert out is not None and out.token_ids == whole.token_ids[: len(out.token_ids)]
            check_pieces(found[index], out)
            is_whole = len(out.token_ids) == len(whole.token_ids)
            assert out.finish_reason == (whole.finish_reason if is_whole else "abort")
        assert found[1][-1].finish_reason == ("length" if num_taken > 3 else "abort")


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
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"engine_process": True}], ids=str)
def test_a_fork_is_refused(options: dict[str, Any]) -> None:
    """Torch's threads are not copied, and an engine's process is its owner's. Nothing hangs there,
    not even where another thread is in a step, whose lock nobody would release."""
    ask, params = [{"role": "user", "content": "What is 20 + 21?"}], replace(GREEDY, max_tokens=20)
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, max_num_seqs=4, **options) as llm:
        wanted = llm.generate("Once", params)[0].text
        pieces = llm.stream("Once", params)
        text = next(pieces).text
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("Once"), lambda: llm.chat(ask), lambda: llm.format_chat(ask),
            lambda: next(llm.stream("Once")), lambda: llm.add_request("Once"), llm.step,
            lambda: llm.abort(0), lambda: next(pieces), llm.close,
        ]  # fmt: skip
        entered, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with llm._lock:
                entered.set()
                leave.wait(30)

        other = threading.Thread(target=hold)
        other.start()
        entered.wait(30)
        *refusals, closed = said_in_a_fork(calls)
        leave.set()
        other.join()
        assert len(refusals) == 8 and closed == "returned None"
        for line in refusals:
            assert f"process {os.getpid()} made this LLM" in line and "make a new LLM" in line
        assert text + "".join(piece.text for piece in pieces) == wanted


def test_import_is_light() -> None:
    """`import atom_mini` and a `SamplingParams` need neither torch nor transformers."""
    code = "import sys, atom_mini; atom_mini.SamplingParams(temperature=0.5); "
    code += "print({'torch', 'transformers', 'huggingface_hub'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# threads


def in_threads(actions: Seq[Callable[[], Any]]) -> None:
    """All begun at once; an exception is raised here, and so is a thread that does not end."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> None:
        try:
            start.wait(60)
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(a,), daemon=True) for a in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error


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


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("overlap", [False, True])
def test_four_threads(overlap: bool) -> None:
    """Each gets what it gets alone, whole or streamed; their requests are computed together."""
    options = OPTIONS | {"max_num_batched_tokens": 32, "num_kvcache_blocks": 24}
    with LLM("tiny", overlap=overlap, **options) as llm:
        wanted = [[essence(out) for out in llm.generate(*call)] for call in THREADS]
        sizes = [0]

        def serve(i: int) -> None:
            for _ in range(3):
                assert [essence(out) for out in llm.generate(*THREADS[i])] == wanted[i]
                for index, pieces in collect(llm.stream(*THREADS[i])).items():
                    assert pieces[-1].output and essence(pieces[-1].output) == wanted[i][index]
                    check_pieces(pieces, pieces[-1].output)
                sizes.append(len(llm.engine_core.scheduler.running))

        in_threads([partial(serve, i) for i in range(4)])
        assert is_empty(llm) and max(sizes) > 1, "not in one batch"


def test_a_short_call_does_not_wait_for_a_long_one(llm: LLM) -> None:
    """Who has run a step lets the others in before the next."""
    ended: list[str] = []

    def long() -> None:
        llm.generate(PROMPT, replace(GREEDY, max_tokens=300))
        ended.append("long")

    def several() -> None:
        while not llm.engine_core.scheduler.seqs:
            time.sleep(0.001)
        for _ in range(5):
            llm.generate("12 + 7 =", replace(GREEDY, max_tokens=3))
            ended.append("short")

    in_threads([long, several])
    assert ended == ["short"] * 5 + ["long"]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
CORES: dict[str, dict[str, Any]] = {
    "plain": {}, "overlap": {"overlap": True}, "process": {"engine_process": True},
    "drafts, radix": {"speculative_config": NGRAM, "prefix_cache": "radix"},
}  # fmt: skip


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("name", CORES)
def test_requests_of_threads_end_when_another_closes(name: str) -> None:
    """Streams and generates, while it closes: each ends with what it has, or is told so."""
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
                        is_whole = len(out.token_ids) == 30
                        assert out.finish_reason == ("length" if is_whole else "abort")
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


# logits that are no numbers


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose embedding can be spoilt without its head."""
    folder = tmp_path_factory.mktemp("untied")
    save_checkpoint("qwen3", folder, tie_word_embeddings=False)
    return str(folder)


def spoil(runner: Any, token: int) -> None:
    """Let this token's embedding be no numbers."""
    with torch.no_grad():
        getattr(runner, "runner", runner).model.model.embed_tokens.weight[token] = torch.nan


DRAWN = {"temperature": 0.8, "seed": 3}
DRAFTS = NGRAM | {"prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, {"temperature": 0}),
        ({"prefix_cache": "radix"}, DRAWN),
        ({"overlap": True}, DRAWN | {"top_p": 0.9, "min_p": 0.01}),
        ({"speculative_config": DRAFTS}, {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2}),
        ({"speculative_config": DRAFTS}, DRAWN),
        ({"enable_mixed_steps": True}, {"temperature": 0, "repetition_penalty": 1.2}),
        ({"scheduler": "spyre", "chunk_size": 16, "max_num_seqs": 4}, {"temperature": 0}),
    ],
    ids=str,
)
def test_logits_that_are_no_numbers_end_one_request(
    options: dict[str, Any], sampling: dict[str, Any], untied: str
) -> None:
    """It ends with an error that says so; the others get what they ever got."""
    params = SamplingParams(max_tokens=8, **sampling)
    good, bad = [[5, 6, 5, 6, 5], [8, 9, 8, 9]], [5, 6, 7, 5, 6]
    with LLM(untied, device="cpu", num_kvcache_blocks=40, **options) as llm:
        wanted = [out.token_ids for out in llm.generate(good, params)]
        spoil(llm.engine_core.runner, 7)
        with pytest.warns(UserWarning, match=r"request \d+ failed: the model's logits"):
            first, broken, last = llm.generate([good[0], bad, good[1]], params)
        assert [first.token_ids, last.token_ids] == wanted
        assert (broken.finish_reason, broken.token_ids, broken.text) == ("error", [], "")
        assert "finite" in str(broken.stop_reason) and not broken.logprobs
        with pytest.warns(UserWarning, match="logits"):
            *_, piece = llm.stream([bad], params)
        assert piece.finished and piece.finish_reason == "error"
        assert [out.token_ids for out in llm.generate(good, params)] == wanted and is_empty(llm)


