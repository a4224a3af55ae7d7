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


@pytest.mark.parametrize("make", [SamplingParams, Config])
def test_names_of_vllm_are_refused_with_a_reason(make: Callable[..., Any]) -> None:
    """Not by a name that is only spelt alike."""
    for name, why in NOT_HERE.items():
        with pytest.raises(ValueError, match=f"no option '{name}': ") as caught:
            make(**{name: 1})
        assert "did you mean" not in str(caught.value) and why in str(caught.value)


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
def test_penalties_and_least_lengths_by_definition(asked: dict[str, Any], plain: LLM) -> None:
    """Beside a request that asks for none of it."""
    params = replace(GREEDY, **asked)
    prompts = [PROMPT, "12 + 7 =", PROMPT]
    outs = plain.generate(prompts, [params, params, GREEDY], use_tqdm=False)
    ends = plain.config.eos_token_ids
    for out, sampling in zip(outs, [params, params, GREEDY], strict=True):
        assert out.token_ids == expected(tuple(out.prompt_token_ids), sampling, ends)
        assert len(out.token_ids) >= sampling.min_tokens


def test_drawn_tokens_are_the_plain_engines(llm: LLM, plain: LLM) -> None:
    """With temperature, penalties change the same logits in every kind of engine."""
    samplings = [replace(GREEDY, temperature=1.0, seed=i, **asked) for i, asked in enumerate(ASKED)]
    wanted, found = (one.generate([PROMPT] * len(ASKED), samplings, use_tqdm=False) for one in (plain, llm))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]


@pytest.mark.parametrize("llm", ["plain", "drafts"], indirect=True)
def test_least_lengths_hold_for_stop_strings(llm: LLM) -> None:
    """As in vLLM: a stop string counts once a token after the first `min_tokens` completes it."""
    tokens = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].token_ids
    for n in (4, 9, 14):
        stop = llm.tokenizer.decode(tokens[n - 1])
        least = replace(GREEDY, stop=stop, min_tokens=n)
        (out,) = llm.generate(PROMPT, least, use_tqdm=False)
        assert "".join(piece.text for piece in llm.stream(PROMPT, least)) == out.text
        assert len(out.token_ids) > n and out.text.startswith(llm.tokenizer.decode(tokens[:n]))
        one_less = replace(least, min_tokens=n - 1)
        (out,) = llm.generate(PROMPT, one_less, use_tqdm=False)
        assert (out.token_ids, out.stop_reason) == (tokens[:n], stop)


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
    (out,) = llm.generate(PROMPT[:30], replace(WILD, n=3), use_tqdm=False)
    shared = (len(out.prompt_token_ids) - 1) // 8 * 8
    assert [one.num_cached_tokens for one in out.outputs[1:]] == [shared, shared]


def test_an_engine_with_a_seed_repeats_itself() -> None:
    """Requests without a seed of their own get theirs from the engine's; their own counts more."""

    def texts(**options: Any) -> list[str]:
        with LLM("tiny", **OPTIONS | options) as llm:
            outs = llm.generate([PROMPT] * 2, [replace(WILD, n=2), replace(WILD, seed=7)], use_tqdm=False)
            return [one.text for out in outs for one in out.outputs]

    first, again, other, free = texts(seed=0), texts(seed=0), texts(seed=1), texts()
    assert first == again and len({*first[:2], *other[:2], *free[:2]}) == 6
    assert first[2] == other[2] == free[2]


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


def test_what_a_template_refuses_is_a_value_error(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates ask for roles in turns, and raise errors of Jinja's or of Python's."""
    for template in ("{{ raise_exception('alternate') }}", "{{ messages.x.y }}", "{% for x in 5 %}{% endfor %}"):
        monkeypatch.setattr(plain.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=r"^the chat template refuses the conversation: .*(alternate|has no|iterable)"):
            plain.chat([{"role": "user", "content": "Hi"}], GREEDY)
