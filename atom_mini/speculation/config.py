"""The options of speculative decoding, the ways to draft, and what a draft model must fit (chapters 50 and 52)."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..config import STRICT, Config, Count, Text, explained
from ..fields import EngineFields

METHODS: dict[str, tuple[str, ...]] = {  # method -> options that not every method has
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model", "draft_sampling"),
    "eagle3": ("model",),
    "mtp": (),
}


@explained
@dataclass(frozen=True, config=STRICT)
class SpeculativeConfig:
    """How drafts are made. The names are those of vLLM's `speculative_config`.

    `method`: a name in `METHODS`. `model`: the draft model's or head's folder or hub id; for a head, None means the one
    in the checkpoint's folder. `enable_adaptive_verification`: choose each step's number of drafts (chapter 54b).
    """

    method: str = "ngram"
    num_speculative_tokens: Annotated[int, Field(ge=0)] = 4  # 0: off
    model: Text | None = None
    draft_sampling: bool = False  # draft_model: sample the drafts; see chapter 52
    # each step chooses how many drafts a request gets, by measured times; see chapter 54b
    enable_adaptive_verification: bool = False
    # ngram: most and fewest tokens that must match
    prompt_lookup_max: Annotated[int, Field(ge=1, le=128)] = 4
    prompt_lookup_min: Count = 2

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} must be one of {', '.join(METHODS)}: set method to one of them")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method='draft_model' needs a checkpoint: set model")
        self._refuse_foreign()
        if self.draft_sampling and self.enable_adaptive_verification:
            raise ValueError(
                "draft_sampling=True does not go with enable_adaptive_verification=True: a text under a seed would "
                "depend on how many drafts there were, and so on measured times: leave one of them out"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} exceeds "
                f"prompt_lookup_max={self.prompt_lookup_max}: lower prompt_lookup_min"
            )

    def _refuse_foreign(self) -> None:
        """ValueError for an option that the method does not have."""
        for option in fields(self):
            owners = [name for name, options in METHODS.items() if option.name in options]
            value = getattr(self, option.name)
            if owners and self.method not in owners and value != option.default:
                raise ValueError(
                    f"{option.name}={value!r} is for {' and '.join(owners)}, "
                    f"not for method={self.method!r}: leave it out"
                )


def read_speculative(given: object) -> SpeculativeConfig:
    """The config from itself, a dictionary, or JSON; ValueError names what is wrong."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"speculative_config={given!r} is not JSON: {error}") from None
    if isinstance(given, dict) and all(isinstance(name, str) for name in given):
        given = SpeculativeConfig(**given)
    if not isinstance(given, SpeculativeConfig):
        raise ValueError(f"speculative_config={given!r}: give a dict, JSON or SpeculativeConfig")
    return given


LARGEST_GRAPH = 512  # rows; beyond, the host's share of a step is small


def count_rows(config: EngineFields) -> int:
    """Rows of the largest decode that is worth a graph. Graphs are recorded for rows, and drafts are rows."""
    most = config.max_num_seqs
    k = config.speculative_config.num_speculative_tokens
    return max(most, min(most * (1 + k), LARGEST_GRAPH))


def check_mtp(config: EngineFields) -> None:
    """ValueError for drafts of a layer that the checkpoint does not have."""
    if config.speculative_config.method != "mtp" or config.spec is None:
        return
    if not getattr(config.spec, "mtp_layers", 0):
        raise ValueError("method='mtp' needs a checkpoint with num_nextn_predict_layers above 0: set another method")


def check_speculative(config: EngineFields) -> SpeculativeConfig | None:
    """`speculative_config`, read; None for no drafts. ValueError for what is wrong."""
    given = read_speculative(config.speculative_config)
    k, most = given.num_speculative_tokens, config.max_num_batched_tokens
    if k >= most:
        raise ValueError(
            f"num_speculative_tokens={k}: with its newest token that is {k + 1} of max_num_batched_tokens={most}: "
            "lower num_speculative_tokens, or raise max_num_batched_tokens"
        )
    return given if k else None


def check_same_tokens(target: Any, draft: Any) -> None:
    """Raise ValueError if two tokenizers differ in a token; None is not compared."""
    if target is None or draft is None:
        return
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if differ := {word for word, _ in ours.items() ^ theirs.items()}:
        word = min(differ)
        raise ValueError(
            f"the draft model's tokenizer differs in {len(differ)} tokens: {word!r} is {ours.get(word)} in the target "
            f"and {theirs.get(word)} in it: set model to one of the same family"
        )


def read_draft_config(config: EngineFields) -> EngineFields:
    """The draft model's config: the target's options, and another model."""
    model = config.speculative_config.model
    defaults = {f.name: f.default for f in fields(Config) if f.init}  # Part I's options
    given = {n: getattr(config, n) for n in defaults}
    changed = {n: value for n, value in given.items() if value != defaults[n]}
    changed |= {n: True for n in ("compiled", "packed") if getattr(config, n)}
    try:
        own = type(config)(**changed | {"model": model})
    except ValueError as error:
        raise ValueError(f"the draft model {model}: {error}") from None
    if "linear_attention" in getattr(own.spec, "layer_types", ()):
        raise ValueError(
            f"model={model!r} cannot draft: its layers keep a state, of which no copy "
            "from before the drafts is kept; set another model"
        )
    return own
