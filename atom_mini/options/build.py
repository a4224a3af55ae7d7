"""Makes what the options ask for: the scheduler, the runner, the core, and the `LLM` (chapter 14)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import atom_mini.llm
from .. import assemble
from ..assemble import check_scheduler
from ..engine_core import EngineCore
from ..fields import EngineFields
from ..llm import Listener
from ..families.state_checks import keeps_state
from .args import EngineArgs
from ..scheduler import BaseScheduler, Scheduler

if TYPE_CHECKING:  # torch loads when an engine is made
    import torch
    from typing_extensions import Unpack

    from atom_mini.model_runner import ModelRunner
    from atom_mini.models import TorchOps
    from atom_mini.options.args import EngineOptions
    from atom_mini.sampler import Sampler
    from atom_mini.trace.trace import Metrics


def check_not_spyre(config: EngineFields) -> None:
    """ValueError for a scheduler of padded batches with a runner that does not know them."""
    own = config.scheduler_cls
    spyre = sys.modules.get("atom_mini.scheduling.spyre")  # which a subclass has imported
    if spyre and isinstance(own, type) and issubclass(own, spyre.SpyreScheduler):
        raise ValueError(f"scheduler_cls={own.__name__} needs the runner of padded batches: set scheduler='spyre', too")


def choose_scheduler(config: EngineFields) -> type[BaseScheduler]:
    """The scheduler's class for `config`. ValueError: see `check_scheduler`."""
    if config.scheduler == "spyre":
        from atom_mini.scheduling.spyre import SpyreScheduler

        return check_scheduler(config, SpyreScheduler)
    check_not_spyre(config)
    takes_turns = config.interleave_decode or config.scheduler_delay_factor
    if config.speculative_config is not None:
        from atom_mini.speculation.turns import SpecTurnScheduler
        from atom_mini.speculation.verify import SpecScheduler

        return check_scheduler(config, SpecTurnScheduler if takes_turns else SpecScheduler)
    if config.overlap:
        from atom_mini.scheduling.overlap import OverlapScheduler

        return check_scheduler(config, OverlapScheduler)
    if config.schedule_policy == "lpm":
        from atom_mini.scheduling.lpm import LpmScheduler

        return check_scheduler(config, LpmScheduler)
    if takes_turns:
        from atom_mini.scheduling.turns import TurnScheduler

        return check_scheduler(config, TurnScheduler)
    return assemble.choose_scheduler(config)


def make_scheduler(config: EngineFields) -> BaseScheduler:
    """Make the scheduler, with the prefix index that the options ask for."""
    scheduler = choose_scheduler(config)(config)
    if config.prefix_cache == "radix":
        from atom_mini.scheduling.radix_cache import RadixCache

        scheduler.block_manager.use_index(RadixCache)
    return scheduler


def choose_ops(config: EngineFields) -> tuple[TorchOps, Sampler]:
    """A layer's operations and the sampler."""
    if config.packed:
        from atom_mini.cpu.decode import CpuOps
        from atom_mini.sampler import Sampler

        return CpuOps(), Sampler()
    return assemble.choose_ops(config)


