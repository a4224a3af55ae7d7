"""What every refusal of a user's mistake goes through, and its wording (chapters 01a and 14)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from typing import TypeVar, get_args, get_type_hints

from pydantic import ValidationError


def shortened(message: str, most: int = 2000) -> str:
    """`message`, without its middle if it repeats a very long value."""
    if len(message) <= most:
        return message
    return f"{message[: most // 2]} ... {message[-most // 2 :]}"


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds: for a user's mistakes."""
    if not condition:
        raise ValueError(shortened(message))


def install(extra: str) -> str:
    """The command that installs an extra of the package, for the end of a message."""
    return f'run pip install -e ".[{extra}]" in the clone of the repository'


LIMITS = {"ge": "from", "gt": "above", "le": "to", "lt": "and below"}


def limits_of(hint: object) -> str:
    """What a type demands of a number, in words; empty for anything else."""
    inner = [limits_of(part) for part in get_args(hint)]
    kinds: dict[type, str] = {int: "a whole number", float: "a number"}
    must = [word for kind, word in kinds.items() if hint is kind] + inner
    for note in getattr(hint, "__metadata__", ()):
        for rule in getattr(note, "metadata", ()):
            found = {word: getattr(rule, key, None) for key, word in LIMITS.items()}
            must += [f"{w} {x}" for w, x in found.items() if x is not None and x < 1e30]
    return " ".join(filter(None, must))


NOT_HERE = {  # names that vLLM's users try: the reason, or what to use
    "async_scheduling": "it is called overlap here",
    "best_of": "answers are not ranked; set n, ask for logprobs, and choose yourself",
    "compilation_config": "torch compiles nothing here; enforce_eager=True: no graphs",
    "cpu_offload_gb": "weights stay on the device; take a smaller model",
    "detokenize": "text is always decoded; out.token_ids has the tokens",
    "disable_log_stats": "no statistics are logged; llm.metrics has them",
    "distributed_executor_backend": "ranks are processes; set tensor_parallel_size",
    "download_dir": "the hub's cache is used; set HF_HOME",
    "enable_lora": "adapters are not applied; merge them into the checkpoint first",
    "generation_config": "the checkpoint's is always used; SamplingParams override it",
    "guided_choice": "it is structured_outputs=StructuredOutputsParams(choice=...) here",
    "guided_decoding": "it is called structured_outputs here",
    "guided_grammar": "it is structured_outputs=StructuredOutputsParams(grammar=...) here",
    "guided_json": "it is structured_outputs=StructuredOutputsParams(json=...) here",
    "guided_regex": "it is structured_outputs=StructuredOutputsParams(regex=...) here",
    "hf_overrides": "config.json is used as it is; change a copy of the folder",
    "include_stop_str_in_output": "a text ends before its stop string; append it",
    "kv_cache_dtype": "the cache has the model's type; set dtype, which sets both",
    "length_penalty": "beam search is not supported; set n",
    "limit_mm_per_prompt": "only text is supported; there are no images to limit",
    "load_format": "weights are read from safetensors; convert the checkpoint first",
    "logits_processors": "functions on logits are not supported; subclass Sampler",
    "max_loras": "adapters are not applied; merge them into the checkpoint first",
    "max_new_tokens": "it is called max_tokens here",
    "num_gpu_blocks_override": "it is called num_kvcache_blocks here",
    "num_scheduler_steps": "each step has its own plan; overlap hides the planning",
    "pipeline_parallel_size": "no model is cut between two layers; use one device",
    "prompt_logprobs": "a prompt's logits are not computed; logprobs has the answer's",
    "revision": "the newest is fetched; download another and pass its folder",
    "skip_special_tokens": "the text never has them; out.token_ids does",
    "skip_tokenizer_init": "the tokenizer is always loaded; prompts may be token ids",
    "spaces_between_special_tokens": "the text never has them; out.token_ids does",
    "swap_space": "it is called kv_offloading_size here",
    "tokenizer": "the checkpoint's own is used; put another into its folder",
    "tokenizer_mode": "AutoTokenizer chooses the kind; leave it out",
    "truncate_prompt_tokens": "prompts stay whole; cut the token ids yourself",
    "trust_remote_code": "code of a checkpoint is never run; leave it out",
    "use_beam_search": "beam search is not supported; set n and logprobs, and choose",
}


def no_such_option(kind: str, name: str, known: list[str]) -> str:
    """The message for an option that `kind` does not have: the reason in `NOT_HERE`, or
    else the nearest of the `known` names."""
    longer = [k for k in known if k.endswith(f"_{name}")]
    near = longer or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
    return f"{kind} has no option {name!r}: {NOT_HERE.get(name, hint)}"


def describe_error(error: ValidationError, cls: type, given: Mapping[str, object]) -> str:
    """One line about the first wrong option: its value, the limit, the option."""
    first = error.errors()[0]
    kind = cls.__name__
    if first["type"] == "value_error":  # our own
        return str(first["ctx"]["error"])
    names = [f.name for f in fields(cls) if f.init]
    at = first["loc"][0]
    name = names[at] if isinstance(at, int) else at  # a number: its place
    if first["type"] == "unexpected_keyword_argument":
        return no_such_option(kind, name, names)
    limit = limits_of(get_type_hints(cls, include_extras=True)[name])
    must = "True or False" if first["type"] == "bool_type" else limit
    wrong = re.sub(r"^\w+ should", "must", first["msg"])
    wrong = wrong if wrong.startswith("must") else f"({wrong})"
    must = f"must be {must}" if must else wrong
    return f"{name}={given.get(name, first['input'])!r} {must}: set {kind}({name}=...)"


Options = TypeVar("Options")


def explained(cls: type[Options]) -> type[Options]:
    """A pydantic dataclass, with a ValueError of one line for what is wrong."""
    check = cls.__init__

    @wraps(check)
    def __init__(self: Options, /, *args: object, **given: object) -> None:
        try:
            check(self, *args, **given)
        except ValidationError as error:
            raise ValueError(shortened(describe_error(error, cls, given))) from None

    cls.__init__ = __init__  # type: ignore[assignment, method-assign]
    return cls
