"""The trace agrees with the live engine, step by step, on random loads; and its files."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from importlib.resources import files
from typing import Any, cast

import pytest
import show
import symbolic
from symbolic import SymbolicRunner

from atom_mini import EngineArgs
from atom_mini.block_manager import NO_HASH
from atom_mini.config import Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import LLM, make_scheduler
from atom_mini.scheduler import MixedScheduler, ScheduledBatch, ScheduledBatchOutput, Scheduler
from atom_mini.scheduling.overlap import OverlapCore
from atom_mini.sequence import Sequence
from atom_mini.trace.trace import COLOURS, VERDICTS, Metrics, Trace, record

TIGHT = [(9, 18), (6, 22), (13, 6), (3, 12), (5, 4)]  # prompt and output tokens


class WatchedCore(EngineCore):
    """Copies the queues and blocks when the runner is called: what the trace must have."""

    def __init__(self, config: Config, runner: Any, scheduler: Any = None) -> None:
        super().__init__(config, runner, scheduler)
        self.snapshots: list[dict[str, Any]] = []
        self.ended: list[tuple[int, str]] = []
        forward, manager, finish = runner.forward, self.scheduler.block_manager, self.scheduler._finish

        def watched(batch: ScheduledBatch) -> ScheduledBatchOutput:
            holders, counts = self.scheduler.running, batch.num_scheduled_tokens.tolist()
            free = manager.pool.free_block_ids
            cached = sum(manager.pool.blocks[i].hash != -1 for i in free)
            self.snapshots.append({
                "waiting": [s.id for s in self.scheduler.waiting], "running": [s.id for s in holders],
                "tables": {s.id: s.block_table[:] for s in holders},
                "computed": {s.id: s.num_computed_tokens for s in holders},
                "indexed": set(getattr(manager.index, "hash_to_block_id", {}).values()),
                "references": {b.block_id: b.ref_count for b in manager.pool.blocks if b.ref_count},
                "pool": {"used": len(manager.pool.blocks) - len(free), "cached": cached, "free": len(free) - cached},
                "kind": batch.type.name.lower(), "tokens": dict(zip(batch.req_ids, counts, strict=True)),
            })  # fmt: skip
            return forward(batch)

        def finished(seq: Sequence, now: float) -> None:
            self.ended.append((seq.id, str(seq.leave_reason)))
            finish(seq, now)

        runner.forward, self.scheduler._finish = watched, finished  # type: ignore[method-assign]
        self.trace = record(self)


def agree(core: WatchedCore) -> Trace:
    """Compare the trace with the snapshots, the ends, and the scheduler's count of preemptions."""
    trace, blocks = core.trace, dict[int, Any]()
    show.check_trace(trace)
    for step, seen in zip(trace.steps, core.snapshots, strict=True):
        blocks |= step.blocks
        assert (step.waiting, [*step.computed], step.computed) == (seen["waiting"], seen["running"], seen["computed"])
        assert {n for n, block in blocks.items() if block.hash != NO_HASH} == seen["indexed"]
        assert step.pool == seen["pool"] and (step.kind, step.tokens) == (seen["kind"], seen["tokens"])
        assert {n: len(block.owners) for n, block in blocks.items() if block.owners} == seen["references"]
        for id, table in seen["tables"].items():
            assert [blocks[n].piece for n in table] == [*range(len(table))] and all(id in blocks[n].owners for n in table)
    every = [e for step in trace.steps for e in step.events + step.after] + trace.tail
    names = Counter(e["event"] for e in every)
    assert [(e["id"], e["why"]) for e in every if e["event"] == "finished"] == core.ended
    assert names["preempted"] == core.scheduler.num_preemptions and names["added"] == len(trace.requests)
    assert not miscounts(trace)
    return trace


def miscounts(trace: Trace) -> bool:
    """Whether some request was not cached or scheduled up to its last token since its last admission."""
    computed: dict[int, int] = {}
    for step in trace.steps:
        for event in step.events:
            if event["event"] == "admitted":
                computed[event["id"]] = event["cached"] * trace.block_size
        for id, n in step.tokens.items() if step.error is None else ():
            computed[id] += n
        for event in step.after:
            if event["event"] == "finished":
                id = event["id"]
                if computed[id] != len(trace.requests[id]["token_ids"]) - 1:
                    return True
    return False


