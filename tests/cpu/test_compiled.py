"""A compiled decode gives torch's logits and the plain engine's tokens, the same bits with any number of threads, and is
off where it does not apply."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import is_empty, save_checkpoint
from test_interrupt import Tripwire

from atom_mini import LLM, EngineArgs, SamplingParams

pytest.importorskip("numba")
SMALL: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 200}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, one K/V head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2, three queries a key": ("qwen2", {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 301}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 48}),
}
TRAINED = {"initializer_range": 64**-0.5}  # attention scores of about 1, as a trained model has them
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
Sampled = dict[tuple[int, int], torch.Tensor]  # (request, length) -> logits


def prompts(seed: int, count: int, longest: int = 20) -> list[list[int]]:
    """Some begin alike."""
    rng = random.Random(seed)
    begin = [rng.randrange(1, 300) for _ in range(longest)]
    lens = [rng.randint(1, longest) for _ in range(count)]
    return [[*begin[: rng.randrange(n)], rng.randrange(1, 300)] for n in lens]


def run(llm: LLM, asked: list[list[int]], params: Any = GREEDY) -> tuple[Sampled, list[list[int]]]:
    """The logits that were sampled from, and the tokens."""
    runner, found = llm.engine_core.runner, Sampled()
    sample, first = type(runner).sample, next(iter(llm.engine_core.scheduler.seqs), 0)

    def noting(batch: Any, logits: torch.Tensor) -> torch.Tensor:
        rows = [(i, int(n)) for i, n, gets in zip(batch.req_ids, batch.context_lens, batch.is_sampled, strict=True) if gets]
        found.update(zip(rows, logits.float().clone(), strict=True))
        return sample(runner, batch, logits)

    runner.sample = noting
    outs = llm.generate(asked, params, use_tqdm=False)
    del runner.sample
    ids = sorted({i for i, _ in found})
    assert first == 0 and is_empty(llm)
    return {(ids.index(i), n): row for (i, n), row in found.items()}, [list(out.token_ids) for out in outs]


def poison(llm: LLM) -> None:
    """Fill slots that no token has written with NaN."""
    llm.engine_core.runner.kv_cache.fill_(torch.nan)


def largest_difference(one: Sampled, other: Sampled) -> float:
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)


@pytest.mark.parametrize(("name", "size", "dtype", "limit"), [
    ("qwen3", 1, "float32", 2e-5), ("qwen3, one K/V head", 3, "bfloat16", 0.05), ("qwen2", 4, "float32", 2e-5),
    ("qwen2, three queries a key", 16, "float32", 2e-5), ("llama", 4, "bfloat16", 0.05),
    ("llama, biases", 3, "float32", 2e-5),
])  # fmt: skip
def test_the_logits_are_those_of_torch(name: str, size: int, dtype: str, limit: float, tmp_path: Path) -> None:
    """Prompts of one token are compiled as a whole."""
    kind, shape = CASES[name]
    save_checkpoint(kind, tmp_path, num_hidden_layers=2, **TRAINED | shape)
    asked, found = [*prompts(size, 9), *([i] for i in range(9))], []
    params = replace(GREEDY, max_tokens=1) if dtype == "bfloat16" else GREEDY  # one rounding more may choose another token
    for compiled in (False, True):
        with LLM(str(tmp_path), compiled=compiled, kv_cache_block_size=size, dtype=dtype, **SMALL) as llm:
            assert (type(llm.engine_core.runner).__name__ == "CompiledRunner") is compiled
            poison(llm)
            found.append(run(llm, asked, params))
    assert dtype == "bfloat16" or found[0][1] == found[1][1]
    assert 0 < largest_difference(found[0][0], found[1][0]) < limit


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "drafts": {"speculative_config": NGRAM},
    "mixed": {"enable_mixed_steps": True, "max_num_batched_tokens": 8},
    "chunks": {"max_num_batched_tokens": 16, "prefix_cache": "radix"},
}


@pytest.mark.parametrize(("seed", "way"), [*enumerate(WAYS)])
def test_the_tokens_are_the_plain_engines(seed: int, way: str) -> None:
    """With preemption, prefix hits, drafts that are accepted and rejected, and a pool that held NaN."""
    rng = random.Random(seed)
    asked = [p * rng.choice([1, 1, 3]) for p in prompts(seed, 12, 14)]
    params = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), top_p=rng.choice([1.0, 0.9]), seed=i, ignore_eos=True,
                       max_tokens=rng.randint(1, 24), repetition_penalty=rng.choice([1.0, 1.2]), logprobs=rng.choice([None, 2]))
        for i in range(len(asked))
    ]  # fmt: skip
    options = {"device": "cpu", "kv_cache_block_size": 4, "num_kvcache_blocks": 18, "max_num_seqs": 6}
    with LLM("tiny", compiled=False, **options) as llm:
        wanted = [out.token_ids for out in llm.generate(asked, params, use_tqdm=False)]
    with LLM("tiny", compiled=True, **options | WAYS[way]) as llm:
        core = llm.engine_core
        getattr(core.runner, "runner", core.runner).kv_cache.fill_(torch.nan)
        for _ in range(2):  # now the pool has blocks that are found again
            assert [out.token_ids for out in llm.generate(asked, params, use_tqdm=False)] == wanted
        assert is_empty(llm) and (core.scheduler.num_preemptions > 0 or way != "plain")


def test_a_draft_model_and_a_head() -> None:
    """A draft model's decodes are compiled as well; a head that reads the layers rules it out."""
    asked = ["12 + 7 =", "Once upon a time"]
    with LLM("tiny", compiled=False, **SMALL) as llm:
        wanted = [out.token_ids for out in llm.generate(asked, GREEDY, use_tqdm=False)]
    drafts = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    with LLM("tiny", compiled=True, speculative_config=drafts, **SMALL) as llm:
        assert [out.token_ids for out in llm.generate(asked, GREEDY, use_tqdm=False)] == wanted
    head = {"method": "eagle3", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="compiled=True does not go with EAGLE or MTP"):
        EngineArgs("tiny", compiled=True, speculative_config=head, device="cpu")


