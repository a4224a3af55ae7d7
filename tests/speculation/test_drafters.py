"""A lookup and a draft model: what they draft, what they have read, and that bad drafts do no harm."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint, save_one_layer
from safetensors.torch import load_file, save_file
from scipy.stats import chi2_contingency
from test_speculation import BASE, PROMPTS, SAMPLING, SETUPS, outcome
from transformers import LlamaConfig, LlamaForCausalLM

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.block_manager import BlockManager
from atom_mini.extras import Extras
from atom_mini.model_runner import ModelRunner
from atom_mini.options.build import make_runner
from atom_mini.sampler import on_cpu
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.drafters import DraftModel, NgramDrafter
from atom_mini.speculation.eagle import EagleDrafter
from atom_mini.speculation.verify import SpecCore, accept, as_rows
from atom_mini.text import load_tokenizer

TINY = Path(DraftModel.__init__.__code__.co_filename).parent.parent / "tiny"
LONG = [*PROMPTS, "Once upon a time there was a boy", "25 + 31 ="]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def shortened(folder: Path, num_layers: int) -> str:
    """The built-in model's first layers."""
    shutil.copytree(TINY, folder)
    cfg = json.loads((folder / "config.json").read_text())
    cfg |= {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    (folder / "config.json").write_text(json.dumps(cfg))
    gone = tuple(f"model.layers.{i}." for i in range(num_layers, 4))
    weights = load_file(folder / "model.safetensors")
    save_file({name: w for name, w in weights.items() if not name.startswith(gone)}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shortened(tmp_path_factory.mktemp("short") / "model", 3)


def drafting(model: str, k: int = 4, **options: Any) -> LLM:
    wanted = {"method": "draft_model", "model": model, "num_speculative_tokens": k}
    return LLM("tiny", **BASE | options, speculative_config=wanted)


def judged(llm: LLM, prompts: list[Any] = LONG, params: Any = GREEDY) -> tuple[float, list[Any]]:
    """(accepted of proposed, results) of one call."""
    scheduler: Any = llm.engine_core.scheduler
    scheduler.spec_stats = type(scheduler.spec_stats)()
    outs = llm.generate(prompts, params, use_tqdm=False)
    return scheduler.spec_stats.accepted.total() / scheduler.spec_stats.proposed.total(), [*outs]


def acceptance(llm: LLM, prompts: list[Any] = LONG, params: Any = GREEDY) -> float:
    return judged(llm, prompts, params)[0]


# ---- the lookup ----


def slow_lookup(tokens: list[int], most: int, least: int, longest: int) -> list[int]:
    for n in range(longest, least - 1, -1):
        for end in range(n, len(tokens)):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + most]
    return []


def test_the_lookup_is_the_definition() -> None:
    """On random texts of few letters, with every pair of limits, asked rarely or twice; nothing known changes by a
    preemption."""
    luck = random.Random(0)
    for trial in range(200):
        least = luck.randint(1, 3)
        longest = luck.randint(least, 5)
        drafter = NgramDrafter(EngineArgs(speculative_config={"prompt_lookup_min": least, "prompt_lookup_max": longest}))
        letters = luck.randint(1, 4)
        seq = Sequence([luck.randrange(letters) for _ in range(luck.randint(1, 9))], 4, id=trial)
        for _ in range(40):
            most = luck.randint(1, 6)
            for _ in range(luck.choice([0, 1, 1, 2])):
                assert drafter.propose([seq], [most]) == [slow_lookup(seq.token_ids, most, least, longest)]
            seq.append_token(luck.randrange(letters))
            if luck.random() < 0.1:
                seq.restart()
        drafter.keep({trial + 1})
        assert not drafter.by_request


# ---- the draft model ----


@cache
def plain_outcome(sampling: str) -> list[Any]:
    with LLM("tiny", **BASE) as llm:
        return outcome(llm.generate(LONG, SAMPLING[sampling], use_tqdm=False))


@pytest.mark.parametrize(("method", "setup", "sampling"), [
    ("ngram", "tight", "everything"), ("ngram", "turns", "stops"), ("draft_model", "chunks", "sampled"),
    ("draft_model", "tight", "stops"), ("draft_model", "radix", "everything"), ("draft_model", "plain", "greedy"),
])  # fmt: skip
def test_drafts_change_no_text(method: str, setup: str, sampling: str, short: str) -> None:
    wanted = {"method": method} | ({"prompt_lookup_min": 1} if method == "ngram" else {"model": short, "num_speculative_tokens": 4})
    with LLM("tiny", **BASE | SETUPS[setup], speculative_config=wanted) as llm:
        assert outcome(llm.generate(LONG, SAMPLING[sampling], use_tqdm=False)) == plain_outcome(sampling)
        core: Any = llm.engine_core
        stats = core.scheduler.spec_stats
        assert (stats.proposed if method == "ngram" else stats.accepted).total() > 0
        assert not core.drafter.by_request, "it remembers those who have left"


@pytest.mark.parametrize("setup", ["tight", "radix"])
def test_a_model_accepts_all_of_its_own_drafts(setup: str) -> None:
    """Greedily, whatever happens on the way: text cannot show that a drafter reads wrong K/V, this does."""
    prompts = [[5 + i, *range(20, 33 + i)] for i in range(5)]
    with LLM("tiny", **BASE) as llm:
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    twice = [*prompts, *(out.prompt_token_ids + out.token_ids[:9] for out in outs)]
    with drafting("tiny", **SETUPS[setup]) as llm:
        assert acceptance(llm, twice) == 1.0
        assert acceptance(llm, twice[::-1]) == 1.0  # many of them found in the cache
        assert (llm.engine_core.scheduler.num_preemptions > 0) == (setup == "tight")


@pytest.fixture(scope="module")
def restless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose text does not repeat itself, so that a hole in the drafter's K/V changes its guesses."""
    folder = tmp_path_factory.mktemp("restless")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512}
    net = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=1))
    for weight in net.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.2)
    net.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("setup", [
    {"prefix_cache": "radix"},
    {"num_kvcache_blocks": 60, "max_num_batched_tokens": 9},  # others use it up: for some steps nobody asks for drafts
], ids=str)  # fmt: skip
@pytest.mark.slow
def test_a_conversation_goes_on_with_all_accepted(restless: str, setup: dict[str, Any]) -> None:
    """Each turn finds the last one's answer in the cache: with K/V of the drafter, too, whatever was asked of it."""
    options: dict[str, Any] = {"kv_cache_block_size": 4, "num_kvcache_blocks": 300, "device": "cpu"} | setup
    drafts = {"method": "draft_model", "model": restless, "num_speculative_tokens": 4}
    prompts: list[list[int]] = [[5, 6, 7], [9] * 12, [5, 6, 7, 8, 5, 6, 7], list(range(3, 40)), [2]]
    with LLM(restless, **options, speculative_config=drafts) as llm:
        drafter: Any = llm.engine_core.drafter  # type: ignore[attr-defined]
        runner, most_rows = drafter.runner, []
        launch = runner.launch
        runner.launch = lambda rows, fill: most_rows.append(rows.total_seqs_num) or launch(rows, fill)
        for n in (12, 13, 17, 16, 22):
            params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
            accepted, outs = judged(llm, prompts, params)
            assert accepted == 1.0, n
            prompts = [out.prompt_token_ids + out.token_ids for out in outs]
        assert max(most_rows) <= 5 * (4 + 2), "it reads what is unread of a block, and no more"
        assert outs[3].num_cached_tokens > 40 or "num_kvcache_blocks" in setup