def traced(monkeypatch: pytest.MonkeyPatch, name: str, kind: Callable[[Config, Any, Any], Any]) -> list[Any]:
    """Run later trials in a traced `kind` instead of `symbolic.name`; returns the list of their cores."""
    cores: list[Any] = []

    def make(config: Config, runner: Any, scheduler: Any) -> Any:
        cores.append(kind(config, runner, scheduler))
        if kind is not WatchedCore:
            cores[-1].trace = record(cores[-1])
        return cores[-1]

    monkeypatch.setattr(symbolic, name, make)
    return cores


def test_traces_of_random_loads_agree_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With failures, aborts, preemptions, shared blocks; the outputs are the oracle's, as without a trace."""
    stats, whys = Counter[str](), Counter[str]()
    cores = traced(monkeypatch, "EngineCore", WatchedCore)
    for seed in range(400):
        stats += symbolic.run_trial(seed, mixed=seed >= 300)
        trace = agree(cores.pop())
        assert len(json.loads(trace.to_json())["steps"]) == len(trace.steps)
        whys.update(e["why"].split(":")[0] for step in trace.steps for e in step.events if e["event"] == "refused")
        assert not any("unknown" in why for id in trace.requests for why in trace.waits(id).values() if seed % 10 == 0)
    assert all(
        stats[name] > 5 for name in ("failures", "aborts_running", "aborts_waiting", "preemptions", "same_step_hits")
    )
    assert set(whys) == {"no blocks", "token budget", "max_num_seqs", "delay", "decode first"}


