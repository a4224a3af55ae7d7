"""All options in one class, the parts they choose, and one table of what goes together (chapter 14)."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from ..checkpoint import ModelSpec
from ..config import STRICT, explained
from ..errors import require
from ..families.state_checks import asks_for_checkpoints, check_checkpoints, keeps_no_checkpoint, keeps_state
from ..fields import EngineFields, is_on_cpu


@explained
@dataclass(frozen=True, config=STRICT)
class EngineArgs(EngineFields):
    """The options of an engine, checked together.

    Raises ValueError (value, limit, option) before anything is loaded.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _check_all(cls, data: object, check: Callable[[object], EngineArgs]) -> EngineArgs:
        config = check(data)
        if not isinstance(data, ArgsKwargs):  # an EngineArgs already
            return config
        given = data.kwargs or {}
        config.settle({name for name, value in given.items() if value is not None})
        return config

    def _read_checkpoint(self, model: str) -> None:
        import atom_mini.families.specs  # noqa: F401 - registers its architectures

        super()._read_checkpoint(model)

    @property
    def max_decode_rows(self) -> int:
        """The number of rows of the largest decode that gets a recorded graph."""
        if self.speculative_config is None:
            return self.max_num_seqs
        from atom_mini.speculation.config import count_rows

        return count_rows(self)

    def settle(self, given: set[str]) -> None:
        """Fill in the options that follow from others.

        `given`: the options that the user has set. Raises ValueError for options that do not go together.
        """
        if self.prefix_cache is None:
            self._set(prefix_cache="hash" if self.enable_prefix_caching else "none")
        if self.quantization is not None and self.spec is not None:
            from atom_mini.cpu.int8 import check_int8

            self._set(spec=check_int8(self))
        self._check_parts(given)
        apply_all(self, given)
        check_switches(self, given)
        self._set(**check_checkpoints(self))
        if self.fuse_layers and self.spec is not None:
            self._set(spec=fuse(self))
        if self.speculative_config is not None:
            from atom_mini.speculation.config import check_mtp

            check_mtp(self)
        if self.engine_process or self.enable_expert_parallel:
            from atom_mini.parallel.checks import check_processes

            self._set(**check_processes(self, given))

    def _check_parts(self, given: set[str]) -> None:
        """Let each part fill in and check its own options."""
        if self.spec is not None and (self.compiled or self.packed):
            from atom_mini.cpu.compiled import check_cpu

            check_cpu(self)
        if self.spec is not None and self.kv_offloading_size is not None:
            from atom_mini.scheduling.offload import check_offloading

            check_offloading(self)
        if self.scheduler == "spyre":
            from atom_mini.scheduling.spyre import check_spyre

            self._set(interleave=check_spyre(self, given))
        if self.speculative_config is not None:
            from atom_mini.speculation.config import check_speculative

            self._set(speculative_config=check_speculative(self))
        if self.kv_transfer_config is not None:
            from atom_mini.parallel.roles import check_roles

            self._set(kv_transfer_config=check_roles(self.kv_transfer_config))


class Need(NamedTuple):
    """What one option requires of others."""

    asked: str  # the condition, in words
    holds: Callable[[EngineArgs], bool]
    needs: dict[str, tuple[object, ...]]  # option -> its allowed values
    why: str


def has(name: str, *values: object) -> Callable[[EngineArgs], bool]:
    """The condition that the option `name` has one of `values`."""
    return lambda config: getattr(config, name) in values


def many(name: str) -> Callable[[EngineArgs], bool]:
    """The condition that the option `name` is above 1."""
    return lambda config: getattr(config, name) > 1


def drafts(config: EngineArgs) -> bool:
    """Whether tokens are drafted."""
    return config.speculative_config is not None


def drafts_by(*methods: str) -> Callable[[EngineArgs], bool]:
    """The condition that tokens are drafted by one of `methods`."""
    return lambda config: drafts(config) and config.speculative_config.method in methods


def has_roles(config: EngineArgs) -> bool:
    """Whether prompts and decodes have engines of their own."""
    return config.kv_transfer_config is not None


