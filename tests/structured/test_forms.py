"""Biases, allowed tokens, bad words, and forms: each changes its own request exactly, and no other one."""

from __future__ import annotations

import gc
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atom_mini import LLM, Config, SamplingParams, StructuredOutputsParams
from atom_mini.extras import Extras
from atom_mini.forms import Form, Vocabulary, barred_by, forced_tokens, packed, prefer_forced, spell
from atom_mini.sampler import Sampler, SamplingMetaData, on_cpu
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.structured import matcher as matchers
from atom_mini.structured.params import compiled, held
from atom_mini.structured.patterns import lark_patterns, lark_schemas, written_out

pytest.importorskip("llguidance")
S = StructuredOutputsParams
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **SMALL) as engine:
        yield engine


def answer(llm: LLM, prompt: Any = "12 + 7 =", **options: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**{"max_tokens": 60} | options), use_tqdm=False)[0]


def vocabulary() -> Vocabulary:
    return Config("tiny").vocabulary


def forget() -> None:
    """Forget all forms."""
    compiled.cache_clear()
    held.clear()


def allowed(form: Form, tokens: tuple[int, ...] = ()) -> set[int]:
    """The ids that may follow."""
    mask = form.mask(vocabulary(), tokens)
    assert mask is not None
    return {*np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()}


@pytest.mark.parametrize("more", [0, 1, 2, 3, 34, 42, 43])
def test_any_number_of_logits(more: int) -> None:
    """The library's masks are whole words of 32 bits, ours whole bytes."""
    known = vocabulary()
    wider = known._replace(size=known.size + more)
    for tokens in ((), (9,)):
        before, mask = S(regex="[a-z ]+").mask(known, tokens), S(regex="[a-z ]+").mask(wider, tokens)
        if before is None or mask is None:
            assert before is mask
            continue
        assert len(mask) == -(-wider.size // 8) and (mask[: len(before)] == before).all()
        assert not mask[len(before) :].any()


def batch_of(params: list[SamplingParams], answers: list[list[int]]) -> ScheduledBatch:
    """A decode of requests with these parameters and answers, all after a prompt [7, 8]."""
    B = len(params)
    ones, table = np.ones(B, np.int32), np.zeros((B, 1), np.int32)
    lens = np.array([2 + len(tokens) for tokens in answers], np.int32)
    past = {i: [7, 8, *answers[i]] for i, p in enumerate(params) if p.is_penalized}
    return ScheduledBatch(
        SequenceType.DECODE, [*range(B)], np.zeros(B, np.int64), ones, lens, table, ones > 0, params, past,
        prompt_lens=dict.fromkeys(past, 2),
    )  # fmt: skip


def adjusted(params: list[SamplingParams], logits: torch.Tensor, answers: list[list[int]] | None = None) -> torch.Tensor:
    extras = Extras((2, 0), Config("tiny").folder)
    return extras.adjust(batch_of(params, answers or [[]] * len(params)), logits, on_cpu)


FINISHED: list[tuple[Any, Any]] = [
    ({"json": PERSON}, lambda text: set(json.loads(text)) == {"name", "age"}),
    ({"json": json.dumps(PERSON)}, lambda text: 0 <= json.loads(text)["age"] <= 99),
    ({"regex": r" [a-z]{3}-[0-9]{2}"}, lambda text: re.fullmatch(r" [a-z]{3}-[0-9]{2}", text)),
    ({"choice": ["perhaps", "never", "日本", 'a "b"\\n\n']}, lambda text: text in ["perhaps", "never", "日本", 'a "b"\\n\n']),
    ({"grammar": 'start: "(" start ")" | "x"'}, lambda text: re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "fits"), FINISHED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_a_finished_answer_has_the_form(llm: LLM, fields: dict[str, Any], fits: Any) -> None:
    """Greedy and with seeds. What does not finish is cut off by its length, and says so."""
    form, finished = S(**fields), 0
    hot = [SamplingParams(temperature=1.0, seed=seed, max_tokens=100, structured_outputs=form) for seed in range(8)]
    params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=form), *hot]
    for out in llm.generate(["The answer is"] * len(params), params, use_tqdm=False):
        assert out.finish_reason in ("stop", "length")
        if out.finish_reason == "stop":
            assert fits(out.text), out.text
            finished += 1
    assert finished >= 3


def test_one_choice_is_spelled_and_then_the_text_ends(llm: LLM) -> None:
    for text in ("never", "été", "日本", "😀", "\x01", '"\\'):
        out = answer(llm, structured_outputs=S(choice=[text]))
        assert (out.text, out.finish_reason, out.token_ids[-1] in (0, 2)) == (text, "stop", True)
    cut = answer(llm, structured_outputs=S(json=PERSON), max_tokens=3)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3


