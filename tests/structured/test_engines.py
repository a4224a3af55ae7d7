"""Requests with masks beside others, in every engine: the same tokens as in an engine that runs one request at a time."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from test_interrupt import Tripwire
from test_mtp import save_module
from test_together import DEPLOYED, ROWS, SMALL, whole

from atom_mini import LLM, Config, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance")
S = StructuredOutputsParams
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}, "required": ["a", "b"]}
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": S(json=PERSON)}, {"structured_outputs": S(regex="[a-z ]{3,30}")}, {"bad_words": ["the", " was", "9"]},
    {"structured_outputs": S(choice=["yes", "no", "perhaps not"]), "min_tokens": 3}, {"logit_bias": {17: 5.5, 30: -4.0}},
    {"structured_outputs": S(grammar='start: "(" start ")" | "x"'), "presence_penalty": 0.5},
    {"allowed_token_ids": [*range(40, 300)]},
    {"structured_outputs": S(json_object=True), "repetition_penalty": 1.3},
    {"structured_outputs": S(regex="([0-9]{3} )+"), "stop": "7"},
]  # fmt: skip
PROMPTS: list[Any] = ["12 + 7 =", "Once upon a time", [5, 6, 7] * 10, [5, 6, 7] * 10 + [8]]


def drawn(seed: int, count: int, most: int) -> list[tuple[Any, SamplingParams]]:
    """Prompts and parameters: every second request has a mask or a bias; some are greedy, some have two answers."""
    rng = random.Random(seed)
    found: list[tuple[Any, SamplingParams]] = []
    for i in range(count):
        hot = rng.random() < 0.6
        params = SamplingParams(temperature=1.0 if hot else 0.0, seed=rng.randrange(99), max_tokens=rng.randrange(1, most))
        if i % 2:
            more = rng.choice(FORMS)
            most_tokens = max(params.max_tokens or 0, more.get("min_tokens", 0))
            params = replace(params, max_tokens=most_tokens, **more)
        found.append((rng.choice(PROMPTS), params))
    return found


def serve(llm: LLM, asked: list[tuple[Any, SamplingParams]]) -> list[tuple[list[int], str]]:
    prompts, params = [list(x) for x in zip(*asked, strict=True)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    blocks = getattr(llm.engine_core.scheduler, "block_manager", None)
    assert blocks is None or blocks.num_free_blocks == llm.config.num_kvcache_blocks
    return [(list(out.token_ids), out.finish_reason) for out in outs]


def one_layer(folder: Path) -> Path:
    """A small model with the built-in one's tokenizer, for Triton's interpreter."""
    save_checkpoint("qwen3", folder, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
                    max_position_embeddings=320, vocab_size=958, eos_token_id=0)  # fmt: skip
    with_tokenizer(folder)
    return folder


def with_tokenizer(folder: Path) -> str:
    """The folder, with the built-in model's tokenizer."""
    home = Config("tiny").folder
    assert home is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(home / name, folder)
    return str(folder)


@cache
def one_at_a_time(seed: int, count: int, most: int, model: str, quantized: bool) -> list[tuple[list[int], str]]:
    options: dict[str, Any] = {"quantization": "int8", "compiled": False} if quantized else {"attention": "torch"}
    with LLM(model, **SMALL | options | {"enable_prefix_caching": False}) as llm:
        return [serve(llm, [one])[0] for one in drawn(seed, count, most)]


def without_overlap(options: dict[str, Any]) -> dict[str, Any]:
    """A mask needs the newest token, so a step ahead is refused (see `test_forms`)."""
    return {name: value for name, value in options.items() if name != "overlap"}


@pytest.mark.parametrize("number", [n if n % 3 == 0 else pytest.param(n, marks=pytest.mark.slow) for n in range(len(ROWS))])
def test_every_engine_gives_the_same_tokens(number: int, tmp_path: Path) -> None:
    options = without_overlap(ROWS[number])
    model, count, most = "tiny", 24, 24
    if options.get("attention") == "triton":
        pytest.importorskip("triton")
        model, count, most = str(one_layer(tmp_path)), 8, 5
    wanted = one_at_a_time(number, count, most, model, bool(options.get("quantization")))
    with LLM(model, **(SMALL | whole(options))) as llm:
        assert serve(llm, drawn(number, count, most)) == wanted


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEPLOYED)))
def test_masks_in_other_processes(number: int) -> None:
    options = without_overlap(DEPLOYED[number])
    wanted = one_at_a_time(number, 16, 16, "tiny", bool(options.get("quantization")))
    with LLM("tiny", **(SMALL | whole(options))) as llm:
        assert serve(llm, drawn(number, 16, 16)) == wanted


