"""Tokens become text piece by piece, and the pieces are the text; what a stop string touches is never shown."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import plain_search, save_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import atom_mini
from atom_mini import LLM, SamplingParams
from atom_mini.llm import IncrementalDetokenizer

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


def check(tokenizer: Any, ids: list[int], stops: Seq[str] = ()) -> IncrementalDetokenizer:
    """Push token after token as the engine does, and compare all that is shown with a search in the whole text."""
    whole = whole_text(tokenizer, ids)
    found = plain_search(whole, list(stops))
    wanted, stop = found or (whole, None)
    detokenizer, shown = IncrementalDetokenizer(tokenizer, tuple(stops)), ""
    longest = max(map(len, stops), default=1)
    for n, token in enumerate(ids, 1):
        reached = detokenizer.push(token)
        shown += detokenizer.take()
        assert wanted.startswith(shown), f"{shown!r} was shown of {wanted!r}"
        if reached is not None:
            assert reached == stop and stop in whole_text(tokenizer, ids[:n])
            break
        sure = whole_text(tokenizer, ids[:n]).rstrip("\ufffd")
        if whole.startswith(sure) and not whole_text(tokenizer, ids[:n]).endswith("\ufffd"):
            assert len(shown) >= len(sure) - longest + 1, "held back for no reason"
    detokenizer.flush()
    shown += detokenizer.take(final=True)
    assert shown == detokenizer.text == wanted
    assert detokenizer.stopped == stop
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
    chunks = cut(data, places)
    check(Chunks(chunks), list(range(len(chunks))))


@SETTINGS
@given(st.text(LETTERS, max_size=30), PLACES, st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3))
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


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def random_ids(tokenizer: Any, rng: random.Random, special: list[int], size: int) -> list[int]:
    """Tokens as a bad sampler gives them: any, those of real text, one byte of a character, special ones between."""
    ids: list[int] = []
    while len(ids) < rng.randint(1, size):
        kind = rng.random()
        if kind < 0.4:
            ids += [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 6))]
        elif kind < 0.9:
            part = tokenizer.encode(
                "".join(rng.choices("ab .,'é€𝄞漢ß\n🦊", k=rng.randint(1, 6))), add_special_tokens=False
            )
            start = rng.randrange(len(part)) if part and rng.random() < 0.5 else 0
            ids += part[start : start + rng.randint(1, 6)]
        else:
            ids.append(rng.choice(special))
    return ids


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_of_the_byte_level_vocabulary(seed: int, tiny_tokenizer: Any) -> None:
    """4,000 sequences, half of them with stop strings taken from their own text, one letter to the whole."""
    rng, special = random.Random(seed), tiny_tokenizer.all_special_ids
    broken = stopped = 0
    for i in range(500):
        ids = random_ids(tiny_tokenizer, rng, special, 16)
        whole, stops = whole_text(tiny_tokenizer, ids), []
        broken += "\ufffd" in whole
        if i % 2 and whole:
            for _ in range(rng.randint(1, 3)):
                start = rng.randrange(len(whole))
                stops.append(whole[start : start + rng.choice((1, 2, 3, 8))])
            stops = [s for s in stops if "\ufffd" not in s]  # whether a character is broken is known only later
            stopped += bool(stops)
        check(tiny_tokenizer, ids, stops)
    assert broken > 50 and stopped > 100


def sentencepiece(kind: str) -> Any:
    """Llama 2's kind of tokenizer: ▁ for spaces, bytes for unknown letters, a decoder that drops a first space."""
    pieces = ["▁", "▁▁", "a", "b", "▁a", "▁ab", "ab", ".", "▁.", ",", "'s", "▁the", "é", "▁é", "▁\n"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [(piece, -float(i)) for i, piece in enumerate(vocabulary)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    last: list[Any] = {
        "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
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


def sentencepiece_ids(rng: random.Random, tokenizer: Any) -> list[int]:
    """Pieces, special tokens, and runs of byte tokens that are whole characters (the last one may be cut).

    Not more: a run of byte tokens that breaks after a whole character is decoded as broken from its start, and no
    stream can take back what it has shown.
    """
    ids: list[int] = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.3:
            ids += [3 + byte for byte in rng.choice("é€𝄞\nz").encode()]
        else:
            ids.append(rng.choice([1, 2, *range(259, len(tokenizer))]))
    if rng.random() < 0.3:
        ids += [rng.choice([262, 263]), *(3 + byte for byte in "𝄞".encode()[: rng.randint(1, 3)])]
    return ids


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_tokenizer_that_drops_a_first_space(kind: str) -> None:
    """The space is dropped at the start of the text and nowhere else."""
    tokenizer, rng = sentencepiece(kind), random.Random(0)
    spaced = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁the", "▁", "▁a", "b", "▁ab", "▁▁", "▁the")]
    assert check(tokenizer, spaced).text == "the  ab ab   the"
    leading = 0
    for i in range(1500):
        ids = sentencepiece_ids(rng, tokenizer)
        whole, stops = whole_text(tokenizer, ids), []
        if i % 2 and whole.strip("\ufffd"):
            start = rng.randrange(len(whole.rstrip("\ufffd")))
            stops = [s for s in (whole[start : start + rng.choice((1, 2, 5))],) if "\ufffd" not in s]
        check(tokenizer, ids, stops)
        leading += whole.startswith(" ")
    assert leading > 10


def force(llm: LLM, token_ids: list[int]) -> None:
    """Let the engine sample these tokens, one after the other, for every request."""
    forward = llm.engine_core.runner.forward
    lens: dict[int, int] = {}

    def forced(batch: Any) -> Any:
        out = forward(batch)
        for i in out.token_ids:
            lens[i] = lens.get(i, -1) + 1
        return replace(out, token_ids={i: (token_ids[lens[i]],) for i in out.token_ids})

    llm.engine_core.runner.forward = forced  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_generate_and_stream_say_the_same(kind: str, tmp_path: Path) -> None:
    """Also for a tokenizer whose own decode would tidy spaces up ("a ." to "a."), as the configs of some ask for."""
    tokenizer = sentencepiece(kind)
    save_checkpoint("llama", tmp_path, num_hidden_layers=1)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁.", "▁a", "▁", ",", "b", "▁", "'s", "▁.", "</s>", "▁a"])
    wanted = whole_text(tokenizer, ids)
    assert wanted == "the . a ,b 's . a"
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=8) as llm:
        force(llm, ids)
        assert llm.generate([5, 6], params)[0].text == wanted
        assert "".join(piece.text for piece in llm.stream([5, 6], params)) == wanted
        (out,) = llm.generate([5, 6], replace(params, stop="never"))
        assert out.text == wanted and out.token_ids == ids
        (out,) = llm.generate([5, 6], replace(params, stop=[",b", "'s", " a ,"]))
        assert (out.text, out.stop_reason, len(out.token_ids)) == ("the .", " a ,", 5)


def test_stop_string_that_the_last_token_hides() -> None:
    """The last token ends a stop string and begins a character: the text is cut there, so "stop" is why it ended."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=8) as llm:
        llm.processor.tokenizer = Chunks([b"so ", b"stop\xe2", b"\x82\xac", b" on"])
        force(llm, [0, 1, 2, 3])
        for max_tokens, n in ((1, 1), (2, 2), (3, 3), (4, 3)):
            params = SamplingParams(max_tokens=max_tokens, stop="stop", ignore_eos=True)
            (out,) = llm.generate([5], params)
            wanted = ("length", "max_tokens") if max_tokens == 1 else ("stop", "stop")
            assert (out.text, len(out.token_ids)) == ("so ", n)
            assert (out.finish_reason, out.stop_reason) == wanted
            pieces = list(llm.stream([5], params))
            assert "".join(p.text for p in pieces) == "so " and pieces[-1].finish_reason == wanted[0]
