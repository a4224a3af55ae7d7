"""The form of an answer, under vLLM's names, and all that can be wrong with one (chapter 21)."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from ..checkpoint import JsonObject
from ..config import STRICT
from ..errors import explained, require
from ..forms import Ids, Vocabulary, packed
from .keywords import all_schemas, check_keywords
from .matcher import Masks
from .patterns import check_ignored, check_pattern, lark_patterns, lark_schemas, schema_patterns
from .vocabulary import read_vocabulary, single_bytes, special_names

MOST_CHARACTERS = 100_000  # of a form
MOST_CHOICES = 1999  # the library reads no more alternatives
MOST_SAID = 300  # characters of what the library says
LIMITS: dict[str, Any] = {  # a form is refused, or ends its request, in a fraction of a second
    "initial_lexer_fuel": 100_000, "step_lexer_fuel": 200_000, "step_max_items": 20_000, "max_grammar_size": 100_000,
    "max_lexer_states": 20_000, "verbose_errors": False,
}  # fmt: skip
NO_TEXT = "no text has this form, or the vocabulary cannot spell it"
SPACES = r"( |\n {0,16}|\n\t{0,8})?"  # between two parts of JSON: no model can go on with spaces forever

OWN_SPACES = ("x-guidance", {"whitespace_pattern": SPACES})  # in a grammar, as the server writes it for tools


def as_schema(value: object) -> str | None:
    """A JSON schema, as a dict or as JSON, as JSON. ValueError for anything else."""
    if value is None:
        return None
    wrong = "json must be a JSON schema, as a dict or as JSON: "
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{wrong}this one is nested too deeply: make it flatter") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wrong}{error!s:.{MOST_SAID}}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{wrong}it is {text[:80]}")
    require(len(text) <= MOST_CHARACTERS, f"json has {len(text)} characters: {MOST_CHARACTERS} are the most")
    check_halves("json", json.dumps(schema, ensure_ascii=False))
    check_schema(schema)
    return text


def check_schema(schema: JsonObject) -> None:
    """ValueError for a schema that the library would not read as it is meant, or not in a fraction of a second."""
    check_keywords(schema)
    for pattern in schema_patterns(schema):
        check_pattern(pattern)


def as_choice(value: object) -> tuple[str, ...] | None:
    """A list of texts as a tuple. ValueError for anything else."""
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"choice={value!r:.200} must be a list of different texts, none of them empty")
    require(len(value) <= MOST_CHOICES, f"choice has {len(value)} texts: {MOST_CHOICES} are the most")
    wrong = f"choice={value!r:.200} must be a list of different texts, none of them empty"
    require(len(value) > 0 and all(isinstance(text, str) and text for text in value), wrong)
    require(len({*value}) == len(value), wrong)
    size = sum(map(len, value))
    require(size <= MOST_CHARACTERS, f"choice has {size} characters: {MOST_CHARACTERS} are the most")
    for text in value:
        check_halves("choice", text)
    return tuple(value)


def check_halves(name: str, text: str) -> None:
    """ValueError for half of a surrogate pair, which is no character."""
    odd = re.search("[\ud800-\udfff]", text)
    shown = ascii(odd[0]) if odd else ""
    require(not odd, f"{name} has {shown}, half of a surrogate pair, which no answer can have: leave it out")


def as_text(value: object) -> object:
    """A text that is neither empty nor too long; pydantic checks that it is one."""
    if isinstance(value, str):
        require(value != "", "an empty regex or grammar allows nothing: leave it out")
        if len(value) > MOST_CHARACTERS:
            raise ValueError(f"{len(value)} characters of a regex or a grammar: {MOST_CHARACTERS} are the most")
        check_halves("a regex or a grammar", value)
    return value


@explained
@dataclass(frozen=True, config=STRICT)
class StructuredOutputsParams:
    """The form of an answer (vLLM's class): set exactly one field.

    `json`: a JSON schema. `regex`: the whole answer matches it. `choice`: one of these texts. `grammar`: a
    context-free grammar in llguidance's dialect of Lark, from its rule `start`. `json_object=True`: any object.

    Raises ValueError for a form that cannot be read.
    """

    json: Annotated[str | dict[str, Any] | None, BeforeValidator(as_schema)] = None  # kept as JSON
    regex: Annotated[str | None, BeforeValidator(as_text)] = None
    choice: Annotated[list[str] | tuple[str, ...] | None, BeforeValidator(as_choice)] = None
    grammar: Annotated[str | None, BeforeValidator(as_text)] = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name)]
        names = ", ".join(f.name for f in fields(self))
        wrong = f"StructuredOutputsParams has {given or 'nothing'} set: set exactly one of {names}"
        require(len(given) == 1, wrong)
        check_pattern(self.regex)
        for pattern in lark_patterns(self.grammar or ""):
            check_pattern(pattern)
        check_ignored(self.grammar or "")
        for schema in lark_schemas(self.grammar or ""):
            check_schema({name: value for name, value in schema.items() if (name, value) != OWN_SPACES})

    def check(self, vocabulary: Vocabulary) -> None:
        """ValueError if no answer of this vocabulary can have the form."""
        masks_of(self, vocabulary)

    def mask(self, vocabulary: Vocabulary, tokens: Ids) -> np.ndarray | None:
        """The tokens that may follow `tokens`: a bit for each, uint8 [size / 8]."""
        mask = masks_of(self, vocabulary).after(tokens)
        return None if mask is None else mask[: -(-vocabulary.size // 8)]

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"StructuredOutputsParams({', '.join(f'{name}={value!r}' for name, value in given if value)})"


def as_grammar(form: StructuredOutputsParams) -> str:
    """The form in the library's own language."""
    from llguidance import LLMatcher

    if form.regex:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice:
        quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in form.choice)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    if form.grammar:
        return LLMatcher.grammar_from_lark(form.grammar)
    schema = form.json or '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACES})


