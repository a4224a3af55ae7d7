"""Which model goes with which spec of these families. Importing this module fills the tables (chapter 60)."""

from __future__ import annotations

import torch

from ..models import MODELS, TRITON_OPS, TorchOps
from .latent import LatentModel
from .quantized import FamilyModel
from .specs import FamilySpec, LatentSpec, StateSpec
from .state import StateModel

MODELS.update({FamilySpec: FamilyModel, LatentSpec: LatentModel, StateSpec: StateModel})


def latent_ops(spec: LatentSpec, device: torch.device, dtype: torch.dtype) -> TorchOps:
    """The Triton kernels for a model of these sizes."""
    from .latent_kernel import LatentOps

    heads, latent, rope = spec.num_attention_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
    return LatentOps(device, heads, latent, rope, dtype)


TRITON_OPS[LatentSpec] = latent_ops
