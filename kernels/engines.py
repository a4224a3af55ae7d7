"""The engine on published shapes with random weights: steps beside their roofline, and the field's common benchmark."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from checkpoints import LLAMA32_1B, QWEN3_06B, SMALL
from timing import Bench, ratio, show, time_limit
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import atom_mini.loading
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.gpu import fused
from atom_mini.models import Linear
from atom_mini.options.build import make_runner
from atom_mini.scheduler import ScheduledBatch
from atom_mini.sequence import SequenceType

QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
LLAMA31_8B = LLAMA32_1B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False, "rope_parameters": LLAMA32_1B["rope_parameters"] | {"factor": 8.0},
}  # fmt: skip
MODELS = {"Qwen3-0.6B": ("qwen3", QWEN3_06B), "Qwen3-4B": ("qwen3", QWEN3_4B), "Llama-3.1-8B": ("llama", LLAMA31_8B)}
TOY = {"toy": ("qwen3", SMALL | {"head_dim": 16, "vocab_size": 10001})}
QWEN3_30B_A3B = QWEN3_06B | {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTURES = {"Qwen3-30B-A3B": ("qwen3_moe", QWEN3_30B_A3B)}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TOY_MIXTURES = {"toy mixture": ("qwen3_moe", TOY["toy"][1] | EIGHT)}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# the least on an H200, and a moonshot; the rest of the table has no aim
SINGLE_STREAM_AIM = 800.0, 1400.0  # tokens/s of one request to Qwen3-0.6B, 128 tokens in and 512 out
FILTERS_AIM = 1 / 1.1, 1 / 1.03  # of a step with Qwen3's own top_k and top_p, what a greedy one takes
COMMON_AIM = 23000.0, 27000.0  # tokens/s of Qwen3-0.6B, beside nano-vLLM's 20,806
PREFILL_AIM = 0.45, 0.55  # of the matrix rate
HIDDEN_AIM = 0.95, 0.98  # of a step of 256 the device is busy
ROOFLINE_AIM, MIXTURE_AIM = 0.70, 0.55  # of the roofline, without a moonshot


def write_config(folder: Path, kind: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    """The only file of a checkpoint that the engine needs once its weights are random."""
    known = {name: value for name, value in shape.items() if value is not None}
    facts = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(known | facts))


def num_params(shape: dict[str, Any]) -> int:
    """Numbers in the matrices of a published shape."""
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    wide = shape["num_experts"] * shape["moe_intermediate_size"] if "num_experts" in shape else shape["intermediate_size"]
    layer = hidden * (2 * (heads + kv_heads) * shape["head_dim"] + 3 * wide)
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return shape["num_hidden_layers"] * layer + tables * shape["vocab_size"] * hidden


@torch.no_grad()
def fill_randomly(model: torch.nn.Module, *_: Any) -> None:
    """Stands in for a weight loader: matrices that keep the size of what they multiply, norms 1, biases 0."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(0 if name.endswith("bias") else 1)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)


@contextmanager
def random_checkpoint(bench: Bench, kind: str, shape: dict[str, Any]) -> Iterator[str]:
    """A folder that atom_mini loads as a model of this shape, its weights made on the device."""
    loader = atom_mini.loading.load_weights
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), kind, shape, bench.dtype)
        atom_mini.loading.load_weights = fill_randomly
        try:
            yield folder
        finally:
            atom_mini.loading.load_weights = loader


