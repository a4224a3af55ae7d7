"""Every finished answer to a JSON schema is valid, as another library says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schemas import schemas

from atom_mini import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


def check(answers: list[tuple[dict[str, Any], Any]]) -> int:
    """How many answers are finished: each of these is valid, and its format, too."""
    finished = 0
    for schema, out in answers:
        assert out.finish_reason in ("stop", "length"), (schema, out.stop_reason)
        if out.finish_reason == "stop":
            finished += 1
            kind = jsonschema.Draft202012Validator
            kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(out.text))
    return finished


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 80, 120, 160))])
def test_forty_of_two_hundred_schemas(first: int) -> None:
    """Sampled at temperature 1: the built-in model knows no JSON, so the masks decide nearly everything."""
    made = schemas(200)[first : first + 40]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=250, structured_outputs=StructuredOutputsParams(json=schema))
              for i, schema in enumerate(made)]  # fmt: skip
    with LLM("tiny", device="cpu", max_num_seqs=64) as llm:
        outs = llm.generate(["JSON: "] * len(made), params, use_tqdm=False)
    assert check(list(zip(made, outs, strict=True))) >= 36
