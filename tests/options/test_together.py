"""All pairs of options are refused by name, or give the plain engine's tokens; and a user's own
scheduler is never dropped silently."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
from dataclasses import FrozenInstanceError, asdict, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import show
from checkpoints import save_one_layer
from pydantic import TypeAdapter

import atom_mini.llm
from atom_mini import LLM, Config, EngineArgs, SamplingParams, assemble, loading
from atom_mini.engine_core import EngineCore
from atom_mini.options import args as parts
from atom_mini.options import build
from atom_mini.scheduler import Scheduler
from atom_mini.scheduling.overlap import OverlapScheduler
from atom_mini.scheduling.turns import TurnScheduler
from atom_mini.serving.async_llm import AsyncLLM
from atom_mini.speculation.verify import SpecScheduler

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
VALUES: dict[str, list[Any]] = {
    "kv_cache_block_size": [1, 8, 64], "num_kvcache_blocks": [64], "max_num_seqs": [2], "max_num_batched_tokens": [64],
    "max_model_len": [128], "gpu_memory_utilization": [0.5], "enable_prefix_caching": [False, True],
    "enable_chunked_prefill": [False, True], "dtype": ["float32"], "attention": ["torch", "triton"],
    "enforce_eager": [True], "enable_mixed_steps": [True], "interleave_decode": [True], "scheduler_delay_factor": [0.5],
    "overlap": [True], "trace": [True], "prefix_cache": ["hash", "radix", "none"], "scheduler": ["spyre"], "chunk_size": [64],
    "schedule_policy": ["lpm"], "kv_offloading_size": [0.01],
    "state_checkpoint_interval_tokens": [64], "num_state_checkpoints": [4],
    "max_batch_tkv_limit": [4096], "interleave": [False], "speculative_config": [NGRAM], "device": ["cpu"],
    "compiled": [True, False], "packed": [True], "fuse_layers": [True], "quantization": ["int8"],
}  # fmt: skip
PROCESSES: dict[str, list[Any]] = {
    "engine_process": [True], "ready_timeout": [100.0], "ping_timeout": [100.0], "tensor_parallel_size": [2],
    "enable_expert_parallel": [True], "collective_timeout": [100.0], "data_parallel_size": [2],
    "routing": ["load", "prefix"], "lockstep": [True],
    "kv_transfer_config": [[{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]],
}  # fmt: skip
SPYRE = {"scheduler": "spyre", "kv_cache_block_size": 16, "chunk_size": 32, "max_model_len": 128, "max_num_seqs": 4}
PROMPTS = ["12 + 7 =", "Once upon a time", [5, 6, 7] * 10, [5, 6, 7] * 10 + [8]]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


# Each pair of values that goes together is in one of these, beside others: so many triples are, too.
EASY = {  # goes with everything
    "num_kvcache_blocks": 64, "max_num_seqs": 2, "max_model_len": 128, "dtype": "float32",
    "gpu_memory_utilization": 0.5, "enforce_eager": True, "trace": True, "device": "cpu",
}  # fmt: skip
ROWS: list[dict[str, Any]] = [
    {**EASY, "kv_cache_block_size": 1, "max_num_batched_tokens": 64,
     "enable_prefix_caching": False, "enable_chunked_prefill": True, "attention": "torch",
     "enable_mixed_steps": True, "prefix_cache": "none", "compiled": True,
     "quantization": "int8"},
    {**EASY, "compiled": False, "kv_cache_block_size": 1, "enable_prefix_caching": True,
     "enable_chunked_prefill": False, "attention": "triton", "interleave_decode": True,
     "scheduler_delay_factor": 0.5, "prefix_cache": "hash", "speculative_config": NGRAM,
     "fuse_layers": True},
    {**EASY, "kv_cache_block_size": 8, "overlap": True, "prefix_cache": "radix", "packed": True,
     "max_num_batched_tokens": 64, "enable_prefix_caching": True, "enable_chunked_prefill": True,
     "interleave_decode": True, "attention": "torch", "compiled": False, "quantization": "int8"},
    {**EASY, "kv_cache_block_size": 64, "max_num_batched_tokens": 64, "attention": "triton",
     "enable_prefix_caching": False, "scheduler_delay_factor": 0.5,
     "enable_chunked_prefill": True, "speculative_config": NGRAM, "prefix_cache": "none",
     "fuse_layers": True, "interleave_decode": True, "compiled": False},
    {**EASY, "scheduler": "spyre", "kv_cache_block_size": 1, "prefix_cache": "radix",
     "max_num_batched_tokens": 64, "enable_prefix_caching": True, "enable_chunked_prefill": True,
     "attention": "torch", "chunk_size": 64, "max_batch_tkv_limit": 4096, "interleave": False,
     "compiled": False, "quantization": "int8"},
    {"kv_cache_block_size": 8, "enable_prefix_caching": False, "enable_chunked_prefill": False,
     "overlap": True, "prefix_cache": "none", "compiled": True, "attention": "torch",
     "interleave_decode": True, "quantization": "int8"},
    {"prefix_cache": "hash", "kv_cache_block_size": 8, "enable_mixed_steps": True, "kv_offloading_size": 0.01,
     "attention": "triton", "fuse_layers": True, "max_num_batched_tokens": 64,
     "enable_prefix_caching": True, "enable_chunked_prefill": True, "compiled": False},
    {"kv_cache_block_size": 64, "enable_prefix_caching": True, "compiled": True,
     "prefix_cache": "hash", "attention": "torch", "scheduler_delay_factor": 0.5,
     "quantization": "int8", "speculative_config": NGRAM, "enable_chunked_prefill": False},
    {"packed": True, "kv_cache_block_size": 1, "enable_prefix_caching": False,
     "enable_chunked_prefill": False, "scheduler_delay_factor": 0.5, "prefix_cache": "none",
     "speculative_config": NGRAM},
    {"prefix_cache": "radix", "kv_cache_block_size": 64, "enable_mixed_steps": True,
     "packed": True, "kv_offloading_size": 0.01},
    {"prefix_cache": "radix", "enable_chunked_prefill": False, "attention": "triton",
     "scheduler_delay_factor": 0.5, "kv_cache_block_size": 8, "speculative_config": NGRAM,
     "fuse_layers": True},
    {"overlap": True, "kv_cache_block_size": 1, "attention": "triton", "prefix_cache": "hash",
     "fuse_layers": True},
    {"scheduler": "spyre", "kv_cache_block_size": 8, "enable_prefix_caching": False,
     "prefix_cache": "none"},
    {"prefix_cache": "hash", "scheduler": "spyre"},
    {"kv_cache_block_size": 64, "overlap": True},
    {"prefix_cache": "hash", "packed": True},
    {"prefix_cache": "radix", "compiled": True},
    {"kv_offloading_size": 0.01, "interleave_decode": True, "scheduler_delay_factor": 0.5},
    {**EASY, "schedule_policy": "lpm", "kv_cache_block_size": 1, "max_num_batched_tokens": 64, "kv_offloading_size": 0.01,
     "enable_prefix_caching": True, "enable_chunked_prefill": True, "prefix_cache": "radix",
     "attention": "torch", "packed": True, "compiled": False, "quantization": "int8"},
    {"schedule_policy": "lpm", "kv_cache_block_size": 8, "enable_chunked_prefill": False, "kv_offloading_size": 0.01,
     "attention": "triton", "fuse_layers": True},
    {"schedule_policy": "lpm", "kv_cache_block_size": 64, "compiled": True, "kv_offloading_size": 0.01},
]  # fmt: skip
PROCESS = {"engine_process": True, "ready_timeout": 100.0, "ping_timeout": 100.0}
RANKS = {"tensor_parallel_size": 2, "collective_timeout": 100.0}
ENGINES = {"data_parallel_size": 2}
APART = {"kv_transfer_config": [{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]}
DEPLOYED: list[dict[str, Any]] = [
    {**PROCESS, "enable_mixed_steps": True, "prefix_cache": "radix", "quantization": "int8"},
    {**PROCESS, "speculative_config": NGRAM, "scheduler_delay_factor": 0.5, "packed": True},
    {**PROCESS, "overlap": True, "interleave_decode": True, "kv_cache_block_size": 8},
    {**PROCESS, "scheduler": "spyre"},
    {**RANKS, "enable_mixed_steps": True, "prefix_cache": "radix", "max_num_batched_tokens": 64},
    {**RANKS, "speculative_config": NGRAM, "interleave_decode": True, "prefix_cache": "none"},
    {**ENGINES, "routing": "load", "enable_mixed_steps": True, "prefix_cache": "radix"},
    {**PROCESS, "schedule_policy": "lpm", "kv_cache_block_size": 8, "kv_offloading_size": 0.01},
    {**ENGINES, "routing": "prefix", "kv_offloading_size": 0.01, "compiled": True},
    {**ENGINES, "routing": "prefix", "overlap": True, "compiled": True},
    {**ENGINES, "lockstep": True, "speculative_config": NGRAM, "scheduler_delay_factor": 0.5},
    {**APART, "enable_mixed_steps": True, "prefix_cache": "radix", "packed": True, "kv_cache_block_size": 8},
    {**APART, "schedule_policy": "lpm", "compiled": True, "max_num_batched_tokens": 64, "quantization": "int8"},
    {**APART, "interleave_decode": True, "scheduler_delay_factor": 0.5, "enable_prefix_caching": False},
    {**APART, "enable_chunked_prefill": False, "kv_cache_block_size": 1},
]


def whole(options: dict[str, Any]) -> dict[str, Any]:
    """With the options that Spyre's scheduler needs."""
    return SPYRE | options if options.get("scheduler") == "spyre" else options


