"""The EAGLE-3 head computes what was published, changes no text, and keeps being right often enough."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, random_model, save_checkpoint
from safetensors.torch import load_file, save_file
from script import load
from torch import Tensor

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.block_manager import BlockManager
from atom_mini.cpu.decode import CpuOps
from atom_mini.models import TorchOps
from atom_mini.options.build import make_runner
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import Sequence, SequenceType
from atom_mini.speculation.eagle import EagleDrafter
from atom_mini.speculation.head_files import find_taps
from atom_mini.speculation.verify import SpecStats

torch.set_num_threads(1)
tiny = load("90_tiny_model")
HEAD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 32,  # less than the target's 256
    "vocab_size": 300,
}
DRAFT_VOCAB = 70
STYLES = ["eagle", "speculators", "speculators, norm before residual", "eagle, own embedding"]
TINY = {"device": "cpu", "num_kvcache_blocks": 300}


def save_head(folder: Path, style: str = "eagle", seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """A random head for a model of `SMALL`'s shape as its authors would store it; its tensors under EAGLE's names."""
    g, h, heads, kv, middle = torch.Generator().manual_seed(seed), 64, 128, 64, 80
    shapes: dict[str, tuple[int, ...]] = {"fc": (h, 3 * h), "norm": (h,), "lm_head": (DRAFT_VOCAB, h)}
    shapes |= {f"midlayer.{name}": (h,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"midlayer.self_attn.{n}_proj": (rows, 2 * h) for n, rows in (("q", heads), ("k", kv), ("v", kv))}
    shapes |= {"midlayer.self_attn.o_proj": (h, heads), "midlayer.mlp.down_proj": (h, middle)}
    shapes |= {f"midlayer.mlp.{name}_proj": (middle, h) for name in ("gate", "up")}
    if "own embedding" in style:
        shapes["embed_tokens"] = (300, h)
    tensors = {f"{name}.weight": torch.randn(shape, generator=g) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = 1 + 0.2 * torch.randn(h, generator=g)
    ids = torch.randperm(300, generator=g)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(300, dtype=torch.bool).index_fill(0, ids, True)
    raw: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **HEAD, "draft_vocab_size": DRAFT_VOCAB}
    stored, before = dict(tensors), "before" in style
    if style.startswith("speculators"):
        raw = {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": HEAD, "norm_before_residual": before}
        raw |= {"draft_vocab_size": DRAFT_VOCAB, "speculators_model_type": "eagle3"}
        stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    raw["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    edit_json(folder / "config.json", **changes)
    return tensors


def reference(w: dict[str, Tensor], embeds: Tensor, hidden: Tensor, before: bool) -> tuple[Tensor, Tensor]:
    """(states [n, 64], logits [n, draft vocabulary]) of one sequence, from the formulas, without a cache."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:  # [n, heads, 16]: pair i is (i, i + 8), as a complex number
        angles = torch.outer(torch.arange(len(x)).double(), 500.0 ** -(torch.arange(8).double() / 8))
        turned = torch.complex(*x.double().split(8, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1).float()

    normed = norm(hidden, "midlayer.hidden_norm")
    residual = normed if before else hidden
    x = torch.cat([norm(embeds, "midlayer.input_layernorm"), normed], -1)
    q, k, v = ((x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 16)) for n in "qkv")
    q, k, v = turn(q), turn(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / 4
    weights = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf).softmax(-1)
    mixed = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
    residual = residual + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    x = norm(residual, "midlayer.post_attention_layernorm")
    gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    states = residual + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return states, norm(states, "norm") @ w["lm_head.weight"].T


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_checkpoint("llama", folder, tie_word_embeddings=False)
    return folder


def make_drafter(target: Path, head: Path, **options: Any) -> tuple[Any, EagleDrafter]:
    """(the runner of `target`, a drafter for it)."""
    wanted = {"method": "eagle3", "model": str(head)}
    setup = {"kv_cache_block_size": 4, "num_kvcache_blocks": 40}
    config = EngineArgs(str(target), device="cpu", speculative_config=wanted, **setup, **options)
    runner = make_runner(config)
    return runner, EagleDrafter(config, runner, make_runner)


