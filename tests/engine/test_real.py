"""Real pretrained weights on every path through the engine: the tokens that transformers' greedy `generate` chooses.

`make real` makes the checkpoint (tests/real_weights.py); without it these tests are skipped. `make test-real` runs them.

The reference is teacher forced: one forward pass of transformers over a prompt and what the engine made of it. At every
place the engine's token must be the likeliest, which is what `generate` would have chosen there, so that equality at all
places is equality with `generate` (test_the_reference_is_generate holds that against `generate` itself). Where another
token is likelier by less than TIE, rounding decides: then the log probabilities are compared instead, and the test says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_prompts import TEXTS, prompts
from real_weights import FOLDER, is_whole

from atom_mini import LLM, SamplingParams

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not is_whole(), reason="no real weights in build/smollm2: run make real"),
]
MAX_TOKENS = 32
TIE = 1e-3  # of two logits
BF16_BOUND = 0.4  # of a log probability: bfloat16 has 8 bits, and there are 30 layers
INT8_BOUND = 0.12  # of the mean change of a log probability: 0.08 was measured, and 0.19 with one wrong scale in 121
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},  # with the hash index
    "compiled": {"compiled": True},
    "packed": {"packed": True},
    "no prefix cache": {"prefix_cache": "none"},
    "radix": {"prefix_cache": "radix"},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "mixed steps of 64": {"max_num_batched_tokens": 64, "enable_mixed_steps": True},
    "a pool that preempts": {"num_kvcache_blocks": 640, "kv_cache_block_size": 2},
    "overlap": {"overlap": True},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "Spyre": {"scheduler": "spyre", "kv_cache_block_size": 64, "chunk_size": 256, "max_model_len": 2048, "max_num_seqs": 8},
    "a process of its own": {"engine_process": True},
    "two replicas": {"data_parallel_size": 2},
}


class Reference:
    """transformers on the same weights: its logits after each token of a prompt's answer."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
        self.prompts = prompts(self.tokenizer)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """[answer, vocabulary]: what it would choose each token of `answer` from."""
        key = (*prompt, -1, *answer)
        if key not in self._known:
            ids = torch.tensor([prompt + answer])
            keep = len(answer) + 1  # of the last places alone: the vocabulary is wide
            self._known[key] = self.model(ids, use_cache=False, logits_to_keep=keep).logits[0, :-1].float()
        return self._known[key]

    @torch.inference_mode()
    def generate(self, prompt: list[int]) -> list[int]:
        """The new tokens of transformers' own greedy loop, the one that ends the text included."""
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": MAX_TOKENS}
        return self.model.generate(ids, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    """Two threads, which tests/conftest.py sets to one elsewhere."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def default() -> Iterator[LLM]:
    """The engine that a user gets who says nothing."""
    with LLM(str(FOLDER)) as llm:
        yield llm


def check_greedy(llm: LLM, reference: Reference, prompt: list[int], answer: list[int]) -> int:
    """Assert that each token is the likeliest, and return how many are so by a hair only."""
    logits = reference.logits(prompt, answer)
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = logits.max(-1).values - chosen
    places = behind.nonzero()[:, 0].tolist()
    for place in places:
        assert behind[place] < TIE, f"token {place} is {behind[place]:.4f} behind the likeliest: {answer}"
        check_logprobs(llm, [(prompt + answer[:place], logits[place])], 1e-3)
    return len(places)


def check_logprobs(llm: LLM, logits: list[tuple[list[int], torch.Tensor]], atol: float) -> float:
    """Assert that behind each prompt the log probabilities are those of its logits [vocabulary]; the largest error."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outs = llm.generate([prompt for prompt, _ in logits], params, use_tqdm=False)
    pairs = [(out.logprobs or [{}], row.log_softmax(-1)) for out, (_, row) in zip(outs, logits, strict=True)]
    error = max(abs(value - wanted[token].item()) for found, wanted in pairs for token, value in found[0].items())
    assert error <= atol
    return error


def check_end(out: Any, tokenizer: Any) -> None:
    """The end token ends an answer, at its end alone; else the number of tokens does."""
    assert tokenizer.eos_token_id not in out.token_ids[:-1]
    ended = out.token_ids[-1] == tokenizer.eos_token_id
    assert out.finish_reason == ("stop" if ended else "length") and len(out.token_ids) <= MAX_TOKENS
    assert ended or len(out.token_ids) == MAX_TOKENS


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_transformers(name: str, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """24 prompts at once, and again, when the prefix cache knows them. Spyre, whose rectangles take long, gets every second one."""
    asked = list(reference.prompts.values())[:: 2 if name == "Spyre" else 1]
    with LLM(str(FOLDER), **ENGINES[name]) as llm:
        first = llm.generate(asked, GREEDY, use_tqdm=False)
        again = llm.generate(asked[-5:], GREEDY, use_tqdm=False)
        ties = sum(check_greedy(llm, reference, o.prompt_token_ids, o.token_ids) for o in (*first, *again))
        preemptions = getattr(llm.engine_core.scheduler, "num_preemptions", None)
    for out in (*first, *again):
        check_end(out, reference.tokenizer)
        assert out.text == reference.tokenizer.decode(out.token_ids, skip_special_tokens=True)
    if ties:
        with capsys.disabled():
            print(f"\n{name}: {ties} tokens are ties within {TIE}; there the log probabilities were compared")
    if name == "a pool that preempts":
        assert preemptions, "nobody was preempted: make the pool smaller"


def test_the_reference_is_generate(default: LLM, reference: Reference) -> None:
    """transformers' own loop gives the tokens that the forward pass calls the likeliest."""
    names = ["chat 0", "chat 4", "chat 6", "completion 1", "shared 2", "unicode 1"]
    asked = [reference.prompts[name] for name in names]
    outs = default.generate(asked, GREEDY, use_tqdm=False)
    assert [out.token_ids for out in outs] == [reference.generate(prompt) for prompt in asked]


def test_log_probabilities_are_those_of_transformers(default: LLM, reference: Reference) -> None:
    """Of the 20 likeliest first tokens of each prompt."""
    check_logprobs(default, [(prompt, reference.logits(prompt, [0])[0]) for prompt in reference.prompts.values()], 1e-3)


def likeliest_in_float32(reference: Reference, outs: list[Any]) -> tuple[int, int]:
    """How many of the answers' tokens float32 finds the likeliest after those before them, and how many there are."""
    same = total = 0
    for out in outs:
        likeliest = reference.logits(out.prompt_token_ids, out.token_ids).argmax(-1).tolist()
        same += sum(a == b for a, b in zip(likeliest, out.token_ids, strict=True))
        total += len(out.token_ids)
    return same, total


def test_bfloat16(reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """How many tokens are the same is printed; the log probabilities stay within a bound of those in float32."""
    asked = [prompt for prompt in reference.prompts.values() if len(prompt) < 400]  # longer ones take minutes on some CPUs
    with LLM(str(FOLDER), dtype="bfloat16", compiled=True) as llm:
        outs = llm.generate(asked, GREEDY, use_tqdm=False)
        worst = check_logprobs(llm, [(prompt, reference.logits(prompt, [0])[0]) for prompt in asked], BF16_BOUND)
    same, total = likeliest_in_float32(reference, outs)
    with capsys.disabled():
        print(f"\nbfloat16: {same / total:.1%} of {total} tokens are float32's choice; log probabilities within {worst:.2f}")
    assert same / total > 0.9


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that chapter 92b's figures come from."""
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "tests" / "bench"))
    return importlib.import_module("eight_bits")


def test_int8(reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """How many greedy tokens are float32's choice, of prompts through torch and decodes through the compiled function."""
    asked = [prompt for prompt in reference.prompts.values() if len(prompt) < 400]
    with LLM(str(FOLDER), quantization="int8", device="cpu", compiled=True) as llm:
        outs = llm.generate(asked, GREEDY, use_tqdm=False)
    same, total = likeliest_in_float32(reference, outs)
    with capsys.disabled():
        print(f"\nint8: {same / total:.1%} of {total} tokens are float32's choice")
    assert same / total > 0.9


def test_what_int8_costs_and_that_a_wrong_scale_is_noticed(eight_bits: Any, reference: Reference) -> None:
    """The log probabilities of three texts change by no more than chapter 92b says, and each layer's error is what the
    rounding predicts. With the scales of one matrix moved by a row, neither holds."""
    tokenizer, ids = reference.tokenizer, reference.tokenizer.encode(TEXTS["a speech"], add_special_tokens=False)
    with eight_bits.engine() as exact, eight_bits.engine(quantization="int8") as eight:
        wanted = eight_bits.score_texts(exact, tokenizer)
        before = eight_bits.compare(eight_bits.score_texts(eight, tokenizer), wanted)
        ratio = eight_bits.largest_ratio(eight_bits.layer_errors(exact, eight, ids))
        eight_bits.plant(eight)
        after = eight_bits.compare(eight_bits.score_texts(eight, tokenizer), wanted)
        wrong = eight_bits.largest_ratio(eight_bits.layer_errors(exact, eight, ids))
    assert before["mean_absolute_difference"] < INT8_BOUND < after["mean_absolute_difference"]
    assert abs(before["mean_difference"]) < 0.02 and before["same_choice"] > 0.9
    assert ratio < 1.25 and wrong > 20


def test_a_seed_gives_the_same_tokens_alone_and_in_company(default: LLM, reference: Reference) -> None:
    asked = list(reference.prompts.values())[:8]
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=16) for seed in range(8)]
    together = default.generate(asked, params, use_tqdm=False)
    alone = [default.generate([p], one, use_tqdm=False)[0] for p, one in zip(asked[:3], params[:3], strict=True)]
    assert [out.token_ids for out in alone] == [out.token_ids for out in together[:3]]
    other = default.generate(asked[:1], SamplingParams(temperature=0.8, top_p=0.95, seed=99, max_tokens=16), use_tqdm=False)
    assert other[0].token_ids != together[0].token_ids


def test_the_chat_endpoint_gives_the_same_text(default: LLM) -> None:
    """Of the server, whole and streamed, as `LLM.chat`."""
    from test_server import serving

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    wanted = default.chat(chat, GREEDY, use_tqdm=False)[0].text
    body = {"model": str(FOLDER), "messages": chat, "temperature": 0, "max_tokens": MAX_TOKENS}
    with serving(model=str(FOLDER)) as served:
        body["model"] = served.client.get("/v1/models").json()["data"][0]["id"]
        whole = served.post("/v1/chat/completions", body).json()["choices"][0]
        pieces = [event["choices"][0]["delta"].get("content") or "" for event in
                  served.events("/v1/chat/completions", body | {"stream": True}) if event["choices"]]  # fmt: skip
    assert whole["message"]["content"] == "".join(pieces) == wanted == "The capital of France is Paris."
    assert whole["finish_reason"] == "stop"


