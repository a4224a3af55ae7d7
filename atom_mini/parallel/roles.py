"""The checks of `kv_transfer_config`, which lists engines of two kinds (chapter 74)."""

from __future__ import annotations

import difflib
import json
import os

from ..errors import require
from ..fields import EngineFields, is_on_cpu

ROLES = ("kv_producer", "kv_consumer")
SIZES = ("num_kvcache_blocks", "max_num_seqs", "max_num_batched_tokens")
EXAMPLE = '[{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]'
SAME = ("model", "dtype", "kv_cache_block_size", "max_model_len", "device")
MOST = 64  # engines


def check_role(role: object, place: str) -> dict[str, object]:
    """The dict of one engine. ValueError for an unknown role or key."""
    if not isinstance(role, dict):
        raise ValueError(f"{place}={role!r} must be a dict such as {{'kv_role': 'kv_producer'}}")
    kind = role.get("kv_role")
    both = f"{place}: kv_role='kv_both' is an engine without kv_transfer_config: set one of {', '.join(ROLES)}"
    require(kind != "kv_both", both)
    require(kind in ROLES, f"{place}: kv_role={kind!r} must be one of {', '.join(ROLES)}")
    for name in role:
        if name in SAME:
            why = "all engines have the same, because one reads the other's blocks: set it beside kv_transfer_config"
            raise ValueError(f"{place}: {name}={role[name]!r} cannot be set for one engine: {why}")
        near = difflib.get_close_matches(str(name), SIZES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"leave it out (it may have {', '.join(SIZES)})"
        require(name in ("kv_role", *SIZES), f"{place} has no key {name!r}: {hint}")
    return dict(role)


def check_roles(given: object) -> list[dict[str, object]]:
    """The engines that `given`, a list or JSON, asks for. ValueError unless there is one of each kind."""
    what = f"kv_transfer_config={given!r}"
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(f"{what} must be JSON: {EXAMPLE}") from None
    alone = f"{what} is one engine, and an engine of one role needs another process for the other role"
    require(not isinstance(given, dict), f"{alone}: list one dict for each engine, as in {EXAMPLE}")
    if not isinstance(given, list | tuple):
        raise ValueError(f"{what} must be a list of dicts: {EXAMPLE}")
    require(len(given) <= MOST, f"kv_transfer_config lists {len(given)} engines: list at most {MOST}")
    roles = [check_role(role, f"kv_transfer_config[{i}]") for i, role in enumerate(given)]
    for kind in ROLES:
        missing = f"{what} has no {kind}: add {{'kv_role': {kind!r}}}"
        require(any(role["kv_role"] == kind for role in roles), missing)
    return roles


def check_members(config: EngineFields, given: set[str]) -> None:
    """ValueError if an engine's sizes do not fit, or blocks cannot be shared here."""
    require(hasattr(os, "memfd_create"), "kv_transfer_config needs Linux, for shared memory: leave it out")
    if config.spec is None:
        return
    on_gpu = "kv_transfer_config copies blocks through the host's memory, not between GPUs"
    require(is_on_cpu(config), f"device={config.device!r}: {on_gpu}: set device='cpu', or leave it out")
    shared = {name: getattr(config, name) for name in given - {"kv_transfer_config", "engine_process"}}
    for i, role in enumerate(config.kv_transfer_config):
        own = {name: value for name, value in role.items() if name != "kv_role"}
        try:
            type(config)(config.model, **{**shared, **own, "ready_timeout": 600.0, "ping_timeout": 300.0})
        except ValueError as error:
            raise ValueError(f"kv_transfer_config[{i}]: {error}") from None
