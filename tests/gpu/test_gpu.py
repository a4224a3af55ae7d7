"""The whole engine on a GPU: the CPU's tokens, graphs and eager steps alike, memory within its share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_family

from atom_mini import LLM, SamplingParams
from atom_mini.gpu.graphs import first_decodes
from atom_mini.scheduling.overlap import PLACEHOLDER

pytestmark = pytest.mark.gpu
PROMPTS = ["Once upon a time", "12 + 7 =", "Ada lives in Rome. Ben lives in Oslo. Where does Ada live?", "Mia has a red cat. " * 20]
WISHES = [SamplingParams(max_tokens=40, temperature=t, seed=5) for t in (0.0, 0.0, 0.8, 1.0)]
SMALL: dict[str, Any] = {"num_kvcache_blocks": 400, "max_num_seqs": 20}


def generate(**options: Any) -> list[list[int]]:
    """The built-in model's tokens, in float32."""
    with LLM("tiny", dtype="float32", **SMALL | options) as llm:
        return [out.token_ids for out in llm.generate(PROMPTS * 5, WISHES * 5, use_tqdm=False)]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    return generate(device="cpu")


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"attention": "torch"}, {"kv_cache_block_size": 1},
                                     {"max_num_batched_tokens": 64}, {"num_kvcache_blocks": 40}, {"overlap": True},
                                     {"overlap": True, "enforce_eager": True},
                                     {"overlap": True, "num_kvcache_blocks": 40}], ids=str)  # fmt: skip
def test_tokens_equal_the_cpus(options: dict[str, Any], on_cpu: list[list[int]]) -> None:
    """Greedy and random requests, replayed, eager and in plain torch, cut into chunks and preempted."""
    assert generate(device="cuda", **options) == on_cpu


def test_a_replay_asks_the_device_for_nothing() -> None:
    """Upload and replay queue up work; the only wait of a step is for the token ids."""
    with LLM("tiny", device="cuda", **SMALL) as llm:
        runner: Any = llm.engine_core.runner
        runner.forward(first_decodes(3))
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner._upload(first_decodes(3), 4)
            runner.graphs[4].replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_launch_waits_for_nothing() -> None:
    """A step is queued behind another one, eager or replayed; only the events of the results are waited for."""
    for options in ({}, {"enforce_eager": True}):
        with LLM("tiny", device="cuda", overlap=True, **SMALL | options) as llm:
            launcher: Any = llm.engine_core.runner
            batch = replace(first_decodes(3), rows=[0, 1, 2])
            launcher.launch(batch)()
            torch.cuda.set_sync_debug_mode("error")
            try:
                under_way = [launcher.launch(replace(batch, scheduled_tokens=np.full(3, PLACEHOLDER))) for _ in range(2)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert all(len(wait().token_ids) == 3 for wait in under_way)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_drafts_change_no_token(drafter: str, eager: bool, on_cpu: list[list[int]]) -> None:
    """Verify steps from graphs and eager, beside a head or a second model on the device; some drafts are kept."""
    wanted = {"method": drafter, "num_speculative_tokens": 3} | ({"model": "tiny"} if drafter == "draft_model" else {})
    with LLM("tiny", device="cuda", dtype="float32", enforce_eager=eager, speculative_config=wanted, **SMALL) as llm:
        outs = llm.generate(PROMPTS * 5, WISHES * 5, use_tqdm=False)
    assert [out.token_ids for out in outs] == on_cpu
    assert sum(out.metrics.get("num_accepted_tokens", 0) for out in outs) > 20


EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "head_dim": 32, **EXPERTS},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 32, "n_shared_experts": 1, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "q_lora_rank": 24, **EXPERTS, **LATENT},
    "qwen3_5_text": {"head_dim": 32, **LINEAR},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_give_the_cpus_tokens(kind: str, tmp_path: Path) -> None:
    """Experts, sinks and windows, latents, states: replayed where there are graphs, chunked, more sequences than one."""
    save_family(kind, tmp_path, **FAMILIES[kind])
    prompts = [[(7 * i + 3 * j) % 300 for j in range(n)] for i, n in enumerate((1, 9, 40, 100))]
    sampling, found = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=1), []
    for device in ("cpu", "cuda"):
        room = {"num_kvcache_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        with LLM(str(tmp_path), device=device, dtype="float32", **room) as llm:  # type: ignore[arg-type]
            outs = llm.generate(prompts, sampling, use_tqdm=False)
        found.append(([out.token_ids for out in outs], torch.tensor([[*x.values()][-1] for o in outs for x in o.logprobs or []])))
    (tokens, exact), (others, close) = found
    assert others == tokens
    torch.testing.assert_close(close, exact, atol=1e-3, rtol=0)
