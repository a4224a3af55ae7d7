"""Several engines behind one front: requests go where their beginnings are; and in lockstep all
ranks make the same collectives, whatever comes when."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint, save_family
from deployed import SMALL, wait_for
from show import check_blocks, run_ranks

import atom_mini.loading as loading
from atom_mini import Config, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_core, make_runner
from atom_mini.parallel.engine_process import (
    Abort,
    Add,
    FromEngine,
    Output,
    Shutdown,
    Utility,
    Wave,
    decode_frame,
    encode,
    pack_params,
)
from atom_mini.parallel.lockstep import (
    Agreement,
    LockstepProc,
    LockstepRunner,
    dummy_batch,
    make_member,
    with_spare_block,
)
from atom_mini.parallel.replicas import Replica, Replicas, chain, devices, longest_match, make_loop
from atom_mini.parallel.shards import open_group
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput
from atom_mini.sequence import Sequence, SequenceType

# Routing


def on_page(config: Config, runner: Any) -> Any:
    """The loop of a replica, without sockets: its messages are in `sent`."""
    sent: list[Any] = []
    outbox = SimpleNamespace(poll=lambda *_: True)
    outbox.send = lambda frame: sent.append(decode_frame(frame, FromEngine))
    loop = make_loop(EngineCore(config, runner), None, outbox)
    loop.sent = sent
    return loop


class Counting:
    """The next token of a sequence is its length plus 100."""

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled, strict=True)
        return ScheduledBatchOutput({i: (100 + n,) for i, n, gets in rows if gets})


def near_config(**options: Any) -> Config:
    config = EngineArgs(**{"data_parallel_size": 2, "routing": "prefix", **SMALL, **options})
    return config.changed(recipe={"number": 0, "meeting": ""})


@pytest.mark.parametrize("seed", range(3))
def test_the_fronts_hashes_are_those_of_the_index(seed: int) -> None:
    """After every step, with adds, aborts, preemptions, and rollbacks. An idle loop sleeps."""
    rng = random.Random(seed)
    config = near_config(num_kvcache_blocks=[12, 40, 12][seed], max_num_batched_tokens=24)
    loop = on_page(config, Counting())
    core, known = loop.core, SimpleNamespace(hashes=set[int]())
    core.scheduler.eos_token_ids = ()
    dropped, texts = 0, [[rng.randint(1, 3)] * rng.randint(1, 30) for _ in range(6)]
    for _ in range(400):
        if rng.random() < 0.3 and len(core.scheduler.seqs) < 8:
            text = rng.choice(texts)[: rng.randint(1, 30)] + [rng.randint(5, 9)] * rng.randint(0, 6)
            sampling = SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True)
            core.add(Sequence(text, 4, sampling))
        if rng.random() < 0.1 and core.scheduler.seqs:
            core.abort(rng.choice([*core.scheduler.seqs]))
        if rng.random() < 0.02:
            core.rollback()
        if not (step := core.step()):
            continue
        loop.steps += 1
        loop._report(step)
        for message in loop.sent:
            if isinstance(message, Output):
                Replica.note(known, message)  # type: ignore[arg-type]
                dropped += sum(not is_there for is_there in message.blocks.values())
        loop.sent.clear()
        assert known.hashes == {*core.scheduler.block_manager.index.hash_to_block_id}
    assert dropped > 5
    for id in [*core.scheduler.seqs]:
        core.abort(id)
    assert loop.pause() is None
    plain = on_page(near_config(routing="load"), Counting())
    plain.core.add(Sequence([1] * 20, 4))
    plain._report(plain.core.step())
    assert not plain.sent[0].blocks and not plain.sent[0].is_new


def stub(unfinished: int, *known: Sequence) -> Any:
    hashes = {hash for seq in known for hash in chain(seq)}
    made = SimpleNamespace(load=(unfinished, 0), hashes=hashes)
    made.match = lambda hashes: Replica.match(made, hashes)
    return made


@pytest.mark.parametrize(
    ("loads", "length", "where"),
    [
        ((5, 0), 16, 0),  # all of it is known there
        ((32, 0), 16, 0),
        ((33, 0), 16, 1),  # too busy
        ((363, 330), 16, 0),  # by 33, which is a tenth
        ((364, 330), 16, 1),
        ((5, 0), 33, 1),  # 16 of 33: not half
        ((5, 0), 31, 0),
        ((0, 5), 99, 0),
    ],
)
def test_the_rule(loads: tuple[int, int], length: int, where: int) -> None:
    known = Sequence([1] * 17, 4)
    pair = [stub(loads[0], known), stub(loads[1])]
    prompt = Sequence([1] * 17 + [2] * 90, 4).token_ids[:length]
    assert pair.index(longest_match(pair, Sequence(prompt, 4))) == where


@pytest.mark.parametrize("routing", ["load", "prefix"])
def test_the_balance_does_not_depend_on_speed(routing: str) -> None:
    """Four requests are two and two, even if one engine has sent all results of its own before the next is added."""
    front = Replicas.__new__(Replicas)
    front.config = EngineArgs("tiny", data_parallel_size=2, routing=routing)
    front.engines = [Replica.__new__(Replica) for _ in range(2)]
    for engine in front.engines:
        engine.seqs, engine.messages, engine.hashes, engine.num_given = {}, deque(), set(), 7
    for i in range(4):
        seq = Sequence([40, 206, 75], 8, id=i)
        engine = front.choose(seq)
        engine.seqs[seq.id] = seq
        front.engines[0].messages.extend([Output(0, SequenceType.DECODE, 1, 0.0, [], {}, False, 1)] * 150)
    assert [len(engine.seqs) for engine in front.engines] == [2, 2]


# Lockstep


class Inbox:
    """The part of a socket that a loop uses."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.news = threading.Condition()

    def put(self, *messages: Any) -> None:
        with self.news:
            self.frames.extend(map(encode, messages))
            self.news.notify()

    def poll(self, timeout: int | None = None) -> bool:
        with self.news:
            if timeout is None:
                self.news.wait_for(lambda: self.frames)
            return bool(self.frames)

    def recv(self) -> bytes:
        return self.frames.popleft()