def test_every_option_is_here() -> None:
    known = {f.name for f in fields(EngineArgs) if f.init} - {"model", "scheduler_cls"}
    assert known == {*VALUES, *PROCESSES}


def settled(options: dict[str, Any]) -> Any:
    """The settings that follow from `options`, or "refused" if the error names one of them."""
    try:
        known = vars(EngineArgs("tiny", **whole(options)))
    except ValueError as error:
        names = {*options}
        if "speculative_config" in options:
            names.add("num_speculative_tokens")
        assert any(name in str(error) for name in names), f"{options}: {error}"
        return "refused"
    return {n: v for n, v in known.items() if n != "spec"}


def pairs_in(options: dict[str, Any]) -> set[str]:
    cells = sorted(f"{name}={value}" for name, value in options.items())
    return {" and ".join(pair) for pair in combinations(cells, 2)}


def test_each_pair_is_refused_by_name_or_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of the options and of the table. A pair that is new here goes into a row."""
    cells = [{n: v} for n, values in (VALUES | PROCESSES).items() for v in values]
    asked = [a | b for a, b in combinations(cells, 2) if {*a} != {*b}] + ROWS + DEPLOYED
    usual = [settled(options) for options in asked]
    go = [options for options, found in zip(asked, usual, strict=True) if found != "refused"]
    assert all(row in go for row in ROWS + DEPLOYED)
    tried = set().union(*map(pairs_in, ROWS))
    single = [options for options in go if {*options} <= {*VALUES}]
    assert not {pair for options in single for pair in pairs_in(options)} - tried
    named = {name for row in parts.TOGETHER for name in row.needs}
    monkeypatch.setattr(parts, "TOGETHER", parts.TOGETHER[::-1])
    for options, before in zip(asked, usual, strict=True):
        if len(options) > 2 or {*options} <= named:
            assert settled(dict(reversed(options.items()))) == before, options


SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200, "max_num_seqs": 4}
FEW = [[5, 6, 7] * 3, [5, 6, 7] * 3, [5, 6, 7, 8]]  # for Triton's interpreter, which is slow


def tokens(model: str, prompts: list[Any], options: dict[str, Any]) -> list[list[int]]:
    """The tokens of an engine with `options`, whose blocks are all free afterwards."""
    with LLM(model, **(SMALL | whole(options))) as llm:
        params = replace(GREEDY, max_tokens=3 if prompts is FEW else 8)
        outs = llm.generate(prompts, params, use_tqdm=False)
        blocks = getattr(llm.engine_core.scheduler, "block_manager", None)
        assert blocks is None or blocks.num_free_blocks == llm.config.num_kvcache_blocks
        return [list(out.token_ids) for out in outs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens("tiny", PROMPTS, {})


@cache
def in_eight_bits() -> list[list[int]]:
    return tokens("tiny", PROMPTS, {"compiled": False, "quantization": "int8"})


def compare(options: dict[str, Any], plain: list[list[int]]) -> None:
    """An engine with `options` gives the plain engine's tokens."""
    wanted = in_eight_bits() if options.get("quantization") else plain
    assert tokens("tiny", PROMPTS, options) == wanted