def test_a_run_with_overlap_is_traced_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps under way: the events explain the counts, also when a step fails or a request is aborted in one."""
    stats, cores = Counter[str](), traced(monkeypatch, "OverlapCore", OverlapCore)
    for seed in range(200):
        stats += symbolic.run_trial(seed, overlap=True, tight=seed % 2 == 0)
        trace: Trace = cores.pop().trace
        show.check_trace(trace)
        assert len(json.loads(trace.to_json())["steps"]) == len(trace.steps)
        names = Counter(e["event"] for step in trace.steps for e in step.events + step.after)
        assert names["finished"] == names["added"] == len(trace.requests)
        assert sum(step.error is not None for step in trace.steps) >= (names["rolled back"] > 0)
    assert all(stats[name] > 5 for name in ("failures", "aborts_running", "preemptions", "prefix_hits"))


def play(shapes: list[tuple[int, int]], scheduler: type[Scheduler] | None = None, **options: Any) -> Trace:
    """Run requests of (prompt, output) tokens to their ends, in blocks of 4; a trace that agrees."""
    config = EngineArgs(kv_cache_block_size=4, **{"num_kvcache_blocks": 10, "trace": True, **options})  # type: ignore[arg-type]
    core = WatchedCore(config, SymbolicRunner(config, 9), scheduler(config) if scheduler else make_scheduler(config))
    for i, (prompt, output) in enumerate(shapes):
        core.add(Sequence([i + 2] * prompt, 4, SamplingParams(max_tokens=output), id=i))
    while core.step():
        pass
    return agree(core)


@pytest.fixture
def trace() -> Trace:
    return play(TIGHT, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("why", "shapes", "options"),
    [
        ("no blocks", [(20, 5), (20, 5)], {}),
        ("token budget", [(8, 2), (8, 2)], {"max_num_batched_tokens": 9}),
        ("token budget", [(8, 2), (8, 2)], {"max_num_batched_tokens": 12, "enable_chunked_prefill": False, "max_model_len": 12}),
        ("max_num_seqs", [(4, 2), (4, 2)], {"max_num_seqs": 1}),
        ("decode first", [(4, 8), (4, 8), (12, 2)], {"interleave_decode": True, "max_num_batched_tokens": 8}),
        ("delay", [(4, 8), (12, 2)], {"scheduler_delay_factor": 1e9, "max_num_batched_tokens": 4}),
    ],
)  # fmt: skip
def test_every_refusal_says_why(why: str, shapes: list[tuple[int, int]], options: dict[str, Any]) -> None:
    trace, last = play(shapes, **options), len(shapes) - 1
    reasons = trace.waits(last).values()
    assert any(text.startswith(f"{why}: ") and "{" not in text for text in reasons), reasons


def test_of_a_mixed_step_each_row_has_its_own_phase() -> None:
    trace = play([(3, 6), (12, 2)], enable_mixed_steps=True, max_num_batched_tokens=8)
    assert [step.kind for step in trace.steps[:4]] == ["prefill", "mixed", "mixed", "decode"]
    assert [step.phases() for step in trace.steps[1:3]] == [{0: "decode", 1: "prefill"}] * 2
    assert "mixed" not in {phase for step in trace.steps for phase in step.phases().values()}
    assert [step.decodes for step in trace.steps[:4]] == [[], [0], [0], []]


def test_of_a_mixed_step_the_metrics_count_both_kinds() -> None:
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=16, enable_mixed_steps=True, max_num_batched_tokens=8)
    core, metrics = EngineCore(config, SymbolicRunner(config, 9), MixedScheduler(config)), Metrics()
    for i, (prompt, output) in enumerate([(3, 6), (12, 2)]):
        core.add(Sequence([i + 2] * prompt, 4, SamplingParams(max_tokens=output), id=i))
    while step := core.step():
        metrics.record(step)
    assert (metrics.num_prefill_tokens, metrics.num_decode_tokens) == (15, 6)
    assert metrics.prefill_seconds > 0 < metrics.decode_seconds


def test_a_scheduler_that_gives_no_reason_is_traced_all_the_same() -> None:
    class Silent(Scheduler):
        def __setattr__(self, name: str, value: Any) -> None:
            deaf = lambda event, *args, **facts: event == "refused" or value(event, *args, **facts)  # noqa: E731
            super().__setattr__(name, deaf if name == "note" else value)

    trace = play(TIGHT, Silent, max_num_batched_tokens=16)
    assert trace.waits(2)[1] == "unknown" and trace.scheduler == "Silent"


def test_a_failed_step_and_an_abort_are_in_the_trace() -> None:
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=10, trace=True)
    failing = iter([False, True, False, False, False, False, False])
    core = WatchedCore(config, SymbolicRunner(config, 9, fails=lambda: next(failing)))
    for i in (3, 4):
        core.add(Sequence([i] * 6, 4, SamplingParams(max_tokens=5), id=i))
    core.step()
    with pytest.raises(symbolic.StepFailed):
        core.step()
    core.step()
    core.abort(4)
    while core.step():
        pass
    core.abort(3)  # not here any more: no event
    trace = agree(core)
    assert [step.error for step in trace.steps[:3]] == [None, "StepFailed", None]
    assert trace.steps[2].events[0] == {"event": "rolled back", "id": None, "waiting": [3, 4]}
    assert {"event": "finished", "id": 4, "why": "abort"} in trace.steps[3].events and trace.tail == []


def test_without_a_trace_no_hook_is_replaced_and_the_tokens_are_the_same() -> None:
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, max_num_seqs=4) as plain:
        out = plain.generate(["Once", "12 + 7 ="], SamplingParams(max_tokens=8))
        core = plain.engine_core
        assert plain.trace is None and "note" not in vars(core.scheduler) and type(core) is EngineCore
        assert not {"note", "forward", "transaction", "rollback"} & {*vars(core), *vars(core.runner)}, "it is recorded"
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, max_num_seqs=4, trace=True) as llm:
        again = llm.generate(["Once", "12 + 7 ="], SamplingParams(max_tokens=8))
        assert llm.trace is not None and [o.token_ids for o in out] == [o.token_ids for o in again]
        show.check_trace(llm.trace)
        words = json.loads(llm.trace.to_json())["to_text"]
        assert "".join(words[str(i)] for i in again[0].prompt_token_ids + again[0].token_ids).startswith("Once")
    assert all(step.device > 0 and step.host > 0 for step in llm.trace.steps)
    with pytest.raises(ValueError, match="trace"):
        EngineArgs(trace=1)  # type: ignore[arg-type]


def test_what_is_wrong_is_noticed(trace: Trace) -> None:
    """Every lost event except a refusal, and every changed queue, count, and table."""

    def noticed(change: Callable[[Any], Any], n: int) -> bool:
        broken = deepcopy(trace)
        change(broken.steps[n])
        with suppress(AssertionError, KeyError):
            show.check_trace(broken)
            return miscounts(broken)
        return True

    for n, step in enumerate(trace.steps):
        for k, event in enumerate(step.events):
            assert noticed(lambda s, k=k: s.events.pop(k), n) == (event["event"] != "refused"), (n, event)
        for k in range(len(step.after) if n < len(trace.steps) - 1 else 0):
            assert noticed(lambda s, k=k: s.after.pop(k), n), (n, k)
        for name in step.pool:
            assert noticed(lambda s, name=name: s.pool.update({name: s.pool[name] + 1}), n), (n, name)
        assert noticed(lambda s: s.waiting.append(99), n) and noticed(lambda s: s.computed.popitem(), n)
        assert n or noticed(lambda s: s.blocks.clear(), n)


def test_plot_draws_every_step(trace: Trace) -> None:
    fig = show.plot_trace(trace)
    assert len(fig.axes) == 3 and fig.axes[2].get_xlim() == (-0.5, len(trace.steps) - 0.5)
    shown, phases = fig.axes[0].images[0].get_array(), [step.phases() for step in trace.steps]
    assert shown.shape == (len(TIGHT), len(trace.steps), 4) and (shown[..., 3] > 0).sum() == sum(map(len, phases))
    assert {name for now in phases for name in now.values()} == set(COLOURS)


def test_the_page_needs_nothing_else(trace: Trace, tmp_path: Any) -> None:
    """One file, and in it, zipped, what it shows: every step's queues, phases, reason, and blocks as they change."""
    trace.to_text = {2: "</script><script>alert(1)</script>"}.get
    trace.save_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    template = (files("atom_mini") / "trace" / "timeline.html").read_text()
    assert len(template.encode()) < 300_000 and len(page) - len(template) < 100_000
    assert not re.search(r"https?://|//cdn|@import|url\(|\ssrc=|\shref=|fetch\(|XMLHttp|import\(", page)
    assert page.count("<script") == page.count("</script>") == 1
    zipped = re.search(r'atob\("(.*?)"\)', page)
    assert zipped is not None
    data, blocks = json.loads(gzip.decompress(base64.b64decode(zipped[1]))), dict[str, Any]()
    assert data["colours"] == COLOURS and len(data["steps"]) == len(trace.steps)
    assert data["verdicts"] == VERDICTS and not any(view["verified"] for view in data["steps"])
    assert data["to_text"]["2"] == "</script><script>alert(1)</script>"
    shown = {}
    for n, (view, step) in enumerate(zip(data["steps"], trace.steps, strict=True)):
        blocks |= view["blocks"]
        shown |= step.blocks
        assert blocks == {str(i): [b.id, b.piece, sorted(b.owners), b.hash] for i, b in shown.items()}
        assert (view["waiting"], view["running"], view["pool"]) == (step.waiting, [*step.computed], step.pool)
        assert view["phases"] == {str(id): phase for id, phase in step.phases().items()}
        assert view["computed"] == {str(id): n for id, n in step.computed.items()}
        assert view["why"] == {str(id): trace.waits(id)[n] for id in step.waiting[:1]}
    frame = trace._repr_html_()
    assert frame.startswith("<iframe ") and frame.count('"') == 6 and "<script" not in frame