def test_a_step_that_fails_costs_the_drafter_nothing(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the drafter, or one of the target, raises: both begin again with the prompt."""
    with LLM("tiny", **BASE) as llm:
        plain = outcome(llm.generate(LONG, GREEDY, use_tqdm=False))
    for at in (3, 20):
        with drafting("tiny") as llm:
            core: Any = llm.engine_core
            drafter, calls = core.drafter, iter(range(10**6))
            for runner in (drafter.runner, core.runner):
                compute = runner.compute_hidden

                def failing(*args: Any, compute: Any = compute, calls: Any = calls) -> Any:
                    if next(calls) == at:  # noqa: B023
                        raise RuntimeError("the device has gone")
                    return compute(*args)

                monkeypatch.setattr(runner, "compute_hidden", failing)
            for prompt in LONG:
                llm.add_request(prompt, GREEDY)
            seqs = list(core.scheduler.seqs.values())
            with pytest.raises(RuntimeError):
                while llm.step():
                    pass
            core.scheduler.spec_stats = type(core.scheduler.spec_stats)()
            while llm.step():
                pass
            assert [s.completion_token_ids for s in seqs] == [tokens for _, tokens, *_ in plain]
            stats = core.scheduler.spec_stats
            assert stats.accepted.total() / stats.proposed.total() == 1.0


def test_another_vocabulary_does_no_harm(tmp_path: Path) -> None:
    """Families pad theirs differently: a smaller one cannot read some tokens, a larger one guesses some that are none."""
    for size in (900, 1200):
        save_checkpoint("llama", tmp_path / str(size), vocab_size=size, max_position_embeddings=2048)
        with LLM("tiny", **BASE) as llm, drafting(str(tmp_path / str(size))) as drafted:
            prompt = [950, 3, 957, 4]
            wanted = llm.generate(prompt, GREEDY, use_tqdm=False)[0].token_ids
            assert drafted.generate(prompt, GREEDY, use_tqdm=False)[0].token_ids == wanted


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set model"):
        LLM("tiny", **BASE, speculative_config={"method": "draft_model"})
    save_checkpoint("llama", tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(ValueError, match=r"max_model_len=\d+ is over the checkpoint's 64"):
        drafting(str(tmp_path / "short"))
    with pytest.raises(ValueError, match="is not a folder"):
        drafting(str(tmp_path / "nowhere"))


# ---- drafts that are drawn ----


def drawing(model: str, k: int = 3, **options: Any) -> LLM:
    wanted = {"method": "draft_model", "model": model, "num_speculative_tokens": k, "draft_sampling": True}
    return LLM("tiny", **BASE | {"num_kvcache_blocks": 400, "max_num_seqs": 64} | options, speculative_config=wanted)


@pytest.mark.slow
def test_drawn_drafts_leave_the_distribution(short: str) -> None:
    """Four tokens of 1,000 texts with and without: what they are, place by place, is the same within chance."""
    samplings = [SamplingParams(temperature=0.8, top_k=8, seed=i, max_tokens=4, ignore_eos=True) for i in range(1000)]
    prompts = ["Once upon a time there was a"] * len(samplings)
    with LLM("tiny", **BASE | {"num_kvcache_blocks": 400, "max_num_seqs": 64}) as llm:
        plain = [o.token_ids for o in llm.generate(prompts, samplings, use_tqdm=False)]
    with drawing(short) as llm:
        drawn = [o.token_ids for o in llm.generate(prompts, samplings, use_tqdm=False)]
        stats = llm.engine_core.scheduler.spec_stats  # type: ignore[attr-defined]
        assert stats.accepted.total() > 400 and stats.accepted.total() < stats.proposed.total() - 400
    for place in range(4):
        counts = [np.bincount([t[place] for t in texts], minlength=958) for texts in (plain, drawn)]
        table = np.array(counts)[:, sum(counts) >= 20]
        assert chi2_contingency(table).pvalue > 1e-4, (place, table)


def test_greedy_requests_stay_exact_among_drawn_ones(short: str) -> None:
    """A row of temperature 0 has one token; log probabilities are the target's; reproducible by the seed."""
    penalized = SamplingParams(temperature=0, logprobs=2, repetition_penalty=6.0, max_tokens=20)
    samplings = [penalized, SAMPLING["everything"], SAMPLING["greedy"]]
    with LLM("tiny", **BASE) as llm:
        plain = llm.generate(PROMPTS[:3], samplings, use_tqdm=False)
    with drawing(short) as llm:
        outs, again = (llm.generate(PROMPTS[:3], samplings, use_tqdm=False) for _ in range(2))
        assert [o.token_ids for o in outs] == [o.token_ids for o in again]
    for i in (0, 2):
        assert outs[i].token_ids == plain[i].token_ids
    for found, wanted in zip(outs[0].logprobs or [], plain[0].logprobs or [], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert all(t in found for t, found in zip(outs[1].token_ids, outs[1].logprobs or [], strict=True))


def test_a_model_keeps_all_that_it_draws_itself() -> None:
    """p and q are one distribution; the two runs round differently."""
    samplings = [SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
    with drawing("tiny") as llm:
        assert acceptance(llm, PROMPTS[:3], samplings) > 0.99
        probs: Any = llm.engine_core.drafter.probs  # type: ignore[attr-defined]
    assert all(len(q) <= 3 for q in probs.values()), "it keeps those of earlier steps"


class Given:
    """A runner whose step has the logits that it is given."""

    upload, pack_output = staticmethod(on_cpu), ModelRunner.pack_output

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.extras = logits, Extras()

    def launch(self, rows: Any) -> tuple[torch.Tensor, None]:
        return self.logits, None


def test_a_step_is_judged_sequence_by_sequence() -> None:
    """Ragged drafts, different parameters, one with a history: each keeps what it keeps alone."""
    generator, lists = torch.Generator().manual_seed(10), [[3, 1], [], [2], [0, 0, 0]]
    samplings = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0.9, 1.2, 0.0))]
    samplings.append(SamplingParams(temperature=1.0, seed=9, repetition_penalty=6.0))
    seqs = [Sequence([1, 2] * (i + 2), 4, sampling, id=i) for i, sampling in enumerate(samplings)]
    manager, drafter = BlockManager(40, 4), DraftModel.__new__(DraftModel)
    drafter.draws, drafter.vocab_size = True, 5
    drafter.probs = {i: [*torch.randn(4, 5, generator=generator).softmax(-1)] for i in range(4)}  # one too many
    for seq, drafts in zip(seqs, lists, strict=True):
        manager.allocate(seq, [])
        manager.may_append(seq, 4)
        seq.num_computed_tokens, seq.num_scheduled_tokens = len(seq) - 1, 1 + len(drafts)
    logits = torch.randn(sum(map(len, lists)) + 4, 5, generator=generator)

    def kept(some: list[int], rows: torch.Tensor) -> dict[int, tuple[int, ...]]:
        batch = ScheduledBatch.pack(SequenceType.DECODE, [seqs[i] for i in some], manager)
        tokens = [t for i in some for t in (seqs[i].last_token, *lists[i])]
        batch = replace(batch, scheduled_tokens=np.array(tokens), is_sampled=np.ones(len(some), bool))
        return accept(batch, drafter.judge(Given(rows), as_rows(batch))).token_ids

    ends = np.cumsum([len(drafts) + 1 for drafts in lists])
    alone = [kept([i], logits[ends[i] - len(lists[i]) - 1 : ends[i]])[i] for i in range(4)]
    assert kept([0, 1, 2, 3], logits) == dict(enumerate(alone))
    assert alone[2][0] == logits[ends[2] - 2].argmax()  # greedy


