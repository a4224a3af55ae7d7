"""How far two speeds must lie apart in results/speculation.json before one counts as faster.

A lookup that drafts nothing takes the same steps as an engine without drafts, so the ratio of their speeds should be 1. How
far it is from 1 is noise. Chapters 54 and 54b and docs/figures.md call a case faster or slower only outside of this band.
"""

from __future__ import annotations

from typing import Any

LOOKUPS = ("lookup", "lookup, in vain", "adaptive")


def band(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The least and the largest ratio, in hundredths, of the lookups that drafted nothing."""
    idle = [row["ratio"] for row in rows if row["drafter"] in LOOKUPS and row["accepted"] is None]
    return round(min(idle), 2), round(max(idle), 2)


def verdict(rows: list[dict[str, Any]], drafter: str) -> tuple[int, int, float]:
    """(cases that are faster than no drafts beyond the noise, slower cases, the lowest ratio), in hundredths."""
    low, high = band(rows)
    ratios = [round(row["ratio"], 2) for row in rows if row["drafter"] == drafter]
    return sum(ratio > high for ratio in ratios), sum(ratio < low for ratio in ratios), min(ratios)


def faster(rows: list[dict[str, Any]], drafter: str) -> dict[tuple[str, int], float]:
    """(task, requests) -> the ratio, of the cases that are faster than no drafts beyond the noise."""
    _, high = band(rows)
    found = {(row["task"], row["batch"]): row["ratio"] for row in rows if row["drafter"] == drafter}
    return {case: ratio for case, ratio in found.items() if round(ratio, 2) > high}
