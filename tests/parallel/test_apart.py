"""Prompts computed by some engines, answers by others: random loads against the oracle, planted faults, interrupts, deaths,
memory, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import tempfile
import threading
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from deployed import APART, LONG, SMALL, core_of, wait_for
from show import CountingRunner, check_blocks, new_tokens
from symbolic import Request, StepFailed, SymbolicRunner, Trial, make_trial, tighten
from test_families import MODELS
from test_fuzz import check_often, mutate
from test_interrupt import FAR, REQUESTS, Tripwire
from test_server import serving

from atom_mini import LLM, EngineArgs, SamplingParams, loading
from atom_mini.block_manager import BlockManager
from atom_mini.config import Config
from atom_mini.options import build
from atom_mini.options.build import make_scheduler
from atom_mini.parallel import manager
from atom_mini.parallel.apart import Held
from atom_mini.parallel.connectors import P2pNcclConnector, Parcel, Pipe
from atom_mini.parallel.kv_transfer import Arrival, Offer, TransferCore, resume
from atom_mini.parallel.manager import EngineDead
from atom_mini.parallel.roles import check_connector, connector_name, devices_of
from atom_mini.sequence import Sequence, SequenceStatus
from atom_mini.serving.async_llm import AsyncLLM
from atom_mini.structured.params import StructuredOutputsParams

# A front without processes: the same messages, at any time and in their order


class SymbolicPull:
    """Copies hashes from the pool of another runner; the device may fail between two copies."""

    def __init__(self, runner: SymbolicRunner, pools: list[SymbolicRunner], fails: Callable[[], bool] = bool) -> None:
        self.runner, self.pools, self.fails = runner, pools, fails

    def receive(self, request_id: int, source: int, blocks: list[int]) -> Arrival:
        return Arrival.HERE

    def drop(self, request_id: int) -> None:
        pass

    def run(self, request_id: int, source: int, pairs: list[tuple[int, int]]) -> None:
        for theirs, ours in pairs:
            there, here = self.pools[source].block_slots[theirs], self.runner.block_slots[ours]
            for old, new in zip(self.pools[source].layers, self.runner.layers, strict=True):
                new[here.start : here.stop] = old[there.start : there.stop]
            if self.fails():
                raise StepFailed
        self.runner.stats["copied"] += len(pairs)


class SymbolicPipe:
    """What one engine has queued for another, or expects from it."""

    def __init__(self) -> None:
        self.queue: deque[Parcel] = deque()
        self.is_broken = False

    def put(self, parcel: Parcel) -> None:
        self.queue.append(parcel)

    def close(self) -> None:
        self.is_broken = True


class SymbolicPeer(P2pNcclConnector):
    """The connector with hashes in place of tensors, and `Front.move` in place of a group."""

    def __init__(self, runner: SymbolicRunner, front: Front) -> None:
        self.runner, self.front, self.number = runner, front, len(front.pools) - 1
        self.pipes: Any = defaultdict(SymbolicPipe)
        self.parcels, self.dropped = {}, []
        self.num_staged = front.luck.choice((1, 4, 64))
        self.ask = lambda _, source, blocks: front.asked.append((source, self.number, blocks))

    def gather(self, blocks: list[int]) -> Any:
        slots = [self.runner.block_slots[block] for block in blocks]
        return [[layer[at.start : at.stop] for layer in self.runner.layers] for at in slots]

    def staging(self, count: int) -> Any:
        return [[]] * count

    def scatter(self, data: Any, rows: list[int], blocks: list[int]) -> None:
        for row, block in zip(rows, blocks, strict=True):
            at = self.runner.block_slots[block]
            for layer, new in zip(self.runner.layers, data[row], strict=True):
                layer[at.start : at.stop] = new
            if self.front.fails():
                raise StepFailed
        self.runner.stats["copied"] += len(rows)

    def receive(self, request_id: int, source: int, blocks: list[int]) -> Arrival:
        try:
            return super().receive(request_id, source, blocks)
        except ConnectionError:
            self.front.stats["computed_here"] += 1
            raise

    def drop(self, request_id: int) -> None:
        parcel = self.parcels.get(request_id)
        self.front.stats["drained"] += parcel is not None and not parcel.is_here
        super().drop(request_id)


class Member:
    """An engine of one kind, with the requests that the front has given it, and the messages to it."""

    def __init__(self, front: Front, is_sender: bool) -> None:
        self.front, self.is_sender = front, is_sender
        config = front.configs[not is_sender]
        self.runner = SymbolicRunner(config, front.trial.alphabet, front.strict, front.fails)
        self.number = len(front.pools)
        front.pools.append(self.runner)
        copies: Any = SymbolicPull(self.runner, front.pools, front.fails)
        if front.is_p2p:
            copies = SymbolicPeer(self.runner, front)
        self.core = TransferCore(config, self.runner, make_scheduler(config), copies)
        self.core.scheduler.eos_token_ids = tuple(front.trial.eos_token_ids)
        self.core.scheduler.max_len = front.trial.max_len
        self.seqs: set[int] = set()
        self.offered: set[int] = set()  # of what it holds
        self.taken: set[int] = set()  # that the sender does not know to be copied

    def check(self) -> None:
        core, manager = self.core, self.core.scheduler.block_manager
        check_blocks(manager, core.scheduler.running, core.held.values())
        assert len(core.scheduler.running) <= core.config.max_num_seqs, "more run than may"
        queued = {s.id for s in [*core.scheduler.running, *core.scheduler.waiting]} | core.offers.keys()
        assert queued == core.scheduler.seqs.keys(), "a request is in no queue"


class Front:
    """Senders and receivers, and what the front knows of each request."""

    def __init__(
        self, trial: Trial, configs: tuple[Config, Config], luck: random.Random, strict: bool, is_p2p: bool
    ) -> None:
        self.trial, self.configs, self.luck, self.strict, self.is_p2p = trial, configs, luck, strict, is_p2p
        self.asked: deque[tuple[int, int, list[int]]] = deque()  # (sender, receiver, blocks): not yet told
        self.gone: list[int] = []  # has died, and not all know it
        self.left = 10 if trial.failure_rate else 0
        self.pools: list[SymbolicRunner] = []
        self.stats: Counter[str] = Counter()
        self.senders = [Member(self, True) for _ in range(luck.choice((1, 1, 2)))]
        self.receivers = [Member(self, False) for _ in range(luck.choice((1, 1, 2)))]
        self.tokens: dict[int, list[int]] = {}
        self.hashes: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    @property
    def members(self) -> list[Member]:
        return self.senders + self.receivers

    def fails(self) -> bool:
        failing = self.left > 0 and self.luck.random() < self.trial.failure_rate
        self.left -= failing
        return failing

    def sequence(self, i: int) -> Sequence:
        request = self.trial.requests[i]
        known = [*request.prompt, *self.tokens[i]]
        return resume(known, len(request.prompt), self.trial.config.kv_cache_block_size, request.params, i)

    def place(self, i: int) -> None:
        """Give a request to a sender."""
        self.tokens.setdefault(i, [])
        member = min(self.senders, key=lambda member: len(member.seqs))
        seq = self.sequence(i)
        member.core.prefill(seq)
        member.seqs.add(i)

    def pass_on(self, sender: Member, i: int) -> None:
        """Offer a request that a sender holds to a receiver."""
        member = min(self.receivers, key=lambda member: len(member.seqs))
        sender.offered.add(i)
        sender.seqs.remove(i)
        member.core.take(self.sequence(i), Offer(sender.number, sender.core.held[i][:]))
        member.seqs.add(i)
        member.taken.add(i)

    def use(self, member: Member, step: Any) -> None:
        for seq in step.seqs if member.is_sender else ():
            self.stats["prefix_hits"] += seq.num_cached_tokens > 0 and seq.id in step.output.token_ids
        for new in new_tokens(step):
            i = new.request_id
            self.tokens[i] += new.tokens
            self.hashes.setdefault(i, []).extend(h for entry in step.output.logprobs[i] for h in entry.values())
            is_stopped = bool(self.trial.requests[i].stopped(self.tokens[i]))  # as the text side does it
            if new.reason is not None:
                self.end(i, "stop_sequence" if is_stopped else new.reason)
            elif is_stopped:
                self.abort(i, "stop_sequence")

    def end(self, i: int, reason: str) -> None:
        self.ended[i] = reason
        for member in self.members:
            member.seqs.discard(i)

    def abort(self, i: int, reason: str = "abort") -> None:
        member = next(member for member in self.members if i in member.seqs)
        self.stats["aborts_offered"] += i in member.core.offers
        self.stats["aborts_held"] += i in member.core.held
        assert (member.core.abort(i) is None) == (i in member.core.held)
        if member.is_sender:
            member.core.release(i)
        self.end(i, reason)

    def tell(self, target: int) -> None:
        """Tell the senders what a receiver has asked for."""
        senders = {sender.number: sender.core.copies for sender in self.senders}
        for ask in [ask for ask in self.asked if ask[1] == target]:
            self.asked.remove(ask)
            if ask[0] in senders:
                cast(SymbolicPeer, senders[ask[0]]).send(target, ask[2])

    def move(self, sender: Member, receiver: Member) -> None:
        """Some of what a sender has queued for a receiver arrives."""
        ends: Any = sender.core.copies, receiver.core.copies
        sent, expected = ends[0].pipes[receiver.number], ends[1].pipes[sender.number]
        while sent.queue and self.luck.random() < 0.3:
            new, parcel = sent.queue.popleft(), expected.queue.popleft()
            parcel.data[:] = new.data
            parcel.is_here = True

    def pump_blocks(self) -> None:
        """Some of what is asked for is sent, and some of what is sent arrives; deaths become known."""
        for receiver in self.receivers:
            if self.luck.random() < 0.6:
                self.tell(receiver.number)
            for sender in self.senders:
                self.move(sender, receiver)
        if self.gone and self.luck.random() < 0.5:
            number = self.gone.pop()
            for member in self.members:
                cast(SymbolicPeer, member.core.copies).lose(number)
                member.core.is_stuck = False

    def pump(self) -> None:
        """What is held is offered, and what has been copied is released: some of it now."""
        if self.is_p2p:
            self.pump_blocks()
        for sender in self.senders:
            for i in [i for i in sender.core.held if i in sender.seqs]:
                if self.luck.random() < 0.6:
                    self.pass_on(sender, i)
        for receiver in self.receivers:
            for i in receiver.taken - receiver.core.offers.keys():
                if self.luck.random() < 0.6:
                    receiver.taken.remove(i)
                    self.tell(receiver.number)  # messages keep their order
                    for sender in self.senders:
                        if i in sender.offered:
                            sender.offered.remove(i)
                            sender.core.release(i)

    def lose(self, member: Member) -> None:
        """An engine dies, and a new one takes its place; its requests are computed again."""
        kind = self.senders if member.is_sender else self.receivers
        kind[kind.index(member)] = Member(self, member.is_sender)
        self.gone.append(member.number)
        for i in member.taken:  # nobody reads them any more
            for sender in self.senders:
                if i in sender.offered:
                    sender.offered.remove(i)
                    sender.core.release(i)
        self.stats["lost"] += len(member.seqs)
        for i in sorted(member.seqs):
            self.place(i)

    def step(self, member: Member) -> None:
        core = member.core
        if core.is_waiting:
            core.is_stuck = False
        is_due = not (core.is_finished() or core.is_stuck)
        readers = core.scheduler.running
        member.runner.readers = [(s, s.num_computed_tokens, s.num_preemptions) for s in readers]
        waited = core.offers.copy()
        try:
            step = core.step() if is_due else None
        except StepFailed:
            self.stats["failures"] += 1
        else:
            if step:
                self.use(member, step)
        for i in waited.keys() - core.offers.keys():
            seq = core.scheduler.seqs.get(i)
            if seq and not seq.num_preemptions and seq.status == SequenceStatus.RUNNING:
                self.stats["reused"] += len(waited[i].blocks) - seq.metrics["copied_blocks"]
        self.stats["held_back"] += bool(waited and core.offers)
        self.stats["sender_held_back"] += core.is_stuck and bool(core.scheduler.waiting)
        if self.strict:
            member.check()


def run_trial(
    seed: int, strict: bool = True, cache: str = "hash", tight: bool = False, deaths: bool = False,
    is_p2p: bool = False, **options: Any
) -> Counter[str]:
    """Run trial `seed` with its requests on two kinds of engines, and compare with the oracle."""
    trial, luck = make_trial(seed), random.Random(~seed)
    if tight:
        tighten(trial, random.Random(seed + 1))
    plain = {"interleave_decode": False, "scheduler_delay_factor": 0.0}
    changes = plain | ({"enable_chunked_prefill": True} if options else {}) | options
    if trial.config.enable_prefix_caching:
        changes |= {"prefix_cache": cache}
    trial.config = trial.config.changed(**changes)
    more = [trial.config.num_kvcache_blocks + luck.choice((0, 0, 1, 8)) for _ in range(2)]  # type: ignore[operator]
    sizes = [{"num_kvcache_blocks": n, "max_num_seqs": luck.randint(1, 6)} for n in more]
    configs = trial.config.changed(**sizes[0]), trial.config.changed(**sizes[1])
    trial.config = trial.config.changed(num_kvcache_blocks=min(more))
    front = Front(trial, configs, luck, strict, is_p2p)
    todo = sorted(range(len(trial.requests)), key=lambda i: trial.requests[i].arrival, reverse=True)
    aborts: dict[int, int] = {i: r.abort_at for i, r in enumerate(trial.requests) if r.abort_at is not None}
    tick = 0
    while todo or any(member.seqs for member in front.members):
        tick += 1
        assert tick < 5000, "no end in sight"
        while todo and trial.requests[todo[-1]].arrival < tick:
            i = todo.pop()
            if len(trial.requests[i].prompt) < trial.max_len:
                front.place(i)
            else:
                with pytest.raises(ValueError, match="prompt of"):
                    front.place(i)
                front.stats["refused"] += 1
                del front.tokens[i]
        for i, at in aborts.items():
            if at <= tick and i in front.tokens and i not in front.ended:
                front.abort(i)
        for member in front.members:
            if luck.random() < 0.7:
                front.step(member)
        front.pump()
        expected = [i for member in front.receivers for i in getattr(member.core.copies, "parcels", ())]
        if expected and luck.random() < 0.05:
            front.abort(luck.choice(expected))
        if deaths and luck.random() < 0.03:
            front.lose(luck.choice(front.members))
    for _ in range(200):
        front.pump()
    return compare(front)


def compare(front: Front) -> Counter[str]:
    """All that came out is the oracle's, and nothing is held any more."""
    trial, stats = front.trial, front.stats
    for member in front.members:
        manager: BlockManager = member.core.scheduler.block_manager
        assert not member.core.held and not member.core.offers, "blocks are held for nobody"
        assert not front.is_p2p or not cast(SymbolicPeer, member.core.copies).is_busy, "parcels are kept for nobody"
        if front.strict:
            assert manager.num_free_blocks == len(manager.pool.blocks), "blocks are lost"
        stats["preemptions"] += member.core.scheduler.num_preemptions
    for runner in front.pools:
        stats += runner.stats
    for i, found in front.tokens.items():
        tokens, hashes, reason = trial.expected(trial.requests[i])
        if front.ended[i] == "abort":
            tokens, hashes, reason = tokens[: len(found)], hashes[: len(found)], "abort"
        assert found == tokens, f"request {i}: other tokens than the oracle's"
        assert front.hashes.get(i, []) == hashes, f"request {i} saw another past"
        assert front.ended[i] == reason, f"request {i}: {front.ended[i]}"
        stats["tokens"] += len(tokens)
    return stats


