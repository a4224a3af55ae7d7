"""State checkpoints: random loads against the oracle, planted faults, interrupts, memory, the same logits, and what is refused."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import recorded
from show import CountingRunner, check_blocks
from small_models import GREEDY, TIGHT, make_prompts
from symbolic import Request, StateSymbols, check_states, run_many, run_trial
from test_fuzz import check_often, mutate
from test_interrupt import FAR, REQUESTS, STRIDE, interrupt_everywhere
from test_state import save

from atom_mini import LLM, EngineArgs, SamplingParams, loading
from atom_mini.engine_core import EngineCore
from atom_mini.families import state, state_checks
from atom_mini.families.state_checkpoints import StateCacheRunner, StateCore, StateManager
from atom_mini.options.build import make_scheduler
from atom_mini.options.info import describe
from atom_mini.parallel.lockstep import dummy_batch, with_spare_block
from atom_mini.sequence import Sequence

INTERVAL = "state_checkpoint_interval_tokens"
VARIANTS: dict[str, dict[str, Any]] = {"usual": {}, "tight": {"tight": True}, "mixed": {"mixed": True, "tight": True}}
SLOW = [pytest.param(name, range(100, 1000), marks=pytest.mark.slow) for name in VARIANTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    save("dense", path)
    return path


# Random loads


@pytest.mark.parametrize(("variant", "seeds"), [(name, range(100)) for name in VARIANTS] + SLOW)
def test_outputs_equal_the_oracle_with_states(variant: str, seeds: range) -> None:
    """After each step, each state that is kept is compared with the oracle, too."""
    stats = run_many(seeds, states=True, **VARIANTS[variant])
    least = {"state_saves": 5, "state_loads": 0.5, "failures": 0.4, "prefix_hits": 0.2, "aborts_running": 0.02}
    check_often(stats, {name: int(n * len(seeds)) for name, n in least.items()})


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a state of another prefix is used": (
        StateManager, "allocate", "self.loads.append((self.saved[content_id], seq.row))",
        "self.loads.append((next(iter(self.saved.values())), seq.row))",
    ),
    "a state is found before it is kept": (
        StateManager, "_save", "self.saving[content_id] = place",
        "self.saved[content_id] = place",
    ),
    "a state is given away and still found": (
        StateManager, "_save", "self.saved.popitem(last=False)[1]",
        "next(iter(self.saved.values()))",
    ),
    "what was kept before a rollback is found": (
        StateManager, "reset", "self.saved: OrderedDict[int, int] = OrderedDict()",
        "self.saved = vars(self).get('saved', OrderedDict())",
    ),
    "orders of an undone step stay": (StateManager, "reset", "self.loads: Pairs = []", "self.loads = vars(self).get('loads', [])"),
    "an order is carried out twice": (StateManager, "publish", "self.saves, self.loads = [], []", "self.loads = []"),
    "a state is loaded again in the next step": (StateManager, "publish", "self.saves, self.loads = [], []", "self.saves = []"),
    "the state of a longer prefix is used": (StateManager, "find", "cached.pop()", "return cached[:-1]"),
    "the first block decides": (StateManager, "allocate", "cached[-1]", "cached[0]"),
    "a chunk goes past a border": (StateManager, "cut", "min(n, self.border(seq, start) - start)", "n"),
    "a state is kept that is past its block": (
        StateManager, "stage", "self.border(seq, num_tokens - 1) != num_tokens",
        "num_tokens < self.interval",
    ),
    "the place of a lost block is not free again": (
        StateManager, "_fresh_block", "self.free_checkpoints.append(self.saved.pop(block.content_id))",
        "self.saved.pop(block.content_id)",
    ),
    "the copies are not ordered": (StateCore, "before_step", "if not loads and not saves:", "if not saves:"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzz_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever breaks first
        for seed in range(1000):
            run_trial(seed, states=True)


def make_core(**options: Any) -> StateCore:
    small = {"num_kvcache_blocks": 6, "max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_cache_block_size": 4}
    kept: dict[str, Any] = {INTERVAL: 4, "num_state_checkpoints": 3}
    config = EngineArgs(**small | options).changed(**kept)
    return StateCore(config, StateSymbols(config, 12, strict=False), make_scheduler(config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "stride"),
    [({}, 3 * FAR), *(pytest.param({"enable_mixed_steps": x}, STRIDE, marks=pytest.mark.slow) for x in (False, True))],
)
def test_interrupted_at_any_line(options: dict[str, Any], stride: int) -> None:
    """What was kept before is forgotten, and kept again."""
    again = [Request(0, r.prompt, r.params) for r in REQUESTS]
    interrupt_everywhere(lambda: make_core(**options), REQUESTS + again, False, stride)


def test_memory_is_flat_over_5000_requests() -> None:
    core = make_core(num_kvcache_blocks=12, max_num_batched_tokens=64)
    core.runner = CountingRunner()
    sizes = []
    for i in range(5000):
        core.add(Sequence([i, i + 1, i + 2, i + 3] * 5, 4, SamplingParams(max_tokens=2, ignore_eos=True)))
        while core.step():
            pass
        if i in (500, 4999):
            gc.collect()
            sizes.append((len(core.manager.saved), len(gc.get_objects())))
    (known, objects), (later, more) = sizes
    assert known == later == 3 and more < objects + 100, sizes
    assert not core.manager.saving and not core.manager.saves and not core.manager.loads


def test_an_abort_between_two_chunks_leaves_what_was_kept() -> None:
    core = make_core()
    prompt = [*range(1, 18)]
    for i in range(3):
        core.add(Sequence(prompt, 4, SamplingParams(max_tokens=3, ignore_eos=True), id=i))
        core.step()
        runner: Any = core.runner
        assert (runner.stats["state_loads"] > 0) == (i > 0)
        core.abort(i)
        check_states(core.manager, runner.kept)
        check_blocks(core.manager, [])


def test_what_a_cut_leaves_goes_to_others() -> None:
    """A step that ends a prompt at a border has the rest of its budget for the next one."""
    core = make_core(max_num_batched_tokens=10, num_kvcache_blocks=12)
    for i, prompt in enumerate(([1] * 9, [2] * 6)):
        core.add(Sequence(prompt, 4, SamplingParams(max_tokens=1), id=i))
    step = core.step()
    assert step is not None and step.batch.num_scheduled_tokens.tolist() == [4, 4]


# The model


SMALL: dict[str, Any] = TIGHT | {"max_num_batched_tokens": 64, "num_kvcache_blocks": 100, "dtype": "float32", "device": "cpu"}


def logits(folder: Path, prompts: list[list[int]], num: int = 12, **options: Any) -> list[tuple[dict[Any, Any], int]]:
    """For each prompt alone: (logits by position, its cached tokens). It generates `num` tokens."""
    params, found = replace(GREEDY, max_tokens=num), []
    with LLM(str(folder), **SMALL | options) as llm:
        for prompt in prompts:
            with recorded(llm) as recorder:
                (out,) = llm.generate([prompt], params, use_tqdm=False)
            found.append(({at: row for (_, at), row in recorder.every.items()}, out.num_cached_tokens))
    return found


def test_a_hit_changes_no_bit_of_the_logits(folder: Path) -> None:
    """Against a first computation with the same chunks."""
    stem, *_ = make_prompts()
    prompts = [stem[:50], [*stem[:50], 5, 6, 7], [*stem[:37], 9, 9], stem[:50]]
    hits = logits(folder, prompts, **{INTERVAL: 16})
    assert [cached for _, cached in hits] == [0, 48, 32, 48]
    for prompt, (rows, cached) in zip(prompts, hits, strict=True):
        ((right, _),) = logits(folder, [prompt], **{INTERVAL: 16})
        assert {*rows} == {at for at in right if at >= cached} and len(rows) > 12
        assert all(torch.equal(row, right[at]) for at, row in rows.items()), cached


MODES: list[tuple[dict[str, Any], int]] = [({}, 4), ({"enable_mixed_steps": True}, 4), ({"interleave_decode": True}, 4), ({}, 2)]
DEPLOYED: list[dict[str, Any]] = [
    {"trace": True}, {"engine_process": True}, {"data_parallel_size": 2, "lockstep": True},
    {"data_parallel_size": 2, "routing": "prefix"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "count"), [*MODES, *(pytest.param(mode, 4, marks=pytest.mark.slow) for mode in DEPLOYED)], ids=str
)
def test_the_tokens_are_the_same(mode: dict[str, Any], count: int, folder: Path) -> None:
    """With chunks, preemptions, several answers, prompts that come again, and an abort between."""
    stem = make_prompts()[0]
    prompts = [*make_prompts(), *([*stem[:n], n] for n in range(30, 60, 4))]
    params = [replace(GREEDY, n=1 + i % 2) for i in range(len(prompts))]
    said = []
    kept: dict[str, Any] = {INTERVAL: 8, "num_state_checkpoints": count}
    for cached in ({"enable_prefix_caching": False}, kept):
        with LLM(str(folder), device="cpu", dtype="float32", **TIGHT | cached | (mode if cached is kept else {})) as llm:
            llm.abort(llm.add_request(stem, GREEDY))
            outs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            said.append([out.token_ids for out in outs[0] + outs[1]])
            if INTERVAL in cached and not {"engine_process", "data_parallel_size"} & {*mode}:
                core: Any = llm.engine_core
                assert type(core) is StateCore and type(core.runner) is StateCacheRunner
                assert llm.metrics.num_saved_states > 20 and llm.metrics.num_loaded_states > 5
                assert any(out.num_cached_tokens for out in outs[1])
                check_blocks(core.manager, [])
    assert said[0] == said[1]


def test_a_state_is_loaded_before_its_place_is_given_away(folder: Path) -> None:
    """With one place, a sequence takes the state out of it and then leaves its own there, in one step."""
    stem = make_prompts()[0]
    prompts = [stem[:9], stem[:33], stem[:33]]
    right = logits(folder, prompts, 1, enable_prefix_caching=False)
    found = logits(folder, prompts, 1, **{INTERVAL: 8, "num_state_checkpoints": 1})
    assert [cached for _, cached in found] == [0, 8, 32]
    for (rows, _), (wanted, _) in zip(found, right, strict=True):
        assert all(torch.allclose(row, wanted[at], atol=1e-4) for at, row in rows.items())


def test_a_batch_without_sequences_changes_no_state_that_is_kept(folder: Path) -> None:
    """The dummy step of an idle engine in lockstep (chapter 72b)."""
    kept_at: dict[str, Any] = {INTERVAL: 8, "num_state_checkpoints": 4}
    with LLM(str(folder), device="cpu", **TIGHT | kept_at) as llm:
        runner: Any = llm.engine_core.runner
        llm.generate([make_prompts()[0]], GREEDY, use_tqdm=False)
        with_spare_block(runner)
        kept = [part.clone() for part in vars(runner.pool).values()]
        runner.launch(dummy_batch(TIGHT["num_kvcache_blocks"]))
        spare = TIGHT["max_num_seqs"]
        for before, now in zip(kept, vars(runner.pool).values(), strict=True):
            changed = (before != now).flatten(2).any(2).any(0).nonzero().flatten().tolist()
            assert changed in ([], [spare]) and not before[:, spare].any()
            assert before[:, spare + 1 :].flatten(2).any(2).all(), "all four places are in use"


# Options


def test_states_that_are_kept_count_in_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("dense", tmp_path)
    config = EngineArgs(str(tmp_path), device="cpu", **{INTERVAL: 16})  # type: ignore[arg-type]
    each = state.state_bytes(config.spec, torch.float32)
    monkeypatch.setattr(state, "free_host_bytes", lambda: 100 * each)
    kept: dict[str, Any] = {INTERVAL: 16, "num_state_checkpoints": 30}
    with LLM(str(tmp_path), device="cpu", max_num_seqs=30, **kept) as llm:
        runner: Any = llm.engine_core.runner
        used = (llm.config.num_kvcache_blocks or 0) * runner.block_bytes
        assert 38 * each < used <= 39 * each  # one is a spare
        assert runner.pool.state.shape[1] == 61
    with pytest.raises(ValueError, match=r"max_num_seqs=80 .* \(num_state_checkpoints=30\); set it to at most 69"):
        LLM(str(tmp_path), device="cpu", max_num_seqs=80, **kept)


def test_info_counts_them(folder: Path) -> None:
    found = describe(EngineArgs(str(folder), device="cpu", num_state_checkpoints=5, **{INTERVAL: 16}))  # type: ignore[arg-type]
    assert found["state_checkpoint_bytes"] == 5 * found["state_bytes_per_sequence"] > 0
    assert "state_checkpoint_bytes" not in describe(EngineArgs(str(folder), device="cpu"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({INTERVAL: 0}, f"{INTERVAL}=0"),
    ({INTERVAL: -16}, f"{INTERVAL}=-16"),
    ({INTERVAL: 24}, f"{INTERVAL}=24 is not a multiple of kv_cache_block_size=16: set it to one"),
    ({INTERVAL: 256}, f"{INTERVAL}=256 must be below max_model_len=256: lower it"),
    ({INTERVAL: 64, "max_model_len": 64}, f"{INTERVAL}=64 must be below max_model_len=64"),
    ({"num_state_checkpoints": 4}, f"{INTERVAL}=8192 must be below max_model_len=256: lower it"),
    ({INTERVAL: 16, "num_state_checkpoints": 0}, "num_state_checkpoints=0"),
    ({INTERVAL: 16, "num_state_checkpoints": 10**9}, r"num_state_checkpoints=1000000000 needs \d+ bytes, but \d+ are free"),
    ({INTERVAL: 16, "enable_prefix_caching": False}, f"enable_prefix_caching=False does not go with {INTERVAL}"),
    ({INTERVAL: 16, "prefix_cache": "radix"}, f"prefix_cache='radix' does not go with {INTERVAL}"),
    ({INTERVAL: 16, "overlap": True}, f"overlap=True does not go with {INTERVAL}.*: set it to False"),
    ({INTERVAL: 16, "kv_offloading_size": 0.01}, "kv_offloading_size=0.01 does not go with layers that keep a state"),
    ({INTERVAL: 16, "tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with layers that keep a state"),
    ({INTERVAL: 16, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config.*keep a state"),
    ({INTERVAL: 16, "enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "enable_chunked_prefill=False does not go"),
    ({"enable_prefix_caching": True, "overlap": True}, "enable_prefix_caching=True does not go with .*overlap=True"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: str(x)[:60])
def test_wrong_sizes_and_company_are_refused_before_anything_loads(
    options: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", pytest.fail)
    monkeypatch.setattr(torch, "empty", pytest.fail)
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), device="cpu", **options)


def test_a_model_without_states_refuses_them() -> None:
    with pytest.raises(ValueError, match=f"{INTERVAL}=16 has no effect without layers that keep a state: leave it out"):
        EngineArgs("tiny", **{INTERVAL: 16})  # type: ignore[arg-type]


def test_defaults(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint each 8192 tokens, in whole blocks, of a model with a context that is longer."""
    short = EngineArgs(str(folder))
    assert not short.enable_prefix_caching and short.state_checkpoint_interval_tokens is None
    save("dense", tmp_path, max_position_embeddings=9000)
    for options, interval in (({}, 8192), ({"kv_cache_block_size": 24}, 8184), ({"max_model_len": 8193}, 8192)):
        config = EngineArgs(str(tmp_path), device="cpu", **options)  # type: ignore[arg-type]
        assert config.enable_prefix_caching and config.state_checkpoint_interval_tokens == interval
        assert config.num_state_checkpoints == state_checks.COUNT and replace(config) == config
    for options in ({"overlap": True}, {"enable_chunked_prefill": False}, {"max_model_len": 8192}):
        config = EngineArgs(str(tmp_path), device="cpu", **options)  # type: ignore[arg-type]
        assert not config.enable_prefix_caching and config.num_state_checkpoints is None


def test_engines_without_a_prefix_cache_keep_no_states(folder: Path) -> None:
    with LLM(str(folder), device="cpu", num_kvcache_blocks=10) as llm:
        core: Any = llm.engine_core
        assert type(core) is EngineCore and type(core.runner) is state.StateRunner
        assert core.runner.pool.state.shape[1] == llm.config.max_num_seqs + 1
