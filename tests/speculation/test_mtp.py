"""The layer for MTP that a checkpoint brings drafts what its authors say, changes no text, and is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import test_families
import test_latent
import torch
import transformers
from checkpoints import edit_json, random_model
from safetensors.torch import load_file, save_file
from test_quantized import save_fp8_twin
from test_speculation import noted
from torch import Tensor

from atom_mini import LLM, EngineArgs, SamplingParams

torch.set_num_threads(1)
LAYERS = 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": test_families.CASES["GLM-4.5"],
    "GLM-4.5, dense": ("glm4_moe", test_families.GLM | {"first_k_dense_replace": LAYERS + 1}),
    "DeepSeek-V3": test_latent.CASES["V3"],
    "GLM-4.7-Flash": test_latent.CASES["GLM-4.7-Flash"],
}
checkpoints.CONFIGS["glm4_moe"] = transformers.Glm4MoeConfig
PUBLISHED = ["GLM-4.5", "DeepSeek-V3"]
BASE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 120, "max_num_seqs": 8}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 12},
    "tight": {"kv_cache_block_size": 4, "num_kvcache_blocks": 26, "max_num_batched_tokens": 30},
    "blocks of 1": {"kv_cache_block_size": 1, "num_kvcache_blocks": 100, "interleave_decode": True},
}
PROMPTS = [[7] * 3, [*range(20, 55)], [*range(20, 50), 1], [5, 6, 7, 5, 6], [*range(99, 60, -1)]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def save_module(kind: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """A random checkpoint with a module, as its authors store it; returns its tensors. The module's layer is the last
    of a transformers model that has one layer more."""
    name, shape = KINDS[kind]
    more = {"num_hidden_layers": LAYERS + 1, "tie_word_embeddings": False, "initializer_range": 0.2}
    model = random_model(name, **shape | more | options)
    for part, value in [*model.named_parameters(), *model.named_buffers()]:
        if part.endswith(("mlp.gate.weight", "e_score_correction_bias", "gate_up_proj", "down_proj")):
            torch.nn.init.normal_(value, std=0.1 if "bias" in part else 0.2)
    model.save_pretrained(folder)
    edit_json(folder / "config.json", num_hidden_layers=LAYERS, num_nextn_predict_layers=1, layer_types=None)
    tensors, size = load_file(folder / "model.safetensors"), model.config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{LAYERS}.{norm}.weight"] = 1 + 0.5 * torch.randn(size)
    tensors[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.randn(size, 2 * size) * size**-0.5
    if kind in PUBLISHED:  # they store the model's own matrices a second time
        tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write(folder, tensors)


def write(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def drafting(folder: Path, k: int = 3, **options: Any) -> LLM:
    wanted = {"method": "mtp", "num_speculative_tokens": k} if k else None
    return LLM(str(folder), **BASE | options, speculative_config=wanted)


def run(folder: Path, k: int = 3, params: Any = GREEDY, **options: Any) -> tuple[list[Any], Any]:
    """(token ids and log probabilities of each, the scheduler)."""
    with drafting(folder, k, **options) as llm:
        outs = llm.generate(PROMPTS, params, use_tqdm=False)
        if k:
            assert not llm.engine_core.drafter.by_request, "somebody left and was not forgotten"  # type: ignore[attr-defined]
        return [(out.token_ids, out.logprobs and len(out.logprobs)) for out in outs], llm.engine_core.scheduler


class Reference:
    """The formulas of DeepSeek-V3's report and of vLLM's and ATOM's modules, with transformers' model and its layers, without
    a cache. Each pass reads, and the next one is fed, a state that a last norm has left: the target's, then `shared_head`'s."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        eager: dict[str, Any] = {"attn_implementation": "eager"}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, **eager).float().eval()
        config = self.model.config
        config.num_hidden_layers = LAYERS + 1
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*config.mlp_layer_types, config.mlp_layer_types[-1]]
        whole = type(self.model).from_pretrained(folder, config=config, **eager).float().eval()
        self.layer, self.tensors = whole.model.layers[LAYERS], tensors

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.tensors[f"model.layers.{LAYERS}.{name}.weight"]

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """What the target's head reads: [n, hidden]."""
        return self.model.model(input_ids=ids[None]).last_hidden_state[0]

    @torch.no_grad()
    def module(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The next states [n, hidden], normed, of the tokens `ids` [n] and the normed states before them."""
        embeds = self.model.model.embed_tokens(ids)
        both = torch.cat([self.norm(embeds, "enorm"), self.norm(hidden, "hnorm")], -1)
        x = (both @ self.tensors[f"model.layers.{LAYERS}.eh_proj.weight"].T)[None]
        places, n = torch.arange(len(ids))[None], len(ids)
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        turned = self.model.model.rotary_emb(x, places)
        x = self.layer(x, attention_mask=mask, position_embeddings=turned, position_ids=places)[0]
        return self.norm(x, "shared_head.norm")

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.tensors["lm_head.weight"].T

    def drafts(self, text: list[int], length: int, k: int) -> list[tuple[int, float]]:
        """(draft, how far it is ahead of the second best) of each place behind the first `length` tokens of `text`."""
        ids, found = torch.tensor(text[:length]), list[tuple[int, float]]()
        hidden = self.states(ids)[:-1]
        ids = ids[1:]
        for _ in range(k):
            states = self.module(ids, hidden)
            (best, second), (draft, _) = self.logits(states[-1]).topk(2)
            found.append((int(draft), float(best - second)))
            ids, hidden = torch.cat([ids, draft[None]]), torch.cat([hidden, states[-1:]])
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """(folder, tensors) of a checkpoint of a kind, made once."""

    @cache
    def save(kind: str) -> tuple[Path, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("module")
        return folder, save_module(kind, folder)

    return save


@pytest.mark.parametrize(("kind", "engine"), [("GLM-4.5", "tight"), ("DeepSeek-V3", "chunks"), ("GLM-4.7-Flash", "blocks of 1"),
                                              ("GLM-4.5, dense", "roomy")])  # fmt: skip
def test_drafts_are_those_of_the_formulas(kind: str, engine: str, saved: Any) -> None:
    """Every draft of every pass, whatever has happened before: chunks, preemptions, blocks of any size."""
    reference = Reference(*saved(kind))
    with drafting(saved(kind)[0], **ENGINES[engine], enable_prefix_caching=False) as llm:
        texts, given = noted(llm, PROMPTS, GREEDY)
        scheduler: Any = llm.engine_core.scheduler
    assert (scheduler.num_preemptions > 0) == (engine in ("tight", "blocks of 1"))
    count = 0
    for (i, length), drafts in given.items():
        wanted = reference.drafts(texts[i], length, len(drafts))
        for draft, (right, lead) in zip(drafts, wanted, strict=True):
            assert draft == right or lead < 1e-3, (i, length, drafts, wanted)
            if draft != right:
                break
            count += 1
    assert count > 100


def wishes(warm: float) -> list[SamplingParams]:
    return [SamplingParams(temperature=warm, seed=n, max_tokens=14 + n, logprobs=2 if n == 1 else None,
                           repetition_penalty=1.2 if n == 3 else 1.0, stop_token_ids=[7] if n == 4 else [])
            for n in range(len(PROMPTS))]  # fmt: skip


@cache
def plain(folder: Path, warm: float) -> list[Any]:
    return run(folder, 0, wishes(warm))[0]


@pytest.mark.parametrize(("kind", "engine", "warm"), [("GLM-4.5", "chunks", 0.9), ("DeepSeek-V3", "blocks of 1", 0.0)])
def test_no_text_changes(kind: str, engine: str, warm: float, saved: Any) -> None:
    """With prefix hits, preemptions, penalties, log probabilities and stops, for k of 1 and 4."""
    folder, _ = saved(kind)
    for k in (1, 4):
        found, scheduler = run(folder, k, wishes(warm), **ENGINES[engine])
        assert found == plain(folder, warm) and scheduler.spec_stats.proposed.total() > 20


def test_fp8_as_it_is_published(tmp_path: Path) -> None:
    """The module's matrices, packed in squares with scales beside them, draft what the unpacked ones do."""
    save_module("DeepSeek-V3", tmp_path / "plain")
    save_fp8_twin(tmp_path, lambda n: n.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in n)
    found = []
    for name in ("plain", "fp8"):
        with drafting(tmp_path / name) as llm:
            found.append(noted(llm, PROMPTS, GREEDY))
    assert found[0] == found[1] and len(found[0][1]) > 20


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in the interpreter")
@pytest.mark.slow
def test_kernels_in_the_interpreter_draft_the_same(tmp_path: Path) -> None:
    save_module("GLM-4.5, dense", tmp_path)
    few = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found = []
    for attention in ("torch", "triton"):
        with drafting(tmp_path, 2, attention=attention) as llm:
            outs = llm.generate(PROMPTS[3:4], few, use_tqdm=False)
            core: Any = llm.engine_core
            stats = core.scheduler.spec_stats
        found.append((outs[0].token_ids, stats))
    assert found[0] == found[1] and found[0][1].num_steps > 1


def test_its_memory_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, without those that are the model's, and its part of each block; one block more would not fit."""
    tensors, free = save_module("DeepSeek-V3", tmp_path), 3 * 2**20
    monkeypatch.setattr("atom_mini.model_runner.CPU_KVCACHE_BYTES", free)
    with LLM(str(tmp_path), device="cpu", speculative_config={"method": "mtp"}, max_num_seqs=400) as llm:
        core: Any = llm.engine_core
        weights, block = core.drafter.memory(llm.config, torch.float32)
        shared = ("tokens.weight", "head.weight")
        mine = [t for n, t in tensors.items() if f"layers.{LAYERS}." in n and not n.endswith(shared)]
        assert weights == sum(4 * t.numel() for t in mine)
        used = weights + core.runner.kv_cache.nbytes + core.drafter.runner.kv_cache.nbytes
        assert used <= free < used + core.runner.block_bytes + block
        assert core.runner.block_bytes == LAYERS * block


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A weight of the module, missing, in a wrong shape, or one too many, by its name in the file."""
    tensors = save_module("GLM-4.5", tmp_path)
    here = f"model.layers.{LAYERS}."
    cases: list[tuple[dict[str, Any], str]] = [
        ({here + "enorm.weight": None}, rf"lacks 1 weight.s.: {here}enorm.weight"),
        ({here + "eh_proj.weight": torch.ones(64, 64)}, rf"{here}eh_proj.weight is \[64, 64\] in the file, \[64, 128\]"),
        ({here + "score.weight": torch.ones(2)}, rf"no place for: {here}score.weight"),
    ]
    for change, message in cases:
        write(tmp_path, {k: v for k, v in (tensors | change).items() if v is not None})
        with pytest.raises(ValueError, match=message):
            drafting(tmp_path)


def test_who_has_no_module_is_refused(tmp_path: Path) -> None:
    save_module("GLM-4.5", tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0)
    wanted = {"method": "mtp", "num_speculative_tokens": 2}
    for model in ("tiny", str(tmp_path)):
        with pytest.raises(ValueError, match=r"needs a checkpoint with num_nextn_predict_layers"):
            EngineArgs(model, speculative_config=wanted)
    with pytest.raises(ValueError, match=r"model='x' is for .*, not for method='mtp'"):
        EngineArgs("tiny", speculative_config=wanted | {"model": "x"})
