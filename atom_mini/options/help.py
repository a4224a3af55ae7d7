"""The options of the command line, made from the fields of dataclasses (chapter 14)."""

from __future__ import annotations

import argparse
import re
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pydantic
from pydantic.dataclasses import dataclass

from ..config import STRICT, Count, Text, explained
from ..errors import require

HELP: dict[str, dict[str, str]] = {}  # group -> option -> its description


HELP["Sampling"] = {
    "temperature": "0 takes the likeliest token; higher is more random",
    "top_p": "sample from the likeliest tokens of this total probability",
    "top_k": "sample from the K likeliest tokens; 0 or -1: from all",
    "min_p": "drop tokens below this share of the likeliest one",
    "repetition_penalty": "above 1: tokens that occurred become less likely",
    "presence_penalty": "above 0: tokens of the answer become less likely",
    "frequency_penalty": "the same, but once per occurrence",
    "seed": "seed of each request's random numbers",
    "max_tokens": "tokens generated at most",
    "min_tokens": "fewest tokens of an answer",
    "n": "answers per prompt",
    "stop": "end before this text; may be given several times",
    "stop_token_ids": "end with this token; may be given several times",
    "ignore_eos": "do not stop at the end-of-text token",
    "logprobs": "log probabilities of the K likeliest tokens (--json)",
    "logit_bias": "JSON, {token id: -100 to 100}: added to a logit",
    "allowed_token_ids": "no other tokens; may be given several times",
    "bad_words": "never generated; may be given several times",
    "structured_outputs": 'JSON: {"json": ...}, "regex", "choice", or "grammar"',
}


HELP["Model and memory"] = {
    "model": "'tiny' (built in), a folder, or a hub id",
    "device": "cuda, cuda:1 or cpu (default: a GPU if there is one)",
    "dtype": "float32, bfloat16 or float16; float32 on a CPU",
    "quantization": "int8: weights in 8 bits, activations in up to 15, on a CPU",
    "kv_cache_block_size": "tokens per block of the KV cache",
    "num_kvcache_blocks": "blocks in the pool (default: as many as fit)",
    "gpu_memory_utilization": "share of a GPU's memory to use",
    "max_model_len": "most tokens of a request, prompt and answer together",
    "enable_prefix_caching": "reuse the blocks of prompts with a common beginning",
    "prefix_cache": "how such blocks are found: hash, radix or none",
}

HELP["Steps"] = {
    "max_num_seqs": "most requests that run together",
    "max_num_batched_tokens": "most tokens of a step",
    "enable_chunked_prefill": "split prompts that do not fit in a step",
    "enable_mixed_steps": "put decodes and chunks of prompts into one step",
    "interleave_decode": "alternate prefill and decode steps",
    "scheduler_delay_factor": "prompts wait this many times the last prefill's time",
    "kv_offloading_size": "GiB of host memory that keep blocks the cache loses",
    "state_checkpoint_interval_tokens": "keep a state each so many tokens, for hits",
    "num_state_checkpoints": "how many states are kept for the prefix cache",
    "schedule_policy": "lpm: longest cached prefix first, in a radix cache",
    "scheduler": "atom or spyre",
    "scheduler_cls": "another scheduler, as module:Class",
    "chunk_size": "tokens of a prefill step (spyre)",
    "max_batch_tkv_limit": "limit of sequences x longest context (spyre)",
    "interleave": "a decode between two chunks of a prompt (spyre)",
    "speculative_config": "JSON: how tokens are drafted",
    "trace": "record every step for a timeline",
}


HELP["Speed"] = {
    "attention": "triton or torch; triton on a GPU",
    "enforce_eager": "no CUDA graphs",
    "compiled": "decode on a CPU as one compiled function (Numba)",
    "packed": "oneDNN's packed products and decodes in place on a CPU",
    "overlap": "schedule a step while the previous one runs",
    "fuse_layers": "five launches per layer in small steps on a GPU",
}


HELP["Processes and devices"] = {
    "engine_process": "run the engine in its own process",
    "tensor_parallel_size": "devices that share each weight matrix",
    "data_parallel_size": "engines that share the requests",
    "routing": "how an engine is chosen for a request: load or prefix",
    "lockstep": "all engines take the same steps",
    "kv_transfer_config": "a dict for each engine: kv_role, kv_connector, sizes",
    "enable_expert_parallel": "distribute a model's experts over the devices",
    "ready_timeout": "seconds a process may take to load",
    "ping_timeout": "seconds of silence until a process counts as dead",
    "collective_timeout": "seconds that ranks wait for each other",
}

HELP["Server"] = {
    "host": 'address to listen on; "0.0.0.0": every interface',
    "allowed_host": "another host name that clients may use; may be repeated",
    "allowed_origins": 'web page that may use it, or "*": any; may be repeated',
    "port": "port to listen on; 0: any free port",
    "api_key": "key that clients must send",
    "served_model_name": "name by which clients know the model",
    "max_body": "most bytes of a request",
    "max_prompts": "most prompts of a request",
    "max_choices": "most answers to a prompt",
    "max_queue": "most answers in progress; more are refused (429)",
    "health_timeout": "seconds that the longest step may take",
    "grace": "seconds to finish answers at shutdown",
    "log_level": "debug, info (a line per request), warning or error",
}