def slow_in_the_interpreter(number: int) -> Any:
    return pytest.param(number, marks=[pytest.mark.slow] if ROWS[number].get("attention") == "triton" else [])


@pytest.mark.parametrize("number", [*map(slow_in_the_interpreter, range(len(ROWS)))])
def test_options_that_go_together_give_the_same_tokens(
    number: int, plain: list[list[int]], tmp_path: Path
) -> None:
    if ROWS[number].get("attention") != "triton":
        return compare(ROWS[number], plain)
    pytest.importorskip("triton")
    model = str(save_one_layer(tmp_path))
    assert tokens(model, FEW, ROWS[number]) == tokens(model, FEW, {"attention": "torch"})


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEPLOYED)))
def test_options_meet_in_other_processes(number: int, plain: list[list[int]]) -> None:
    compare(DEPLOYED[number], plain)


class NewestFirst(Scheduler):
    """Chapter 12b's."""

    def add(self, seq: Any) -> None:
        super().add(seq)
        self.waiting.rotate(1)


OTHERS: list[dict[str, Any]] = [
    {"overlap": True}, {"interleave_decode": True}, {"scheduler_delay_factor": 0.5}, SPYRE,
    {"speculative_config": NGRAM}, {"trace": True}, {"prefix_cache": "radix"}, {"enable_chunked_prefill": False},
    {"enable_mixed_steps": True},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: next(iter(o)))
