"""Drafts whose number is chosen: the best one by measured costs, whatever it is without changing a text."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from symbolic import SymbolicDrafter, SymbolicRunner, continuation
from test_speculation import BASE, PROMPTS, SAMPLING, SETUPS, FromABook, outcome, run_drafts

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.sequence import Sequence
from atom_mini.speculation.adaptive import Acceptance, AdaptiveCore, Chooser, Costs, StepTiming
from atom_mini.speculation.goodput import best_drafts
from atom_mini.speculation.verify import Drafter, SpecCore, SpecScheduler


def test_the_choice_is_the_best_of_all() -> None:
    luck = random.Random(0)
    for _ in range(300):
        sizes = [luck.randint(0, 3) for _ in range(luck.randint(1, 4))]
        worth = [Acceptance(n).worth(0, 0) or [luck.random() for _ in range(n)] for n in sizes]
        worth = [[*itertools.accumulate(gains, lambda a, b: a * b)] for gains in worth]
        rows, per_row, per_pass = luck.choice((1.0, 1.5)), luck.random(), luck.random() / 3
        seconds = [1 + per_row * n**rows for n in range(sum(sizes) + 1)]
        drafting = [per_pass * p for p in range(4)]

        def speed(counts: Any, worth: Any = worth, seconds: Any = seconds, drafting: Any = drafting) -> float:
            tokens = sum(1 + sum(gains[:n]) for gains, n in zip(worth, counts, strict=True))
            return float(tokens / (seconds[sum(counts)] + drafting[max(counts)]))

        counts, found = best_drafts(worth, seconds, drafting)
        best = max(map(speed, itertools.product(*(range(n + 1) for n in sizes))))
        assert found == pytest.approx(best) and speed(counts) == pytest.approx(best)


def test_costs_begin_with_what_is_expected() -> None:
    """A single slow step does not decide; a cost that stays does."""
    plain = Costs()
    verify = Costs(plain)
    assert plain.at([3]) == [0.0]
    for _ in range(30):
        plain.learn(4, 1.0)
    verify.learn(8, 9.0)
    assert 1 < verify.at([8])[0] < 3 and plain.at([8])[0] == pytest.approx(1, abs=0.01)
    for _ in range(30):
        verify.learn(8, 9.0)
    assert verify.at([8])[0] == pytest.approx(9, abs=0.1)
    assert verify.at([6])[0] == pytest.approx(5, abs=0.1) and verify.at([12])[0] == pytest.approx(17, abs=0.2)
    verify.learn(8, 1.0)
    assert verify.at([8])[0] == pytest.approx(5, abs=0.1)


def test_a_clock_that_measured_nothing_is_survived() -> None:
    """Two readings of a coarse clock may be equal."""
    chooser = Chooser(4)
    for drafts in (0, 4):
        chooser.learn(StepTiming(1, 1 + drafts, min(drafts, 1), 1, 0.0, 0.0))
        assert 0 <= chooser.choose([0], [4])[0] <= 4


def test_each_draft_is_a_row() -> None:
    chooser = Chooser(4)
    for _ in range(30):
        chooser.learn(StepTiming(4, 4, 0, 4, 1.0, 0.0))
        chooser.learn(StepTiming(4, 8, 1, 4, 5.0, 0.0))
    assert chooser.seconds(4, 4) == pytest.approx([1, 2, 3, 4, 5], abs=0.1)


def test_a_new_request_begins_with_the_mean_of_all() -> None:
    acceptance = Acceptance(2)
    for request in range(50):
        acceptance.learn(request, 2, 0)
    assert acceptance.worth(99, 2)[0] < 0.1 and acceptance.num_seen == [51, 1]
    acceptance.keep({3})
    assert [*acceptance.by_request] == [3]


class Clock:
    """Time that passes when the engine works: a step costs 1, a row or a pass what it is told."""

    def __init__(self, per_row: float, per_pass: float) -> None:
        self.now, self.per_row, self.per_pass = 0.0, per_row, per_pass

    def __call__(self) -> float:
        return self.now


def play(right: float, per_row: float, per_pass: float = 0.0, adaptive: bool = True) -> tuple[float, float]:
    """(drafts per sequence and step, in the second half; tokens per second) of 4 long requests with up to 4 drafts."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=4000, max_num_batched_tokens=64, max_num_seqs=4)
    runner, scheduler, clock = SymbolicRunner(config, 12), SpecScheduler(config), Clock(per_row, per_pass)
    runner.max_rows, scheduler.num_drafts = 64, 4
    drafter = SymbolicDrafter(12, right, random.Random(0))
    kind: Any = AdaptiveCore if adaptive else SpecCore
    core = kind(config, runner, drafter, scheduler, **{"clock": clock} if adaptive else {})
    forward, propose = core.forward, drafter.propose

    def run(batch: Any) -> Any:
        clock.now += 1 + per_row * batch.total_tokens_num
        return forward(batch)

    def draft(seqs: Any, most: Any) -> Any:
        clock.now += per_pass * max(most)
        return propose(seqs, most)

    core.forward, drafter.propose = run, draft
    length = 1500
    for i in range(4):
        core.add(Sequence([1, 2, i], 4, SamplingParams(max_tokens=length, ignore_eos=True)))
    tokens = [t for t, _ in itertools.islice(continuation([1, 2, 0], None, 12), 5)]
    first, drafted, half = None, 0, [0, 0]
    while (step := core.step()) is not None:
        first = first or step.seqs[0].completion_token_ids[:1]
        half = half if step.seqs[0].num_tokens < length / 2 else [half[0] + 1, half[1] + len(step.seqs)]
        drafted += (step.batch.total_tokens_num - len(step.seqs)) * (half[0] > 0)
    assert first == tokens[:1]
    return drafted / max(half[1], 1), 4 * length / clock.now


