"""The book as a graph of what is imported, its parts, and its map: one SVG, drawn from that, and a list for a phone."""
# A room is a chapter and its modules, above all that it imports. Left, the rooms that never import torch; right, those
# that do. An arrow carries a name that the upper room takes from the lower; none is drawn where a longer path is. What
# a room takes from an earlier part stands in it, as `on 04`. An import against the order of reading is not shown: the
# module that puts the engine together knows every variant.

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import nbformat
import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PARTS = {  # tens digit of a chapter -> the part that it belongs to; all that the site says about parts is from here
    0: "I The engine", 1: "I The engine", 2: "II Refinements", 3: "III Instruments", 4: "IV Other systems",
    5: "V Speculation", 6: "VI Families", 7: "VII Processes", 8: "VIII Serving",
    9: "Appendix",
}  # fmt: skip
WIDTH, HEIGHT, SEAT, AISLE, FLOOR, GAP = 160, 48, 176, 76, 104, 16  # a room; its neighbour; left to right; parts
SEATS = 2  # on either side of the aisle


def part_of(chapter: str) -> str:
    """The part of the chapter `23a_overlap`. Raises ValueError if there is none of that number."""
    tens = int(chapter[:2]) // 10
    if tens not in PARTS:
        raise ValueError(f"chapter {chapter} belongs to no part: add {tens} to PARTS in docs/map.py")
    return PARTS[tens]


def parts(book: nx.DiGraph) -> dict[str, list[str]]:
    """The rooms of each part, in reading order."""
    return {part: list(rooms) for part, rooms in groupby(book, key=lambda name: book.nodes[name]["part"])}


def source_of(module: str, root: Path = ROOT) -> Path:
    """The file of the module `refinements.overlap`."""
    return root / "atom_mini" / f"{module.replace('.', '/')}.py"


