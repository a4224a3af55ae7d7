"""What users of vLLM ask for by its names: it does what vLLM does, or is refused with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from checkpoints import reference_logits

from atom_mini import LLM, Config, SamplingParams
from atom_mini.checkpoint import resolve_model
from atom_mini.errors import NOT_HERE

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "overlap": {"overlap": True}, "drafts": {"speculative_config": NGRAM},
    "chunks": {"max_num_batched_tokens": 8}, "preempted": {"num_kvcache_blocks": 9},
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "kv_cache_block_size": 8}
PROMPT = "Once upon a time there was a cat. Once upon a time there was a"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=VARIANTS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS | VARIANTS[request.param]) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("name", NOT_HERE)
def test_names_of_vllm_are_refused_with_a_reason(name: str) -> None:
    """Not by a name that is only spelt alike."""
    makers: list[Callable[..., Any]] = [SamplingParams, Config]
    for make in makers:
        with pytest.raises(ValueError, match=f"no option '{name}': ") as caught:
            make(**{name: 1})
        assert "did you mean" not in str(caught.value) and NOT_HERE[name] in str(caught.value)


def test_common_names_of_vllm_are_in_the_table() -> None:
    engine = "generation_config compilation_config num_scheduler_steps tokenizer_mode distributed_executor_backend"
    engine += " disable_log_stats hf_overrides async_scheduling skip_tokenizer_init"
    request = "guided_json guided_regex guided_choice guided_grammar spaces_between_special_tokens"
    assert {*engine.split(), *request.split()} <= {*NOT_HERE} and [*NOT_HERE] == sorted(NOT_HERE)


@cache
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()


@cache
def expected(prompt: tuple[int, ...], params: SamplingParams, ends: tuple[int, ...]) -> list[int]:
    """A greedy text by the definitions of OpenAI's documentation, from transformers' logits."""
    said: list[int] = []
    while len(said) < (params.max_tokens or 0):
        logits = reference_logits(reference(), [*prompt, *said])[-1].clone()
        for token in {*prompt, *said} if params.repetition_penalty else ():
            by = params.repetition_penalty or 1
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token, count in Counter(said).items():
            logits[token] -= params.presence_penalty + count * params.frequency_penalty
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
        if len(said) < params.min_tokens:
            logits[[*stops]] = float("-inf")
        said.append(int(logits.argmax()))
        if said[-1] in stops:
            break
    return said


ASKED = [
    {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"frequency_penalty": -0.6, "presence_penalty": 2.0},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"min_tokens": 9, "ignore_eos": False}, {"min_tokens": 12, "stop_token_ids": [*range(300, 900)]},
    {"min_tokens": 5, "frequency_penalty": 1.0, "ignore_eos": False},
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_penalties_and_least_lengths_by_definition(asked: dict[str, Any], llm: LLM) -> None:
    """In every kind of engine, and beside a request that asks for none of it."""
    params = replace(GREEDY, **asked)
    prompts = [PROMPT, "12 + 7 =", PROMPT]
    outs = llm.generate(prompts, [params, params, GREEDY], use_tqdm=False)
    ends = llm.config.eos_token_ids
    for out, sampling in zip(outs, [params, params, GREEDY], strict=True):
        assert out.token_ids == expected(tuple(out.prompt_token_ids), sampling, ends)
        assert len(out.token_ids) >= sampling.min_tokens


def test_drawn_tokens_are_the_plain_engines(llm: LLM, plain: LLM) -> None:
    """With temperature, penalties change the same logits in every kind of engine."""
    samplings = [replace(GREEDY, temperature=1.0, seed=i, **asked) for i, asked in enumerate(ASKED)]
    wanted, found = (one.generate([PROMPT] * len(ASKED), samplings, use_tqdm=False) for one in (plain, llm))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]


@pytest.mark.slow
def test_least_lengths_hold_for_stop_strings(llm: LLM) -> None:
    """As in vLLM: a stop string counts once a token after the first `min_tokens` completes it."""
    tokens, decode = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids, llm.tokenizer.decode
    places, stops = range(4, 20), [decode(token) for token in tokens[3:19]]
    least = [replace(GREEDY, stop=stop, min_tokens=n) for n, stop in zip(places, stops, strict=True)]
    prompts, streamed = [PROMPT] * len(least), [""] * len(least)
    for piece in llm.stream(prompts, least):
        streamed[piece.index] += piece.text
    outs = llm.generate(prompts, least, use_tqdm=False)
    assert streamed == [out.text for out in outs]
    for n, out in zip(places, outs, strict=True):
        assert len(out.token_ids) > n and out.text.startswith(decode(tokens[:n]))
    one_less = [replace(params, min_tokens=params.min_tokens - 1) for params in least]
    for n, stop, out in zip(places, stops, llm.generate(prompts, one_less, use_tqdm=False), strict=True):
        assert out.token_ids == tokens[:n] and out.stop_reason == stop


def test_a_least_length_over_the_longest_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=9 is over max_tokens=8: lower it"):
        SamplingParams(max_tokens=8, min_tokens=9)
    assert SamplingParams(max_tokens=None, min_tokens=9).min_tokens == 9
    with LLM("tiny", **OPTIONS, max_model_len=100) as llm:
        with pytest.raises(ValueError, match="min_tokens=101 is over max_model_len=100: lower it"):
            llm.generate([5], SamplingParams(max_tokens=None, min_tokens=101))
        with pytest.raises(ValueError, match="min_tokens=101 is over max_model_len=100: lower it"):
            llm.generate([5], SamplingParams(max_tokens=200, min_tokens=101))
        assert not llm.engine_core.scheduler.seqs


def test_a_least_length_that_leaves_no_token_is_refused(plain: LLM) -> None:
    """Before it ends, none of the tokens that end an answer may come; if these are all, it is no fault of the weights."""
    others = [i for i in range(plain.config.spec.vocab_size) if i not in plain.config.eos_token_ids]
    sampling = replace(GREEDY, min_tokens=2, max_tokens=3, stop_token_ids=others, ignore_eos=False)
    with pytest.raises(ValueError, match="min_tokens=2 with all 958 tokens as ends leaves none to generate: leave some out"):
        plain.generate(PROMPT, sampling)
    assert not plain.engine_core.scheduler.seqs
    changes: tuple[dict[str, Any], ...] = ({"ignore_eos": True}, {"min_tokens": 0}, {"stop_token_ids": others[1:]})
    for change in changes:
        allowed = replace(sampling, **change)
        assert plain.generate(PROMPT, allowed, use_tqdm=False)[0].finish_reason != "error"


WILD = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


def test_n_answers_to_each_prompt(llm: LLM) -> None:
    """One result of each prompt, with a list of n answers whose seeds follow each other; their prefix is computed once."""
    prompts, samplings = [PROMPT, "12 + 7 =", PROMPT[:20]], [replace(WILD, n=n, seed=5) for n in (3, 1, 2)]
    outs = llm.generate(prompts, samplings, use_tqdm=False)
    assert [len(out.outputs) for out in outs] == [3, 1, 2]
    for out, prompt, sampling in zip(outs, prompts, samplings, strict=True):
        alone = [llm.generate(prompt, replace(sampling, n=1, seed=5 + i), use_tqdm=False)[0] for i in range(sampling.n)]
        assert [(one.index, one.text, one.token_ids) for one in out.outputs] == [
            (i, one.text, one.token_ids) for i, one in enumerate(alone)
        ]
        assert {one.finish_reason for one in out.outputs} == {"length"} and out.prompt == prompt
    texts = [""] * 6
    for piece in llm.stream(prompts, samplings):
        texts[piece.index] += piece.text
    assert texts == [one.text for out in outs for one in out.outputs]
    with pytest.raises(ValueError, match="n=2 with add_request: set n=1"):
        llm.add_request(PROMPT, replace(WILD, n=2))
    assert not llm.engine_core.scheduler.seqs


def test_n_answers_share_their_prompt() -> None:
    with LLM("tiny", **OPTIONS) as llm:
        (out,) = llm.generate(PROMPT, replace(WILD, n=3), use_tqdm=False)
        shared = len(out.prompt_token_ids) // 8 * 8
        assert [one.num_cached_tokens for one in out.outputs] == [0, shared, shared]


def test_an_engine_with_a_seed_repeats_itself() -> None:
    """Requests without a seed of their own get theirs from the engine's; their own counts more."""

    def texts(**options: Any) -> list[str]:
        with LLM("tiny", **OPTIONS | options) as llm:
            outs = llm.generate([PROMPT] * 2, [replace(WILD, n=2), replace(WILD, seed=7)], use_tqdm=False)
            return [one.text for out in outs for one in out.outputs]

    first, again, other, free = texts(seed=0), texts(seed=0), texts(seed=1), texts()
    assert first == again and len({*first[:2], *other[:2], *free[:2]}) == 6
    assert first[2] == other[2] == free[2]
    for bad in ("a", -3, 1.0, True):  # random.Random(-3) would draw what 3 draws
        with pytest.raises(ValueError, match=f"seed={bad!r} must be None or a whole number from 0"):
            LLM("tiny", seed=bad, device="cpu")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"seed={bad!r} must be a whole number from 0"):
            SamplingParams(seed=bad)  # type: ignore[arg-type]