class Outbox:
    """Collects its messages, as long as the front reads."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.num_read = 0

    def send(self, frame: bytes) -> None:
        self.sent.append(decode_frame(frame, FromEngine))

    def poll(self, timeout: float, flags: int) -> bool:
        return len(self.sent) < self.num_read + 16


class Noting(Counting):
    """Counts, and notes the graphs that each step may replay and the rows of its collectives."""

    num_spare_blocks = 1
    on_device = staticmethod(nullcontext)

    def __init__(self) -> None:
        self.graphs = dict.fromkeys((1, 2, 4), "a recording")
        self.notes: list[Any] = []
        self.ranks: Any = None
        self.real = 0

    def note(self) -> None:
        self.notes.append((*self.graphs, self.ranks.num_rows))
        self.ranks.gather(torch.zeros(1, 1))  # a layer

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        assert self.ranks.num_rows >= batch.total_tokens_num
        self.note()
        self.real += 1
        return super().forward(batch)

    def launch(self, batch: ScheduledBatch) -> None:
        assert batch.block_tables.tolist() == [[SMALL["num_kvcache_blocks"]]]
        self.note()


class Together:
    """Ranks as threads, with a real group; the front is the test's thread."""

    def __init__(self, size: int = 2, limit: float = 10.0) -> None:
        self.folder, self.size = tempfile.mkdtemp(), size
        self.inboxes = [Inbox() for _ in range(size)]
        self.loops: list[Any] = [None] * size
        self.errors: list[BaseException] = []
        self.limit, self.num_waves = limit, 0
        self.threads = [
            threading.Thread(target=self.live, args=[rank], daemon=True) for rank in range(size)
        ]
        for thread in self.threads:
            thread.start()
        wait_for(lambda: self.errors or all(self.loops))

    def make_core(self, rank: int) -> EngineCore:
        config = near_config(lockstep=True, routing="load")
        config = config.changed(spec=SimpleNamespace(vocab_size=1000))
        runner = Noting()
        runner.ranks = Agreement(open_group(self.folder, rank, self.size, self.limit))
        return EngineCore(config, LockstepRunner(runner, runner.ranks))

    def live(self, rank: int) -> None:
        try:
            outbox = Outbox()
            core = self.make_core(rank)
            core.scheduler.eos_token_ids = ()
            loop: Any = LockstepProc(core, self.inboxes[rank], outbox)
            loop.sent, self.loops[rank] = outbox.sent, loop
            loop.run()
        except BaseException as error:
            self.errors.append(error)

    def wake(self, pause: Callable[[], None] = lambda: None) -> None:
        self.num_waves += 1
        for inbox in random.sample(self.inboxes, self.size):
            pause()
            inbox.put(Wave(self.num_waves))

    def add(self, rank: int, id: int, length: int = 3, **sampling: Any) -> None:
        params = SamplingParams(**{"ignore_eos": True, **sampling})
        self.inboxes[rank].put(Add(id, [5] * length, pack_params(params)))

    def tokens(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for loop in self.loops:
            for message in [*loop.sent]:
                for row in message.rows if isinstance(message, Output) else ():
                    found.setdefault(row.id, []).extend(row.token_ids)
        return found

    def take(self) -> None:
        """Read all results."""
        for loop in self.loops:
            loop.outbox.num_read = len(loop.sent)
        self.wake()

    def serve(self, holds: Callable[[], bool], limit: float = 20.0) -> None:
        start = time.perf_counter()
        while not holds():
            assert not self.errors, self.errors
            assert time.perf_counter() < start + limit, "they hang"
            self.take()
            time.sleep(0.002)

    def is_asleep(self) -> bool:
        """All waves have reached all ranks, and they wait for a message."""
        return all(loop.slept == self.num_waves and not loop.inbox.frames for loop in self.loops)

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(Shutdown(0))
        for thread in self.threads:
            thread.join(self.limit + 2)
            assert not thread.is_alive(), "a rank hangs"
        assert not self.errors, self.errors


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(2))
def test_the_same_collectives_on_all_ranks(seed: int) -> None:
    """Requests, aborts, pings and waves, in any order and at any time."""
    rng, together = random.Random(seed), Together(2 + seed % 2)
    pause = lambda: time.sleep(rng.choice([0, 0, 0.0005, 0.003]))  # noqa: E731
    wanted = {}
    for id in range(1, 60):
        rank, n = rng.randrange(together.size), rng.randint(1, 12)
        together.add(rank, id, rng.randint(1, 30), max_tokens=n)
        wanted[id] = n
        pause()
        if rng.random() < 0.8:
            together.wake(pause)
        if rng.random() < 0.2:
            together.inboxes[rng.randrange(together.size)].put(Utility(id))
        if rng.random() < 0.1:
            together.inboxes[rank].put(Abort(id))
            del wanted[id]
        pause()

    def is_answered() -> bool:
        found = together.tokens()
        return all(len(found.get(id, ())) == n for id, n in wanted.items())

    together.serve(is_answered)
    wait_for(together.is_asleep)
    calls = {loop.ranks.num_calls for loop in together.loops}
    assert len(calls) == 1 and calls.pop() > 40
    notes = [loop.runner.notes for loop in together.loops]
    assert all(note == notes[0] for note in notes), "they did not run the same"
    assert {len(note) for note in notes[0]} == {1, 2}, "eager steps and graphs"
    assert sum(loop.num_dummies for loop in together.loops) > 0
    assert all(loop.runner.real for loop in together.loops)
    together.close()


