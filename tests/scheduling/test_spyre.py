"""Spyre's scheduler: the published runs step for step, the limits in every step, the oracle's tokens with any padding."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from show import check_blocks, check_trace, new_tokens
from symbolic import Request, SymbolicRunner, Trial, play
from test_fuzz import mutate

import atom_mini.model_runner as model_runner
from atom_mini import EngineArgs
from atom_mini.config import Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_runner
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.scheduling.spyre import ChunkPlan, LookAheadScheduler, PaddedBatch, SpyreScheduler, align
from atom_mini.scheduling.spyre_runner import RectangularRunner
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.trace.trace import record

TABLES = Path(__file__).with_name("spyre_tables")
VARIABLE = "SENDNN_INFERENCE_CP_INTERLEAVE_STEPS"


def make_config(longest: int, limit: int, **options: Any) -> Config:
    """Blocks of 64, chunks of 128, four sequences, as in the published figures."""
    shape = {"kv_cache_block_size": 64, "chunk_size": 128, "max_num_seqs": 4}
    shape |= {"num_kvcache_blocks": 200} | options
    model = {"max_model_len": -(-longest // 64) * 64}
    model |= {"max_batch_tkv_limit": max(limit, longest + 63)}
    config = EngineArgs(scheduler="spyre", **model, **shape)
    # some tables have what users may not ask for
    return config.changed(max_model_len=longest, max_batch_tkv_limit=limit)


def small_config(**options: Any) -> Config:
    """Blocks and chunks of 4, two sequences."""
    shape = {"kv_cache_block_size": 4, "chunk_size": 4, "max_num_seqs": 2}
    return EngineArgs(scheduler="spyre", **shape, **options)


@dataclass
class Row:
    """The engine after one step."""

    kind: str
    tkv: int
    waiting: list[str]
    running: set[str]
    outputs: set[str]
    finished: set[str]
    used: int
    prefill: tuple[str, int] | None = None  # (request, end of its chunk)
    tkvs: dict[str, int] = field(default_factory=dict)
    lens: dict[str, int] = field(default_factory=dict)


class Runner:
    """Generates a token for each request, and the end of text after its published number of tokens.
    One step may fail."""

    def __init__(self, stops: dict[int, int], failing: int = 0) -> None:
        self.stops, self.counts = stops, dict.fromkeys(stops, 0)
        self.step, self.failing = 0, failing

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.step += 1
        if self.step == self.failing:
            raise RuntimeError("the device is gone")
        tokens = {}
        for i, sampled in zip(batch.req_ids, batch.is_sampled, strict=True):
            if sampled:
                self.counts[i] += 1
                tokens[i] = (0 if self.counts[i] == self.stops[i] else 100 + i,)
        return ScheduledBatchOutput(tokens)


def replay(
    config: Config,
    requests: list[dict[str, Any]],
    watch: Callable[[Any], None] = lambda batch: None,
    scheduler: type[SpyreScheduler] = LookAheadScheduler,
) -> Iterator[Row]:
    """Run `requests` (id, add_step, prompt_len, max_tokens, perhaps stop_after and prompt) and yield each step.

    Most published runs are older than pausing."""
    config = config.changed(eos_token_ids=(0,))
    runner = Runner({int(r["id"]): r.get("stop_after") or 10**9 for r in requests})
    core = EngineCore(config, runner, scheduler(config))
    spyre: Any = core.scheduler
    todo = sorted(requests, key=lambda r: r["add_step"])

    def arrive(step: int) -> None:
        while todo and todo[0]["add_step"] <= step:
            r = todo.pop(0)
            parts = r.get("prompt") or [{"stream": f"own{r['id']}", "start": 0, "len": r["prompt_len"]}]
            ids = [1000 * (1 + hash_of(p["stream"])) + p["start"] + i for p in parts for i in range(p["len"])]
            params = SamplingParams(max_tokens=r["max_tokens"])
            core.add(Sequence(ids, config.kv_cache_block_size, params, id=int(r["id"])))

    arrive(0)
    step = 0
    while todo or not core.is_finished():
        result = core.step()
        step += 1
        arrive(step)
        check_blocks(spyre.block_manager, spyre.running)
        if result is None:
            yield Row("idle", 0, [], set(), set(), set(), 0)
            continue
        watch(result.batch)
        batch, finished = result.batch, {str(s.id) for s in result.finished}
        kind = "prefill" if batch.type is SequenceType.PREFILL else "decode"
        used = len({b for s in spyre.running for b in s.block_table})
        tkvs = {str(i): int(n + p) for i, n, p in zip(batch.req_ids, batch.context_lens, batch.left_padding, strict=True)}
        prefill = (str(batch.req_ids[0]), int(batch.context_lens[0])) if kind == "prefill" else None
        outputs = {str(o.request_id) for o in new_tokens(result)}
        yield Row(kind, spyre.tkv, [str(s.id) for s in spyre.waiting], {str(s.id) for s in spyre.running}, outputs,
                  finished, used, prefill, tkvs, dict(zip(map(str, batch.req_ids), batch.context_lens.tolist(), strict=True)))


def hash_of(stream: str) -> int:
    """A number for the name of a stream of tokens, the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(stream)) % 9973