@pytest.mark.parametrize(("style", "packed"), [*zip(STYLES, [False, True, False, True], strict=True)])
def test_head_equals_the_formulas(style: str, packed: bool, target: Path, tmp_path: Path) -> None:
    """Every state and logit, through the paged pool: two chunks, rows one by one, and beyond the head's own positions.
    The head has the operations of its target."""
    weights = save_head(tmp_path, style)
    runner, drafter = make_drafter(target, tmp_path, packed=packed)
    assert type(drafter.runner.ops) is type(runner.ops) is (CpuOps if packed else TorchOps)
    drafter.runner.kv_cache.fill_(torch.nan)  # what was not stored is not read
    head, g = drafter.model, torch.Generator().manual_seed(1)
    ids, hidden = torch.randint(0, 300, (50,), generator=g), torch.randn(50, 64, generator=g)
    seq, manager, states = Sequence(ids.tolist(), 4), BlockManager(40, 4), list[Tensor]()
    manager.allocate(Sequence([1] * 9, 4), [])  # so that the blocks are not 0, 1, 2 ...
    manager.allocate(seq, [])
    head.register_forward_hook(lambda module, args, out: states.append(out))
    for n in (13, 30, 1, 1, 1, 4):
        seq.num_scheduled_tokens = n
        batch = ScheduledBatch.pack(SequenceType.PREFILL, [seq], manager)
        drafter.run(batch, hidden[seq.num_computed_tokens :][:n])
        seq.num_computed_tokens += n
    table = weights.get("embed_tokens.weight", runner.model.model.embed_tokens.weight)
    wanted, logits = reference(weights, table[ids], hidden, "before" in style)
    assert 1 < logits.std() < 20
    torch.testing.assert_close(torch.cat(states), wanted, atol=1e-4, rtol=0)
    ours = head.compute_logits(wanted)
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)
    assert head.choose(wanted).equal((torch.arange(DRAFT_VOCAB) + weights["d2t"])[logits.argmax(-1)])


def test_taps_are_what_enters_the_layers(target: Path, tmp_path: Path) -> None:
    """Transformers' `hidden_states[i]` is what enters layer i; the norm behind the last layer can be tapped, too."""
    save_head(tmp_path)
    runner, drafter = make_drafter(target, tmp_path)
    assert [*drafter.taps.ids] == [0, 1, 3]
    seq, manager = Sequence([*range(20, 41)], 4), BlockManager(40, 4)
    manager.allocate(seq, [])
    seq.num_scheduled_tokens = len(seq)
    runner.forward(ScheduledBatch.pack(SequenceType.PREFILL, [seq], manager))
    model, entering = random_model("llama", tie_word_embeddings=False), list[Tensor]()
    model.model.norm.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    with torch.no_grad():
        states = model(input_ids=torch.tensor([seq.token_ids]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[0], states[1], entering[0]], -1)[0]
    torch.testing.assert_close(drafter.taps.states(len(seq)), wanted, atol=1e-4, rtol=1e-5)


