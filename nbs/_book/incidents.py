"""Four tickets for chapter 14: real runs of an engine with a planted fault. Do not read on before you have solved them.

A ticket's `log` prints what an operator would see. `part` is the class (or function) in production, with the fault. `check`
runs the reader's own in its place, on the same load, and says what is still wrong.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from atom_mini import SamplingParams, small
from atom_mini.text import IncrementalDetokenizer

Guard = Callable[[Any], bool]


class Run(NamedTuple):
    """How a load went: a row of the log for each request, and whether each call of the guard was content."""

    rows: list[tuple]
    guarded: list[bool]
    facts: dict[str, Any] = {}  # noqa: RUF012  never changed


class Ticket:
    """A symptom whose cause is planted."""

    part: Any
    wrong_cause = ""

    def run(self, part: Any, guard: Guard) -> Run:
        raise NotImplementedError

    def causes(self, broken: Run) -> set[int]:
        """The numbers that prove the cause."""
        raise NotImplementedError

    def symptom(self, mended: Run) -> str:
        """What is still wrong; empty if nothing is."""
        raise NotImplementedError

    def check(self, cause: int | None, part: Any, guard: Guard) -> None:
        """AssertionError if the cause is not proved, the symptom is still there, or the guard does not do its work."""
        assert cause is not None, "no cause is named"
        broken = self.run(self.part, guard)
        assert cause in self.causes(broken), f"cause={cause}: {self.wrong_cause}"
        try:
            mended = self.run(part, guard)
        except (ValueError, KeyError, IndexError) as error:  # what an engine raises when its books are wrong
            raise AssertionError(f"with your code the engine breaks: {type(error).__name__}") from error
        still = self.symptom(mended)
        assert not still, still
        assert all(mended.guarded), "the guard raises an alarm although nothing is wrong"
        assert not all(broken.guarded), "the guard does not notice the fault"
        print("closed: the cause is proved, the symptom is gone, and the guard would have noticed it")


def no_guard(_: Any) -> bool:
    return True


# 1. A block is handed out again, and its old content stays known.


class StaleManager(small.BlockManager):
    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.ref_counts[block] = 1
        return block


CUSTOMERS = {
    "A": ("Ada lives in Rome. Ben likes plums. Mia has a red cat.",
          ["What does Mia have?", "Where does Ada live?", "What does Ben like?"]),
    "B": ("Hugo has a blue kite. Cara lives in Oslo. Sam likes pears.",
          ["What does Hugo have?", "Where does Cara live?", "What does Sam like?"]),
    "C": ("Rosa likes tea. Otto has a green hat. Zara lives in Lima.",
          ["What does Otto have?", "Where does Zara live?", "What does Rosa like?"]),
    "D": ("Leo has a pink bear. Nina lives in Cairo. Max likes figs.",
          ["What does Leo have?", "Where does Nina live?", "What does Max like?"]),
}  # fmt: skip
DAY = "ABABCABDACBD"


class Afternoon(Ticket):
    """Rows: customer, blocks found, blocks taken, answer."""

    part = StaleManager
    wrong_cause = "no request found this block after another customer had taken it"

    def run(self, part: Any, guard: Guard) -> Run:
        class Engine(small.LLM):
            block_manager_cls = part

        llm = Engine("tiny", num_kvcache_blocks=24, kv_cache_block_size=4)
        manager, rows, guarded = llm.scheduler.block_manager, [], []
        params = small.SamplingParams(temperature=0, max_tokens=12)
        for i, customer in enumerate(DAY):
            facts, questions = CUSTOMERS[customer]
            (seq,) = llm.add_requests(f"{facts} {questions[DAY[:i].count(customer) % 3]}", params)
            found, table = manager.find(seq), []
            while llm.step():
                table = seq.block_table or table
                guarded.append(bool(guard(manager)))
            rows.append((customer, found, table[len(found) :], llm.output(0, seq).text))
        return Run(rows, guarded)

    def log(self) -> None:
        right = self.run(small.BlockManager, no_guard).rows
        for i, (row, ours) in enumerate(zip(self.run(self.part, no_guard).rows, right, strict=True)):
            customer, found, taken, text = row
            verdict = "" if text == ours[-1] else "  <- not what the test server says"
            print(f"{i:2} {customer} found {found!s:16} took {taken!s:31} {text[:21]!r}{verdict}")

    def causes(self, broken: Run) -> set[int]:
        owner: dict[int, str] = {}  # who filled a block last
        stale: set[int] = set()
        for customer, found, taken, _ in broken.rows:
            stale |= {block for block in found if owner[block] != customer}
            owner |= dict.fromkeys(taken, customer)
        return stale

    def symptom(self, mended: Run) -> str:
        right = self.run(small.BlockManager, no_guard).rows
        wrong = [i for i, row in enumerate(mended.rows) if row[-1] != right[i][-1]]
        if wrong:
            return f"the answers of the requests {wrong} are still wrong"
        lost = sum(len(row[1]) for row in mended.rows) < sum(len(row[1]) for row in right)
        return "the answers are right, but fewer known blocks are found than before" if lost else ""


# 2. Short prompts first, and nothing else.


class ShortestFirst(small.Scheduler):
    step = 0

    def rank(self, seq: small.Sequence, waited: int) -> float:
        return seq.num_prompt_tokens

    def schedule_prefill(self) -> list[small.Sequence]:
        self.step += 1

        def key(seq: Any) -> tuple:
            return not seq.block_table, self.rank(seq, self.step - seq.arrival)

        self.waiting = deque(sorted(self.waiting, key=key))
        return super().schedule_prefill()


class InOrder(ShortestFirst):
    def rank(self, seq: small.Sequence, waited: int) -> float:
        return -waited


class LongestWait(Ticket):
    """Rows: arrival, prompt tokens, step of the first token."""

    part, limit = ShortestFirst, 80
    wrong_cause = "count the requests that came later than the slowest one, and got their first token earlier"

    def run(self, part: Any, guard: Guard) -> Run:
        rng = random.Random(9)
        scheduler, seqs, first, guarded, step = part(small.BlockManager(36, 8), (), 6, 64, 289), [], {}, [], 0
        arrivals = [int(6.2 * i) for i in range(60)]
        while len(seqs) < len(arrivals) or not all(seq.finish_reason for seq in seqs):
            while len(seqs) < len(arrivals) and arrivals[len(seqs)] <= step:
                num = rng.choice([120, 160]) if len(seqs) % 12 == 7 else rng.randint(8, 48)
                seq: Any = small.Sequence([1 + len(seqs)] * num, num, small.SamplingParams(max_tokens=rng.randint(16, 40)))
                seq.arrival = step
                seqs.append(seq)
                scheduler.waiting.append(seq)
            ran = scheduler.schedule()
            scheduler.postprocess(ran, [0] * len(ran))
            first |= {i: step for i, seq in enumerate(seqs) if len(seq) > seq.num_prompt_tokens and i not in first}
            guarded.append(bool(guard([step - seq.arrival for i, seq in enumerate(seqs) if i not in first])))
            step += 1
            assert step < 2000, "the engine stands still"
        return Run([(arrivals[i], seq.num_prompt_tokens, first[i]) for i, seq in enumerate(seqs)], guarded)

    def waits(self, run: Run) -> list[int]:
        return [first - arrival for arrival, _, first in run.rows]

    def log(self) -> list[tuple]:
        broken = self.run(self.part, no_guard)
        old, new = self.waits(self.run(InOrder, no_guard)), self.waits(broken)
        for name, waits in (("before the release", old), ("with the release", new)):
            print(f"{name:18} mean wait {sum(waits) / len(waits):4.1f} steps, longest {max(waits):3}")
        slowest = new.index(max(new))
        print(f"request {slowest}: (arrival, prompt tokens, step of the first token) = {broken.rows[slowest]}")
        return broken.rows

    def causes(self, broken: Run) -> set[int]:
        waits = self.waits(broken)
        arrival, _, first = broken.rows[waits.index(max(waits))]
        return {sum(row[0] > arrival and row[2] < first for row in broken.rows)}

    def symptom(self, mended: Run) -> str:
        ours, old = self.waits(mended), self.waits(self.run(InOrder, no_guard))
        if max(ours) > self.limit:
            return f"one request still waits {max(ours)} steps; the customer gives up after {self.limit}"
        mean, before = sum(ours) / len(ours), sum(old) / len(old)
        return f"the mean wait is {mean:.1f} again, and it was {before:.1f} before the release" if mean > 0.9 * before else ""


# 3. An abort forgets the blocks of a prompt that is computed in part.


class LeakyAbort(small.Scheduler):
    def abort(self, seq: small.Sequence) -> None:
        seq.finish_reason = "abort"
        if seq in self.running:
            self.running.remove(seq)
            self.block_manager.deallocate(seq)
        else:
            self.waiting.remove(seq)


LEAVERS = {7: "answer", 12: "queue", 22: "prompt", 40: "answer", 47: "queue", 58: "prompt", 77: "answer", 86: "prompt", 99: "queue"}


class Slower(Ticket):
    """Rows: request, prompt tokens, computed tokens, free blocks before and after its abort."""

    part, num_blocks = LeakyAbort, 48
    wrong_cause = "when this request left, no block was lost"

    def run(self, part: Any, guard: Guard) -> Run:
        rng = random.Random(1)
        scheduler, rows, guarded, sizes = part(small.BlockManager(self.num_blocks, 8), (), 16, 24, 385), [], [], []
        manager, seqs = scheduler.block_manager, [self.request(rng, i) for i in range(120)]
        while not all(seq.finish_reason for seq in seqs):
            for seq in seqs[4 * len(sizes) : 4 * len(sizes) + 4]:
                scheduler.waiting.append(seq)
            for i in [i for i in LEAVERS if seqs[i] in self.about_to_leave(scheduler, i)]:
                computed, before = seqs[i].num_computed_tokens, len(manager.free)
                scheduler.abort(seqs[i])
                rows.append((i, seqs[i].num_prompt_tokens, computed, before, len(manager.free)))
            ran = scheduler.schedule()
            sizes.append(sum(seq.context_len - seq.num_computed_tokens for seq in ran))
            scheduler.postprocess(ran, [0] * len(ran))
            guarded.append(bool(guard(scheduler)))
            assert len(sizes) < 3000, "the engine stands still"
        went_on = [i for i in LEAVERS if seqs[i].finish_reason != "abort"]
        return Run(rows, guarded, {"sizes": sizes, "free": len(manager.free), "went on": went_on})

    def request(self, rng: random.Random, i: int) -> small.Sequence:
        num = 64 if LEAVERS.get(i) == "prompt" else rng.choice([12, 16, 24, 40])
        return small.Sequence([1 + i] * num, num, small.SamplingParams(max_tokens=rng.randint(8, 24)))

    def about_to_leave(self, scheduler: Any, i: int) -> list[small.Sequence]:
        """The sequences that are where the user of request `i` loses patience."""
        if LEAVERS[i] == "answer":
            return [seq for seq in scheduler.running if len(seq) > seq.num_prompt_tokens + 4]
        return [seq for seq in scheduler.waiting if bool(seq.num_computed_tokens) == (LEAVERS[i] == "prompt")]

    def log(self) -> None:
        run = self.run(self.part, no_guard)
        sizes = run.facts["sizes"]
        print(f"{len(sizes)} steps; tokens per step:", end=" ")
        print(*(f"{sum(part) / len(part):.1f}" for at in range(0, len(sizes), 50) if (part := sizes[at : at + 50])))
        print(f"at the end all requests are gone, and {run.facts['free']} of {self.num_blocks} blocks are free")
        for row in run.rows:
            print("user of request {:3} left: prompt {:2}, computed {:2}, free blocks {:2} -> {:2}".format(*row))

    def causes(self, broken: Run) -> set[int]:
        return {i for i, _, computed, before, after in broken.rows if computed and after == before}

    def symptom(self, mended: Run) -> str:
        facts = mended.facts
        if facts["went on"]:
            return f"the requests {facts['went on']} were computed to their ends, for users who had left"
        is_all = facts["free"] == self.num_blocks
        return "" if is_all else f"at the end {facts['free']} of {self.num_blocks} blocks are free"


# 4. A stream keeps back what could begin a stop string, even when nothing can follow.


def cut_short(text: str, stop: tuple[str, ...], is_done: bool) -> int:
    return max(0, len(text) - max(map(len, stop), default=1) + 1)


@contextmanager
def showing(shown: Callable[[str, tuple[str, ...], bool], int]) -> Iterator[None]:
    """Streams show as many characters as `shown` says."""

    def num_shown(self: IncrementalDetokenizer) -> int:
        progress = self.progress
        return shown(self._part(0, progress.size), self.stop, progress.is_done)

    ours = IncrementalDetokenizer.num_shown
    IncrementalDetokenizer.num_shown = num_shown  # type: ignore[method-assign]
    try:
        yield
    finally:
        IncrementalDetokenizer.num_shown = ours  # type: ignore[method-assign]


class EndsMissing(Ticket):
    """Rows: stop string, tokens, the whole text, the pieces of the stream."""

    part = staticmethod(cut_short)
    wrong_cause = "compare the letters that are missing with the letters of each stop string"
    stops = ("", "###", "\nUser:", " One day", " Dublin. He went")

    def __init__(self) -> None:
        self.llm: Any = None

    def run(self, part: Any, guard: Guard) -> Run:
        rows, guarded = [], []
        with showing(part):
            for stop in self.stops:
                params = SamplingParams(temperature=0, max_tokens=30, stop=(stop,) if stop else ())
                *_, last = pieces = [*self.llm.stream("Once upon a time", params)]
                texts = [piece.text for piece in pieces]
                rows.append((stop, len(last.output.token_ids), last.output.text, texts))
                guarded.append(bool(guard((texts, last.output.text))))
        return Run(rows, guarded)

    def log(self, llm: Any) -> None:
        self.llm = llm
        for stop, num, text, pieces in self.run(self.part, no_guard).rows:
            got = "".join(pieces)
            print(f"stop {stop!r:18} {num} tokens, {len(text):3} letters; "
                  f"the stream had {len(got):3}, at the end {got[-12:]!r}")  # fmt: skip

    def causes(self, broken: Run) -> set[int]:
        return {len("<|im_end|>") - 1}

    def symptom(self, mended: Run) -> str:
        for stop, _, text, pieces in mended.rows:
            got = "".join(pieces)
            if got != text:
                return f"with stop={stop!r} the stream had {len(got)} letters of {len(text)}"
            if len(pieces) < 6:
                return f"with stop={stop!r} the stream had only {len(pieces)} pieces: text must appear as it arrives"
        return ""


afternoon, longest_wait, slower, ends_missing = Afternoon(), LongestWait(), Slower(), EndsMissing()