def needed_bytes(form: StructuredOutputsParams) -> set[int]:
    """Bytes that an answer may need: those of the form, and those of JSON."""
    if form.choice:
        return {*"".join(form.choice).encode()}
    if form.regex or form.grammar:
        return set()
    return {*b'{}[]":,0123456789', *json.dumps(json.loads(str(form.json or "{}")), ensure_ascii=False).encode()}


def check_bytes(form: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
    """ValueError for a vocabulary in which a needed byte is not a token."""
    missing = bytes(sorted(needed_bytes(form) - single_bytes(vocabulary)))
    wrong = f"structured_outputs={form!r:.200} needs {missing!r}"
    require(not missing, f"{wrong}, which the vocabulary of {vocabulary.folder} cannot spell: take another form")


def fixed_texts(form: StructuredOutputsParams) -> str:
    """The texts that a form names: choices, names and values in a schema, and a regex without its backslashes."""
    if form.json:
        schemas = [*all_schemas(json.loads(str(form.json)))]
        values = [[one.get("const"), one.get("enum"), [*(one.get("properties") or ())]] for one in schemas]
        return json.dumps(values, ensure_ascii=False)
    return "\n".join(form.choice or ()) or (form.regex or "").replace("\\", "")


def check_special(form: StructuredOutputsParams, vocabulary: Vocabulary) -> None:
    """ValueError for a text with the name of a token that is no text: the library would never let it be spelled."""
    texts = fixed_texts(form)
    found = sorted(name for name in special_names(vocabulary) if name in texts)[:1]
    wrong = f"structured_outputs={form!r:.200} has a text with {found}"
    require(not found, f"{wrong}, which is the name of a special token and no text: take another text")


def start(grammar: str, vocabulary: Vocabulary) -> Masks:
    """The masks of a grammar in the library's language."""
    from llguidance import LLMatcher, LLParserLimits

    tokenizer = read_vocabulary(vocabulary)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    bits = 8 * len(matcher.compute_bitmask())  # whole words, and one too many if the tokens fill their last one
    return Masks(matcher, packed(vocabulary.ends, bits), packed(tuple(range(vocabulary.size)), bits))


def faults(masks: Masks) -> list[str]:
    """What is wrong with the first states of a form. The second computes what the first has put off."""
    stuck = (state.matcher for state in (masks.start, masks.second()) if not state.mask.any())
    return [matcher.get_error().partition("\n")[0] for matcher in stuck]


def one_line(said: object) -> str:
    """What the library says, without line breaks, and not all of a long text."""
    text = " ".join(f"{said!s:.{4 * MOST_SAID}}".split())
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]} ..."


held: WeakKeyDictionary[StructuredOutputsParams, dict[Vocabulary, Masks]] = WeakKeyDictionary()


def masks_of(form: StructuredOutputsParams, vocabulary: Vocabulary) -> Masks:
    """The masks of a form, which are kept as long as it is: any number of requests may each have their own."""
    known = held.setdefault(form, {})
    if vocabulary not in known:
        known[vocabulary] = compiled(form, vocabulary)
    return known[vocabulary]


@lru_cache(256)
def compiled(form: StructuredOutputsParams, vocabulary: Vocabulary) -> Masks:
    """The masks of a form. ValueError if it is wrong, too large, or allows no answer."""
    tokenizer = read_vocabulary(vocabulary)
    from llguidance import LLMatcher, LLParserLimits

    check_bytes(form, vocabulary)
    check_special(form, vocabulary)
    what = f"structured_outputs={form!r:.200}"
    try:
        grammar = as_grammar(form)
    except ValueError as error:
        raise ValueError(f"{what} is refused: {one_line(error)}: make it simpler") from None
    is_wrong, notes = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=LLParserLimits(**LIMITS))
    require(not notes, f"{what} {'is refused' if is_wrong else 'is not certain'}: {one_line(' '.join(notes))}")
    masks = start(grammar, vocabulary)
    for why in faults(masks):
        said = NO_TEXT if not why or "NoExtension" in why else one_line(why)
        raise ValueError(f"{what} is refused: {said}: change it")
    return masks
