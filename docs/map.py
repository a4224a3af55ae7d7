"""The book as a graph of what is imported, and its map: one SVG, drawn from that."""
# A room is a chapter and its module, above all that it imports. Left, the rooms that never import torch; right, those
# that do. An arrow carries a name that the upper room takes from the lower; none is drawn where a longer path is.

import ast
import re
from collections import defaultdict
from html import escape
from itertools import count
from pathlib import Path

import nbformat
import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, SEAT, AISLE, FLOOR = 160, 48, 176, 76, 104  # a room; from one to the next; between left and right


def read_book() -> nx.DiGraph:
    """The chapters, under the name of the module if they export one. An edge's attributes are the imported names."""
    book = nx.DiGraph()
    for path in sorted((ROOT / "nbs").glob("[0-9]*.ipynb")):
        notebook, module = nbformat.read(path, as_version=4), re.search(r"#\| default_exp (\w+)", path.read_text())
        title = notebook.cells[0].source.splitlines()[0].replace("#", path.stem.split("_")[0], 1)  # `04 Scheduler`
        name = module[1] if module else path.stem
        source = (ROOT / "atom_mini" / f"{name}.py").read_text() if module else ""
        side = "right" if re.search(r"^\s*(import|from) torch\b", source, re.MULTILINE) else "left"
        book.add_node(name, notebook=notebook, chapter=path.stem, title=title, module=module, side=side)
        for node in ast.walk(ast.parse(source)):
            origin = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if low := re.fullmatch(r"(?:\.|atom_mini\.)(\w+)", origin):
                book.add_edge(low[1], name, **{taken.name: True for taken in node.names})
    return book


def place(book: nx.DiGraph) -> dict[str, tuple[int, int]]:
    """The middle of each room at its top. Those that no arrow touches are on the ground."""
    floors = {name: i for i, names in enumerate(nx.topological_generations(book)) for name in names}
    seats, at = defaultdict(count), {}  # floor and side -> the next free seat, from the aisle outwards
    for name, side in book.nodes(data="side"):
        floor = -1 if nx.is_isolate(book, name) else floors[name]
        x = next(seats[floor, side]) * SEAT + (WIDTH + AISLE) // 2
        at[name] = x if side == "right" else -x, -floor * FLOOR
    return at


def arrow(start: tuple[int, int], end: tuple[int, int], names: list[str]) -> str:
    """A curve upwards, with a name under its tip, preferably a class; hovering shows all."""
    aside = (end[0] > start[0]) - (end[0] < start[0])  # 1 if it goes to the right, -1 to the left
    x0, y0, x1, y1 = start[0] + 45 * aside, start[1], end[0] - 45 * aside, end[1] + HEIGHT + 2
    shown = [name for name in names if name[0].isupper() and not name.isupper()] or sorted(names, key=str.isupper)
    return (
        f'<g class="arrow"><title>{", ".join(names)}</title><path d="M{x0} {y0}C{x0} {y0 - 40} {x1} {y1 + 40} '
        f'{x1} {y1}" marker-end="url(#tip)"/><text x="{x1}" y="{y1 + (20 if aside else 34)}">{shown[0]}</text></g>'
    )


def draw(book: nx.DiGraph) -> str:
    """The map as SVG text."""
    at = place(book)
    parts = [arrow(at[low], at[up], [*book.edges[low, up]]) for low, up in nx.transitive_reduction(book).edges]
    for name, room in book.nodes.items():
        (x, y), title, promise = at[name], room["title"], room["notebook"].cells[0].source.split("\n\n")[1]
        parts.append(
            f'<a href="{room["chapter"]}.html" class="{room["side"]}"><title>{escape(promise.lstrip("> "))}</title>'
            f'<rect x="{x - WIDTH / 2}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x}" y="{y + 20}" class="name" font-size="{min(14, 1.7 * WIDTH / len(title))}">{escape(title)}'
            f'</text><text x="{x}" y="{y + 37}">{name if room["module"] else "start here"}</text></a>'
        )
    xs, ys = zip(*at.values(), strict=True)
    box = f"{min(xs) - WIDTH / 2 - 1} {min(ys) - 1} {max(xs) - min(xs) + WIDTH + 2} {max(ys) - min(ys) + HEIGHT + 2}"
    return (
        f'<div class="map-box"><svg class="book-map" viewBox="{box}" role="group" aria-label="Map of the book: '
        'chapters, modules and what flows between them"><marker id="tip" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>{"".join(parts)}</svg></div>\n'
    )
