"""The classes that draft: one table (the options of each are `config.METHODS`; chapters 50 to 53b)."""

from __future__ import annotations

from ..errors import require
from ..fields import EngineFields
from .drafters import DraftModel, NgramDrafter
from .eagle import EagleDrafter
from .mtp import MtpDrafter
from .verify import Drafter

DRAFTERS: dict[str, type[Drafter]] = {
    "ngram": NgramDrafter, "draft_model": DraftModel, "eagle3": EagleDrafter, "mtp": MtpDrafter,
}  # fmt: skip


def find_drafter(config: EngineFields) -> type[Drafter]:
    """The class of the drafter that `config` asks for."""
    method = config.speculative_config.method
    require(method in DRAFTERS, f"method={method!r} has no class: set DRAFTERS[{method!r}]")
    return DRAFTERS[method]
