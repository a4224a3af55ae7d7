"""A real model and its tokenizer of 49,152 tokens: every finished answer to a schema is valid. `make test-real` runs this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from real_weights import FOLDER, is_whole
from schemas import schemas
from test_schemas import check

from atom_mini import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not is_whole(), reason="no real weights in build/smollm2: run make real"),
]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_twenty_schemas() -> None:
    made = schemas(20)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=120, structured_outputs=StructuredOutputsParams(json=schema))
              for i, schema in enumerate(made)]  # fmt: skip
    with LLM(str(FOLDER), device="cpu", dtype="float32", num_kvcache_blocks=600, max_num_seqs=20) as llm:
        ask = [{"role": "user", "content": "Make up some data, as JSON."}]
        prompt = llm.get_tokenizer().apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
        outs = llm.generate([prompt] * len(made), params, use_tqdm=False)
    assert check(list(zip(made, outs, strict=True))) >= 17
