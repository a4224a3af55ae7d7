"""Tokens become text piece by piece, and the pieces are the text; what a stop string touches is never shown."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from checkpoints import plain_search
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_interrupt import Tripwire
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import atom_mini
from atom_mini.serving.protocol import token_bytes
from atom_mini.text import IncrementalDetokenizer, make_detokenizer

TINY = Path(atom_mini.__file__).parent / "tiny"
LETTERS = "aé€𝄞 \n.漢"  # characters of 1 to 4 bytes
SETTINGS = settings(max_examples=400, deadline=None, derandomize=True)


class Chunks:
    """A tokenizer whose tokens are any pieces of bytes, cut without regard to characters."""

    def __init__(self, chunks: Seq[bytes]) -> None:
        self.chunks = chunks

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(self.chunks[i] for i in ids).decode("utf-8", errors="replace")


def whole_text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stopped_text(texts: list[str], stops: Seq[str]) -> tuple[str, str | None, int]:
    """(text, the stop string, tokens) of a request that may end after each token: texts[n] is that of the first n.

    A text that ends in � is not looked at: the next token may complete the character.
    """
    for n, text in enumerate(texts):
        if not text.endswith("\ufffd") and any(s in text for s in stops):
            return *(plain_search(text, list(stops)) or ("", None)), n
    return *(plain_search(texts[-1], list(stops)) or (texts[-1], None)), len(texts) - 1


def check(
    tokenizer: Any, ids: list[int], stops: Seq[str] = (), probes: Seq[list[int]] | None = None
) -> IncrementalDetokenizer:
    """Read token after token as the engine does, and compare all that is shown with the decode of all tokens.

    `probes`: continuations; what is the same before all of them must be shown.
    """
    texts = [whole_text(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
    wanted, stop, last = stopped_text(texts, stops)
    detokenizer, shown = make_detokenizer(tokenizer, tuple(stops)), ""
    longest = max(map(len, stops), default=1)
    for n in range(1, last + 1):
        reached = detokenizer.read(ids[:n])
        shown += detokenizer.take()
        assert wanted.startswith(shown), f"{shown!r} was shown of {wanted!r}"
        assert (reached is not None) == (n == last and stop is not None and not texts[n].endswith("\ufffd"))
        if reached is None and probes is not None and not texts[n].endswith("\ufffd"):
            letters = zip(texts[n], *(whole_text(tokenizer, ids[:n] + more) for more in probes), strict=False)
            sure = sum(1 for _ in itertools.takewhile(lambda four: len(set(four)) == 1, letters))
            assert len(shown) >= sure - longest + 1, "held back for no reason"
    detokenizer.flush(ids[:last])
    shown += detokenizer.take()
    assert shown == detokenizer.text == wanted
    assert (detokenizer.progress.stopped, detokenizer.progress.num) == (stop, last)
    return detokenizer


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces, also empty ones, as special tokens are."""
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


PLACES = st.lists(st.integers(0, 10**6), max_size=30)


@SETTINGS
@given(st.binary(max_size=40), PLACES)
@example(b"\xe2\x82\xac", [1, 2])
@example(b"a\xe2", [1])
@example("a€b".encode() + b"\xff\xf0\x9d", [1, 2, 3, 4, 5, 6, 7])
def test_any_bytes_cut_anywhere(data: bytes, places: list[int]) -> None:
    chunks = [*cut(data, places), b"b", b"\xac", b"\xff"]
    n = len(chunks) - 3
    check(Chunks(chunks), list(range(n)), (), [[n], [n + 1], [n + 2]])


@SETTINGS
@given(st.text(LETTERS, max_size=30), PLACES, st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3))
@example("aSTSTxSTOPz", [*range(11)], ["STOP", "ST!"])  # ATOM compares separately encoded tokens, and misses such a one
def test_stop_strings_in_any_tokenisation(text: str, places: list[int], stops: list[str]) -> None:
    """The result depends on the text, not on where the tokens' borders are."""
    chunks = cut(text.encode(), places)
    check(Chunks(chunks), list(range(len(chunks))), stops)