def run_many(seeds: Iterable[int], **how: Any) -> Counter[str]:
    """The trials' statistics added up; an error names its trial."""
    stats: Counter[str] = Counter()
    for seed in seeds:
        try:
            stats += run_trial(seed, **how)
        except Exception as error:
            raise AssertionError(f"reproduce with test_apart.run_trial({seed}, **{how})") from error
    return stats


VARIANTS: dict[str, dict[str, Any]] = {
    "hash": {}, "radix": {"cache": "radix"}, "tight": {"tight": True}, "deaths": {"deaths": True},
    "mixed": {"enable_mixed_steps": True, "tight": True},
    "p2p": {"is_p2p": True}, "p2p-tight-radix": {"is_p2p": True, "tight": True, "cache": "radix"},
    "p2p-deaths": {"is_p2p": True, "deaths": True},
}  # fmt: skip
SLOW = [pytest.param(name, range(100, 1000), marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize(("variant", "seeds"), [(name, range(100)) for name in VARIANTS] + SLOW)
def test_outputs_equal_the_oracle_on_engines_of_two_kinds(variant: str, seeds: range) -> None:
    stats = run_many(seeds, **VARIANTS[variant])
    least = {"copied": 5, "reused": 0.4, "prefix_hits": 0.5, "held_back": 3, "sender_held_back": 1, "failures": 0.5}
    least |= {"lost": 0.5} if "deaths" in variant else {"aborts_offered": 0.04}
    least |= {"drained": 0.1, "copied": 4} if "p2p" in variant else {}
    least |= {"computed_here": 0.1} if variant == "p2p-deaths" else {}
    check_often(stats, {name: int(n * len(seeds)) for name, n in least.items()})


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a block is used before its copy has arrived": (
        TransferCore, "admit", "self.copies.run(seq.id, offer.source, pairs)",
        "late, self.late = vars(self).get('late', []), [(seq.id, offer.source, pairs)]\n"
        "    for order in late:\n        self.copies.run(*order)",
    ),
    "blocks are freed while they may be copied": (
        TransferCore, "rollback", "scheduler.block_manager.pool.share(block_id)", "pass",
    ),
    "a block too few is copied": (TransferCore, "admit", "[num_cached:]", "[num_cached + 1:]"),
    "the wrong blocks are copied": (TransferCore, "admit", "zip(offer.blocks, ", "zip(offer.blocks[num_cached:], "),
    "what is offered is also computed": (TransferCore, "rollback", " if seq.id not in self.offers", ""),
    "an offer that is taken back still waits": (TransferCore, "leave", "del self.offers[request_id]", "pass"),
    "an owner too few": (TransferCore, "after_step", "for block_id in seq.block_table:", "for block_id in seq.block_table[:-1]:"),
    "blocks are never given back": (TransferCore, "release", "self.held.pop(request_id, [])", "self.held.pop(request_id, [])[1:]"),
    "what ends here is handed over": (TransferCore, "is_handed_over", 'and reason == "kv_cache"', ""),
    "more are admitted than may run": (
        TransferCore, "find", "is_full = len(scheduler.running) >= self.config.max_num_seqs", "is_full = False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_fuzz_catches(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - an assertion, or whatever breaks first
        for seed in range(1000):
            run_trial(seed, tight=seed % 2 == 0)


# Interrupts


class Pair:
    """A sender and a receiver in this process, and their requests. What an interrupt has left undone is done by the next call."""

    def __init__(self, **options: Any) -> None:
        small = {"num_kvcache_blocks": 6, "max_num_batched_tokens": 8, "max_num_seqs": 4, "kv_cache_block_size": 4}
        config = EngineArgs(**small | options)
        pools: list[SymbolicRunner] = []
        self.sender, self.receiver = (self.make(config, pools) for _ in range(2))
        self.sent: dict[int, Sequence] = {}
        self.received: dict[int, Sequence] = {}

    def make(self, config: Config, pools: list[SymbolicRunner]) -> TransferCore:
        pools.append(runner := SymbolicRunner(config, 12, strict=False))
        return TransferCore(config, runner, make_scheduler(config), SymbolicPull(runner, pools))

    def serve(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.sent.setdefault(seq.id, seq)
            if seq.id not in self.sender.scheduler.seqs and not seq.is_finished:
                self.sender.prefill(seq)
        while not self.sender.is_finished() or self.sender.held or not self.receiver.is_finished():
            self.sender.step()
            for i, blocks in [*self.sender.held.items()]:
                self.pass_on(self.sent[i], blocks)
            self.receiver.step()
            for i in [*self.sender.held]:
                if i not in self.receiver.offers:
                    self.sender.release(i)

    def pass_on(self, seq: Sequence, blocks: list[int]) -> None:
        n = seq.num_prompt_tokens
        new = self.received.setdefault(seq.id, resume(seq.token_ids, n, 4, seq.sampling_params, seq.id))
        if seq.id not in self.receiver.scheduler.seqs and not new.is_finished:
            self.receiver.take(new, Offer(0, blocks))

    def check(self) -> None:
        for core in (self.sender, self.receiver):
            if not core.is_torn:
                check_blocks(core.scheduler.block_manager, core.scheduler.running, core.held.values())
                queued = [s.id for s in [*core.scheduler.running, *core.scheduler.waiting]]
                assert sorted([*queued, *core.offers]) == sorted(core.scheduler.seqs), "a request is in no queue"


AGAIN = [Request(0, r.prompt, r.params) for r in REQUESTS] + [Request(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=1))]


def interrupt_pairs(stride: int, **options: Any) -> int:
    """Interrupt at one line in `stride`, and go on; returns the number of different places."""
    at, places = stride, set()
    while True:
        pair, wire = Pair(**options), Tripwire(at)
        trial = Trial(pair.sender.config, (), 12, [], 0.0)
        seqs = [Sequence(r.prompt, 4, r.params, id=i) for i, r in enumerate(REQUESTS + AGAIN)]
        if not wire.run(lambda: pair.serve(seqs)):  # noqa: B023 - called at once
            return len(places)
        places.add(wire.where)
        pair.check()
        later = [Sequence(r.prompt, 4, r.params, id=90 + i) for i, r in enumerate(AGAIN)]
        for group in (seqs, later):
            pair.serve(group)
        pair.check()
        for seq, request in zip(seqs + later, REQUESTS + AGAIN + AGAIN, strict=True):
            whole = pair.received.get(seq.id, seq)
            hashes = [h for s in {id(s): s for s in (seq, whole)}.values() for entry in s.logprobs for h in entry.values()]
            assert (whole.completion_token_ids, hashes) == trial.expected(request)[:2], f"{wire.where}: request {seq.id}"
        at += stride


@pytest.mark.parametrize("options", [{}, pytest.param({"prefix_cache": "radix"}, marks=pytest.mark.slow)], ids=str)
def test_interrupted_at_any_line(options: dict[str, Any]) -> None:
    assert interrupt_pairs(3 * FAR, **options) > 30


def test_the_interrupts_catch_stale_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an undone step has computed must not be offered."""
    mutate(monkeypatch, TransferCore, "rollback", "del self.held[request_id]", "pass")
    with pytest.raises(Exception):  # noqa: B017
        interrupt_pairs(1)


def test_memory_is_flat_over_5000_requests() -> None:
    pair, sizes = Pair(num_kvcache_blocks=12, max_num_batched_tokens=64), []
    pair.sender.runner = pair.receiver.runner = CountingRunner()
    for i in range(5000):
        pair.serve([Sequence([i, i + 1, i + 2, i + 3] * 5, 4, SamplingParams(max_tokens=3, ignore_eos=True), i)])
        assert len(pair.received.pop(i).completion_token_ids) == 3 and pair.sent.pop(i)
        if i in (500, 4999):
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[1] < sizes[0] + 100, sizes
    pair.check()


# Processes

LOTS = {"num_kvcache_blocks": 200}
TWO_AND_TWO: dict[str, Any] = {"kv_transfer_config": [{"kv_role": role} for role in ("kv_producer", "kv_consumer") * 2]}
Way = dict[str, str]  # in each dict of `kv_transfer_config`
POINT_TO_POINT: Way = {"kv_connector": "P2pNcclConnector"}
WAYS = pytest.mark.parametrize("way", [{}, POINT_TO_POINT], ids=["shared-memory", "point-to-point"])
LATER = pytest.param(POINT_TO_POINT, marks=pytest.mark.slow, id="point-to-point")
SLOW_WAYS = pytest.mark.parametrize("way", [pytest.param({}, id="shared-memory"), LATER])


def over(way: Way, options: dict[str, Any]) -> dict[str, Any]:
    """`options`, with a way for the blocks."""
    return options | {"kv_transfer_config": [role | way for role in options["kv_transfer_config"]]}


def counted(out: Any, n: int) -> bool:
    """Whether it has the tokens of an engine that only counts."""
    length = len(out.prompt_token_ids)
    return bool(out.token_ids == [100 + length + i for i in range(n)])


@pytest.mark.processes
@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("victim", [0, 1], ids=["a-sender", "a-receiver"])
def test_a_death_costs_time_and_no_token(victim: int, way: Way, fake: Callable[..., Any]) -> None:
    """The end of the process tells of it, before a ping of two seconds could; its requests are computed again."""
    llm = fake(kind=LLM, **LOTS, **over(way, TWO_AND_TWO))
    core, params = core_of(llm), SamplingParams(max_tokens=150, ignore_eos=True)
    *_, first, second = core.engines
    dead = (first, second)[victim]
    ids = [llm.add_request([5] * (i + 1), params) for i in range(12)]
    seqs = [core.scheduler.seqs[id] for id in ids]
    while len(dead.seqs) < 6:  # a receiver has space for four
        llm.step()
    dead.ping = 2.0  # only here: a manager that waits for the ping would name it as the cause
    os.kill(dead.process.pid, signal.SIGKILL)
    wait_for(lambda: dead.dead)
    with pytest.warns(UserWarning, match="requests are computed again.*SIGKILL"):
        while llm.step():
            pass
    for i, seq in enumerate(seqs):
        assert seq.completion_token_ids == [101 + i + n for n in range(150)], seq
        assert len(seq.logprobs) == 0 and seq.leave_reason == "max_tokens"
    assert len(core.engines) == 3
    wait_for(lambda: not core.metrics()["held"], 5)
    assert core.metrics()["free_blocks"] == 3 * 200
    llm.close()


@pytest.mark.processes
@SLOW_WAYS
@pytest.mark.parametrize("victim", [0, 1], ids=["the-sender", "the-receiver"])
def test_the_last_of_a_kind_dies(victim: int, way: Way, fake: Callable[..., Any]) -> None:
    """The other kind does both; and when that dies, everybody is told both causes."""
    llm = fake(kind=LLM, **LOTS, **over(way, APART))
    core, params = core_of(llm), SamplingParams(max_tokens=100, ignore_eos=True)
    dead, alive = core.engines[victim], core.engines[1 - victim]
    ids = [llm.add_request([5] * (i + 1), params) for i in range(6)]
    seqs = [core.scheduler.seqs[id] for id in ids]
    for _ in range(8):
        llm.step()
    os.kill(dead.process.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="SIGKILL"):
        while llm.step():
            pass
    assert [s.completion_token_ids for s in seqs] == [[101 + i + n for n in range(100)] for i in range(6)]
    (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert counted(out, 5) and core.engines == [alive]
    os.kill(alive.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"(?s)SIGKILL.*SIGKILL"):
        while True:
            llm.generate([[5]], LONG)
    llm.close()


@pytest.mark.processes
def test_who_loses_two_engines_ends(fake: Callable[..., Any]) -> None:
    """A request that kills engines must not kill all of them."""
    llm = fake(kind=LLM, in_forward="assert 66 not in batch.scheduled_tokens", **TWO_AND_TWO)
    with pytest.warns(UserWarning, match="computed again"):
        (out,) = llm.generate([[66]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert out.finish_reason == "abort" and out.token_ids == [] and len(core_of(llm).engines) == 2
    llm.close()


@pytest.mark.processes
@pytest.mark.slow
@WAYS
def test_thousands_of_requests_leave_nothing(way: Way, fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the front, nor in the engines; some are aborted."""
    monkeypatch.setenv("FAKE_STEP", "0")
    llm, sizes, left = fake(kind=LLM, **LOTS | {"max_num_seqs": 32}, **over(way, APART)), [], 0
    core, rng = core_of(llm), random.Random(0)
    pids = [engine.process.pid for engine in core.engines]
    for turn in range(40):
        prompts = [[turn + 1] * rng.randint(1, 40) for _ in range(50)]
        aborted = [llm.add_request([9] * rng.randint(1, 9), LONG) for _ in range(5)]
        outs = llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert all(counted(out, 4) for out in outs)
        left += sum(map(llm.abort, aborted))
        if turn in (10, 39):
            wait_for(lambda: core.metrics()["free_blocks"] == 2 * 200)
            gc.collect()
            pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
            sizes.append((Counter(str(type(each)) for each in gc.get_objects()), sum(pages) * 4096))
    assert left > 20 and not any(engine.unread or engine.seqs for engine in core.engines)
    assert core.metrics()["held"] == core.metrics()["offers"] == core.metrics()["arriving"] == 0
    (objects, before), (more, after) = sizes
    assert more.total() < objects.total() + 1000, (more - objects).most_common(9)  # of 1,600 requests
    assert after < before + 3e6
    llm.close()


@pytest.mark.processes
@SLOW_WAYS
def test_a_full_receiver_holds_the_sender_back(way: Way, fake: Callable[..., Any]) -> None:
    """It is told of no more than it has space for, and the sender keeps the blocks of the others, until it is full, too."""
    config = [{"kv_role": "kv_producer", "num_kvcache_blocks": 30}, {"kv_role": "kv_consumer", "max_num_seqs": 1}]
    llm = fake(kind=LLM, **over(way, {"kv_transfer_config": config}), **LOTS)
    core, params = core_of(llm), SamplingParams(max_tokens=40, ignore_eos=True)
    ids = [llm.add_request([5 + i] * 20, params) for i in range(12)]
    seqs = [core.scheduler.seqs[id] for id in ids]
    for _ in range(30):
        llm.step()
    sender, receiver = (engine.ask() for engine in core.engines)
    assert receiver["running"] == 1 and receiver["offers"] == sender["held"] == 6
    assert sender["waiting"] >= 4 and sender["running"] == sender["free_blocks"] == 0
    while llm.step():
        pass
    assert all(seq.completion_token_ids == [120 + n for n in range(40)] for seq in seqs)
    wait_for(lambda: not core.metrics()["held"])
    llm.close()


@pytest.mark.processes
@WAYS
def test_only_what_the_other_lacks_is_copied(way: Way, tidy: Path) -> None:
    """With prefix hits on both sides."""
    prompt = [5, 6, 7, 8] * 6
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True)
    with LLM("tiny", **SMALL, **over(way, APART)) as llm:
        outs = [llm.generate([[*prompt, 9 + i]], params)[0] for i in range(3)]
        (same,) = llm.generate([[*prompt, 9]], params)
    assert [out.metrics["copied_blocks"] for out in outs] == [7, 1, 1]
    assert [out.num_cached_tokens for out in outs] == [0, 24, 24]
    assert same.token_ids == outs[0].token_ids
    with LLM("tiny", **SMALL) as llm:
        assert [llm.generate([[*prompt, 9 + i]], params)[0].token_ids for i in range(3)] == [out.token_ids for out in outs]


def serve_all(llm: LLM) -> None:
    while llm.step():
        pass


class FakeStream:
    """Notes what is queued on it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def note(self, what: str) -> Any:
        self.notes.append(f"{self.name} {what}")
        return SimpleNamespace(wait=lambda stream: stream.note(f"waits for {self.name}"))

    def record_event(self) -> Any:
        return self.note("has written")

    def synchronize(self) -> None:
        self.note("is empty")


@pytest.mark.parametrize("rank", [0, 1], ids=["sent", "received"])
def test_on_a_gpu_a_parcel_waits_for_the_compute_stream(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up streams: it moves after what the compute stream has queued, and is here when it has moved."""
    notes: list[str] = []
    compute, side, current = FakeStream("compute", notes), FakeStream("side", notes), threading.local()

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.stream = stream
        yield
        del current.stream

    def move(*_: object) -> Any:
        now(None).note("moves")
        return SimpleNamespace(wait=lambda: notes.append("here" if parcel.is_here else "on its way"))

    def now(device: object = None) -> FakeStream:
        return getattr(current, "stream", compute)

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", now)
    group: Any = SimpleNamespace(rank=lambda: rank, send=move, recv=move, abort=lambda: notes.append("aborted"))
    pipe = Pipe(group, torch.device("cpu"))
    pipe.stream = cast(Any, side)
    parcel = Parcel(torch.zeros(1, 2, 3, 4, 1, 2))
    pipe.put(parcel)
    pipe.start()
    wait_for(lambda: parcel.is_here)
    assert notes == ["compute has written", "side waits for compute", "side moves", "on its way", "side is empty"]
    pipe.close()  # as when the other engine has died
    assert notes[5:] == ["aborted"] and pipe.is_broken


def test_what_is_asked_for_again_waits_until_the_old_has_arrived() -> None:
    """The first in the queue has lost a cached block here since it was asked for."""
    pool = torch.zeros(1, 2, 9, 1, 4, 1)
    peer = P2pNcclConnector(EngineArgs("tiny", device="cpu"), cast(Any, SimpleNamespace(kv_cache=pool)))
    peer.pipes, peer.num_staged = cast(Any, {0: SymbolicPipe()}), 4
    asked: list[tuple[int, list[int]]] = []
    peer.ask = lambda request_id, _, blocks: asked.append((request_id, blocks))
    assert peer.receive(1, 0, [1]) is peer.receive(2, 0, [5, 6]) is Arrival.COMING
    assert peer.receive(3, 0, [6, 7]) is Arrival.MUST_WAIT, "block 6 is on its way"
    assert peer.receive(4, 0, [2, 3]) is Arrival.MUST_WAIT, "there is no memory"
    assert peer.receive(1, 0, [0, 1]) is Arrival.MUST_WAIT and [*peer.parcels] == [2]
    for parcel in cast(Any, peer.pipes[0]).queue:
        parcel.is_here = True
    assert peer.receive(1, 0, [0, 1]) is Arrival.COMING and asked == [(1, [1]), (2, [5, 6]), (1, [0, 1])]
    peer.lose(0)
    with pytest.raises(ConnectionError, match="engine 0 has died"):
        peer.receive(1, 0, [0, 1])
    peer.drop(1)
    peer.drop(2)
    assert not peer.is_busy


def arriving(member: Any) -> Any:
    """Whether blocks are on their way to an engine, and it can say so."""
    return member.ask()["arriving"]


@pytest.mark.processes
def test_what_is_on_its_way_when_a_request_or_the_sender_ends(tidy: Path) -> None:
    """With real blocks over Gloo: those of an aborted request are drained, so the next request gets its own; and
    the receiver computes a prompt whose sender has died with it."""
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=4, ignore_eos=True)
    prompts = [[5 + i, *range(20, 60)] for i in range(4)]
    with LLM("tiny", **SMALL) as llm:
        expected = [out.token_ids for out in llm.generate(prompts, params)]
    with LLM("tiny", **SMALL, **over(POINT_TO_POINT, APART)) as llm:
        core = core_of(llm)
        sender, receiver = core.engines
        assert llm.generate(prompts[:1], params)[0].token_ids == expected[0]
        for doomed in (False, True):
            ids = [llm.add_request(prompt, params) for prompt in prompts[1:3]]
            seqs = [core.seqs[id] for id in ids]
            wait_for(lambda: any(isinstance(message, Held) for message in sender.messages))
            os.kill(sender.process.pid, signal.SIGSTOP)  # it holds, and does not send
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(serve_all, llm)
                wait_for(lambda: arriving(receiver))
                if doomed:
                    os.kill(sender.process.pid, signal.SIGKILL)
                    with pytest.warns(UserWarning, match="SIGKILL"):
                        running.result(20)
                        wait_for(lambda: sender.dead)  # the answers may be there before
                        llm.generate(prompts[:1], params)
                    assert [tuple(seq.completion_token_ids) for seq in seqs] == [*map(tuple, expected[1:3])]
                    continue
                core.abort(ids[0])  # `llm.abort` waits for the step
                assert arriving(receiver) == 1
                os.kill(sender.process.pid, signal.SIGCONT)
                running.result(20)
                assert tuple(seqs[1].completion_token_ids) == tuple(expected[2])
            wait_for(lambda: core.metrics()["free_blocks"] == 120 and not core.metrics()["held"])
        assert llm.generate(prompts[3:], params)[0].token_ids == expected[3]
        assert core.engines == [receiver] and receiver.ask()["free_blocks"] == 60