def test_bfloat16_is_stored_as_torch_stores_it() -> None:
    """Over bit patterns of all signs and exponents, at both ends of the fraction and around a tie; NaN stays NaN."""
    from numba import njit

    from atom_mini.cpu.compiled_loops import LANES, load, store

    @njit
    def shorten(x, bits):  # type: ignore[no-untyped-def]
        for i in range(0, x.shape[1], LANES):
            store(bits, 0, i, load(x, 0, i))

    ends = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x17FFF, 0x18000, 0x3FFFFF, 0x400000, 0x7F7FFF, 0x7F8000, 0x7FFFFF]
    words = np.arange(512, dtype=np.uint32)[:, None] << 23 | np.array(ends, np.uint32)  # all signs and exponents
    x = np.resize(words, -(-words.size // LANES) * LANES)[None].view(np.float32)
    shorten(x, bits := np.empty(x.shape, np.uint16))
    found, wanted = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), torch.from_numpy(x).bfloat16())
    assert found.isnan().equal(wanted.isnan()) and int(wanted.isnan().sum()) >= 2 * (len(ends) - 1)
    assert found.view(torch.int16)[~wanted.isnan()].equal(wanted.view(torch.int16)[~wanted.isnan()])


# query heads, K/V heads, head size, block size; dtype; (new tokens, tokens in all) of each sequence
PROMPTS: list[tuple[tuple[int, ...], torch.dtype, list[tuple[int, int]]]] = [
    ((9, 3, 64, 16), torch.float32, [(1, 97), (5, 200), (64, 300), (1, 1)]),
    ((8, 8, 16, 4), torch.bfloat16, [(203, 203)]),
    ((5, 1, 48, 3), torch.float32, [(203, 203)]),
    ((4, 2, 128, 1), torch.bfloat16, [(2, 2), (3, 96), (4, 97)]),
]