@pytest.mark.parametrize(("right", "per_row", "per_pass", "least", "most"), [
    (1.0, 0.01, 0.0, 3.5, 4.0), (0.0, 0.01, 0.0, 0.0, 0.6), (0.0, 1.0, 0.0, 0.0, 0.1),
    (1.0, 0.01, 9.0, 0.0, 0.1), (0.5, 0.3, 0.0, 0.0, 1.5),
])  # fmt: skip
def test_it_ends_with_what_pays(right: float, per_row: float, per_pass: float, least: float, most: float) -> None:
    drafted, _ = play(right, per_row, per_pass)
    assert least <= drafted <= most


@pytest.mark.parametrize(("per_row", "per_pass"), [(0.01, 0.0), (0.2, 0.0), (1.0, 0.0), (0.1, 2.0)])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_it_loses_at_most_two_percent(right: float, per_row: float, per_pass: float) -> None:
    """Against no drafts, after what it costs to begin; trials included."""
    _, speed = play(right, per_row, per_pass)
    alone = 4 / (1 + 4 * per_row)
    assert speed > 0.98 * alone
    if right == 1.0 and per_pass == 0:
        assert speed > 0.9 * max(alone, 20 / (1 + 20 * per_row))


def test_the_fuzz_with_a_random_clock() -> None:
    """Any number of drafts, of any request, in any step: the oracle's tokens."""
    stats = run_drafts(300, adaptive=True)
    assert stats["drafted"] > 500 and stats["accepted"] > 200 and stats["preemptions"] > 50


@pytest.mark.parametrize(("setup", "sampling"), [("tight", "everything"), ("radix", "stops"), ("turns", "sampled")])
def test_text_is_what_it_is_without(setup: str, sampling: str) -> None:
    options = BASE | SETUPS[setup]
    with LLM("tiny", **options) as llm:
        plain = llm.generate(PROMPTS, SAMPLING[sampling], use_tqdm=False)
    books = {tuple(o.prompt_token_ids): o.token_ids for o in plain}
    wanted = {"num_speculative_tokens": 5, "enable_adaptive_verification": True}
    with LLM("tiny", **options, speculative_config=wanted) as llm:
        core: Any = llm.engine_core
        core.drafter, core.clock = FromABook(books, 3), random.Random(0).random
        core.chooser.most_won = 0.0  # by such a clock, drafts lose
        assert outcome(llm.generate(PROMPTS, SAMPLING[sampling], use_tqdm=False)) == outcome(plain)
        assert core.scheduler.spec_stats.accepted.total() > 0
        assert len(core.chooser.acceptance.by_request) <= 1  # a stop string ends a request after its last step