def test_small_conveniences(plain: LLM) -> None:
    out = plain.generate("12 + 7 =", use_tqdm=False)[0]
    assert out.outputs == [out] and out.outputs[0].text == out.text
    assert plain.get_tokenizer() is plain.tokenizer
    blocks = plain.config.num_kvcache_blocks
    assert repr(plain) == f"LLM('tiny', {blocks} blocks, EngineCore(Scheduler, ModelRunner(TorchOps, Sampler)))"


def test_the_built_in_model_adds_small_numbers(plain: LLM) -> None:
    """What a new user tries first. Its chapter trains it on nine of ten of these sums; the others it works out."""
    sums = {f"{a} + {b} =": a + b for a in range(10) for b in range(10)}
    texts = [out.text for out in plain.generate(list(sums), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)]
    assert texts == [f" {answer}" for answer in sums.values()]


def test_a_template_gets_its_options(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_thinking` and its like reach the template, which says what it makes of them."""
    template = "{{ messages[0].content }}{% if enable_thinking is false %} no{% endif %}"
    template += "{% if add_generation_prompt %} go{% endif %}"
    monkeypatch.setattr(plain.tokenizer, "chat_template", template)
    chat, off = [{"role": "user", "content": "Hi"}], {"enable_thinking": False}
    said = [plain.format_chat(chat), plain.format_chat(chat, False), plain.format_chat(chat, True, off)]
    assert [plain.tokenizer.decode(ids) for ids in said] == ["Hi go", "Hi", "Hi no go"]
    out = plain.chat(chat, GREEDY, use_tqdm=False, add_generation_prompt=False, chat_template_kwargs=off)[0]
    assert plain.tokenizer.decode(out.prompt_token_ids) == "Hi no"
    with pytest.raises(ValueError, match=r"must not have .'tokenize'.: leave it out"):
        plain.format_chat(chat, True, {"tokenize": True})
    for bad in ("x", [1], 5, {1: 2}):
        with pytest.raises(ValueError, match="must be a dict of names and values"):
            plain.format_chat(chat, True, bad)  # type: ignore[arg-type]
