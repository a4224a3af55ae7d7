"""Tokens become text piece by piece, and the pieces are the text; what a stop string touches is never shown."""

from __future__ import annotations

import io
import itertools
import random
import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import plain_search, save_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_llm import bring
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import atom_mini
from atom_mini import LLM, SamplingParams
from atom_mini.serving.protocol import named, token_bytes
from atom_mini.text import IncrementalDetokenizer, StopSearch, byte_tokens, make_detokenizer

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


@SETTINGS
@given(st.binary(max_size=40), PLACES, st.lists(st.sampled_from(["a", "ab", "ba", "\x00", "b\x00a"]), max_size=3))
def test_stop_strings_among_broken_characters(data: bytes, places: list[int], stops: list[str]) -> None:
    data = bytes(b"ab\x00\xe2\x82\xac\xf0"[byte % 7] for byte in data)
    chunks = cut(data, places)
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


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_tokenizer_that_drops_a_first_space(kind: str) -> None:
    """The space is dropped at the start of the text and nowhere else."""
    tokenizer = sentencepiece(kind)
    spaced = tokenizer.convert_tokens_to_ids(["▁the", "▁", "▁a", "b", "▁ab", "▁▁", "▁the"])
    assert check(tokenizer, spaced).text == "the  ab ab   the"


@pytest.mark.parametrize("stops", [(), ("क",), ("\ufffd\ufffd",), ("never",)], ids=str)
def test_a_run_of_bytes_that_breaks_after_a_whole_character(stops: tuple[str, ...]) -> None:
    """A broken run is broken from its start: nothing of it may be shown before it ends."""
    tokenizer = sentencepiece("llama")
    ids = tokenizer.convert_tokens_to_ids(["▁", "<0xE0>", "<0xA4>", "<0x95>", "<0xE0>"])
    assert whole_text(tokenizer, ids[:4]) == "क" and whole_text(tokenizer, ids) == "\ufffd" * 4
    assert check(tokenizer, ids, stops).text == ("" if stops and stops != ("never",) else "\ufffd" * 4)
    detokenizer, shown = make_detokenizer(tokenizer, ()), []
    closed = [*ids[:4], tokenizer.convert_tokens_to_ids("b")]
    for n in range(1, 6):
        detokenizer.read(closed[:n])
        shown.append(detokenizer.take())
    assert shown == ["", "", "", "", "कb"]
    special = [*ids[:3], tokenizer.eos_token_id, ids[3], tokenizer.eos_token_id, *ids[4:]]
    assert check(tokenizer, special).text == "\ufffd" * 4, "a special token does not end the run"


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


