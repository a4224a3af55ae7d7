"""What more than one chapter draws, times or fakes: `from show import five_requests`.

Not in the package, and without torch until a function needs it.
"""

from __future__ import annotations

import colorsys
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from places import ROOT as PROJECT

from atom_mini.block_manager import NO_HASH
from atom_mini.config import SamplingParams
from atom_mini.prefix_cache import ROOT, tokens_of
from atom_mini.scheduler import ScheduledBatchOutput
from atom_mini.sequence import Sequence

# The palette. A test holds it against the player's; no two that can meet are alike.
COLOURS = {
    "waiting": "#e6b43c70", "held": "#8090a066", "prefill": "#e4572e",
    "decode": "#4d9de0", "preempted": "#b5179e", "finished": "#2a9d5c",
    "used": "#7f8fa3", "cached": "#bcc6d2", "free": "#eef1f4",
    "host": "#5b6570", "device": "#12a3a3",
    "accepted": "#2f6db3", "bonus": "#8fc7f0", "rejected": "#e3a9b8",
}  # fmt: skip
TIGHT = {"kv_cache_block_size": 4, "num_kvcache_blocks": 10}
TIGHT |= {"max_num_batched_tokens": 16}
CENTRE = {"ha": "center", "va": "center"}


class Request(NamedTuple):
    """What somebody asks for, and before which step."""

    name: str
    prompt: list[int]
    max_tokens: int
    arrival: int = 0


def make_requests(shapes, arrivals=None) -> list[Request]:
    """Requests of (prompt, output) tokens: a, b, c ... No two prompts begin alike."""
    arrivals = arrivals or [0] * len(shapes)
    return [
        Request(chr(97 + i), [i + 2] * prompt, output, arrivals[i])
        for i, (prompt, output) in enumerate(shapes)
    ]


def five_requests() -> list[Request]:
    """The load of the book. In a pool as small as `TIGHT` somebody is preempted."""
    return make_requests([(9, 18), (6, 22), (13, 6), (3, 12), (5, 4)], [0, 0, 0, 4, 4])


def sequences(block_size=4, requests=None, kind=Sequence, **params) -> list[Sequence]:
    """The requests (or the five) as sequences with ids 0, 1, 2 ... made by `kind`."""
    requests = requests or five_requests()
    samplings = [SamplingParams(max_tokens=r.max_tokens, **params) for r in requests]
    return [kind(requests[i].prompt, block_size, w, id=i) for i, w in enumerate(samplings)]


def sampled(batch) -> list[tuple[int, int]]:
    """(request, length) of every row of a batch that gets a token."""
    ids, lens = batch.req_ids, batch.context_lens.tolist()
    rows = zip(ids, lens, batch.is_sampled, strict=True)
    return [(i, n) for i, n, gets_one in rows if gets_one]


class CountingRunner:
    """Runs no model: the next token of a sequence is its length."""

    def forward(self, batch) -> ScheduledBatchOutput:
        return ScheduledBatchOutput({i: (n,) for i, n in sampled(batch)})


class NewTokens(NamedTuple):
    """What a step has brought a request."""

    request_id: int
    tokens: tuple[int, ...]
    reason: str | None = None  # why it has ended with them


def new_tokens(step) -> list[NewTokens]:
    """By request what a step has brought it, for those that it brought tokens."""
    ended = {seq.id: seq.leave_reason for seq in step.finished}
    new = step.output.token_ids
    return [NewTokens(s.id, new[s.id], ended.get(s.id)) for s in step.seqs if s.id in new]


class Played(NamedTuple):
    """One step as it was scheduled."""

    phases: dict[int, str]  # request -> a name in `COLOURS`
    tokens: dict[int, int]  # request -> tokens computed
    used: int  # blocks
    batch: Any
    seqs: dict[int, Sequence]


def watch(scheduler) -> list[Played]:
    """A list that grows with every step that `scheduler` schedules from now on."""
    steps, schedule, manager = [], scheduler.schedule, scheduler.block_manager

    def watched():
        before = {s.id: s.num_preemptions for s in scheduler.running}
        if (scheduled := schedule()) is None:
            return None
        batch, seqs = scheduled
        waiting = {s.id: s.num_preemptions for s in scheduler.waiting}
        lost = [i for i in waiting if waiting[i] > before.get(i, waiting[i])]
        phases = dict.fromkeys(waiting, "waiting") | dict.fromkeys(lost, "preempted")
        phases |= dict.fromkeys([s.id for s in scheduler.running], "held")
        kinds = ["decode" if one else "prefill" for one in batch.is_decode]
        phases |= dict(zip(batch.req_ids, kinds, strict=True))
        tokens = {i: s.num_scheduled_tokens for i, s in seqs.items()}
        used = len(manager.pool.blocks) - manager.num_free_blocks
        steps.append(Played(phases, tokens, used, batch, dict(seqs)))
        return scheduled

    scheduler.schedule = watched
    return steps


