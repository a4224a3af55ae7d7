"""Drafts together with the gate and the turns of chapter 20 (chapter 50)."""

from __future__ import annotations

from ..scheduling.turns import TurnScheduler
from .verify import SpecScheduler


class SpecTurnScheduler(SpecScheduler, TurnScheduler):
    """A `SpecScheduler` that admits and takes turns as `TurnScheduler` does."""
