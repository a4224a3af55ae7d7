"""The fields of a request that change its scores, as a message carries them (chapter 70)."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from ..config import SamplingParams
from ..errors import require

PackedForm = dict[str, str | bool | list[str] | None]
Pairs = list[int | float | list[int | float]]
PackedParams = dict[str, bool | int | float | Pairs | PackedForm]


def pack_form(params: SamplingParams) -> PackedParams:
    """The biases, words, and form of a request, if it has any. ValueError for a form of a user's own class."""
    found: dict[str, Any] = {}
    if params.logit_bias:
        found["logit_bias"] = [[*pair] for pair in dict(params.logit_bias).items()]
    if params.allowed_token_ids is not None:
        found["allowed_token_ids"] = [*params.allowed_token_ids]
    if params.bad_words:  # token ids by now
        found["bad_words"] = [[*word] for word in params.bad_words]
    form = params.structured_outputs
    if form is not None:
        kind = form.__class__.__name__
        good = is_dataclass(form) and kind == "StructuredOutputsParams"
        require(good, f"structured_outputs of type {kind} cannot be sent to another process: set engine_process=False")
        found["structured_outputs"] = asdict(form)
    return found


def unpack_params(packed: Any) -> SamplingParams:
    """The parameters that were packed. ValueError for what is not one of them."""
    form = packed.get("structured_outputs")
    if form is None:
        return SamplingParams(**packed)
    from atom_mini.structured.params import StructuredOutputsParams

    return SamplingParams(**packed | {"structured_outputs": StructuredOutputsParams(**form)})