@pytest.mark.processes
def test_a_dummy_is_not_noticed() -> None:
    """Rank 1 has no work: its dummy steps change no count but their own."""
    together = Together()
    loop = together.loops[1]
    manager, before = loop.core.scheduler.block_manager, loop.metrics()
    together.add(0, 1, max_tokens=9)
    together.wake()
    together.serve(lambda: len(together.tokens().get(1, ())) == 9)
    wait_for(together.is_asleep)
    after = loop.metrics()
    assert after.pop("dummies") == 9
    assert after.pop("collectives") == together.loops[0].metrics()["collectives"]
    assert after.items() <= before.items() and loop.sent == [] and loop.steps == 0
    assert not manager.index.hash_to_block_id
    check_blocks(manager, [])
    together.close()


@pytest.mark.processes
def test_a_message_to_one_wakes_only_that_one() -> None:
    """A ping is answered, and a request without its wave waits: no rank starts alone."""
    together = Together(limit=1.0)
    calls = together.loops[0].ranks.num_calls
    together.inboxes[0].put(Utility(7))
    together.add(0, 1, max_tokens=2)
    wait_for(lambda: together.loops[0].sent and together.loops[0].core.scheduler.seqs)
    time.sleep(1.3)  # longer than the group's limit
    assert together.loops[0].ranks.num_calls == calls and not together.errors
    together.wake()
    together.serve(lambda: len(together.tokens().get(1, ())) == 2)
    together.close()


