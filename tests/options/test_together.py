"""Pairs and triples of all options are refused by name, or give the plain engine's tokens; and a user's own scheduler is
never dropped silently."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import subprocess
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import show
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
    "max_batch_tkv_limit": [4096], "interleave": [False], "speculative_config": [NGRAM], "device": ["cpu"],
    "compiled": [True, False], "packed": [True], "fuse_layers": [True], "quantization": ["int8"],
}  # fmt: skip
PROCESSES: dict[str, list[Any]] = {
    "engine_process": [True], "ready_timeout": [100.0], "ping_timeout": [100.0], "tensor_parallel_size": [2],
    "enable_expert_parallel": [True], "collective_timeout": [100.0], "data_parallel_size": [2],
    "routing": ["load", "prefix"], "lockstep": [True],
}  # fmt: skip
SPYRE = {"scheduler": "spyre", "kv_cache_block_size": 16, "chunk_size": 32, "max_model_len": 128, "max_num_seqs": 4}
PROMPTS = ["12 + 7 =", "Once upon a time", [5, 6, 7] * 10, [5, 6, 7] * 10 + [8]]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def draw(rng: random.Random, values: dict[str, list[Any]], count: int) -> dict[str, Any]:
    """`count` options with a value each, and the options that Spyre's scheduler needs."""
    options = {name: rng.choice(values[name]) for name in rng.sample(sorted(values), count)}
    return SPYRE | options if options.get("scheduler") == "spyre" else options


def test_every_option_is_drawn() -> None:
    drawn = {f.name for f in fields(EngineArgs) if f.init} - {"model", "scheduler_cls"}
    assert drawn == {*VALUES, *PROCESSES}


def settled(options: dict[str, Any]) -> Any:
    """The settings that follow from `options`, or "refused" if the error names one of them."""
    try:
        known = vars(EngineArgs("tiny", **options))
    except ValueError as error:
        names = {*options} | ({"num_speculative_tokens"} if "speculative_config" in options else set())
        assert any(name in str(error) for name in names), f"{options}: {error}"
        return "refused"
    return {n: v for n, v in known.items() if n not in ("spec", "engine_order", "rank_order")}


def test_a_config_is_pickled_and_copied_whole() -> None:
    """With the options of later parts, which are its own fields."""
    config = EngineArgs("tiny", overlap=True, device="cpu")
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
        assert same == config and repr(same) == repr(config) and asdict(same) == asdict(config)


