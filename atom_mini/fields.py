"""The options of all parts, as the parts read them (chapter 14)."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import Field
from pydantic.dataclasses import dataclass

from .checkpoint import JsonObject
from .config import STRICT, Config, Count, explained

Seconds = Annotated[float, Field(gt=0, lt=1e9)]


class Recipe(TypedDict, total=False):
    """What the process of an engine or of a rank is started with, as JSON (70)."""

    model: str
    options: JsonObject  # that the user has set
    inner: JsonObject  # that the process has instead, unchecked
    meeting: str  # the folder of its sockets
    name: str
    number: int
    load: str  # "module:function", which loads it


@explained
@dataclass(frozen=True, config=STRICT)
class EngineFields(Config):
    """The options of Part I and of all later parts, each checked alone."""

    _: KW_ONLY
    # scheduling, fewer launches, a CPU (20_turns, 23a, 25, 92, 92b), records (30)
    interleave_decode: bool = False  # decode between two prefills
    # prompts wait until the oldest has waited this many times the last prefill step
    scheduler_delay_factor: Annotated[float, Field(ge=0)] = 0.0
    overlap: bool = False  # plan a step while the device computes the last one
    fuse_layers: bool = False  # on a GPU: five launches per layer in small batches
    compiled: bool = False  # on a CPU: decodes of dense models as one function
    packed: bool = False  # on a CPU: packed products, decodes in place (92, 92a)
    quantization: Literal["int8"] | None = None  # of weights and activations (92b)
    trace: bool = False  # record each step
    # other caches and schedulers (40, 41); None: "hash" if caching is on
    prefix_cache: Literal["hash", "radix", "none"] | None = None
    # lpm: the longest cached prefix first; None: first come, first served
    schedule_policy: Literal["lpm"] | None = None
    # GiB of host memory for blocks that the prefix cache would lose (42)
    kv_offloading_size: Annotated[float, Field(gt=0)] | None = None
    # prefix hits of layers that keep a state (65c); None: 8192, in whole blocks
    state_checkpoint_interval_tokens: Count | None = None
    num_state_checkpoints: Count | None = None  # None: 32
    scheduler: Literal["atom", "spyre"] = "atom"
    chunk_size: Count = 512  # tokens per prefill step of Spyre's scheduler
    max_batch_tkv_limit: Count = 131_072  # sequences x tkv
    interleave: bool = True  # decode between two chunks
    # drafts (50): a dict, JSON, or a `SpeculativeConfig`
    speculative_config: Any = None
    # engines in other processes (70 to 72)
    engine_process: bool = False
    ready_timeout: Seconds = 600.0  # for loading
    ping_timeout: Seconds = 300.0  # longer than the longest step
    tensor_parallel_size: Count = 1  # ranks, one device each
    collective_timeout: Seconds = 300.0  # longer than the longest step
    enable_expert_parallel: bool = False  # each rank has whole experts
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1  # engines
    routing: Literal["load", "prefix"] = "load"
    lockstep: bool = False
    # prompts apart from decodes (73): a list, or JSON, with a dict for each engine
    kv_transfer_config: Any = None
    scheduler_options = (
        *Config.scheduler_options, "scheduler", "speculative_config", "overlap",
        "interleave_decode", "scheduler_delay_factor", "schedule_policy",
    )  # fmt: skip

    # no option: what another process must know, of a config that needs one (70)
    recipe: ClassVar[Recipe] = {}


def is_on_cpu(config: Config) -> bool:
    """Whether the engine runs on a CPU."""
    from atom_mini.model_runner import choose_device  # imports torch

    return choose_device(config.device).type == "cpu"