def bytes_beside(config: EngineFields, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """The memory of a drafter on the device: bytes in all, and per block of the cache. `dtype` None is the engine's."""
    if config.speculative_config is None:
        return 0, 0
    from atom_mini.model_runner import choose_device, choose_dtype
    from atom_mini.speculation.methods import find_drafter

    dtype = dtype or choose_dtype(config, choose_device(config.device))
    return find_drafter(config).memory(config, dtype)


def make_runner(config: EngineFields, kind: Callable[..., ModelRunner] | None = None) -> Any:
    """Make the runner that the options ask for. This loads the checkpoint.

    `kind`: a drafter's own class of runner instead.
    """
    import atom_mini.families.models  # noqa: F401 - fills MODELS

    if kind is not None:
        return kind(config, *choose_ops(config))
    if config.tensor_parallel_size > 1:
        from atom_mini.parallel.ranks import Leader

        return Leader(config, bytes_beside(config))
    if config.scheduler == "spyre":
        from atom_mini.scheduling.spyre_runner import RectangularRunner

        return RectangularRunner(config)
    if keeps_state(config):
        return make_state_runner(config)
    if config.compiled:
        from atom_mini.cpu.compiled_step import CompiledRunner

        return CompiledRunner(config, bytes_beside(config))
    runner_cls = assemble.choose_runner(config)
    return runner_cls(config, *choose_ops(config), bytes_beside(config))


def make_state_runner(config: EngineFields) -> ModelRunner:
    """Make the runner for layers that keep a state, which are also cached if asked for."""
    if config.enable_prefix_caching:
        from atom_mini.families.state_checkpoints import StateCacheRunner

        return StateCacheRunner(config, *choose_ops(config))
    from atom_mini.families.state import StateRunner

    return StateRunner(config, *choose_ops(config))


def make_core(config: EngineFields) -> EngineCore:
    """Make the engine core in this process."""
    if config.speculative_config is not None:
        return make_speculating(config)
    if config.overlap:
        from atom_mini.scheduling.launcher import Launcher
        from atom_mini.scheduling.overlap import OverlapCore

        launcher = Launcher(config, make_runner)
        config = config.changed(num_kvcache_blocks=launcher.runner.num_kvcache_blocks)
        return OverlapCore(config, launcher, make_scheduler(config))
    if config.kv_offloading_size is not None:
        return make_offloading(config)
    if config.kv_transfer_config is not None:
        return make_transferring(config)
    runner = make_runner(config)
    config = config.changed(num_kvcache_blocks=runner.num_kvcache_blocks)
    scheduler = make_scheduler(config)
    if keeps_state(config) and config.enable_prefix_caching:
        from atom_mini.families.state_checkpoints import StateCore

        return StateCore(config, runner, scheduler)
    return EngineCore(config, runner, scheduler)


def make_offloading(config: EngineFields) -> EngineCore:
    """Make the core with a second pool in host memory, which is taken first."""
    from atom_mini.scheduling.host_pool import OffloadCore
    from atom_mini.scheduling.offload import HostCopies

    copies = HostCopies(config)
    runner = make_runner(config)
    copies.attach(runner.kv_cache)
    config = config.changed(num_kvcache_blocks=runner.num_kvcache_blocks)
    return OffloadCore(config, runner, make_scheduler(config), copies)


def make_transferring(config: EngineFields) -> EngineCore:
    """Make the core of an engine that hands prompts over, or takes them."""
    from atom_mini.parallel.connectors import choose_connector
    from atom_mini.parallel.kv_transfer import TransferCore

    runner = make_runner(config)
    connector = choose_connector(config)(config, runner)
    config = config.changed(num_kvcache_blocks=runner.num_kvcache_blocks)
    return TransferCore(config, runner, make_scheduler(config), connector)


def make_speculating(config: EngineFields) -> EngineCore:
    """Make the core with the drafter that the options ask for."""
    from atom_mini.speculation.adaptive import AdaptiveCore
    from atom_mini.speculation.methods import find_drafter
    from atom_mini.speculation.verify import SpecCore, SpecScheduler

    runner = make_runner(config)
    config = config.changed(num_kvcache_blocks=runner.num_kvcache_blocks)
    drafter = find_drafter(config)(config, runner, make_runner)
    scheduler = cast(SpecScheduler, make_scheduler(config))  # as `choose_scheduler` has checked
    core = AdaptiveCore if config.speculative_config.enable_adaptive_verification else SpecCore
    return core(config, runner, drafter, scheduler)


def make_engine_core(config: EngineFields) -> EngineCore:
    """Make the engine core in this process, or a client of cores in others."""
    own = choose_scheduler(config)  # raises ValueError for a wrong `scheduler_cls`
    if config.kv_transfer_config is not None:
        if not issubclass(own, Scheduler):
            raise ValueError(
                f"scheduler_cls={own.__name__} cannot say what its sequences may still need: "
                "derive it from Scheduler, or leave out kv_transfer_config"
            )
        from atom_mini.parallel.apart import Apart

        return cast(EngineCore, Apart(config))
    if config.engine_process:
        from atom_mini.parallel.replicas import make_front

        return cast(EngineCore, make_front(config))  # has the interface of a core
    return make_core(config)


def make_shown(config: EngineFields) -> EngineCore:
    """`make_engine_core`; stderr, if it is a terminal, shows what is loaded and how long it took."""
    if config.folder is None or sys.stderr is None or not sys.stderr.isatty():
        return make_engine_core(config)
    size = sum(file.stat().st_size for file in config.folder.glob("*.safetensors"))
    what = f"loading {config.model} ({size / 1e6:,.0f} MB) ... "
    started = time.time()
    print(what, end="", file=sys.stderr, flush=True)
    found = ""
    try:
        core = make_engine_core(config)
        blocks = core.config.num_kvcache_blocks
        found = f"{blocks:,} blocks, {time.time() - started:.1f} s"
        return core
    finally:
        print(found, file=sys.stderr)


class LLM(atom_mini.llm.LLM):
    """A loaded checkpoint and its engine. `options` are those of `EngineArgs`.

    `metrics` counts what the steps did. `trace` holds their records if `trace=True`,
    else it is None. For threads, processes, and errors, see `atom_mini.llm.LLM`.
    """

    config_cls = EngineArgs
    config: EngineArgs

    def __init__(self, model: str | Path, *, seed: int | None = None, **options: Unpack[EngineOptions]) -> None:
        super().__init__(model, seed=seed, **options)
        from atom_mini.trace.callbacks import Callbacks, Log
        from atom_mini.trace.trace import Metrics, record

        self.listeners += [Metrics(), Callbacks(self), Log(self)]
        self.trace = record(self.engine_core, self.tokenizer) if self.config.trace else None

    @property
    def metrics(self) -> Metrics:
        """The first listener, which counts steps and tokens."""
        return cast("Metrics", self.listeners[0])

    @metrics.setter
    def metrics(self, listener: Listener) -> None:
        self.listeners[0] = listener

    def make_engine_core(self) -> EngineCore:
        """Make the engine that `config` asks for. This loads the checkpoint."""
        return make_shown(self.config)
