"""Recurrent states: transformers' logits on every path, the loop as oracle, slots under a fuzz, and planted mistakes."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import symbolic
import torch
import transformers
from checkpoints import edit_json, reference_logits
from safetensors.torch import load_file
from test_families import fuse, rewrite
from test_fuzz import mutate
from test_latent import equal_alone_and_among_32, equal_on_every_path, generate
from torch import Tensor

from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.families import mixture, state
from atom_mini.families.specs import FamilySpec, StateSpec, read_family
from atom_mini.memory import kvcache_block_bytes
from atom_mini.model_runner import ModelRunner
from atom_mini.options.args import STATE, TOGETHER
from atom_mini.options.build import make_runner
from atom_mini.options.info import describe
from atom_mini.parallel.lockstep import dummy_batch, with_spare_block
from atom_mini.scheduler import ScheduledBatch, ScheduledBatchOutput

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
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ROOMY: dict[str, Any] = {"num_kvcache_blocks": 200, "max_num_seqs": 40}
SEVENS: dict[str, Any] = {"kv_cache_block_size": 4, "num_kvcache_blocks": 31, "max_num_batched_tokens": 7, "max_num_seqs": 6}
TIGHT: dict[str, Any] = {"kv_cache_block_size": 4, "num_kvcache_blocks": 31, "max_num_batched_tokens": 22, "max_num_seqs": 5}


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


def make_prompts() -> list[list[int]]:
    """1 to 84 tokens: more than a chunk; some begin alike, two are equal; more of them than TIGHT has slots."""
    rng = random.Random(0)
    stem = [rng.randrange(300) for _ in range(100)]
    return [stem[:84], stem[:33], [*stem[:40], 7, 8], stem[:33], stem[50:51], stem[60:77]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A case's model and its folder, made once: for tests that change neither."""

    @cache
    def make(case: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("saved")
        return save(case, folder), folder

    return make


# Against transformers


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, saved: Any) -> None:
    """Whole prefills, chunks of 7, decodes together and alone, slots used again, preempted and resumed."""
    engines = (ROOMY, SEVENS, TIGHT) if case in ("dense", "mixture") else (TIGHT,)
    equal_on_every_path(*saved(case), make_prompts(), *engines, limit=2e-4)


@pytest.mark.parametrize("case", ["dense", "mixture"])
def test_alone_and_among_32(case: str, saved: Any) -> None:
    equal_alone_and_among_32(*saved(case), 2e-4, **ROOMY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States stay float32; the logits are as near to float32's as those of transformers in the same dtype, within 3 x."""
    model = save("dense", tmp_path)
    prompt, runners = make_prompts()[1], list[Any]()
    free = state.StateRunner._free_bytes
    monkeypatch.setattr(state.StateRunner, "_free_bytes", lambda self: runners.append(self) or free(self))
    recorder, sequences, _ = generate(tmp_path, [prompt], dtype=dtype, **ROOMY)
    (ids,), (runner,) = sequences.values(), runners
    right, n = reference_logits(model, ids), len(ids) - 1
    theirs = (reference_logits(model.to(getattr(torch, dtype)), ids) - right)[:n].norm()
    ours = (torch.stack([recorder.every[key] for key in sorted(recorder.every)]) - right[:n]).norm()
    assert ours < 3 * theirs and ours < 0.2 * right.norm()
    assert runner.pool.state.dtype == torch.float32 and runner.pool.past.dtype == getattr(torch, dtype)


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


@pytest.mark.parametrize("size", [1, 5, 64, 77])
def test_chunks_equal_the_loop(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1 to 130 tokens, from a state that is not empty, with decays from almost none to nine tenths."""
    monkeypatch.setattr(state, "CHUNK", size)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 130, d) for d in (12, 12, 9))
    g, beta, start = -torch.logspace(-4, 0.4, 260).view(2, 130, 1), torch.rand(2, 130, 1), torch.randn(2, 12, 9)
    inputs = [state.unit(q), state.unit(k), v, g[:, torch.randperm(130)], beta]
    right, _ = loop(start, *inputs)
    for n in range(1, 131) if size > 1 else (1, 2, 130):
        cut = [x[:, :n] for x in inputs]
        out, after = state.delta_rule(start, *cut)
        torch.testing.assert_close(out.double(), right[:, :n], atol=1e-5, rtol=1e-5)
        if n % 13 == 0 or n == 1:
            torch.testing.assert_close(after.double(), loop(start, *cut)[1], atol=1e-5, rtol=1e-5)


def test_a_decay_that_leaves_nothing() -> None:
    """e^-100 in each of 200 tokens: sums of -20000, whose differences would overflow the wrong way round."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 200, d) for d in (4, 4, 3)] + [torch.full((2, 200, 1), -100.0), torch.full((2, 200, 1), 0.5)]
    for ours, right in zip(state.delta_rule(torch.ones(2, 4, 3), *inputs), loop(torch.ones(2, 4, 3), *inputs), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=1e-5)


def test_the_state_that_comes_in_is_left_alone() -> None:
    start = torch.ones(2, 4, 3)
    state.delta_chunk(start, *(torch.rand(2, 5, n) for n in (4, 4, 3, 1, 1)))
    assert (start == 1).all()


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_in_any_pieces(width: int) -> None:
    """Including pieces shorter than the filter."""
    torch.manual_seed(0)
    x, weight, past = torch.randn(2, 19, 3), torch.randn(3, 1, width), torch.randn(2, width - 1, 3)
    padded = torch.cat([past, x], 1)
    right = torch.stack([(weight[:, 0].T * padded[:, t : t + width]).sum(1) for t in range(19)], 1)
    found = []
    for start, end in pairwise((0, 1, 2, 3, 5, 8, 19)):
        out, past = state.causal_conv(x[:, start:end], past, weight)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1), torch.nn.functional.silu(right))
    assert torch.equal(past, padded[:, -(width - 1) :])


