"""The common benchmark through others: transformers' continuous batching, and nano-vLLM from the user's checkout."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
import triton
import triton.language as tl
from checkpoints import CONFIGS, QWEN3_06B
from engines import MODELS, TOY, Trace, fill_randomly, load, loads_of, rate, write_config
from timing import Bench, show, time_limit
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

TRANSFORMERS_SECONDS = 45.0  # of generation; making the model and its graphs comes on top


def report(title: str, results: dict[str, Any]) -> None:
    """One line for one engine."""
    row = [title, results["tokens_per_second"], results["seconds"], results["finished"], results["requests"]]
    show(f"Common benchmark: {title}", ["", "tokens/s", "s", "finished", "of requests"], [row])


def continuous_batching(bench: Bench, results: dict[str, Any]) -> None:
    """transformers' continuous batching on the same requests, as far as it comes in the time it is given."""
    trace = Trace.toy() if bench.dry else Trace.common()
    kind, shape = next(iter((TOY if bench.dry else MODELS).values()))
    with torch.device(bench.device):
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](**shape), dtype=bench.dtype).eval()
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "eos_token_id": -1, "pad_token_id": 0}
    # no flash attention: it would be fetched, and the machine may have no network
    options: dict[str, Any] = {"allow_block_sharing": False, "auto_switch_to_flash": False}
    if bench.dry:
        options |= {"num_blocks": 16, "max_batch_tokens": 64}
    known = {f.name for f in fields(ContinuousBatchingConfig)}
    config = ContinuousBatchingConfig(**{k: v for k, v in options.items() if k in known})
    with model.continuous_batching_context_manager(
        GenerationConfig(**sampling), continuous_batching_config=config, timeout=20
    ) as manager:
        seconds, tokens, finished = drain(manager, trace, TRANSFORMERS_SECONDS)
    results |= {
        "transformers": transformers.__version__, "attention": model.config._attn_implementation,
        "requests": len(trace.prompts), "finished": finished, "output_tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }  # fmt: skip
    report("transformers continuous batching", results)


def drain(manager: Any, trace: Trace, budget: float) -> tuple[float, int, int]:
    """(seconds, tokens, requests finished) until all are done or the time is up; what is unfinished counts too."""
    start, counts, finished = time.perf_counter(), dict[str, int](), 0
    pairs = zip(trace.prompts, trace.outputs, strict=True)
    ids = [manager.add_request(prompt, max_new_tokens=n, streaming=True) for prompt, n in pairs]
    while finished < len(ids) and time.perf_counter() - start < budget:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("continuous batching stopped before all requests were finished")
            continue
        if result.error is not None:
            raise RuntimeError(f"continuous batching: {result.error}")
        counts[result.request_id] = len(result.generated_tokens)
        finished += result.is_finished()
    seconds = time.perf_counter() - start
    for request_id in ids if finished < len(ids) else ():
        manager.cancel_request(request_id)
    return seconds, sum(counts.values()), finished


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lens_ptr, table_ptr, table_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """One query per sequence over a paged cache [N, S, K, D], a program per sequence and K/V head."""
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    at = ((seq * KV_HEADS + kv_head) * GROUP + rows)[:, None] * DIM + dims[None, :]
    valid = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    q, length = tl.load(q_ptr + at, mask=valid, other=0.0), tl.load(lens_ptr + seq)
    acc, total = tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    for start in range(0, length, KEYS):
        n = start + keys
        block = tl.load(table_ptr + seq * table_stride + n // BLOCK_SIZE, mask=n < length, other=0).to(tl.int64)
        place = ((block * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * DIM + dims[None, :]
        k = tl.load(k_ptr + place, mask=(n < length)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((n < length)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        v = tl.load(v_ptr + place, mask=(n < length)[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total, top = total * shrink + tl.sum(weights, 1), new_top
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, softmax_scale: float,
    causal: bool = True,
) -> Tensor:  # fmt: skip
    """flash-attn's function for one query per sequence, `q` [B, 1, H, D] and caches [N, S, K, D]; fit for a graph."""
    batch, _, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group, q = heads // kv_heads, q.contiguous()
    out = torch.empty_like(q)
    decode_kernel[(batch, kv_heads)](
        q, k_cache, v_cache, out, cache_seqlens, block_table, block_table.stride(0), softmax_scale * 1.4426950408889634,
        kv_heads, group, max(16, triton.next_power_of_2(group)), dim, block_size, 64, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool = True, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """flash-attn's function for prompts without a cached beginning, through torch: `q` [T, H, D] -> [T, H, D]."""
    if block_table is not None:
        raise ValueError("the stand-in for flash-attn takes no cached prefix: use a trace whose prompts share none")
    group, outs, ends = q.shape[1] // k.shape[1], [], cu_seqlens_q.tolist()
    for begin, end in pairwise(ends):
        queries, keys, values = (t[begin:end].transpose(0, 1)[None] for t in (q, k, v))
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        outs.append(F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=softmax_scale)[0])
    return torch.cat([out.transpose(0, 1) for out in outs])


def stand_in_for_flash_attention() -> str:
    """Put our two functions where nano-vLLM looks for flash-attn, unless the real one is installed; says which."""
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn"
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    sys.modules["flash_attn"] = module
    return "stand-ins: torch's fused attention for prompts, a plain Triton kernel without split keys for decoding"


def import_nano_vllm(checkout: Path | None) -> Any:
    """nano-vLLM from the user's checkout, or as it is installed; what it reads from disk is replaced: weights and tokeniser."""
    if checkout is not None:
        if not (checkout / "nanovllm").is_dir():
            raise ValueError(f"{checkout} has no folder nanovllm: pass a checkout of nano-vLLM")
        sys.path.insert(0, str(checkout))
    nano: Any = importlib.import_module("nanovllm")
    runner: Any = importlib.import_module("nanovllm.engine.model_runner")
    engine: Any = importlib.import_module("nanovllm.engine.llm_engine")
    qwen: Any = importlib.import_module("nanovllm.models.qwen3")
    if getattr(sys.modules.get("flash_attn"), "__spec__", None) is None:
        sys.modules.pop("flash_attn", None)  # the stand-in: no other import must find it
    runner.load_model = fill_randomly
    tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda ids: "", encode=lambda text: [0])
    engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *a, **k: tokenizer)
    rope = qwen.get_rope  # transformers 5 says "no scaling" with a dictionary, which nano-vLLM takes for one
    qwen.get_rope = lambda *args, rope_scaling=None, **options: rope(*args, **options)
    return nano


def nano_vllm(bench: Bench, results: dict[str, Any], checkout: Path | None) -> None:
    """nano-vLLM on the same loads and requests, if it is installed or the user has given a checkout."""
    if checkout is None and importlib.util.find_spec("nanovllm") is None:
        results["skipped"] = "not run: not installed, and no checkout given (--nano-vllm PATH)"
        print(f"\nCommon benchmark: nano-vLLM {results['skipped']}")
        return
    trace = Trace.toy() if bench.dry else Trace.common()
    shape = next(iter(TOY.values()))[1] if bench.dry else QWEN3_06B
    attention = stand_in_for_flash_attention()
    nano = import_nano_vllm(checkout)
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), "qwen3", shape, bench.dtype)
        llm = nano.LLM(folder, enforce_eager=bench.dry, max_model_len=64 if bench.dry else 4096)

    def generate(prompts: list[list[int]], count: int) -> None:
        params = nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count)
        llm.generate(prompts, [params] * len(prompts), use_tqdm=False)

    generate(load(bench, 2)[0], 4)
    found = results["rates"] = dict[str, float]()
    for requests in loads_of(bench):
        with time_limit(60):
            found[str(requests)] = rate(bench, generate, requests)
    params = [nano.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in trace.outputs]
    start = time.perf_counter()
    with time_limit(120):
        llm.generate([list(p) for p in trace.prompts], params, use_tqdm=False)
        bench.synchronize()
    seconds = time.perf_counter() - start
    results |= {
        "attention": attention, "requests": len(params), "finished": len(params), "output_tokens": trace.num_outputs,
        "seconds": seconds, "tokens_per_second": trace.num_outputs / seconds,
    }  # fmt: skip
    report("nano-vLLM", results)
