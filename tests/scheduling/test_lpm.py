"""Longest cached prefix first: the oracle's tokens, the order of each admission, and no request passed without end."""

from __future__ import annotations

from collections import Counter

import pytest
from show import CountingRunner, play
from symbolic import run_trial

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_scheduler
from atom_mini.scheduling.lpm import LpmScheduler
from atom_mini.sequence import Sequence, SequenceStatus

STATS: Counter[str] = Counter()


class Checked(LpmScheduler):
    """Counts passes on its own, and compares each admission with an order found from nothing."""

    max_passed = 3

    def _expected(self) -> list[Sequence]:
        waiting = [s for s in self.seqs.values() if s.status is SequenceStatus.WAITING]
        first = [s for s in waiting if s.num_preemptions or self.counts[s.id] >= self.max_passed]
        hits = {s.id: len(self.block_manager.find(s)) for s in waiting}
        rest = [s for n in sorted({*hits.values()}, reverse=True) for s in waiting if hits[s.id] == n and s not in first]
        return first + rest

    def _admit(self, budget: int, seqs: list[Sequence]) -> None:
        self.counts: Counter[int] = getattr(self, "counts", Counter())
        expected, before = self._expected(), len(seqs)
        arrived = [*self.seqs]
        super()._admit(budget, seqs)
        assert seqs[before:] == expected[: len(seqs) - before], "another order"
        for seq in seqs[before:]:
            earlier = [self.seqs[i] for i in arrived[: arrived.index(seq.id)]]
            still = [s for s in earlier if s in expected[expected.index(seq) :]]
            self.counts.update(s.id for s in still)
            STATS["passes"] += len(still)
            assert seq.num_preemptions or all(self.counts[s.id] < self.max_passed + self.config.max_num_seqs for s in still)
            self.counts.pop(seq.id, None)
        STATS["overdue"] += any(self.counts[s.id] >= self.max_passed for s in expected)


def test_fuzz() -> None:
    """Random engines and loads, as for the other schedulers; all that can happen happens."""
    STATS.clear()
    stats: Counter[str] = Counter()
    for seed in range(400):
        stats += run_trial(seed, lpm=Checked)
    assert min(stats[name] for name in ("preemptions", "prefix_hits", "failures", "aborts_waiting")) > 20, stats
    assert STATS["passes"] > 100 and STATS["overdue"] > 10, STATS
    for seed in range(100):
        run_trial(seed, lpm=Checked, host=True)  # the second pool counts, too
    for seed in range(1000, 1100):
        run_trial(seed, lpm=LpmScheduler, tight=True)


def served(prompts: list[list[int]], arrivals: list[int], **options: object) -> tuple[list[int], list[Sequence]]:
    """(requests in the order of their first step, sequences), one at a time, in blocks of 2."""
    config = EngineArgs(kv_cache_block_size=2, num_kvcache_blocks=8, max_num_seqs=1, max_num_batched_tokens=64, **options)
    core = EngineCore(config, CountingRunner(), make_scheduler(config))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    seqs = [Sequence(p, 2, params, id=i) for i, p in enumerate(prompts)]
    order = dict.fromkeys(i for step in play(core, seqs, arrivals) for i in step.tokens)
    return [*order], seqs


def test_the_longest_cached_prefix_is_first_and_equal_ones_keep_their_order() -> None:
    prompts = [[1, 1, 2, 2, 3], [9], [1, 1, 5], [1, 1, 2, 2, 6], [1, 1, 2, 2, 7]]
    order, seqs = served(prompts, [0] * 5, schedule_policy="lpm")
    assert order == [0, 3, 4, 2, 1] and seqs[4].num_cached_tokens == 4
    assert served(prompts, [0] * 5)[0] == [0, 1, 2, 3, 4]


def test_a_request_is_passed_only_so_often() -> None:
    """One without a cached prefix among 40 that share one, which arrive faster than they are served."""
    prompts = [[1, 1, 2, 2, i] for i in range(10, 50)]
    prompts.insert(2, [9] * 5)
    order, _ = served(prompts, [*range(len(prompts))], schedule_policy="lpm")
    assert order.index(2) == 2 + LpmScheduler.max_passed


def test_a_long_queue_is_served_in_order() -> None:
    """More than 128 requests, the last of which has a cached prefix."""
    count = LpmScheduler.max_sorted + 1
    prompts = [[1, 1, 2, 2, 3], *([[8]] * (count - 1)), [1, 1, 2, 2, 4]]
    order, _ = served(prompts, [0] * len(prompts), schedule_policy="lpm")
    assert order[:3] == [0, 1, count]  # sorted as soon as the queue is short enough


def test_the_models_tokens_are_the_same() -> None:
    prompts = ["Once upon a time", "12 + 7 =", "Once upon a time there was", [5, 6, 7] * 10, [5, 6, 7] * 10 + [8]]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for options in ({}, {"schedule_policy": "lpm"}):
        with LLM("tiny", device="cpu", max_num_seqs=2, kv_cache_block_size=8, **options) as llm:
            found.append([out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": "hash"}, "prefix_cache='hash' does not go with schedule_policy='lpm': set it to 'radix'"),
        ({"overlap": True}, "overlap=True does not go with schedule_policy='lpm'"),
        ({"scheduler": "spyre", "max_model_len": 128}, "scheduler='spyre' does not go with schedule_policy='lpm'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(schedule_policy="lpm", **options)