def test_scores_outside_the_mask_are_minus_infinity_and_all_others_are_unchanged() -> None:
    """A restricted softmax is the softmax of the allowed logits: exactly what torch computes from them alone."""
    form, plain = S(regex="[0-9]+ cats"), SamplingParams(temperature=0.7, seed=1)
    logits = torch.randn(3, 958, generator=torch.Generator().manual_seed(0))
    only = SamplingParams(temperature=0.7, seed=2, allowed_token_ids=[5, 6, 700])
    with_form = replace(plain, structured_outputs=form)
    out = adjusted([with_form, plain, only], logits)
    for row, ids in ((0, allowed(form)), (2, {5, 6, 700})):
        kept = sorted(ids)
        assert torch.equal(out[row, kept], logits[row, kept])
        assert out[row].isfinite().nonzero()[:, 0].tolist() == kept
        assert torch.equal(out[row].softmax(-1)[kept], logits[row, kept].softmax(-1)) or torch.allclose(
            out[row].softmax(-1)[kept], logits[row, kept].softmax(-1), rtol=1e-6, atol=0
        )
    assert torch.equal(out[1], logits[1])


def test_ten_thousand_samples_stay_inside_and_follow_the_restricted_distribution() -> None:
    form = S(regex="[a-f0-9]{4}")
    ids = sorted(allowed(form))
    logits = torch.randn(1, 958, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=1.0, seed=seed, structured_outputs=form) for seed in range(10_000)]
    out = adjusted(params, logits.expand(10_000, -1))
    meta = SamplingMetaData.pack(params, np.full(10_000, 2), 958)
    counts = Sampler()(out, meta).bincount(minlength=958)
    assert counts[ids].sum() == 10_000
    wanted = logits[0, ids].softmax(-1)
    assert (counts[ids] / 10_000 - wanted).abs().max() < 5 * (wanted.max() / 10_000).sqrt()


def test_a_bias_is_added_to_its_logit_before_penalties() -> None:
    logits = torch.zeros(2, 958)
    params = SamplingParams(logit_bias={5: 2.5, 6: -100}, repetition_penalty=2.0)
    out = adjusted([params, SamplingParams()], logits, [[5], []])
    assert out[0, [5, 6, 9]].tolist() == [1.25, -100, 0] and not out[1].any()


def test_a_bias_forces_a_token_and_bars_it(llm: LLM) -> None:
    free = answer(llm, max_tokens=4, temperature=0).token_ids
    assert answer(llm, max_tokens=4, temperature=0, logit_bias={50: 100.0}).token_ids == [50] * 4
    barred = answer(llm, max_tokens=4, temperature=0, logit_bias={free[0]: -100}).token_ids
    assert free[0] not in barred
    assert SamplingParams(logit_bias={50: 1}) == SamplingParams(logit_bias=((50, 1.0),))


def test_only_allowed_tokens_are_sampled(llm: LLM) -> None:
    out = answer(llm, max_tokens=20, temperature=1.5, seed=1, allowed_token_ids=[50, 60, 957])
    assert {*out.token_ids} <= {50, 60, 957} and out.finish_reason == "length"


def test_the_last_token_of_a_bad_word_is_barred_after_the_others(llm: LLM) -> None:
    """As in vLLM: the beginning counts only if it was generated just before, and a space may come first."""
    assert barred_by([(4,), (5, 6), (6, 5, 6)], [6, 5]) == {4, 6}
    assert barred_by([(5, 6)], []) == set() and barred_by([(5, 6)], [5, 7]) == set()
    params = SamplingParams(bad_words=[[8, 5]])  # the prompt ends with 8
    out = adjusted([params] * 2, torch.zeros(2, 958), [[], [8]])
    assert out[0].isfinite().all() and out[1].isinf().nonzero().tolist() == [[5]]
    free = answer(llm, "Once upon a time", max_tokens=40, temperature=0)
    word = free.text.split()[3]
    out = answer(llm, "Once upon a time", max_tokens=40, temperature=0, bad_words=[word])
    assert f" {word} " in free.text and f" {word} " not in out.text
    first, second = free.token_ids[:2]
    out = answer(llm, "Once upon a time", max_tokens=2, temperature=0, bad_words=[[first, second]])
    assert out.token_ids[0] == first and out.token_ids[1] != second
    tokenizer: Any = llm.get_tokenizer()
    words = spell(["there", " there"], tokenizer.encode)
    assert words[:2] == words[2:] and {tokenizer.decode([*w]) for w in words} == {"there", " there"}


