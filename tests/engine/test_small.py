"""The small engine: its tokens are those of the large one and of transformers, and a fuzz notices faults planted in it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from measure import ROOT, weigh
from show import random_checkpoint, real_model
from transformers import AutoModelForCausalLM

from atom_mini import small
from atom_mini.attention import set_forward_context
from atom_mini.checkpoint import read_model, resolve_model
from atom_mini.llm import LLM as LargeLLM
from atom_mini.small import LLM, BlockManager, ModelRunner, SamplingParams, Scheduler, Sequence

FACTS = "Ada lives in Rome. Ben likes plums. Mia has a red cat."
TEXTS = ["12 + 7 =", f"{FACTS} What does Mia have?", "Once upon a time", f"{FACTS} Where does Ada live?"] * 4
POOLS = [(6, 16, 64, 8), (9, 4, 16, 4), (40, 4, 7, 16), (7, 8, 3, 3), (100, 16, 16384, 512)]  # blocks, size, budget, seqs


def pool(blocks: int, size: int, budget: int, seqs: int) -> dict[str, int]:
    names = "num_kvcache_blocks", "kv_cache_block_size", "max_num_batched_tokens", "max_num_seqs"
    return dict(zip(names, (blocks, size, budget, seqs), strict=True))


def test_it_is_small() -> None:
    assert weigh((ROOT / "atom_mini" / "small.py").read_text()).lines <= 250


@pytest.mark.parametrize("sizes", POOLS, ids=str)
def test_the_large_engine_gives_the_same(sizes: tuple[int, ...]) -> None:
    ours, greedy = LLM("tiny", **pool(*sizes)), SamplingParams(temperature=0, max_tokens=30)
    fitting = [text for text in TEXTS if len(ours.tokenizer.encode(text)) < sizes[0] * sizes[1]]
    with LargeLLM("tiny", device="cpu", **pool(*sizes)) as large:
        from atom_mini.config import SamplingParams as LargeParams

        wanted = large.generate(fitting, LargeParams(temperature=0, max_tokens=30), use_tqdm=False)
    found = ours.generate(fitting, greedy)
    assert [(f.text, f.token_ids, f.finish_reason) for f in found] == [
        (w.text, w.token_ids, w.finish_reason) for w in wanted
    ]
    assert len(ours.scheduler.block_manager.free) == sizes[0], "blocks are lost"
    pieces = [*ours.stream(fitting, greedy)]
    for out in found:
        mine = [piece for piece in pieces if piece.index == out.index]
        assert "".join(piece.text for piece in mine) == out.text
        assert [token for piece in mine for token in piece.token_ids] == out.token_ids


def theirs(folder: Path, prompt: list[int], num: int) -> list[int]:
    """Greedy tokens of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num)
    return out[0, len(prompt) :].tolist()


def agrees_with_transformers(folder: Path, texts: list[str], num: int, **options: int) -> None:
    llm = LLM(folder, **options)
    for out, text in zip(llm.generate(texts, SamplingParams(temperature=0, max_tokens=num)), texts, strict=True):
        assert out.token_ids == theirs(folder, llm.tokenizer.encode(text), num), text


def test_transformers_gives_the_same() -> None:
    agrees_with_transformers(resolve_model("tiny"), TEXTS[:4], 24, num_kvcache_blocks=9, kv_cache_block_size=8)