@pytest.mark.parametrize("seed", range(4))
def test_what_goes_together_has_no_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs, and drawn triples, give the same settings in any order of the table."""
    rng = random.Random(seed)
    everything = {n: [rng.choice(v)] for n, v in (VALUES | PROCESSES).items()}
    asked = [{a: everything[a][0], b: everything[b][0]} for a, b in combinations(sorted(everything), 2)]
    asked += [draw(rng, VALUES | PROCESSES, 3) for _ in range(100)]
    usual = [settled(options) for options in asked]
    assert 50 < usual.count("refused") < len(usual) - 50
    monkeypatch.setattr(parts, "TOGETHER", rng.sample(parts.TOGETHER, len(parts.TOGETHER)))
    for options, before in zip(asked, usual, strict=True):
        shuffled = dict(rng.sample(list(options.items()), len(options)))
        assert settled(shuffled) == before, options


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with LLM("tiny", device="cpu", num_kvcache_blocks=200) as llm:
        return [out.token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@cache
def in_eight_bits() -> list[list[int]]:
    """The plain engine's tokens with quantization="int8"."""
    with LLM("tiny", device="cpu", num_kvcache_blocks=200, compiled=False, quantization="int8") as llm:
        return [list(out.token_ids) for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def compare(options: dict[str, Any], plain: list[list[int]]) -> bool:
    """Whether an engine with `options` runs, and then with the plain engine's tokens."""
    if settled(options) == "refused":
        return False
    small = {"device": "cpu", "num_kvcache_blocks": 200, "max_num_seqs": 4}
    try:
        llm = LLM("tiny", **(small | options))
    except ValueError as error:  # what only the machine knows: no interpreter, no GPU
        assert any(name in str(error) for name in options), f"{options}: {error}"
        return False
    wanted = in_eight_bits() if llm.config.quantization else plain
    with llm:
        outs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [list(out.token_ids) for out in outs] == wanted, options
        blocks = getattr(llm.engine_core.scheduler, "block_manager", None)
        assert blocks is None or blocks.num_free_blocks == llm.config.num_kvcache_blocks
    return True


def drawn() -> Iterator[dict[str, Any]]:
    for seed in range(10):
        rng = random.Random(100 + seed)
        yield from (draw(rng, VALUES, 2 + i % 2) for i in range(16))


DRAWN = [*drawn()]


def test_half_of_what_is_drawn_runs() -> None:
    assert len(DRAWN) / 2 < sum(settled(options) != "refused" for options in DRAWN) < len(DRAWN)


@pytest.mark.parametrize("first", range(0, len(DRAWN), 4))
def test_pairs_and_triples_are_refused_or_give_the_same_tokens(first: int, plain: list[list[int]]) -> None:
    for options in DRAWN[first : first + 4]:
        compare(options, plain)


@pytest.mark.alone
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_options_meet_in_other_processes(seed: int, plain: list[list[int]]) -> None:
    rng = random.Random(200 + seed)
    for knob in ("engine_process", "tensor_parallel_size", "data_parallel_size"):
        several = {knob: PROCESSES[knob][0]}
        compare(several | draw(rng, VALUES, 2), plain)


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


FITTING: list[tuple[type[Scheduler], dict[str, Any]]] = [
    (InTurns, {"interleave_decode": True}), (InTurns, {"scheduler_delay_factor": 0.5}),
    (Ahead, {"overlap": True}), (Drafting, {"speculative_config": NGRAM}), (InTurns, {}),
]  # fmt: skip


@pytest.mark.parametrize(("own", "other"), FITTING, ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(x))
def test_a_scheduler_derived_from_the_one_asked_for_is_used(
    own: type[Scheduler], other: dict[str, Any], plain: list[list[int]]
) -> None:
    with LLM("tiny", device="cpu", num_kvcache_blocks=200, scheduler_cls=own, **other) as llm:
        assert type(llm.engine_core.scheduler) is own
        assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == plain


NO_SCHEDULERS = [int, dict, "atom_mini.scheduler:Nobody", "nowhere:Scheduler", 5, 0, False, print, np.ones(2)]


@pytest.mark.parametrize("wrong", NO_SCHEDULERS, ids=repr)
def test_what_is_not_a_scheduler_is_refused(wrong: Any) -> None:
    for kind, choose in ((Config, assemble.choose_scheduler), (EngineArgs, build.choose_scheduler)):
        with pytest.raises(ValueError, match="scheduler_cls"):
            choose(kind(scheduler_cls=wrong))


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


@pytest.mark.alone
def test_a_scheduler_of_the_users_own_crosses_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process imports it by its name; a class that cannot be imported is refused."""
    monkeypatch.setattr(NewestFirst, "__module__", "__main__")
    with pytest.raises(ValueError, match="NewestFirst is defined in __main__"):
        EngineArgs("tiny", engine_process=True, scheduler_cls=NewestFirst)


@pytest.mark.parametrize("options", [
    SPYRE, {"overlap": True}, {"interleave_decode": True}, {"scheduler_delay_factor": 0.5}, {"speculative_config": NGRAM},
    {"enable_chunked_prefill": False}, {"lockstep": True, "data_parallel_size": 2},
], ids=lambda o: next(iter(o)))  # fmt: skip
def test_mixed_steps_go_with_no_other_plan(options: dict[str, Any]) -> None:
    """Refused with both names and what to change, whichever is given first."""
    name = next(iter(options))
    for both in ({"enable_mixed_steps": True} | options, options | {"enable_mixed_steps": True}):
        with pytest.raises(ValueError, match=rf"{name}=.* does not go with enable_mixed_steps=True: set it to"):
            EngineArgs("tiny", **both)


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


def test_a_name_that_no_part_knows() -> None:
    """The hint knows the options of all parts, not only those of Part I."""
    with pytest.raises(ValueError, match="no option 'chunk_sise': did you mean 'chunk_size'"):
        EngineArgs(chunk_sise=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"prefix_cache": "radix"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"engine_process": True, "ping_timeout": 9.0},
        {"scheduler": "spyre", "max_model_len": 128},
        {},
    ],
    ids=str,
)
def test_a_config_is_compared_and_copied_with_all_options(options: dict[str, Any]) -> None:
    """Comparing, printing, `asdict`, and `replace` include the options of later parts."""
    config = EngineArgs(**options)
    assert (config == EngineArgs()) is (not options) and config == EngineArgs(**options)
    for name in options:
        assert name in asdict(config) and f"{name}=" in repr(config)
    other = replace(config, max_num_seqs=2)
    assert other != config and other.max_num_seqs == 2
    assert asdict(other) == asdict(config) | {"max_num_seqs": 2}
    assert replace(other, max_num_seqs=config.max_num_seqs) == config
    assert config != "a config"


def test_a_config_is_frozen_and_what_is_found_out_goes_into_a_copy() -> None:
    """The engine's config knows its blocks; the user's own stays as it was checked, and may make a second engine."""
    config = EngineArgs("tiny", device="cpu", max_model_len=32, max_num_seqs=2)
    for kind in (config, Config("tiny", device="cpu")):
        with pytest.raises(FrozenInstanceError):
            kind.num_kvcache_blocks = 4  # type: ignore[misc]
    core = build.make_core(config)
    assert config.num_kvcache_blocks is None and core.config.num_kvcache_blocks == 4
    assert core.config is core.scheduler.config and core.config == replace(config, num_kvcache_blocks=4)
    with pytest.raises(AssertionError, match="num_kvcache_block"):
        config.changed(num_kvcache_block=4)
    with LLM("tiny", device="cpu", max_num_seqs=2, max_model_len=32) as llm:
        assert llm.config is llm.engine_core.config and llm.config.num_kvcache_blocks == 4


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


def test_a_copied_config_still_refuses() -> None:
    with pytest.raises(ValueError, match="scheduler='spyre' does not go with overlap=True"):
        replace(EngineArgs(overlap=True, max_model_len=128), scheduler="spyre")
    with pytest.raises(ValueError, match="routing has no effect with data_parallel_size=1"):
        replace(EngineArgs(), routing="prefix")