KNOWN = "a step is planned before the tokens of the last one are known"
TOGETHER: list[Need] = [
    Need("overlap=True", has("overlap", True),
        {"scheduler": ("atom",), "scheduler_delay_factor": (0.0,)}, KNOWN),
    Need("enable_mixed_steps=True", has("enable_mixed_steps", True),
        {"enable_chunked_prefill": (True,), "scheduler": ("atom",), "overlap": (False,),
         "speculative_config": (None,), "interleave_decode": (False,),
         "scheduler_delay_factor": (0.0,), "lockstep": (False,)},
        "a mixed step has its own plan: decodes first, then chunks of prompts"),
    Need("speculative_config", drafts,
        {"scheduler": ("atom",), "overlap": (False,)}, KNOWN),
    Need("EAGLE or MTP", drafts_by("eagle3", "mtp"),
        {"compiled": (False,), "fuse_layers": (False,)},
        "its head reads what lies between two layers"),
    Need("fuse_layers=True", has("fuse_layers", True),
        {"packed": (False,), "scheduler": ("atom",), "attention": ("triton",),
         "compiled": (False,), "tensor_parallel_size": (1,)},
        "it is Triton kernels that read whole matrices"),
    Need("packed=True", has("packed", True),
        {"scheduler": ("atom",), "attention": ("torch",), "compiled": (False,),
         "tensor_parallel_size": (1,)},
        "it has its own operations, in torch on one CPU"),
    Need("quantization='int8'", has("quantization", "int8"),
        {"attention": ("torch",), "fuse_layers": (False,),
         "tensor_parallel_size": (1,)}, "its products are made for one CPU"),
    Need("prefix_cache='hash' or 'radix'", has("prefix_cache", "hash", "radix"),
        {"enable_prefix_caching": (True,)}, "both are prefix caches"),
    Need("prefix_cache='none'", has("prefix_cache", "none"),
        {"enable_prefix_caching": (False,)}, "there is no prefix cache"),
    Need("schedule_policy='lpm'", has("schedule_policy", "lpm"),
        {"prefix_cache": ("radix",), "scheduler": ("atom",), "overlap": (False,),
         "enable_mixed_steps": (False,), "speculative_config": (None,),
         "interleave_decode": (False,), "scheduler_delay_factor": (0.0,),
         "lockstep": (False,)},
        "a scheduler of its own sorts the queue by what the tree has cached"),
    Need("kv_offloading_size", lambda c: c.kv_offloading_size is not None,
        {"enable_prefix_caching": (True,), "prefix_cache": ("hash", "radix"),
         "scheduler": ("atom",), "overlap": (False,), "speculative_config": (None,),
         "tensor_parallel_size": (1,), "lockstep": (False,)},
        "blocks that the prefix cache loses are copied between two steps of one device"),
    Need("scheduler='spyre'", has("scheduler", "spyre"),
        {"interleave_decode": (False,), "attention": ("torch",), "compiled": (False,),
         "enable_chunked_prefill": (True,), "scheduler_delay_factor": (0.0,)},
        "Spyre's scheduler plans steps by its own rules"),
]  # fmt: skip


STATE = "layers that keep a state"
TOGETHER += [
    Need("state_checkpoint_interval_tokens or num_state_checkpoints",
        asks_for_checkpoints,
        {"enable_prefix_caching": (True,), "prefix_cache": ("hash",),
         "overlap": (False,), "enable_chunked_prefill": (True,)},
        "a step ends where a state is kept for the prefix cache"),
    Need("layers that keep a state, and overlap=True",
        lambda c: keeps_state(c) and c.overlap,
        {"enable_prefix_caching": (False,), "prefix_cache": ("none",),
         "routing": ("load",)},
        "states are copied between two steps"),
    Need("layers that keep a state, and enable_chunked_prefill=False",
        lambda c: keeps_state(c) and not c.enable_chunked_prefill,
        {"enable_prefix_caching": (False,), "prefix_cache": ("none",),
         "routing": ("load",)},
        "a step ends where a state is kept for the prefix cache"),
    Need("layers that keep a state, and a short max_model_len", keeps_no_checkpoint,
        {"enable_prefix_caching": (False,), "prefix_cache": ("none",),
         "routing": ("load",)},
        "a state is kept each 8192 tokens, or as state_checkpoint_interval_tokens says"),
    Need(STATE, keeps_state, {"prefix_cache": ("hash", "none")},
        "the tree does not know which states are kept"),
    Need(STATE, keeps_state, {"kv_offloading_size": (None,)},
        "host memory would keep blocks without their states"),
    Need(STATE, keeps_state, {"speculative_config": (None,)},
        "a state here keeps no copy from before the drafts"),
    Need(STATE, keeps_state, {"scheduler": ("atom",)},
        "a padded step would write its padding into the state"),
    Need(STATE, keeps_state, {"tensor_parallel_size": (1,)},
        "states are not split over ranks"),
    Need(STATE, keeps_state, {"kv_transfer_config": (None,)},
        "blocks are handed over, not states"),
    Need(STATE, keeps_state, {"packed": (False,)},
        "its runner has its own operations"),
    Need(STATE, keeps_state, {"attention": ("torch",)},
        "there is no kernel for states, and none tuned for 256 numbers per head"),
]  # fmt: skip