def test_requests_without_a_mask_keep_their_tokens(llm: LLM) -> None:
    """Alone, and beside requests with masks; those with masks are the same alone, too."""
    plain = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in range(4)]
    forms = [S(json=PERSON), S(regex="[a-z ]+"), S(choice=["yes", "no"]), S(json_object=True)]
    masked = [replace(p, structured_outputs=form) for p, form in zip(plain, forms, strict=True)]
    both = [p for pair in zip(plain, masked, strict=True) for p in pair]
    together = llm.generate(["A cat"] * 8, both, use_tqdm=False)
    alone = [llm.generate("A cat", p, use_tqdm=False)[0] for p in both]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]


def test_a_batch_without_masks_pays_nothing() -> None:
    """The logits are not even copied."""
    logits = torch.zeros(2, 958)
    assert adjusted([SamplingParams(), SamplingParams(temperature=1.0)], logits) is logits


def test_log_probabilities_are_the_models(llm: LLM) -> None:
    """They are taken before masks, as before penalties."""
    out = answer(llm, max_tokens=1, temperature=0, logprobs=1, structured_outputs=S(choice=["never"]))
    assert out.logprobs[0].keys() > {out.token_ids[0]} and max(out.logprobs[0].values()) > out.logprobs[0][out.token_ids[0]]


def test_min_tokens_gives_way_where_only_an_end_is_allowed(llm: LLM) -> None:
    """Elsewhere the ends are barred."""
    out = answer(llm, structured_outputs=S(choice=["no"]), min_tokens=20, temperature=0)
    assert out.text == "no" and out.finish_reason == "stop"
    longer = answer(llm, structured_outputs=S(regex="(no)+"), min_tokens=20, temperature=0)
    assert len(longer.token_ids) >= 20
    assert answer(llm, allowed_token_ids=[0, 2], min_tokens=3).token_ids in ([0], [2])


def test_stop_strings_and_n_and_penalties_go_with_forms(llm: LLM) -> None:
    out = answer(llm, structured_outputs=S(regex="[a-z ]{30}"), stop="e", temperature=0)
    assert out.finish_reason == "stop" and "e" not in out.text
    many = answer(llm, structured_outputs=S(choice=["red", "green", "blue"]), n=6, temperature=2.0, seed=1)
    assert {o.text for o in many.outputs} <= {"red", "green", "blue"} and len(many.outputs) == 6
    once = answer(llm, structured_outputs=S(regex="[0-9]{8}"), frequency_penalty=2.0, repetition_penalty=50.0, temperature=0)
    assert re.fullmatch("[0-9]{8}", once.text) and len({*once.text}) > 4
    streamed = [piece.text for piece in llm.stream("A", SamplingParams(structured_outputs=S(json=PERSON), max_tokens=60))]
    assert json.loads("".join(streamed))