def sentencepiece(kind: str) -> Any:
    """Llama 2's kind of tokenizer: ▁ for spaces, bytes for unknown letters, a decoder that drops a first space."""
    pieces = ["▁", "▁▁", "a", "b", "▁a", "▁ab", "ab", ".", "▁.", ",", "'s", "▁the", "é", "▁é", "▁\n"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [(piece, -float(i)) for i, piece in enumerate(vocabulary)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    last: list[Any] = {
        "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
        "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        "metaspace": [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()],
    }[kind]
    tokenizer.decoder = decoders.Sequence(last)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=True,
    )


class Plain:
    """The part of a fast tokenizer that is asked, without transformers around it: a tenth of the time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return self.tokenizer.decode(ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def convert_tokens_to_ids(self, names: Any) -> Any:
        return self.tokenizer.token_to_id(names) if isinstance(names, str) else list(map(self.tokenizer.token_to_id, names))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.tokenizer.id_to_token(i) for i in ids]

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "</s>", "<|tool|>"])
    tokenizer.add_tokens(["<think>", "a ▁ b", "a 漢 b"])
    return tokenizer


TOKENIZERS: dict[str, Any] = {
    "byte level": lambda: with_added_tokens(Tokenizer.from_file(str(TINY / "tokenizer.json"))),
    "llama": lambda: with_added_tokens(sentencepiece("llama").backend_tokenizer),
    "metaspace": lambda: with_added_tokens(sentencepiece("metaspace").backend_tokenizer),
    "gemma": lambda: with_added_tokens(sentencepiece("gemma").backend_tokenizer),
}


def byte_ids(tokenizer: Any, text: bytes) -> list[int]:
    """One token a byte, in either kind of vocabulary."""
    if tokenizer.convert_tokens_to_ids("<0xFF>") is not None:
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text])
    letters = tokenizer.convert_tokens_to_ids(ALPHABET)
    return [letters[byte] for byte in text]


def byte_alphabet() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be printed, else the next from U+0100 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


ALPHABET = byte_alphabet()


def random_ids(tokenizer: Any, rng: random.Random) -> list[int]:
    """Tokens as a bad sampler gives them: any, text, bytes whole, cut and broken, special ones between."""
    ids: list[int] = []
    if rng.random() < 0.02:  # bytes that are held for long
        some = byte_ids(tokenizer, rng.choice([b"\xff\xe0\x9f\xf0\xc3\xa9", "\ufffd".encode(), b"a \xff"]))
        return rng.choices(some, k=40) if rng.random() < 0.5 else some * (rng.randint(9, 30) // len(some))
    for _ in range(rng.randint(1, 6)):
        kind = rng.random()
        if kind < 0.3:
            ids += [rng.randrange(len(tokenizer) + 2) for _ in range(rng.randint(1, 3))]  # 2 that nobody knows
        elif kind < 0.5:
            ids += tokenizer.encode("".join(rng.choices("ab .,'é€𝄞漢ß\n🦊", k=rng.randint(1, 4))))
        elif kind < 0.85:
            data = "".join(rng.choices("é€𝄞\nzक", k=rng.randint(1, 2))).encode()
            data = data[: rng.randint(1, len(data))] if rng.random() < 0.4 else data
            ids += byte_ids(tokenizer, data)
        else:
            ids.append(rng.choice(tokenizer.special))
    return ids[:14]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_tokens(name: str) -> None:
    """1,500 sequences each, half of them with stop strings taken from their own text."""
    tokenizer, rng = Plain(TOKENIZERS[name]()), random.Random(name)
    probes = [byte_ids(tokenizer, b"\xff"), byte_ids(tokenizer, b"\xa9"), tokenizer.encode("b")]
    broken = stopped = leading = 0
    for i in range(1500):
        ids = random_ids(tokenizer, rng)
        whole, stops = whole_text(tokenizer, ids), []
        broken += "\ufffd" in whole
        leading += whole.startswith(" ")
        if i % 2 and whole:
            for _ in range(rng.randint(1, 3)):
                start = rng.randrange(len(whole))
                stops.append(whole[start : start + rng.choice((1, 2, 3, 8))])
        found = check(tokenizer, ids, stops, probes if i % 10 < 2 else None)
        stopped += found.progress.stopped is not None
    assert broken > 300 and stopped > 370 and leading > 0


# reading is exact, may come late or twice, and costs the same after a thousand others


def said(detokenizer: IncrementalDetokenizer) -> tuple[Any, ...]:
    return detokenizer.progress, (detokenizer.num_shown(), detokenizer.text)


@pytest.mark.parametrize("stops", [(), ("b",)], ids=str)
def test_interrupted_read(stops: tuple[str, ...]) -> None:
    """At any line: all is as before it or as after it, and the same again makes it whole."""
    tokenizer = sentencepiece("llama")
    names = ["▁the", "<0xC3>", "<0xA9>", "▁a", "</s>", "▁", "b", "<0xC3>"]
    ids, num_interrupts = tokenizer.convert_tokens_to_ids(names), 0
    plain, detokenizer = make_detokenizer(tokenizer, stops), make_detokenizer(tokenizer, stops)

    def try_all(change: Any) -> None:
        nonlocal num_interrupts
        before = said(plain)
        change(plain)
        line = 0
        while Tripwire(line + 1).run(lambda: change(detokenizer)):
            assert said(detokenizer) in (before, said(plain))
            line += 1
        assert said(detokenizer) == said(plain)
        num_interrupts += line

    for n in range(1, len(ids) + 1):
        try_all(lambda d, n=n: d.read(ids[:n]))
        if plain.progress.stopped:
            break
    try_all(lambda d: d.flush(ids[:n]))
    assert num_interrupts > 150


REPEATED = [  # tokenizer, tokens that follow each other again and again, stop strings
    ("llama", ["▁the", "b", "."], ("never",)),
    ("llama", ["▁"], ()),
    ("llama", ["</s>"], ()),
    ("byte level", [], ()),  # a token that nobody knows
    ("llama", [f"<0x{b:02X}>" for b in "漢".encode()], ("漢" * 900 + "!",)),
    ("llama", ["<0xFF>"], ("\ufffd" * 9 + "!",)),
    ("llama", ["<0x41>", "</s>"], ("never",)),
    ("byte level", ["<s>", "</s>"], ()),
    ("byte level", [ALPHABET[0xFF]], ()),
    ("byte level", [ALPHABET[0xF0]], ()),
]


@pytest.mark.parametrize(("name", "names", "stops"), REPEATED, ids=lambda value: str(value)[:40])
def test_a_token_looks_at_few_others(
    name: str, names: list[str], stops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the text: on average a handful are decoded per token."""
    tokenizer = Plain(TOKENIZERS[name]())
    some = tokenizer.convert_tokens_to_ids(names) or [10**6]
    ids, decoded, decode = some * (2100 // len(some)), [0], tokenizer.decode

    def counted(ids: list[int], **options: Any) -> str:
        decoded[0] += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = make_detokenizer(tokenizer, stops)
    for n in range(0, len(ids) + 1, 7):
        assert detokenizer.read(ids[:n]) is None
        assert len(detokenizer.progress.held) <= 24 and len(detokenizer.progress.context) <= 24
    detokenizer.flush(ids)
    whole = decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert detokenizer.text == whole and decoded[0] < 60 * len(ids)


# a token's own bytes, which the server reports


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_the_text(name: str) -> None:
    """Also where a character is split over several tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]())
    rng = random.Random(name)
    for _ in range(300):
        text = "".join(rng.choices("ab .,'é€𝄞漢ß\n🦊", k=rng.randint(1, 8)))
        ids = byte_ids(tokenizer, text.encode()) if rng.random() < 0.3 else tokenizer.encode(text, add_special_tokens=False)
        if None in ids:
            continue
        found = b"".join(token_bytes(tokenizer, i) for i in ids).decode()
        assert found.strip(" ") == whole_text(tokenizer, ids).strip(" ")


