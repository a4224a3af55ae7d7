"""What every step did and why: counted, recorded, checked, and shown on a page (chapter 30)."""

from __future__ import annotations

import gzip
import html
import json
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from ..block_manager import NO_HASH
from ..engine_core import EngineCore, StepOutput
from ..scheduler import ScheduledBatch
from ..sequence import Sequence, SequenceType
from ..text import decode


@dataclass
class Metrics:
    """Counts what an engine has done."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_saved_blocks: int = 0  # copied to the second pool
    num_loaded_blocks: int = 0  # copied back
    num_saved_states: int = 0  # copied to state checkpoints
    num_loaded_states: int = 0  # copied back

    def record(self, step: StepOutput) -> None:
        """Count a step. The seconds of a mixed step are shared out by its tokens."""
        self.num_steps += 1
        batch = step.batch
        self.num_saved_blocks += len(getattr(batch, "saves", ()))
        self.num_loaded_blocks += len(getattr(batch, "loads", ()))
        self.num_saved_states += len(getattr(batch, "state_saves", ()))
        self.num_loaded_states += len(getattr(batch, "state_loads", ()))
        if batch.type is SequenceType.DECODE:
            self.num_decode_tokens += sum(map(len, step.output.token_ids.values()))
            self.decode_seconds += step.seconds
            return
        prompts = batch.total_tokens_num - batch.num_decodes
        share = prompts / batch.total_tokens_num
        self.num_prefill_tokens += prompts
        self.num_decode_tokens += batch.num_decodes
        self.prefill_seconds += share * step.seconds
        self.decode_seconds += (1 - share) * step.seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.num_prefill_tokens / (self.prefill_seconds or 1)

    @property
    def decode_tokens_per_second(self) -> float:
        return self.num_decode_tokens / (self.decode_seconds or 1)

COLOURS = {
    "waiting": "#e6b43c70", "held": "#8090a066", "prefill": "#e4572e",
    "decode": "#4d9de0", "preempted": "#b5179e", "finished": "#2a9d5c",
}  # fmt: skip

Event = dict[str, Any]  # one change of one request


class BlockRecord(NamedTuple):
    """A block that holds piece number `piece` of the tokens of request `id`."""

    id: int
    piece: int
    owners: frozenset[int] = frozenset()
    hash: int = NO_HASH  # if it is in the prefix index


@dataclass
class StepRecord:
    """One step of the engine, with the state when it was scheduled. Times are in ms."""

    kind: str  # "prefill", "decode" or "mixed"
    tokens: dict[int, int]  # request -> tokens computed
    waiting: list[int]  # requests
    computed: dict[int, int]  # running request -> its tokens that have K/V
    pool: dict[str, int]  # number of blocks: used, cached (without an owner), free
    blocks: dict[int, BlockRecord]  # those that have changed since the step before
    events: list[Event]  # before the step
    start: float = 0.0  # since the recorder was made
    lead: float = 0.0  # from `start` to the runner
    device: float = 0.0  # in the runner
    host: float = 0.0  # the rest
    after: list[Event] = field(default_factory=list)  # after the step has run
    drafts: dict[int, int] = field(default_factory=dict)  # request -> number of drafts
    decodes: list[int] = field(default_factory=list)  # of a mixed step: its decodes
    error: str | None = None  # what the runner raised; the step was rolled back

    def why(self, id: int) -> str:
        """Why request `id` waits in this step."""
        first = self.waiting[0]
        why = "unknown"
        for event in self.events:
            if event["id"] == first and event["event"] in ("refused", "preempted"):
                why = event.get("why", "preempted: its blocks were taken in this step")
        return why if id == first else f"behind request {first}: {why}"

    def phases(self) -> dict[int, str]:
        """request -> a name in `COLOURS`; held: it has blocks and was not scheduled."""
        phases = dict.fromkeys(self.waiting, "waiting")
        phases |= dict.fromkeys(self.computed, "held")
        kind = "prefill" if self.kind == "mixed" else self.kind
        phases |= dict.fromkeys(self.tokens, kind) | dict.fromkeys(self.decodes, "decode")
        ends = [e for e in self.events + self.after if e["event"] in COLOURS]
        return phases | {e["id"]: e["event"] for e in ends}


@dataclass
class Trace:
    """The record of a run. It can be queried, saved, and played on a page."""

    scheduler: str
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    # id -> prompt (length), token_ids
    requests: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)
    steps: list[StepRecord] = field(default_factory=list, repr=False)
    tail: list[Event] = field(default_factory=list, repr=False)  # since the last step
    to_text: Callable[[int], str | None] | None = field(
        default=None, repr=False, compare=False
    )  # of a token id

    def waits(self, id: int) -> dict[int, str]:
        """step -> why request `id` waited in it."""
        steps = enumerate(self.steps)
        return {n: step.why(id) for n, step in steps if id in step.waiting}

    def to_json(self) -> str:
        """The run as JSON, with the texts of all tokens."""
        ids = {i for request in self.requests.values() for i in request["token_ids"]}
        words = {i: self.to_text(i) for i in sorted(ids)} if self.to_text else {}
        steps = [*map(vars, self.steps)]
        return json.dumps({**vars(self), "steps": steps, "to_text": words}, default=sorted)

    def verdicts(self, step: StepRecord) -> dict[int, list[int]]:
        """request with drafts -> its number of tokens of each of `VERDICTS`."""
        counts = {}
        for event in step.after:
            if event["event"] == "verified" and event["id"] in step.drafts:
                id, good = event["id"], event["accepted"]
                # new tokens: the end of the request may have cut them
                n = len(self.requests[id]["token_ids"]) - step.computed[id] - 1
                counts[id] = [min(good, n), int(good < n), event["rejected"]]
        return counts

    def _views(self) -> Iterator[dict[str, Any]]:
        """What the page shows of each step."""
        for step in self.steps:
            why = {id: step.why(id) for id in step.waiting[:1]}
            view = {"phases": step.phases(), "why": why, "running": [*step.computed]}
            yield vars(step) | view | {"verified": self.verdicts(step)}

    def to_html(self) -> str:
        """A self-contained page: the template `timeline.html` and the zipped run."""
        more = {"steps": [*self._views()], "colours": COLOURS, "verdicts": VERDICTS}
        text = json.dumps(json.loads(self.to_json()) | more, default=sorted)
        zipped = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
        template = files("atom_mini") / "trace" / "timeline.html"
        return template.read_text("utf-8").replace("/*DATA*/", zipped)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html` to a file."""
        Path(path).write_text(self.to_html(), "utf-8")

    def _repr_html_(self) -> str:
        style = "width:100%;height:640px;border:1px solid #8884;border-radius:6px"
        page = html.escape(self.to_html())
        return f'<iframe title="{self!r}" style="{style}" srcdoc="{page}"></iframe>'

