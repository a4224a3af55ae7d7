"""How many drafts pay: the best choice is found, the shares are learned, and the text stays."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from show import check_blocks
from symbolic import SymbolicDrafter, SymbolicRunner, continuation
from test_speculation import BASE, PROMPTS, ROOMS, WISHES, outcome

from atom_mini import LLM, Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.sequence import Sequence
from atom_mini.speculation import adaptive
from atom_mini.speculation.adaptive import FAR, AdaptiveScheduler, best_drafts
from atom_mini.speculation.verify import Drafter, Verifier


def test_the_choice_is_the_best_of_all() -> None:
    """Against every choice, on step times that are flat, straight, curved and stepped."""
    luck = np.random.default_rng(1)
    for _ in range(400):
        batch = int(luck.integers(1, 4))
        shares, most = luck.random(batch) ** 0.5, [int(luck.integers(1, 4)), *luck.integers(0, 4, batch - 1).tolist()]
        at, price, bend = luck.integers(2, 8), luck.random(), luck.choice((0.5, 1.0, 2.0))

        seconds = 1 + price * (np.maximum(np.arange(20) - at, 0) / 4) ** bend
        per_pass = float(luck.choice((0.0, 0.1, 0.5)))

        def rate(drafts: Any, s: Any = shares, t: Any = seconds, c: float = per_pass) -> float:
            tokens = sum(sum(a**j for j in range(k + 1)) for a, k in zip(s, drafts, strict=True))
            return tokens / (t[len(s) + sum(drafts)] + c * max(drafts))

        found = best_drafts(shares, most, seconds, per_pass)
        assert all(k <= n for k, n in zip(found, most, strict=True))
        assert rate(found) == pytest.approx(max(map(rate, itertools.product(*(range(n + 1) for n in most)))))


def simulate(right: float, price: float, num_tokens: int = 120, k: int = 4) -> tuple[Counter[int], int]:
    """(drafts per decode -> how often, decode steps) of one request; a row costs `price` of a step."""
    config = Config(kv_cache_block_size=4, num_kvcache_blocks=50, max_num_batched_tokens=16, speculative_config={})
    scheduler, runner = AdaptiveScheduler(config), SymbolicRunner(config, 12)
    scheduler.num_drafts, scheduler.drafter = k, SymbolicDrafter(12, right, random.Random(0))
    scheduler.seconds = 1 + price * (np.arange(17) - 1)
    core = EngineCore(config, Verifier(runner), scheduler)
    runner.max_rows = 16
    core.add(seq := Sequence([1, 2, 3], 4, SamplingParams(max_tokens=num_tokens)))
    made: Counter[int] = Counter()
    while core.step():
        scheduler.per_pass = 0.0  # the clock of this machine says nothing here
        made[len(scheduler.drafts.get(seq.id, []))] += 1
    wanted = [t for t, _ in itertools.islice(continuation([1, 2, 3], None, 12), num_tokens)]
    assert seq.completion_token_ids == wanted and scheduler.tries.keys() <= {None}
    return made, scheduler.spec_stats.num_steps


def test_it_learns_what_pays() -> None:
    """Right drafts are asked for while rows are cheap; wrong ones no longer; dear rows are never bought."""
    made, steps = simulate(right=1.0, price=0.05)
    assert made[4] > 0.9 * steps and steps <= 120 // 4
    made, steps = simulate(right=0.0, price=0.3)
    assert made[0] > 0.9 * steps and 0 < sum(k * n for k, n in made.items()) < 0.1 * steps
    made, steps = simulate(right=1.0, price=2.0)
    assert sum(k * n for k, n in made.items()) == 0 and steps == 119


def test_a_share_follows_what_happens() -> None:
    """From what is said of all to what was seen, and back to it when nothing is tried."""
    scheduler = AdaptiveScheduler(Config(num_kvcache_blocks=9, speculative_config={}))
    seq = Sequence([1], 16, id=7)
    assert scheduler.share(7, prior=0.3) == pytest.approx(0.3)
    for drafts, rows, wanted in (([1, 2], 3, 1.0), ([1, 2], 1, 0.0), ([1, 2], 3, 1.0)):
        for _ in range(100):
            scheduler.drafts, seq.num_scheduled_tokens = {7: drafts}, rows
            scheduler._settle(seq, rows)
        assert abs(scheduler.share(7, prior=0.5) - wanted) < 0.1, (drafts, rows)
    scheduler.clock += 400
    assert scheduler.share(7, prior=0.3) == pytest.approx(0.3, abs=0.01)


def test_a_new_request_is_judged_by_the_others() -> None:
    """Of an engine whose drafts are wrong a new request gets none, where rows are dear; in another it does."""
    for right, wanted in ((0.0, 0), (1.0, 3)):
        scheduler = AdaptiveScheduler(Config(num_kvcache_blocks=9, speculative_config={"num_speculative_tokens": 3}))
        old, new = (Sequence([1], 16, id=i) for i in (1, 2))
        for _ in range(8):
            scheduler.drafts, old.num_scheduled_tokens = {1: [5, 5]}, 1 + int(2 * right)
            scheduler._settle(old, old.num_scheduled_tokens)
        scheduler.seconds = 1 + 0.4 * np.arange(20)
        assert scheduler._most_drafts([new]) == [wanted]


@pytest.mark.parametrize("reads_once", [True, False])
def test_what_a_context_costs(monkeypatch: pytest.MonkeyPatch, reads_once: bool) -> None:
    """Steps by a clock of our own: rows that read their sequence's keys together stay cheap at long contexts."""

    def cost(batch: Any) -> float:
        _, contexts, _ = batch.queries
        return 8 + batch.total_tokens_num + 0.1 * (contexts if reads_once else batch.context_lens).sum()

    options: Any = {"num_kvcache_blocks": 99, "max_num_seqs": 8, "speculative_config": {"num_speculative_tokens": 3}}
    scheduler = AdaptiveScheduler(Config(**options))
    monkeypatch.setattr(adaptive, "timeit", lambda step, number: step())
    scheduler.attach(Drafter(), SimpleNamespace(forward=cost))
    assert scheduler.seconds[[1, 4, 20, 60]] == pytest.approx([9.1, 12.4, 30, 66 + 8], rel=0.1)
    assert scheduler.per_key == pytest.approx(0.1, rel=0.02)
    assert scheduler.per_draft_key == pytest.approx(0 if reads_once else 0.1, rel=0.02, abs=0.001)
    short, long = Sequence([1] * 8, 16), Sequence([1] * 4 * FAR, 16)
    assert scheduler._most_drafts([short]) == [3]
    assert scheduler._most_drafts([long]) == ([3] if reads_once else [0])


