"""hypothesis; where it is missing, tests that draw their cases are skipped, and the others of their files run.

For the files that `make gpu` runs: a machine with a GPU may have torch, Triton, and pytest only.
"""

from __future__ import annotations

from typing import Any

import pytest

try:
    from hypothesis import example, given, settings
    from hypothesis import strategies as st
except ImportError:

    class Strategy:
        """Whatever is made of it is one, too."""

        def __getattr__(self, name: str) -> Strategy:
            return self

        def __call__(self, *_: Any, **__: Any) -> Strategy:
            return self

        def __or__(self, _: object) -> Strategy:
            return self

    def given(*_: Any, **__: Any) -> Any:  # type: ignore[misc]
        def skipped(test: Any) -> Any:
            def needs_hypothesis() -> None:
                """Without the arguments that would be drawn: pytest takes them for fixtures."""

            needs_hypothesis.__name__ = test.__name__
            return pytest.mark.skip(reason="hypothesis is not installed")(needs_hypothesis)

        return skipped

    def settings(*_: Any, **__: Any) -> Any:  # type: ignore[no-redef]
        return lambda test: test

    example, st = settings, Strategy()  # type: ignore[assignment]

__all__ = ["example", "given", "settings", "st"]