# Mistakes, planted

NET = state.GatedDeltaNet
MISTAKES: dict[str, tuple[str, Any, str, str, str]] = {
    "no decay": ("dense", NET, "forward", "-self.A_log.exp() * F.softplus(a.float() + self.dt_bias)", "0 * a.float()"),
    "no bias of the decay": ("dense", NET, "forward", "a.float() + self.dt_bias", "a.float()"),
    "no softplus": ("dense", NET, "forward", "F.softplus(a.float() + self.dt_bias)", "(a.float() + self.dt_bias)"),
    "every strength 1": ("dense", NET, "forward", "b.float().sigmoid()", "torch.ones_like(g)"),
    "no gate of the output": ("dense", NET, "forward", "* F.silu(z.float())", ""),
    "a sigmoid for silu": ("dense", NET, "forward", "F.silu(z.float())", "z.float().sigmoid()"),
    "the gate before the norm": ("dense", NET, "forward", "self.norm(out.to(x.dtype), None)[0].flatten(1)",
                                 "self.norm(out * F.silu(z.float()).view_as(out), None)[0].flatten(1) / F.silu(z)"),
    "the rows before the last": ("dense", state, "causal_conv", "rows[:, x.shape[1] :]", "rows[:, x.shape[1] - 1 : -1]"),
    "no rows of the past": ("dense", state, "causal_conv", "torch.cat([past, x], 1)", "torch.cat([0 * past, x], 1)"),
    "the filter reversed": ("dense", state, "causal_conv", "rows.mT, weight", "rows.mT, weight.flip(-1)"),
    "no silu after the filter": ("dense", state, "causal_conv", "F.silu(out)", "out"),
    "no l2 norm": ("dense", state, "unit", "(x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()", "0.3"),
    "heads in turns": ("dense", NET, "advance", "t.repeat_interleave(heads // t.shape[2], 2)",
                       "t.repeat(1, 1, heads // t.shape[2], 1)"),
    "linear attention": ("dense", state, "delta_chunk", "v - total.exp() * (k @ state)", "v"),
    "no system": ("dense", state, "delta_chunk", "if k.shape[-2] > 1:", "if False:"),
    "norms are w": ("dense", state, "add_one", "+ 1", ""),
    "no attention gate": ("dense", state.GatedAttention, "forward", " * self.gate(x).sigmoid()", ""),
    "query and gate exchanged": ("dense", state, "read_half", "which]", "1 - which]"),
    "first all queries, then all gates": ("dense", state, "read_half", "unflatten(0, (-1, 2, dim))[:, which].flatten(0, 1)",
                                          "chunk(2)[which]"),
    "experts not renormalised": ("mixture", mixture, "route", "if routing.renormalize:", "if False:"),
    "conv rows not cleared": ("dense", state.StatePool, "clear", "self.past.index_fill_(1, slots, 0)", "pass"),
    "states not cleared": ("dense", state.StatePool, "clear", "self.state.index_fill_(1, slots, 0)", "pass"),
}  # fmt: skip


