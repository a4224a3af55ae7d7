"""The families of Part VI against transformers on every path through the engine, and planted mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from checkpoints import edit_json, measure_loading, recorded, save_family, spec_of
from safetensors.torch import load_file, save_file
from test_parity import GREEDY, ROOMY, assert_parity, make_prompts

from atom_mini import LLM, EngineArgs, SamplingParams, families
from atom_mini.checkpoint import ModelSpec
from atom_mini.families import mixture
from atom_mini.families import specs as records
from atom_mini.families.specs import Experts, Routing
from atom_mini.loading import checkpoint_files, load_model, read_tensor
from atom_mini.models import SelfAttention

torch.set_num_threads(1)
NARROW = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
GLM = {"n_routed_experts": 8, "use_qk_norm": True, "attention_bias": True, "head_dim": 32, **NARROW}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("mistral", {"sliding_window": None}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "SmolLM3, biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "Mixtral": ("mixtral", {"num_local_experts": 8}),
    "OLMoE": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "OLMoE, bias": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True}),
    "Qwen2-MoE": ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 48, **NARROW}),
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 8, "norm_topk_prob": True, "head_dim": 32, **NARROW}),
    "Qwen3-MoE, dense layers": ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [1], **NARROW}),
    "Qwen3-MoE, every second": ("qwen3_moe", {"num_experts": 5, "decoder_sparse_step": 2, **NARROW}),
    "Qwen3-MoE, keys of others": ("qwen3_moe", {"num_experts": 8, "routed_scaling_factor": 2.0, "n_group": 4,
                                                "topk_group": 1, **NARROW}),
    "GLM-4.5": ("glm4_moe", {"routed_scaling_factor": 1.5, "n_shared_experts": 2, **GLM}),
    "GLM-4.5, no q/k norm": ("glm4_moe", GLM | {"use_qk_norm": False, "first_k_dense_replace": 2}),
    "GLM-4.5, groups": ("glm4_moe", GLM | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """Prefill, chunks, decodes, prefix hits, preemptions: `assert_parity`."""
    kind, options = CASES[case]
    assert_parity(save_family(kind, tmp_path, **options), tmp_path)


@pytest.mark.parametrize("case", ["SmolLM3", "Qwen2-MoE", "GLM-4.5, groups"])
def test_chunks_of_seven_and_thirty_two_at_once(case: str, tmp_path: Path) -> None:
    """In chunks of 7 tokens, in a batch of 32, and alone: the same logits as transformers each time."""
    kind, options = CASES[case]
    model = save_family(kind, tmp_path, **options)
    prompts = make_prompts() + make_prompts(1) + make_prompts(2) + make_prompts(3)
    works = ((prompts[:2], {"max_num_batched_tokens": 7}), (prompts, {}), (prompts, {"packed": True}), (prompts[5:6], {}))
    for chosen, engine in works:
        with LLM(str(tmp_path), device="cpu", **ROOMY | engine) as llm, recorded(llm) as recorder:
            outs = llm.generate(chosen, GREEDY, use_tqdm=False)
        sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
        assert max(len(batch.req_ids) for batch in recorder.batches) == len(chosen)
        assert max(recorder.errors(model, sequences).values()) <= 1e-4


ROUTE, KEEP, LOOP = mixture.route, mixture.keep_groups, mixture.loop_over_experts


def rerouted(**changes: Any) -> Callable[..., Any]:
    """`route` that reads some fields of the record wrongly."""
    return lambda logits, routing, bias=None: ROUTE(logits, Routing(**vars(routing) | changes), bias)


def route_by_choice(logits: torch.Tensor, routing: Routing, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the corrected scores as weights."""
    weights, ids = (logits.sigmoid() + bias).topk(routing.top_k)
    return weights / weights.sum(-1, keepdim=True) * routing.scale, ids


def weigh_evenly(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: Any) -> torch.Tensor:
    return LOOP(x, ids, weights.mean(-1, keepdim=True).repeat(1, ids.shape[1]), expert)