def byte_level() -> Tokenizer:
    """GPT-2's kind: bytes as letters, pieces that cut characters, added tokens of both sorts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = [piece for piece in ("é€", "漢字", "ab", " a", "𝄞") for piece in pre_tokenize(piece)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(dict.fromkeys([*letters, *split]))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("a 漢 b")])  # with a space, and no bytes as letters
    return tokenizer


def pre_tokenize(text: str) -> list[str]:
    """All pieces of the bytes of `text`, 2 and 3 long, in the letters of ByteLevel."""
    ((letters, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [letters[a : a + n] for n in (2, 3) for a in range(len(letters) - n + 1)]


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "</s>", "<|tool|>"])
    tokenizer.add_tokens(["<think>", "a ▁ b"])
    return tokenizer


TOKENIZERS: dict[str, Any] = {
    "tiny": lambda: Tokenizer.from_file(str(TINY / "tokenizer.json")),
    "byte level": byte_level,
    "llama": lambda: sentencepiece("llama").backend_tokenizer,
    "llama, added tokens": lambda: with_added_tokens(sentencepiece("llama").backend_tokenizer),
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
    """4,000 sequences each, half of them with stop strings taken from their own text, one letter to eight."""
    tokenizer, rng = Plain(TOKENIZERS[name]()), random.Random(name)
    probes = [byte_ids(tokenizer, b"\xff"), byte_ids(tokenizer, b"\xa9"), tokenizer.encode("b")]
    broken = stopped = leading = 0
    for i in range(4000):
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
    assert broken > 800 and stopped > 1000 and leading > 5


def test_transformers_adds_nothing() -> None:
    """The same with the tokenizer that an engine holds."""
    for name in ("tiny", "llama, added tokens"):
        plain = Plain(TOKENIZERS[name]())
        tokenizer, rng = PreTrainedTokenizerFast(tokenizer_object=plain.tokenizer), random.Random(1)
        assert byte_tokens(tokenizer) == byte_tokens(plain) and bool(byte_tokens(plain)) == (name != "tiny")
        for _ in range(100):
            check(tokenizer, random_ids(plain, rng))


# reading is exact, may come late or twice, and costs the same after a thousand others


@pytest.mark.parametrize("name", ["byte level", "llama"])
def test_read_late_and_again(name: str) -> None:
    """Several tokens may come at once, or all as `generate` has them, and behind a stop string, too: all is as if it had
    read one by one and stopped."""
    tokenizer, rng, beyond = Plain(TOKENIZERS[name]()), random.Random(2), 0
    for i in range(300):
        ids = random_ids(tokenizer, rng)
        whole = whole_text(tokenizer, ids)
        stops = (whole[len(whole) // 2 :][:2],) if i % 2 and whole else ()
        wanted, detokenizer, at_once = (make_detokenizer(tokenizer, stops) for _ in range(3))
        last = next((n for n in range(1, len(ids) + 1) if wanted.read(ids[:n])), len(ids))
        beyond += last < len(ids)
        n = 0
        while n < len(ids):
            n = min(len(ids), n + rng.choice((1, 1, 2, 5)))
            for _ in range(rng.choice((1, 1, 2))):
                assert (detokenizer.read(ids[:n]) is not None) == (wanted.progress.stopped is not None and last <= n)
        assert said(detokenizer) == said(wanted)
        wanted.flush(ids[:last])
        detokenizer.flush(ids)
        at_once.flush(ids)
        assert said(detokenizer) == said(at_once) == said(wanted) and detokenizer.progress.num == last
    assert beyond > 30


def said(detokenizer: IncrementalDetokenizer) -> tuple[Any, ...]:
    return detokenizer.progress, (detokenizer.num_shown(), detokenizer.text)


def interrupted(action: Any, line: int) -> bool:
    """Run `action`, with a KeyboardInterrupt before its `line`-th line in the text's module; whether it came so far."""
    lines = itertools.count()
    file = sys.modules["atom_mini.text"].__file__

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


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
        while interrupted(lambda: change(detokenizer), line):
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


ANSWERS: dict[str, tuple[str, list[str]]] = {  # tokenizer, tokens that follow each other again and again
    "text": ("llama", ["▁the", "b", "."]), "spaces": ("llama", ["▁"]), "special": ("llama", ["</s>"]), "unknown": ("tiny", []),
    "bytes": ("llama", [f"<0x{b:02X}>" for b in "漢".encode()]), "broken bytes": ("llama", ["<0xFF>"]),
    "a � in bytes": ("llama", [f"<0x{b:02X}>" for b in "\ufffd".encode()]), "bytes, special": ("llama", ["<0x41>", "</s>"]),
    "special, byte level": ("byte level", ["<s>", "</s>"]), "broken, byte level": ("byte level", [ALPHABET[0xFF]]),
    "begun, byte level": ("byte level", [ALPHABET[0xF0]]),
}  # fmt: skip


