"""Which models keep states, and whether their state checkpoints fit (chapter 65c)."""

from __future__ import annotations

from ..checkpoint import JsonObject
from ..config import Config
from ..errors import require
from ..fields import EngineFields, is_on_cpu

INTERVAL = 8192  # tokens between two state checkpoints: ATOM's default
COUNT = 32  # state checkpoints


def keeps_state(config: Config) -> bool:
    """Whether some layers of the model keep a state instead of keys and values."""
    return "linear_attention" in (getattr(config.spec, "layer_types", None) or ())


def asks_for_checkpoints(config: EngineFields) -> bool:
    """Whether an option of state checkpoints is set."""
    options = config.state_checkpoint_interval_tokens, config.num_state_checkpoints
    return any(option is not None for option in options)


def default_interval(config: EngineFields) -> int:
    """`INTERVAL` in whole blocks."""
    return INTERVAL - INTERVAL % config.kv_cache_block_size


def keeps_no_checkpoint(config: EngineFields) -> bool:
    """Whether no sequence would be long enough for a state checkpoint, by default."""
    if not keeps_state(config) or asks_for_checkpoints(config):
        return False
    return not 0 < default_interval(config) < (config.max_model_len or 0)


def check_checkpoints(config: EngineFields) -> JsonObject:
    """The options of state checkpoints, filled in. ValueError if they do not fit."""
    interval, count = config.state_checkpoint_interval_tokens, config.num_state_checkpoints
    if config.spec is not None and not keeps_state(config):
        options = {"state_checkpoint_interval_tokens": interval, "num_state_checkpoints": count}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        if given:
            raise ValueError(f"{' and '.join(given)} has no effect without layers that keep a state: leave it out")
    if not (keeps_state(config) and config.enable_prefix_caching):
        return {}
    interval, count = interval or default_interval(config), count or COUNT
    check_interval(config, interval)
    if is_on_cpu(config):
        check_memory(config, count)
    return {"state_checkpoint_interval_tokens": interval, "num_state_checkpoints": count}


def check_interval(config: EngineFields, interval: int) -> None:
    """ValueError if no sequence reaches the end of an interval, or no block ends there."""
    size, longest = config.kv_cache_block_size, config.max_model_len or 0
    what = f"state_checkpoint_interval_tokens={interval}"
    require(interval % size == 0, f"{what} is not a multiple of kv_cache_block_size={size}: set it to one")
    require(interval < longest, f"{what} must be below max_model_len={longest}: lower it")


def checkpoint_bytes(config: EngineFields) -> int:
    """Bytes of one state checkpoint."""
    from ..model_runner import choose_device, choose_dtype
    from .state import state_bytes

    return state_bytes(config.spec, choose_dtype(config, choose_device(config.device)))


def check_memory(config: EngineFields, count: int) -> None:
    """ValueError if `count` state checkpoints do not fit into the host's memory."""
    from ..memory import free_host_bytes

    each, free = checkpoint_bytes(config), free_host_bytes()
    if count * each >= free:
        raise ValueError(
            f"num_state_checkpoints={count} needs {count * each} bytes, but {free} are free: "
            f"set it to at most {free // each - 1}"
        )