def request(id: int, add_step: int, prompt_len: int, max_tokens: int, stop_after: int | None = None) -> dict[str, Any]:
    return {"id": id, "add_step": add_step, "prompt_len": prompt_len, "max_tokens": max_tokens, "stop_after": stop_after}


@pytest.mark.parametrize(("length", "left", "right", "ends"), [(15, 64, 49, [15]), (302, 64, 18, [64, 192, 302])])
def test_prompts_of_15_and_302_tokens(length: int, left: int, right: int, ends: list[int]) -> None:
    """Whole dummy blocks on the left, so that the last block holds a token; single tokens on the right."""
    plan = ChunkPlan(length, 64, 128)
    assert (plan.left, plan.right, plan.num_chunks) == (left, right, len(ends))
    config = make_config(512, 1024)
    rows = list(replay(config, [request(0, 0, length, 3)]))
    assert [row.prefill[1] for row in rows if row.prefill] == ends


ADMISSION = [request(0, 0, 40, 300, 20), request(1, 0, 260, 40, 40), request(2, 4, 410, 100, 14), request(3, 17, 70, 80, 44),
             request(4, 21, 105, 15, 8), request(5, 46, 10, 200, 40), request(6, 46, 120, 100, 20), request(7, 46, 130, 40, 12)]


def test_the_admission_run() -> None:
    """Eight requests: capacity, interleaving, the model's length, and the volume each delay a
    request. The published times between tokens, where a decode takes 1 and a chunk 8."""
    rows = list(replay(make_config(512, 1536), ADMISSION))
    assert [i for i, row in enumerate(rows, 1) if row.prefill] == [1, 3, 5, 23, 25, 27, 29, 31, 33, 46, 48, 55, 71, 73]
    finished = [(i, sorted(row.finished)) for i, row in enumerate(rows, 1) if row.finished]
    assert finished == [(22, ["0"]), (45, ["2"]), (54, ["4"]), (70, ["1"]), (76, ["6"]), (81, ["3"]), (84, ["7"]), (90, ["5"])]
    assert max(len(row.tkvs) * row.tkv for row in rows if row.kind == "decode") <= 1536
    now, times = 0, dict[str, list[int]]()
    for row in rows:
        now += 8 if row.kind == "prefill" else 1
        for who in row.outputs:
            times.setdefault(who, []).append(now)
    timeline = TABLES / "doc_timeline_admission_constraints.json"
    for wanted in json.loads(timeline.read_text())["rows"]:
        assert np.diff(times[wanted["id"]]).tolist() == wanted["itls"], wanted["id"]


