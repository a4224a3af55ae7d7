"""Which tokens may come next: a mask for each state of a grammar (chapter 21).

What decides is the grammar and the tokens so far, and nothing else. A draft that is refused, a step that fails, a
request that starts again after a preemption: none of them has anything to undo here.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

LAST = 32  # states of an answer that are kept: more than a step has drafts
MOST_BYTES = 2**29  # of the kept states of all answers together, about
BYTES_OF_TOKEN, BYTES_OF_STATE = 140, 8000  # of a state: the library's copy of a parser, and the tokens


class State(NamedTuple):
    """A grammar after some tokens. Nobody changes it."""

    matcher: LLMatcher
    mask: np.ndarray  # a bit for each token, uint8 [W]: those that may come next


def state_of(matcher: LLMatcher, ends: np.ndarray, known: np.ndarray) -> State:
    """The state of a matcher. Its mask is empty if the library gives up, or if no token continues the text."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8) & known
    is_stuck = matcher.is_error() or not ((mask & ~ends).any() or matcher.is_accepting())
    return State(matcher, np.zeros_like(mask) if is_stuck else mask)


Key = tuple["Masks", tuple[int, ...]]


class Kept:
    """The newest states of all answers: the last few of each, and no more bytes than MOST_BYTES."""

    def __init__(self) -> None:
        self.states: OrderedDict[Key, State | None] = OrderedDict()  # the newest last
        self.num_bytes = 0

    def clear(self) -> None:
        """Forget all of them."""
        self.states.clear()
        self.num_bytes = 0

    def put(self, key: Key, state: State | None) -> None:
        """Keep a state. The one that is LAST tokens shorter goes, and the oldest if there are too many bytes."""
        masks, tokens = key
        if key not in self.states:
            self.num_bytes += bytes_of(key, state)
            self.drop((masks, tokens[:-LAST]))
        self.states[key] = state
        self.states.move_to_end(key)
        while self.num_bytes > MOST_BYTES and len(self.states) > 1:
            self.drop(next(iter(self.states)))

    def drop(self, key: Key) -> None:
        """Forget a state, if it is kept."""
        if key in self.states:
            self.num_bytes -= bytes_of(key, self.states.pop(key))


def bytes_of(key: Key, state: State | None) -> int:
    """About how many bytes a state has."""
    return BYTES_OF_STATE + BYTES_OF_TOKEN * len(key[1]) + (0 if state is None else state.mask.nbytes)


class Masks:
    """The masks of one grammar. A state is made from the state one token before, which is kept for a while."""

    kept: ClassVar = Kept()
    lock = RLock()  # the kept states are those of all grammars

    def __init__(self, start: LLMatcher, ends: np.ndarray, known: np.ndarray) -> None:
        self.ends = ends  # the tokens that end a text, as a mask
        self.known = known  # the tokens that have a logit: a tokenizer may have more
        self.start = state_of(start, ends, known)

    def _state(self, tokens: tuple[int, ...]) -> State | None:
        """The state after `tokens`; None if the grammar does not accept them."""
        if not tokens:
            return self.start
        states = self.kept.states
        if (self, tokens) in states:
            return states[self, tokens]
        is_known = (self, tokens[:-1]) in states
        before = states[self, tokens[:-1]] if is_known else self.start
        if before is None:
            return None
        matcher = before.matcher.deep_copy()
        new = tokens[-1:] if is_known else tokens
        is_accepted = matcher.try_consume_tokens([*new]) == len(new) or matcher.is_error()
        return state_of(matcher, self.ends, self.known) if is_accepted else None

    def second(self) -> State:
        """A state after one token, or the first one if the text may end there only."""
        first = np.flatnonzero(np.unpackbits(self.start.mask & ~self.ends, bitorder="little"))
        with self.lock:
            return self._state((int(first[0]),)) or self.start if len(first) else self.start

    def after(self, tokens: tuple[int, ...]) -> np.ndarray | None:
        """The mask after `tokens`; None if the grammar does not accept them."""
        with self.lock:
            state = self._state(tokens)
            self.kept.put((self, tokens), state)
        return None if state is None else state.mask