BOMB = "((a{1000}){1000}){1000}"
LARGE = {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(600)}}
ALL_OF = {"$defs": {"large": LARGE, "far": {"$ref": "#/$defs/large"}}}  # 21,000 characters
ITSELF = {"$ref": "#"}
INSIDE = {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}
WRONG: list[tuple[Any, str]] = [
    ({}, "nothing set: set exactly one of json, regex"),
    ({"json": {}, "regex": "a"}, "'json', 'regex'"),
    ({"json_object": False}, "set exactly one"),
    ({"json": 5}, "JSON schema, as a dict or as JSON: it is 5"),
    ({"json": "{"}, "as a dict or as JSON: Expecting"),
    ({"json": {"a": {1}}}, "as a dict or as JSON"),
    ({"json": {"minimum": float("nan")}}, "as a dict or as JSON"),
    ({"json": "[" * 5000}, "nested too deeply"),
    ({"json": {"type": "object", "requierd": ["a"]}}, r"keyword \['requierd'\], which JSON Schema does not have"),
    ({"json": {"properties": {"a": {"items": {"frob": 1}}}}}, r"keyword \['frob'\]"),
    ({"json": {"$ref": "https://example.org/x"}}, "in another document"),
    ({"json": {"$defs": {"a": INSIDE}, "$ref": "#/$defs/a"}}, r"holds itself, by \['#/\$defs/a'\], in any text"),
    ({"json": {"$ref": "#"}}, "holds itself"),
    ({"json": {"type": ["object"], "properties": {"a": ITSELF}, "required": ["a"]}}, "holds itself"),
    ({"json": {"type": ["array"], "items": ITSELF, "minItems": 1}}, "holds itself"),
    ({"json": {"type": "array", "prefixItems": [{"type": "null"}], "items": ITSELF, "minItems": 2}}, "holds itself"),
    ({"json": {"type": "object", "required": ["a"], "additionalProperties": ITSELF}}, "holds itself"),
    ({"json": {"type": "object", "required": ["a"], "patternProperties": {"a": ITSELF}, "additionalProperties": False}},
     "holds itself"),
    ({"json": {"type": "object", "minProperties": 1, "additionalProperties": ITSELF}}, "holds itself"),
    ({"json": {"$ref": "#/$defs/a", "type": "object", "$defs": {"a": INSIDE | {"title": "a"}}}}, "holds itself"),
    ({"json": {"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]}}, "smaller common multiple"),
    ({"json": {"multipleOf": 97, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 8.9}}}}, "smaller common multiple"),
    ({"json": {"patternProperties": {"a": {"multipleOf": 97}}, "properties": {"a": {"multipleOf": 890}}}},
     "smaller common multiple"),
    ({"json": {"type": "array", "items": {"multipleOf": 999983}}}, r"multipleOf=\['999983'\] is too large"),
    ({"json": {"multipleOf": 10**4000 - 1}}, "is too large"), ({"json": {"multipleOf": 1.00001}}, r"\['1.00001'\] is too large"),
    ({"json": {"properties": {f"a{n}": {"multipleOf": n} for n in range(1, 400)}}}, "399 different multipleOf, of 79800 together"),
    ({"json": {"properties": {f"a{n}": {} for n in range(5000)}}}, "5000 properties, and 1000 are the most"),
    ({"json": {"type": "integer", "minimum": 2**53 + 1}}, r"minimum=9007199254740993 is beyond 2\*\*53"),
    ({"json": {"items": {"exclusiveMaximum": -1e300}}}, "exclusiveMaximum=-1e[+]300 is beyond"),
    ({"json": {"enum": [1, {"a": [2**53 + 1]}]}}, "9007199254740993 is beyond"),
    ({"json": {"properties": {"a": {"x-guidance": {"whitespace_flexible": True}}}}}, r"keyword \['x-guidance'\]"),
    ({"json": {"$ref": "#/examples/0", "examples": [{"frob": 1}]}}, r"keyword \['frob'\]"),
    ({"json": {"description": "x" * 200_000}}, "characters: 100000 are the most"),
    ({"regex": ""}, "allows nothing"), ({"grammar": ""}, "allows nothing"), ({"regex": "a" * 200_000}, "100000 are the most"),
    ({"regex": 5}, "regex=5"), ({"choice": "yes"}, "list of different texts"), ({"choice": []}, "list of different texts"),
    ({"choice": ["a", "a"]}, "different"), ({"choice": ["a", ""]}, "none of them empty"), ({"regexp": "a"}, "no option 'regexp'"),
    ({"regex": BOMB}, "has 1e[+]09 characters when its repetitions are written out: 100000 are the most"),
    ({"json": {"properties": {"a": {"items": {"pattern": f"^(b|{BOMB})$"}}}}}, r"the pattern '\^\(b.* are written out"),
    ({"json": {"type": "object", "patternProperties": {f"^{BOMB}$": {}}}}, "are written out"),
    ({"grammar": 'start: %json {"type": "object", "frob": 1}'}, r"keyword \['frob'\]"),
    ({"grammar": 'start: %json {"x-guidance": {"whitespace_flexible": true}}'}, "x-guidance"),
    ({"grammar": 'start: "a" %json {"multipleOf": 999983}'}, "is too large"),
    ({"grammar": "start: %json {"}, "no JSON after %json"),
    ({"grammar": f'start: %json {{"type": "string", "pattern": "{BOMB}"}}'}, "are written out"),
    ({"choice": ["x" * 100_000, "y"]}, "choice has 100001 characters: 100000 are the most"),
    ({"choice": ["a", "b\ud800"]}, r"choice has '\\ud800', half of a surrogate pair"),
    ({"json": {"enum": ["\ud800"]}}, "json has .*half of a surrogate pair"),
    ({"regex": "\udc00"}, "regex or a grammar has .*half of"),
    ({"grammar": f'start: ("b" | "c") ("d" | "e") ("f" | "g") X\nX: /{BOMB}/'}, "are written out"),
    ({"grammar": 'start: "b" "c"\n%ignore /((a{300}){300})/'}, r"%ignore have 9e[+]04 characters .* 10000 are the most"),
    ({"grammar": 'start: "b" "c"\nX: /(a{150}){50}/\nY: /(c{150}){50}/\n%ignore X | Y'}, "%ignore have 1.5e[+]04"),
    ({"json": ALL_OF | {"allOf": 60 * [{"$ref": "#/$defs/far"}]}}, "allOf.* over 1000000 characters: name .* fewer times"),
    ({"json": {"anyOf": [{"type": "null"}, {"allOf": 2500 * [{"$ref": "#/$defs/large"}]}]} | ALL_OF}, "fewer times"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), WRONG, ids=lambda x: str(x)[:40])
def test_a_wrong_form_is_refused_when_it_is_made(fields: Any, says: str) -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match=says):
        S(**fields)
    assert time.thread_time() - start < 1


