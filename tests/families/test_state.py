"""Recurrent states: the rule against a loop, slots under a fuzz, and what goes with states."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import symbolic
import torch
import transformers
from checkpoints import reference_logits
from small_models import GREEDY, ROOMY, TIGHT, generate, make_prompts
from torch import Tensor

from atom_mini import LLM, EngineArgs
from atom_mini.families import state
from atom_mini.families.specs import StateSpec
from atom_mini.model_runner import ModelRunner
from atom_mini.options.args import STATE, TOGETHER
from atom_mini.options.build import make_runner
from atom_mini.options.info import describe
from atom_mini.parallel.lockstep import dummy_batch, with_spare_block

torch.set_num_threads(1)
SMALL: dict[str, Any] = checkpoints.SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
FIRST = {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3_5_text", {}),
    "dense, biases, tied": ("qwen3_5_text", {"attention_bias": True, "tie_word_embeddings": True} | FIRST),
    "a state for each key head, width 3": ("qwen3_5_text", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}),
    "mixture": ("qwen3_5_moe_text", EXPERTS),
}


def spread_weights(model: Any) -> Any:
    """Every weight visible: norms that differ, decays of a few tokens to many, strengths and gates that vary."""
    for name, weight in model.named_parameters():
        kind = name.split(".")[-1]
        mean = {"A_log": -2.0}.get(kind, 1.0 if "linear_attn.norm" in name else 0.0)
        torch.nn.init.normal_(weight, mean, {"A_log": 1.0, "dt_bias": 1.0}.get(kind, 0.2))
        if "conv1d" in name:
            torch.nn.init.normal_(weight, 0, 0.5)
    return model


def make_model(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL | options)
    return spread_weights(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())


def save(case: str, folder: Path, **more: Any) -> Any:
    kind, options = CASES[case]
    model = make_model(kind, **options | more)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, for tests that do not change it."""
    path = tmp_path_factory.mktemp("dense")
    save("dense", path)
    return path


def test_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States stay float32; the logits are as near to float32's as transformers', within 3 x."""
    model = save("dense", tmp_path)
    prompt, runners = make_prompts()[1], list[Any]()
    free = state.StateRunner._free_bytes
    monkeypatch.setattr(
        state.StateRunner, "_free_bytes", lambda self: runners.append(self) or free(self)
    )
    recorder, sequences, _ = generate(tmp_path, [prompt], dtype="bfloat16", **ROOMY)
    (ids,), (runner,) = sequences.values(), runners
    right, n = reference_logits(model, ids), len(ids) - 1
    theirs = (reference_logits(model.bfloat16(), ids) - right)[:n].norm()
    ours = (torch.stack([recorder.every[key] for key in sorted(recorder.every)]) - right[:n]).norm()
    assert ours < 3 * theirs and ours < 0.2 * right.norm()
    assert runner.pool.state.dtype == torch.float32 and runner.pool.past.dtype == torch.bfloat16


# The rule


def loop(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, in float64: the paper's equation 10."""
    s, q, k, v, g, beta = (x.double() for x in (s, q, k, v, g, beta))
    out = []
    for t in range(q.shape[1]):
        s = g[:, t, :, None].exp() * s
        s = s + beta[:, t, :, None] * torch.einsum("hk,hv->hkv", k[:, t], v[:, t] - torch.einsum("hkv,hk->hv", s, k[:, t]))
        out.append(torch.einsum("hkv,hk->hv", s, q[:, t]))
    return torch.stack(out, 1), s


@pytest.mark.parametrize("decay", ["some", "all"])
def test_chunks_equal_the_loop(decay: str) -> None:
    """Up to 130 tokens, from a state that is not empty. Decays from almost none to nine tenths, or
    e^-100 in each token: sums of -13000, whose differences would overflow the wrong way round."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 130, d) for d in (12, 12, 9))
    g = -torch.logspace(-4, 0.4, 260).view(2, 130, 1)[:, torch.randperm(130)]
    g = g if decay == "some" else torch.full_like(g, -100.0)
    start = torch.randn(2, 12, 9)
    before = start.clone()
    inputs = [state.unit(q), state.unit(k), v, g, torch.rand(2, 130, 1)]
    for n in (1, 2, 63, 64, 65, 128, 130):
        cut = [x[:, :n] for x in inputs]
        for ours, right in zip(state.delta_rule(start, *cut), loop(start, *cut), strict=True):
            torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=1e-5)
    assert torch.equal(start, before)


# Slots


def run_with_states(patch: pytest.MonkeyPatch, trials: int, caching: bool = False, **how: Any) -> Any:
    """`symbolic.run_trial` for some seeds, with states in addition to the K/V."""
    make = symbolic.make_trial

    def made(seed: int) -> symbolic.Trial:
        trial = make(seed)
        hits = trial.config.enable_prefix_caching and caching
        trial.config = trial.config.changed(enable_prefix_caching=hits)
        return trial

    for name in ("SymbolicRunner", "LaunchingSymbolicRunner"):
        patch.setattr(symbolic, name, type(name, (symbolic.WithStates, getattr(symbolic, name)), how))
    patch.setattr(symbolic, "make_trial", made)
    found = [symbolic.run_trial(s, tight=s % 2 == 0, overlap=s % 3 == 0) for s in range(trials)]
    return reduce(lambda a, b: a + b, found)


def test_slots_under_a_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds, aborts, preemptions, failing steps, and discarded steps: each state belongs to its own sequence."""
    stats = run_with_states(monkeypatch, 200)
    for name in ("preemptions", "failures", "aborts_running", "aborts_waiting", "chunks", "ahead", "put_back"):
        assert stats[name] > 5, name
    assert stats["prefix_hits"] == 0