# ---- what a drafter costs, and what is reported ----


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_memory_of_a_drafter_is_set_aside(method: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and pools of both fit into what is free, and one block more of each would not."""
    free = 24 * 2**20
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", free)
    wanted = {"method": method} | ({"model": short} if method == "draft_model" else {})
    with LLM("tiny", device="cpu") as plain, LLM("tiny", device="cpu", speculative_config=wanted) as llm:
        core: Any = llm.engine_core
        own = core.drafter
        pools = [core.runner.kv_cache, own.runner.kv_cache]
        weights, block = own.memory(llm.config, torch.float32)
        used = weights + sum(pool.nbytes for pool in pools)
        assert used <= free < used + core.runner.block_bytes + block
        assert (plain.config.num_kvcache_blocks or 0) > (llm.config.num_kvcache_blocks or 0) > 100


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in the interpreter")
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.slow
def test_replays_draft_what_torch_drafts(method: str, tmp_path: Path) -> None:
    """Guesses that stay on the device reach the inputs of a recording; it calls no hooks, so what a head reads is written
    inside of it."""
    from recording import graph_runner, load_recorded_graph

    record, found = load_recorded_graph(), []
    prompt = load_tokenizer(EngineArgs("tiny")).encode(PROMPTS[0])
    prompt = [i % 90 for i in prompt] if method == "draft_model" else prompt
    kind, folder = (EagleDrafter, "tiny") if method == "eagle3" else (DraftModel, str(save_one_layer(tmp_path)))
    drafts = {"method": method, "num_speculative_tokens": 2, "model": None if method == "eagle3" else folder}
    for attention in ("torch", "triton"):
        setup = {"num_kvcache_blocks": 8, "max_num_seqs": 1, "max_model_len": 64, "attention": attention}
        config = EngineArgs(folder, device="cpu", speculative_config=drafts, **setup)
        make: Any = make_runner
        runner = make(config)
        if attention == "triton":
            runner = graph_runner(config, record)
            make = make_runner if method == "eagle3" else lambda own: graph_runner(own, record)
        core = SpecCore(config, runner, kind(config, runner, make))
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        core.add(seq := Sequence(prompt, 16, params))
        while core.step():
            pass
        found.append((seq.completion_token_ids, core.scheduler.spec_stats))
    assert found[0] == found[1] and found[0][1].accepted.total() > 2
