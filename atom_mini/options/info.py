"""What memory a checkpoint needs, and what fits, without reading a weight (chapter 08)."""

from __future__ import annotations

import torch

import atom_mini.families.models  # noqa: F401 - fills MODELS
import atom_mini.model_runner as runner
from ..checkpoint import JsonObject
from ..families.state import state_bytes
from ..families.state_checks import keeps_state
from ..loading import blank_model
from ..memory import kvcache_block_bytes
from ..models import TorchOps
from .args import EngineArgs
from .build import bytes_beside


def memory_needs(config: EngineArgs, device: str) -> JsonObject:
    """The bytes that a checkpoint needs on a "cpu" or "cuda" device: for its weights, a
    token's K/V, a sequence's state, and a draft model."""
    stored = None if device == "cpu" else config.spec.dtype
    dtype = getattr(torch, config.dtype or stored or "float32")
    ops = TorchOps()
    meta = torch.device("meta")
    plain = blank_model(config.spec, 1, meta, dtype, ops)
    ops.is_triton = (config.attention or {"cuda": "triton"}.get(device)) == "triton"
    model = blank_model(config.spec, 1, meta, dtype, ops)
    draft, per_block = bytes_beside(config, dtype)
    state = state_bytes(config.spec, dtype) if keeps_state(config) else 0
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(weight.numel() for weight in plain.parameters()),
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
        "kvcache_bytes_per_token": kvcache_block_bytes(config.spec, 1, dtype),
        "state_bytes_per_sequence": state,
        "draft_weight_bytes": draft,
        "draft_kvcache_bytes_per_token": per_block // config.kv_cache_block_size,
    }


def describe(config: EngineArgs) -> JsonObject:
    """`needs` of the checkpoint of `config` on its device, and how many tokens fit."""
    device = runner.choose_device(config.device)
    report: JsonObject = {"model": config.model, "device": str(device)}
    report |= memory_needs(config, device.type)
    held = report["weight_bytes"] + report["draft_weight_bytes"]
    kept = config.num_state_checkpoints if config.enable_prefix_caching else None
    held += (config.max_num_seqs + (kept or 0)) * report["state_bytes_per_sequence"]
    if kept is not None:
        report["state_checkpoint_bytes"] = kept * report["state_bytes_per_sequence"]
    each = report["kvcache_bytes_per_token"] + report["draft_kvcache_bytes_per_token"]
    left = min(runner.CPU_KVCACHE_BYTES, (runner.free_host_bytes() - held) // 2)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        left = int(total * config.gpu_memory_utilization) - (total - free) - held
    if config.kv_offloading_size is not None:
        from atom_mini.scheduling.offload import block_bytes, count_host_blocks

        num_blocks = count_host_blocks(config)
        report["host_pool_bytes"] = num_blocks * block_bytes(config)
        report["host_pool_tokens"] = num_blocks * config.kv_cache_block_size
    return report | {"fitting_tokens": max(0, left) // each}