NULLS = {"type": "null"}
RIGHT: dict[str, dict[str, Any]] = {
    "[null]": {"type": "array", "prefixItems": [NULLS], "items": ITSELF, "minItems": 1, "maxItems": 1},
    "null": {"anyOf": [{"type": "array", "items": ITSELF, "minItems": 1}, NULLS]},
    "{}": {"type": "object", "properties": {"a": ITSELF}, "additionalProperties": False},
    '{"a":null}': {"type": "object", "properties": {"a": {"$ref": "#/$defs/b%20c/anyOf/0"}}, "required": ["a"],
                   "$defs": {"b c": {"anyOf": [NULLS, ITSELF]}}},
    "6000000": {"type": "integer", "multipleOf": 1_000_000},
    "0.25": {"type": "number", "multipleOf": 0.01, "title": "one hundredth"},
    "7200": {"type": "integer", "multipleOf": 3600},
    str(2**53): {"type": "integer", "minimum": 2**53, "x-order": 1},
}  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_a_form_that_a_text_has_is_not_refused(text: str) -> None:
    form = S(json=RIGHT[text])
    form.check(vocabulary())
    assert takes(form, text)


def test_a_slash_or_a_keyword_in_a_text_of_a_grammar_is_a_text() -> None:
    """So it is in a comment, and in a description."""
    schema = json.dumps({"type": "null", "description": f"path like /{BOMB}/ or"})
    form = S(grammar=f'// /{BOMB}/ %json x\n# /{BOMB}/\nstart: "/{BOMB}/" /[0-9]\\// %json {schema} "%json \\" /{BOMB}/" # /')
    assert lark_patterns(form.grammar or "") == ["[0-9]\\/"] and len(lark_schemas(form.grammar or "")) == 1
    form.check(vocabulary())


def test_what_a_message_quotes_is_short() -> None:
    start = time.thread_time()
    with pytest.raises(ValueError, match="choice has 600000 texts: 1999 are the most"):
        S(choice=[f"{n}" for n in range(600_000)])
    assert time.thread_time() - start < 2
    wrong: list[dict[str, Any]] = [
        {"choice": [5, *"x" * 1000]}, {"regex": "x" * 5000 + "(", "json": None}, {"grammar": "start: " + '"a" ' * 5000 + "'"},
        {"json": {"type": "x" * 5000}}, {"json": {"enum": [], "title": "x" * 50_000}}, {"json": {"$ref": "#/" + "x" * 50_000}},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValueError) as caught:
            S(**fields).check(vocabulary())
        assert len(str(caught.value)) < 800
    with pytest.raises(ValueError, match=r"logit_bias has 1: 101, and it must be a dict of token ids .* from -100 to 100$"):
        SamplingParams(logit_bias={1: 101})


def test_the_name_of_a_special_token_is_no_text() -> None:
    """The library would read it as that token, and never let it be spelled."""
    name = "<|endoftext|>"
    names = {"type": "object", "properties": {name: NULLS}}
    wrong: list[dict[str, Any]] = [{"choice": ["yes", f"{name}x"]}, {"json": {"enum": ["a", f"b{name}"]}}, {"json": names}]
    for fields in (*wrong, {"regex": r"a|<\|endoftext\|>"}):
        with pytest.raises(ValueError, match=r"has a text with \['<\|endoftext\|>'\], which is the name of a special token"):
            S(**fields).check(vocabulary())
    S(json={"type": "null", "description": name}).check(vocabulary())


def test_any_character_may_be_in_a_choice() -> None:
    texts = [chr(n) for n in range(1, 1900)] + ["\u2028", "\\x7f", "a\x7fb"]
    for i in range(0, len(texts), 200):
        S(choice=texts[i : i + 200]).check(vocabulary())
    assert takes(S(choice=["a\x7fb"]), "a\x7fb") and not takes(S(choice=["a\\x7fb"]), "a\x7fb")


def test_more_forms_at_once_than_are_kept_are_compiled_once_each() -> None:
    """A request holds its form, and so its masks; they go with it."""
    forget()
    forms, known = [S(regex=f"a{{{n}}}") for n in range(1, 301)], vocabulary()
    for _ in range(3):
        for form in forms:
            form.mask(known, ())
    assert compiled.cache_info().misses == 300 and len(held) == 300
    del form, forms
    compiled.cache_clear()
    gc.collect()
    assert len(held) == 0


def takes(form: S, text: str) -> bool:
    """Whether an answer may be this text."""
    from atom_mini.structured.vocabulary import read_vocabulary

    tokens = tuple(read_vocabulary(vocabulary()).tokenize_str(text))
    return form.mask(vocabulary(), tokens) is not None and vocabulary().ends[0] in allowed(form, tokens)