TIGHT: list[dict[str, Any]] = [
    {"num_kvcache_blocks": 12, "kv_cache_block_size": 8, "max_model_len": 64, "max_num_batched_tokens": 16},
    {"num_kvcache_blocks": 12, "kv_cache_block_size": 8, "max_model_len": 64, "prefix_cache": "radix", "enable_mixed_steps": True},
    {"num_kvcache_blocks": 14, "kv_cache_block_size": 8, "max_model_len": 64,
     "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
]  # fmt: skip


@pytest.mark.parametrize("options", TIGHT, ids=["chunks", "mixed", "drafts"])
def test_preempted_requests_go_on_with_their_masks(options: dict[str, Any]) -> None:
    with LLM("tiny", device="cpu", max_num_seqs=8, **options) as llm:
        asked = [(prompt, replace(params, max_tokens=30, min_tokens=0)) for prompt, params in drawn(7, 20, 24)]
        found = serve(llm, asked)
        assert llm.engine_core.scheduler.num_preemptions > 0
    with LLM("tiny", **SMALL) as alone:
        assert found == [serve(alone, [one])[0] for one in asked]


def with_mtp(folder: Path) -> str:
    """A random model with a layer for MTP and the built-in model's tokenizer."""
    save_module("GLM-4.5", folder, vocab_size=958, eos_token_id=0, max_position_embeddings=320)
    return with_tokenizer(folder)


DRAFTS: dict[str, dict[str, Any]] = {
    "head": {"method": "eagle3", "num_speculative_tokens": 3},
    "layer": {"method": "mtp", "num_speculative_tokens": 2},
    "model": {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3},
    "lookup": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_every_drafter_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    """The rows of a step are sampled from masked scores, and a draft that a mask bars is not the token of its row."""
    model = with_mtp(tmp_path) if kind == "layer" else "tiny"
    asked = drawn(11, 24, 24)
    with LLM(model, **SMALL | {"dtype": "float32"}) as plain:
        wanted = [serve(plain, [one])[0] for one in asked]
    with LLM(model, **SMALL | {"dtype": "float32"}, speculative_config=DRAFTS[kind]) as llm:
        assert serve(llm, asked) == wanted
        assert llm.engine_core.scheduler.spec_stats.accepted.total() > 0


@pytest.mark.parametrize("draft_sampling", [False, True])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.filterwarnings("ignore:request")
def test_a_request_without_a_token_fails_alone(kind: str, draft_sampling: bool, tmp_path: Path) -> None:
    """With drafts, too, it ends with "error" where no token is left, and the request beside it goes on."""
    if draft_sampling and kind != "model":
        pytest.skip("only a draft model draws")
    model = with_mtp(tmp_path) if kind == "layer" else "tiny"
    beside = SamplingParams(max_tokens=12, temperature=0)
    drafts = DRAFTS[kind] | ({"draft_sampling": True} if draft_sampling else {})
    with LLM(model, **SMALL | {"dtype": "float32"}, speculative_config=drafts) as llm:
        (wanted,) = serve(llm, [("Once", beside)])
        for hot in (0.0, 1.0):
            stuck = SamplingParams(structured_outputs=S(choice=["abc"]), bad_words=["c"], temperature=hot, seed=1)
            never = SamplingParams(structured_outputs=S(regex="1x"), allowed_token_ids=[19], temperature=hot)
            found = serve(llm, [("x", stuck), ("Once", beside), ("x", never)])
            assert [reason for _, reason in found] == ["error", wanted[1], "error"] and found[1] == wanted


def test_forms_with_drafts_are_accepted_drafts_too() -> None:
    """Prompt lookup drafts what a form has repeated, and its masks are those of the drafted text."""
    form = S(regex="(abc ){8}")
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM("tiny", **SMALL, speculative_config=drafts) as llm, LLM("tiny", **SMALL) as plain:
        out, wanted = (one.generate("x", params, use_tqdm=False)[0] for one in (llm, plain))
        assert out.token_ids == wanted.token_ids and out.text == 8 * "abc "
        assert out.metrics["num_accepted_tokens"] > 5


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_forced_token_is_a_draft(kind: str, tmp_path: Path) -> None:
    """It is never rejected. A draft model keeps keys and values of its own drafts, so there it is none."""
    model = with_mtp(tmp_path) if kind == "layer" else "tiny"
    text = "Greta has 12 apples, and Leo has 3. "
    params = SamplingParams(temperature=0, max_tokens=90, structured_outputs=S(choice=[text + "Yes.", text + "No."]))
    with LLM(model, **SMALL | {"dtype": "float32"}) as plain:
        (wanted,) = plain.generate("?", params, use_tqdm=False)
    with LLM(model, **SMALL | {"dtype": "float32"}, speculative_config=DRAFTS[kind]) as llm:
        (out,) = llm.generate("?", params, use_tqdm=False)
        stats = llm.engine_core.scheduler.spec_stats
    assert out.token_ids == wanted.token_ids and out.text.startswith(text)
    if kind != "model":
        assert stats.tokens_per_step > 0.7 * (1 + DRAFTS[kind]["num_speculative_tokens"]), stats


def test_interrupted_at_any_line() -> None:
    """Ctrl-C in a step with masks: the engine rolls back, and the answers are those without it."""
    asked = [(prompt, replace(params, max_tokens=6, min_tokens=0)) for prompt, params in drawn(3, 6, 8)]
    prompts, params = [list(x) for x in zip(*asked, strict=True)]
    with LLM("tiny", **SMALL) as llm:
        wanted = serve(llm, asked)
        core = llm.engine_core
        for at in range(1, 4000, 211):
            requests = llm._prepare(prompts, params)
            llm._add(requests)
            wire = Tripwire(at)
            wire.run(lambda: core.step() and core.step())
            while llm.step():
                pass
            assert [r.seq.completion_token_ids for r in requests] == [tokens for tokens, _ in wanted], at
            assert core.scheduler.block_manager.num_free_blocks == llm.config.num_kvcache_blocks


@pytest.mark.slow
def test_a_recorded_step_samples_with_masks(tmp_path: Path) -> None:
    """By its own recording, if masks are all that its requests ask for; the tokens are those of torch."""
    pytest.importorskip("triton")
    import test_graphs as graphs
    from recording import graph_runner, load_recorded_graph

    from atom_mini.gpu.graphs import DeviceGraph, SamplingArrays

    only, hot = {"allowed_token_ids": [*range(3, 60, 7)]}, {"temperature": 1.0, "top_k": 3}
    form: dict[str, Any] = {"structured_outputs": S(choice=["yes"])}
    cases = (only, True), (form, True), (only | hot, True), (only | {"logprobs": 1}, False), (only | {"min_tokens": 2}, False)
    for more, is_masked in cases:
        arrays = SamplingArrays([SamplingParams(), SamplingParams(**more)])
        assert not arrays.is_simple and arrays.is_masked is is_masked, more
    plain = SamplingArrays([SamplingParams(), SamplingParams(**hot)])
    assert plain.is_simple and not plain.is_masked
    folder = graphs.save_one_layer(tmp_path)
    runner = graph_runner(graphs.make_config(folder), DeviceGraph if graphs.ON_GPU else load_recorded_graph())
    replays: list[int] = []
    for size, graph in runner.masked.items():
        graph.replay = lambda size=size, replay=graph.replay: (replays.append(size), replay())  # type: ignore[method-assign]
    options: list[dict[str, Any]] = [{}, only, only | hot, {"allowed_token_ids": [5]}, hot]
    found, _ = graphs.run(runner, options, max_tokens=6)
    wanted, _ = graphs.run(graphs.plain_runner(folder), options, max_tokens=6)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted] and {*replays} >= {2, 3}
    assert {*found[3][0]} == {5} and {*found[1][0], *found[2][0]} <= {*only["allowed_token_ids"]}
    count = len(replays)
    graphs.run(runner, [{}, hot], max_tokens=3)
    assert len(replays) == count, "a batch without masks replays nothing more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_draws_nothing_behind_a_mask(dtype: torch.dtype) -> None:
    """Rows of minus infinity but for a few tokens, with and without filters, in any chunk; a row without any token
    is marked as broken."""
    pytest.importorskip("triton")
    from test_sampling_kernels import DEVICE

    from atom_mini.gpu.sampling_kernels import KernelSampler
    from atom_mini.sampler import Sampler, SamplingMetaData, uploads_to

    logits = torch.randn(24, 958, generator=torch.Generator().manual_seed(1))
    allowed = torch.rand(24, 958, generator=torch.Generator().manual_seed(2)) < 0.01
    allowed[0] = False
    allowed[1] = torch.arange(958) == 957
    masked = logits.masked_fill(~allowed, float("-inf")).to(dtype).float().to(DEVICE)
    filters: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "top_k": 50}]
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, **filters[i % 4]) for i in range(24)]
    meta = SamplingMetaData.pack(params, torch.arange(24).numpy(), 958, uploads_to(torch.device(DEVICE)))
    found = KernelSampler()(masked.clone(), meta).tolist()
    assert found[0] == -1 and found[1] == 957
    assert all(allowed[row, token] for row, token in enumerate(found) if row)
    plain = Sampler()(masked.clone(), meta).tolist()
    assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 23