# Wrong input

ONE, OTHER = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (ONE, {}, r"\{'kv_role': 'kv_producer'\} is one engine, and an engine of one role needs another process"),
    ('{"kv_role": "kv_consumer"}', {}, "is one engine"),
    ([ONE], {}, r"has no kv_consumer: add \{'kv_role': 'kv_consumer'\}"),
    ([OTHER, OTHER], {}, "has no kv_producer"),
    ([], {}, "has no kv_producer"),
    ("[", {}, "must be JSON"),
    (7, {}, "kv_transfer_config=7 must be a list of dicts"),
    ([ONE, "kv_consumer"], {}, r"kv_transfer_config\[1\]='kv_consumer' must be a dict"),
    ([ONE, {}], {}, r"kv_transfer_config\[1\]: kv_role=None must be one of kv_producer, kv_consumer"),
    ([ONE, {"kv_role": "decode"}], {}, "kv_role='decode' must be one of"),
    ([ONE, {"kv_role": "kv_both"}], {}, "kv_role='kv_both' is an engine without kv_transfer_config"),
    ([ONE, OTHER | {"kv_connector": "NixlConnector"}], {},
     r"\[1\]: kv_connector='NixlConnector' must be one of SharedMemoryConnector, P2pNcclConnector"),
    ([ONE, OTHER | {"kv_connector": "P2pNcclConnector"}], {}, r"has kv_connector=\['None', 'P2pNcclConnector'\]: set the same"),
    ([ONE, OTHER | {"kv_connection": "P2pNcclConnector"}], {}, "did you mean 'kv_connector'"),
    ([ONE, OTHER | {"kv_rank": 1}], {}, r"kv_transfer_config\[1\] has no key 'kv_rank': leave it out"),
    ([ONE, OTHER | {"max_num_sequences": 1}], {}, "did you mean 'max_num_seqs'"),
    ([ONE, OTHER | {"model": "other"}], {}, r"kv_transfer_config\[1\]: model='other' cannot be set for one engine"),
    ([ONE, OTHER | {"kv_cache_block_size": 8}], {}, "kv_cache_block_size=8 cannot be set for one engine: all engines have"),
    ([ONE | {"num_kvcache_blocks": 0}, OTHER], {}, r"kv_transfer_config\[0\]: num_kvcache_blocks=0 must be a whole number from 1"),
    ([ONE, OTHER | {"max_num_seqs": "4"}], {}, r"kv_transfer_config\[1\]: max_num_seqs='4' must be"),
    ([ONE, OTHER | {"max_num_batched_tokens": 8}], {"enable_chunked_prefill": False, "max_model_len": 64},
     r"kv_transfer_config\[1\]: without chunked prefill"),
    ([ONE, OTHER] * 33, {}, "lists 66 engines: list at most 64"),
    ([ONE, OTHER], {"engine_process": False}, "engine_process=False does not go with kv_transfer_config: set it to True"),
    ([ONE, OTHER], {"data_parallel_size": 2}, "data_parallel_size=2 does not go with kv_transfer_config: set it to 1"),
    ([ONE, OTHER], {"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not go with kv_transfer_config"),
    ([ONE, OTHER], {"overlap": True}, "overlap=True does not go with kv_transfer_config"),
    ([ONE, OTHER], {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config.*kv_transfer"),
    ([ONE, OTHER], {"scheduler": "spyre", "max_model_len": 128}, "scheduler='spyre' does not go with kv_transfer_config"),
    ([ONE, OTHER], {"kv_offloading_size": 0.01}, "kv_offloading_size=0.01 does not go with kv_transfer_config"),
    ([ONE, OTHER], {"trace": True}, "trace=True does not go with engine_process=True"),
    ([ONE, OTHER], {"routing": "prefix"}, "routing has no effect with data_parallel_size=1"),
    ([ONE, OTHER], {"scheduler_cls": "atom_mini.scheduler:BaseScheduler"}, "scheduler_cls=BaseScheduler .*derive it from Sch"),
]  # fmt: skip


@pytest.mark.parametrize(("roles", "options", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_roles_are_refused_before_anything_loads(
    roles: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", pytest.fail)
    monkeypatch.setattr(manager.CoreManager, "start", pytest.fail)
    with pytest.raises(ValueError, match=message):
        LLM("tiny", device="cpu", kv_transfer_config=roles, **options)


def test_a_gpu_and_another_system_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"kv_connector": "SharedMemoryConnector"}
    with monkeypatch.context() as patch:
        patch.setattr("atom_mini.parallel.roles.is_on_cpu", lambda _: False)
        patch.setattr("torch.cuda.device_count", lambda: 2)
        with pytest.raises(ValueError, match="copies blocks through the host's memory, not between GPUs: set 'P2pNcclConnector'"):
            EngineArgs("tiny", kv_transfer_config=[ONE | own, OTHER | own])
        with pytest.raises(ValueError, match="lists 3 engines, each of which needs a GPU, and there are 2: list fewer"):
            EngineArgs("tiny", kv_transfer_config=[ONE, ONE, OTHER])
        with pytest.raises(ValueError, match="device='cuda:1' is one device for 2 engines: set device='cuda'"):
            check_connector(cast(Any, SimpleNamespace(kv_transfer_config=[ONE, OTHER], device="cuda:1")))
        config: Any = SimpleNamespace(kv_transfer_config=[ONE, OTHER], device=None)
        assert connector_name(config) == "P2pNcclConnector" and devices_of(config) == ["cuda:0", "cuda:1"]
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="kv_connector='SharedMemoryConnector' needs Linux: set 'P2pNcclConnector'"):
        EngineArgs("tiny", device="cpu", kv_transfer_config=[ONE, OTHER])
    roles = [ONE | POINT_TO_POINT, OTHER | POINT_TO_POINT]
    assert EngineArgs("tiny", device="cpu", kv_transfer_config=roles).kv_transfer_config == roles


@pytest.mark.processes
def test_pools_that_differ_are_refused(fake: Callable[..., Any]) -> None:
    """As if one engine had another model, or other sizes."""
    code = "Pool.form = f\"blocks of {config.recipe['number']}\""
    with pytest.raises(ValueError, match=r"the engines' blocks differ: \['blocks of 0', 'blocks of 1'\]"):
        fake(kind=LLM, in_loading=code, **APART)


def test_json_says_the_same() -> None:
    text = '[{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer", "max_num_seqs": 3}]'
    config = EngineArgs("tiny", device="cpu", kv_transfer_config=text)
    assert config.kv_transfer_config == [ONE, OTHER | {"max_num_seqs": 3}] and config.engine_process
    again = EngineArgs("tiny", **config.recipe["options"])
    assert again.kv_transfer_config == config.kv_transfer_config


# Above it


@pytest.mark.processes
def test_tasks_read_their_texts_while_others_leave_and_an_engine_dies(tidy: Path) -> None:
    """Through `AsyncLLM`, which the server uses."""
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=i, ignore_eos=True) for i in range(16)]
    small = SMALL | {"num_kvcache_blocks": 200}
    with LLM("tiny", **small) as llm:
        expected = [out.text for out in llm.generate(["Once upon a time"] * 16, params, use_tqdm=False)]

    async def ask(engine: AsyncLLM, i: int, most: int = 99) -> str:
        text = ""
        async with aclosing(engine.generate("Once upon a time", params[i])) as pieces:
            async for piece in pieces:
                text, most = text + piece.text, most - 1
                if not most:
                    break
        return text

    async def main() -> None:
        async with AsyncLLM("tiny", **small, **APART) as engine:
            core = core_of(engine.llm)
            for doomed in (None, core.engines[1]):
                tasks = [asyncio.create_task(ask(engine, i, 3 if i % 4 == 3 else 99)) for i in range(16)]
                await asyncio.sleep(0.1)
                if doomed:
                    os.kill(doomed.process.pid, signal.SIGKILL)
                texts = await asyncio.gather(*tasks)
                for i in range(16):
                    assert expected[i].startswith(texts[i]) and (i % 4 == 3 or texts[i] == expected[i])
            assert core.engines[0].is_sender and len(core.engines) == 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        asyncio.run(main())
    assert any("computed again" in str(warning.message) for warning in caught)


@pytest.mark.processes
def test_the_server_answers_with_engines_apart(tidy: Path) -> None:
    """In one piece and as a stream, several answers and log probabilities too; as from one engine."""
    body = {"model": "tiny", "prompt": ["Once upon a time", "12 + 7 ="], "max_tokens": 12, "seed": 3, "n": 2, "logprobs": 1}
    found = []
    for more in ({}, APART):
        with serving(engine=more) as served:
            choices = served.post("/v1/completions", body).json()["choices"]
            pieces = served.events("/v1/completions", body | {"n": 1, "logprobs": None})
            texts = ["".join(p["choices"][0]["text"] for p in pieces if p["choices"][0]["index"] == i) for i in range(2)]
            found.append(([(c["index"], c["text"], c["finish_reason"], c["logprobs"]["tokens"]) for c in choices], texts))
    assert found[0] == found[1] and all(text for text in found[0][1])


FORMS: list[SamplingParams] = [
    SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["a red cat", "the blue dog"])),
    SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,5} [0-9]{2}"), seed=2, temperature=0.9),
    SamplingParams(max_tokens=12, min_tokens=9, seed=4, temperature=0.9, frequency_penalty=0.5),
    SamplingParams(max_tokens=12, bad_words=["the", " a"], logit_bias={70: 5.0}, seed=4, temperature=0.9, n=3),
    SamplingParams(max_tokens=1, logprobs=2),
]  # fmt: skip