@pytest.mark.parametrize("wish", ["greedy", "all of it"])
@pytest.mark.parametrize("room", ["plain", "chunks", "tight", "radix"])
def test_the_text_stays(room: str, wish: str) -> None:
    options = BASE | ROOMS[room]
    with LLM("tiny", **options) as llm:
        plain = outcome(llm.generate(PROMPTS, WISHES[wish], use_tqdm=False))
    with LLM("tiny", **options, speculative_config={"adaptive": True, "prompt_lookup_min": 1}) as llm:
        scheduler: Any = llm.engine_core.scheduler
        assert isinstance(scheduler, AdaptiveScheduler)
        timed = scheduler.seconds[1:]  # by rows; one for all would be what stands there before
        assert timed[0] > 0 and (np.diff(timed) >= 0).all() and not (timed == 1).all()
        assert outcome(llm.generate(PROMPTS, WISHES[wish], use_tqdm=False)) == plain
        assert scheduler.tries.keys() <= {None}


def test_measuring_leaves_no_trace() -> None:
    """It writes K/V into blocks that nobody owns; no request can find them."""
    with LLM("tiny", **BASE, speculative_config={"adaptive": True}) as llm:
        manager = llm.engine_core.scheduler.block_manager
        check_blocks(manager, [])
        assert len(manager.index) == 0 and manager.num_free_blocks == len(manager.pool.blocks)