def play(engine, seqs, arrivals=None, forward=None) -> list[Played]:
    """Run `seqs` to their ends, each added before the step of its arrival (or 0).

    `engine` is an engine core, or a scheduler and `forward`, which runs a batch.
    """
    scheduler, clock = getattr(engine, "scheduler", engine), 0
    steps, manager = watch(scheduler), scheduler.block_manager
    arrivals = arrivals or [0] * len(seqs)
    while clock <= max(arrivals) or not engine.is_finished():
        for seq in [s for s, at in zip(seqs, arrivals, strict=True) if at == clock]:
            engine.add(seq)
        if forward is None:
            engine.step()
        elif (scheduled := scheduler.schedule()) is not None:
            batch, running = scheduled
            scheduler.postprocess(list(running.values()), forward(batch))
            check_blocks(manager, scheduler.running)
        clock += 1
    assert manager.num_free_blocks == len(manager.pool.blocks)
    return steps


class Replayed:
    """A runner that gives each request so many tokens, and then token 0, which ends it."""

    def __init__(self, counts) -> None:
        self.left = list(counts)

    def forward(self, batch) -> ScheduledBatchOutput:
        tokens = {}
        for i, _ in sampled(batch):
            self.left[i] -= 1
            tokens[i] = (7 if self.left[i] else 0,)
        return ScheduledBatchOutput(tokens)


def replay(requests, scheduler, config) -> tuple[list[Played], Any]:
    """Play requests of (arrival, prompt tokens, max_tokens, tokens that they generate): the steps, and their `Trace`."""
    from atom_mini.engine_core import EngineCore
    from atom_mini.trace.trace import record

    config = config.changed(eos_token_ids=(0,))
    core = EngineCore(config, Replayed(made for *_, made in requests), scheduler(config))
    trace, seqs = record(core), []
    for i, (_, n, most, _) in enumerate(requests):
        ids = list(range(1000 * i + 1, 1000 * i + 1 + n))  # no two prompts begin alike
        seqs.append(Sequence(ids, config.kv_cache_block_size, SamplingParams(max_tokens=most), id=i))
    return play(core, seqs, [arrival for arrival, *_ in requests]), trace


def check_index(index) -> None:
    """Assert that a block has a hash if and only if the index points at it."""
    if hasattr(index, "places"):  # a tree: chapter 40
        return check_tree(index)
    known = {(b.hash, b.block_id) for b in index.blocks if b.hash != NO_HASH}
    wrong = known ^ getattr(index, "hash_to_block_id", {}).items()
    assert not wrong, f"(hash, block) on one side only: {wrong}"


def check_tree(tree) -> None:
    """Assert that a block has a hash (its content id) if and only if the tree holds it, where `places` says."""
    nodes, seen, size = [(tree.root, ROOT)], {ROOT}, tree.block_size
    while nodes:
        node, parent_id = nodes.pop()
        for at, block_id in enumerate(node.block_ids):
            block, place = tree.blocks[block_id], (node, at)
            assert block.hash == block.content_id, f"stale entry for block {block_id}"
            assert block.parent_id == parent_id and tree.places[block.hash] == place
            assert block.token_ids == node.tokens[at * size : (at + 1) * size]
            parent_id = block.content_id
            seen.add(parent_id)
        assert len(node.tokens) == len(node.block_ids) * size
        for first, child in node.children.items():
            assert child.block_ids and first == tuple(child.tokens[:size])
            nodes.append((child, parent_id))
    assert seen == tree.places.keys(), "a place that is not in the tree"
    known = {block.hash for block in tree.blocks} - {NO_HASH}
    assert known <= seen, f"hashes of no place in the tree: {known - seen}"


