"""What every refusal of a user's mistake goes through (chapter 01a)."""

from __future__ import annotations


def shortened(message: str, most: int = 2000) -> str:
    """`message`, without its middle if it repeats a very long value."""
    if len(message) <= most:
        return message
    return f"{message[: most // 2]} ... {message[-most // 2 :]}"


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds: for a user's mistakes."""
    if not condition:
        raise ValueError(shortened(message))


def install(extra: str) -> str:
    """The command that installs an extra of the package, for the end of a message."""
    return f'run pip install -e ".[{extra}]" in the clone of the repository'
