"""The checks of `kv_transfer_config`, which lists engines of two kinds (chapter 73)."""

from __future__ import annotations

import difflib
import json
import os

from ..errors import require
from ..fields import EngineFields, is_on_cpu

SENDER, RECEIVER = ROLES = ("kv_producer", "kv_consumer")
SHARED, POINT_TO_POINT = CONNECTORS = ("SharedMemoryConnector", "P2pNcclConnector")  # kv_connector
SIZES = ("num_kvcache_blocks", "max_num_seqs", "max_num_batched_tokens")
EXAMPLE = '[{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]'
KEYS = ("kv_connector", *SIZES)
SAME = ("model", "dtype", "kv_cache_block_size", "max_model_len", "device")
MOST = 64  # engines


def check_role(role: object, place: str) -> dict[str, object]:
    """The dict of one engine. ValueError for an unknown role or key."""
    if not isinstance(role, dict):
        raise ValueError(f"{place}={role!r} must be a dict such as {{'kv_role': 'kv_producer'}}")
    kind = role.get("kv_role")
    if kind == "kv_both":
        raise ValueError(
            f"{place}: kv_role='kv_both' is an engine without kv_transfer_config: set one of {', '.join(ROLES)}"
        )
    require(kind in ROLES, f"{place}: kv_role={kind!r} must be one of {', '.join(ROLES)}")
    for name in role:
        if name in SAME:
            raise ValueError(
                f"{place}: {name}={role[name]!r} cannot be set for one engine: all engines have the same, "
                "because one reads the other's blocks: set it beside kv_transfer_config"
            )
        near = difflib.get_close_matches(str(name), KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"leave it out (it may have {', '.join(KEYS)})"
        require(name in ("kv_role", *KEYS), f"{place} has no key {name!r}: {hint}")
    connector = role.get("kv_connector", SHARED)
    if connector not in CONNECTORS:
        raise ValueError(f"{place}: kv_connector={connector!r} must be one of {', '.join(CONNECTORS)}")
    return dict(role)


def check_roles(given: object) -> list[dict[str, object]]:
    """The engines that `given`, a list or JSON, asks for. ValueError unless there is one of each kind."""
    what = f"kv_transfer_config={given!r}"
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(f"{what} must be JSON: {EXAMPLE}") from None
    if isinstance(given, dict):
        raise ValueError(
            f"{what} is one engine, and an engine of one role needs another process for the other role: "
            f"list one dict for each engine, as in {EXAMPLE}"
        )
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} must be a list of dicts: {EXAMPLE}")
    require(len(given) <= MOST, f"kv_transfer_config lists {len(given)} engines: list at most {MOST}")
    roles = [check_role(role, f"kv_transfer_config[{i}]") for i, role in enumerate(given)]
    for kind in ROLES:
        if all(role["kv_role"] != kind for role in roles):
            raise ValueError(f"{what} has no {kind}: add {{'kv_role': {kind!r}}}")
    names = {role.get("kv_connector") for role in roles}
    if len(names) > 1:
        raise ValueError(
            f"kv_transfer_config has kv_connector={sorted(map(str, names))}: set the same in each dict, or in none"
        )
    return roles


def own_options(role: dict[str, object]) -> dict[str, object]:
    """The options that one engine has for itself."""
    return {name: value for name, value in role.items() if name in SIZES}


def connector_name(config: EngineFields) -> str:
    """The `kv_connector` of all engines; by default shared memory on a CPU, and point to point between GPUs."""
    asked = config.kv_transfer_config[0].get("kv_connector")
    return str(asked or (SHARED if is_on_cpu(config) else POINT_TO_POINT))


def check_connector(config: EngineFields) -> None:
    """ValueError if blocks cannot go that way here, or there are fewer GPUs than engines."""
    name, is_cpu = connector_name(config), is_on_cpu(config)
    if name == SHARED and not is_cpu:
        raise ValueError(
            f"kv_connector={name!r} copies blocks through the host's memory, not between GPUs: "
            f"set {POINT_TO_POINT!r}, or device='cpu'"
        )
    if name == SHARED and not hasattr(os, "memfd_create"):
        raise ValueError(f"kv_connector={name!r} needs Linux: set {POINT_TO_POINT!r}, or leave out kv_transfer_config")
    if not is_cpu:
        devices_of(config)


def devices_of(config: EngineFields) -> list[str]:
    """The GPU of each engine. ValueError if there are too few."""
    import torch  # a front on a CPU starts faster without it

    size, count = len(config.kv_transfer_config), torch.cuda.device_count()
    if config.device not in (None, "cuda"):
        raise ValueError(f"device={config.device!r} is one device for {size} engines: set device='cuda'")
    if size > count:
        raise ValueError(
            f"kv_transfer_config lists {size} engines, each of which needs a GPU, and there are {count}: "
            "list fewer, or set device='cpu'"
        )
    return [f"cuda:{i}" for i in range(size)]


def check_members(config: EngineFields, given: set[str]) -> None:
    """ValueError if an engine's sizes do not fit, or blocks cannot go from one to another here."""
    if config.spec is None:
        return
    check_connector(config)
    shared = {name: getattr(config, name) for name in given - {"kv_transfer_config", "engine_process"}}
    for i, role in enumerate(config.kv_transfer_config):
        try:
            type(config)(config.model, **{**shared, **own_options(role), "ready_timeout": 600.0, "ping_timeout": 300.0})
        except ValueError as error:
            raise ValueError(f"kv_transfer_config[{i}]: {error}") from None