def test_a_rest_leaves_the_batch_as_it_is() -> None:
    chooser = Chooser(2)
    for _ in range(9):
        chooser.learn(StepTiming(1, 1, 0, 1, 1.0, 0.0))
    chooser.acceptance.mean = [0.0, 0.0]
    rests = []
    for _ in range(7):
        chooser.credit = -1.0
        assert chooser.choose([1], [2]) == [0]
        rests.append(chooser.resting)
    assert rests == [2, 4, 8, 16, 32, 32, 32]


def resting_core(count: int) -> Any:
    """A core that rests, after a few decodes of `count` requests."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=400, max_num_batched_tokens=64, max_num_seqs=8)
    scheduler = SpecScheduler(config)
    scheduler.num_drafts = 4
    core = AdaptiveCore(config, SymbolicRunner(config, 12), Drafter(), scheduler)
    for i in range(count):
        core.add(Sequence([1, 2, i], 4, SamplingParams(max_tokens=60, ignore_eos=True)))
    core.step()
    core.chooser.resting = 99
    core.step()
    return core


def calls_of_a_step(core: Any) -> Counter[str]:
    """How often a step calls each function of the folder of drafts."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and "speculation" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_rest_is_a_step_without_drafts() -> None:
    """The drafter is only shown the step, and no function is called once per request."""
    one, eight = (calls_of_a_step(resting_core(count)) for count in (1, 8))
    assert one == eight and set(one.values()) == {1} and one.total() <= 11
    assert not one.keys() & {"propose", "num_ready", "judge", "reserve", "keep", "learn", "choose", "as_rows", "accept"}


def test_requests_that_end_in_a_rest_are_forgotten() -> None:
    core = resting_core(2)
    core.drafter.by_request = dict.fromkeys((*core.scheduler.seqs, -1))
    core.chooser.acceptance.by_request = {i: [0.5] for i in (*core.scheduler.seqs, -1)}
    core.chooser.resting = 999
    while core.step() is not None:
        pass
    assert core.chooser.resting > 900 and not core.drafter.by_request and not core.chooser.acceptance.by_request


def test_thinking_is_paid_for() -> None:
    """A thought that takes as long as a step is rare, and so the drafts are."""
    chooser, thoughts = Chooser(4), 0
    for _ in range(4000):
        if chooser.rests:
            chooser.rested()
            continue
        thoughts += 1
        chooser.choose([1], [4])
        chooser.learn(StepTiming(1, 1, 0, 1, 2.0, 1.0))
    assert 10 <= thoughts <= 4000 * chooser.spare + 5


def drafted(chooser: Chooser, batch: int, plain: float, right: int, steps: int) -> float:
    """Drafts per request in the last quarter of `steps`; each draft costs a twentieth of a plain step, choosing a tenth."""
    made = []
    for _ in range(steps):
        rests, ids = chooser.rests, [*range(batch)]
        counts = [0] * batch if rests else chooser.choose(ids, [4] * batch)
        made.append(sum(counts) / batch)
        if rests:
            chooser.rested()
            continue
        seconds = plain * (1.1 + 0.05 * sum(counts) / batch)
        tokens = batch + right * sum(counts)
        chooser.learn(StepTiming(batch, batch + sum(counts), max(counts), tokens, seconds, 0.1 * plain))
        for i, n in zip(ids, counts, strict=True):
            chooser.acceptance.learn(i, n, right * n)
    last = made[-steps // 4 :]
    return sum(last) / len(last)


def test_what_many_have_lost_does_not_hold_up_one() -> None:
    """Steps of 64 requests take 30 times as long as those of one: their loss in seconds would be 30 times too much."""
    chooser = Chooser(4)
    assert drafted(chooser, 64, 12.0, 0, 400) < 0.2
    assert drafted(chooser, 1, 0.4, 1, 400) > 3.5


def test_drawn_drafts_are_refused() -> None:
    drawn = {"method": "draft_model", "model": "tiny", "draft_sampling": True, "enable_adaptive_verification": True}
    with pytest.raises(ValueError, match=r"draft_sampling=True.*leave one of them out"):
        EngineArgs("tiny", speculative_config=drawn)