@pytest.mark.parametrize("stops", [(), ("never",), ("\ufffd" * 9, "漢" * 900 + "!")], ids=["", "stop", "stops"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_token_looks_at_few_others(kind: str, stops: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text: on average a handful are decoded per token, in a long run of bytes too."""
    name, names = ANSWERS[kind]
    tokenizer = Plain(TOKENIZERS[name]())
    ids, decoded, decode = (tokenizer.convert_tokens_to_ids(names) or [10**6]) * (2100 // max(1, len(names))), [0], tokenizer.decode

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
    assert detokenizer.text == (plain_search(whole, list(stops)) or (whole,))[0]
    assert decoded[0] < 60 * len(ids)


@pytest.mark.parametrize(
    ("text", "stop"),
    [("a" * 3000, "a" * 5000), ("ab" * 1500, "ab" * 2000 + "c"), ("a" * 3000 + "b", "a" * 2999 + "b"), ("x" * 3000, "never")],
)
def test_the_search_for_a_stop_string_looks_at_each_letter_once(text: str, stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is linear in the text, whatever the stop string: also where it fits for long, and then does not."""
    calls, plain_next, plain_fall_back = [0], StopSearch.next, StopSearch._fall_back

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[0] += 1
            return function(*args)

        return call

    monkeypatch.setattr(StopSearch, "next", counted(plain_next))
    monkeypatch.setattr(StopSearch, "_fall_back", counted(plain_fall_back))
    tokenizer, ids = Chunks([letter.encode() for letter in text]), list(range(len(text)))
    detokenizer, shown = make_detokenizer(tokenizer, (stop,)), ""
    for n in range(1, len(ids) + 1):
        detokenizer.read(ids[:n])
        shown += detokenizer.take()
        assert not (shown and stop.startswith(text[:n])) and text.startswith(shown)
    detokenizer.flush(ids)
    assert detokenizer.text == (plain_search(text, [stop]) or (text,))[0]
    assert detokenizer.progress.stopped == (stop if stop in text else None)
    assert calls[0] < 5 * len(text)


class Slices(list):
    """A list that counts what is copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 0
        return found


class Buffer(io.StringIO):
    """A text that counts the characters that are read."""

    num_read = 0

    def read(self, size: int | None = -1, /) -> str:
        found = super().read(size)
        self.num_read += len(found)
        return found


@pytest.mark.parametrize("stops", [(), ("never", "Rom. ")], ids=str)
def test_a_stream_looks_at_little_of_its_text(stops: tuple[str, ...]) -> None:
    """With stop strings too, and with a prompt in front: a token costs the same after 4,000 others as after none."""
    tokenizer = Plain(TOKENIZERS["tiny"]())
    some = tokenizer.encode("Ada lives in Rome. ")
    ids, detokenizer = Slices([7, 7, *some * 800]), IncrementalDetokenizer(tokenizer, stops)
    detokenizer._buffer, pieces = Buffer(), []
    for end in range(2, len(ids) + 1):
        assert detokenizer.read(ids, 2, end) is None
        pieces.append(detokenizer.take())
    assert ids.copied == 0 and detokenizer._buffer.num_read < 20 * len(ids)
    assert "".join(pieces).startswith("Ada lives in Rome. " * 799) and detokenizer.progress.num == len(ids) - 2 > 4000


@pytest.mark.parametrize("stop", [(), ("never",)], ids=str)
def test_an_engine_copies_few_token_ids_of_a_stream(stop: tuple[str, ...]) -> None:
    with LLM("tiny", device="cpu", num_kvcache_blocks=40) as llm:
        pieces = llm.stream("Once upon a time", SamplingParams(max_tokens=200, stop=stop, ignore_eos=True, seed=1))
        next(pieces)
        (seq,) = llm.engine_core.scheduler.seqs.values()
        seq.token_ids = counted = Slices(seq.token_ids)
        last = [*pieces][-1]
    assert last.output and len(last.output.token_ids) == 200
    assert counted.copied < 12 * 200


def engine(tokenizer: Any, folder: Path) -> LLM:
    """A model with this tokenizer."""
    save_checkpoint("llama", folder, num_hidden_layers=1)
    tokenizer.save_pretrained(folder)
    return LLM(str(folder), device="cpu", num_kvcache_blocks=8)


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_generate_and_stream_say_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a tokenizer whose own decode would tidy spaces up ("a ." to "a."), as the configs of some ask for."""
    tokenizer = sentencepiece(kind)
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁.", "▁a", "▁", ",", "b", "▁", "'s", "▁.", "</s>", "▁a"])
    wanted = whole_text(tokenizer, ids)
    assert wanted == "the . a ,b 's . a"
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    with engine(tokenizer, tmp_path) as llm:
        bring(llm, monkeypatch, ids)
        assert llm.generate([5, 6], params)[0].text == wanted
        assert "".join(piece.text for piece in llm.stream([5, 6], params)) == wanted
        (out,) = llm.generate([5, 6], replace(params, stop="never"))
        assert out.text == wanted and out.token_ids == ids
        (out,) = llm.generate([5, 6], replace(params, stop=[",b", "'s", " a ,"]))
        assert (out.text, out.stop_reason, len(out.token_ids)) == ("the .", " a ,", 5)


def test_generate_and_stream_say_the_same_of_broken_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever max_tokens cuts the run."""
    tokenizer = sentencepiece("llama")
    ids = tokenizer.convert_tokens_to_ids(["▁", "<0xE0>", "<0xA4>", "<0x95>", "<0xE0>", "▁a"])
    with engine(tokenizer, tmp_path) as llm:
        bring(llm, monkeypatch, ids)
        for n in range(1, len(ids) + 1):
            params = SamplingParams(max_tokens=n, ignore_eos=True)
            wanted = whole_text(tokenizer, ids[:n])
            assert llm.generate([5, 6], params)[0].text == wanted
            assert llm.generate([5, 6], replace(params, stop="never"))[0].text == wanted
            assert "".join(piece.text for piece in llm.stream([5, 6], params)) == wanted
    assert wanted == "\ufffd" * 4 + " a"


def test_stop_string_that_the_last_token_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token ends a stop string and begins a character: the text is cut there, so "stop" is why it ended."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=8) as llm:
        llm.processor.tokenizer = Chunks([b"so ", b"stop\xe2", b"\x82\xac", b" on"])
        bring(llm, monkeypatch, [0, 1, 2, 3])
        for max_tokens, n in ((1, 1), (2, 2), (3, 3), (4, 3)):
            params = SamplingParams(max_tokens=max_tokens, stop="stop", ignore_eos=True)
            (out,) = llm.generate([5], params)
            wanted = ("length", "max_tokens") if max_tokens == 1 else ("stop", "stop")
            assert (out.text, len(out.token_ids)) == ("so ", n)
            assert (out.finish_reason, out.stop_reason) == wanted
            pieces = list(llm.stream([5], params))
            assert "".join(p.text for p in pieces) == "so " and pieces[-1].finish_reason == wanted[0]


# a token's own bytes, which the server reports


def fast(name: str) -> Any:
    """One of these tokenizers as transformers has it."""
    return PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bytes_of_tokens_are_the_text(name: str) -> None:
    """Also where a character is split over several tokens."""
    tokenizer, rng = fast(name), random.Random(name)
    for _ in range(300):
        text = "".join(rng.choices("ab .,'é€𝄞漢ß\n🦊", k=rng.randint(1, 8)))
        ids = byte_ids(tokenizer, text.encode()) if rng.random() < 0.3 else tokenizer.encode(text, add_special_tokens=False)
        if None in ids:
            continue
        found = b"".join(token_bytes(tokenizer, i) for i in ids).decode()
        assert found.strip(" ") == whole_text(tokenizer, ids).strip(" ")


def test_bytes_in_log_probabilities() -> None:
    tokenizer = fast("tiny")
    ids = tokenizer.encode("é🙂")
    rows = [named({i: -1.0, ids[0]: -2.0}, i, 2, tokenizer) for i in ids]
    assert len(ids) == 6 and bytes(b for first, *_ in rows for b in first["bytes"]) == "é🙂".encode()
    assert rows[1][2]["bytes"] == [0xC3] and rows[1][2]["token"] == "\ufffd"


ADDED = ["<｜begin▁of▁sentence｜>", "café", "▁▁"]


def test_bytes_of_added_tokens() -> None:
    """In a byte-level vocabulary their names are text, not letters for bytes; elsewhere the decoder reads them."""
    level, llama = fast("byte level"), fast("llama, added tokens")
    for tokenizer in (level, llama):
        tokenizer.add_tokens(ADDED)
        wanted = ADDED if tokenizer is level else [name.replace("▁", " ") for name in ADDED]
        names = tokenizer.convert_tokens_to_ids(ADDED)
        assert [token_bytes(tokenizer, i).decode() for i in names] == wanted
    assert llama.decode(names) == "".join(wanted)


def test_bytes_of_tokens_that_are_no_text() -> None:
    llama = fast("llama, added tokens")
    wanted = {"<0xE2>": b"\xe2", "▁the": b" the", "é": "é".encode(), "</s>": b"</s>", "<think>": b"<think>"}
    assert {t: token_bytes(llama, llama.convert_tokens_to_ids(t)) for t in wanted} == wanted
    level = fast("byte level")
    wanted = {"<s>": b"<s>", "a 漢 b": "a 漢 b".encode(), "Ã": b"\xc3", "Ġa": b" a"}
    assert {t: token_bytes(level, level.convert_tokens_to_ids(t)) for t in wanted} == wanted
    assert token_bytes(level, 10**6) == token_bytes(llama, 10**6) == b""  # a model may have more than its tokenizer