MISTAKES: dict[str, tuple[str, str, Any]] = {
    "not renormalised": ("Qwen3-MoE", "route", rerouted(renormalize=False)),
    "renormalised": ("OLMoE", "route", rerouted(renormalize=True)),
    "sigmoid for softmax": ("Mixtral", "route", rerouted(scoring="sigmoid")),
    "no scale": ("GLM-4.5", "route", rerouted(scale=1.0)),
    "no groups": ("GLM-4.5, groups", "route", rerouted(groups=1)),
    "a group's best": ("GLM-4.5, groups", "route", rerouted(group_best=1)),
    "corrected scores as weights": ("GLM-4.5", "route", route_by_choice),
    "no correction": ("GLM-4.5", "route", lambda logits, routing, bias: ROUTE(logits, routing)),
    "all weights alike": ("Mixtral", "loop_over_experts", weigh_evenly),
    "shared expert not gated": ("Qwen2-MoE", "", None),
    "turns everywhere": ("SmolLM3", "", None),
    "norm of single heads": ("OLMoE", "VariedAttention.project", None),
    "rows as they come": ("GLM-4.5", "reorder", lambda read, order: read()),
    "the other half turns": ("GLM-4.5", "rotary_order", lambda dim, n: torch.arange(dim).roll(dim // 2)),
}


def break_it(mistake: str, name: str, change: Any, patch: pytest.MonkeyPatch) -> None:
    if mistake == "shared expert not gated":
        patch.setattr(records, "Experts", lambda *sizes, **more: Experts(*sizes, **more | {"is_gated": False}))
        patch.setitem(mixture.RENAMED, ".mlp.shared_expert_gate.weight", ".rotary_emb")  # or the loader would say it
    elif mistake == "turns everywhere":
        patch.setattr(mixture.VariedAttention, "forward", SelfAttention.forward)
    elif mistake == "norm of single heads":
        def project(self: Any, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).split(self.widths, -1))
            normed = [torch.nn.functional.rms_norm(y, y.shape[-1:]) * norm.weight.view(y.shape[1:])
                      for y, norm in ((q, self.q_norm), (k, self.k_norm))]  # fmt: skip
            return torch.cat([*normed, v], 1)
        patch.setattr(mixture.VariedAttention, "project", project)
    else:
        patch.setattr(mixture, name, change)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_moves_a_logit(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these, made on purpose, moves some logit by more than 1."""
    case, name, change = MISTAKES[mistake]
    kind, options = CASES[case]
    model = save_family(kind, tmp_path, **options)
    break_it(mistake, name, change, monkeypatch)
    with LLM(str(tmp_path), device="cpu", **ROOMY) as llm, recorded(llm) as recorder:
        outs = llm.generate(make_prompts()[4:6], GREEDY, use_tqdm=False)
    sequences = {out.request_id: out.prompt_token_ids + out.token_ids for out in outs}
    assert recorder.errors(model, sequences)["every"] > 1


def test_router_by_hand() -> None:
    """Eight experts in four groups, worked out on paper."""
    scores = torch.tensor([[0.9, 0.1, 0.4, 0.45, 0.6, 0.2, 0.3, 0.35]])
    logits = torch.logit(scores)
    plain = Routing(3, "sigmoid")
    assert ROUTE(logits, plain)[1].tolist() == [[0, 4, 3]]
    by_best = Routing(3, "sigmoid", groups=4, top_groups=2)  # groups 0 (.9) and 2 (.6)
    assert ROUTE(logits, by_best)[1].tolist() == [[0, 4, 5]]
    by_two = Routing(3, "sigmoid", groups=4, top_groups=2, group_best=2)  # 1.0, .85, .8, .65: groups 0 and 1
    weights, ids = ROUTE(logits, by_two)
    assert ids.tolist() == [[0, 3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.45, 0.4]]))
    bias = torch.tensor([0, 0, 0, 0, 0, 0, 0.8, 0.0])  # group 3: 1.1 + .35
    weights, ids = ROUTE(logits, Routing(2, "sigmoid", True, 2.5, True, 4, 2, 2), bias)
    assert ids.tolist() == [[6, 0]]
    torch.testing.assert_close(weights, 2.5 * torch.tensor([[0.3, 0.9]]) / 1.2)


def test_forbidden_groups_lose_against_negative_scores() -> None:
    """With 0 instead of -inf, an expert of a forbidden group would be chosen."""
    logits, bias = torch.zeros(1, 4), torch.tensor([-1.0, -2.0, -3.0, -9.0])
    routing = Routing(2, "sigmoid", groups=2, top_groups=1, group_best=2)
    assert ROUTE(logits, routing, bias)[1].tolist() == [[0, 1]]
    zeros = KEEP(logits.sigmoid() + bias, routing).nan_to_num(neginf=0.0)
    assert set(zeros.topk(2).indices[0].tolist()) == {2, 3}


def test_which_layers_are_sparse() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[5], decoder_sparse_step=2)
    assert spec_of(config).sparse == (False, True, False, True, False, False)
    glm = spec_of(AutoConfig.for_model("glm4_moe", num_hidden_layers=6, first_k_dense_replace=2))
    assert glm.sparse == (False, False, True, True, True, True) and glm.routing.scoring == "sigmoid"
    assert not any(spec_of(AutoConfig.for_model("mistral")).sparse)


# Loading


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    return load_model(EngineArgs(str(folder)).spec, folder, 64, torch.device("cpu"), torch.float32)


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(("add", "drop", "words"), [("8", None, "no place for"), (None, "3", "lacks 1 weight")])
def test_a_missing_or_extra_expert_is_named(add: str | None, drop: str | None, words: str, tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path, **CASES["Qwen3-MoE"][1])

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if add:
            tensors[EXPERT.format(add)] = tensors[EXPERT.format(0)].clone()
        if drop:
            del tensors[EXPERT.format(drop)]

    rewrite(tmp_path, edit)
    with pytest.raises(ValueError, match=words) as error:
        load(tmp_path)
    assert EXPERT.format(add or drop) in str(error.value)


def fuse(tensors: dict[str, torch.Tensor], count: int = 8) -> None:
    """All experts of a layer in one tensor, as Qwen3.5's files have them."""
    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        matrices = {name: torch.stack([tensors.pop(f"{at}.{e}.{name}_proj.weight") for e in range(8)])[:count]
                    for name in ("gate", "up", "down")}  # fmt: skip
        tensors[f"{at}.gate_up_proj"] = torch.cat([matrices["gate"], matrices["up"]], 1)
        tensors[f"{at}.down_proj"] = matrices["down"]


def test_fused_files(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path, **CASES["Qwen3-MoE"][1])
    single = load(tmp_path)
    rewrite(tmp_path, fuse)
    fused = load(tmp_path)
    for name, weight in single.named_parameters():
        assert torch.equal(weight.to_dense(), dict(fused.named_parameters())[name].to_dense()), name
    for one, other in zip(single.model.layers, fused.model.layers, strict=True):
        pairs = zip(one.mlp.gate_up.packed, other.mlp.gate_up.packed, strict=True)
        assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in pairs)


@pytest.mark.parametrize("count", [6, 10])
def test_fused_files_with_another_number_of_experts(count: int, tmp_path: Path) -> None:
    options = CASES["Qwen3-MoE"][1]
    save_family("qwen3_moe", tmp_path, **options)
    rewrite(tmp_path, fuse)
    edit_json(tmp_path / "config.json", num_experts=count)
    rewrite(tmp_path, lambda tensors: tensors.update(  # the router has as many rows as the config says
        {n: t[:1].repeat(count, 1) for n, t in tensors.items() if n.endswith("mlp.gate.weight")}))  # fmt: skip
    with pytest.raises(ValueError, match=r"in the file"):
        load(tmp_path)


def test_layers_for_mtp_only_if_announced(tmp_path: Path) -> None:
    save_family("glm4_moe", tmp_path, **GLM)
    extra = {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    assert load(tmp_path) is not None
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj"):
        load(tmp_path)
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=None, num_mtp_layers=None)  # transformers says 1
    with pytest.raises(ValueError, match=r"model\.layers\.4\.eh_proj"):
        load(tmp_path)


def test_every_weight_is_read_once(tmp_path: Path) -> None:
    """Each number of the file is read exactly once, whatever tensors it is split into."""
    save_family("glm4_moe", tmp_path, **GLM)
    read = Counter[str]()

    def counted(file: Path, name: str, part: Any = None) -> torch.Tensor:
        found = read_tensor(file, name, part)
        read[name] += found.numel()
        return found

    readers = {name: partial(counted, file, name) for name, file in checkpoint_files(tmp_path).items()}
    readers = load(tmp_path).weight_readers(readers)
    found = [reader() for reader in readers.values()]
    sizes = {name: tensor.numel() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert read == sizes and sum(t.numel() for t in found) == sum(sizes.values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """Loading takes an expert or two in addition to the weights: another copy of a layer would take 25 MB, one of all 300."""
    shape = {"vocab_size": 256, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
    shape |= {"max_position_embeddings": 512}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "intermediate_size": 256}
    save_family("qwen3_moe", tmp_path, **shape, **experts)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert weights > 250e6 and measure_loading(tmp_path)["peak"] <= 1.1 * weights + 16 * 2**20


@pytest.mark.parametrize(("kind", "options", "words"), [
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 4.0}, "clip_qkv"),
    ("qwen3_moe", {"num_experts": 4, **NARROW, "hidden_act": "gelu"}, "hidden_act"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(kind: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_family(kind, tmp_path, **options)
    with pytest.raises(ValueError, match=words):
        LLM(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "Gemma4ForConditionalGeneration", "Qwen3NextForCausalLM"])
def test_an_unknown_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """A name that begins like a supported one is another architecture."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(ValueError, match=f"{name}.*these are: .*DeepseekV3ForCausalLM"):
        EngineArgs(str(tmp_path))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported; use swiglu_alpha=1.702"),
    *[(kind, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention") for kind in (
        "gpt_oss", "smollm3", "qwen2_moe", "llama", "qwen3", "qwen3_5_text")],
    *[(kind, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary")
      for kind in ("mistral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")],
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9, .* do not fit 8 experts"),
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 8, "num_experts_per_tok": 1}, "n_group"),  # of one expert, and two count
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 3, "num_experts_per_tok": 1}, "n_group"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_configs_that_would_be_misread(kind: str, options: dict[str, Any], words: str) -> None:
    from transformers import AutoConfig

    usual = {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    spec_of(AutoConfig.for_model(kind, **usual))
    with pytest.raises(ValueError, match=words):
        spec_of(AutoConfig.for_model(kind, **usual | options))


LOOK = """
import importlib, sys
import atom_mini.families.specs
from atom_mini.checkpoint import ModelRegistry
from atom_mini.models import model_class
from atom_mini.options.args import EngineArgs
before = dict(ModelRegistry.readers)
for module in sys.argv[1:]:
    importlib.import_module("atom_mini." + module)
    assert ModelRegistry.readers == before, f"importing {module} changed the registry"
    spec = EngineArgs("tiny").spec
    print(type(spec).__name__, model_class(spec).__name__, model_class(spec).__module__)
"""


@pytest.mark.slow
def test_no_import_changes_what_a_model_is() -> None:
    """After each module's import, the built-in model has Part I's spec and Part I's class."""
    modules = [f"families.{module.name}" for module in iter_modules(families.__path__)] + ["parallel.experts"]
    modules += ["parallel.shards"] * bool(find_spec("msgspec"))
    done = subprocess.run([sys.executable, "-c", LOOK, *modules], capture_output=True, text=True)
    assert done.stdout.split() == ["ModelSpec", "CausalLM", "atom_mini.models"] * len(modules), done.stderr


def test_specs_are_frozen_and_configs_left_alone() -> None:
    from transformers import AutoConfig

    for kind in ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text"):
        cfg = AutoConfig.for_model(kind, num_experts_per_tok=2)
        before = dict(vars(cfg))
        spec: Any = spec_of(cfg)
        assert vars(cfg) == before and isinstance(spec, ModelSpec)
        with pytest.raises(AttributeError):
            spec.hidden_size = 1


# On the kernels, in the interpreter

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels in the interpreter")
@pytest.mark.slow
def test_a_graphs_padding_rows_fetch_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in the graph for four: the same tokens as without graphs, and the fourth row is padding."""
    from recording import graph_runner, load_recorded_graph

    from atom_mini.engine_core import EngineCore
    from atom_mini.families import grouped
    from atom_mini.gpu.graphs import first_decodes
    from atom_mini.options.build import make_runner
    from atom_mini.sequence import Sequence

    save_family("qwen3_moe", tmp_path, head_dim=32, num_experts=8, **NARROW | {"num_hidden_layers": 1})
    options = {"num_kvcache_blocks": 8, "max_num_seqs": 4, "max_model_len": 64, "attention": "triton"}
    config = EngineArgs(str(tmp_path), device="cpu", **options)
    runner, texts = graph_runner(config, load_recorded_graph()), []
    assert sorted(runner.graphs) == [1, 2, 4]
    for kind in (runner, make_runner(EngineArgs(str(tmp_path), device="cpu", **options))):
        core = EngineCore(config, kind)
        seqs = [Sequence([5, 6, 7 + i], 16, SamplingParams(temperature=0, max_tokens=4), id=i) for i in range(3)]
        for seq in seqs:
            core.add(seq)
        while core.step():
            pass
        texts.append([seq.completion_token_ids for seq in seqs])
    assert texts[0] == texts[1]
    seen, compute = [], grouped.grouped_experts
    monkeypatch.setattr(grouped, "grouped_experts", lambda x, ids, *rest: seen.append(ids) or compute(x, ids, *rest))
    runner._decode(runner._upload(first_decodes(3), 4))
    (ids,) = seen
    assert (ids[:3] < 8).all() and (ids[3:] == 8).all()


# With the rest of the engine

WITH: dict[str, dict[str, Any]] = {
    "radix": {"prefix_cache": "radix"},
    "overlap": {"overlap": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "spyre": {"scheduler": "spyre", "max_model_len": 128, "max_num_batched_tokens": 512},
    "trace": {"trace": True},
    "packed": {"packed": True},
}


@pytest.mark.parametrize("case", ["SmolLM3", "GLM-4.5"])
@pytest.mark.parametrize("other", WITH)
def test_with_the_rest(other: str, case: str, tmp_path: Path) -> None:
    """The same tokens with each of the engine's other options."""
    kind, options = CASES[case]
    save_family(kind, tmp_path, **options)
    prompts, texts = make_prompts(), []
    for chosen in ({}, WITH[other]):
        with LLM(str(tmp_path), device="cpu", num_kvcache_blocks=64, **chosen) as llm:
            texts.append([out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert texts[0] == texts[1]