@pytest.mark.processes
def test_a_wave_that_comes_late_to_one_rank() -> None:
    """The next wave has reached one rank when both agree that none has work: they go on until it
    has reached both."""
    together = Together()
    for id in range(1, 6):
        first, last = Wave(together.num_waves + 1), Wave(together.num_waves + 2)
        together.num_waves += 2
        together.inboxes[1].put(first, last)
        together.inboxes[0].put(first)
        time.sleep(0.05)
        together.add(0, id, max_tokens=1)
        together.inboxes[0].put(last)
        wait_for(lambda id=id: id in together.tokens())  # type: ignore[misc]
        wait_for(together.is_asleep)
    together.close()


@pytest.mark.processes
def test_shutdown_waits_for_the_others() -> None:
    together = Together()
    together.inboxes[1].put(Shutdown(0))
    together.num_waves += 1
    together.inboxes[0].put(Wave(together.num_waves))
    together.add(0, 1, max_tokens=3)
    together.inboxes[0].put(Wave(together.num_waves))
    wait_for(lambda: len(together.tokens().get(1, ())) == 3)
    assert together.threads[1].is_alive()
    together.close()


@pytest.mark.processes
def test_it_does_not_run_ahead_nor_spin() -> None:
    """An engine with a full queue of results sleeps, and goes on when the front reads."""
    together = Together()
    together.add(0, 1, max_tokens=60)
    together.wake()
    wait_for(lambda: together.loops[0].steps == 16 and together.is_asleep())
    calls = together.loops[0].ranks.num_calls
    time.sleep(0.3)
    assert together.loops[0].steps == 16 and together.loops[0].ranks.num_calls == calls
    together.serve(lambda: len(together.tokens()[1]) == 60)
    together.close()


def test_the_dummy_writes_to_the_spare_block_alone() -> None:
    config = EngineArgs("tiny", **SMALL)
    runner = with_spare_block(make_runner(config))
    runner.kv_cache.fill_(7.0)
    runner.launch(dummy_batch(SMALL["num_kvcache_blocks"]))
    changed = (runner.kv_cache != 7.0).sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert changed == [SMALL["num_kvcache_blocks"]]


