"""A model without numbers: runs the whole engine on hashes, and knows what must come out.

`SymbolicRunner` has the face of `ModelRunner`. It is a transformer of two layers in which a vector is a hash and
attending means hashing everything attended, in order. As in the real one, each layer stores all new K/V of the step
before anybody reads. So a slot of the second layer depends on everything that its token saw *through the block table*,
and the next token on all slots of its sequence. One wrong slot anywhere, and the output is another.

`continuation` is the oracle: the same function of the token list alone, without blocks, steps or batches. A second one
is the small engine, which has blocks and steps of its own.

`run_trial(seed)` plays one random load on a random, tiny engine and compares. It returns what happened, counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, chain, islice, pairwise
from types import SimpleNamespace
from typing import Any

from show import check_blocks, new_tokens

import atom_mini.model_runner as model_runner
import atom_mini.scheduler as scheduler_module
import atom_mini.scheduling.turns as turns
from atom_mini import EngineArgs, small
from atom_mini.block_manager import NO_HASH
from atom_mini.config import Config, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.families.state_checkpoints import StateCore, StateManager
from atom_mini.options.build import make_scheduler
from atom_mini.prefix_cache import ROOT
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput, Scheduler
from atom_mini.scheduling.host_pool import Content, OffloadCore, OffloadManager
from atom_mini.scheduling.overlap import PLACEHOLDER, OverlapCore, OverlapScheduler
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.adaptive import AdaptiveCore
from atom_mini.speculation.turns import SpecTurnScheduler
from atom_mini.speculation.verify import Drafter, SpecCore


def mix(state: int, value: int) -> int:
    """Ints and tuples of ints hash to the same number in every process."""
    return hash((state, value))


def embed(token_id: int, position: int) -> int:
    return hash((token_id, position))


def sample(state: int, seed: int | None, alphabet: int) -> int:
    """The next token: twins with different seeds part ways, as they do at a temperature."""
    return mix(state, seed or 0) % alphabet


def continuation(prompt: list[int], seed: int | None, alphabet: int) -> Iterator[tuple[int, int]]:
    """The oracle: (token, hash of everything before it), for ever."""
    hidden = output = position = 0
    tokens = iter(prompt)
    token = next(tokens)
    while True:
        hidden = mix(hidden, embed(token, position))
        output = mix(output, hidden)
        position += 1
        if (following := next(tokens, None)) is None:
            following = sample(output, seed, alphabet)
            yield following, output
        token = following


NOT_WITH_MIXED = {"enable_chunked_prefill": True, "interleave_decode": False, "scheduler_delay_factor": 0.0}


class StepFailed(Exception):
    """What a runner raises whose device has gone."""


class SymbolicRunner:
    """`forward(batch)` on hashes. `strict` also asserts what must hold of every batch, before any output is wrong."""

    def __init__(self, config: Config, alphabet: int, strict: bool = True, fails: Callable[[], bool] = bool) -> None:
        assert config.num_kvcache_blocks is not None
        self.config, self.alphabet, self.strict, self.fails = config, alphabet, strict, fails
        self.size = config.kv_cache_block_size
        slots = config.num_kvcache_blocks * self.size
        self.layers = [[-1 - slot for slot in range(slots)], [-1 - slot - slots for slot in range(slots)]]  # garbage
        self.block_slots = [range(i * self.size, (i + 1) * self.size) for i in range(config.num_kvcache_blocks)]
        self.stats: Counter[str] = Counter()
        # who ran before this step, with how many tokens computed, and how often it had been preempted
        self.readers: list[tuple[Sequence, int, int]] = []
        self.max_rows = config.max_num_seqs

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        positions, slots, cu_seqlens = (a.tolist() for a in model_runner.locate(batch, self.size))
        tokens, lens = batch.scheduled_tokens.tolist(), batch.context_lens.tolist()
        tables = batch.block_tables.tolist()
        contexts = [self._slots(table)[:n] for table, n in zip(tables, lens, strict=True)]  # position -> slot
        if self.strict:
            self._check_batch(batch, positions, slots, tokens)
        first, second = self.layers
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            first[slot] = embed(token, position)
        if self.fails():
            raise StepFailed  # in the middle: half of the step is stored
        rows = range(len(lens))
        for row in rows:
            start, end = cu_seqlens[row], cu_seqlens[row + 1]
            hidden = list(accumulate(map(first.__getitem__, contexts[row]), mix, initial=0))
            for i, slot in enumerate(slots[start:end], start - end):
                second[slot] = hidden[i]
        ids, logprobs = {}, {}
        for row in rows:
            if not batch.is_sampled[row]:
                self.stats["chunks"] += 1
                continue
            output = reduce(mix, map(second.__getitem__, contexts[row]), 0)
            token = sample(output, batch.sampling_params[row].seed, self.alphabet)
            ids[batch.req_ids[row]] = (token,)
            logprobs[batch.req_ids[row]] = [{token: output}]  # the whole hash: few tokens would hide much
        self.stats["mixed"] += batch.type is SequenceType.MIXED
        self._count_hits(batch, contexts, set(slots))
        return ScheduledBatchOutput(ids, logprobs)

    def _check_batch(self, batch: ScheduledBatch, positions: list[int], slots: list[int], tokens: list[int]) -> None:
        config, counts = self.config, batch.num_scheduled_tokens
        assert counts.min() >= 1, "a sequence without a query token"
        assert 1 <= batch.total_tokens_num == counts.sum() <= config.max_num_batched_tokens, "tokens over the budget"
        assert batch.total_seqs_num <= self.max_rows, "sequences over the limit"
        assert len(set(batch.req_ids)) == batch.total_seqs_num, "a sequence twice in one batch"
        assert len(set(slots)) == len(slots), "two tokens of one step in one slot"
        assert max(positions) < (config.max_model_len or 10**9), "a position that the model does not have"
        assert (counts == 1).all() or batch.type is not SequenceType.DECODE
        readers = [(seq, computed) for seq, computed, lost in self.readers if seq.num_preemptions == lost]
        read = {slot for seq, computed in readers for slot in self._slots(seq.block_table)[:computed]}
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            if slot in read:
                assert self.layers[0][slot] == embed(token, position), f"slot {slot} is overwritten under a reader"

    def _slots(self, table: Seq[int]) -> list[int]:
        return list(chain.from_iterable(map(self.block_slots.__getitem__, table)))

    def _count_hits(self, batch: ScheduledBatch, contexts: list[list[int]], written: set[int]) -> None:
        if batch.type is SequenceType.DECODE:
            return
        for context, n in zip(contexts, batch.num_scheduled_tokens.tolist(), strict=True):
            self.stats["same_step_hits"] += len(context) > n and context[-n - 1] in written


class SymbolicCopies:
    """The second pool: host blocks of as many hashes as a block has in both layers. A device may fail between two copies."""

    def __init__(self, runner: SymbolicRunner, num_host_blocks: int, fails: Callable[[], bool] = bool) -> None:
        self.runner, self.num_host_blocks, self.fails = runner, num_host_blocks, fails
        self.held: list[list[list[int]]] = [[[], []] for _ in range(num_host_blocks)]

    def run(self, saves: Seq[tuple[int, int]], loads: Seq[tuple[int, int]]) -> None:
        for block, host_id in saves:
            at = self.runner.block_slots[block]
            self.held[host_id] = [layer[at.start : at.stop] for layer in self.runner.layers]
            if self.fails():
                raise StepFailed
        for host_id, block in loads:
            at = self.runner.block_slots[block]
            for layer, numbers in zip(self.runner.layers, self.held[host_id], strict=True):
                layer[at.start : at.stop] = numbers
            if self.fails():
                raise StepFailed
        self.runner.stats["saved"] += len(saves)
        self.runner.stats["loaded"] += len(loads)


def check_host(manager: OffloadManager, held: list[list[list[int]]] | None = None) -> None:
    """Between two steps: each host block is free or holds one content, nothing is under way, and all that is `held` is what it
    should be."""
    host = manager.host
    assert sorted([*host.free, *host.saved.values()]) == [*range(host.num_host_blocks)], "a host block is lost, or used twice"
    assert not (host.saving or host.loading or manager.saves or manager.loads), "a copy is under way"
    for content, host_id in host.saved.items() if held else ():
        tokens: list[int] = []
        above: Content | None = content
        while above:
            tokens, above = [*above.token_ids, *tokens], above.parent
        first = [embed(token, position) for position, token in enumerate(tokens)]
        second = [*accumulate(first, mix, initial=0)][1:]
        size = len(content.token_ids)
        assert held and held[host_id] == [first[-size:], second[-size:]], f"host block {host_id} holds something else"


class WithStates:
    """A symbolic runner that also keeps a state per slot, as `StateRunner` does, and compares it with all K/V. `kept` has what
    `StateCacheRunner` keeps. A device may fail between two copies."""

    clears, by_row = True, True

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        held, kept = vars(self).setdefault("held", {}), vars(self).setdefault("kept", {})
        loads, saves = (getattr(batch, name, ()) for name in ("state_loads", "state_saves"))
        for place, row in loads:
            held[row] = kept[place]
        tokens, at = batch.scheduled_tokens.tolist(), 0
        counts, lens = batch.num_scheduled_tokens.tolist(), batch.context_lens.tolist()
        assert len(set(batch.rows)) == len(batch.rows) and set(batch.rows) <= set(range(self.config.max_num_seqs))  # type: ignore[attr-defined]
        rows = batch.rows if self.by_row else range(len(counts))
        for row, n, end in zip(rows, counts, lens, strict=True):
            if n == end and self.clears:
                held[row] = 0
            for i in range(n):
                held[row] = mix(held.get(row, 0), embed(tokens[at + i], end - n + i))
            at += n
        output = super().forward(batch)  # type: ignore[misc]
        for row, table, end in zip(rows, batch.block_tables.tolist(), lens, strict=True):
            values = map(self.layers[0].__getitem__, self._slots(table)[:end])  # type: ignore[attr-defined]
            assert held[row] == reduce(mix, values, 0), f"the state in slot {row} is another past's"
        for row, place in saves:
            if self.fails():  # type: ignore[attr-defined]
                raise StepFailed
            kept[place] = held[row]
        self.stats.update(state_loads=len(loads), state_saves=len(saves))  # type: ignore[attr-defined]
        return output


class StateSymbols(WithStates, SymbolicRunner):
    """Steps that end at the borders of `interval` tokens, with states."""

    def _check_batch(self, batch: ScheduledBatch, *rest: Any) -> None:
        super()._check_batch(batch, *rest)
        interval = self.config.state_checkpoint_interval_tokens  # type: ignore[attr-defined]
        starts = batch.context_lens - batch.num_scheduled_tokens
        assert (starts // interval == (batch.context_lens - 1) // interval).all(), "a step goes past a border"


def check_states(manager: StateManager, kept: dict[int, int]) -> None:
    """Between two steps: each place is free or keeps one state, nothing is under way, and what is kept is what it should be."""
    places = sorted([*manager.free_checkpoints, *manager.saved.values()])
    assert places == [*range(manager.num_checkpoints)], "a state checkpoint is lost, or used twice"
    assert not (manager.saving or manager.saves or manager.loads), "a copy of a state is under way"
    holds = {b.content_id: b for b in manager.pool.blocks if b.hash != NO_HASH}
    for content_id, place in manager.saved.items():
        tokens: list[int] = []
        at = content_id
        while at in holds:
            tokens, at = [*holds[at].token_ids, *tokens], holds[at].parent_id
        if at == ROOT:  # else, an orphan
            assert len(tokens) % manager.interval == 0, "a state within an interval"
            right = reduce(mix, (embed(token, position) for position, token in enumerate(tokens)), 0)
            assert kept[place] == right, f"state checkpoint {place} is another past's"


class LaunchingSymbolicRunner(SymbolicRunner):
    """Takes steps and runs them in their order: at once, or as late as it may, when a result is waited for."""

    def __init__(
        self, config: Config, alphabet: int, strict: bool, fails: Callable[[], bool], is_late: Callable[[], bool]
    ):
        super().__init__(config, alphabet, strict, fails)
        self.is_late, self.device_fails = is_late, fails
        self.token_pool: dict[int, int] = {}  # row -> the token last sampled in it
        self.queue: list[SymbolicStep] = []
        self.in_flight: list[SymbolicStep] = []

    def launch(self, batch: ScheduledBatch) -> SymbolicStep:
        step = SymbolicStep(self, batch)
        self.stats["ahead"] += bool(self.in_flight)
        self.queue.append(step)
        self.in_flight.append(step)
        if not self.is_late():
            self.run_up_to(step)
        return step

    def run_up_to(self, last: SymbolicStep) -> None:
        while last.output is None:
            step = self.queue.pop(0)
            is_lost = step not in self.in_flight  # given up by the engine; the device runs it all the same
            self.fails = bool if is_lost else self.device_fails
            try:
                step.output = self.forward(step.fill_in())
            except StepFailed:
                self.in_flight.clear()
                raise
            rows = dict(zip(step.batch.req_ids, step.batch.rows, strict=True))
            self.token_pool.update((rows[i], ids[0]) for i, ids in step.output.token_ids.items())


class SymbolicDrafter(Drafter):
    """Drafts as many tokens as it likes; each is what will come with probability `right`."""

    def __init__(self, alphabet: int, right: float, luck: random.Random) -> None:
        super().__init__()
        self.alphabet, self.right, self.luck = alphabet, right, luck
        self.has_cache = luck.random() < 0.5

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        drafts = []
        for seq, n in zip(seqs, most, strict=True):
            coming = continuation(seq.token_ids, seq.sampling_params.seed, self.alphabet)
            tokens = [token for token, _ in islice(coming, n if self.right == 1 else self.luck.randint(0, n))]
            drafts.append(
                [t if self.luck.random() < self.right else self.luck.randrange(self.alphabet) for t in tokens]
            )
        return drafts


class SymbolicStep:
    """A step under way."""

    def __init__(self, runner: LaunchingSymbolicRunner, batch: ScheduledBatch) -> None:
        self.runner, self.batch = runner, batch
        self.output: ScheduledBatchOutput | None = None

    def __call__(self) -> ScheduledBatchOutput:
        self.runner.run_up_to(self)
        self.runner.in_flight.remove(self)
        assert self.output is not None
        return self.output

    def fill_in(self) -> ScheduledBatch:
        """With the tokens that by now the device knows."""
        tokens = self.batch.scheduled_tokens.copy()
        for i in (tokens == PLACEHOLDER).nonzero()[0].tolist():
            tokens[i] = self.runner.token_pool.get(self.batch.rows[i], 0)
        return replace(self.batch, scheduled_tokens=tokens)


@dataclass
class Request:
    """One request of a trial: when it comes, what it asks, when it is taken back, two tokens that stop it."""

    arrival: int
    prompt: list[int]
    params: SamplingParams
    abort_at: int | None = None
    stop_pair: tuple[int, int] | None = None

    def stopped(self, tokens: list[int]) -> int | None:
        """How many of `tokens` there are where the two that stop it are complete; None if they are not."""
        if self.stop_pair is None:
            return None
        return next((n for n, pair in enumerate(pairwise(tokens), 2) if pair == self.stop_pair), None)


class SmallRunner:
    """The same model for the small engine, which hands over its sequences themselves."""

    def __init__(self, trial: Trial) -> None:
        self.size, self.alphabet = trial.config.kv_cache_block_size, trial.alphabet
        slots = (trial.config.num_kvcache_blocks or 0) * self.size
        self.layers = [[-1 - slot for slot in range(slots)], [-1 - slot - slots for slot in range(slots)]]  # garbage

    def slots(self, seq: small.Sequence) -> list[int]:
        return [seq.block_table[p // self.size] * self.size + p % self.size for p in range(seq.context_len)]

    def forward(self, seqs: list[small.Sequence]) -> list[int]:
        first, second = self.layers
        for seq in seqs:
            places = self.slots(seq)
            for p in range(seq.num_computed_tokens, seq.context_len):
                first[places[p]] = embed(seq.token_ids[p], p)
        for seq in seqs:
            places = self.slots(seq)
            hidden = list(accumulate(map(first.__getitem__, places), mix, initial=0))[1:]
            for p in range(seq.num_computed_tokens, seq.context_len):
                second[places[p]] = hidden[p]
        outputs = [reduce(mix, map(second.__getitem__, self.slots(seq)), 0) for seq in seqs]
        return [sample(o, seq.sampling_params.seed, self.alphabet) for o, seq in zip(outputs, seqs, strict=True)]


def check_small(manager: small.BlockManager, seqs: Iterable[small.Sequence]) -> None:
    """The books of the small engine balance."""
    owners = Counter(block for seq in seqs for block in seq.block_table)
    assert [owners[block] for block in range(len(manager.ref_counts))] == manager.ref_counts, "wrong counts of owners"
    free = {block for block, count in enumerate(manager.ref_counts) if count == 0}
    assert free == {*manager.free}, "a block is free and owned, or neither"
    assert manager.hash_to_block == {key: block for block, key in manager.block_to_hash.items()}


def small_tokens(trial: Trial, stats: Counter[str] | None = None) -> dict[int, list[int]]:
    """The tokens of the small engine (atom_mini/small.py) for each request that fits, all of them queued at once.

    With `stats`, every step is checked, and preemptions and tokens that were found are counted.
    """
    config, runner = trial.config, SmallRunner(trial)
    manager = small.BlockManager(config.num_kvcache_blocks or 0, config.kv_cache_block_size)
    limits = config.max_num_seqs, config.max_num_batched_tokens, trial.max_len
    scheduler = small.Scheduler(manager, trial.eos_token_ids, *limits)
    seqs: dict[int, small.Sequence] = {}
    for i, request in enumerate(trial.requests):
        if len(request.prompt) < trial.max_len:
            names = "seed", "max_tokens", "stop_token_ids", "ignore_eos"
            params = small.SamplingParams(**{name: getattr(request.params, name) for name in names})
            seqs[i] = small.Sequence([*request.prompt], len(request.prompt), params)
    scheduler.waiting += seqs.values()
    steps = 0
    while ran := scheduler.schedule():
        counts = [seq.context_len - seq.num_computed_tokens for seq in ran]
        assert min(counts) > 0 and sum(counts) <= config.max_num_batched_tokens, "tokens over the budget"
        assert (steps := steps + 1) < 5000, "the small engine does not come to an end"
        if stats is not None:
            stats["preemptions"] += sum(len(seq) > seq.num_prompt_tokens for seq in scheduler.waiting)
            stats["hits"] += sum(seq.num_computed_tokens for seq in ran if len(seq) == seq.num_prompt_tokens)
        scheduler.postprocess(ran, runner.forward(ran))
        if stats is not None:
            check_small(manager, seqs.values())
    assert all(seq.finish_reason for seq in seqs.values()), "the small engine has forgotten a request"
    return {i: seq.token_ids[seq.num_prompt_tokens :] for i, seq in seqs.items()}


@dataclass
class Trial:
    """A random engine and a random load."""

    config: Config
    eos_token_ids: tuple[int, ...]
    alphabet: int
    requests: list[Request]
    failure_rate: float

    @property
    def max_len(self) -> int:
        """The pool and one token more, or the model."""
        pool = (self.config.num_kvcache_blocks or 0) * self.config.kv_cache_block_size + 1
        return min(pool, self.config.max_model_len or pool)

    def expected(self, request: Request) -> tuple[list[int], list[int], str]:
        """(token ids, hashes, leave reason) by recomputing everything from the token list."""
        tokens: list[int] = []
        hashes: list[int] = []
        params = request.params
        for token, state in continuation(request.prompt, params.seed, self.alphabet):
            tokens.append(token)
            hashes.append(state)
            total = len(request.prompt) + len(tokens)
            if request.stopped(tokens[-2:]):
                return tokens, hashes, "stop_sequence"
            if token in self.eos_token_ids and not params.ignore_eos:
                return tokens, hashes, "eos" if token == self.eos_token_ids[0] else f"stop_{token}"
            if token in params.stop_token_ids:
                return tokens, hashes, f"stop_{token}"
            if len(tokens) == params.max_tokens:
                return tokens, hashes, "max_tokens"
            if total == self.max_len:
                return tokens, hashes, "max_model_len" if total == self.config.max_model_len else "kv_cache"
        raise AssertionError("a continuation never ends by itself")


def make_trial(seed: int) -> Trial:
    """Small enough that everything happens often: preemption, eviction, sharing, chunks, all together."""
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    blocks = rng.randint(2, rng.choice((4, 8, 24 // size + 4)))
    pool, chunked = blocks * size, rng.random() < 0.8
    budget = rng.choice((size + 1, rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 40)))
    max_model_len = rng.randint(2, pool + 2) if rng.random() < 0.3 else None
    if not chunked:
        max_model_len = min(max_model_len or pool + 2, rng.randint(2, pool + 2))
        budget = max(budget, max_model_len)
    config = EngineArgs(
        kv_cache_block_size=size,
        num_kvcache_blocks=blocks,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=chunked,
        interleave_decode=rng.random() < 0.5,
        scheduler_delay_factor=rng.choice((0.5, 1.0, 4.0)) if rng.random() < 0.15 else 0.0,
    )
    alphabet = rng.choice((3, 3, 6, 12))
    trial = Trial(config, tuple(rng.sample(range(alphabet), rng.choice((0, 0, 1, 2)))), alphabet, [], 0.0)
    stems = [[rng.randrange(3) for _ in range(pool)] for _ in range(rng.randint(1, 3))]
    rush, prompts = rng.choice((1, 4, 12)), []
    for _ in range(rng.randint(1, 10)):
        most = trial.max_len - 2
        prompt = rng.choice(stems)[: rng.choice((0, most, most * 4 // 5, *(rng.randint(0, most * 2 // 3 + 1),) * 6))]
        prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.choice((0, 1, 1, 2, size + 1))))]
        if prompts and rng.random() < 0.25:
            prompt = rng.choice(prompts)
        prompts.append(prompt or [0])
        arrival = rng.randrange(rush)
        params = SamplingParams(
            max_tokens=rng.randint(1, rng.choice((3, 12, 30))),
            seed=rng.choice((None, None, 1, 2)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(alphabet), 1) if rng.random() < 0.1 else (),
        )
        abort_at = arrival + rng.randrange(30) if rng.random() < 0.12 else None
        pair = (rng.randrange(alphabet), rng.randrange(alphabet)) if rng.random() < 0.1 else None
        trial.requests.append(Request(arrival, prompts[-1], params, abort_at, pair))
    if config.interleave_decode and chunked and size in (2, 3):  # rare otherwise: a cut prompt under a long decode
        trial.config = config.changed(max_num_batched_tokens=size + 1, max_model_len=None)
        long = [rng.randrange(3) for _ in range(max(1, trial.max_len - 3 * size))]
        trial.requests.insert(0, Request(0, long, SamplingParams(max_tokens=2)))
        trial.requests.insert(1, Request(0, [rng.randrange(3)], SamplingParams(max_tokens=30, ignore_eos=True)))
    trial.failure_rate = rng.choice((0.03, 0.2)) if rng.random() < 0.2 else 0.0
    return trial


def tighten(trial: Trial, rng: random.Random) -> None:
    """Short prompts that all come at once and grow out of the pool together: preemption in most trials."""
    trial.config = trial.config.changed(max_num_seqs=rng.randint(3, 6))
    for request in trial.requests:
        request.arrival, request.prompt = 0, request.prompt[: 1 + trial.max_len // 4]
        if rng.random() < 0.8:
            request.params = replace(request.params, max_tokens=30, ignore_eos=True)


def run_trial(
    seed: int,
    strict: bool = True,
    cache: str = "hash",
    overlap: bool = False,
    tight: bool = False,
    drafts: bool = False,
    adaptive: bool = False,
    mixed: bool = False,
    lpm: type[Scheduler] | None = None,
    host: bool = False,
    states: bool = False,
) -> Counter[str]:
    """Run trial `seed` to its end and compare it with the oracle; raises if anything is wrong.

    `strict=False` leaves out the checks of every step, so that only wrong outputs count (and exceptions).
    `cache` is the prefix cache of those trials that have one. `overlap`: the host is a step ahead.
    `tight`: most of the trials preempt. `drafts`: up to 8 per decode, of a drafter between always wrong and always right.
    `adaptive`: and their number is chosen, by random times.
    `mixed`: decodes and chunks of prompts share steps. `lpm`: the class that sorts the queue by cached prefixes.
    `host`: there is a second pool of 1 to 12 blocks. `states`: sequences keep states, of which 1 to 6 are kept for others.
    """
    trial = make_trial(seed)
    if host or states:
        trial.config = trial.config.changed(enable_prefix_caching=True)
    if tight:
        tighten(trial, random.Random(seed + 1))
    if trial.config.enable_prefix_caching:
        trial.config = trial.config.changed(prefix_cache=cache)
    luck, ticks = random.Random(~seed), iter(range(10**9))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))  # the delay gate must not depend on this machine
    real_time, scheduler_module.time, turns.time = scheduler_module.time, clock, clock  # type: ignore[assignment]
    try:
        failures = Counter({"left": 10 if trial.failure_rate else 0})  # a lasting failure would never end

        def fails() -> bool:
            failing = failures["left"] > 0 and luck.random() < trial.failure_rate
            failures["left"] -= failing
            return failing

        if drafts:
            runner = SymbolicRunner(trial.config, trial.alphabet, strict, fails)
            runner.max_rows = trial.config.max_num_batched_tokens
            trial.config = trial.config.changed(scheduler_cls=SpecTurnScheduler)
            scheduler: Any = make_scheduler(trial.config)
            scheduler.num_drafts = luck.randint(1, 8)
            drafter = SymbolicDrafter(trial.alphabet, luck.choice((0.0, 0.5, 0.9, 1.0)), luck)
            if adaptive:  # whatever it measures
                core = AdaptiveCore(trial.config, runner, drafter, scheduler, clock=luck.random)
                core.chooser.most_won = 0.0  # by such a clock, drafts lose
            else:
                core = SpecCore(trial.config, runner, drafter, scheduler)
            stats = play(trial, core, runner, strict, clock.perf_counter)
            stats["drafted"] = scheduler.spec_stats.proposed.total()
            stats["accepted"] = scheduler.spec_stats.accepted.total()
            return stats
        if lpm:
            tree = {"enable_prefix_caching": True, "prefix_cache": "radix", "scheduler_cls": lpm}
            in_turn = {"interleave_decode": False, "scheduler_delay_factor": 0.0}
            trial.config = trial.config.changed(schedule_policy="lpm", **tree, **in_turn)
        if mixed:
            trial.config = trial.config.changed(enable_mixed_steps=True, **NOT_WITH_MIXED)
        if states:
            interval = trial.config.kv_cache_block_size * luck.choice((1, 1, 1, 2, 3))
            counts = {"state_checkpoint_interval_tokens": interval, "num_state_checkpoints": luck.choice((1, 2, 3, 6))}
            trial.config = trial.config.changed(**counts, enable_chunked_prefill=True)
            keeping = StateSymbols(trial.config, trial.alphabet, strict, fails)
            core = StateCore(trial.config, keeping, make_scheduler(trial.config))  # type: ignore[arg-type]
            return play(trial, core, keeping, strict, clock.perf_counter)
        if not overlap:
            runner = SymbolicRunner(trial.config, trial.alphabet, strict, fails)
            core = EngineCore(trial.config, runner, make_scheduler(trial.config))
            if host:
                copies = SymbolicCopies(runner, luck.randint(1, 12), fails)
                core = OffloadCore(trial.config, runner, core.scheduler, copies)
            return play(trial, core, runner, strict, clock.perf_counter)
        trial.config = trial.config.changed(overlap=True, scheduler_delay_factor=0.0)  # refused together
        late = luck.choice((0.0, 0.5, 1.0))
        launching = LaunchingSymbolicRunner(trial.config, trial.alphabet, strict, fails, lambda: luck.random() < late)
        core = OverlapCore(trial.config, launching, make_scheduler(trial.config))
        return play(trial, core, launching, strict, clock.perf_counter)
    finally:
        scheduler_module.time = turns.time = real_time


def run_many(seeds: Iterable[int], **how: Any) -> Counter[str]:
    """The trials' statistics added up; an error names its trial."""
    stats: Counter[str] = Counter()
    for seed in seeds:
        try:
            result = run_trial(seed, **how)
        except Exception as error:
            raise AssertionError(f"reproduce with symbolic.run_trial({seed}, **{how})") from error
        stats += result + Counter(preempting=result["preemptions"] > 0)
    return stats


