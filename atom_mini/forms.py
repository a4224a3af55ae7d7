"""What else changes scores: biases, bad words, allowed tokens, and the masks of a form (chapters 01b, 24, and 26)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import BeforeValidator

from .errors import require

if TYPE_CHECKING:  # `Extras` imports torch when it is called
    from torch import Tensor

MOST_BIAS = 100.0  # OpenAI's limit
Ids = tuple[int, ...]
Encode = Callable[..., list[int]]
Masks = dict[int, np.ndarray]  # row of the logits -> its mask: a bit for each token, uint8 [V / 8]


class Vocabulary(NamedTuple):
    """The tokens of an engine: what a form has to know of them."""

    folder: Path | None  # of the tokenizer
    size: int  # of the logits
    ends: Ids  # the tokens that end a text


@runtime_checkable
class Form(Protocol):
    """What an answer must look like. It is compared and hashed by its content."""

    def check(self, vocabulary: Vocabulary) -> None:
        """ValueError if no answer of this vocabulary can have the form."""

    def mask(self, vocabulary: Vocabulary, tokens: Ids) -> np.ndarray | None:
        """The tokens that may follow the answer `tokens`: a bit for each, uint8 [size / 8];
        None if they do not have the form. (Such an answer is a draft, and is dropped.)"""


def as_form(value: object) -> Form | None:
    """`value`, if it is a form or None; ValueError for anything else."""
    if value is None or (isinstance(value, Form) and not isinstance(value, type)):
        return value
    write = "write StructuredOutputsParams(json=...), from atom_mini"
    raise ValueError(f"structured_outputs={value!r} of type {type(value).__name__} is not a form: {write}")


def is_id(value: object) -> bool:
    """Whether `value` can be a token id."""
    return isinstance(value, Integral) and type(value) is not bool and int(value) >= 0


def as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """{token id: bias}, or pairs, as pairs. ValueError for anything else."""
    must = "must be a dict of token ids and numbers from -100 to 100"
    if not isinstance(value, Mapping | list | tuple):
        raise ValueError(f"logit_bias={value!r:.200} {must}")
    try:
        pairs = [(id, by) for id, by in (value.items() if isinstance(value, Mapping) else value)]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={value!r:.200} {must}") from None
    for id, by in pairs:
        is_number = isinstance(by, int | float) and type(by) is not bool and abs(by) <= MOST_BIAS
        require(is_id(id) and is_number, f"logit_bias has {id!r:.50}: {by!r:.50}, and it {must}")
    require(len({id for id, _ in pairs}) == len(pairs), f"logit_bias={value!r:.200} has a token id twice")
    return tuple((int(id), float(by)) for id, by in pairs)


def as_allowed(value: object) -> Ids | None:
    """A list of token ids as a tuple, or None. ValueError for anything else."""
    if isinstance(value, list | tuple) and len(value) > 0 and all(map(is_id, value)):
        return tuple(map(int, value))
    require(value is None, f"allowed_token_ids={value!r} must be a list of at least one token id, or None")
    return None


def as_bad_words(value: object) -> tuple[str | Ids, ...]:
    """Words, each a text or its token ids. ValueError for anything else."""
    wrong = f"bad_words={value!r} must be a list of words, each a text or a list of token ids"
    if not isinstance(value, list | tuple):
        raise ValueError(wrong)
    for word in value:
        is_text = isinstance(word, str) and bool(word.strip())
        is_list = isinstance(word, list | tuple) and len(word) > 0 and all(map(is_id, word))
        require(is_text or is_list, wrong)
    return tuple(word if isinstance(word, str) else tuple(map(int, word)) for word in value)


Biases = Annotated[Mapping[int, float] | tuple[tuple[int, float], ...], BeforeValidator(as_biases)]
Allowed = Annotated[list[int] | Ids, BeforeValidator(as_allowed)]
Words = Annotated[list[str | list[int]] | tuple[str | Ids, ...], BeforeValidator(as_bad_words)]
AnyForm = Annotated[Any, BeforeValidator(as_form)]


def spell(words: Iterable[str | list[int] | Ids], encode: Encode) -> tuple[Ids, ...]:
    """The token ids of each word, without and with a space before it. (vLLM leaves the second out if it has another
    number of tokens; then " word" may still be generated.)"""
    found: list[Ids] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(word))
            continue
        plain, spaced = (tuple(encode(p + word.lstrip(), add_special_tokens=False)) for p in ("", " "))
        found += [plain, spaced]
    return tuple(filter(None, found))


def barred_by(words: Iterable[Any], answer: list[int]) -> set[int]:
    """The tokens that would complete one of `words` after `answer`, a list of tokens."""
    heads = ((tuple(word[:-1]), word[-1]) for word in words)
    return {last for head, last in heads if not head or tuple(answer[-len(head) :]) == head}


@lru_cache(64)
def packed(ids: Ids, size: int) -> np.ndarray:
    """A bit for each of `size` tokens, set for `ids`: uint8 [size / 8]."""
    bits = np.zeros(size, np.uint8)
    bits[[id for id in ids if id < size]] = 1
    return np.packbits(bits, bitorder="little")


def mask_of(params: Any, vocabulary: Vocabulary, answer: list[int]) -> np.ndarray | None:
    """The mask of one request, whose tokens so far are `answer`; None: any token."""
    form, allowed = params.structured_outputs, params.allowed_token_ids
    mask = None if form is None else form.mask(vocabulary, tuple(answer))
    if allowed is not None:
        own = packed(allowed, vocabulary.size)
        mask = own if mask is None else mask & own
    return mask


def forced_tokens(params: Any, vocabulary: Vocabulary, answer: list[int], most: int) -> list[int]:
    """Up to `most` tokens after `answer`, each the only one that its mask allows."""
    found: list[int] = []
    while len(found) < most:
        mask = mask_of(params, vocabulary, answer + found)
        if mask is None or np.count_nonzero(mask) != 1:
            break
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(ids) != 1:
            break
        found.append(int(ids[0]))
    return found


def prefer_forced(draft: list[int], seq: Any, vocabulary: Vocabulary, most: int) -> list[int]:
    """`draft` of `seq`, or the tokens that its form forces, if these are others."""
    forced = forced_tokens(seq.sampling_params, vocabulary, seq.completion_token_ids, most)
    return draft if draft[: len(forced)] == forced else forced


def has_more(mask: np.ndarray, ends: Iterable[int]) -> bool:
    """Whether a mask allows a token besides `ends`."""
    return bool((mask & ~packed(tuple(sorted(ends)), 8 * len(mask))).any())


def has_token(params: Any, vocabulary: Vocabulary, answer: list[int]) -> bool:
    """Whether what a request allows and bars leaves a token after `answer`."""
    mask, barred = mask_of(params, vocabulary, answer), barred_by(params.bad_words, answer)
    return len(barred) < vocabulary.size if mask is None else has_more(mask, barred)


def stacked(masks: Masks) -> tuple[np.ndarray, np.ndarray]:
    """The rows that have a mask, int64 [M], and their bits in whole words, int32 [M, V / 32]."""
    bits = np.stack([*masks.values()])
    words = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view(np.int32)
    return np.array([*masks], np.int64), words


def unpacked(masks: Tensor, size: int) -> Tensor:
    """The bits of `masks` int32 [M, size / 32]: bool [M, size]."""
    import torch

    if masks.device.type == "cpu":  # in a fraction of the time of the shifts below
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(32, device=masks.device, dtype=torch.int32)
    return ((masks[:, :, None] >> places) & 1).bool().flatten(1)[:, :size]


def keep_only(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """A copy of `logits` [R, V] with -inf where a bit of `masks` int32 [M, V / 32] is 0, for `rows` [M]."""
    barred = unpacked(masks, logits.shape[1]).logical_not()
    return logits.index_put((rows,), logits[rows].masked_fill_(barred, float("-inf")))