@pytest.mark.real
def test_transformers_gives_the_same_with_real_weights() -> None:
    texts = ["The capital of France is", "def fibonacci(n):", "Water boils at"]
    folder = real_model()
    assert folder, "make real"
    agrees_with_transformers(Path(folder), texts, 24, num_kvcache_blocks=6, kv_cache_block_size=8)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_logits_of_three_families(kind: str, tmp_path: Path) -> None:
    """A prompt in two chunks, through a block table out of order."""
    model = random_checkpoint(kind, tmp_path, head_dim=16) if kind == "qwen3" else random_checkpoint(kind, tmp_path)
    runner, ids = ModelRunner(read_model(tmp_path), tmp_path, 8, 8), [*range(5, 45)]
    seq, found = Sequence(ids, 40, SamplingParams(), 0, 23, [6, 1, 3, 0, 7]), []
    for seq.context_len in (23, 40):
        tokens, positions, meta = runner.prepare([seq])
        with set_forward_context(meta), torch.inference_mode():
            found.append(runner.model.compute_logits(runner.model(tokens, positions)))
        seq.num_computed_tokens = seq.context_len
    wanted = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.cat(found), wanted, atol=1e-4, rtol=1e-4)


def test_a_seed_gives_the_same_text_in_any_company() -> None:
    params = SamplingParams(temperature=1.0, top_k=30, top_p=0.95, min_p=0.01, seed=5, max_tokens=20)
    alone = LLM("tiny").generate("Once upon a time", params)[0].text
    tight = LLM("tiny", num_kvcache_blocks=8, kv_cache_block_size=4, max_num_batched_tokens=5)
    seqs = tight.add_requests(["12 + 7 =", "Once upon a time", "Ben likes"], params)
    while tight.step():
        pass
    assert tight.output(0, seqs[1]).text == alone
    assert len({out.text for out in tight.generate(["Once upon a time"] * 4, SamplingParams(temperature=1.0))}) > 1


def broken(folder: Path, change: Callable[[Path], None]) -> Path:
    for file in resolve_model("tiny").glob("*.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder)
    return folder


def rename_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))


def drop_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("act", "wanted"),
    [
        (lambda tmp: LLM("tiny").generate([[]]), "prompt of 0 tokens: give 1 to 2047"),
        (lambda tmp: LLM("tiny", num_kvcache_blocks=1).generate(["12", [3] * 17]), "prompt of 17 tokens: give 1 to 16"),
        (lambda tmp: LLM("tiny", device="cuda"), "device='cuda': 'cpu', or gpu.small.LLM"),
        (lambda tmp: LLM("tiny", device="cpu0"), "device='cpu0'"),
        (lambda tmp: LLM(broken(tmp, rename_type)), "Mamba"),
        (lambda tmp: LLM(broken(tmp, drop_weight)), "model.norm.weight"),
    ],
)
def test_it_refuses_in_one_line(act: Callable[[Path], None], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=wanted) as found:
        act(tmp_path)
    assert "\n" not in str(found.value)


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    llm = LLM("tiny", num_kvcache_blocks=4)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        llm.generate(["12 + 7 =", []])
    assert not llm.scheduler.waiting


