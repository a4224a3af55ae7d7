"""The small engine: its tokens are those of the large one and of transformers, and a fuzz notices faults planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from places import ROOT
from show import make_step, random_checkpoint, real_model
from symbolic import make_trial, small_tokens
from test_fuzz import mutate
from transformers import AutoModelForCausalLM

from atom_mini.attention import set_forward_context
from atom_mini.checkpoint import read_model, resolve_model
from atom_mini.llm import LLM as LargeLLM
from atom_mini.small import LLM, BlockManager, ModelRunner, SamplingParams, Scheduler, Sequence

FACTS = "Ada lives in Rome. Ben likes plums. Mia has a red cat."
TEXTS = ["12 + 7 =", f"{FACTS} What does Mia have?", "Once upon a time", f"{FACTS} Where does Ada live?"] * 4
POOLS = [(6, 16, 64, 8), (40, 4, 7, 16), (7, 8, 3, 3)]  # blocks, size, budget, seqs


def pool(blocks: int, size: int, budget: int, seqs: int) -> dict[str, int]:
    names = "num_kvcache_blocks", "kv_cache_block_size", "max_num_batched_tokens", "max_num_seqs"
    return dict(zip(names, (blocks, size, budget, seqs), strict=True))


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


def serve(seed: int) -> Counter[str]:
    """A random load on a small random engine: the oracle's tokens, and the books balanced."""
    trial = make_trial(seed)
    trial.config = trial.config.changed(enable_chunked_prefill=True)
    for request in trial.requests:
        request.stop_pair = None
    stats: Counter[str] = Counter()
    for i, tokens in small_tokens(trial, stats).items():
        assert tokens == trial.expected(trial.requests[i])[0]
    return stats


def test_fuzz() -> None:
    stats = sum(map(serve, range(600)), Counter())
    assert stats["preemptions"] > 100 and stats["hits"] > 1000, "the loads are too easy"


FAULTS: dict[str, tuple[type, str, str, str]] = {
    "stale: hands a block out without forgetting its content": (
        BlockManager, "take", "self.hash_to_block.pop(self.block_to_hash.pop(block, b\"\"), None)", "pass",
    ),
    "still free: a known block that is shared stays in the queue": (
        BlockManager, "allocate", "self.free.pop(block, None)", "pass",
    ),
    "last owner: the first one that leaves frees a shared block": (
        BlockManager, "deallocate", "self.ref_counts[block] -= 1", "self.ref_counts[block] = 0",
    ),
    "whole prompt: finds the block of the last token, too": (BlockManager, "find", "len(seq) - 1", "len(seq)"),
    "own tokens: the key of a block leaves out those before it": (
        BlockManager, "block_hashes", "digest.update(", "digest = hashlib.sha256(",
    ),
    "one short: counts a known free block as costing nothing": (
        BlockManager, "allocate", "self.ref_counts[block] > 0 for", "1 for",
    ),
    "keeps blocks: a preempted sequence does": (
        Scheduler, "schedule_decode", "self.block_manager.deallocate(self.waiting[0])", "pass",
    ),
    "not computed again: what is found is taken for everything but the last token": (
        BlockManager, "allocate", "len(cached) * self.block_size", "len(cached) and len(seq) - 1",
    ),
    "over budget: every sequence counts as one token": (
        Scheduler, "plan", "return seq.context_len - seq.num_computed_tokens", "return 1",
    ),
    "token for a chunk: one that does not end its prompt": (
        Scheduler, "postprocess", "if seq.context_len == len(seq):", "if True:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fuzz_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *FAULTS[fault])
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        for seed in range(600):
            serve(seed)


@pytest.mark.slow
def test_parts_of_the_reader_are_compared_with_ours(tmp_path: Path) -> None:
    """A scheduler that stands still is told so, and our own is the same as ours."""
    mine = tmp_path / "mine.py"
    still = "from atom_mini import small\n"
    still += "class Scheduler(small.Scheduler):\n    schedule = lambda self: []\n"
    for source, says in (("", "64 of 64 the same"), (still, "the engine stands still at step 1")):
        mine.write_text(source)
        command = [sys.executable, str(ROOT / "nbs" / "_book" / "mine.py"), str(mine)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert says in done.stdout + done.stderr and (done.returncode == 0) == (not source)


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


@pytest.mark.slow
def test_its_half_for_a_gpu_gives_the_same_in_the_interpreter() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", REHEARSAL], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_first_kernel_refuses_another_scale() -> None:
    """It has 1 / sqrt(D) inside, and a model with another scale would be computed wrongly."""
    from atom_mini.gpu.small import KernelOps

    q, cache, meta, *_ = make_step([(1, 20)], D=64, S=16)
    with pytest.raises(ValueError, match=r"scale 0\.3: this kernel has 64\*\*-0\.5"):
        KernelOps().attend(q, cache, meta, 0.3)