# request -> its blocks, and all blocks that were ever used
Snapshot = tuple[dict[int, list[int]], dict[int, BlockRecord]]


class Recorder:
    """Writes a `Trace` of what `core` does from now on. Its queues must be empty."""

    def __init__(self, core: EngineCore) -> None:
        self.scheduler = core.scheduler
        self.manager = core.scheduler.block_manager
        self.zero = self.start = time.perf_counter()
        blocks, size = len(self.manager.pool.blocks), self.manager.block_size
        self.trace = Trace(type(self.scheduler).__name__, blocks, size, core.config.max_num_batched_tokens)
        self.snapshot: Snapshot = {}, {}  # of the last step that was written
        # each step under way, when it was handed to the runner, and its snapshot
        self.under_way: list[tuple[StepRecord, float, Snapshot]] = []  # two at most
        self.returned = 0.0  # when the runner last returned
        self.has_run = False  # a step has run and is not written yet

    def _why(self, seq: Sequence, left: int, reserve: int) -> str:
        """Why `seq`, first in the queue, waits, with `left` tokens of the step's budget."""
        running, free = len(self.scheduler.running), self.manager.num_free_blocks
        if left and running >= (limit := self.scheduler.config.max_num_seqs):
            return f"max_num_seqs: {running} sequences run, and the limit is {limit}"
        needed = self.manager.num_needed(seq, self.manager.find(seq))
        if left and free < needed + reserve:
            need = f"{needed} are needed, and {reserve} are reserved for running sequences"
            return f"no blocks: {free} are free, {need}"
        return f"token budget: {left} tokens are left, too few for a chunk"

    def note(self, event: str, seq: Sequence, **facts: Any) -> None:
        """The scheduler's hook: `event` has happened to `seq`."""
        if event == "added":
            self.trace.requests[seq.id] = {"prompt": seq.num_prompt_tokens, "token_ids": seq.token_ids}
        elif event == "admitted":
            facts["cached"] = seq.num_published_blocks
        elif event == "refused" and "why" not in facts:
            facts = {"why": self._why(seq, **facts)}
        self.trace.tail.append({"event": event, "id": seq.id, **facts})

    def _changes(self, before: Snapshot) -> tuple[Snapshot, dict[int, BlockRecord]]:
        """The present tables and blocks, and the blocks that differ from those `before`."""
        old_tables, blocks = before[0], dict(before[1])
        tables = {seq.id: seq.block_table for seq in self.scheduler.running}
        for id in {*old_tables, *tables}:
            old, new = old_tables.get(id, []), tables.get(id, [])
            if old == new:
                continue
            for number in old:
                owners = blocks[number].owners - {id}
                blocks[number] = blocks[number]._replace(owners=owners)
            for piece, number in enumerate(new):
                owners = blocks[number].owners if number in blocks else frozenset()
                blocks[number] = BlockRecord(id, piece, owners | {id})
        changed = {}
        for number, block in blocks.items():
            if block.hash != (hash := self.manager.pool.blocks[number].hash):
                blocks[number] = block = block._replace(hash=hash)
            if block != before[1].get(number):
                changed[number] = block
        return ({id: table[:] for id, table in tables.items()}, blocks), changed

    def scheduled(self, batch: ScheduledBatch) -> None:
        """The runner gets `batch`."""
        when, lead = round(1e3 * (self.start - self.zero), 3), _ms_since(self.start)
        kind = batch.type.name.lower()
        counts = batch.num_scheduled_tokens.tolist()
        tokens = dict(zip(batch.req_ids, counts, strict=True))
        waiting = [seq.id for seq in self.scheduler.waiting]
        computed = {seq.id: seq.num_computed_tokens for seq in self.scheduler.running}
        before = self.under_way[-1][2] if self.under_way else self.snapshot
        snapshot, changed = self._changes(before)
        free, total = self.manager.num_free_blocks, self.trace.num_blocks
        cached = sum(not b.owners and b.hash != NO_HASH for b in snapshot[1].values())
        pool = {"used": total - free, "cached": cached, "free": free - cached}
        state = (waiting, computed, pool, changed)
        events = self.trace.tail
        step = StepRecord(kind, tokens, *state, events, when, lead)
        if kind == "decode":  # one token each, and perhaps drafts: chapter 50
            step.drafts = {id: n - 1 for id, n in tokens.items() if n > 1}
        if kind == "mixed":
            step.decodes = [*compress(batch.req_ids, batch.is_decode)]
        self.under_way.append((step, time.perf_counter(), snapshot))
        self.trace.tail = []  # now: an interrupt before this line loses no event

    def ran(self) -> None:
        """The runner has returned."""
        step, called, _ = self.under_way[0]
        step.device = _ms_since(max(called, self.returned))
        self.returned = time.perf_counter()
        self.has_run = True

    def _write(self, error: BaseException | None = None) -> None:
        """Write the oldest step that is under way."""
        step, _, self.snapshot = self.under_way[0]
        step.host = round(step.lead + _ms_since(self.returned), 3)
        step.error = type(error).__name__ if error else None
        self.has_run = False
        self.trace.steps.append(self.under_way.pop(0)[0])

    def ended(self) -> None:
        """A transaction has ended; if it ran a step, write that."""
        if self.has_run:
            newest, *_ = self.under_way[-1]
            # on one line: an interrupt in between would record these events twice
            newest.after, self.trace.tail = newest.after + self.trace.tail, []
            self._write()

    def rolled_back(self, error: BaseException | None) -> None:
        """All steps under way are void."""
        if self.under_way and self.under_way[-1][0].events is self.trace.tail:
            self.trace.tail = []
        while self.under_way:
            self.ran()
            self._write(error)
        waiting = [seq.id for seq in self.scheduler.waiting]
        self.trace.tail.append({"event": "rolled back", "id": None, "waiting": waiting})

    def note_core(self, event: str, batch: ScheduledBatch | None = None) -> None:
        """The core's hook; see `EngineCore.note`."""
        if event == "begin":
            self.start = time.perf_counter()
        elif event == "run" and batch is not None:
            self.scheduled(batch)
        elif event == "ran":
            self.ran()
        elif event == "end":
            self.ended()
        elif event == "rollback":
            self.rolled_back(sys.exc_info()[1])


def _ms_since(start: float) -> float:
    return round(1e3 * (time.perf_counter() - start), 3)


def record(core: EngineCore, tokenizer: Any = None) -> Trace:
    """Record what `core`, whose queues are empty, does from now on."""
    recorder = Recorder(core)
    core.scheduler.note = recorder.note  # type: ignore[method-assign]
    core.note = recorder.note_core  # type: ignore[method-assign]
    if tokenizer is not None:
        recorder.trace.to_text = lambda token_id: decode(tokenizer, [token_id])
    return recorder.trace

VERDICTS = {"accepted": "#2f6db3", "bonus": "#8fc7f0", "rejected": "#e3a9b8"}
