"""What the process of an engine or of a rank loads (chapters 70 and 71c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..fields import Recipe
from .args import EngineArgs
from .build import make_core

if TYPE_CHECKING:  # an extra, for several processes
    import zmq


def from_recipe(recipe: Recipe) -> EngineArgs:
    """The config that `recipe` describes; ValueError if its options are invalid."""
    config = EngineArgs(recipe["model"], **recipe["options"])
    return config.changed(**recipe.get("inner", {}), recipe=recipe)


def load_engine(recipe: Recipe, inbox: zmq.Socket, outbox: zmq.Socket) -> Callable[[], None]:
    """Load the engine and send READY; returns the function that runs its loop."""
    from ..parallel.engine_process import EngineCoreProc, Ready, encode

    config = from_recipe(recipe)
    loop_cls: Callable[..., EngineCoreProc] = EngineCoreProc
    if config.data_parallel_size > 1:
        from ..parallel.replicas import make_loop as loop_cls
    if config.kv_transfer_config is not None:
        from ..parallel.apart import TransferProc as loop_cls
    if config.lockstep:
        from ..parallel.lockstep import make_member

        core = make_member(config, make_core)
    else:
        core = make_core(config)
    loop = loop_cls(core, inbox, outbox)
    outbox.send(encode(Ready(0, core.config.num_kvcache_blocks or 0, core.scheduler.max_len, repr(core))))
    return loop.run


def load_rank(recipe: Recipe, inbox: zmq.Socket, outbox: zmq.Socket) -> Callable[[], None]:
    """Load a rank's part of the model; returns the function that runs its steps."""
    from ..parallel.ranks import Rank

    return Rank(from_recipe(recipe), inbox, outbox).run