@pytest.mark.parametrize("how", [{"clears": False}, {"by_row": False}, {"caching": True}], ids=str)
def test_the_fuzz_sees_mistakes(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncleared slots, slots by place in the batch, and prefix caching are noticed."""
    with pytest.raises((AssertionError, KeyError)):
        run_with_states(monkeypatch, 60, **how)


def test_a_step_that_fails_half_way_leaves_no_trace(folder: Path) -> None:
    """Only some layers have their new states; all sequences restart."""
    with LLM(str(folder), device="cpu", **ROOMY) as llm:
        right = [out.token_ids for out in llm.generate(make_prompts(), GREEDY, use_tqdm=False)]
        model: Any = llm.engine_core.runner.model  # type: ignore[attr-defined]
        calls = 0

        def fail(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls in (2, 7):
                raise KeyboardInterrupt

        model.model.layers[2].register_forward_pre_hook(fail)
        requests = [llm.add_request(prompt, GREEDY) for prompt in make_prompts()]
        seqs = [llm.engine_core.scheduler.seqs[i] for i in requests]
        while not all(seq.is_finished for seq in seqs):
            try:
                llm.step()
            except KeyboardInterrupt:
                assert len(llm.engine_core.scheduler.waiting) == len(seqs)
        assert calls > 7 and [seq.completion_token_ids for seq in seqs] == right


# Memory


def test_a_batch_without_sequences_changes_no_state(folder: Path) -> None:
    """The dummy step of an idle engine in lockstep (chapter 72b) may run between two steps of live sequences."""
    with LLM(str(folder), device="cpu", **TIGHT) as llm:
        runner: Any = llm.engine_core.runner
        with_spare_block(runner)
        runner.pool.state.fill_(7.0)
        runner.pool.past.fill_(7.0)
        runner.launch(dummy_batch(TIGHT["num_kvcache_blocks"]))
        changed = [
            (part != 7).flatten(2).any(2).any(0).nonzero().flatten().tolist() for part in vars(runner.pool).values()
        ]
        assert changed == [[TIGHT["max_num_seqs"]]] * 2


def test_states_count_in_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the states is not used for blocks; if they do not fit, the error says how many would."""
    save("dense", tmp_path)
    each = state.state_bytes(EngineArgs(str(tmp_path)).spec, torch.float32)
    monkeypatch.setattr(state, "free_host_bytes", lambda: 100 * each)
    with LLM(str(tmp_path), device="cpu", max_num_seqs=60) as llm:
        used = (llm.config.num_kvcache_blocks or 0) * llm.engine_core.runner.block_bytes  # type: ignore[attr-defined]
        assert 38 * each < used <= 39 * each  # one is a spare
    with pytest.raises(ValueError, match=r"max_num_seqs=101 needs .* bytes of states.*set it to at most 99"):
        LLM(str(tmp_path), device="cpu", max_num_seqs=101)


def test_info_says_both_prices(tmp_path: Path) -> None:
    save("mixture", tmp_path)
    found = describe(EngineArgs(str(tmp_path), device="cpu"))
    assert found["kvcache_bytes_per_token"] == 2 * 2 * 32 * 4
    assert found["state_bytes_per_sequence"] == 3 * (4 * 16 * 24 * 4 + 3 * 160 * 4)


# What it goes with


@pytest.mark.parametrize(
    "knobs",
    [
        {"enable_prefix_caching": True},
        {"prefix_cache": "radix"},
        {"attention": "triton"},
        {"scheduler": "spyre"},
        {"tensor_parallel_size": 2},
        {"routing": "prefix", "data_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=str,
)
def test_refused_by_name(knobs: dict[str, Any], tmp_path: Path) -> None:
    """Refused before a weight is read: the folder has none."""
    save("dense", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    name = next(iter(knobs))
    words = rf"{name}=.* does not go with layers that keep a state.*: set it to .* \(.*\)"
    with pytest.raises(ValueError, match=words):
        LLM(str(tmp_path), device="cpu", **knobs)


def test_it_cannot_draft(tmp_path: Path) -> None:
    save("dense", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    drafts = {"method": "draft_model", "model": str(tmp_path)}
    with pytest.raises(ValueError, match="cannot draft: its layers keep a state"):
        LLM("tiny", device="cpu", max_model_len=200, speculative_config=drafts)


def test_defaults_that_fit(tmp_path: Path) -> None:
    """Options that were not given are set; given ones that fit are kept."""
    save("dense", tmp_path)
    rows = [row for row in TOGETHER if row.asked == STATE]
    fitting: dict[str, Any] = {name: values[-1] for row in rows for name, values in row.needs.items()}
    no_drafts: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 0}}
    for given in ({}, fitting | {"data_parallel_size": 2}, no_drafts, {"prefix_cache": None}):
        config = EngineArgs(str(tmp_path), **given)
        assert {name: getattr(config, name) for name in fitting} == fitting
    assert EngineArgs("tiny").enable_prefix_caching and not isinstance(EngineArgs("tiny").spec, StateSpec)


def test_no_graphs_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is `StateRunner`, which records no graphs, on any device."""
    with monkeypatch.context() as patch:
        patch.setattr("atom_mini.model_runner.choose_device", lambda name: torch.device("cuda"))  # as if there were one
        patch.setattr(state, "StateRunner", lambda *args: "ours")
        assert make_runner(EngineArgs(str(folder), device="cuda")) == "ours"
    small = EngineArgs("tiny", device="cpu", compiled=False, num_kvcache_blocks=8)
    assert type(make_runner(small)) is ModelRunner
