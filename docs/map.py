"""The map of the book: one SVG, drawn from the imports of the package.

A room is a module and links to its chapter. Left, the rooms that never import torch; right, those that do; above both,
those that join them. Arrows carry the names that the upper room takes from the lower one; an arrow that another path
implies is left out.
"""

from __future__ import annotations

from html import escape

from api import PACKAGE, ROOT, Module, read_module

Edges = dict[str, dict[str, list[str]]]  # upper room -> lower room -> the names it takes from it

ROOM_W, ROOM_H, PITCH, AISLE, GAP = 158, 48, 96, 136, 14  # between the wings an aisle, between rooms a gap


def imports(modules: dict[str, Module]) -> Edges:
    """Who imports which names from whom, within the package."""
    return {m.name: {k: v for k, v in m.imports.items() if k in modules} for m in modules.values()}


def below(edges: Edges, name: str) -> set[str]:
    """All rooms that `name` stands on."""
    return set(edges[name]).union(*(below(edges, other) for other in edges[name]))


def reduced(edges: Edges) -> list[tuple[str, str]]:
    """(lower, upper) without those that a longer path implies."""
    return [
        (low, up)
        for up in edges
        for low in edges[up]
        if not any(low in below(edges, mid) for mid in edges[up] if mid != low)
    ]


def main_line(edges: Edges) -> set[str]:
    """The rooms that `python -m atom_mini` enters; the others are annexes, say other schedulers."""
    doors = read_module(ROOT / PACKAGE / "__main__.py").imports
    return {name for door in doors if door in edges for name in {door} | below(edges, door)}


def floors(edges: Edges) -> dict[str, int]:
    """The floor of each room, 1 or more: on the main line just below its importers, else just above its imports."""
    main, floor = main_line(edges), dict.fromkeys(edges, 1)
    height = dict.fromkeys(main, 1)
    for _ in main:
        height = {name: 1 + max((height[up] for up in main if name in edges[up]), default=0) for name in main}
    floor |= {name: max(height.values()) + 1 - height[name] for name in main}
    for _ in edges:
        floor |= {name: 1 + max((floor[low] for low in edges[name]), default=0) for name in edges if name not in main}
    return floor


def wing(name: str, modules: dict[str, Module], edges: Edges) -> str:
    """`right` for a room that imports torch, `top` for one that only stands on such rooms, `left` for the rest."""
    if modules[name].uses_torch:
        return "right"
    return "top" if any(modules[other].uses_torch for other in below(edges, name)) else "left"


def _room(x: float, y: float, width: float, title: str, sub: str, page: str, tip: str, kind: str) -> str:
    small = f' style="font-size: {1.7 * width / len(title):.1f}px"' if 8 * len(title) > width else ""
    return (
        f'<a href="{page}.html" class="room {kind}"><title>{escape(tip)}</title>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{ROOM_H}" rx="6"/>'
        f'<text x="{x + width / 2}" y="{y + 20}" class="name"{small}>{escape(title)}</text>'
        f'<text x="{x + width / 2}" y="{y + 37}" class="module">{escape(sub)}</text></a>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], names: list[str]) -> str:
    (x0, y0), (x1, y1) = start, end
    shown = (
        [n for n in names if n[0].isupper() and "_" not in n][:2] or [n for n in names if n.islower()][:1] or names[:1]
    )
    path = f'<path d="M{x0} {y0} C{x0} {y0 - 26} {x1} {y1 + 26} {x1} {y1 + 3}" marker-end="url(#tip)"/>'
    width, height = max(map(len, shown)) * 6.1 + 6, len(shown) * 12 + 2
    t = 0.2 if abs(x1 - x0) > 400 else 0.5  # where on the curve the words stand: on a long one near its start
    near, far = (1 - t) ** 2 * (1 + 2 * t), t**2 * (3 - 2 * t)
    x, y = near * x0 + far * x1, near * y0 + far * y1 - 78 * t * (1 - t) * (1 - 2 * t) - height / 2
    back = f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width:.0f}" height="{height}"/>'
    lines = "".join(f'<tspan x="{x}" y="{y + 10 + 12 * i}">{escape(name)}</tspan>' for i, name in enumerate(shown))
    return f'<g class="arrow"><title>{escape(", ".join(names))}</title>{path}{back}<text>{lines}</text></g>'


def _place(modules: dict[str, Module], edges: Edges) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Where each room stands, the width of the house, and the middle of the aisle.

    On a floor the chapters' order goes from left to right. Annexes form a column of their own on either side.
    """
    seats: dict[tuple[str, int], list[str]] = {}
    main = main_line(edges)
    for name, level in floors(edges).items():
        side = wing(name, modules, edges)
        if edges[name] and name not in main:
            side = "leftmost" if side == "left" else "rightmost"
            while (side, level) in seats:
                level += 1
        seats.setdefault((side, level), []).append(name)
    start, x, aisle = {}, 0.0, 0.0
    for side in ("leftmost", "left", "right", "rightmost"):
        if side == "right":
            aisle, x = x + (AISLE - GAP) / 2, x + AISLE - GAP
        start[side] = x
        x += max((len(row) for (s, _), row in seats.items() if s == side), default=0) * (ROOM_W + GAP)
    above = max((len(row) for (s, _), row in seats.items() if s == "top"), default=0) * (ROOM_W + GAP)
    start["top"] = max(0.0, aisle - above / 2 + ROOM_W / 4)
    at, top = {}, max(level for _, level in seats)
    for (side, level), names in seats.items():
        for i, name in enumerate(names):
            at[name] = (start[side] + i * (ROOM_W + GAP), (top - level) * PITCH + 6.0)
    return at, x - GAP, aisle


def draw(modules: dict[str, Module], titles: dict[str, str]) -> str:
    """The map as SVG text. `titles`: what each chapter is called, by file name."""
    edges = imports(modules)
    at, width, aisle = _place(modules, edges)
    rooms = [
        _room(*at[name], ROOM_W, titles[m.chapter], name, m.chapter, m.doc, wing(name, modules, edges))
        for name, m in modules.items()
    ]
    ground = max(y for _, y in at.values()) + PITCH
    signs = [
        f'<text class="wing" x="{x}" y="{ground - 16}">{words}</text>'
        for x, words in ((aisle / 2 - 40, "no torch: they decide"), ((aisle + width) / 2 + 40, "torch: they compute"))
    ]
    for name in [name for name in titles if name not in {m.chapter for m in modules.values()}]:
        rooms.append(_room(0, ground, width, titles[name], "start here", name, "", "door"))
        ground += ROOM_H + 10
    arrows = []
    for low, up in reduced(edges):
        (x0, y0), (x1, y1) = at[low], at[up]
        lean = max(-1.0, min(1.0, (x1 - x0) / 200)) * ROOM_W / 4
        ends = (x0 + ROOM_W / 2 + lean, y0), (x1 + ROOM_W / 2 - lean, y1 + ROOM_H)
        arrows.append(_arrow(*ends, edges[up][low]))
    return (
        '<div class="map-box"><svg class="book-map" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="-1 0 {width + 2} {ground}" style="min-width: {min(800, 0.9 * width):.0f}px" '
        'role="group" aria-label="Map of the book: chapters, modules and what flows between them">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z"/></marker></defs>' + "".join(arrows + rooms + signs) + "</svg></div>\n"
    )
