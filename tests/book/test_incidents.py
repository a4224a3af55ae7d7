"""Each ticket of chapter 14 names what is wrong with an answer: the cause, the mended part, or the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import book
import incidents
import pytest
from incidents import afternoon, ends_missing, longest_wait, no_guard, slower
from places import path_of

from atom_mini import LLM, small

NAMES = {"afternoon": "Manager", "longest_wait": "Fair", "slower": "Tidy", "ends_missing": "shown"}


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, tuple]]:
    """Ticket -> its cause, part, and guard in the chapter's solutions."""
    exercises, found = book.exercises(path_of("14_survives"))[-len(NAMES) :], {}
    with LLM("tiny", device="cpu", num_kvcache_blocks=32) as llm:
        ends_missing.log(llm)
        for (ticket, part), cells in zip(NAMES.items(), exercises, strict=True):
            assert f"{ticket}.check(cause, {part}, guard)" in cells["check"]
            scope: dict[str, Any] = dict(vars(incidents)) | {"rows": longest_wait.run(longest_wait.part, no_guard).rows}
            exec(cells["solution"], scope)
            found[ticket] = (scope["cause"], scope[part], scope["guard"])
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_the_model_answer_closes_a_ticket_and_less_does_not(
    name: str, answers: dict[str, tuple], capsys: pytest.CaptureFixture[str]
) -> None:
    ticket, (cause, part, guard) = getattr(incidents, name), answers[name]
    ticket.check(cause, part, guard)
    assert "closed" in capsys.readouterr().out
    faults: list[tuple[tuple, str]] = [
        ((None, part, guard), "no cause is named"),
        ((cause + 1000, part, guard), f"cause={cause + 1000}: "),
        ((cause, part, no_guard), "does not notice"),
        ((cause, part, lambda _: False), "although nothing is wrong"),
    ]
    for wrong, says in faults:
        with pytest.raises(AssertionError, match=says):
            ticket.check(*wrong)
    with pytest.raises(AssertionError, match=r"wrong|waits|free|letters"):
        ticket.check(cause, ticket.part, guard)


class Forgetful(small.BlockManager):
    """Right, but it shares nothing."""

    def find(self, seq: small.Sequence) -> list[int]:
        return []


class GoesOn(incidents.LeakyAbort):
    """Removes a sequence only while it waits."""

    def abort(self, seq: small.Sequence) -> None:
        seq.finish_reason = "abort"
        if seq in self.waiting:
            self.waiting.remove(seq)
            self.block_manager.deallocate(seq)


class StillQueued(incidents.LeakyAbort):
    """Gives the blocks back, and leaves the sequence where it is."""

    def abort(self, seq: small.Sequence) -> None:
        seq.finish_reason = "abort"
        self.block_manager.deallocate(seq)


def all_at_the_end(text: str, stop: tuple[str, ...], is_done: bool) -> int:
    return len(text) if is_done else 0


def everything(text: str, stop: tuple[str, ...], is_done: bool) -> int:
    return len(text)


@pytest.mark.parametrize(
    ("ticket", "part", "says"),
    [
        (afternoon, Forgetful, "fewer known blocks"),
        (longest_wait, incidents.InOrder, "the mean wait is 20.1 again"),
        (slower, GoesOn, "for users who had left"),
        (slower, StillQueued, "the engine breaks: ValueError"),
        (ends_missing, all_at_the_end, "as it arrives"),
        (ends_missing, everything, "the stream had"),
    ],
)
def test_a_repair_that_breaks_something_else_is_named(
    ticket: incidents.Ticket, part: Callable, says: str, answers: dict[str, tuple]
) -> None:
    cause, _, guard = next(answer for name, answer in answers.items() if getattr(incidents, name) is ticket)
    with pytest.raises(AssertionError, match=says):
        ticket.check(cause, part, guard)