@pytest.mark.processes
def test_forms_and_penalties_go_on_where_the_other_engine_has_begun(tidy: Path) -> None:
    found = []
    for more in ({}, APART):
        with LLM("tiny", **SMALL | {"num_kvcache_blocks": 100}, **more) as llm:
            outs = llm.generate(["Once upon a time"] * len(FORMS), FORMS, use_tqdm=False)
            found.append([[(o.text, o.finish_reason, o.token_ids) for o in out.outputs] for out in outs])
    assert found[0] == found[1]


def connect(pair: Pair) -> None:
    """Let the engines of a pair reach each other: over Gloo, or the receiver opens the sender's pool."""
    ends: Any = pair.sender.copies, pair.receiver.copies
    if not isinstance(ends[0], P2pNcclConnector):
        ends[1].open(0, ends[0].path)
        return
    with tempfile.TemporaryDirectory() as meeting, ThreadPoolExecutor(2) as pool:
        for number, end in enumerate(ends):
            end.config = end.config.changed(recipe={"number": number, "meeting": meeting})
        [*pool.map(lambda number: ends[number].open(1 - number, ""), range(2))]
    ends[1].ask = lambda _, source, blocks: ends[source].send(1, blocks)


def pair_of(model: str, way: Way, **options: Any) -> Pair:
    """A sender and a receiver with real models, in this process."""
    small = {"device": "cpu", "num_kvcache_blocks": 40, "kv_cache_block_size": 4, **options}
    config = EngineArgs(model, kv_transfer_config=[ONE | way, OTHER | way], **small)
    pair = Pair.__new__(Pair)
    pair.sender, pair.receiver = (build.make_core(config) for _ in range(2))  # type: ignore[assignment]
    pair.sent, pair.received = {}, {}
    connect(pair)
    return pair