def play(
    trial: Trial, core: EngineCore, runner: SymbolicRunner, strict: bool, now: Callable[[], float]
) -> Counter[str]:
    """Feed the trial's requests to `core`, step by step, and compare all that comes out with the oracle."""
    scheduler, manager, stats = core.scheduler, core.scheduler.block_manager, runner.stats
    scheduler.eos_token_ids = tuple(trial.eos_token_ids)
    todo = sorted(range(len(trial.requests)), key=lambda i: trial.requests[i].arrival, reverse=True)
    aborts = Counter(r.abort_at for r in trial.requests if r.abort_at is not None)
    seqs: dict[int, Sequence] = {}
    streams: dict[int, list[int]] = {}
    ended: dict[int, str | None] = {}
    step = 0
    while todo or not core.is_finished():
        assert step < 5000, "no end in sight"
        while todo and trial.requests[todo[-1]].arrival <= step:
            i = todo.pop()
            request = trial.requests[i]
            seq = Sequence(request.prompt, trial.config.kv_cache_block_size, request.params, i)
            seq.arrive_time = now()
            try:
                core.add(seq)
                seqs[i], streams[i] = seq, []
            except ValueError:
                assert len(request.prompt) >= trial.max_len and seq not in scheduler.waiting
                stats["refused"] += 1
            else:
                assert len(request.prompt) < trial.max_len
        for i in [i for i in seqs if trial.requests[i].abort_at == step] if aborts[step] else ():
            alive, held = i not in ended, bool(seqs[i].block_table)
            assert (core.abort(i) is seqs[i]) == alive, "abort must find exactly those that are in the engine"
            if alive:
                ended[i] = "abort"
                stats["aborts_running" if held else "aborts_waiting"] += 1
        idle = core.is_finished()
        if not isinstance(scheduler, OverlapScheduler):  # there, the steps under way say what is read
            runner.readers = [(s, s.num_computed_tokens, s.num_preemptions) for s in scheduler.running]
        holding = len(scheduler.running)
        try:
            result = core.step()
        except StepFailed:
            stats["failures"] += 1
            stats["put_back"] += holding  # they lose their blocks and compute again, as the preempted do
        else:
            assert (result is None) == idle
            for new in new_tokens(result) if result else ():
                streams[new.request_id] += new.tokens
                if new.reason is not None:
                    ended[new.request_id] = new.reason
            for i, seq in seqs.items():  # as the text side does it
                if ended.get(i) != "abort" and trial.requests[i].stopped(seq.completion_token_ids):
                    ended[i] = "stop_sequence"
                    core.abort(i, "stop_sequence")
        stats["steps"] += 1
        step += 1
        if strict:
            check_blocks(manager, scheduler.running)
            if isinstance(core, OffloadCore) and isinstance(core.copies, SymbolicCopies):
                check_host(core.manager, core.copies.held)
            if isinstance(core, StateCore) and isinstance(runner, WithStates):
                check_states(core.manager, vars(runner).get("kept", {}))
            assert len(scheduler.running) <= trial.config.max_num_seqs, "more run than may"
            for i, seq in seqs.items():
                assert seq.completion_token_ids == streams[i], "a completion shrank, or the stream lost a token"
    if strict:
        assert manager.num_free_blocks == len(manager.pool.blocks), "blocks are lost"
    stats["preemptions"] = scheduler.num_preemptions
    smalls = small_tokens(trial) if strict else {}
    for i, seq in seqs.items():
        if strict and ended[i] not in ("abort", "stop_sequence"):
            assert streams[i] == smalls[i], f"request {i}: other tokens than the small engine's"
        tokens, hashes, reason = trial.expected(trial.requests[i])
        if ended[i] == "abort":
            tokens, hashes, reason = tokens[: len(streams[i])], hashes[: len(streams[i])], "abort"
        assert streams[i] == seq.completion_token_ids, f"request {i}: other tokens than those of its stream"
        kept = trial.requests[i].stopped(streams[i]) or len(streams[i])
        assert streams[i][:kept] == tokens, f"request {i}: other tokens than the oracle's"
        assert [h for entry in seq.logprobs[:kept] for h in entry.values()] == hashes, f"request {i} saw another past"
        assert ended[i] == reason and seq.is_finished, f"request {i}: {seq.leave_reason}"
        assert seq.leave_reason == reason or reason == "stop_sequence", f"request {i}: {seq.leave_reason}"
        stats[reason.split("_")[0] if reason[-1].isdigit() else reason] += 1
        stats["tokens"] += len(tokens)
        stats["prefix_hits"] += seq.num_cached_tokens > 0
    return stats
