"""A tokenizer as the library of grammars reads it: the bytes of each token (chapter 21)."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import install, require
from ..forms import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@lru_cache(8)
def read_vocabulary(vocabulary: Vocabulary) -> LLTokenizer:
    """The bytes of all tokens. ValueError without the library, a fast tokenizer, or a token that ends a text."""
    require(find_spec("llguidance") is not None, f"structured_outputs needs llguidance: {install('structured')}")
    require(vocabulary.folder is not None, "structured_outputs needs a tokenizer, and there is none: leave it out")
    if not vocabulary.ends:
        raise ValueError(
            f"structured_outputs: {vocabulary.folder} names no token that ends a text (eos_token_id), "
            "and without one no form would end: add it to config.json"
        )
    return wrap(read_tokenizer(vocabulary), vocabulary)


def read_tokenizer(vocabulary: Vocabulary) -> Any:
    """The tokenizer in the folder. ValueError if there is none, or no fast one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(vocabulary.folder)
    except Exception as error:  # of any kind
        wrong = f"structured_outputs needs a tokenizer, and {vocabulary.folder} has none that can be read"
        raise ValueError(f"{wrong}: {' '.join(str(error).split())[:300]}") from None
    kind = type(tokenizer).__name__
    good = isinstance(tokenizer, PreTrainedTokenizerFast)
    require(good, f"structured_outputs needs a fast tokenizer, not {kind}: add a tokenizer.json")
    return tokenizer


def wrap(tokenizer: Any, vocabulary: Vocabulary) -> LLTokenizer:
    """The library's view of a tokenizer. It has as many tokens as the logits, or more."""
    from llguidance.hf import from_tokenizer

    size = max(vocabulary.size, len(tokenizer))
    ends = [*vocabulary.ends]
    try:
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)
    except Exception as error:  # of any kind: from Rust
        wrong = f"structured_outputs: llguidance does not read the tokenizer in {vocabulary.folder}"
        raise ValueError(f"{wrong}: {' '.join(str(error).split())[:300]}") from None


@lru_cache(8)
def single_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """The bytes that are a token each: of these, any text can be spelled."""
    tokenizer = read_vocabulary(vocabulary)
    spelled = (tokenizer.decode_bytes([id]) for id in range(vocabulary.size) if not tokenizer.is_special_token(id))
    return frozenset(text[0] for text in spelled if len(text) == 1)


@lru_cache(8)
def special_names(vocabulary: Vocabulary) -> frozenset[str]:
    """The names of tokens that are not text, such as `<|endoftext|>`: a tokenizer reads such a text as the token."""
    tokenizer, names = read_vocabulary(vocabulary), read_tokenizer(vocabulary).get_added_vocab()
    return frozenset(name for name, id in names.items() if id < tokenizer.vocab_size and tokenizer.is_special_token(id))