BLOCKS: list[tuple[str, Way, dict[str, Any]]] = [
    ("tiny", {}, {}), ("tiny", {}, {"dtype": "bfloat16"}), ("tiny", {}, {"compiled": True}), ("tiny", {}, {"packed": True}),
    ("tiny", {}, {"quantization": "int8"}), ("latent: V3", {}, {}), ("windows: gpt-oss", {}, {}),
    ("tiny", POINT_TO_POINT, {"dtype": "bfloat16"}), ("tiny", POINT_TO_POINT, {"packed": True}),
    ("windows: gpt-oss", POINT_TO_POINT, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "way", "options"), BLOCKS, ids=str)
def test_real_blocks_are_copied_whole(name: str, way: Way, options: dict[str, Any], tmp_path: Path) -> None:
    """Keys, values, and latents, of any type: the tokens are those of one engine."""
    model = name if name == "tiny" else str(tmp_path)
    if name != "tiny":
        MODELS[name](tmp_path)
    pair = pair_of(model, way, **options)
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)
    seqs = [Sequence([5 + i, *range(20, 20 + 7 * i), 9], 4, params, i) for i in range(4)]
    pair.serve(seqs)
    with LLM(model, device="cpu", num_kvcache_blocks=40, kv_cache_block_size=4, **options) as llm:
        prompts = [seq.token_ids[: seq.num_prompt_tokens] for seq in seqs]
        expected = [out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    assert [pair.received[i].completion_token_ids for i in range(4)] == [*map(list, expected)]
    pair.check()
    for core in (pair.sender, pair.receiver):
        core.close()


def test_the_first_offer_gets_the_memory_that_later_ones_have_staged() -> None:
    """It needed nothing when they asked, and has lost its cached blocks since. It would wait for good."""
    config = EngineArgs(kv_cache_block_size=4, num_kvcache_blocks=40, max_num_batched_tokens=64, max_num_seqs=4)
    peer = P2pNcclConnector(config, cast(Any, SimpleNamespace(kv_cache=torch.zeros(1, 2, 9, 1, 4, 1))))
    peer.pipes, peer.num_staged = cast(Any, {0: SymbolicPipe()}), 4
    asked: list[tuple[int, list[int]]] = []
    peer.ask = lambda request_id, _, blocks: asked.append((request_id, blocks))
    core = TransferCore(config, SymbolicRunner(config, 12), make_scheduler(config), peer)
    for number, blocks in ((1, [0, 1]), (2, [5, 6, 7, 8])):
        seq = Sequence([number] * (4 * len(blocks) + 1), 4, SamplingParams(ignore_eos=True), number)
        core.take(seq, Offer(0, blocks, 0))
    assert peer.receive(2, 0, [5, 6, 7, 8]) is Arrival.COMING
    peer.parcels[2].is_here = True
    core.step()
    core.step()
    assert asked == [(2, [5, 6, 7, 8]), (1, [0, 1])]
