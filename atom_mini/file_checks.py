"""Rules for a checkpoint's JSON files, checked before anything is built from them (chapter 24c)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from .checkpoint import JsonObject, read_json
from .errors import require


def is_number(value: Any, kinds: type | tuple[type, ...] = (int, float)) -> TypeGuard[float]:
    """Whether `value` is a finite number that fits float32, and not a bool."""
    is_kind = isinstance(value, kinds) and type(value) is not bool
    return is_kind and -3e38 < value < 3e38


def is_count(value: object) -> bool:
    """Whether `value` is a whole number of at least 1."""
    return is_number(value, int) and value >= 1


def is_end(value: object) -> bool:
    """Whether `value` is a token id or a list of token ids."""
    many = value if type(value) is list else [value]
    return all(is_number(i, int) and i >= 0 for i in many)


def are_names(value: object) -> bool:
    """Whether `value` is a list of strings."""
    return type(value) is list and all(isinstance(name, str) for name in value)


COUNTED = [
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim",
]  # fmt: skip
Rules = Mapping[str, tuple[Callable[[object], bool], str]]  # field -> (its rule, in words)
FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "eos_token_id": (is_end, "a token id (0 or above) or a list of them"),
    "architectures": (are_names, "a list of strings"),
}
FIELDS |= dict.fromkeys(COUNTED, (is_count, "a whole number from 1"))
ABOVE = [
    "rope_theta", "rms_norm_eps", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
]  # fmt: skip
FIELDS |= dict.fromkeys(ABOVE, (lambda v: is_number(v) and v > 0, "a number above 0"))
FIELDS["rope_type"] = (lambda v: isinstance(v, str), "a string")


def check_fields(file: Path, raw: JsonObject, rules: Rules = FIELDS) -> None:
    """Raise ValueError (file, field, value) for a field that breaks its rule."""
    for name, value in raw.items():
        if name in rules and value is not None:
            holds, words = rules[name]
            require(holds(value), f"{file}: {name}={value!r} must be {words}")
        if isinstance(value, dict):
            check_fields(file, value, rules)


def check_index(file: Path, raw: JsonObject) -> None:
    """Raise ValueError if an index of shards does not name a file for each weight."""
    places = raw.get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{file} has no weight_map, which names the shard of each weight: download the file again")
    odd = [(k, v) for k, v in places.items() if not isinstance(v, str)][:1]
    require(not odd, f"{file}: weight_map must name a file for each weight, not {odd}")


def check_end(file: Path) -> None:
    """Raise ValueError for a JSON file that was cut off before its closing brace."""
    if not file.read_bytes().rstrip().endswith(b"}"):
        read_json(file)


def check_files(folder: Path) -> None:
    """Raise ValueError if a JSON file of `folder` breaks a rule; missing files are accepted."""
    for name in ("config.json", "generation_config.json"):
        if (file := folder / name).is_file():
            check_fields(file, read_json(file))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (file := folder / name).is_file():
            check_end(file)
    if (index := folder / "model.safetensors.index.json").is_file():
        check_index(index, read_json(index))