def test_whose_layer_ids() -> None:
    """The same numbers mean inputs at the top (vLLM, speculators) and outputs in `eagle_config` (SGLang)."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}
    assert find_taps(ids, 94) == [1, 46, 90]
    assert find_taps({"eagle_config": ids}, 94) == find_taps({"eagle_config": None}, 94) == [2, 47, 91]
    with pytest.raises(ValueError, match=r"layers \[2, 1, -1\], the target has 2 layers"):
        find_taps({}, 2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden_size": 128}, "hidden_size of the head is 128, it must be 64"),
    "layers": ({"num_hidden_layers": 2}, "num_hidden_layers of the head is 2, it must be 1"),
    "taps": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"layers \[1, 2, 9\], the target has 3"),
    "draft vocabulary": ({"draft_vocab_size": 71}, r"lm_head.weight is \[70, 64\] in the file, \[71, 64\] in"),
    "another model": ({"architectures": ["LlamaForCausalLM"]}, "holds LlamaForCausalLM, which is not supported"),
    "EAGLE-3.1": ({"norm_before_fc": True}, "norm_before_fc: only false"),
    "a size as text": ({"hidden_size": "64"}, "hidden_size='64' must be a whole number from 1"),
    "a text of names": ({"architectures": "LlamaForCausalLMEagle3"}, "architectures='.*' must be a list of strings"),
    "taps as text": ({"eagle_aux_hidden_state_layer_ids": "1,2"}, "'1,2' must be a list of layers' numbers"),
    "nested taps": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True]}}, r"=\[True\] must be a list of"),
    "a vocabulary as text": ({"draft_vocab_size": "70"}, "draft_vocab_size='70' must be a whole number from 1"),
    "flag": ({"norm_before_residual": "false"}, "norm_before_residual='false' must be true or false"),
    "untold": ({"architectures": ["Eagle3DraftModel"]}, "does not say norm_before_residual: set it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_head_that_does_not_fit_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    changes, message = WRONG[case]
    save_head(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        make_drafter(target, tmp_path)


def test_files_that_do_not_fit_are_refused(target: Path, tmp_path: Path) -> None:
    """Tables of ids, and a pickle: reading one can run anything."""
    with pytest.raises(ValueError, match=r"lacks config.json: set model to a head's folder"):
        make_drafter(target, tmp_path)
    save_head(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    d2t = tensors["d2t"]
    for wrong, message in ((d2t[:-1], "must map draft_vocab_size=70 tokens"), (d2t + 300, "must map .* to 0..299")):
        save_file(tensors | {"d2t": wrong}, file)
        with pytest.raises(ValueError, match=message):
            make_drafter(target, tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a pickle .* convert it once with torch.load.file, weights_only=True"):
        make_drafter(target, tmp_path)


def make_prompts(kind: str, count: int) -> list[list[int]]:
    """Beginnings of documents that training has not seen."""
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(EngineArgs("tiny").folder)
    encode, rng = tiny.encoder(tok), random.Random(f"held out {kind}")
    if kind == "stories":
        return [encode(tiny.story_doc(rng, False))[0][: rng.randrange(6, 30)] for _ in range(count)]
    make = {"recall": lambda: tiny.recall_doc(rng, 20, 1, tiny.KINDS, True), "sums": lambda: tiny.sum_doc(rng, True, True)}
    docs = [make[kind]() for _ in range(count)]
    return [tok.encode(tiny.prompt_and_answer(doc)[0]) for doc in docs]


def run(prompts: list[Any], samplings: Any, k: int = 3, **options: Any) -> tuple[list[list[int]], Any]:
    """(token ids of each, statistics) of the built-in model with `k` drafts; without any at k = 0."""
    wanted = {"method": "eagle3", "num_speculative_tokens": k} if k else None
    with LLM("tiny", **TINY | options, speculative_config=wanted) as llm:
        outs = llm.generate(prompts, samplings, use_tqdm=False)
        scheduler: Any = llm.engine_core.scheduler
        if k:
            assert not llm.engine_core.drafter.by_request, "somebody left and was not forgotten"
        return [out.token_ids for out in outs], (getattr(scheduler, "spec_stats", None), scheduler)


GREEDY = SamplingParams(temperature=0, max_tokens=60)
FLOORS = {"stories": 3.0, "recall": 2.0, "sums": 2.2}  # tokens a step


@pytest.mark.parametrize("kind", FLOORS)
def test_shipped_head_stays_right_often_enough(kind: str) -> None:
    """Text cannot show a head that guesses badly: only this can."""
    _, (stats, _) = run(make_prompts(kind, 24), GREEDY)
    assert stats.tokens_per_step >= FLOORS[kind], stats


ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": {"kv_cache_block_size": 4, "num_kvcache_blocks": 40, "max_num_batched_tokens": 24},
    "blocks of 1": {"kv_cache_block_size": 1, "num_kvcache_blocks": 150, "interleave_decode": True},
}


@cache
def mixed(k: int, engine: str) -> tuple[list[list[int]], Any]:
    """Texts of all kinds with `k` drafts."""
    prompts = [*make_prompts("stories", 6), *make_prompts("recall", 3)]
    prompts += [prompts[0], prompts[1][:5]]
    samplings = [
        SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=30 + n, repetition_penalty=1.1 if n == 3 else 1.0)
        for n in range(len(prompts))
    ]
    return run(prompts, samplings, k, **ENGINES[engine])


@pytest.mark.parametrize("engine", ["tight", "blocks of 1"])
def test_text_is_the_same_with_and_without(engine: str) -> None:
    """Whatever the temperature and k, and through chunks, prefix hits and preemptions."""
    for k in (1, 4):
        text, (_, scheduler) = mixed(k, engine)
        assert text == mixed(0, "roomy")[0]
        assert scheduler.num_preemptions > 0


@pytest.mark.slow
def test_chunks_and_prefix_hits_cost_next_to_nothing() -> None:
    """Draft K/V at the end of a shared prefix saw another next token: within 2 % of the drafts."""
    prompts = make_prompts("stories", 24)
    shared = [*chain(*make_prompts("recall", 3))]
    prompts = [shared + prompt for prompt in prompts]  # a long beginning that all share
    small = {"kv_cache_block_size": 4, "num_kvcache_blocks": 2000}
    text, (plain, _) = run(prompts, GREEDY, 3, enable_prefix_caching=False, **small)
    with LLM("tiny", **TINY | small, speculative_config={"method": "eagle3", "num_speculative_tokens": 3}) as llm:
        scheduler: Any = llm.engine_core.scheduler
        llm.generate(prompts[:1], GREEDY, use_tqdm=False)
        stats = scheduler.spec_stats = SpecStats()
        outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert min(out.num_cached_tokens for out in outs) >= len(shared) // 4 * 4 and [out.token_ids for out in outs] == text
    chunks = {"max_num_batched_tokens": 4 * len(prompts), "enable_prefix_caching": False}  # enough for all drafts
    assert len(shared) > 2 * 4 * len(prompts)
    _, (chunked, _) = run(prompts, GREEDY, 3, **chunks, **small)
    shares = [sum(s.accepted.values()) / sum(s.proposed.values()) for s in (plain, stats, chunked)]
    assert shares[0] > 0.3 and max(abs(share - shares[0]) for share in shares) < 0.02, shares
