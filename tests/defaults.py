"""What an option is if nobody says: for tests that want it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic.dataclasses import rebuild_dataclass

from atom_mini import EngineArgs
from atom_mini.config import explained


def set_compiled(default: bool | None) -> None:
    """From now on `EngineArgs.compiled` is that by default; for users it is None."""
    EngineArgs.__dataclass_fields__["compiled"].default = default  # type: ignore[attr-defined]
    rebuild_dataclass(EngineArgs, force=True)  # type: ignore[arg-type]
    explained(EngineArgs)  # its constructor was written anew


@contextmanager
def as_users_have_it() -> Iterator[None]:
    """In here the decode is compiled where it can be."""
    before = EngineArgs.__dataclass_fields__["compiled"].default  # type: ignore[attr-defined]
    set_compiled(None)
    try:
        yield
    finally:
        set_compiled(before)