def worst_error(model: Any, folder: Path, **engine: Any) -> float:
    """The largest difference of a logit; NaN counts as infinite. The pool begins with 0, as the engine makes it."""
    with LLM(str(folder), device="cpu", **engine) as llm:
        runner: Any = llm.engine_core.runner
        hidden: list[Tensor] = []
        runner.model.register_forward_hook(lambda module, args, output: hidden.append(output))
        forward, rows = runner.forward, []

        @torch.inference_mode()
        def noting(batch: ScheduledBatch) -> ScheduledBatchOutput:
            output = forward(batch)
            logits = iter(runner.model.compute_logits(hidden.pop()))
            for i, n, end in zip(batch.req_ids, batch.num_scheduled_tokens, batch.context_lens, strict=True):
                rows.extend((i, position, next(logits)) for position in range(end - n, end))
            return output

        runner.forward = noting
        outs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    right = {out.request_id: reference_logits(model, out.prompt_token_ids + out.token_ids) for out in outs}
    errors = torch.stack([(row - right[i][position]).abs().max() for i, position, row in rows])
    return errors.nan_to_num(math.inf).max().item()


@pytest.mark.parametrize("mistake", ["none", *MISTAKES])
def test_a_mistake_moves_a_logit(mistake: str, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves some logit by more than 1: through chunks, decodes, preemptions and slots used again."""
    case, owner, name, old, new = MISTAKES.get(mistake, ("dense", *[None] * 4))  # type: ignore[misc]
    if owner is not None:
        mutate(monkeypatch, owner, name, old, new)
    error = worst_error(*saved(case), **TIGHT)
    assert error <= 2e-4 if mistake == "none" else error > 1, error


def kept_after_preemption(patch: pytest.MonkeyPatch) -> None:
    """A resumed sequence continues from its old state, which has already seen its tokens."""
    prepare = state.StateRunner.prepare_model
    kept: dict[int, Tensor] = {}

    def bug(self: Any, batch: ScheduledBatch) -> Any:
        begins = batch.context_lens == batch.num_scheduled_tokens
        found = prepare(self, batch)
        for i, row, starts in zip(batch.req_ids, batch.rows, begins, strict=True):
            if starts and i in kept:
                self.pool.state[:, row] = kept[i]
            kept[i] = self.pool.state[:, row]
        return found

    patch.setattr(state.StateRunner, "prepare_model", bug)


def slots_by_place(patch: pytest.MonkeyPatch) -> None:
    """A sequence's place in the batch, which changes when another one ends."""
    prepare = state.StateRunner.prepare_model
    patch.setattr(state.StateRunner, "prepare_model", lambda self, batch: prepare(
        self, type(batch)(**vars(batch) | {"rows": [*range(len(batch.rows))]})))  # fmt: skip


def whole_head_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FamilySpec, "rotated_dim", property(lambda spec: spec.head_dim))


