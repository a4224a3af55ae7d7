"""The tokens that a penalty counts, for each row of a step with drafts (chapters 24 and 50)."""

from __future__ import annotations

import numpy as np

from ..scheduler import ScheduledBatch


def row_histories(batch: ScheduledBatch) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By row of a decode, for penalized requests: the tokens up to and including the
    row's own, and the prompt's length."""
    counts, histories, tokens = batch.num_scheduled_tokens, batch.histories, batch.scheduled_tokens
    owners, ends = np.repeat(np.arange(len(counts)), counts), counts.cumsum()
    first = (ends - counts)[owners]
    penalized = [(r, i) for r, i in enumerate(owners.tolist()) if i in histories]
    drafts = {r: tokens[first[r] + 1 : r + 1].tolist() for r, _ in penalized}
    past = {r: histories[i] + drafts[r] for r, i in penalized}
    return past, {r: batch.prompt_lens.get(i, 0) for r, i in penalized}