def test_the_page_shows_what_was_verified() -> None:
    """Accepted, bonus and rejected tokens of each step; with the tokens of all other steps they are the whole text."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    prompts = ["Mia has a red cat. Ben has a red", "12 + 7 = 19. 12 + 7 =", "Once upon a time"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (17, 14, 40)]
    with LLM("tiny", device="cpu", num_kvcache_blocks=64, trace=True, speculative_config=drafts) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        trace, stats = cast(Trace, llm.trace), llm.engine_core.scheduler.spec_stats  # type: ignore[union-attr]
    totals, texts = Counter[str](), Counter[int]()
    for step, view in zip(trace.steps, trace._views(), strict=True):
        assert set(view["verified"]) == set(step.drafts)
        texts.update(id for id in step.tokens if id not in step.drafts)  # of a prompt, all in one step
        for id, counts in view["verified"].items():
            totals += Counter(dict(zip(VERDICTS, counts, strict=True)))
            texts[id] += counts[0] + counts[1]
    lengths = {id: len(r["token_ids"]) - r["prompt"] for id, r in trace.requests.items()}
    assert texts == lengths and list(lengths.values()) == [17, 14, 40]
    assert totals["accepted"] == stats.accepted.total() and totals["rejected"] > 0 < totals["bonus"]


def test_a_tree_is_traced_as_well() -> None:
    """With `prefix_cache="radix"` blocks are found by walking a tree; the record looks at the pool alone."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, prefix_cache="radix", trace=True) as llm:
        for _ in range(2):
            llm.generate([[5] * 40], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        trace = cast(Trace, llm.trace)
    show.check_trace(trace)
    assert [e["cached"] for step in trace.steps for e in step.events if e["event"] == "admitted"] == [0, 2]
