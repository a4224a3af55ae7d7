"""A second pool in host memory: random loads against the oracle, planted faults, interrupts, memory, and what it saves."""

from __future__ import annotations

import gc
import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import symbolic
import torch
from show import CountingRunner, check_blocks
from symbolic import Request, SymbolicCopies, SymbolicRunner, check_host, run_many, run_trial
from test_fuzz import check_often, mutate
from test_interrupt import FAR, REQUESTS, STRIDE, interrupt_everywhere

from atom_mini import LLM, EngineArgs, SamplingParams, loading
from atom_mini.block_manager import BlockManager
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_scheduler
from atom_mini.options.info import describe
from atom_mini.scheduling import offload
from atom_mini.scheduling.host_pool import Content, HostPool, OffloadCore, OffloadManager
from atom_mini.scheduling.lpm import LpmScheduler
from atom_mini.scheduling.offload import HostCopies
from atom_mini.sequence import Sequence

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "hash": {}, "radix": {"cache": "radix"}, "tight": {"tight": True}, "tight, radix": {"tight": True, "cache": "radix"},
    "mixed": {"mixed": True, "tight": True}, "lpm": {"lpm": LpmScheduler, "tight": True},
}  # fmt: skip
SLOW = [pytest.param(name, range(100, 1000), marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize(("variant", "seeds"), [(name, range(100)) for name in VARIANTS] + SLOW)
def test_outputs_equal_the_oracle_with_two_pools(variant: str, seeds: range) -> None:
    """Each block of the second pool is compared with the oracle after each step, too."""
    stats = run_many(seeds, host=True, **VARIANTS[variant])
    least = {"saved": 3, "loaded": 0.4, "failures": 0.4, "prefix_hits": 0.5, "aborts_running": 0.04}
    check_often(stats, {name: int(n * len(seeds)) for name, n in least.items()})


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a block is used before its copy has arrived": (
        OffloadCore, "forward", "self.copies.run(batch.saves, batch.loads)\n    return super().forward(batch)",
        "output = super().forward(batch)\n        self.copies.run(batch.saves, batch.loads)\n        return output\n"
        "    return super().forward(batch)",
    ),
    "a save is found before its copy is made": (
        HostPool, "save", "self.saving[content] = host_id",
        "self.saved[content] = host_id",
    ),
    "a failed save is found": (
        HostPool, "rollback", "self.saving: dict[Content, int] = {}",
        "self.saving = vars(self).get('saving', {})",
    ),
    "a host block is freed during a copy": (HostPool, "_take_host_block", " if c not in self.loading", ""),
    "a host block is held too late": (HostPool, "hold", "self.loading.update(contents)", "pass"),
    "a lost content is still found": (HostPool, "_take_host_block", "self.saved.pop(victim)", "self.saved[victim]"),
    "a reused block is saved as what it was": (
        OffloadManager, "_fresh_block", "self.contents.pop(",
        "self.contents.get(",
    ),
    "what was undone is saved": (
        OffloadManager, "reset", "self.contents: dict[int, Content] = {}",
        "self.contents = vars(self).get('contents', {})",
    ),
    "orders of an undone step stay": (
        OffloadManager, "reset", "self.loads: list[tuple[int, int]] = []",
        "self.loads = vars(self).get('loads', [])",
    ),
    "parents are not compared": (HostPool, "content", "key = parent, ", "key = None, "),
    "a last token is found": (OffloadManager, "find_saved", "(seq.num_tokens - 1)", "seq.num_tokens"),
    "an order is carried out twice": (OffloadManager, "publish", "self.saves, self.loads = [], []", "self.loads = []"),
    "host blocks are lost": (HostPool, "rollback", "if i not in used", "if i not in used and i"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzz_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever breaks first
        for seed in range(1000):
            run_trial(seed, tight=True, host=True)


def make_core(**options: Any) -> OffloadCore:
    small = {"num_kvcache_blocks": 6, "max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_cache_block_size": 4}
    config = EngineArgs(**small | options)
    runner = SymbolicRunner(config, 12, strict=False)
    return OffloadCore(config, runner, make_scheduler(config), SymbolicCopies(runner, 5))


@pytest.mark.parametrize(
    ("options", "stride"),
    [({}, FAR), pytest.param({"prefix_cache": "radix"}, STRIDE, marks=pytest.mark.slow),
     pytest.param({"enable_mixed_steps": True}, FAR, marks=pytest.mark.slow)],
)  # fmt: skip
def test_interrupted_at_any_line(options: dict[str, Any], stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied before is right afterwards: later requests load it."""
    loaded: Counter[str] = Counter()
    monkeypatch.setattr(symbolic.SymbolicCopies, "run", counted(symbolic.SymbolicCopies.run, loaded))
    again = [Request(0, r.prompt, r.params) for r in REQUESTS]
    interrupt_everywhere(lambda: make_core(**options), REQUESTS + again, False, stride)
    assert loaded["saves"] > 100 and loaded["loads"] > 100, loaded


def counted(run: Any, stats: Counter[str]) -> Any:
    def count(self: Any, saves: Any, loads: Any) -> None:
        run(self, saves, loads)
        stats.update(saves=len(saves), loads=len(loads))

    return count


def test_memory_is_flat_over_5000_requests() -> None:
    """Prompts with new tokens, each of them saved and forgotten."""
    core = make_core(num_kvcache_blocks=12, max_num_batched_tokens=64)
    core.runner = CountingRunner()
    core.copies.run = lambda *_: None  # type: ignore[method-assign]
    sizes = []
    for i in range(5000):
        core.add(Sequence([i, i + 1, i + 2, i + 3] * 5, 4, SamplingParams(max_tokens=2, ignore_eos=True)))
        while core.step():
            pass
        if i in (500, 4999):
            gc.collect()
            sizes.append((len(core.manager.host.known), len(gc.get_objects())))
    (known, objects), (later, more) = sizes
    assert known == later <= 12 + 5 + 2 * 5 and more < objects + 100, sizes
    check_host(core.manager)


def test_a_long_chain_of_contents_is_released_without_recursion() -> None:
    host, content = HostPool(1), None
    for i in range(200_000):
        content = host.content(content, [i])
    assert isinstance(content, Content) and len(host.known) == 200_000
    del content
    assert len(host.known) == 0


def conversations(seed: int, count: int = 40, turns: int = 4) -> list[list[list[int]]]:
    """Turns of `count` conversations, of which each four share a system prompt; a turn is the user's new tokens."""
    rng = random.Random(seed)

    def words(n: int) -> list[int]:
        return [rng.randrange(200) for _ in range(n)]

    systems = [words(48) for _ in range(count // 4)]
    return [[[*systems[i % len(systems)], *words(16)], *(words(24) for _ in range(turns - 1))] for i in range(count)]


def recomputed(core: EngineCore, chats: list[list[list[int]]]) -> tuple[int, int]:
    """(tokens computed again although an earlier step had computed them, prompt tokens) of conversations that take turns."""
    known: list[list[int]] = [[] for _ in chats]
    again = asked = 0
    for turn in range(len(chats[0])):
        for i, chat in enumerate(chats):
            before = len(known[i])
            seq = Sequence([*known[i], *chat[turn]], 8, SamplingParams(max_tokens=8, ignore_eos=True))
            core.add(seq)
            while core.step():
                pass
            asked += seq.num_prompt_tokens
            again += max(0, before - 1 - seq.num_cached_tokens)
            known[i] = seq.token_ids
    return again, asked


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_conversations_that_take_turns_compute_less_than_half_again(cache: Any) -> None:
    config = EngineArgs(kv_cache_block_size=8, num_kvcache_blocks=120, max_num_seqs=4, prefix_cache=cache)
    runner, chats = SymbolicRunner(config, 200, strict=False), conversations(1)
    plain, asked = recomputed(EngineCore(config, runner, make_scheduler(config)), chats)
    core = OffloadCore(config, runner, make_scheduler(config), SymbolicCopies(runner, 1000))
    less, same = recomputed(core, chats)
    assert asked == same and plain > asked // 3, "the load must lose blocks"
    assert less < plain // 2, (less, plain)
    check_host(core.manager)


MODELS: list[dict[str, Any]] = [
    {}, {"prefix_cache": "radix", "schedule_policy": "lpm"}, {"enable_mixed_steps": True, "max_num_batched_tokens": 32},
]  # fmt: skip
MORE: list[dict[str, Any]] = [{"interleave_decode": True}, {"compiled": True}, {"packed": True}, {"trace": True}]


@pytest.mark.parametrize("options", [*MODELS, *(pytest.param(more, marks=pytest.mark.slow) for more in MORE)], ids=str)
def test_the_models_tokens_are_the_same(options: dict[str, Any]) -> None:
    """With preemptions, several answers, and prompts that come again."""
    prompts = [[5, 6, 7] * 30 + [i] * 20 for i in range(8)] * 2
    params = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, n=1 + i % 2) for i in range(16)]
    found = []
    for size in (None, 0.01):
        small: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 21, "max_num_seqs": 4}
        with LLM("tiny", kv_offloading_size=size, **small | options) as llm:
            outs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
            found.append([out.token_ids for out in outs[0] + outs[1]])
            if size:
                core: Any = llm.engine_core
                metrics = llm.metrics
                assert metrics.num_saved_blocks > 20 and metrics.num_loaded_blocks > 5
                counted = sum(out.metrics["loaded_tokens"] for out in outs[0] + outs[1])
                assert counted <= metrics.num_loaded_blocks * 16
                check_host(core.manager)
                check_blocks(core.manager, [])
    assert found[0] == found[1]


def test_copies_bring_back_what_was_there() -> None:
    """Saves before loads: a block may be saved and overwritten by a load in one step."""
    config = EngineArgs("tiny", device="cpu", kv_offloading_size=0.001)
    copies = HostCopies(config)
    shape = list(copies.host.shape)
    cache = torch.randn(shape[1], shape[2], 6, *shape[3:])
    copies.attach(cache)
    before = cache.clone()
    copies.run([(4, 0), (1, 3)], [])
    copies.run([(2, 1)], [(0, 2), (3, 5)])
    assert torch.equal(cache[:, :, 2], before[:, :, 4]) and torch.equal(cache[:, :, 5], before[:, :, 1])
    assert torch.equal(copies.host[1], before[:, :, 2])
    copies.run([], [(1, 0)])
    assert torch.equal(cache[:, :, 0], before[:, :, 2])
    for same in (1, 3, 4):
        assert torch.equal(cache[:, :, same], before[:, :, same])


class FakeStream:
    """Notes which stream waits for which."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append((self.name, other.name))


def test_a_gpus_copies_go_through_the_staging_buffer_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with made-up streams: the numbers, and who waits for whom."""
    waits: list[tuple[str, str]] = []
    compute = FakeStream("compute", waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    copies: Any = HostCopies(EngineArgs("tiny", device="cpu", kv_offloading_size=0.01))
    shape = list(copies.host.shape)
    copies.attach(cache := torch.randn(shape[1], shape[2], 50, *shape[3:]))
    before = cache.clone()
    copies.on_gpu, copies.stream = True, FakeStream("copy", waits)
    copies.staging = torch.empty(offload.NUM_STAGED, *shape[1:])
    copies.run([(i, i + 2) for i in range(40)], [])
    assert torch.equal(copies.host[2:42], before[:, :, :40].movedim(2, 0))
    assert waits == [("compute", "copy"), ("copy", "compute")] * 3
    waits.clear()
    copies.run([(45, 0)], [(5, 45), (6, 46)])
    assert torch.equal(copies.host[0], before[:, :, 45])
    assert torch.equal(cache[:, :, 45:47], before[:, :, 3:5])
    assert waits == [("compute", "copy"), ("copy", "compute"), ("compute", "copy")]


@pytest.mark.gpu
def test_a_gpu_brings_back_what_was_there() -> None:
    copies = HostCopies(EngineArgs("tiny", device="cuda", kv_offloading_size=0.01))
    shape = list(copies.host.shape)
    cache = torch.randn(shape[1], shape[2], 50, *shape[3:]).to("cuda", copies.host.dtype)
    copies.attach(cache)
    before = cache.clone()
    copies.run([(i, i + 2) for i in range(40)], [])
    cache.zero_()
    copies.run([], [(i + 2, i) for i in range(40)])
    assert torch.equal(cache[:, :, :40], before[:, :, :40]) and not cache[:, :, 40:].any()


def test_an_abort_in_the_middle_leaves_what_was_saved() -> None:
    core = make_core(max_num_batched_tokens=64)
    prompt = [*range(1, 18)]
    for i, tokens in enumerate((prompt, [30] * 20, prompt)):
        core.add(Sequence(tokens, 4, SamplingParams(max_tokens=3, ignore_eos=True), id=i))
        core.step()
        assert (core.runner.stats["loaded"] > 0) == (i == 2)  # type: ignore[attr-defined]
        core.abort(i)
        assert isinstance(core.copies, SymbolicCopies)
        check_host(core.manager, core.copies.held)
        check_blocks(core.manager, [])


def test_a_copy_that_fails_is_never_found() -> None:
    """And what was saved before stays."""
    core = make_core(max_num_batched_tokens=64)
    assert isinstance(core.copies, SymbolicCopies)
    for i in range(2):
        core.add(Sequence([i] * 20, 4, SamplingParams(max_tokens=1), id=i))
        core.step()
    kept = core.manager.host.saved.copy()
    assert len(kept) == 4
    core.copies.fails = lambda: True
    core.add(Sequence([2] * 20, 4, SamplingParams(max_tokens=1), id=2))
    with pytest.raises(symbolic.StepFailed):
        core.step()
    assert core.manager.host.saved.items() <= kept.items() and core.manager.host.saved != kept  # one was to be replaced
    check_host(core.manager, core.copies.held)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kv_offloading_size": 0}, r"kv_offloading_size=0.* must be a number above 0"),
    ({"kv_offloading_size": -1.0}, "kv_offloading_size=-1.0 must be a number above 0"),
    ({"kv_offloading_size": float("inf")}, "kv_offloading_size"),
    ({"kv_offloading_size": "4"}, "kv_offloading_size"),
    ({"kv_offloading_size": 1e6}, r"kv_offloading_size=1000000.0 GiB exceeds the host's [\d.]+ GiB of free memory: lower it"),
    ({"kv_offloading_size": 1e-6}, r"kv_offloading_size=1e-06 GiB holds no block of \d+ bytes: raise it"),
    ({"enable_prefix_caching": False}, "enable_prefix_caching=False does not go with kv_offloading_size"),
    ({"prefix_cache": "none"}, "does not go with kv_offloading_size"),
    ({"overlap": True}, "overlap=True does not go with kv_offloading_size: set it to False"),
    ({"scheduler": "spyre", "max_model_len": 128}, "scheduler='spyre' does not go with kv_offloading_size"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config.*kv_offloading_size"),
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with kv_offloading_size"),
    ({"data_parallel_size": 2, "lockstep": True}, "lockstep=True does not go with kv_offloading_size"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_sizes_and_company_are_refused_before_anything_loads(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", pytest.fail)
    monkeypatch.setattr(torch, "empty", pytest.fail)
    with pytest.raises(ValueError, match=message):
        LLM("tiny", device="cpu", **{"kv_offloading_size": 0.01} | options)


def test_several_engines_need_the_memory_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "free_host_bytes", lambda: 3 * offload.GIB)
    EngineArgs("tiny", device="cpu", kv_offloading_size=3.0)
    with pytest.raises(ValueError, match=r"GiB for each of 2 engines exceeds the host's 3\.00 GiB"):
        EngineArgs("tiny", device="cpu", kv_offloading_size=2.0, data_parallel_size=2)


def test_closing_gives_the_memory_back() -> None:
    with LLM("tiny", device="cpu", kv_offloading_size=0.01, num_kvcache_blocks=10) as llm:
        core: Any = llm.engine_core
        assert core.copies.host.nbytes <= 0.01 * offload.GIB < core.copies.host.nbytes + offload.block_bytes(llm.config)
    assert not hasattr(core, "copies")


def test_info_counts_the_second_pool() -> None:
    config = EngineArgs("tiny", device="cpu", kv_offloading_size=0.01)
    report = describe(config)
    assert report["host_pool_tokens"] == 16 * offload.count_host_blocks(config) > 0
    assert report["host_pool_bytes"] == report["host_pool_tokens"] * report["kvcache_bytes_per_token"]
    assert "host_pool_bytes" not in describe(EngineArgs("tiny", device="cpu"))


def test_without_the_option_nothing_of_it_is_there() -> None:
    with LLM("tiny", device="cpu", num_kvcache_blocks=10) as llm:
        assert type(llm.engine_core) is EngineCore and type(llm.engine_core.scheduler.block_manager) is BlockManager
