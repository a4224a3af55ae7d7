"""The engine core for engines in other processes (chapter 70)."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import ChainMap, Counter
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import cast

from ..engine_core import CLOSED, StepOutput
from ..errors import require
from ..fields import EngineFields, Recipe
from ..scheduler import BaseScheduler, ScheduledBatch, ScheduledBatchOutput
from ..scheduling.overlap import OverlapScheduler
from ..sequence import Sequence, SequenceStatus
from .engine_process import Abort, Add, Output, Row, encode, pack_params
from .manager import CoreManager, close_all, meeting_place


class EngineCoreClient:
    """An engine core whose scheduler and runner are in one or several other processes.

    `recipes`: one for each process. Raises ValueError like an engine when it is made,
    and EngineDead once a process has died.
    """

    manager_type: type[CoreManager] = CoreManager

    def __init__(self, config: EngineFields, recipes: list[Recipe] | None = None) -> None:
        self.config = config
        self.bell = SimpleQueue[None]()
        self.engines: list[CoreManager] = []
        self.end = weakref.finalize(self, close_all, self.engines)
        with meeting_place() as meeting:
            try:
                self._start(recipes or [config.recipe], meeting)
            except BaseException:
                self.end()
                raise
        sizes = [engine.ready for engine in self.engines if engine.ready]
        least = min(sizes, key=lambda ready: ready.max_len)
        self.config = config.changed(num_kvcache_blocks=least.num_kvcache_blocks)
        kind = OverlapScheduler if config.overlap else BaseScheduler
        self.scheduler: BaseScheduler = kind(self.config)  # for its checks
        self.scheduler.max_len = least.max_len
        self.scheduler.seqs = cast(dict[int, Sequence], self.seqs)  # only read

    def __repr__(self) -> str:
        ready = self.engines[0].ready
        return f"{type(self).__name__}({len(self.engines)} x {ready and ready.core})"

    def _start(self, recipes: list[Recipe], meeting: str) -> None:
        """Start the processes, and wait until all are ready. EngineDead or ValueError if one fails."""
        for number, recipe in enumerate(recipes):
            recipe = recipe | {"meeting": meeting}
            engine = self.manager_type(number, recipe, self.config, self.bell)
            self.engines.append(engine)
        self.seqs = ChainMap(*(engine.seqs for engine in self.engines))
        for engine in self.engines:
            engine.start()
        while not all(engine.ready for engine in self.engines):
            EngineCoreClient.check_alive(self)
            self.wait()

    def wait(self) -> None:
        """Wait until the bell rings, a second at most."""
        with suppress(Empty):
            self.bell.get(timeout=1)

    def check_alive(self) -> None:
        """Raise EngineDead if a process has died; ValueError if one refused its options."""
        for engine in self.engines:
            engine.check_alive()

    def check_open(self) -> None:
        """ValueError if it is closed."""
        require(self.end.alive, CLOSED)

    def is_finished(self) -> bool:
        return not self.seqs

    def metrics(self) -> dict[str, int | float]:
        """The counts of all engines, added up."""
        self.check_open()
        self.check_alive()
        found = [engine.ask() for engine in self.engines]
        return {name: sum(values[name] for values in found) for name in found[0]}

    def choose(self, seq: Sequence) -> CoreManager:
        """The engine that gets the request."""
        return self.engines[0]

    def add(self, seq: Sequence) -> None:
        """Send a sequence to an engine; ValueError if it can never run."""
        self.scheduler.check(seq)
        self.check_open()
        self.check_alive()
        frame = encode(Add(seq.id, seq.token_ids, pack_params(seq.sampling_params)))  # before anything changes
        engine = self.choose(seq)
        engine.seqs[seq.id] = seq
        engine.send(frame)

    def abort(self, request_id: int, why: str = "abort") -> Sequence | None:
        """End a request, with `why` as its `leave_reason`; None if it is unknown."""
        if seq := self.seqs.get(request_id):
            seq.leave_reason = why
            self._finish(seq, time.perf_counter())
        return seq

    def _finish(self, seq: Sequence, now: float) -> None:
        """Remove the request here and in its engine."""
        engine = next(engine for engine in self.engines if seq.id in engine.seqs)
        engine.send(Abort(seq.id))
        seq.status, seq.leave_time = SequenceStatus.FINISHED, now
        del engine.seqs[seq.id]

    def take(self, seq: Sequence, row: Row) -> tuple[int, ...]:
        """Append new tokens to `seq`; returns those that it lacked. Taking a row twice,
        after an interrupt, does no harm."""
        seq.status, seq.num_cached_tokens = SequenceStatus.RUNNING, row.num_cached_tokens
        seq.first_token_time = seq.first_token_time or time.perf_counter()
        seq.metrics = Counter(row.metrics)
        before = seq.num_completion_tokens
        del seq.logprobs[before:]
        for i in range(before - row.start, len(row.token_ids)):
            is_last = i + 1 == len(row.token_ids)
            seq.logprobs += row.logprobs[i : i + 1]
            seq.append_token(row.token_ids[i], row.reason if is_last else None)
        seq.leave_reason = row.reason  # even without a new token
        return tuple(seq.token_ids[seq.num_prompt_tokens + before : seq.num_known_tokens])

    def _use(self, engine: CoreManager, output: Output) -> StepOutput:
        """Give a step's tokens to the sequences."""
        seqs, finished, new = [], [], {}
        for row in output.rows:
            if seq := engine.seqs.get(row.id):  # else it was aborted meanwhile
                new[row.id] = self.take(seq, row)
                seqs.append(seq)
                if seq.leave_reason is not None:
                    self._finish(seq, time.perf_counter())
                    finished.append(seq)
        batch = cast(ScheduledBatch, output)  # has what readers of a batch look at
        return StepOutput(batch, seqs, ScheduledBatchOutput(new), finished, output.seconds)

    def use_next(self, engine: CoreManager) -> StepOutput | None:
        """Use an engine's next message; returns what it did, if it is a step. The message
        leaves the queue afterwards, so an interrupt loses none."""
        message = engine.messages[0]
        done = None
        if isinstance(message, Output):
            done = self._use(engine, message)
        else:
            warnings.warn(f"refused message {message.id}: {message.why}", stacklevel=3)
            if message.id in engine.seqs and not message.is_running:
                self.abort(message.id)
        engine.messages.popleft()
        return done

    def wake(self) -> None:
        """Called before it waits. Engines in lockstep need it (chapter 72b)."""

    def step(self) -> StepOutput | None:
        """Wait for a step's results; None if there are no requests."""
        self.check_open()
        while self.seqs or any(engine.messages for engine in self.engines):
            self.check_alive()
            engine = max(self.engines, key=lambda engine: len(engine.messages))
            if not engine.messages:
                self.wake()
                self.wait()
            elif done := self.use_next(engine):
                return done
        return None

    def close(self) -> None:
        """Abort all requests, and end the processes. A second call does nothing."""
        for request_id in [*self.seqs]:
            self.abort(request_id)
        self.end()
