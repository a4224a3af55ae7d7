"""The trace agrees with the live engine, step by step, on random loads; and its files."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest
import show
import symbolic
from symbolic import SymbolicRunner

from atom_mini import EngineArgs
from atom_mini.block_manager import NO_HASH
from atom_mini.config import Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import LLM
from atom_mini.scheduler import MixedScheduler, ScheduledBatch, ScheduledBatchOutput
from atom_mini.scheduling.overlap import OverlapCore
from atom_mini.sequence import Sequence
from atom_mini.trace.trace import VERDICTS, Metrics, Trace, record


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
    return trace


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
    for seed in range(120):
        stats += symbolic.run_trial(seed, mixed=seed >= 90)
        trace = agree(cores.pop())
        assert len(json.loads(trace.to_json())["steps"]) == len(trace.steps)
        events = [e for step in trace.steps for e in step.events if e["event"] == "refused"]
        whys.update(e["why"].split(":")[0] for e in events)
        if seed % 10 == 0:
            waits = [why for id in trace.requests for why in trace.waits(id).values()]
            assert not any("unknown" in why for why in waits)
    for name in ("failures", "aborts_running", "aborts_waiting", "preemptions", "same_step_hits"):
        assert stats[name] > 2, name
    assert set(whys) == {"no blocks", "token budget", "max_num_seqs", "delay", "decode first"}


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_run_with_overlap_is_traced_as_well(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps under way: the events explain the counts, also when a step fails or a request is aborted in one."""
    stats, cores = Counter[str](), traced(monkeypatch, "OverlapCore", OverlapCore)
    for seed in range(40):
        stats += symbolic.run_trial(seed, overlap=True, tight=seed % 2 == 0, cache=cache)
        trace: Trace = cores.pop().trace
        show.check_trace(trace)
        assert len(json.loads(trace.to_json())["steps"]) == len(trace.steps)
        names = Counter(e["event"] for step in trace.steps for e in step.events + step.after)
        assert names["finished"] == names["added"] == len(trace.requests)
        assert sum(step.error is not None for step in trace.steps) >= (names["rolled back"] > 0)
    for name in ("failures", "aborts_running", "preemptions", "prefix_hits"):
        assert stats[name] > 1, name


def test_of_a_mixed_step_each_row_has_its_own_phase() -> None:
    """In the trace and in the metrics."""
    options: dict[str, Any] = {"enable_mixed_steps": True, "max_num_batched_tokens": 8}
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=16, **options)
    core, metrics = EngineCore(config, SymbolicRunner(config, 9), MixedScheduler(config)), Metrics()
    trace = record(core)
    for i, (prompt, output) in enumerate([(3, 6), (12, 2)]):
        core.add(Sequence([i + 2] * prompt, 4, SamplingParams(max_tokens=output), id=i))
    while step := core.step():
        metrics.record(step)
    assert [step.kind for step in trace.steps[:4]] == ["prefill", "mixed", "mixed", "decode"]
    assert [step.phases() for step in trace.steps[1:3]] == [{0: "decode", 1: "prefill"}] * 2
    assert [step.decodes for step in trace.steps[:4]] == [[], [0], [0], []]
    assert (metrics.num_prefill_tokens, metrics.num_decode_tokens) == (15, 6)
    assert metrics.prefill_seconds > 0 < metrics.decode_seconds


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


def test_the_page_needs_nothing_else(tmp_path: Any) -> None:
    """One file, and in it, zipped, what it shows: every step's queues, phases, reason, and blocks as they change."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=10, max_num_batched_tokens=16)
    core = WatchedCore(config, SymbolicRunner(config, 9))
    for i, (prompt, output) in enumerate([(9, 18), (6, 22), (13, 6), (3, 12), (5, 4)]):
        core.add(Sequence([i + 2] * prompt, 4, SamplingParams(max_tokens=output), id=i))
    while core.step():
        pass
    trace = agree(core)
    trace.to_text = {2: "</script><script>alert(1)</script>"}.get
    trace.save_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert len(page) < 400_000
    outside = r"https?://|//cdn|@import|url\(|\ssrc=|\shref=|fetch\(|XMLHttp|import\("
    assert not re.search(outside, page)
    assert page.count("<script") == page.count("</script>") == 1
    zipped = re.search(r'atob\("(.*?)"\)', page)
    assert zipped is not None
    data = json.loads(gzip.decompress(base64.b64decode(zipped[1])))
    assert data["to_text"]["2"] == "</script><script>alert(1)</script>"
    blocks, shown = dict[str, Any](), {}
    for n, (view, step) in enumerate(zip(data["steps"], trace.steps, strict=True)):
        blocks |= view["blocks"]
        shown |= step.blocks
        assert blocks == {str(i): [b.id, b.piece, sorted(b.owners), b.hash] for i, b in shown.items()}
        assert (view["waiting"], view["running"]) == (step.waiting, [*step.computed])
        assert view["phases"] == {str(id): phase for id, phase in step.phases().items()}
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
