"""The checks of the options for several processes, and the recipe of a process (chapter 72a)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec

from ..errors import install, require
from ..fields import EngineFields, Recipe


def import_path(kind: type, off: str) -> str:
    """`"module:name"` of a class. ValueError if another process cannot import it; `off` is what to set instead."""
    module, name = kind.__module__, kind.__qualname__
    home = sys.modules.get(module)
    if module == "__main__" or getattr(home, name, None) is not kind:
        raise ValueError(
            f"{name} is defined in {module}, from where another process cannot import it: "
            f"move it to a module of its own, or set {off}"
        )
    return f"{module}:{name}"


def as_recipe(config: EngineFields, given: set[str], off: str = "engine_process=False") -> Recipe:
    """The model and the options `given`, for another process. ValueError for a value
    that is not JSON; `off` is what to set instead."""
    options = {}
    for name in sorted(given):
        value = getattr(config, name)
        value = import_path(value, off) if isinstance(value, type) else value
        try:
            options[name] = json.loads(json.dumps(value, default=asdict))
        except TypeError:
            raise ValueError(f"{name}={value!r} cannot be sent to another process: set {off}") from None
    inner = {"engine_process": False, "ready_timeout": config.ready_timeout}
    return {"model": str(config.model), "options": options, "inner": inner}


def require_extra(asked: str) -> None:
    """ValueError if the libraries for messages between processes are missing."""
    missing = " and ".join(n for n in ("zmq", "msgspec") if find_spec(n) is None)
    require(not missing, f"{asked} needs {missing}: {install('processes')}")


def make_recipe(config: EngineFields, given: set[str]) -> Recipe:
    """The recipe of its processes. ValueError for an option that cannot be sent."""
    sizes = ("tensor_parallel_size", "data_parallel_size")  # they imply engine_process
    name = next((n for n in sizes if getattr(config, n) > 1), None)
    asked, off = "engine_process=True", "engine_process=False"
    if name:
        asked, off = f"{name}={getattr(config, name)}", f"{name}=1"
    elif config.kv_transfer_config is not None:
        asked, off = "kv_transfer_config", "kv_transfer_config=None"
    require_extra(asked)
    return as_recipe(config, given - {"engine_process", "ready_timeout", "ping_timeout"}, off)


def check_ranks(config: EngineFields) -> None:
    """ValueError if the model cannot be cut."""
    n, is_dealt = config.tensor_parallel_size, config.enable_expert_parallel
    if config.spec is not None:
        from atom_mini.parallel.shards import cut_spec  # torch loads here

        cut_spec(config.spec, n, is_dealt)


def check_dealt_engines(config: EngineFields) -> None:
    """ValueError if there is only one engine, or experts cannot be dealt."""
    n, spec = config.data_parallel_size, config.spec
    if n < 2:
        raise ValueError(
            "enable_expert_parallel=True needs several ranks or engines: "
            "raise tensor_parallel_size or data_parallel_size"
        )
    if spec is not None:
        from atom_mini.parallel.shards import check_dealt  # torch loads here

        check_dealt(spec, n, "data_parallel_size")
        if getattr(spec.storage, "method", None) == "mxfp4":
            raise ValueError(f"data_parallel_size={n} cannot deal experts in MXFP4: set it to 1")


def check_processes(config: EngineFields, given: set[str]) -> dict[str, object]:
    """Check the options of this part; returns those that follow, with the recipe."""
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        check_dealt_engines(config)
    if config.kv_transfer_config is not None:
        from atom_mini.parallel.roles import check_members

        check_members(config, given)
    found: dict[str, object] = {}
    if config.engine_process:
        found["recipe"] = make_recipe(config, given)
    if config.tensor_parallel_size > 1:
        check_ranks(config)
        found["ping_timeout"] = min(config.ping_timeout, config.collective_timeout + 2)
    return found