def test_a_scheduler_of_the_users_own_is_never_dropped(other: dict[str, Any]) -> None:
    """Nor is an option that it does not know: options of schedulers are refused, the others go with any."""
    options: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 50, "scheduler_cls": NewestFirst}
    name = next(iter(other))
    if name not in ("trace", "prefix_cache", "enable_chunked_prefill"):
        with pytest.raises(ValueError, match=rf"scheduler_cls=NewestFirst does not know .*\b{name}\b.*derive it from"):
            LLM("tiny", **options | other)
        return
    with LLM("tiny", **options | other) as llm:
        assert type(llm.engine_core.scheduler) is NewestFirst
        assert llm.generate("12 + 7 =", GREEDY, use_tqdm=False)[0].text.startswith(" 19")


class InTurns(NewestFirst, TurnScheduler):
    """The newest first, with a gate and with turns."""


class Ahead(NewestFirst, OverlapScheduler):
    """A step ahead."""


class Drafting(NewestFirst, SpecScheduler):
    """With drafts."""


FITTING: list[tuple[Any, dict[str, Any]]] = [
    (InTurns, {"interleave_decode": True}), (Ahead, {"overlap": True}), (InTurns, {}),
    (Drafting, {"speculative_config": NGRAM}),
]  # fmt: skip