HELP["Engines on Ray"] = {
    "replicas": "engines, each with all its GPUs",
    "max_replicas": "most engines under load",
    "max_ongoing": "most answers in progress per engine; more wait",
    "batch_size": "requests at a time",
    "cpus": "CPU cores per engine",
    "address": "address of a running Ray (default: start one)",
}


def options_of(cls: type) -> list[Field[Any]]:
    """The fields of a dataclass that a user may set."""
    return [f for f in fields(cls) if f.init]


def help_of(name: str) -> tuple[str, str]:
    """(group, description) of the option `name`."""
    found = (group for group, lines in HELP.items() if name in lines)
    group = next(found, "Other options")
    return group, HELP.get(group, {}).get(name, "")


def kinds_in(hint: object) -> set[object]:
    """The plain types in a type hint."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    inner = get_args(hint)
    return set().union(*map(kinds_in, inner)) if inner else {hint}


TYPED: dict[str, tuple[type, str]] = {  # whose types say little: how they are typed in a shell
    "logit_bias": (str, "store"), "structured_outputs": (str, "store"),  # JSON
    "allowed_token_ids": (int, "append"), "bad_words": (str, "append"),
}  # fmt: skip


def reading(cls: type, f: Field[Any]) -> dict[str, Any]:
    """The `add_argument` options for a field, by its type."""
    if f.name in TYPED:
        kind, action = TYPED[f.name]
        return {"type": kind, "action": action, "metavar": kind.__name__.upper()}
    found = kinds_in(get_type_hints(cls)[f.name])
    kind = next((t for t in (bool, int, float) if t in found), str)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    action = "append" if f.default == () else "store"
    return {"type": kind, "action": action, "metavar": kind.__name__.upper()}


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an option for each field of `cls`, in its group."""
    groups: dict[str, Any] = {}
    for f in options_of(cls):
        title, line = help_of(f.name)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        default = parser.get_default(f.name) or f.default
        if type(default) is bool:
            default = "on" if default else "off"
        has_none = default in (None, (), argparse.SUPPRESS)
        flag = "--" + f.name.replace("_", "-")
        kind = {"default": argparse.SUPPRESS} | reading(cls, f)
        option = groups[title].add_argument(flag, **kind)
        option.help = line if has_none else f"{line} (default: {default})"


def given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields of the dataclass `cls` that the command line sets."""
    names = {f.name for f in options_of(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def are_hosts(value: list[str] | tuple[str, ...]) -> bool:
    """Whether these are names or addresses without ports; `*.lan` is any name there."""
    pattern = re.compile(r"\*|(\*\.)?[\w.-]+|\[[\da-fA-F:.]+\]")
    return all(pattern.fullmatch(host) for host in value)


Wait = Annotated[float, pydantic.Field(gt=0)]  # seconds


@explained
@dataclass(config=STRICT)
class Serve:
    """Answer OpenAI's API over HTTP, and serve a page with a chat."""

    host: str = "127.0.0.1"  # this machine alone; 0.0.0.0: every interface
    allowed_host: list[str] | tuple[str, ...] = ()  # more names of it; "*": any
    allowed_origins: list[str] | tuple[str, ...] = ()  # of pages elsewhere; "*": any
    port: Annotated[int, pydantic.Field(ge=0, le=65535)] = 8000  # 0: any free port
    api_key: Text | None = None  # that clients must send
    served_model_name: str | None = None
    max_body: Count = 2**22  # bytes of a request
    max_prompts: Count = 128  # of one request
    max_choices: Count = 16  # answers to one prompt
    max_queue: Count = 4096  # unfinished answers, long or short
    health_timeout: Wait = 10.0  # longer than the longest step
    grace: Wait = 30.0  # for unfinished answers at shutdown
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # each request

    def __post_init__(self) -> None:
        if not are_hosts(self.allowed_host):
            raise ValueError(f"allowed_host={self.allowed_host!r} must be names or addresses, without ports")
        origin = re.compile(r"\*|https?://[^/\s]+")
        if not all(map(origin.fullmatch, self.allowed_origins)):
            raise ValueError(
                f"allowed_origins={self.allowed_origins!r} must be '*', or addresses without a path, "
                "such as 'http://localhost:3000'"
            )


Cores = Annotated[float, pydantic.Field(ge=0)]


@explained
@dataclass(config=STRICT)
class Fleet(Serve):
    """Answer OpenAI's API with several engines, on Ray."""

    replicas: Count = 1  # engines at least, each with all its GPUs
    max_replicas: Count | None = None  # under load; None: as many as replicas
    max_ongoing: Count = 256  # unfinished requests per engine; others wait
    cpus: Cores = 1.0  # per engine
    address: str | None = None  # of a Ray cluster; None: a new one, on this machine

    def __post_init__(self) -> None:
        Serve.__post_init__(self)
        least, most = self.replicas, self.max_replicas or self.replicas
        require(least <= most, f"max_replicas={most} is below replicas={least}: raise it")
        if self.log_level != "info":
            raise ValueError(f"log_level={self.log_level!r} has no effect: a fleet's log is Ray's; leave it out")
        require(self.port > 0, "port=0 must be from 1 to 65535: set Fleet(port=...)")


@explained
@dataclass(config=STRICT)
class Batch:
    """Answer a file of requests in OpenAI's batch format."""

    batch_size: Count = 256  # requests at a time