SEVERAL = many("data_parallel_size")
RANKS = many("tensor_parallel_size")
TOGETHER += [
    Need("engine_process=True", has("engine_process", True), {"trace": (False,)},
        "records stay in the other process"),
    Need("tensor_parallel_size above 1", RANKS,
        {"scheduler": ("atom",)}, "Spyre's steps are not sent to ranks"),
    Need("tensor_parallel_size above 1", RANKS,
        {"compiled": (False,)}, "a rank has only a part of each matrix"),
    Need("tensor_parallel_size above 1", RANKS,
        {"engine_process": (True,)}, "a rank that dies ends its process"),
    Need("EAGLE or MTP over ranks",
        lambda c: RANKS(c) and drafts_by("eagle3", "mtp")(c),
        {"enforce_eager": (True,)}, "its head is added after graphs are recorded"),
    Need("data_parallel_size above 1", SEVERAL,
        {"engine_process": (True,)}, "each rank or engine gets its own device"),
    Need("routing='prefix'", has("routing", "prefix"),
        {"enable_prefix_caching": (True,), "prefix_cache": ("hash",)},
        "it asks which engine has a prompt's blocks"),
    Need("enable_expert_parallel=True over engines",
        lambda c: SEVERAL(c) and c.enable_expert_parallel and not RANKS(c),
        {"lockstep": (True,)}, "the engines wait for each other's experts"),
    Need("lockstep=True", has("lockstep", True),
        {"overlap": (False,), "scheduler": ("atom",), "tensor_parallel_size": (1,)},
        "all engines take the same step"),
    Need("MTP in lockstep", lambda c: c.lockstep and drafts_by("mtp")(c),
        {"enable_expert_parallel": (False,)}, "its own experts would be split, too"),
    Need("kv_transfer_config", has_roles, {"engine_process": (True,)},
        "each engine is a process"),
    Need("kv_transfer_config", has_roles,
        {"data_parallel_size": (1,), "tensor_parallel_size": (1,), "scheduler": ("atom",),
         "overlap": (False,), "speculative_config": (None,), "kv_offloading_size": (None,)},
        "it lists the engines, and blocks are copied between two plain steps of them"),
]  # fmt: skip


def apply(row: Need, config: EngineArgs, fixed: set[str]) -> bool:
    """Set the options that `row` requires, and add them to `fixed`; return whether any
    changed. Raises ValueError for an option in `fixed` with another value."""
    before = len(fixed)
    for name, allowed in row.needs.items():
        now = getattr(config, name)
        if now not in allowed:
            need = repr(allowed[0]) if len(allowed) == 1 else f"one of {[*allowed]}"
            require(name not in fixed, f"{name}={now!r} does not go with {row.asked}: set it to {need} ({row.why})")
            config._set(**{name: allowed[0]})
            fixed.add(name)
    return len(fixed) > before


def apply_all(config: EngineArgs, given: set[str]) -> None:
    """Apply all rows of `TOGETHER` whose condition holds, until nothing changes.

    `given`: the options that the user has set. Raises ValueError as `apply` does.
    """
    fixed = set(given)
    while any(apply(row, config, fixed) for row in TOGETHER if row.holds(config)):
        pass

SWITCHES = {  # option -> the options that have no effect while it has its default
    "scheduler": ("chunk_size", "max_batch_tkv_limit", "interleave"),
    "engine_process": ("ready_timeout", "ping_timeout"),
    "tensor_parallel_size": ("collective_timeout",),
    "data_parallel_size": ("routing", "lockstep"),
}


def check_switches(config: EngineArgs, given: set[str]) -> None:
    """Raise ValueError for `given` options that have no effect."""

    def is_default(name: str) -> bool:
        return bool(getattr(config, name) == getattr(EngineArgs, name))

    for switch, names in SWITCHES.items():
        idle = [n for n in names if n in given and not is_default(n)]
        if idle and is_default(switch):
            which = ", ".join(idle)
            now = getattr(config, switch)
            raise ValueError(f"{which} has no effect with {switch}={now!r}: change that, or leave {which} out")


def fuse(config: EngineArgs) -> ModelSpec:
    """The spec with fused operations. ValueError if they cannot run here, or not for its layers."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None or (is_on_cpu(config) and not is_interpreted):
        raise ValueError(
            "fuse_layers=True needs Triton and a GPU (or, for tests, TRITON_INTERPRET=1 before Python starts): "
            "leave it out"
        )
    from atom_mini.gpu.fused import fused_spec

    return fused_spec(config.spec)


class EngineOptions(TypedDict, total=False):
    """The options of an engine as keywords: the fields of `EngineArgs`, for editors and type checkers."""

    device: str | None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None
    kv_cache_block_size: int
    num_kvcache_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enable_mixed_steps: bool
    attention: Literal["triton", "torch"] | None
    enforce_eager: bool
    scheduler_cls: Any | None
    interleave_decode: bool
    scheduler_delay_factor: float
    overlap: bool
    fuse_layers: bool
    compiled: bool
    packed: bool
    quantization: Literal["int8"] | None
    trace: bool
    prefix_cache: Literal["hash", "radix", "none"] | None
    schedule_policy: Literal["lpm"] | None
    kv_offloading_size: float | None
    state_checkpoint_interval_tokens: int | None
    num_state_checkpoints: int | None
    scheduler: Literal["atom", "spyre"]
    chunk_size: int
    max_batch_tkv_limit: int
    interleave: bool
    speculative_config: Any
    engine_process: bool
    ready_timeout: float
    ping_timeout: float
    tensor_parallel_size: int
    collective_timeout: float
    enable_expert_parallel: bool
    data_parallel_size: int
    routing: Literal["load", "prefix"]
    lockstep: bool
    kv_transfer_config: Any