MIXTURE = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "n_routed_experts": 6,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_each_rank_has_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens no other's experts, and the logits over three ranks are those of one."""
    save_family("glm4_moe", tmp_path, **MIXTURE)
    opened: dict[str, set[Any]] = {}
    own, read = threading.local(), loading.read_tensor

    def reading(file: Path, name: str, part: Any = None) -> torch.Tensor:
        opened.setdefault(own.rank, set()).add((name, str(part)))
        return read(file, name, part)

    monkeypatch.setattr(loading, "read_tensor", reading)
    folder, ids = tempfile.mkdtemp(), [[5, 6, 7, 8], [9, 4], [3, 3, 3, 3, 3, 3]]

    def run(rank: int) -> tuple[Any, torch.Tensor]:
        own.rank = str(rank)
        options: dict[str, Any] = {"data_parallel_size": 3, "enable_expert_parallel": True}
        config = EngineArgs(str(tmp_path), **options, **SMALL)
        place = {"number": rank, "meeting": folder}
        core: Any = make_member(config.changed(recipe=place, ready_timeout=20.0), make_core)
        core.runner.ranks.num_rows = 6
        return core.runner.runner, logits(core.runner.runner, ids[rank])

    results = run_ranks(3, run)
    own.rank = "whole"
    whole = make_runner(EngineArgs(str(tmp_path), **SMALL))
    for (runner, found), mine in zip(results, ids, strict=True):
        torch.testing.assert_close(found, logits(whole, mine), atol=1e-4, rtol=0)
        layers = [m for m in runner.model.modules() if hasattr(m, "gate_up")]
        assert {m.gate_up.count for m in layers if hasattr(m, "router")} == {2}
    first, second, third = (
        {key for key in opened[str(rank)] if ".experts." in key[0]} for rank in range(3)
    )
    assert first and second and third
    assert not first & second and not second & third and not first & third


@torch.inference_mode()
def logits(runner: Any, ids: list[int]) -> torch.Tensor:
    n = len(ids)
    lens = np.array([n], np.int32)
    batch = ScheduledBatch(
        type=SequenceType.PREFILL, req_ids=[0], sampling_params=[], scheduled_tokens=np.array(ids), is_sampled=lens > 0,
        num_scheduled_tokens=lens, context_lens=lens, block_tables=np.arange(8, dtype=np.int32)[None],
    )  # fmt: skip
    return runner.run_model(*runner.prepare_model(batch))


@pytest.mark.slow
def test_an_idle_rank_replays_the_others_graph(tmp_path: Path) -> None:
    """An idle rank replays the graph for four rows, and no block but the spare one changes."""
    pytest.importorskip("triton")
    from recording import graph_runner, load_recorded_graph

    shape = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90}
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=1, max_position_embeddings=320, **shape)
    size = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_model_len": 32}
    config = EngineArgs(str(tmp_path), attention="triton", device="cpu", **size)
    runner = graph_runner(config, load_recorded_graph())
    replays: list[int] = []
    for n, graph in runner.graphs.items():
        graph.replay = lambda n=n, replay=graph.replay: (replays.append(n), replay())
    others = [3, 0, 3, -3, 1]  # another rank decodes three
    ranks: Any = SimpleNamespace(agree=lambda *mine: [*map(max, mine, others)], num_rows=0)
    loop = LockstepProc(EngineCore(config, LockstepRunner(runner, ranks)), None, None)
    runner.kv_cache.fill_(7.0)
    loop.idle()
    changed = (runner.kv_cache != 7.0).sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist()
    assert replays == [4] and loop.ranks.num_rows == 4 and changed == [8]
    others[1] = 1  # it prefills: all run eagerly
    loop.idle()
    assert replays == [4] and loop.ranks.num_rows == 3


def test_a_gpu_for_each() -> None:
    asks = lambda device, gpus: devices(EngineArgs(data_parallel_size=2, device=device), gpus)  # noqa: E731
    assert asks(None, 8) == asks("cuda", 2) == ["cuda:0", "cuda:1"]
    assert asks(None, 0) == [None, None] and asks("cpu", 8) == ["cpu", "cpu"]
    for device, gpus, words in ((None, 1, "2 needs 2 GPUs, and there are 1"), ("cuda:0", 8, "one device")):
        with pytest.raises(ValueError, match=words):
            asks(device, gpus)