def test_the_largest_forms_are_read_in_a_fraction_of_a_second() -> None:
    """Just below each limit; and references of references do not take quadratic time."""
    names = [f"a{n}" for n in range(1000)]
    divisors = [n for n in range(1, 7561) if 7560 % n == 0]
    forms = [
        {"type": "array", "items": {"type": "integer", "multipleOf": 9973}, "minItems": 2},
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89)]},
        {"anyOf": [{"type": "integer", "multipleOf": n} for n in divisors]},
        {"type": "object", "properties": {f"a{n}": {"multipleOf": n} for n in divisors}},
        {"type": "object", "properties": {name: {} for name in names}, "required": names, "additionalProperties": False},
    ]  # fmt: skip
    for schema in forms:
        start = time.thread_time()
        S(json=schema).check(vocabulary())
        assert time.thread_time() - start < 1
    start = time.thread_time()
    S(json={"$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2400)}, "$ref": "#/$defs/d0"})
    deep: dict[str, Any] = NULLS
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="recursion limit"):
        S(json=deep).check(vocabulary())
    assert time.thread_time() - start < 1


IMPOSSIBLE: list[tuple[Any, str]] = [
    ({"regex": "[0-9"}, "unclosed character class"), ({"regex": "(?=a)b"}, "look-ahead"),
    ({"regex": "(a{1000}){60}"}, "too many"), ({"regex": "b(a{1000}){60}"}, "too many"),
    ({"grammar": "start: /((a{100}){100}){6}/"}, "too many"),
    ({"regex": "[^\\x00-\\x{10FFFF}]"}, "no text has this form"),
    ({"json": {"$ref": "#/$defs/a"}}, "does not exist"), ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum .5. is greater than maximum"),
    ({"json": {"enum": []}}, "Unsatisfiable"), ({"json": {"not": {}}}, "Unimplemented keys"),
    ({"json": {"allOf": [{"type": "integer"}, {"type": "string"}]}}, "Unsatisfiable"),
    ({"json": {"type": "string", "format": "frob"}}, "Unknown format"),
    ({"grammar": "root ::= x"}, "Expected token"), ({"grammar": 'start: start "a"'}, "no text has this form"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), IMPOSSIBLE, ids=lambda x: str(x)[:40])
def test_a_form_that_no_answer_can_have_is_refused_before_anything_is_queued(llm: LLM, fields: Any, says: str) -> None:
    """In bounded time, in one line, with the form: an engine full of other requests goes on."""
    params = [SamplingParams(), SamplingParams(structured_outputs=S(**fields))]
    start = time.thread_time()
    with pytest.raises(ValueError, match=says) as caught:
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert time.thread_time() - start < 3 and "\n" not in str(caught.value)
    assert "structured_outputs=StructuredOutputsParams" in str(caught.value) and not llm.engine_core.scheduler.seqs


def test_a_pattern_is_measured_with_its_repetitions_written_out() -> None:
    sizes = {
        "": 0, "abc": 3, "(a{2}b){2}": 6, "a{3,}b{0,5}c*": 9, "[a-z{9}]{4}": 4, r"\{9}": 3, r"\\{9}": 9, "a{3}{4}": 12,
        "(a|b{7})?": 9, "((a{9}){9}){9}": 729, "(a{" + "9" * 5000 + "}){9}": 9 * (10**9 - 1), "a)){2}b": 5, "((a{7}": 7,
        r"[]{5}]{2}": 2, "{5}": 0,
    }  # fmt: skip
    assert {pattern: written_out(pattern) for pattern in sizes} == sizes
    start = time.thread_time()
    for text in ("a" + "{9}" * 30_000, "(" * 50_000 + ")" * 50_000, "[" * 99_999, "[\\" * 50_000, "{1" * 50_000):
        written_out(text)
    lark_patterns("/\\" * 50_000)
    assert time.thread_time() - start < 3  # not quadratic
    S(json={"type": "object", "properties": {"a": {"pattern": "a{0,5000}$"}, "b": {"pattern": 5}}})
    S(json={"properties": {"a": {"pattern": r"^([a-z0-9-]{1,255}\.){1,255}$"}}})


def test_a_token_without_a_logit_is_not_allowed() -> None:
    """A tokenizer may have more tokens than the model has logits."""
    less = vocabulary()._replace(size=300)
    word = S(regex="[a-z ]+")
    mask, whole = word.mask(less, ()), word.mask(vocabulary(), ())
    assert mask is not None and whole is not None and len(mask) == 38
    assert np.array_equal(np.unpackbits(mask, bitorder="little")[:300], np.unpackbits(whole, bitorder="little")[:300])
    assert not np.unpackbits(mask, bitorder="little")[300:].any()
    with pytest.raises(ValueError, match="no text has this form, or the vocabulary cannot spell it"):
        S(regex="z+").check(less._replace(size=20))


PARAMS: list[tuple[Any, str]] = [
    ({"structured_outputs": {"regex": "a"}}, "write StructuredOutputsParams"),
    ({"structured_outputs": S}, "is not a form"),
    ({"structured_outputs": S(regex="a"), "ignore_eos": True}, "set ignore_eos=False"),
    ({"logit_bias": {5: 101}}, "from -100 to 100"),
    ({"logit_bias": {-1: 5}}, "logit_bias has -1"), ({"logit_bias": {"5": 5}}, "'5'"),
    ({"logit_bias": 5}, "must be a dict"), ({"logit_bias": {5: True}}, "True"), ({"logit_bias": [(5, 1), (5, 2)]}, "twice"),
    ({"logit_bias": {5: float("nan")}}, "nan"), ({"logit_bias": [5]}, "must be a dict"),
    ({"allowed_token_ids": []}, "at least one"),
    ({"allowed_token_ids": [-1]}, "token id"), ({"allowed_token_ids": [True]}, "token id"),
    ({"bad_words": "cat"}, "list of words"), ({"bad_words": [" "]}, "list of words"), ({"bad_words": [[]]}, "list of words"),
    ({"guided_json": {}}, "StructuredOutputsParams.json"), ({"guided_decoding": 1}, "it is called structured_outputs here"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "says"), PARAMS, ids=lambda x: str(x)[:40])
def test_a_wrong_option_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SamplingParams(**options)


OUTSIDE: list[dict[str, Any]] = [{"logit_bias": {958: 1}}, {"allowed_token_ids": [5, 958]}, {"bad_words": [[5, 958]]}]


@pytest.mark.parametrize("options", OUTSIDE, ids=lambda x: next(iter(x)))
def test_a_token_outside_the_vocabulary_is_refused(llm: LLM, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} has token id \[958\]"):
        answer(llm, **options)


def test_what_contradicts_a_form_ends_the_request_with_a_reason(llm: LLM) -> None:
    """It is refused where no answer can begin; where one cannot go on, the reason is not that of broken weights."""
    with pytest.raises(ValueError, match=r"allowed_token_ids=\[5\] has no token that structured_outputs can begin with"):
        answer(llm, structured_outputs=S(choice=["yes"]), allowed_token_ids=[5])
    for more in ({"allowed_token_ids": [19]}, {"bad_words": ["x"]}):
        with pytest.warns(UserWarning, match="no token is left: .* bar all that could come next"):
            out = answer(llm, structured_outputs=S(regex="1x"), **more)
        assert out.finish_reason == "error" and out.token_ids == [19] and "finite" not in str(out.stop_reason)
    assert not llm.engine_core.scheduler.seqs


def test_a_mask_depends_on_the_tokens_alone() -> None:
    """In any order of questions, after a state was dropped, and for drafts that the grammar does not accept."""
    form, rng = S(json=PERSON), np.random.default_rng(0)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < 40:
        paths.append((*paths[-1], int(rng.choice(sorted(allowed(form, paths[-1]))))))
        if paths[-1][-1] in (0, 2):
            paths.append(())
    usual = [form.mask(vocabulary(), path) for path in paths]
    for i in rng.permutation(len(paths)):
        matchers.Masks.kept.clear()
        found, wanted = form.mask(vocabulary(), paths[i]), usual[i]
        assert (found is None and wanted is None) or np.array_equal(found, wanted)  # type: ignore[arg-type]
    outside = next(id for id in range(958) if id not in allowed(form))
    assert form.mask(vocabulary(), (outside,)) is None and form.mask(vocabulary(), (outside, 5)) is None


def test_kept_states_are_bounded_and_belong_to_their_form(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = matchers.Masks.kept
    kept.clear()
    monkeypatch.setattr(matchers, "MOST_BYTES", 5 * matchers.BYTES_OF_STATE)
    first, second = S(regex="[0-9]*"), S(regex="[a-z]*")
    ids = sorted(allowed(first) - {0, 2})
    assert not allowed(second) & {*ids}
    for n in range(20):
        assert {*ids} <= allowed(first, (ids[0],) * n)
        assert second.mask(vocabulary(), (ids[0],) * (n + 1)) is None
    assert 0 < len(kept.states) <= 5 and kept.num_bytes == sum(map(matchers.bytes_of, *zip(*kept.states.items(), strict=True)))


def test_memory_does_not_grow_with_the_length_of_an_answer_or_the_number_of_answers() -> None:
    """The end of 6,000 tokens of a JSON array: 800 states of it would be more than 600 MB. Then there are 20 more answers."""
    from atom_mini.structured.vocabulary import read_vocabulary

    form, known = S(json={"type": "array", "items": {"type": "integer"}}), vocabulary()
    tokens = tuple(read_vocabulary(known).tokenize_str("[" + "123, " * 1500))[:6000]
    matchers.Masks.kept.clear()
    form.mask(known, tokens[:5200])
    before = resident()
    for n in range(5200, 6000):
        assert form.mask(known, tokens[:n]) is not None
    assert len(matchers.Masks.kept.states) == matchers.LAST and resident() - before < 150e6
    for length in range(20):
        for n in range(500):
            form.mask(known, (tokens[0],) * length + tokens[:n])
    assert matchers.Masks.kept.num_bytes < matchers.MOST_BYTES and resident() - before < 250e6


def resident() -> int:
    """Bytes of memory that this process has now."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def test_after_the_end_of_the_grammar_only_ends_are_allowed() -> None:
    form = S(regex="x")
    (x,) = allowed(form)
    assert allowed(form, (x,)) == {0, 2}


def test_forced_tokens_end_before_a_choice() -> None:
    """Also before one between neighbors in a mask, at the end of the text, and after so many as may be used."""
    params, (zero, one, x) = SamplingParams(structured_outputs=S(regex="00[12]xx")), (18, 19, 90)
    assert {one, one + 1} == allowed(S(regex="[12]")) and {x} == allowed(S(regex="x")), "the tokens of 1, 2 and x"
    forced = [forced_tokens(params, vocabulary(), answer, 5) for answer in ([], [zero], [zero, zero], [zero, zero, one])]
    assert forced == [[zero, zero], [zero], [], [x, x]]
    assert forced_tokens(params, vocabulary(), [], 1) == [zero] and forced_tokens(params, vocabulary(), [one], 5) == []
    assert forced_tokens(SamplingParams(), vocabulary(), [], 5) == []
    only = SamplingParams(structured_outputs=S(regex="[0-9]"), allowed_token_ids=[one])
    assert forced_tokens(only, vocabulary(), [], 5) == [one]


def test_forced_tokens_replace_other_drafts() -> None:
    """A draft that begins with all of them may go on."""
    params, (zero, one) = SamplingParams(structured_outputs=S(regex="00[12]xx")), (18, 19)
    seq, plain = Sequence([1, 2], 16, params), Sequence([1, 2], 16)
    drafts = ([one], [zero], [zero, one], [zero, zero, one])
    found = [prefer_forced(draft, seq, vocabulary(), 5) for draft in drafts]
    assert found == [[zero, zero], [zero, zero], [zero, zero], [zero, zero, one]]
    seq.append_token(zero)
    assert prefer_forced([one], seq, vocabulary(), 5) == [zero]
    assert prefer_forced([one], plain, vocabulary(), 5) == [one]


def test_a_vocabulary_that_cannot_spell_a_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_mini.structured import params

    monkeypatch.setattr(params, "single_bytes", lambda vocabulary: frozenset(range(128)))
    forget()
    with pytest.raises(ValueError, match=r"needs b'.*xc3.*', which the vocabulary of .* cannot spell"):
        S(choice=["été"]).check(vocabulary())
    S(choice=["ete"]).check(vocabulary())
    monkeypatch.setattr(params, "single_bytes", lambda vocabulary: frozenset(b'{}[]":,0123456789'))
    with pytest.raises(ValueError, match="cannot spell"):
        S(json=PERSON).check(vocabulary())
    forget()


def test_a_model_without_an_end_or_a_tokenizer_has_no_forms() -> None:
    from atom_mini.structured.vocabulary import read_vocabulary

    with pytest.raises(ValueError, match="names no token that ends a text"):
        S(regex="a").check(vocabulary()._replace(ends=()))
    with pytest.raises(ValueError, match="needs a tokenizer"):
        S(regex="a").check(Vocabulary(None, 5, (2,)))
    read_vocabulary.cache_clear()


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_mini.structured import vocabulary as module

    module.read_vocabulary.cache_clear()
    forget()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs llguidance: run pip install -e \"\.\[structured\]\""):
        S(regex="a").check(vocabulary())


def test_a_step_ahead_is_refused_by_name() -> None:
    """A bias and a list of tokens need no newest token, so they go with overlap."""
    with LLM("tiny", **SMALL, overlap=True) as ahead, LLM("tiny", **SMALL) as plain:
        for options in ({"structured_outputs": S(regex="a")}, {"bad_words": ["a"]}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} needs the newest token.*set overlap=False"):
                answer(ahead, **options)
        for more in ({"logit_bias": {60: 9.5}}, {"allowed_token_ids": [*range(300)]}):
            options = {"temperature": 1.0, "seed": 3, "max_tokens": 10} | more
            assert answer(ahead, **options).token_ids == answer(plain, **options).token_ids


def test_a_packed_mask_has_a_bit_for_each_token() -> None:
    assert packed((0, 9, 99), 12).tolist() == [1, 2]
