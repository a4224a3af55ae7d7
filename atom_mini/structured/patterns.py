"""The patterns inside a form, and how long they are with all repetitions written out (chapter 21).

The library reads a pattern when an answer reaches it. One that is too large would end its request there, so it is
refused when the form is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..checkpoint import JsonObject
from .keywords import all_schemas

MOST_WRITTEN_OUT = 100_000  # characters of a pattern
MOST_IGNORED = 10_000  # of all patterns where one may be ignored: the library reads that one late, and then gives up
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{(\d*),?(\d*)\}|.", re.DOTALL)
# what holds other characters
LARK = re.compile(r"""(?://|\#)[^\n]*|"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\])+)/?|(%json)\s*|(%ignore)\b""")


def written_out(pattern: str) -> int:
    """The characters of a pattern whose repetitions are written out: 6 for `(a{2}b){2}`."""
    groups = [[0, 0]]  # the open ones: [characters, those of the last piece]
    for piece in PIECE.finditer(pattern):
        text, count = piece[0], piece[2] or piece[1]
        if count:
            size, last = groups[-1]
            more = last * (max(int(count[:9]), 1) - 1)
            groups[-1] = [size + more, min(last + more, 10**9)]
        elif text == "(":
            groups.append([0, 0])
        elif text == ")" and len(groups) > 1:
            size = groups.pop()[0]
            groups[-1] = [groups[-1][0] + size, size]
        elif text not in "?*+":
            groups[-1] = [groups[-1][0] + 1, 1]
    return sum(size for size, _ in groups)


def check_pattern(pattern: object) -> None:
    """ValueError for a pattern that is too large."""
    if isinstance(pattern, str):
        size = written_out(pattern)
        if size > MOST_WRITTEN_OUT:
            raise ValueError(
                f"the pattern {pattern!r:.100} has {float(size):.3g} characters when its repetitions "
                f"are written out: {MOST_WRITTEN_OUT} are the most"
            )


def schema_patterns(schema: JsonObject) -> Iterator[object]:
    """The patterns of texts and of names, in a schema and in all schemas inside of it."""
    for one in all_schemas(schema):
        names = one.get("patternProperties")
        yield from (one.get("pattern"), *(names if isinstance(names, dict) else ()))


def lark_parts(grammar: str) -> Iterator[tuple[str | None, JsonObject]]:
    """(a pattern between slashes, {}) and (None, a schema after %json); not those in comments, texts, and schemas."""
    end = 0
    decoder = json.JSONDecoder()
    while part := LARK.search(grammar, end):
        end = part.end()
        if part[1]:
            yield part[1], {}
        if part[2]:
            try:
                schema, end = decoder.raw_decode(grammar, end)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"the grammar has no JSON after %json at character {end}: {error!s:.100}: write a schema there"
                ) from None
            if isinstance(schema, dict):
                yield None, schema


def lark_patterns(grammar: str) -> list[str]:
    """The patterns between slashes in a grammar."""
    return [pattern for pattern, _ in lark_parts(grammar) if pattern is not None]


def check_ignored(grammar: str) -> None:
    """ValueError for a grammar with %ignore whose patterns are too large together: any of them may be ignored."""
    if any(part[3] for part in LARK.finditer(grammar)):
        size = sum(map(written_out, lark_patterns(grammar)))
        if size > MOST_IGNORED:
            raise ValueError(
                f"the patterns of a grammar with %ignore have {float(size):.3g} characters when their repetitions "
                f"are written out: {MOST_IGNORED} are the most"
            )


def lark_schemas(grammar: str) -> list[JsonObject]:
    """The schemas in a grammar, each after %json."""
    return [schema for pattern, schema in lark_parts(grammar) if pattern is None]