@pytest.mark.parametrize(("shape", "dtype", "step"), PROMPTS, ids=str)
def test_attention_of_prompts(
    shape: tuple[int, ...], dtype: torch.dtype, step: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of torch, over a pool with NaN where nothing is stored; the same bits with any number of threads, and for the last
    tokens of each sequence by themselves."""
    from show import make_step, reference_attention

    from atom_mini.cpu import compiled_step
    from atom_mini.cpu.compiled_step import PlainOps, Threads

    heads, kv_heads, dim, size = shape
    monkeypatch.setattr(compiled_step, "LANES", 16)  # vectors of 4 are also right
    q, cache, meta, _ = make_step(step, H=heads, K=kv_heads, D=dim, S=size)
    q, cache = q.to(dtype), cache.to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            ops = PlainOps(Threads(count))
            found.append(ops.attend(q, cache, replace(meta, plan=None), dim**-0.5))
            ops.threads.pool.shutdown()
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(found[0]) for each in found) and found[0].dtype == dtype
    exact = reference_attention(q.float(), cache.float(), meta, dim**-0.5)
    step_size = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(found[0].float(), exact, atol=3e-6, rtol=step_size)
    news = [-(-n // 2) + 1 if n > 2 else n for n in meta.query_lens]
    ends = np.cumsum(meta.query_lens)
    rows = np.concatenate([np.arange(end - n, end) for n, end in zip(news, ends, strict=True)])
    later = ops.attend(q[rows], cache, replace(meta, plan=None, query_lens=news), dim**-0.5)
    assert later.equal(found[0][rows])


# short weights are widened in one way for one row, in another for 30
@pytest.mark.parametrize("kind", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_the_same_bits(kind: dict[str, str], tmp_path: Path) -> None:
    """From run to run, with one thread or several, alone and among others. Of prompts of one token: all of it is compiled."""
    from atom_mini.cpu.compiled_step import Threads

    save_checkpoint("qwen3", tmp_path, num_hidden_layers=2, num_key_value_heads=1)
    asked = [[i] for i in range(1, 31)]
    options = SMALL | kind | {"max_num_seqs": 30, "enable_prefix_caching": False}
    with LLM(str(tmp_path), compiled=True, **options) as llm:
        wanted, tokens = run(llm, asked)
        for count in (1, 2, 5):
            llm.engine_core.runner.ops.threads = Threads(count)
            found, same = run(llm, asked)
            assert same == tokens and largest_difference(wanted, found) == 0.0
        for start, count in ((0, 1), (29, 1), (7, 2), (11, 3), (20, 4), (3, 7)):
            found, _ = run(llm, asked[start : start + count])
            assert all(row.equal(wanted[start + i, n]) for (i, n), row in found.items())


def test_many_rows_in_groups_have_the_same_bits(tmp_path: Path) -> None:
    """In int8, or in 16 bits without instructions for them, more rows than fit are decoded group by group; rows of one request may
    be in two groups."""
    save_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    asked = [[i, i + 1, i] * 3 for i in range(1, 10)]
    found = []
    options = SMALL | {"enable_prefix_caching": False, "speculative_config": NGRAM}
    with LLM(str(tmp_path), compiled=True, dtype="bfloat16", **options) as llm:
        runner = llm.engine_core.runner
        for most, in_groups in ((64, False), (4, True)):
            runner.most_rows, runner.in_groups = most, in_groups
            poison(llm)
            outs = llm.generate(asked, GREEDY, use_tqdm=False)
            found.append([(list(out.token_ids), out.finish_reason) for out in outs])
    assert found[0] == found[1] and is_empty(llm)


def python(code: str, *args: str, **environment: str) -> str:
    """What a fresh process prints."""
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=tests, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Wire(Tripwire):
    """Only before lines of the compiled step's module."""

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        is_ours = frame.f_code.co_filename.endswith("compiled_step.py")
        return super().__call__(frame, event, arg) if is_ours else None


def test_interrupted_at_any_line() -> None:
    """What is asked next is right, at once: no thread of the step that was left writes any more."""
    from atom_mini.cpu.compiled_step import Threads

    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    asked = [[5, 6, 7], [8, 9]]
    with LLM("tiny", compiled=True, **SMALL) as llm:
        runner = llm.engine_core.runner
        runner.ops.threads = Threads(3)
        wanted = [out.token_ids for out in llm.generate(asked, few, use_tqdm=False)]
        at, places = 1, set()
        while (wire := Wire(at)).run(lambda: llm.generate(asked, few, use_tqdm=False)):
            places.add(wire.where)
            assert [out.token_ids for out in llm.generate(asked, few, use_tqdm=False)] == wanted, wire.where
            assert is_empty(llm) and not runner.ops.threads.is_interrupted
            at += 1
        assert len(places) > 20
        runner.ops.threads.is_interrupted = True  # and a second interrupt, while the first is mended
        for at in range(1, 9):
            Wire(at).run(runner.ops.threads.recover)
        assert [out.token_ids for out in llm.generate(asked, few, use_tqdm=False)] == wanted


def test_a_step_waits_for_the_threads_of_an_interrupted_one() -> None:
    from atom_mini.cpu.compiled_step import Threads

    threads, ended, seen = Threads(2), list[bool](), list[int]()

    def interrupted() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        threads.run(interrupted)
    threads.run(lambda: seen.append(len(ended)))
    threads.pool.shutdown()
    assert seen == [1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_threads_of_its_own() -> None:
    from atom_mini.cpu.compiled_step import Threads

    with LLM("tiny", compiled=True, **SMALL) as llm:
        llm.engine_core.runner.ops.threads = Threads(3)
        wanted = llm.generate("12 + 7 =", GREEDY, use_tqdm=False)[0].token_ids
        if (child := os.fork()) == 0:
            llm._process = os.getpid()  # else it is refused
            same = llm.generate("12 + 7 =", GREEDY, use_tqdm=False)[0].token_ids == wanted
            os._exit(0 if same and llm.engine_core.runner.ops.threads.process == os.getpid() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert llm.generate("12 + 7 =", GREEDY, use_tqdm=False)[0].token_ids == wanted


def test_its_threads_end_with_the_engine() -> None:
    from atom_mini.cpu.compiled_step import Threads

    before = threading.active_count()
    with LLM("tiny", compiled=True, **SMALL) as llm:
        llm.engine_core.runner.ops.threads = Threads(4)
        llm.generate("12 + 7 =", GREEDY, use_tqdm=False)
        assert threading.active_count() > before
    assert threading.active_count() == before


@pytest.mark.slow
def test_without_numba() -> None:
    """`compiled=True` names what to install; nothing else needs it."""
    code = """
import sys
sys.modules["numba"] = None
from atom_mini import LLM, SamplingParams
for kind in (None, "int8"):
    with LLM("tiny", device="cpu", num_kvcache_blocks=50, quantization=kind) as llm:
        print(llm.generate("12 + 7 =", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].text)
try:
    LLM("tiny", device="cpu", compiled=True)
except ValueError as error:
    print(error)
"""
    text, same, printed = python(code).splitlines()
    assert text == same == " 19"
    assert 'pip install -e ".[cpu]"' in printed and "compiled=True" in printed


KEPT = """
import resource, sys, warnings
if len(sys.argv) > 1:  # as on a full disk: no file may be larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    from atom_mini.cpu.compiled_loops import np, silu_and_mul
    y, counts = np.ones((1, 1), np.float32), np.zeros(16, np.int64)
    silu_and_mul(counts, np.ones((1, 2), np.float32), y)
assert abs(y[0, 0] - 0.7310586) < 1e-6
print(sum(silu_and_mul.stats.cache_hits.values()), len([w for w in said if "NUMBA_CACHE_DIR" in str(w.message)]))
"""


@pytest.mark.slow
def test_a_damaged_cache_costs_a_warning(tmp_path: Path) -> None:
    """On a full disk nothing is kept; what is damaged is written anew, and the next start finds it."""
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(KEPT, "2000", **folder) == "0 1\n"
    python(KEPT, **folder)
    for file in tmp_path.rglob("*.nb[ic]"):
        file.write_bytes(b"\x93" * 4000)
    assert python(KEPT, **folder) == "0 1\n"
    assert python(KEPT, **folder) == "1 0\n"


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"compiled": True, "dtype": "float16"}, ["compiled=True", "float32 and bfloat16"]),
    ({"compiled": True, "attention": "triton"}, ["compiled=True", "attention='torch'"]),
    ({"compiled": True, "tensor_parallel_size": 2}, ["compiled=True", "tensor_parallel_size"]),
    ({"compiled": True, "device": None}, ["compiled=True", "set device='cpu'"]),
    ({"packed": True, "dtype": "bfloat16"}, ["packed=True", "bfloat16", "dtype='float32'"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_refused(options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom_mini.cpu.products.lacks_products", lambda x: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "device" in options)  # then there is a GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError) as caught:
        EngineArgs("tiny", **{"device": "cpu"} | options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, also those of eight bits alone, and a Numba that may not."""
    save_checkpoint("llama", tmp_path / "100", num_hidden_layers=1, intermediate_size=100)
    with pytest.raises(ValueError, match=r"compiled=True does not apply: .*100.* multiples of 16"):
        EngineArgs(str(tmp_path / "100"), device="cpu", compiled=True)
    save_checkpoint("llama", tmp_path / "80", num_hidden_layers=1, intermediate_size=80)
    assert EngineArgs(str(tmp_path / "80"), device="cpu", compiled=True).compiled
    with pytest.raises(ValueError, match=r"in eight bits, the inputs .*80.* multiples of 32"):
        EngineArgs(str(tmp_path / "80"), device="cpu", quantization="int8", compiled=True)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(ValueError, match="unset NUMBA_DISABLE_JIT"):
        EngineArgs("tiny", device="cpu", compiled=True)