@pytest.mark.parametrize(("own", "other"), FITTING)
def test_a_scheduler_derived_from_the_one_asked_for_is_used(
    own: Any, other: dict[str, Any], plain: list[list[int]]
) -> None:
    small: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
    with LLM("tiny", scheduler_cls=own, **small, **other) as llm:
        assert type(llm.engine_core.scheduler) is own
        assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == plain


NO_SCHEDULERS = [int, dict, "atom_mini.scheduler:Nobody", "nowhere:Scheduler", 5, 0, False, print, np.ones(2)]


@pytest.mark.parametrize("wrong", NO_SCHEDULERS, ids=repr)
def test_what_is_not_a_scheduler_is_refused(wrong: Any) -> None:
    for kind, choose in ((Config, assemble.choose_scheduler), (EngineArgs, build.choose_scheduler)):
        with pytest.raises(ValueError, match="scheduler_cls"):
            choose(kind(scheduler_cls=wrong))


def test_a_scheduler_of_padded_batches_needs_its_runner() -> None:
    """The ordinary runner would read its tables wrongly, without an error."""
    from atom_mini.scheduling.spyre import LookAheadScheduler

    with pytest.raises(ValueError, match=r"scheduler_cls=LookAheadScheduler needs .*set scheduler='spyre', too"):
        LLM("tiny", device="cpu", scheduler_cls=LookAheadScheduler)


class TakesNothing(Scheduler):
    def __init__(self) -> None: ...


class Loses(Scheduler):
    """It forgets what is added."""

    def add(self, seq: Any) -> None: ...


class Idle(Scheduler):
    """It plans no step."""

    def schedule(self) -> None: ...


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"speculative_config": NGRAM}, {"engine_process": True}], ids=str)
def test_a_scheduler_that_is_called_otherwise_is_refused(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weights are read, and before any process starts."""
    monkeypatch.setattr(loading, "load_weights", pytest.fail)
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    for kind in (LLM, atom_mini.llm.LLM) if not options else (LLM,):
        with pytest.raises(ValueError, match="scheduler_cls=TakesNothing must be called with the config alone"):
            kind("tiny", device="cpu", scheduler_cls=TakesNothing, **options)


FAILING = [(Loses, "Loses has lost the unfinished requests"), (Idle, "Idle.schedule plans no step")]


@pytest.mark.parametrize(("own", "says"), FAILING)
def test_a_scheduler_that_fails_is_named(own: type[Scheduler], says: str) -> None:
    """No caller waits forever."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=50, scheduler_cls=own) as llm:
        for ask in (lambda: llm.generate("1 + 1 =", GREEDY), lambda: [*llm.stream("1 + 1 =", GREEDY)]):
            with pytest.raises(RuntimeError, match=says):
                ask()

    async def main() -> None:
        async with AsyncLLM("tiny", device="cpu", num_kvcache_blocks=50, scheduler_cls=own) as engine:
            with pytest.raises(RuntimeError, match=says):
                async for _ in engine.generate("1 + 1 =", GREEDY):
                    pass

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_scheduler_is_named_by_a_text_too() -> None:
    with LLM("tiny", device="cpu", num_kvcache_blocks=50, scheduler_cls="atom_mini.scheduling.turns:TurnScheduler") as llm:
        assert type(llm.engine_core.scheduler) is TurnScheduler


def test_options_are_a_field_of_a_users_own_class() -> None:
    """pydantic accepts an existing object as it is, and settles nothing twice."""
    holder = TypeAdapter(dict[str, EngineArgs])
    config = EngineArgs(prefix_cache="none", max_num_seqs=3)
    assert holder.validate_python({"a": config})["a"] is config and not config.enable_prefix_caching


def test_the_page_has_the_table() -> None:
    readme = (Path(__file__).resolve().parents[2] / "docs" / "together.md").read_text()
    assert show.as_markdown(parts.TOGETHER) in readme


def test_the_keywords_for_editors_are_the_options() -> None:
    """Names and types of `LLM`'s keywords, as type checkers see them, are those of the fields."""
    hints = get_type_hints(EngineArgs)
    options = {f.name: hints[f.name] for f in fields(EngineArgs) if f.init and f.name != "model"}
    assert get_type_hints(parts.EngineOptions) == options
    assert LLM.__init__.__annotations__["options"] == "Unpack[EngineOptions]"


def test_a_config_is_compared_copied_and_frozen_with_all_options() -> None:
    """What is found out goes into a copy: the user's own may make a second engine. A copy is checked
    as the first was."""
    options: dict[str, Any] = {"overlap": True, "prefix_cache": "radix", "max_num_seqs": 3}
    config = EngineArgs("tiny", device="cpu", max_model_len=32, **options)
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), replace(config)):
        assert same == config and repr(same) == repr(config) and asdict(same) == asdict(config)
    for name in options:
        assert name in asdict(config) and f"{name}=" in repr(config)
    other = replace(config, max_num_seqs=2)
    assert other != config and asdict(other) == asdict(config) | {"max_num_seqs": 2}
    with pytest.raises(ValueError, match="scheduler='spyre' does not go with overlap=True"):
        replace(config, scheduler="spyre")
    for kind in (config, Config("tiny", device="cpu")):
        with pytest.raises(FrozenInstanceError):
            kind.num_kvcache_blocks = 4  # type: ignore[misc]
    core = build.make_core(other)
    assert other.num_kvcache_blocks is None and core.config.num_kvcache_blocks == 4
    assert core.config is core.scheduler.config
    with pytest.raises(AssertionError, match="num_kvcache_block"):
        config.changed(num_kvcache_block=4)
    with pytest.raises(ValueError, match="no option 'chunk_sise': did you mean 'chunk_size'"):
        EngineArgs(chunk_sise=4)  # type: ignore[call-arg]