class Published(LookAheadScheduler):
    """Compares each look ahead with the published formulas, in their own words: they count tokens with K/V."""

    looks: ClassVar[Counter[str]] = Counter()

    def _new_tkv(self, seq: Sequence) -> int:
        return max(self.tkv, seq.num_tokens) // self.size * self.size + seq.num_tokens % self.size

    def _too_long(self, seq: Sequence, decoding: list[Sequence]) -> str | None:
        blocks, longest = max(self.tkv, seq.num_tokens) // self.size, self.config.max_model_len or 0
        fits = seq.limit - seq.num_tokens - 1 <= longest - self._new_tkv(seq)
        for s in decoding:
            left = s.sampling_params.max_tokens - (s.num_computed_tokens - s.num_prompt_tokens)
            left = min(left, self.max_len - s.num_computed_tokens)
            fits &= left - 1 <= longest - (blocks * self.size + s.num_computed_tokens % self.size)
        return self._compare("length", fits, super()._too_long(seq, decoding))

    def _too_large(self, seq: Sequence, decoding: list[Sequence]) -> str | None:
        size, n, worst = self.size, len(decoding) + 1, 0
        new_end = -(-(self._new_tkv(seq) + seq.limit - seq.num_tokens - 1) // size) * size + size
        ends = []
        for s in decoding:
            left = s.sampling_params.max_tokens - (s.num_computed_tokens - s.num_prompt_tokens)
            left = min(left, self.max_len - s.num_computed_tokens)
            ends.append(-(-(max(self.tkv, seq.num_tokens) + left - 1) // size) * size + size)
        for end in sorted(ends):
            worst = max(worst, n * min(end, new_end))
            if new_end <= end:
                break
            n -= 1
        return self._compare("volume", worst <= (self.config.max_batch_tkv_limit or 0), super()._too_large(seq, decoding))

    def _compare(self, rule: str, admitted: bool, reason: str | None) -> str | None:
        assert admitted == (reason is None), f"{rule}: published {admitted}, here {reason}"
        self.looks[f"{rule} {admitted}"] += 1
        return reason


def test_every_look_ahead_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 100 random runs, each rule saying yes and no many times."""
    Published.looks.clear()
    for seed in range(100):
        run_spyre_trial(seed, monkeypatch, Published)
    assert len(Published.looks) == 4 and min(Published.looks.values()) > 40, Published.looks


PAUSED = [request(0, 0, 15, 11), request(1, 0, 15, 13), request(2, 0, 66, 10)]
DECODED = "0 1 2|0 1 2|0 1 2|0 1 2|1 2|0 2|1 2|0 2|1 2|0 1|0 1|1|1"


def test_the_published_pauses() -> None:
    """Requests of sendnn-inference's test_spyre_decode_pause_scheduler_steps.py, commit 5af45f6, with a limit of 256:
    three rows of 86 columns are too many, so two of the three take turns from step 10 on."""
    rows = list(replay(make_config(128, 256), PAUSED, scheduler=SpyreScheduler))
    assert [row.kind == "prefill" for row in rows[:6]] == [True, False, True, False, True, False]
    assert ["".join(sorted(row.outputs)) for row in rows[5:]] == DECODED.replace(" ", "").split("|")
    assert [row.tkv for row in rows[5:]] == [82, 83, 84, 85, 85, 86, 86, 87, 87, 24, 25, 26, 27]
    assert [(i, sorted(row.finished)) for i, row in enumerate(rows, 1) if row.finished] == [(14, ["2"]), (16, ["0"]), (18, ["1"])]


def test_no_pause_is_long() -> None:
    """Four equal requests, of which two fit: each waits for at most two decodes. Nothing is prefilled meanwhile."""
    config = make_config(512, 512)
    rows = list(replay(config, [request(i, 0, 130, 40) for i in range(4)], scheduler=SpyreScheduler))
    decodes = [row.outputs for row in rows if row.kind == "decode"]
    for i in "0123":
        at = [x for x, outputs in enumerate(decodes) if i in outputs]
        assert np.diff(at).max() <= 3
    assert max(len(row.tkvs) * row.tkv for row in rows if row.kind == "decode") <= 512


def test_a_shared_block_is_one_block() -> None:
    """Two times 9 tokens and 4 more need three blocks each, and four together, since two are the same."""
    def rows(shared: int) -> list[Row]:
        config = small_config(max_model_len=16, num_kvcache_blocks=4)
        ends = [{"stream": f"own{i}", "start": 0, "len": 9 - shared} for i in range(2)]
        prompts = [[{"stream": "stem", "start": 0, "len": shared}, end] for end in ends]
        return list(replay(config, [request(i, i, 9, 4) | {"prompt": prompt} for i, prompt in enumerate(prompts)]))

    together, apart = rows(8), rows(7)
    assert max(len(row.running) for row in together) == 2 and max(row.used for row in together) == 4
    assert max(len(row.running) for row in apart) == 1


def test_a_failed_step_does_not_change_what_others_had_computed() -> None:
    """Requests of 12 and 20 tokens, the first 8 in common: the second has found 8, whatever it finds after a failure."""
    for failing in range(1, 10):
        config = small_config(max_model_len=32, num_kvcache_blocks=20)
        runner = Runner(dict.fromkeys(range(3), 10**9), failing)
        core = EngineCore(config, runner, SpyreScheduler(config))
        seqs = [Sequence([*range(8), *range(100 * n, 101 * n - 8)], 4, SamplingParams(max_tokens=3), id=i)
                for i, n in enumerate((12, 20))]
        for seq in seqs:
            core.add(seq)
            while not core.is_finished():
                try:
                    core.step()
                except RuntimeError:
                    assert runner.step == failing
        assert runner.step > failing
        assert [s.num_cached_tokens for s in seqs] == [0, 8], failing


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [("0", {}, False), ("", {}, True), ("0", {"interleave": True}, True)],
)
def test_spyres_own_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, options: dict[str, Any], expected: bool
) -> None:
    """It sets `interleave` if no option does, and is read for this scheduler only."""
    monkeypatch.setenv(VARIABLE, value)
    assert make_config(512, 1024, **options).interleave is expected
    monkeypatch.setenv(VARIABLE, "2")
    assert EngineArgs().scheduler == "atom"
    with pytest.raises(ValueError, match=f"{VARIABLE}='2' must be 0 or 1"):
        make_config(512, 1024)


def test_the_tkv_jumps() -> None:
    """264, 45 and 115 tokens: backward where a padding block goes, forward where all rows need one more."""
    requests = [request(0, 0, 264, 100, 62), request(1, 0, 45, 100, 71), request(2, 0, 115, 100, 67)]
    rows = list(replay(make_config(512, 1536), requests))[7:]  # the figure begins with the first decode of all three
    shown = []  # and counts the token just made, which the next step attends to
    for row in rows:
        tokens = [n + 1 for n in row.lens.values()]
        shown.append(dict(zip(row.lens, (n + pad for n, pad in zip(tokens, align(tokens, 64), strict=True)), strict=True)))
    for step, who, before, after in ((12, "2", 320, 257), (17, "1", 320, 257), (53, "1", 292, 357), (53, "2", 297, 362),
                                     (59, "1", 362, 171), (59, "2", 367, 176), (66, "1", 177, 114)):
        assert (shown[step - 1][who], shown[step][who]) == (before, after), (step, who)
    assert [(i, sorted(row.finished)) for i, row in enumerate(rows) if row.finished] == [(58, ["0"]), (65, ["2"]), (68, ["1"])]


def tables_of(kind: str, key: str = "kind") -> list[Any]:
    """The published tables of a kind, those that have a key."""
    tables = {file.stem: json.loads(file.read_text()) for file in sorted(TABLES.glob("*.json"))}
    of_kind = {name: t for name, t in tables.items() if t["kind"] == kind and key in t}
    found = [pytest.param(table, id=name) for name, table in of_kind.items()]
    assert found, kind
    return found


@pytest.mark.parametrize("table", tables_of("steps"))
def test_published_steps(table: dict[str, Any]) -> None:
    """Queues, outputs, ends, tkv of each step, as sendnn-inference's own tests have them."""
    c = table["config"]
    limit = c["max_batch_tkv_limit"] or c["max_batch_tkv_limit_effective"]
    config = make_config(c["max_model_len"], limit, chunk_size=c["chunk_size"], interleave=c["interleave"],
                         max_num_seqs=c["max_num_seqs"], num_kvcache_blocks=c["num_blocks_effective"] - 1,
                         enable_prefix_caching=c["prefix_caching"])
    rows = dict(enumerate(replay(config, table["requests"]), 1))
    for wanted in table["steps"]:
        if wanted["step"] == 0 or wanted["step"] not in rows:
            continue
        row = rows[wanted["step"]]
        assert row.waiting == wanted["waiting"] and row.running == set(wanted["running"]), wanted
        assert row.outputs == set(wanted["request_outputs"]) and row.finished == set(wanted["finished_requests"]), wanted
        if row.kind == "decode":
            assert row.tkv == wanted["tkv"], wanted


@pytest.mark.parametrize("table", tables_of("doc_figure", "figure_steps"))
def test_published_figures(table: dict[str, Any]) -> None:
    """Each step of each figure: who waits, the chunk and its padding, and the rectangle."""
    c, steps = table["config"], table["figure_steps"]
    prompt = steps[0]["prefilling"]
    requests = table.get("requests") or [prompt | {"add_step": 0}]
    limit = max(1536, c["max_batch_tkv_limit"])  # one figure breaks its own: 3 x 367 > 1,024
    config = make_config(c["max_model_len"], limit, chunk_size=c["chunk_size"], interleave=c["interleave"])
    first = 8 if table["name"] == "padding_tkv_jump" else 0 if steps[0]["step_type"] == "waiting" else 1
    rows, lengths = [None, *replay(config, requests)], {str(r["id"]): r["prompt_len"] for r in requests}
    for step, (wanted, row) in enumerate(zip(steps, rows[first:], strict=False), first):
        if row is None or row.kind == "idle":
            continue
        here = [i for i in row.waiting if step not in [r["add_step"] for r in requests if str(r["id"]) == i]]
        assert here == [w["id"] for w in wanted["waiting"]]  # who comes after the step is not yet drawn
        if row.kind == "prefill":
            (who, end), chunk = row.prefill, wanted["prefilling"]
            plan = ChunkPlan(lengths[who], c["block_size"], c["chunk_size"])
            assert (who, end) == (chunk["id"], chunk["chunk_prompt_token_end"])
            padding = chunk["left_padding"], chunk["right_padding"]
            assert (plan.left, plan.right, plan.num_chunks) == (*padding, chunk["chunks_total"])
        else:
            after = [n + 1 for n in row.lens.values()]  # the figures count the token just made
            pads = align(after, c["block_size"])
            shown = {(i, n + pad, pad, n - lengths[i]) for i, n, pad in zip(row.lens, after, pads, strict=True)}
            assert shown == {(d["id"], d["tkv"], d["padding"], d["decoded"]) for d in wanted["decoding"]}


@pytest.mark.parametrize("table", tables_of("table"))
def test_published_tables(table: dict[str, Any]) -> None:
    """Chunks and left padding of prompts; the tkv of two sequences whose ends must share a block."""
    size = table["config"]["block_size"]
    for row in table["rows"]:
        if table["name"] == "table_chunk_plan":
            plan = ChunkPlan(row[0], size, table["config"]["chunk_size"])
            assert [plan.num_tokens, plan.num_chunks, plan.left] == row
        else:
            lens = [computed + 1 for computed in row[0]]
            assert max(n + pad for n, pad in zip(lens, align(lens, size), strict=True)) == row[1]


@pytest.mark.parametrize("table", tables_of("chunk_plans"))
def test_published_chunk_plans(table: dict[str, Any]) -> None:
    """Which cached blocks are used: those of whole chunks."""
    size, chunk = table["config"]["block_size"], table["config"]["chunk_size"]
    for wanted in table["chunk_plans"]:
        plan, hits = ChunkPlan(wanted["prompt_len"], size, chunk), wanted["hit_tokens"] // size
        assert (plan.num_chunks, plan.left // size) == (wanted["chunk_count"], wanted["padding_blocks"])
        assert (plan.usable_tokens(hits) // size, hits) == (wanted["usable_cache_blocks"], wanted["total_cache_blocks"])


@pytest.mark.parametrize("table", tables_of("worker_trace"))
def test_published_worker_traces(table: dict[str, Any]) -> None:
    """Block tables and where a chunk is written, as the real worker had them, up to the names of the blocks."""
    c, batches = table["config"], []
    config = make_config(c["max_model_len"], c["max_batch_tkv_limit_effective"], chunk_size=c["chunk_size"],
                         interleave=c["interleave"], max_num_seqs=c["max_num_seqs"], num_kvcache_blocks=c["num_blocks"] - 1)
    requests = [r | {"add_step": 0} for r in table["requests"]]
    list(replay(config, requests, watch=batches.append))
    names: dict[int, int] = {0: 0}
    for wanted, batch in zip(table["trace"], batches, strict=False):
        for who, blocks in zip(wanted["req_ids"], wanted["block_tables"], strict=True):
            row = batch.req_ids.index(int(who))
            ours = batch.block_tables[row].tolist()
            assert len(ours) == len(blocks) and batch.left_padding[row] == wanted["left_padding"][who]
            assert all(names.setdefault(b, a) == a for a, b in zip(ours, blocks, strict=True)), (ours, blocks)
        if "prefill_slot_blocks" in wanted:
            size = c["block_size"]
            _, _, slots = lay_out(batch, size)
            assert [names[int(slot) // size] for slot in slots[::size]] == wanted["prefill_slot_blocks"][0]


def lay_out(batch: PaddedBatch, size: int) -> Any:
    """`RectangularRunner`'s layout, flat, without a runner."""
    runner: Any = SimpleNamespace(config=SimpleNamespace(kv_cache_block_size=size))
    return [part.ravel() for part in RectangularRunner._lay_out(runner, batch)]


class RectangularSymbols(SymbolicRunner):
    """The model without numbers, fed with rectangles: block 0 is the dummy, the scheduler's block i is block i + 1."""

    def __init__(self, config: Config, alphabet: int, strict: bool = True, fails: Callable[[], bool] = bool) -> None:
        pool = config.changed(num_kvcache_blocks=(config.num_kvcache_blocks or 0) + 1)
        super().__init__(pool, alphabet, strict, fails)

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        assert isinstance(batch, PaddedBatch)
        config, size, tables = self.config, self.size, batch.block_tables
        ends = batch.left_padding + batch.context_lens
        assert (batch.left_padding % size == 0).all() and (-(-ends // size) == tables.shape[1]).all(), "not a rectangle"
        assert (tables[:, 0][batch.left_padding > 0] == 0).all() and ((tables == 0).sum(1) == batch.left_padding // size).all()
        if batch.type is SequenceType.DECODE:
            volume = len(ends) * int(ends.max())
            self.stats["volume"] = max(self.stats["volume"], volume)
            assert not self.strict or volume <= config.max_batch_tkv_limit, f"volume {volume}"
            assert (batch.left_padding == 0).any(), "more padding than needed"
            assert batch.query_len == 1 and ends.max() <= config.max_model_len
        else:
            assert len(ends) == 1 and tables.shape[1] * size % config.chunk_size == 0 and batch.query_len == config.chunk_size
            self.stats["redirected"] += batch.num_redirected
        shift = [row[pad // size :] for row, pad in zip(tables.tolist(), batch.left_padding, strict=True)]
        self.redirected = batch.num_redirected
        width = max(map(len, shift))
        plain = np.array([row + [0] * (width - len(row)) for row in shift], dtype=np.int32)
        return super().forward(replace(batch, block_tables=plain))

    def _check_batch(self, batch: ScheduledBatch, positions: list[int], slots: list[int], tokens: list[int]) -> None:
        redirected = self.redirected
        read = {slot + self.size for seq, computed, _ in self.readers for slot in self._slots(seq.block_table)[:computed]}
        if batch.type is SequenceType.PREFILL:
            assert not read & set(slots[redirected:]), "a block that another sequence reads is written"
            assert set(slots[:redirected]) <= {0}
        assert len(set(slots[redirected:])) == len(slots) - redirected and 0 not in slots[redirected:]


def locate_redirected(locate: Any, runner: Any) -> Any:
    """`locate`, with the first slots of a redirected chunk in the dummy block."""
    def locating(batch: ScheduledBatch, size: int) -> Any:
        positions, slots, cu_seqlens = locate(batch, size)
        slots[: runner.redirected] = 0
        return positions, slots, cu_seqlens
    return locating


def make_spyre_trial(seed: int) -> Trial:
    """A small machine and a load for it."""
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    chunk, longest = size * rng.randint(1, 4), size * rng.randint(2, 12)
    config = EngineArgs(
        scheduler="spyre", kv_cache_block_size=size, chunk_size=chunk, max_model_len=longest,
        max_batch_tkv_limit=rng.choice((longest, longest + rng.randint(0, 3 * longest))), interleave=rng.random() < 0.5,
        num_kvcache_blocks=rng.randint(longest // size, 6 * longest // size), max_num_seqs=rng.randint(1, 5),
        enable_prefix_caching=rng.random() < 0.7,
    )  # fmt: skip
    alphabet = rng.choice((3, 6, 12))
    trial = Trial(config, tuple(rng.sample(range(alphabet), rng.choice((0, 0, 1)))), alphabet, [], 0.0)
    stems = [[rng.randrange(3) for _ in range(longest)] for _ in range(rng.randint(1, 2))]
    for _ in range(rng.randint(1, 9)):
        prompt = rng.choice(stems)[: rng.randint(0, max(0, trial.max_len - 2))]
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randint(0, 2))]
        params = SamplingParams(max_tokens=rng.randint(1, rng.choice((3, 12, 30))), seed=rng.choice((None, 1)),
                                ignore_eos=rng.random() < 0.5)
        arrival = rng.randrange(rng.choice((1, 20)))
        abort_at = arrival + rng.randrange(20) if rng.random() < 0.1 else None
        trial.requests.append(Request(arrival, prompt or [0], params, abort_at))
    trial.failure_rate = 0.1 if rng.random() < 0.1 else 0.0
    return trial


def run_spyre_trial(
    seed: int, monkeypatch: pytest.MonkeyPatch, scheduler: type[SpyreScheduler] = SpyreScheduler, crowded: bool = False,
    watch: Callable[[EngineCore], Any] = lambda core: None,
) -> Counter[str]:  # fmt: skip
    """Play trial `seed`; raises if an output is wrong, a limit broken, a step idle, a block lost."""
    trial, luck, left = make_spyre_trial(seed), random.Random(~seed), [10]
    if crowded:
        crowd(trial, random.Random(seed + 1))

    def fails() -> bool:
        failing = left[0] > 0 and luck.random() < trial.failure_rate
        left[0] -= failing
        return failing

    runner = RectangularSymbols(trial.config, trial.alphabet, True, fails)
    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "locate", locate_redirected(model_runner.locate, runner))
        core = EngineCore(trial.config, runner, scheduler(trial.config))
        watch(core)
        stats = play(trial, core, runner, True, time.perf_counter)
    stats["trials"] += 1
    return stats


def crowd(trial: Trial, rng: random.Random) -> None:
    """Prompts with a long common beginning, all at once, in a pool that holds little more than one of them."""
    config = trial.config
    blocks = (config.max_model_len or 0) // config.kv_cache_block_size + rng.randint(0, 3)
    trial.config = config.changed(
        num_kvcache_blocks=blocks,
        max_num_seqs=rng.randint(2, 5),
        max_batch_tkv_limit=1000,
        prefix_cache="hash",
        enable_prefix_caching=True,
    )
    stem = max((r.prompt for r in trial.requests), key=len)
    for request in trial.requests:
        request.arrival = rng.randrange(4)
        if rng.random() < 0.8:
            request.prompt = stem[: rng.randint(len(stem) // 2, len(stem))] + request.prompt[-1:]


def test_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random machines and loads: the oracle's tokens, never over the limit, never idle."""
    for scheduler, seeds in ((SpyreScheduler, range(150)), (LookAheadScheduler, range(100))):
        stats = sum((run_spyre_trial(seed, monkeypatch, scheduler) for seed in seeds), Counter())
        least = {"tokens": 700, "prefix_hits": 10, "redirected": 10, "failures": 1}
        assert all(stats[name] >= n for name, n in least.items()), stats
        for seed in range(40):
            run_spyre_trial(seed, monkeypatch, scheduler, crowded=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [SpyreScheduler, LookAheadScheduler])
def test_more_fuzz(scheduler: type[SpyreScheduler], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150, 700):
        run_spyre_trial(seed, monkeypatch, scheduler)


BUGS: dict[str, tuple[str, str, str]] = {  # in which method, what, by what
    "no slack": ("staircase", "+ 1 - i, e)", "+ 1 - i, e - size)"),
    "no rounding": ("staircase", "round_up(base + remaining(s), size) + size", "base + remaining(s)"),
    "a stale tkv": ("_why_not", "if decoding and not reason and (", "if not reason and ("),
    "no redirection": ("_prefill", '"num_redirected": redirected', '"num_redirected": 0'),
    "no volume": ("_too_large", "worst > limit else", "False else"),
    "no pause": ("_unpaused", "<= limit", "< 10**9"),
    "no growth": ("_to_come", "(seq.limit - 1)", "seq.num_tokens"),
    "free is shared": ("_no_blocks", "ref_count > 0", "ref_count >= 0"),
}


RARE = {"no slack", "no rounding"}
CHOSEN = [pytest.param(bug, marks=[pytest.mark.slow] * (bug in RARE)) for bug in BUGS]


@pytest.mark.parametrize("bug", CHOSEN)
def test_the_fuzz_can_fail(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is noticed, some only in crowded runs: a dry pool is a KeyError."""
    crowded, method = bug in ("no growth", "free is shared"), BUGS[bug][0]
    scheduler = LookAheadScheduler if method in ("staircase", "_why_not", "_too_large") else SpyreScheduler
    mutate(monkeypatch, scheduler, *BUGS[bug])
    with pytest.raises(KeyError if crowded else AssertionError):
        for seed in range(4000):
            run_spyre_trial(seed, monkeypatch, scheduler, crowded=crowded)


def test_the_trace_of_a_run_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replayed trace gives the queues and the pool of every step, and the reason of each refusal."""
    traces: list[Any] = []
    for seed in range(40):
        for scheduler in (SpyreScheduler, LookAheadScheduler):
            run_spyre_trial(seed, monkeypatch, scheduler, watch=lambda core: traces.append(record(core)))
            check_trace(traces[-1])
    events = [e for trace in traces for step in trace.steps for e in step.events]
    known = {"interleaving", "max_num_seqs", "max_model_len", "volume", "num_kvcache_blocks"}
    known |= {"one prefill at a time", "paused"}
    assert {e["why"].split(":")[0] for e in events if e["event"] == "refused"} == known


def logits_of(core: EngineCore, prompts: list[list[int]], params: SamplingParams) -> dict[tuple[int, int], Any]:
    """{(request, length): the logits its next token is drawn from} of a run."""
    runner, record = core.runner, {}
    sample = runner.sample  # type: ignore[attr-defined]

    def noting(batch: ScheduledBatch, logits: Any, *rest: Any) -> Any:
        keys = [(i, int(n)) for i, n, s in zip(batch.req_ids, batch.context_lens, batch.is_sampled, strict=True) if s]
        record.update(zip(keys, logits.clone(), strict=True))
        return sample(batch, logits, *rest)

    runner.sample = noting  # type: ignore[attr-defined]
    for i, prompt in enumerate(prompts):
        core.add(Sequence(prompt, core.config.kv_cache_block_size, params, id=i))
    while core.step():
        check_blocks(core.scheduler.block_manager, core.scheduler.running)
    return record


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "options", [{}, {"interleave": False, "chunk_size": 4, "max_batch_tkv_limit": 96}], ids=str
)
def test_logits_equal_those_of_atoms_scheduler(options: dict[str, Any], device: str, tmp_path: Path) -> None:
    """Padded chunks, rectangles, redirected writes: the same logits as without any of it, and nothing unwritten is read."""
    save_checkpoint("qwen3", tmp_path, head_dim=16, max_position_embeddings=96)
    rng = random.Random(0)
    stem = [rng.randrange(300) for _ in range(50)]
    shapes = ((20, 3), (20, 1), (50, 0), (0, 1), (37, 6), (50, 0))
    prompts = [stem[:n] + [rng.randrange(300) for _ in range(extra)] for n, extra in shapes]
    params = SamplingParams(max_tokens=18, temperature=0, ignore_eos=True)
    shape: dict[str, Any] = {"device": device, "dtype": "float32", "kv_cache_block_size": 4, "num_kvcache_blocks": 200}
    config = EngineArgs(str(tmp_path), **shape, attention="torch")
    wanted = logits_of(EngineCore(config, make_runner(config)), prompts, params)
    config = EngineArgs(str(tmp_path), scheduler="spyre", max_num_seqs=4, **shape, **{"chunk_size": 12} | options)
    runner = RectangularRunner(config)
    runner.kv_cache.fill_(float("nan"))
    core = EngineCore(config, runner, SpyreScheduler(config))
    logits = logits_of(core, prompts, params)
    assert logits.keys() == wanted.keys()
    assert max(float((logits[key] - wanted[key]).abs().max()) for key in wanted) <= 1e-4
    assert torch.isnan(runner.kv_cache).any()  # most of the pool was never written


@pytest.mark.parametrize(("chunk", "limit", "decode", "queries"), [(12, 256, 2, 12), (48, 96, 1, 48), (128, 192, 2, 128)])
def test_memory_is_measured_on_the_largest_steps(
    chunk: int, limit: int, decode: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's pool is what they leave free: `decode` sequences of 96 tokens, and the last chunk of a prompt of 96."""
    shape: dict[str, Any] = {"device": "cpu", "kv_cache_block_size": 4, "num_kvcache_blocks": 100, "max_model_len": 96}
    config = EngineArgs("tiny", scheduler="spyre", max_num_seqs=2, chunk_size=chunk, max_batch_tkv_limit=limit, **shape)
    runner, ran = RectangularRunner(config), []
    run = runner.run_model

    def note(ids: Any, positions: Any, meta: Any, last: Any) -> Any:
        ran.append((tuple(meta.plan.mask.shape), int(positions.max())))
        return run(ids, positions, meta, last)

    monkeypatch.setattr(runner, "run_model", note)
    runner._run_largest_steps()
    keys = -(-96 // chunk) * chunk
    assert ran == [((decode, 1, 1, 96), 95), ((1, 1, queries, keys), 95)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 24}, "chunk_size=24 must be a multiple of kv_cache_block_size=16"),
        ({"max_model_len": 100}, "max_model_len=100 must be a multiple"),
        ({"max_model_len": None}, "needs max_model_len"),
        ({"max_batch_tkv_limit": 64}, "max_batch_tkv_limit=64 cannot hold .* max_model_len=128"),
        ({"max_num_batched_tokens": 256}, "chunk_size=512 exceeds max_num_batched_tokens=256"),
        (
            {"max_num_batched_tokens": 512, "max_num_seqs": 513},
            "max_num_seqs=513 exceeds max_num_batched_tokens=512",
        ),
        ({"attention": "triton"}, "attention='triton' does not go with scheduler='spyre'"),
        ({"scheduler": "atom", "chunk_size": 32}, "chunk_size has no effect with scheduler='atom'"),
    ],
)
def test_bad_settings_are_refused_with_numbers(options: dict[str, Any], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        EngineArgs(**{"scheduler": "spyre", "max_model_len": 128} | options)