@dataclass(frozen=True)
class Model:
    """What a roofline needs to know."""

    weight_bytes: int  # that a decode step reads
    token_bytes: int  # of K/V, over all layers
    layer_params: int  # of the matrices in the layers
    head_params: int
    attention_width: int  # layers x heads x head_dim
    experts: tuple[int, int, int] = (0, 1, 1)  # bytes of all of them; how many in a layer; how many per token

    @classmethod
    def of(cls, runner: Any) -> Model:
        """The figures of the model that a `ModelRunner` holds."""
        model, cfg = runner.model, runner.config.spec
        head = cfg.vocab_size * cfg.hidden_size
        looked_up = 0 if cfg.tie_word_embeddings else head * runner.dtype.itemsize  # a few rows of the table, not all
        inner = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
        width = cfg.num_hidden_layers * cfg.head_dim
        return cls(
            weight_bytes=sum(w.nbytes for w in model.parameters()) - looked_up,
            token_bytes=2 * width * cfg.num_key_value_heads * runner.dtype.itemsize,
            layer_params=inner - (0 if cfg.tie_word_embeddings else head),
            head_params=head,
            attention_width=width * cfg.num_attention_heads,
            experts=cls._experts(model, cfg),
        )

    @staticmethod
    def _experts(model: Any, cfg: Any) -> tuple[int, int, int]:
        if (experts := getattr(cfg, "experts", None)) is None:
            return 0, 1, 1
        size = sum(w.nbytes for n, w in model.named_parameters() if n.endswith(("mlp.gate_up.weight", "mlp.down.weight")))
        return size, experts.count, cfg.routing.top_k

    def decode_bytes(self, live_tokens: int, rows: int = 0) -> int:
        """Every weight once, of the experts those that `rows` tokens are expected to touch; every live K/V byte once."""
        size, count, top_k = self.experts
        return self.weight_bytes - round(size * (1 - top_k / count) ** rows) + self.token_bytes * live_tokens

    def prefill_flops(self, lens: Iterable[int]) -> int:
        """Matrices over all tokens, the head over the last ones, causal attention."""
        lens = list(lens)
        attention = 4 * self.attention_width * sum(n * (n + 1) // 2 for n in lens)
        return 2 * self.layer_params * sum(lens) + 2 * self.head_params * len(lens) + attention


def make_batch(runner: Any, query_lens: list[int], context: int, **sampling: Any) -> ScheduledBatch | None:
    """A step of sequences with `context` tokens each, their blocks scattered; None if the pool is too small."""
    size, blocks, num = runner.config.kv_cache_block_size, runner.num_kvcache_blocks, len(query_lens)
    width = -(-context // size)
    if num * width > blocks:
        return None
    rng = np.random.default_rng(0)
    params = {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0} | sampling
    return ScheduledBatch(
        type=SequenceType.DECODE if max(query_lens) == 1 else SequenceType.PREFILL,
        req_ids=list(range(num)),
        scheduled_tokens=rng.integers(0, runner.config.spec.vocab_size, sum(query_lens)),
        num_scheduled_tokens=np.array(query_lens, dtype=np.int32),
        context_lens=np.full(num, context, dtype=np.int32),
        block_tables=rng.permutation(blocks)[: num * width].reshape(num, width).astype(np.int32),
        is_sampled=np.ones(num, dtype=bool),
        sampling_params=[SamplingParams(**params, seed=i, max_tokens=64, ignore_eos=True) for i in range(num)],
    )


def wall_seconds(bench: Bench, step: Callable[[], Any], number: int, warm_up: int = 3) -> float:
    """Median of `number` steps, each waited for, as the scheduler must before it can plan the next."""
    times = []
    for _ in range(warm_up + number):
        bench.synchronize()
        start = time.perf_counter()
        step()
        bench.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def busy_seconds(bench: Bench, step: Callable[[], Any], number: int = 5) -> float | None:
    """Seconds per step in which the device did something, from the profiler; None where it sees no device."""
    wanted = DeviceType.CPU if bench.dry else DeviceType.CUDA
    activities = [ProfilerActivity.CPU] + ([] if bench.dry else [ProfilerActivity.CUDA])
    with profile(activities=activities) as record:
        for _ in range(number):
            step()
        bench.synchronize()
    events = [
        e for e in record.events() or [] if e.device_type == wanted and not getattr(e, "is_user_annotation", False)
    ]
    covered = covered_length([(e.time_range.start, e.time_range.end) for e in events])
    return covered / 1e6 / number if events else None


def covered_length(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals: kernels may overlap."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def steps(bench: Bench, results: dict[str, Any]) -> None:
    """Decode steps by batch and context, and a large prefill, of every model, through `ModelRunner.forward`."""
    decode_rows: list[list[Any]] = []
    prefill_rows: list[list[Any]] = []
    for name, (kind, shape) in (TOY if bench.dry else MODELS).items():
        if not bench.fits(1.3 * num_params(shape) * bench.dtype.itemsize):
            results[name] = {"skipped": "does not fit"}
            decode_rows.append([name, *[None] * 6, "does not fit"])
            continue
        with bench.guarded(f"steps of {name}", results.setdefault(name, {})):
            model_steps(bench, name, kind, shape, results[name], decode_rows, prefill_rows)
    head = ["decode", "ms", "roofline ms", "of roofline", "tokens/s", "host ms not hidden", "of step", ""]
    show("Decode steps: ModelRunner.forward, all of it (the scheduler is not in it)", head, decode_rows)
    show("Prefill steps", ["", "ms", "TFLOP/s", "of matrix rate", ""], prefill_rows)


def random_runner(bench: Bench, kind: str, shape: dict[str, Any], **room: Any) -> Any:
    """The runner that an engine would have, its pool full of random numbers."""
    options = {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device.type}
    with random_checkpoint(bench, kind, shape) as folder:
        runner = make_runner(EngineArgs(folder, **options, **room))
    for layer in runner.kv_cache:
        layer.normal_()  # what was in the memory before may be no number, and zeros take less power
    return runner


def mixtures(bench: Bench, results: dict[str, Any]) -> None:
    """Decode steps of mixtures of experts beside the bytes of the experts that they are expected to touch."""
    rows: list[list[Any]] = []
    room = {"max_num_seqs": 4, "max_model_len": 64, "num_kvcache_blocks": 16} if bench.dry else {
        "max_num_seqs": 64, "max_model_len": 4096, "max_num_batched_tokens": 4096}  # fmt: skip
    for name, (kind, shape) in (TOY_MIXTURES if bench.dry else MIXTURES).items():
        found = results[name] = dict[str, Any]()
        if not bench.fits(1.2 * num_params(shape) * bench.dtype.itemsize):
            found["skipped"] = "does not fit"
            continue
        with bench.guarded(f"steps of {name}", found):
            runner = random_runner(bench, kind, shape, **room)
            model = Model.of(runner)
            for batch in (1, 2) if bench.dry else (1, 8, 32, 64):
                row = found[f"decode batch {batch}"] = dict[str, Any]()
                with bench.guarded(f"{name} decode step {batch}", row):
                    decode_step(bench, runner, model, batch, 16 if bench.dry else 512, row, False)
                label, share = f"{name} batch {batch}, of roofline", row.get("of_roofline")
                note = bench.aim(label, share, MIXTURE_AIM) if batch > 1 else ""
                rows.append([label, *[row.get(k) for k in ("ms", "roofline_ms", "of_roofline", "tokens_per_second")], note])
    show("Decode steps of mixtures, 512 tokens each", ["", "ms", "roofline ms", "of roofline", "tokens/s", ""], rows)


def model_steps(
    bench: Bench, name: str, kind: str, shape: dict[str, Any], results: dict[str, Any],
    decode_rows: list[list[Any]], prefill_rows: list[list[Any]],
) -> None:  # fmt: skip
    """All steps of one model, whose weights are gone from the device afterwards."""
    room: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "num_kvcache_blocks": 64} if bench.dry else {
        "max_num_seqs": 256, "max_model_len": 16384}  # fmt: skip
    start = time.perf_counter()
    runner = random_runner(bench, kind, shape, **room)
    results["loading_seconds"] = time.perf_counter() - start
    results["engine"] = {k: getattr(runner.config, k) for k in ("attention", "enforce_eager")}
    results["engine"]["num_kvcache_blocks"] = runner.num_kvcache_blocks
    model = Model.of(runner)
    batches, contexts = ((1, 2), (16, 48, 8192)) if bench.dry else ((1, 32, 256), (512, 1024, 8192))
    for batch in batches:
        for context in contexts:
            row = results[f"decode batch {batch} context {context}"] = dict[str, Any]()
            with bench.guarded(f"{name} decode step {batch} x {context}", row):
                profiled = context == contexts[1]
                decode_step(bench, runner, model, batch, context, row, profiled)
            note = row.get("skipped") or aims_of(bench, name, batch, context == contexts[1], row)
            kinds = ("ms", "roofline_ms", "of_roofline", "tokens_per_second", "host_ms", "host_share")
            decode_rows.append([f"{name} batch {batch} context {context}", *[row.get(k) for k in kinds], note])
    if name in ("Qwen3-0.6B", "toy"):
        filtered_steps(bench, name, runner, results)
    if name in ("Llama-3.1-8B", "toy"):
        prefill_steps(bench, name, runner, model, results, prefill_rows)


def decode_step(
    bench: Bench, runner: Any, model: Model, batch: int, context: int, row: dict[str, Any], profiled: bool
) -> None:
    """Time one kind of decode step into `row`; `profiled`: also what of it the device sat idle."""
    scheduled = make_batch(runner, [1] * batch, context)
    if scheduled is None:
        row["skipped"] = "K/V does not fit"
        return
    seconds = wall_seconds(bench, partial(runner.forward, scheduled), 3 if bench.dry else 20)
    least = ratio(model.decode_bytes(batch * context, batch), bench.bandwidth)
    row |= {
        "ms": seconds * 1e3, "roofline_ms": least and least * 1e3, "of_roofline": least and least / seconds,
        "tokens_per_second": batch / seconds,
    }  # fmt: skip
    if profiled and (busy := busy_seconds(bench, partial(runner.forward, scheduled))) is not None:
        row |= {"host_ms": (seconds - busy) * 1e3, "host_share": 1 - busy / seconds}


def filtered_steps(bench: Bench, name: str, runner: Any, results: dict[str, Any]) -> None:
    """A decode step that samples with the filters that Qwen3's checkpoints recommend, beside a greedy one."""
    batch, context = (2, 16) if bench.dry else (256, 1024)
    found = results[f"sampling, batch {batch} context {context}"] = dict[str, Any]()
    with bench.guarded(f"{name} filtered steps", found):
        for label, sampling in {"greedy": {"temperature": 0.0}, "filtered": {"top_k": 20, "top_p": 0.95}}.items():
            scheduled = make_batch(runner, [1] * batch, context, **sampling)
            if scheduled is None:
                found["skipped"] = "K/V does not fit"
                return
            found[f"{label}_ms"] = 1e3 * wall_seconds(bench, partial(runner.forward, scheduled), 3 if bench.dry else 20)
        found["greedy_of_filtered"] = found["greedy_ms"] / found["filtered_ms"]
    note = bench.aim(f"{name} batch {batch}, greedy / filtered", found.get("greedy_of_filtered"), *FILTERS_AIM)
    values = [found.get(k) for k in ("greedy_ms", "filtered_ms", "greedy_of_filtered")]
    show("A step with top_k=20, top_p=0.95", ["", "greedy ms", "filtered ms", "greedy / filtered", ""], [[name, *values, note]])


def aims_of(bench: Bench, name: str, batch: int, is_main: bool, row: dict[str, Any]) -> str:
    """The aims of one line of the table, noted and in words."""
    if not is_main:
        return ""
    if batch == 256:
        share = row.get("host_share")
        return bench.aim(f"{name} batch 256, device busy", None if share is None else 1 - share, *HIDDEN_AIM)
    if batch == 1 and name in ("Llama-3.1-8B", "toy"):
        return bench.aim(f"{name} batch 1, of roofline", row.get("of_roofline"), ROOFLINE_AIM)
    return ""


def prefill_steps(
    bench: Bench, name: str, runner: Any, model: Model, results: dict[str, Any], rows: list[list[Any]]
) -> None:
    """16,384 new tokens at once, as one prompt and as sixteen."""
    for batch, length in ((1, 40), (2, 20)) if bench.dry else ((1, 16384), (16, 1024)):
        label = f"prefill {batch} x {length}"
        row = results[label] = dict[str, Any]()
        with bench.guarded(f"{name} {label}", row):
            scheduled = make_batch(runner, [length] * batch, length)
            if scheduled is None:
                row["skipped"] = "K/V does not fit"
                continue
            seconds = wall_seconds(bench, partial(runner.forward, scheduled), 5, warm_up=2)
            rate = model.prefill_flops([length] * batch) / seconds
            row |= {
                "ms": seconds * 1e3,
                "TFLOP_per_second": rate / 1e12,
                "of_matrix_rate": ratio(rate, bench.matrix_rate),
            }
        note = bench.aim(f"{name} {label}, of matrix rate", row.get("of_matrix_rate"), *PREFILL_AIM)
        rows.append([f"{name} {label}", row.get("ms"), row.get("TFLOP_per_second"), row.get("of_matrix_rate"), note])


@dataclass(frozen=True)
class Trace:
    """The common benchmark's requests: prompts, and how many tokens each wants."""

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def common(cls, num: int = 256, longest: int = 1024, least: int = 100) -> Trace:
        """Drawn in the order in which nano-vLLM's benchmark draws them, so that the totals are its totals."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(least, longest))] for _ in range(num)]
        trace = cls(prompts, [rng.randint(least, longest) for _ in range(num)])
        assert num != 256 or (trace.num_inputs, trace.num_outputs) == (142_827, 133_966), "not the common trace"
        return trace

    @classmethod
    def toy(cls) -> Trace:
        """A few short requests, for dry runs."""
        return cls.common(num=4, longest=12, least=4)

    @property
    def num_inputs(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_outputs(self) -> int:
        return sum(self.outputs)

    def ideal_seconds(self, model: Model, bandwidth: float, matrix_rate: float) -> float:
        """All prompts at once at the matrix rate, then a step per token: weights once, every live K/V byte once."""
        lens = np.array([len(p) for p in self.prompts])
        outputs, total = np.array(self.outputs), 0
        for i in range(1, max(self.outputs)):
            running = outputs > i
            total += model.decode_bytes(int((lens[running] + i).sum()))
        return total / bandwidth + model.prefill_flops(lens.tolist()) / matrix_rate


def common(bench: Bench, results: dict[str, Any], overlap: bool = False) -> None:
    """Output tokens per second of wall time on the common benchmark, through `LLM.generate`."""
    trace = Trace.toy() if bench.dry else Trace.common()
    name, (kind, shape) = next(iter((TOY if bench.dry else MODELS).items()))
    room: dict[str, Any] = {"max_model_len": 64, "num_kvcache_blocks": 64} if bench.dry else {"max_model_len": 4096}
    options = {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device.type, "overlap": overlap}
    with random_checkpoint(bench, kind, shape) as folder, LLM(folder, **options, **room) as llm:
        warm = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4)
        llm.generate([[i] * 20 for i in range(1, 9)], warm, use_tqdm=False)
        before = llm.metrics.prefill_seconds, llm.metrics.decode_seconds, llm.metrics.num_steps
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in trace.outputs]
        bench.synchronize()
        start = time.perf_counter()
        with time_limit(180):
            outs = llm.generate(trace.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(out.token_ids) for out in outs] == trace.outputs, "not every request got its tokens"
        model = Model.of(getattr(llm.engine_core.runner, "runner", llm.engine_core.runner))
        prefill, decode = llm.metrics.prefill_seconds - before[0], llm.metrics.decode_seconds - before[1]
        num_steps = llm.metrics.num_steps - before[2]
    bandwidth, rate = bench.bandwidth, bench.matrix_rate
    ideal = trace.ideal_seconds(model, bandwidth, rate) if bandwidth and rate else None
    results |= {
        "model": name, "requests": len(trace.prompts), "input_tokens": trace.num_inputs,
        "output_tokens": trace.num_outputs, "seconds": seconds, "tokens_per_second": trace.num_outputs / seconds,
        "ideal_tokens_per_second": ideal and trace.num_outputs / ideal, "of_ideal": ideal and ideal / seconds,
        "prefill_seconds": prefill, "decode_seconds": decode, "steps": num_steps,
    }  # fmt: skip
    label = f"common benchmark on an H200, overlap={overlap}, tokens/s"
    note = bench.aim(label, results["tokens_per_second"], *COMMON_AIM)
    kinds = ("tokens_per_second", "ideal_tokens_per_second", "of_ideal", "seconds", "prefill_seconds", "decode_seconds")
    head = ["", "tokens/s", "ideal", "of ideal", "s", "prefill s", "decode s", ""]
    title = f"Common benchmark: {len(trace.prompts)} requests, {trace.num_inputs} + {trace.num_outputs} tokens"
    show(title, head, [[f"atom_mini, {name}, overlap={overlap}", *[results[k] for k in kinds], note]])


LOADS = (1, 8, 32, 256)  # requests at once, of 128 tokens in and 256 out each


def load(bench: Bench, requests: int) -> tuple[list[list[int]], int]:
    """(prompts that share no beginning, how many tokens each wants) of so many requests."""
    length, count = (8, 3) if bench.dry else (128, 256)
    return [[1 + i] * length for i in range(requests)], count


def loads_of(bench: Bench) -> tuple[int, ...]:
    return (1, 2) if bench.dry else LOADS


def rate(bench: Bench, generate: Callable[[list[list[int]], int], Any], requests: int) -> float:
    """Output tokens per second of wall time, prompts included; `generate(prompts, tokens of each)` waits for all."""
    prompts, count = load(bench, requests)
    start = time.perf_counter()
    generate(prompts, count)
    bench.synchronize()
    return requests * count / (time.perf_counter() - start)


def rates(bench: Bench, results: dict[str, Any]) -> None:
    """Tokens per second of a few and of many requests at once, plain and overlapped."""
    name, (kind, shape) = next(iter((TOY if bench.dry else MODELS).items()))
    options: dict[str, Any] = {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device.type}
    options |= {"max_model_len": 64 if bench.dry else 1024, "enable_prefix_caching": False}
    options |= {"num_kvcache_blocks": 64} if bench.dry else {}
    rows = []
    for is_ahead in (False, True):
        row = results["overlapped" if is_ahead else "plain"] = dict[str, Any]()
        with (
            bench.guarded(f"rates with overlap={is_ahead}", row),
            random_checkpoint(bench, kind, shape) as folder,
            LLM(folder, **options, overlap=is_ahead) as llm,
        ):
            def generate(prompts: list[list[int]], count: int, llm: LLM = llm) -> None:
                llm.generate(prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count), use_tqdm=False)

            generate(load(bench, 2)[0], 2)
            for requests in loads_of(bench):
                with time_limit(60):
                    row[str(requests)] = rate(bench, generate, requests)
        rows.append([f"{name}, overlap={is_ahead}", *[row.get(str(n)) for n in loads_of(bench)]])
    show("Tokens per second", ["", *[f"{n} requests" for n in loads_of(bench)]], rows)


EARLY = "fused layers, launched early"  # on Hopper; elsewhere this row repeats the one before
SINGLE_RUNS: dict[str, dict[str, bool]] = {
    "overlap=False": {"overlap": False}, "overlap=True": {"overlap": True},
    "fused layers": {"overlap": True, "fuse_layers": True}, EARLY: {"overlap": True, "fuse_layers": True},
}  # fmt: skip


def single(bench: Bench, results: dict[str, Any]) -> None:
    """One request through `LLM.generate`: the time to its first token, and its tokens per second."""
    name, (kind, shape) = next(iter((TOY if bench.dry else MODELS).items()))
    length, count = (8, 6) if bench.dry else (128, 512)
    options: dict[str, Any] = {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device.type}
    options |= {"max_model_len": 2 * (length + count), "max_num_seqs": 4}
    params, rows = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count), []
    for kind_of_run, extra in SINGLE_RUNS.items():
        row = results[kind_of_run] = dict[str, Any]()
        with (
            bench.guarded(f"one request with {kind_of_run}", row),
            random_checkpoint(bench, kind, shape) as folder,
            patch.object(fused, "START_EARLY", kind_of_run == EARLY),
            LLM(folder, **options, **extra) as llm,
        ):
            for first in (1, 2):  # the first one warms up; they share no prefix
                out = llm.generate([[first] * length], params, use_tqdm=False)[0]
            row |= {"ttft_ms": 1e3 * out.ttft, "tokens_per_second": len(out.token_ids) / out.latency}
        label, speed = f"{name}, one request, {kind_of_run}", row.get("tokens_per_second")
        note = bench.aim(f"{label}, tokens/s", speed, *SINGLE_STREAM_AIM) if extra["overlap"] else ""
        rows.append([label, row.get("ttft_ms"), speed, note])
    show(f"One request: {length} tokens in, {count} out", ["", "first token ms", "tokens/s", ""], rows)


def overlap(bench: Bench, results: dict[str, Any]) -> None:
    """The common benchmark a step ahead; then, with and without, how much of a decode of 256 the device computes."""
    with bench.guarded("common benchmark a step ahead", results.setdefault("common", {})):
        common(bench, results["common"], overlap=True)
    name, (kind, shape) = next(iter((TOY if bench.dry else MODELS).items()))
    count, length = (2, 20) if bench.dry else (256, 1024)
    options: dict[str, Any] = {"dtype": str(bench.dtype).removeprefix("torch."), "device": bench.device.type}
    options |= {"max_model_len": 4 * length, "max_num_seqs": count}
    params, rows = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length), []
    for is_ahead in (False, True):
        row = results[f"overlap={is_ahead}"] = dict[str, Any]()
        with (
            bench.guarded(f"decodes with overlap={is_ahead}", row),
            random_checkpoint(bench, kind, shape) as folder,
            LLM(folder, **options, overlap=is_ahead) as llm,
        ):
            for i in range(count):
                llm.add_request([i % 1000] * length, params)
            while len(llm.engine_core.scheduler.waiting) or llm.metrics.num_decode_tokens < 4 * count:
                llm.step()
            number, start = 4 if bench.dry else 40, time.perf_counter()
            for _ in range(number):
                llm.step()
            row["ms"] = 1e3 * (time.perf_counter() - start) / number
            bench.synchronize()  # or the step that is under way would be counted too
            if (busy := busy_seconds(bench, llm.step)) is not None:
                row |= {"busy_ms": 1e3 * busy, "device_busy": 1e3 * busy / row["ms"]}
        label, share = f"{name}, {count} decodes, overlap={is_ahead}", row.get("device_busy")
        note = bench.aim(f"{label}, device busy", share, *HIDDEN_AIM) if is_ahead else ""
        rows.append([label, row.get("ms"), row.get("busy_ms"), share, note])
    show("Overlap: a whole step of the engine, scheduler and all", ["", "ms", "device busy ms", "share", ""], rows)