def imports(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Pairs of a module of ours and a name that `module` takes from it, both as seen from `atom_mini`."""
    package = ["atom_mini", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            if origin.split(".")[0] == "atom_mini":
                yield from ((origin.removeprefix("atom_mini").lstrip("."), taken.name) for taken in node.names)


def read_book(root: Path = ROOT) -> nx.DiGraph:
    """The chapters in reading order, under the name of the module if they export one, else under their own.

    `modules` of a room are all that its notebook exports. An edge's attributes are the imported names.
    """
    book, written_in, rooms = nx.DiGraph(), defaultdict(list), {}
    for path in sorted((root / "atom_mini").rglob("*.py")):
        if origin := re.search(r"File to edit: [./]*nbs/(\w+)\.ipynb", path.read_text()):
            module = path.relative_to(root / "atom_mini").with_suffix("")
            written_in[origin[1]].append(".".join(module.parts))
    for path in sorted((root / "nbs").glob("[0-9]*.ipynb")):
        notebook, main = nbformat.read(path, as_version=4), re.search(r"#\| default_exp ([\w.]+)", path.read_text())
        title = notebook.cells[0].source.splitlines()[0].replace("#", path.stem.split("_")[0], 1)  # `04 Scheduler`
        name = main[1] if main else path.stem
        modules = sorted(written_in[path.stem], key=lambda module: module != name)
        sources = [source_of(module, root).read_text() for module in modules]
        side = "right" if re.search(r"^\s*(import|from) torch\b", "\n".join(sources), re.MULTILINE) else "left"
        about = {"title": title, "part": part_of(path.stem), "side": side, "modules": modules}
        book.add_node(name, notebook=notebook, chapter=path.stem, **about)
        rooms |= dict.fromkeys(modules, name)
        for module, source in zip(modules, sources, strict=True):
            for low, taken in imports(module, source):  # what is not yet in `rooms` is in a later chapter
                if rooms.get(low, name) != name:
                    book.add_edge(rooms[low], name, **{taken: True})
    return book


def place(book: nx.DiGraph) -> dict[str, tuple[int, int]]:
    """The middle of each room at its top: a part above the one before, a room above those of its part it imports."""
    at, floor_of, taken, ground, top = {}, {}, Counter(), 0, 0
    for lift, rooms in enumerate(parts(book).values()):
        for name in rooms:
            side, below = book.nodes[name]["side"], [floor_of[low] for low in book.predecessors(name) if low in rooms]
            floor = max(below, default=ground - 1) + 1
            while taken[floor, side] == SEATS:
                floor += 1
            x = taken[floor, side] * SEAT + (WIDTH + AISLE) // 2  # from the aisle outwards
            at[name] = (x if side == "right" else -x), -floor * FLOOR + lift * GAP
            taken[floor, side] += 1
            floor_of[name] = floor
            top = max(top, floor)
        ground = top + 1
    return at


def arrow(start: tuple[int, int], end: tuple[int, int], names: list[str]) -> str:
    """A curve upwards, with a name under its tip, preferably a class; hovering shows all. It goes around rooms above."""
    aside = (end[0] > start[0]) - (end[0] < start[0])  # 1 if it goes to the right, -1 to the left
    bow = 60 * (-1 if start[0] > 0 else 1) * (not aside and start[1] - end[1] > FLOOR)  # towards the aisle
    x0, y0, x1, y1 = start[0] + 45 * aside + bow, start[1], end[0] - 45 * aside + bow, end[1] + HEIGHT + 2
    shown = [name for name in names if name[0].isupper() and not name.isupper()] or sorted(names, key=str.isupper)
    return (
        f'<g class="arrow"><title>{", ".join(names)}</title><path d="M{x0} {y0}C{x0 + bow} {y0 - 40} {x1 + bow} '
        f'{y1 + 40} {x1} {y1}" marker-end="url(#tip)"/><text x="{x1}" y="{y1 + (20 if aside else 48 if bow else 34)}">'
        f"{shown[0]}</text></g>"
    )


def room_of(room: dict, x: int, y: int, below: str, tip: str) -> str:
    """A box with the chapter's title and a line below it; hovering shows `tip`."""
    title, fits = room["title"], 1.7 * WIDTH
    return (
        f'<a href="{room["chapter"]}.html" class="{room["side"]}"><title>{escape(tip)}</title>'
        f'<rect x="{x - WIDTH / 2}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x}" y="{y + 20}" class="name" font-size="{min(14, fits / len(title)):.1f}">{escape(title)}</text>'
        f'<text x="{x}" y="{y + 37}" font-size="{min(11, 0.9 * fits / max(len(below), 1)):.1f}">{below}</text></a>'
    )


def draw(book: nx.DiGraph) -> str:
    """The map as SVG text, and the same rooms as a list."""
    at, drawn = place(book), nx.transitive_reduction(book)
    xs, ys = zip(*at.values(), strict=True)
    left, right = min(xs) - WIDTH // 2, max(xs) + WIDTH // 2
    shapes, items = [], []
    for low, up in drawn.edges:
        if book.nodes[low]["part"] == book.nodes[up]["part"]:
            shapes.append(arrow(at[low], at[up], [*book.edges[low, up]]))
    for part, rooms in parts(book).items():
        y = max(at[name][1] for name in rooms) + HEIGHT
        line = f'<path class="floor" d="M{left} {y + 24}H{right}"/>'
        shapes.append(f'{line}<text class="part" x="{left}" y="{y + 18}">{part}</text>')
        items.append(f"<li>{part}<ul>")
        for name in rooms:
            room = book.nodes[name]
            others = {book.nodes[low]["chapter"].split("_")[0]: low for low in drawn.pred[name] if low not in rooms}
            module = name.split(".")[-1] if room["modules"] else "start here" if name == next(iter(book)) else ""
            below = " · on ".join(filter(None, [module, ", ".join(others)]))
            tip = room["notebook"].cells[0].source.split("\n\n")[1].lstrip("> ")
            tip += "".join(f"\n{number}: {', '.join(book.edges[low, name])}" for number, low in others.items())
            shapes.append(room_of(room, *at[name], below, tip))
            items.append(f'<li><a href="{room["chapter"]}.html">{escape(room["title"])}</a></li>')
        items.append("</ul></li>")
    box = f"{left - 1} {min(ys) - 1} {right - left + 2} {max(ys) - min(ys) + HEIGHT + 27}"
    return (
        f'<div class="map-box"><svg class="book-map" viewBox="{box}" role="group" aria-label="Map of the book: '
        'chapters, modules and what flows between them"><marker id="tip" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>{"".join(shapes)}</svg></div>\n'
        f'<ul class="map-list">{"".join(items)}</ul>\n'
    )
