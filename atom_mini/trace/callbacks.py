"""Calls a request's function with each piece of its text; logs limits and drafts (chapter 30)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import proxy

from pydantic.dataclasses import dataclass

from ..config import STRICT, SamplingParams, explained
from ..engine_core import StepOutput
from ..llm import LLM
from ..sequence import Sequence
from ..text import Request, TextPiece


@explained
@dataclass(frozen=True, config=STRICT)
class StreamParams(SamplingParams):
    """`SamplingParams` with a function that is called with each piece of the text.

    It runs after a step, in the thread that ran the step. It may abort requests and add new ones, and the next step
    waits for it. An aborted request gets no more calls. Source: `stream_callback` of ATOM's `Sequence`.
    """

    stream_callback: Callable[[TextPiece], object] | None = None


class Callbacks:
    """A listener of an `LLM` that calls the functions of its requests."""

    def __init__(self, llm: LLM) -> None:
        self._llm = proxy(llm)
        self._requests: dict[Sequence, Request] = {}  # those with a function

    def record(self, step: StepOutput) -> None:
        """Call the function of each request that has a new piece after `step`."""
        for seq in [*step.seqs, *step.finished]:
            params = seq.sampling_params
            if getattr(params, "stream_callback", None) and seq not in self._requests:
                self._requests[seq] = Request(seq, self._llm.processor.reader(params), None)
        for seq in [*self._requests]:
            request = self._requests.get(seq)  # None: a function ran steps that ended it
            if request and seq.leave_reason != "abort":
                self._call(request, step)
            if seq.is_finished:
                self._requests.pop(seq, None)

    def _call(self, request: Request, step: StepOutput) -> None:
        """Call the function with the new piece, if any. An error ends the request."""
        seq: Any = request.seq
        piece = self._llm._next_piece(seq.id, request)
        if not (piece.text or piece.finished):
            return
        try:
            seq.sampling_params.stream_callback(piece)
        except Exception as error:
            reason = f"error: {type(error).__name__}: {error}"
            if seq.is_finished:
                seq.leave_reason = reason
            else:
                self._llm.engine_core.abort(seq.id, reason)
                step.finished.append(seq)

LOG = logging.getLogger("atom_mini")
LIMITS = {"max_model_len": "max_model_len", "kv_cache": "num_kvcache_blocks"}


class Log:
    """A listener of an `LLM` that logs texts cut by a limit, and accepted drafts."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm.engine_core.scheduler
        self._thousands = 0  # of drafts that were logged

    def record(self, step: StepOutput) -> None:
        """Log what `step` has changed."""
        for seq in step.finished:
            if option := LIMITS.get(seq.leave_reason or ""):
                text = "request %d ends after %d of %d tokens, at the limit of %s"
                asked = seq.sampling_params.max_tokens
                LOG.warning(text, seq.id, seq.num_completion_tokens, asked, option)
        stats = getattr(self._scheduler, "spec_stats", None)  # chapter 50's
        drafts = stats.proposed.total() if stats else 0
        if stats and drafts // 1000 > self._thousands:
            self._thousands = drafts // 1000
            kept = stats.accepted.total()
            text = "%d drafts, %d accepted (%.1f %%), %.2f tokens per sequence and step"
            LOG.info(text, drafts, kept, 100 * kept / drafts, stats.tokens_per_step)