class SymbolicRunner:
    """In place of a model: a slot holds the whole text up to its token, and the next token depends on all slots."""

    def __init__(self, num_blocks: int, size: int, limit: int) -> None:
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * size)
        self.size, self.limit = size, limit

    def slot(self, seq: Sequence, p: int) -> int:
        return seq.block_table[p // self.size] * self.size + p % self.size

    def forward(self, seqs: list[Sequence]) -> list[int]:
        new = [(seq, p) for seq in seqs for p in range(seq.num_computed_tokens, seq.context_len)]
        assert 0 < len(new) <= self.limit, "tokens over the budget, or a step without any"
        written = [self.slot(seq, p) for seq, p in new]
        assert len({*written}) == len(written), "two tokens in one slot"
        for (seq, p), slot in zip(new, written, strict=True):
            self.slots[slot] = tuple(seq.token_ids[: p + 1])
        for seq in seqs:
            assert seq.context_len > seq.num_computed_tokens, "a sequence without a token to compute"
            held = [self.slots[self.slot(seq, p)] for p in range(seq.context_len)]
            assert held == [tuple(seq.token_ids[: p + 1]) for p in range(seq.context_len)], "wrong K/V"
        return [hash(tuple(seq.token_ids)) % 5 for seq in seqs]


def check_books(manager: BlockManager, seqs: list[Sequence]) -> None:
    owners = [0] * len(manager.ref_counts)
    for seq in seqs:
        for block in seq.block_table:
            owners[block] += 1
    assert owners == manager.ref_counts, "wrong counts of owners"
    assert {b for b, n in enumerate(owners) if n == 0} == {*manager.free}, "a block is free and owned, or neither"
    assert manager.hash_to_block == {key: block for block, key in manager.block_to_hash.items()}


def serve(
    seed: int, scheduler_cls: type[Scheduler] = Scheduler, manager_cls: type[BlockManager] = BlockManager
) -> tuple[int, int]:
    """One random load on a small random engine; (preemptions, tokens that were found)."""
    rng = random.Random(seed)
    blocks, size, budget = rng.randint(3, 12), rng.choice([1, 2, 4]), rng.randint(1, 20)
    longest, manager = blocks * size + 1, manager_cls(blocks, size)
    scheduler = scheduler_cls(manager, (4,), rng.randint(1, 6), budget, longest)
    runner, lost, hits, seqs = SymbolicRunner(blocks, size, budget), 0, 0, []
    for _ in range(rng.randint(1, 12)):
        ids = [int(rng.random() < 0.2) for _ in range(rng.randint(1, longest - 1))]
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=rng.random() < 0.3)
        seqs.append(Sequence(ids, len(ids), params))
    late, steps = [seq for seq in seqs if rng.random() < 0.4], 0
    scheduler.waiting += [seq for seq in seqs if seq not in late]
    while (late or not all(seq.finish_reason for seq in seqs)) and steps < 3000:
        if late and rng.random() < 0.3:
            scheduler.waiting.append(late.pop())
        before = {id(seq): seq.num_computed_tokens for seq in scheduler.running}
        ran = scheduler.schedule()
        lost += sum(id(seq) in before for seq in scheduler.waiting)
        hits += sum(seq.num_computed_tokens for seq in ran if len(seq) == seq.num_prompt_tokens and id(seq) not in before)
        scheduler.postprocess(ran, runner.forward(ran) if ran else [])
        check_books(manager, seqs)
        steps += 1
    assert steps < 3000, "the engine does not come to an end"
    for seq in seqs:
        assert seq.finish_reason, "a sequence was forgotten"
        while len(seq) > seq.num_prompt_tokens:  # each token is the one that follows the text before it
            token = seq.token_ids.pop()
            assert token == hash(tuple(seq.token_ids)) % 5
    return lost, hits


def test_fuzz() -> None:
    lost, hits = map(sum, zip(*map(serve, range(600)), strict=True))
    assert lost > 100 and hits > 1000, "the loads are too easy"


class Stale(BlockManager):
    """Hands a block out without forgetting its content."""

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.ref_counts[block] = 1
        return block


class StillFree(BlockManager):
    """A known block that is shared stays in the queue."""

    def allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        before = [block for block in self.find(seq) if block in self.free]
        done = super().allocate(seq, reserve)
        self.free.update(dict.fromkeys(before if done else []))
        return done


class LastOwner(BlockManager):
    """The first owner that leaves frees a shared block."""

    def deallocate(self, seq: Sequence) -> None:
        for block in seq.block_table:
            self.ref_counts[block] = 1
        super().deallocate(seq)


class WholePrompt(BlockManager):
    """Also finds the block of the last token."""

    def find(self, seq: Sequence) -> list[int]:
        blocks = map(self.hash_to_block.get, self.block_hashes(seq, len(seq)))
        return [*takewhile(lambda block: block is not None, blocks)]  # type: ignore[arg-type]


class OwnTokens(BlockManager):
    """The key of a block leaves out the tokens before it."""

    def block_hashes(self, seq, num_tokens):  # type: ignore[no-untyped-def]
        for start in range(0, num_tokens - self.block_size + 1, self.block_size):
            yield repr(seq.token_ids[start : start + self.block_size]).encode()