CHOSEN: list[tuple[dict[str, Any], str]] = [
    ({"schedule_policy": "lpm"}, "LpmScheduler"), ({"kv_offloading_size": 0.01}, "OffloadManager"),
    ({"prefix_cache": "radix"}, "RadixCache"), ({"interleave_decode": True}, "TurnScheduler"),
    ({"scheduler_delay_factor": 0.5}, "TurnScheduler"), ({"packed": True}, "CpuOps"),
    ({"overlap": True}, "OverlapScheduler"), ({"speculative_config": NGRAM}, "SpecScheduler"),
    ({"compiled": True}, "CompiledRunner"), ({"enable_mixed_steps": True}, "Mixed"),
    (SPYRE, "SpyreScheduler"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "part"), CHOSEN)
def test_options_choose_the_parts(options: dict[str, Any], part: str) -> None:
    """One that does nothing gives the plain engine's tokens, too."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=50, **options) as llm:
        core: Any = llm.engine_core
        ops = getattr(core.runner, "ops", None)
        manager = getattr(core.scheduler, "block_manager", None)
        index = getattr(manager, "index", None)
        made = " ".join(type(x).__name__ for x in (core.scheduler, core.runner, manager, index, ops))
        assert part in made


def test_a_core_made_by_hand_drops_no_option() -> None:
    """Without a scheduler it takes the plain one, and says so if the options ask for another."""
    room: dict[str, Any] = {"num_kvcache_blocks": 8}
    for options in ({"enable_mixed_steps": True}, {"interleave_decode": True}, {"scheduler_cls": NewestFirst}):
        config = EngineArgs(**room, **options)
        with pytest.raises(ValueError, match=f"{next(iter(options))} asks for another scheduler than Scheduler"):
            EngineCore(config, show.CountingRunner())
        own = build.make_scheduler(config)
        assert EngineCore(config, show.CountingRunner(), own).scheduler is own
    assert type(EngineCore(EngineArgs(**room), show.CountingRunner()).scheduler) is Scheduler