@pytest.mark.parametrize("plant", [kept_after_preemption, slots_by_place, whole_head_turns])
def test_a_larger_mistake_moves_a_logit(plant: Any, saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert worst_error(*saved("dense, biases, tied"), **TIGHT) > 1


def test_query_scale_and_epsilons_show_on_crafted_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm after the state hides the queries' scale, unless its input is as small as its epsilon; likewise for keys."""
    model = make_model("qwen3_5_text", rms_norm_eps=1e-3)
    for layer in model.model.layers[:3]:
        layer.linear_attn.in_proj_qkv.weight.data[64:] *= 0.05
    model.save_pretrained(tmp_path)
    assert worst_error(model, tmp_path, **TIGHT) <= 2e-4
    with monkeypatch.context() as patch:
        mutate(patch, NET, "advance", " * key**-0.5", "")
        assert worst_error(model, tmp_path, **TIGHT) > 1
    for layer in model.model.layers[:3]:
        layer.linear_attn.in_proj_qkv.weight.data[:64] *= 1e-3
    model.save_pretrained(tmp_path)
    assert worst_error(model, tmp_path, **TIGHT) <= 2e-4
    mutate(monkeypatch, state, "unit", "1e-6", "1e-12")
    assert worst_error(model, tmp_path, **TIGHT) > 1


# Slots


class WithStates:
    """A symbolic runner that also keeps a state per slot, as `StateRunner` does, and compares it with all K/V."""

    clears, by_row = True, True

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        held = vars(self).setdefault("held", {})
        tokens, at = batch.scheduled_tokens.tolist(), 0
        counts, lens = batch.num_scheduled_tokens.tolist(), batch.context_lens.tolist()
        assert len(set(batch.rows)) == len(batch.rows) and set(batch.rows) <= set(range(self.config.max_num_seqs))  # type: ignore[attr-defined]
        rows = batch.rows if self.by_row else range(len(counts))
        for row, n, end in zip(rows, counts, lens, strict=True):
            if n == end and self.clears:
                held[row] = 0
            for i in range(n):
                held[row] = symbolic.mix(held.get(row, 0), symbolic.embed(tokens[at + i], end - n + i))
            at += n
        output = super().forward(batch)  # type: ignore[misc]
        for row, table, end in zip(rows, batch.block_tables.tolist(), lens, strict=True):
            values = map(self.layers[0].__getitem__, self._slots(table)[:end])  # type: ignore[attr-defined]
            assert held[row] == reduce(symbolic.mix, values, 0), f"the state in slot {row} is another past's"
        return output


def run_with_states(patch: pytest.MonkeyPatch, trials: int, caching: bool = False, **how: Any) -> Any:
    """`symbolic.run_trial` for some seeds, with states in addition to the K/V."""
    make = symbolic.make_trial

    def made(seed: int) -> symbolic.Trial:
        trial = make(seed)
        hits = trial.config.enable_prefix_caching and caching
        trial.config = trial.config.changed(enable_prefix_caching=hits)
        return trial

    for name in ("SymbolicRunner", "LaunchingSymbolicRunner"):
        patch.setattr(symbolic, name, type(name, (WithStates, getattr(symbolic, name)), how))
    patch.setattr(symbolic, "make_trial", made)
    found = [symbolic.run_trial(s, tight=s % 2 == 0, overlap=s % 3 == 0) for s in range(trials)]
    return reduce(lambda a, b: a + b, found)


def test_slots_under_a_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds, aborts, preemptions, failing steps, and discarded steps: each state belongs to its own sequence."""
    stats = run_with_states(monkeypatch, 400)
    for name in ("preemptions", "failures", "aborts_running", "aborts_waiting", "chunks", "ahead", "put_back"):
        assert stats[name] > 10, name
    assert stats["prefix_hits"] == 0


@pytest.mark.parametrize("how", [{"clears": False}, {"by_row": False}, {"caching": True}], ids=str)
def test_the_fuzz_sees_mistakes(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncleared slots, slots by place in the batch, and prefix caching are noticed."""
    with pytest.raises((AssertionError, KeyError)):
        run_with_states(monkeypatch, 60, **how)


def test_an_engine_under_a_fuzz(tmp_path: Path) -> None:
    """The real runner, in tiny pools: requests that come and go get the texts that they get alone."""
    save("dense", tmp_path, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    rng, alone = random.Random(3), {}
    prompts = [[rng.randrange(300) for _ in range(rng.choice((1, 2, 5, 9, 20)))] for _ in range(12)]
    with LLM(str(tmp_path), device="cpu", **ROOMY) as llm:
        for i, prompt in enumerate(prompts):
            alone[i] = llm.generate(prompt, GREEDY, use_tqdm=False)[0].token_ids
    preemptions = aborted = 0
    for options in ({}, {"overlap": True}, {"interleave_decode": True}, {"enable_mixed_steps": True}):
        tight = {"kv_cache_block_size": 2, "num_kvcache_blocks": 22, "max_num_seqs": 4, "max_num_batched_tokens": 9}
        with LLM(str(tmp_path), device="cpu", **tight | options) as llm:
            seqs: dict[int, tuple[int, Any]] = {}
            scheduler = llm.engine_core.scheduler
            for step in range(300):
                if step < 60 and rng.random() < 0.5:
                    i = rng.randrange(12)
                    request = llm.add_request(prompts[i], GREEDY)
                    seqs[request] = i, scheduler.seqs[request]
                if seqs and rng.random() < 0.05:
                    aborted += llm.abort(rng.choice([*seqs]))
                if llm.step() is None and step > 60:
                    break
            assert not scheduler.seqs and len(seqs) > 10
            preemptions += scheduler.num_preemptions
            for i, seq in seqs.values():
                assert seq.completion_token_ids == alone[i][: len(seq.completion_token_ids)]
                assert seq.leave_reason == "abort" or len(seq.completion_token_ids) == 12
    assert preemptions > 10 and aborted > 0


def test_a_step_that_fails_half_way_leaves_no_trace(saved: Any) -> None:
    """Only some layers have their new states; all sequences restart."""
    with LLM(str(saved("dense")[1]), device="cpu", **ROOMY) as llm:
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

QWEN35_9B: Any = read_family(transformers.Qwen3_5TextConfig())


def test_bytes_of_the_published_shape() -> None:
    assert kvcache_block_bytes(QWEN35_9B, 1, torch.bfloat16) == 32768
    assert state.state_bytes(QWEN35_9B, torch.bfloat16) == 51511296
    assert (QWEN35_9B.kv_layers, QWEN35_9B.kv_shape) == (8, (2, 4, 256))


def test_the_pool_is_what_was_counted(saved: Any) -> None:
    with LLM(str(saved("dense")[1]), device="cpu", **TIGHT) as llm:
        runner: Any = llm.engine_core.runner
        each = state.state_bytes(llm.config.spec, torch.float32)
        assert runner.pool.state.nbytes + runner.pool.past.nbytes == (TIGHT["max_num_seqs"] + 1) * each
        assert runner.kv_cache.shape[0] == 1 and runner.kv_cache.nbytes == runner.block_bytes * TIGHT["num_kvcache_blocks"]


def test_a_batch_without_sequences_changes_no_state(saved: Any) -> None:
    """The dummy step of an idle engine in lockstep (chapter 73b) may run between two steps of live sequences."""
    with LLM(str(saved("mixture")[1]), device="cpu", **TIGHT) as llm:
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
    few, many = (describe(EngineArgs(str(tmp_path), device="cpu", max_num_seqs=n)) for n in (1, 60000))
    assert few["kvcache_bytes_per_token"] == 2 * 2 * 32 * 4
    assert few["state_bytes_per_sequence"] == 3 * (4 * 16 * 24 * 4 + 3 * 160 * 4)
    assert many["fitting_tokens"] <= few["fitting_tokens"]
    assert describe(EngineArgs("tiny", device="cpu"))["state_bytes_per_sequence"] == 0


# What it goes with


@pytest.mark.parametrize("knobs", [
    {"enable_prefix_caching": True}, {"prefix_cache": "radix"}, {"prefix_cache": "hash"}, {"attention": "triton"},
    {"scheduler": "spyre"}, {"tensor_parallel_size": 2}, {"routing": "prefix", "data_parallel_size": 2},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
], ids=str)  # fmt: skip
def test_refused_by_name(knobs: dict[str, Any], tmp_path: Path) -> None:
    """Refused before a weight is read: the folder has none."""
    save("dense", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    name = next(iter(knobs))
    with pytest.raises(ValueError, match=rf"{name}=.* does not go with layers that keep a state: set it to .* \(.*\)"):
        LLM(str(tmp_path), device="cpu", **knobs)


def test_it_cannot_draft(tmp_path: Path) -> None:
    """Refused before its weights are read."""
    save("dense", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot draft: its layers keep a state"):
        LLM("tiny", device="cpu", max_model_len=200, speculative_config={"method": "draft_model", "model": str(tmp_path)})


def test_defaults_that_fit(tmp_path: Path) -> None:
    """Options that were not given are set; given ones that fit are kept."""
    save("dense", tmp_path)
    rows = [row for row in TOGETHER if row.asked == STATE]
    fitting: dict[str, Any] = {name: values[0] for row in rows for name, values in row.needs.items()}
    no_drafts: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 0}}
    caches: list[dict[str, Any]] = [{"prefix_cache": "none"}, {"prefix_cache": None}, {"enable_prefix_caching": False}]
    for given in ({}, fitting | {"data_parallel_size": 2}, no_drafts, *caches):
        config = EngineArgs(str(tmp_path), **given)
        assert {name: getattr(config, name) for name in fitting} == fitting
    assert EngineArgs("tiny").enable_prefix_caching and not isinstance(EngineArgs("tiny").spec, StateSpec)


@pytest.mark.parametrize("knob", ["overlap", "interleave_decode", "enable_mixed_steps", "trace", "engine_process"])
def test_other_rooms_say_the_same(knob: str, saved: Any) -> None:
    _, folder = saved("mixture")
    _, plain, _ = generate(folder, make_prompts(), **TIGHT)
    with LLM(str(folder), device="cpu", **TIGHT | {knob: True}) as llm:
        outs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
    assert [out.prompt_token_ids + out.token_ids for out in outs] == [*plain.values()]


def test_the_log_says_what_is_off(saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "atom_mini"):
        LLM(str(saved("dense")[1]), device="cpu", **TIGHT).close()
    assert "5 states of 24192 bytes; torch's attention, no graphs, no prefix cache" in caplog.text


def test_no_graphs_on_a_gpu(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is `StateRunner`, which records no graphs, on any device."""
    with monkeypatch.context() as patch:
        patch.setattr("atom_mini.model_runner.choose_device", lambda name: torch.device("cuda"))  # as if there were one
        patch.setattr(state, "StateRunner", lambda *args: "ours")
        assert make_runner(EngineArgs(str(saved("dense")[1]), device="cuda")) == "ours"
    small = EngineArgs("tiny", device="cpu", compiled=False, num_kvcache_blocks=8)
    assert type(make_runner(small)) is ModelRunner


# Loading


def wrap(kind: str, folder: Path, **more: Any) -> Any:
    """A decoder in a model with an image encoder, as it is published."""
    torch.manual_seed(0)
    text = {name: n for name, n in SMALL.items() if name != "intermediate_size" or "moe" not in kind}
    if "moe" in kind:
        text |= EXPERTS
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(kind, text_config=text | more, vision_config=vision, tie_word_embeddings=True)
    model = spread_weights(transformers.AutoModelForImageTextToText.from_config(config).eval())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_decoder_in_a_wrapper(kind: str, tmp_path: Path) -> None:
    """Its names have a prefix; vision and MTP are left out; the wrapper's config says that the embedding is the head."""
    model = wrap(kind, tmp_path, mtp_num_hidden_layers=1)
    names = ("fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")
    rewrite(tmp_path, lambda tensors: tensors.update({f"mtp.{name}": torch.ones(2, 2) for name in names}))
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    assert all("language_model" in n for n in load_file(tmp_path / "model.safetensors") if "linear_attn" in n)
    config = EngineArgs(str(tmp_path))
    assert config.spec.tie_word_embeddings and config.spec.dtype == "float32"
    recorder, sequences, _ = generate(tmp_path, make_prompts()[1:3], **ROOMY)
    assert max(recorder.errors(model, sequences).values()) <= 2e-4


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """The experts are stored as in the published files."""
    model = save("mixture", tmp_path)
    rewrite(tmp_path, fuse)
    recorder, sequences, _ = generate(tmp_path, make_prompts()[1:3], **ROOMY)
    assert max(recorder.errors(model, sequences).values()) <= 2e-4


def test_fp8_in_a_wrapper(tmp_path: Path) -> None:
    """Packed in blocks, as the wrapper's config says, and split after unpacking."""
    from test_quantized import save_fp8_twin  # which imports all families

    wrap("qwen3_5", tmp_path / "plain")
    save_fp8_twin(tmp_path, lambda n: n.endswith("_proj.weight") and "visual" not in n)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "plain").eval()
    recorder, sequences, _ = generate(tmp_path / "fp8", make_prompts()[1:3], **ROOMY)
    assert max(recorder.errors(model, sequences).values()) <= 2e-4


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.visual.pos_embed.weight", "model.layers.0.linear_attn.extra"])
def test_what_the_config_does_not_announce_is_named(name: str, tmp_path: Path) -> None:
    save("dense", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)}))
    with pytest.raises(ValueError, match="no place for: .*" + name.split(".")[-1]):
        LLM(str(tmp_path), device="cpu", **TIGHT)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    save("dense", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.linear_attn.dt_bias"))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"lacks 1 weight.*dt_bias"):
        LLM(str(tmp_path), device="cpu", **TIGHT)


@pytest.mark.parametrize(("changes", "words"), [
    ({"attn_output_gate": False}, "attn_output_gate=False"),
    ({"linear_num_key_heads": 3}, "4 value heads cannot share 3 key heads"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method=gptq"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save("dense", tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=words):
        LLM(str(tmp_path), device="cpu")


def test_routing_of_the_mixture() -> None:
    """The config does not say that weights are renormalized; transformers always does it."""
    spec = read_family(transformers.Qwen3_5MoeTextConfig())
    assert spec.routing.renormalize and spec.routing.scoring == "softmax"
    assert spec.experts.is_gated and (spec.experts.count, spec.experts.shared) == (256, 512)