def check_blocks(manager, seqs, held=()) -> None:
    """Assert that a block manager's books balance, given every sequence that holds
    blocks, and lists of blocks that are `held`: references equal owners, a block is free
    or owned, tables and contents are right."""
    pool, owners = manager.pool, Counter(i for s in seqs for i in set(s.block_table))
    owners += Counter(i for blocks in held for i in blocks)
    for i, n in enumerate(block.ref_count for block in pool.blocks):
        assert n == owners[i], f"block {i}: {n} references, {owners[i]} owners"
        assert (n == 0) == (i in pool.free_block_ids), f"block {i}: free and owned"
    check_index(manager.index)
    for seq in seqs:
        table, end = seq.block_table, seq.num_computed_tokens
        assert len(table) * manager.block_size >= end, f"{seq}: K/V without a block"
        row = manager.block_tables[seq.row, : len(table)]
        assert row.tolist() == table, f"{seq}: its row is {row}"
        for i in range(min(seq.num_published_blocks, end // manager.block_size)):
            held = pool.blocks[table[i]].token_ids
            assert held == tokens_of(seq, i), f"{seq}: block {i} holds {held}"
    assert len(manager._free_rows) == manager.max_num_seqs - len(seqs), "rows are lost"


def admit(manager, *seqs) -> None:
    """Give `seqs` blocks, compute them whole in one step, publish the full blocks."""
    for seq in seqs:
        cached = manager.can_allocate(seq)
        assert cached is not None, "the pool is full"
        manager.allocate(seq, cached)
        manager.stage(seq, seq.num_tokens)
    for seq in seqs:  # the step runs here
        seq.num_computed_tokens = seq.num_tokens
    manager.index.publish()


SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
SMALL |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"max_position_embeddings": 256, "initializer_range": 0.3}


def random_checkpoint(kind: str, folder, **options):
    """A small random model of transformers, saved to `folder`. Norms and biases are random, too."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


def complain(action) -> None:
    """Print the ValueError that `action` must raise."""
    try:
        action()
    except ValueError as error:
        print("ValueError:", error)
    else:
        raise AssertionError("this should have been refused")


def predicted(guess: float | None, measured: float) -> None:
    """Print what was measured beside the reader's guess, which may be None."""
    if guess is None:
        print(f"measured: {measured:.1f} (no guess)")
        return
    off = max(guess, measured) / min(guess, measured) if min(guess, measured) > 0 else float("inf")
    verdict = "close" if off < 1.5 else f"off by a factor of {off:.1f}"
    print(f"measured: {measured:.1f}, your guess: {guess:g} ({verdict})")


def use_triton() -> str:
    """The device; without a GPU, Triton's interpreter is switched on: call it first."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_step(shapes, H=4, K=2, D=8, S=4, seed=0, device="cpu") -> tuple:
    """A random step of (new tokens, context) pairs over a shuffled pool of N blocks.

    Returns q [T, H, D], the cache [2, N, K, S, D] with NaN in every slot that no token
    has, the metadata, and of each sequence its k and v [2, context, K, D] in one piece.
    """
    import torch

    from atom_mini.attention import AttentionMetaData

    g = torch.Generator().manual_seed(seed)
    news, lens = map(list, zip(*shapes, strict=True))
    counts = [-(-length // S) for length in lens]
    ids = torch.randperm(sum(counts) + 3, generator=g)
    cache = torch.full((2, len(ids), K, S, D), float("nan"))
    tables = torch.full((len(shapes), max(counts)), -1, dtype=torch.int32)
    unpaged = [torch.randn(2, length, K, D, generator=g) for length in lens]
    slots = []
    for b, blocks in enumerate(ids[:-3].split(counts)):
        tables[b, : len(blocks)] = blocks
        p = torch.arange(lens[b])
        cache.transpose(2, 3)[:, blocks[p // S], p % S] = unpaged[b]
        slots.append((blocks[p // S] * S + p % S)[-news[b] :])
    ends = torch.tensor(lens).int()
    meta = AttentionMetaData(ends, tables, torch.cat(slots), news, lens)
    q = torch.randn(sum(news), H, D, generator=g)
    return q.to(device), cache.to(device), meta, unpaged


def plain_attention(q, k, v, scale):
    """softmax(q k^T scale) v, causal: `q` [n, H, D], `k`, `v` [K, L, D] -> [n, H, D].

    Computes in float32 whatever the dtype. Chapter 05's.
    """
    import torch

    from atom_mini.attention import causal_mask

    k, v = (x.float().repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
    scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * scale  # [H, n, L]
    scores.masked_fill_(~causal_mask(len(q), k.shape[1], q.device), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)


def reference_attention(q, kv_cache, meta, scale):
    """`plain_attention` of each sequence over its own blocks: q [T, H, D] -> same.

    The oracle of every attention: clear, slow, exact. Chapter 05's.
    """
    import torch

    from atom_mini.attention import gather_kv

    rows = zip(q.split(meta.query_lens), meta.block_tables, meta.lens, strict=True)
    each = [(x, *gather_kv(kv_cache, table, length)) for x, table, length in rows]
    return torch.cat([plain_attention(q, k, v, scale) for q, k, v in each])


def logits_by_token(engine, runner, seqs, forward=None) -> tuple[dict, list]:
    """`play`: {(request, length): logits [V]} of what is sampled; the batches."""
    record, sample = {}, runner.sample

    def noting(batch, logits, *rest):
        record.update(zip(sampled(batch), logits.clone(), strict=True))
        return sample(batch, logits, *rest)

    runner.sample = noting
    try:
        return record, [step.batch for step in play(engine, seqs, forward=forward)]
    finally:
        del runner.sample


def logits_of(model, spec, ids, pieces=(), kind=None, **more):
    """Logits [T, vocabulary] of one sequence `ids` [T], which `model` (of the spec `spec`) gets in pieces of so many
    tokens, or whole. The cache is one block, NaN where nothing was written; `more` goes to the metadata, of `kind`."""
    import torch

    from atom_mini.attention import Attention, AttentionMetaData, set_forward_context

    size, found = len(ids), []
    both, heads, dim = spec.kv_shape
    for module in model.modules():
        if isinstance(module, Attention):
            module.kv_cache = torch.full((both, 1, heads, size, dim), torch.nan)
    for places in torch.arange(size).split(list(pieces) or [size]):
        end = int(places[-1]) + 1
        table, lens = torch.zeros(1, 1).int(), torch.tensor([end]).int()
        meta = (kind or AttentionMetaData)(lens, table, places, [len(places)], [end], **more)
        with set_forward_context(meta):
            found.append(model.compute_logits(model(ids[places], places)))
    return torch.cat(found)


def seconds(action, repeat=7, warm_up=True) -> float:
    """The median of some runs. Print ratios of it: the seconds are this machine's."""
    times = []
    for _ in range(repeat + warm_up):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return sorted(times[warm_up:])[repeat // 2]


MUST_HOLD = False  # where pages are made, on a quiet machine, it is set


def timed(claim: bool) -> None:
    """Asserts what a clock said where the page was made. Elsewhere says so if it is otherwise: it is another machine,
    or a busy one, and nothing is broken."""
    assert claim or not MUST_HOLD, "not on this machine, or not now"
    if not claim:
        print("(on this machine, now, it is otherwise)")


REAL = PROJECT / "build" / "smollm2"  # what `make real` makes


def real_model() -> str | None:
    """The folder of a real pretrained model, SmolLM2-135M-Instruct; None, and a line that says how to get it, where it
    is not there."""
    if (REAL / "config.json").is_file():
        return str(REAL)
    print("The real model is not here: run `make real` (a download of 93 MB), then this cell again.")
    return None


class Note(NamedTuple):
    """Who ("host", "device") did what, from when to when, in seconds."""

    who: str
    what: str
    start: float
    end: float


def note_calls(notes: list[Note], owner, method: str, who: str) -> None:
    """From now on every call of `owner.method` adds a note."""
    call = getattr(owner, method)

    def noting(*args, **options):
        start = time.perf_counter()
        result = call(*args, **options)
        notes.append(Note(who, method, start, time.perf_counter()))
        return result

    setattr(owner, method, noting)


def busy(notes: list[Note], skip=2) -> tuple[float, float]:
    """(seconds per step, share of it that the device computes) from step `skip` on."""
    steps = sorted((n.start, n.end) for n in notes if n.who == "device")[skip:]
    total = steps[-1][1] - steps[0][0]
    return total / len(steps), sum(end - start for start, end in steps) / total


def ink(colour) -> str:
    """Black or white, whichever can be read on `colour` on a white page."""
    from matplotlib.colors import to_rgba

    r, g, b, alpha = to_rgba(colour)
    dark = alpha * (1 - 0.3 * r - 0.59 * g - 0.11 * b)
    return "white" if dark > 0.5 else "black"


# The engine's modules on one picture: name -> (x, y, the chapters that build it or choose it, text)
MAP = {
    "llm": (1, 3, "06c 06d 09c", "LLM"),
    "options": (0, 2, "01a 01b", "checkpoint,\noptions"),
    "text": (2, 2, "06c 09b", "tokenizer"),
    "core": (6, 3, "06c 09a 14", "each step:\n1, 2, 3, again"),
    "scheduler": (4.5, 2, "00d 04 04b 12b", "Scheduler\n1 schedule\n3 postprocess"),
    "runner": (8.5, 2, "06c 08 11b 11c 12a 12b", "ModelRunner\n2 forward"),
    "sequence": (3.5, 1, "00c 02", "Sequence"),
    "blocks": (5.5, 1, "00c 03", "BlockManager"),
    "index": (5.5, 0, "00c 03b", "prefix cache"),
    "model": (7.5, 1, "06a 06b 08b 11 22", "model"),
    "attention": (7.5, 0, "05 10 10a 10b 12b", "attention"),
    "sampler": (9.5, 1, "06c 07 11a 12b", "sampler"),
}
WAYS = [  # who calls whom
    ("llm", "options"), ("llm", "text"), ("llm", "core"), ("core", "scheduler"), ("core", "runner"),
    ("scheduler", "sequence"), ("scheduler", "blocks"), ("blocks", "index"), ("runner", "model"),
    ("model", "attention"), ("runner", "sampler"),
]  # fmt: skip


def where(*chapters: str) -> None:
    """The engine's modules on one picture; those that the chapters `"03b"` build are highlighted."""
    import matplotlib.pyplot as plt

    here = {name for name, (*_, built_in, _) in MAP.items() if {*chapters} & {*built_in.split()}}
    assert bool(here) == bool(chapters), f"no module of {chapters} is on the map"
    boxes = {name: (x, y, "prefill" if name in here else "free", text) for name, (x, y, _, text) in MAP.items()}
    _, ax = plt.subplots(figsize=(8, 3.2))
    diagram(ax, boxes, [(*ends, "", 0) for ends in WAYS], width=1.7, height=0.66)


def finished(*names: str) -> Any:
    """The source of the package's `"block_manager.BlockManager"`, under a line that opens it."""
    import inspect
    from importlib import import_module

    from IPython.display import Markdown

    things = [getattr(import_module(f"atom_mini.{name.rpartition('.')[0]}"), name.rpartition(".")[2]) for name in names]
    source = "\n\n".join(map(inspect.getsource, things))
    title = " and ".join(f"<code>{thing.__name__}</code>" for thing in things)
    opened = f"<details><summary>{title}, finished: the source in the package</summary>"
    return Markdown(f"{opened}\n\n```python\n{source}```\n\n</details>")


def owner_colour(id: int) -> tuple[float, float, float]:
    """The colour of a request's blocks, as in the player."""
    return colorsys.hls_to_rgb((id * 137.508 + 205) % 360 / 360, 0.52, 0.5)


def legend(ax, names) -> None:
    """Name colours above the picture, in the order of `COLOURS`."""
    handles = [ax.bar(0, 0, color=COLOURS[n], label=n) for n in COLOURS if n in names]
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    ax.legend(handles=handles, ncol=len(handles), frameon=False, fontsize=8, **place)


def plot_lanes(ax, steps: list[Played], names="abcde") -> None:
    """Requests by step: what each did, with the number of tokens of a prefill."""
    ids, shown = sorted({i for step in steps for i in step.phases}), set()
    last = {i: x for x, step in enumerate(steps) for i in step.tokens}
    for x, step in enumerate(steps):
        for i, phase in step.phases.items():
            is_end = x == last.get(i) and i in step.seqs and step.seqs[i].status.name == "FINISHED"
            shown.add(phase := "finished" if is_end else phase)
            at, n, colour = ids.index(i), step.tokens.get(i, 0), COLOURS[phase]
            ax.barh(at, 1, left=x, height=0.8, color=colour, ec="white", lw=0.4)
            if phase == "prefill" and len(steps) < 60:
                ax.text(x + 0.5, at, n, color=ink(colour), size=7, **CENTRE)
    ax.set_yticks(range(len(ids)), [names[i] if i < len(names) else i for i in ids])
    ax.set(ylabel="request", xlabel="step", xlim=(0, len(steps)))
    ax.invert_yaxis()
    ax.label_outer()
    legend(ax, shown)


def as_markdown(table: list[Any]) -> str:
    """What goes together (docs/together.md), as a table in Markdown."""
    lines = ["| with | only | because |", "|---|---|---|"]
    for row in table:
        needs = [f"`{n}={v[0]!r}`" if len(v) == 1 else f"`{n}` in {[*v]}" for n, v in row.needs.items()]
        lines.append(f"| {row.asked} | {', '.join(needs)} | {row.why} |")
    return "\n".join(lines)


MOVES = {  # event -> the queue that one comes from, and goes to
    "added": (None, "waiting"), "admitted": ("waiting", "running"), "preempted": ("running", "waiting"),
}  # fmt: skip


def follow(places: dict[int, str], events: list[dict[str, Any]]) -> dict[int, str]:
    """Request -> its queue after the events of a `Trace`; AssertionError for what cannot happen."""
    for event in events:
        name, id = event["event"], event["id"]
        if name == "rolled back":
            places = dict.fromkeys(event["waiting"], "waiting")
        elif name == "finished":
            assert id in places, f"{id} ends and was not there"
            places = {i: place for i, place in places.items() if i != id}
        elif name in MOVES:
            before, now = MOVES[name]
            assert places.get(id) == before, f"{id} is {name} and was {places.get(id)}"
            places = places | {id: now}
    return places


def check_trace(trace) -> None:
    """Assert that the events of a `Trace` (chapter 30) explain its queues, and its blocks their counts, in every step."""
    places: dict[int, str] = {}
    blocks: dict[int, Any] = {}
    for n, step in enumerate(trace.steps):
        places, blocks = follow(places, step.events), blocks | step.blocks
        copied = dict.fromkeys(step.waiting, "waiting") | dict.fromkeys(step.computed, "running")
        assert places == copied, f"step {n}: the events say {places}, the queues {copied}"
        owned = Counter(id for block in blocks.values() for id in block.owners)
        used = sum(bool(block.owners) for block in blocks.values())
        found = sum(not block.owners and block.hash != NO_HASH for block in blocks.values())
        pool = {"used": used, "cached": found, "free": trace.num_blocks - used - found}
        assert step.pool == pool, f"step {n}: counted {step.pool}, the blocks say {pool}"
        assert 0 < sum(step.tokens.values()) <= trace.max_num_batched_tokens, f"step {n}: {step.tokens}"
        for id, tokens in step.tokens.items():
            # an abort may leave one token unknown: chapter 23a
            known = len(trace.requests[id]["token_ids"]) + 1 + step.drafts.get(id, 0)
            room = min(owned[id] * trace.block_size, known)
            assert step.computed[id] + tokens <= room, f"step {n}: {id} computes too much"
        places = follow(places, step.after)


def plot_trace(trace, width=8.0):
    """Requests, pool and time by step of a `Trace` (chapter 30); the figure."""
    import matplotlib.pyplot as plt

    seen = [(step.phases(), step.pool) for step in trace.steps]
    ids, lanes = [*trace.requests], [phases for phases, _ in seen]
    high = min(6.0, 0.6 + 0.17 * len(ids))
    shape = {"figsize": (width, high + 2), "sharex": True}
    fig, axes = plt.subplots(3, **shape, height_ratios=[high, 1, 1], layout="tight")
    rows = [[to_rgba(now.get(id)) for now in lanes] for id in ids]
    axes[0].imshow(rows, aspect="auto")
    every = 1 + len(ids) // 40
    axes[0].set_yticks(range(0, len(ids), every), ids[::every], fontsize=7)
    for name in dict.fromkeys(name for now in lanes for name in now.values()):
        axes[0].plot([], "s", color=COLOURS[name], label=name)
    pool = {n: [counts[n] for _, counts in seen] for n in ("used", "cached", "free")}
    times = {n: [getattr(s, n) for s in trace.steps] for n in ("host", "device")}
    for ax, what in zip(axes[1:], (pool, times), strict=True):
        style = {"labels": what, "colors": [COLOURS[n] for n in what]}
        ax.stackplot(range(len(seen)), what.values(), step="mid", **style)
    for ax, label in zip(axes, ("request", "blocks", "ms"), strict=True):
        ax.set_ylabel(label)
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        ax.legend(frameon=False, fontsize=7, **place)
    axes[2].set_xlabel("step")
    return fig


def to_rgba(name: str | None) -> tuple[float, ...]:
    """The colour of that name as four numbers; nothing is drawn for None."""
    from matplotlib.colors import to_rgba

    return to_rgba(COLOURS[name] if name else "none")


def plot_units(ax, launches: list[list[tuple[int, int]]], names: list[str], units=132) -> int:
    """What each unit of a GPU reads: `launches` of (sequence, keys), given to the units in turns; a launch begins when the
    one before is done. Returns the keys until the end."""
    palette = [COLOURS[c] for c in ("decode", "device", "bonus", "prefill", "waiting")]
    height = [0] * units
    for launch in launches:
        height = [max(height)] * units
        for i, (seq, keys) in enumerate(launch):
            unit = i % units
            ax.bar(unit, keys, 1, height[unit], color=palette[seq], ec="white", lw=0.3)
            height[unit] += int(keys)
    for name, colour in zip(names, palette, strict=True):
        ax.bar(0, 0, color=colour, label=name)
    ax.legend(frameon=False, fontsize=7, loc="upper right")
    ax.set(xlabel="unit", ylabel="keys read", xlim=(-1, units), ylim=(0, 3100))
    return max(height)


def plot_used(ax, steps: list[Played], num_blocks: int) -> None:
    """How many blocks were in use, by step."""
    used = [*(step.used for step in steps), 0]
    ax.fill_between(range(len(used)), used, step="post", color=COLOURS["used"])
    ax.axhline(num_blocks, color="black", ls="--", lw=0.8)
    ax.set(ylabel="blocks", xlabel="step", xlim=(0, len(steps)), ylim=(0, None))


def plot_pool(ax, manager, seqs: dict[str, Sequence], names="abcde") -> None:
    """A column of tokens per block in its owners' colours, grey if only cached."""
    size, cached, free = manager.block_size, COLOURS["cached"], COLOURS["free"]
    for block in manager.pool.blocks:
        n, x = block.block_id, 1.25 * block.block_id
        owners = [name for name in seqs if n in seqs[name].block_table]
        tokens = block.token_ids if block.hash != -1 else []
        for seq in [seqs[name] for name in owners[:1]]:
            start = seq.block_table.index(n) * size
            tokens = seq.token_ids[start : start + size]
        fills = [owner_colour(names.index(name)) for name in owners] or [cached]
        for y in range(size):
            text = tokens[y] if y < len(tokens) else ""
            for k, fill in enumerate(fills):
                at, fill = x + k / len(fills), free if text == "" else fill
                ax.bar(at, -0.94, 1 / len(fills), size - y, color=fill, align="edge")
            middle = x + 0.5, size - y - 0.47
            ax.text(*middle, text, color=ink(fills[0]), size=8, **CENTRE)
        whose = "+".join(owners) or ("cached" if len(tokens) else "free")
        ax.text(x + 0.5, -0.1, whose, ha="center", va="top", size=8)
        ax.text(x + 0.5, size + 0.2, n, ha="center", size=8, color=COLOURS["host"])
    ax.set(xlim=(-0.2, 1.25 * len(manager.pool.blocks)), ylim=(-0.6, size + 0.9))
    ax.axis("off")


def diagram(ax, boxes: dict, arrows: list, width=1.7, height=0.8) -> None:
    """Boxes, name -> (x, y, colour's name, text), and arrows (from, to, text, bend)."""
    from matplotlib.patches import FancyBboxPatch

    drawn = {}
    for name, (x, y, colour, text) in boxes.items():
        corner = x - width / 2, y - height / 2
        style = {"boxstyle": "round,pad=0,rounding_size=0.12", "fc": COLOURS[colour]}
        drawn[name] = FancyBboxPatch(corner, width, height, ec="none", **style)
        ax.add_patch(drawn[name])
        ax.text(x, y, text, size=8, color=ink(COLOURS[colour]), **CENTRE)
    for start, end, text, bend in arrows:
        ends = {"patchA": drawn[start], "patchB": drawn[end]}
        how = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}"}
        (x, y), (u, v) = boxes[start][:2], boxes[end][:2]
        ax.annotate("", (u, v), (x, y), arrowprops={**ends, **how, "color": COLOURS["host"]})
        at = (x + u) / 2 + bend * (v - y) / 2, (y + v) / 2 - bend * (u - x) / 2
        page = {"fc": "white", "ec": "none", "pad": 0.8}
        ax.text(*at, text, size=8, **CENTRE, **({"bbox": page} if text else {}))
    ax.set(xlim=_span(boxes, 0, width), ylim=_span(boxes, 1, height))
    ax.axis("off")


def _span(boxes: dict, axis: int, size: float) -> tuple[float, float]:
    """From the first to the last of the boxes along an axis, with a margin."""
    places = [box[axis] for box in boxes.values()]
    return min(places) - 0.55 * size, max(places) + 0.55 * size


def plot_verified(ax, steps: list[tuple[int, int, int]]) -> None:
    """A bar per verify step of (accepted, rejected, bonus) tokens, as they were kept."""
    names = ("accepted", "bonus", "rejected")
    for x, (accepted, rejected, bonus) in enumerate(steps):
        bottom = 0
        for name, n in zip(names, (accepted, bonus, rejected), strict=True):
            for y in range(bottom, bottom + n):
                ax.bar(x, 0.92, 0.86, y + 0.04, color=COLOURS[name])
            bottom += n
    ax.set(xlabel="step", ylabel="rows", xlim=(-0.6, len(steps) - 0.4))
    ax.margins(y=0.25)
    legend(ax, names)


def plot_host_and_device(axes, runs: dict[str, list[Note]], num_steps=5, skip=20):
    """Host and device by time; the slowest run shows `num_steps` whole steps."""
    device = [[n.start for n in notes if n.who == "device"] for notes in runs.values()]
    starts = [*map(sorted, device)]
    span = max(at[skip + num_steps] - at[skip] for at in starts)
    for ax, at, (name, notes) in zip(axes, starts, runs.items(), strict=True):
        for who, _, start, end in notes:
            bar = [(1e3 * (start - at[skip]), 1e3 * (end - start))]
            lane = (0.1 + (who == "host"), 0.8)
            ax.broken_barh(bar, lane, color=COLOURS[who], ec="white")
        ax.set(yticks=[0.5, 1.5], yticklabels=["device", "host"], ylim=(0, 2))
        ax.set(xlim=(0, 1e3 * span), xlabel="milliseconds")
        ax.label_outer()
        ax.set_title(name, size=9, loc="left")


def recorded(name: str) -> Any:
    """What a benchmark has written: tests/bench/results/NAME.json."""
    import json

    return json.loads((PROJECT / "tests" / "bench" / "results" / f"{name}.json").read_text())


def benchmark(name: str) -> Any:
    """The module tests/bench/NAME.py."""
    from importlib import import_module

    sys.path.append(str(PROJECT / "tests" / "bench"))
    return import_module(name)


def rungs(*names: str) -> None:
    """Print what the scorecard's file says of these rungs; `make score` writes it anew."""
    print(benchmark("scorecard").as_lines(*names))


def run_ranks(size, work) -> list:
    """`work(rank)` in a thread each; what they return. Raises what one of them raises."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def children(pid: int) -> list[int]:
    """The processes that a process has started (Linux)."""
    stats = [(p.parent.name, p.read_text()) for p in Path("/proc").glob("[0-9]*/stat")]
    parents = {int(name): int(s.rpartition(")")[2].split()[1]) for name, s in stats}
    return [child for child, parent in parents.items() if parent == pid]


def is_there(pid: int) -> bool:
    """Not gone, and not a zombie that somebody has yet to bury."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


def struck(llm, blow, prompt="Once upon a time", max_tokens=600) -> tuple[float, str]:
    """(seconds from `blow()` until the waiting ends, what is said); a request runs."""
    from atom_mini.parallel.manager import EngineDead

    llm.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for _ in range(3):
        llm.step()
    start = time.perf_counter()
    blow()
    try:
        while llm.step():
            pass
    except EngineDead as error:
        return time.perf_counter() - start, str(error)
    raise AssertionError("nobody has noticed it")


def after_front(code: str, whose=lambda pid: pid) -> float:
    """A Python runs `code`, which prints an engine's process id, and is killed then: the
    seconds until `whose(id)` has gone, too."""
    command = [sys.executable, "-c", code + "\nimport time\ntime.sleep(60)"]
    front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pid = whose(int(front.stdout.readline()))
    start = time.perf_counter()
    front.kill()
    while is_there(pid):
        time.sleep(0.001)
    front.communicate()
    return time.perf_counter() - start


def plot_deaths(seconds: dict[str, float], promise: float = 2.0) -> None:
    """A bar for each death: seconds from the blow to the error; the promise is dashed."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6, 0.5 + 0.4 * len(seconds)), layout="tight")
    bars = ax.barh([*seconds], [*seconds.values()], color=COLOURS["prefill"])
    ax.bar_label(bars, fmt=" %.2f", size=8)
    ax.axvline(promise, color="black", ls="--", lw=0.8)
    ax.set(xlabel="from the blow to the error (s)", xlim=(0, 1.15 * promise))
    ax.invert_yaxis()