class OneShort(BlockManager):
    """Counts a known free block as costing nothing."""

    def allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        saved = sum(block in self.free for block in self.find(seq))
        return super().allocate(seq, reserve - saved)


class KeepsBlocks(Scheduler):
    """A preempted sequence keeps its blocks."""

    def schedule_decode(self) -> list[Sequence]:
        return super().schedule_decode() if self.block_manager.free else [*self.running]


class NotComputedAgain(BlockManager):
    """A sequence that has lost its blocks still counts as computed."""

    def deallocate(self, seq: Sequence) -> None:
        computed = seq.num_computed_tokens
        super().deallocate(seq)
        seq.num_computed_tokens = computed

    def allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        computed = seq.num_computed_tokens
        done = super().allocate(seq, reserve)
        seq.num_computed_tokens = max(computed, seq.num_computed_tokens)
        return done


class OverBudget(Scheduler):
    """Every sequence gets the whole budget."""

    def plan(self, seq: Sequence, budget: int) -> int:
        super().plan(seq, self.max_num_batched_tokens)
        return 1


class TokenForAChunk(Scheduler):
    """A chunk that does not end its prompt gets a token."""

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> None:
        for seq, token_id in zip(seqs, token_ids, strict=True):
            if seq.context_len < len(seq):
                seq.token_ids.append(token_id)
        super().postprocess(seqs, token_ids)


FAULTS = [Stale, StillFree, LastOwner, WholePrompt, OwnTokens, OneShort, KeepsBlocks, NotComputedAgain, OverBudget,
          TokenForAChunk]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzz_notices(fault: type) -> None:
    kinds = {"scheduler_cls" if issubclass(fault, Scheduler) else "manager_cls": fault}
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(600):
            serve(seed, **kinds)


WRONG = """
from atom_mini import small

class BlockManager(small.BlockManager):
    def find(self, seq):
        return [*range((len(seq) - 1) // self.block_size)] if self.hash_to_block else []
"""
STILL = """
from atom_mini import small

class Scheduler(small.Scheduler):
    def schedule(self):
        return []
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [(None, "64 of 64 the same"), (WRONG, "is the first that differs"), (STILL, "the engine stands still at step 1")],
)
def test_parts_of_the_reader_are_compared_with_ours(source: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if source:
        file.write_text(source)
    command = [sys.executable, str(ROOT / "nbs" / "_book" / "mine.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert says in done.stdout + done.stderr
    assert (done.returncode == 0) == (source is None)


def test_no_other_module_of_the_engine_is_needed() -> None:
    """Beside attention, the model, its loading, and the reading of a checkpoint."""
    source = Path(small.__file__).read_text()
    taken = [line.split()[1] for line in source.splitlines() if line.startswith("from .")]
    assert {*taken} == {".attention", ".checkpoint", ".loading"}


REHEARSAL = """
import torch
from atom_mini import small
from atom_mini.gpu.small import GraphRunner

class Rehearsed(GraphRunner):
    device = torch.device("cpu")

    @staticmethod
    def record(step, stream):  # it computes again what a device would replay: from the same inputs, into the same output
        out = step().clone()
        return (lambda: out.copy_(step())), out

class RehearsedLLM(small.LLM):
    runner_cls = Rehearsed

texts = ["12 + 7 =", "Mia has a red cat. What does Mia have?", "Once upon a time", "12 + 7 ="]
greedy = small.SamplingParams(temperature=0, max_tokens=10)
there = RehearsedLLM("tiny", num_kvcache_blocks=8, max_num_batched_tokens=9)
assert there.generate(texts, greedy) == small.LLM("tiny").generate(texts, greedy)
assert {1, 2} <= {*there.runner.graphs} <= {1, 2, 4}, there.runner.graphs.keys()
"""


def test_its_half_for_a_gpu_gives_the_same_in_the_interpreter() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", REHEARSAL], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
