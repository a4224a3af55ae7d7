"""Where the book's notebooks are: each is found by its name, in whichever folder below nbs/ it lies.

Needs nothing but Python, as a machine with a GPU may have no notebook tools.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).resolve().parent.relative_to(ROOT)  # where this file and its neighbors are, seen from the root


# The first evening: the chapters that build atom_mini/small.py and what it stands on. They are read before all others.
EVENING = ("00", "00b", "00c", "00d", "05", "06a", "06b", "06c", "06d")


def number_of(path: Path) -> str:
    """`03b` of `03b_prefix_cache.ipynb`."""
    return path.stem.split("_")[0]


def notebooks(root: Path = ROOT) -> list[Path]:
    """All of them in the order of reading: the first evening, then by name; none from a folder that begins with a dot or
    an underscore."""
    found = (root / "nbs").rglob("*.ipynb")
    shown = (path for path in found if not _is_hidden(path.parent.relative_to(root)))
    return sorted(shown, key=lambda path: (number_of(path) not in EVENING, path.name))


def _is_hidden(folder: Path) -> bool:
    return any(part[0] in "._" for part in folder.parts)


def chapters(root: Path = ROOT) -> list[Path]:
    """Those with a number."""
    return [path for path in notebooks(root) if path.stem[0].isdigit()]


def path_of(name: str, root: Path = ROOT) -> Path:
    """Where the notebook `04b_scheduler` is. ValueError if there is none of that name."""
    found = {path.stem: path for path in notebooks(root)}
    if name not in found:
        raise ValueError(f"no notebook below nbs/ is called {name!r}")
    return found[name]
