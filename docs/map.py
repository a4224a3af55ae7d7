"""The book as a graph of what is imported, its parts, and its map: an SVG for each part, and a list for a phone."""
# A node is a chapter and its modules, above all that it imports. Left, the nodes that never import torch; right, those
# that do. An arrow leads from a node to one that imports it; none is drawn where a longer path is. Pointing at it says
# what is taken. What a node takes from an earlier part stands in it, as `on 04`. An import against the order of reading
# is not shown: the module that puts the engine together knows every variant.

import ast
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import escape
from itertools import groupby, permutations
from pathlib import Path

import nbformat
import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "nbs" / "_book"))  # appended: a folder of ours hides no installed package
from book import minutes  # noqa: E402
from places import EVENING, chapters  # noqa: E402

EVENING_PART = "The first evening"
PARTS = {  # tens digit of a chapter -> the part that it belongs to; all that the site says about parts is from here
    0: "I The engine", 1: "I The engine", 2: "II Scheduling, overlap, and structured outputs", 3: "III Tracing",
    4: "IV Other schedulers and caches", 5: "V Speculation", 6: "VI Families", 7: "VII Processes", 8: "VIII Serving",
    9: "Appendix",
}  # fmt: skip
HOUR = {  # an hour's path: chapter -> what it answers
    "00": "Why is a loop around a model not enough?",
    "00b": "Which parts does an engine have?",
    "00c": "Where do the keys and values of a request live?",
}
WIDTH = 114  # of a node
HEIGHT = 50
COLUMN = 124  # from a node to its neighbour
GUTTER = 12  # between left and right
LAYER = 70  # from one layer to the next
COLUMNS = 3  # on either side of the gutter
LINE = 20  # letters in a line of a node


def part_of(chapter: str) -> str:
    """The part of the chapter `23a_overlap`. Raises ValueError if there is none of that number."""
    if chapter.split("_")[0] in EVENING:
        return EVENING_PART
    tens = int(chapter[:2]) // 10
    if tens not in PARTS:
        raise ValueError(f"chapter {chapter} belongs to no part: add {tens} to PARTS in docs/map.py")
    return PARTS[tens]


def parts(book: nx.DiGraph) -> dict[str, list[str]]:
    """The nodes of each part, in reading order."""
    return {part: list(nodes) for part, nodes in groupby(book, key=lambda name: book.nodes[name]["part"])}


def source_of(module: str, root: Path = ROOT) -> Path:
    """The file of the module `scheduling.overlap`."""
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


def chapter_of(source: str, root: Path = ROOT) -> str:
    """The chapter that exports a module, or that a plain one names in its docstring: `(chapter 81)`; or nothing."""
    if origin := re.search(r"File to edit: [./]*nbs/(?:\w+/)?(\w+)\.ipynb", source):
        return origin[1]
    named = re.search(r"\bchapters? (\d\w*)", ast.get_docstring(ast.parse(source)) or "")
    found = [path.stem for path in chapters(root) if named and path.stem.startswith(f"{named[1]}_")]
    return found[0] if found else ""


def read_book(root: Path = ROOT) -> nx.DiGraph:
    """The chapters in reading order, under the name of the module if they export one, else under their own.

    `modules` of a node are all that its notebook exports. An edge's attributes are the imported names.
    """
    book, written_in, nodes = nx.DiGraph(), defaultdict(list), {}
    for path in sorted((root / "atom_mini").rglob("*.py")):
        module = ".".join(path.relative_to(root / "atom_mini").with_suffix("").parts)
        if chapter := chapter_of(path.read_text(), root):
            written_in[chapter].append(module)
    for path in chapters(root):
        notebook, main = nbformat.read(path, as_version=4), re.search(r"#\| default_exp ([\w.]+)", path.read_text())
        title = notebook.cells[0].source.splitlines()[0].replace("#", path.stem.split("_")[0], 1)  # `04 Scheduler`
        name = main[1] if main else path.stem
        modules = sorted(written_in[path.stem], key=lambda module: module != name)
        sources = [source_of(module, root).read_text() for module in modules]
        side = "right" if re.search(r"^\s*(import|from) torch\b", "\n".join(sources), re.MULTILINE) else "left"
        about = {"title": title, "part": part_of(path.stem), "side": side, "modules": modules}
        about["minutes"] = minutes(notebook.cells)
        book.add_node(name, notebook=notebook, chapter=path.stem, **about)
        nodes |= dict.fromkeys(modules, name)
        for module, source in zip(modules, sources, strict=True):
            for low, taken in imports(module, source):  # what is not yet in `nodes` is in a later chapter
                if nodes.get(low, name) != name:
                    book.add_edge(nodes[low], name, **{taken: True})
    return book


Point = tuple[float, float]


def layers(book: nx.DiGraph, nodes: list[str]) -> dict[str, int]:
    """The layer of each node of a part: above those of its part that it imports, and beside the one before it if it
    exports nothing."""
    found: dict[str, int] = {}
    taken: Counter[tuple[int, str]] = Counter()
    for name in nodes:
        side, below = book.nodes[name]["side"], [found[low] + 1 for low in book.predecessors(name) if low in found]
        before = [] if book.nodes[name]["modules"] else [*found.values()][-1:]
        layer = max(below + before, default=0)
        while taken[layer, side] == COLUMNS:
            layer += 1
        taken[layer, side] += 1
        found[name] = layer
    return found


def curve(start: Point, end: Point, gap: float | None = None) -> list[Point]:
    """An arrow from the node at `start` up to the one at `end`, perhaps through the `gap` between two columns: a point,
    then three for each cubic piece."""
    (x0, y0), (x1, y1), turn = start, (end[0], end[1] + HEIGHT + 2), LAYER - HEIGHT
    if gap is None:
        high = min(30, (y0 - y1) / 2)
        return [(x0, y0), (x0, y0 - high), (x1, y1 + high), (x1, y1)]
    below, above = (gap, y0 - turn), (gap, y1 + turn)
    return [(x0, y0), (x0, y0 - turn), (gap, y0), below, below, above, above, (gap, y1), (x1, y1 + turn), (x1, y1)]


def way(points: list[Point]) -> Iterator[Point]:
    """A curve in small steps."""
    for first in range(0, len(points) - 1, 3):
        for t in (n / 30 for n in range(1, 30)):
            weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            piece = [*zip(weights, points[first : first + 4], strict=True)]
            yield sum(w * x for w, (x, _) in piece), sum(w * y for w, (_, y) in piece)


def hidden(at: dict[str, Point], low: str, up: str, gap: float | None = None) -> int:
    """How much of an arrow lies under nodes that it does not belong to."""
    others = [at[name] for name in at if name not in (low, up) and at[up][1] < at[name][1] < at[low][1]]
    steps = [*way(curve(at[low], at[up], gap))]
    return sum(abs(x - a) < WIDTH / 2 + 3 and b - 1 < y < b + HEIGHT + 1 for x, y in steps for a, b in others)


def gap_for(at: dict[str, Point], low: str, up: str) -> float | None:
    """The gap between columns that an arrow takes; None if it lies under no node without."""
    gaps = [x + side * COLUMN / 2 for x in (at[low][0], at[up][0]) for side in (-1, 1)]
    return min([None, *gaps], key=lambda gap: hidden(at, low, up, gap))


def place(book: nx.DiGraph, nodes: list[str]) -> dict[str, Point]:
    """The middle of each node of a part at its top. Columns are dealt so that arrows are short and lie under no node."""
    layer_of, edges = layers(book, nodes), inside(book, nodes)
    groups = [[n for n in nodes if (layer_of[n], book.nodes[n]["side"]) == key] for key in
              sorted({(layer_of[n], book.nodes[n]["side"]) for n in nodes})]  # fmt: skip
    at: dict[str, Point] = {}

    def put(group: list[str], columns: tuple[int, ...]) -> None:
        for name, n in zip(group, columns, strict=True):
            x = n * COLUMN + (WIDTH + GUTTER) / 2  # from the gutter outwards
            at[name] = (x if book.nodes[name]["side"] == "right" else -x), -layer_of[name] * LAYER

    def cost() -> float:
        return sum(abs(at[low][0] - at[up][0]) + 300 * hidden(at, low, up) for low, up in edges)

    def cost_of(group: list[str], columns: tuple[int, ...]) -> float:
        put(group, columns)
        return cost()

    for group in groups:
        put(group, tuple(range(len(group))))
    for _ in range(3):
        for group in groups:
            ways = permutations(range(COLUMNS), len(group))
            put(group, min(ways, key=lambda columns: cost_of(group, columns)))
    return at


def inside(book: nx.DiGraph, nodes: list[str]) -> list[tuple[str, str]]:
    """The arrows of a part."""
    return [(low, up) for low, up in nx.transitive_reduction(book).edges if low in nodes and up in nodes]


def arrow(points: list[Point], names: list[str]) -> str:
    """A curve upwards; pointing at it shows the names."""
    first, *rest = [f"{x:.0f} {y:.0f}" for x, y in points]
    path = f'<path d="M{first}C{" ".join(rest)}" marker-end="url(#tip)"/>'
    return f'<g class="arrow"><title>{", ".join(names)}</title>{path}</g>'


def draw_box(node: dict, at: Point, on: str, tip: str) -> str:
    """A box with the chapter's title, and under it what it stands `on`; pointing at it shows `tip`."""
    (x, y), lines = at, textwrap.wrap(node["title"], LINE)
    texts = [("name", line) for line in lines] + [("on", on)] * bool(on)
    step = 11.5 if len(texts) < 4 else 10.5
    first = y + HEIGHT / 2 + 3.5 - step / 2 * (len(texts) - 1)
    spans = "".join(f'<text x="{x:.0f}" y="{first + step * n:.1f}" class="{kind}">{escape(line)}</text>'
                    for n, (kind, line) in enumerate(texts))  # fmt: skip
    return (
        f'<a href="{node["chapter"]}.html" class="{node["side"]}"><title>{escape(tip)}</title>'
        f'<rect x="{x - WIDTH / 2:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>{spans}</a>'
    )


def draw_part(book: nx.DiGraph, part: str, nodes: list[str]) -> str:
    """The map of one part, as SVG text."""
    at, drawn = place(book, nodes), nx.transitive_reduction(book)
    ways = {(low, up): curve(at[low], at[up], gap_for(at, low, up)) for low, up in inside(book, nodes)}
    shapes = [arrow(points, [*book.edges[edge]]) for edge, points in ways.items()]
    for name in nodes:
        node = book.nodes[name]
        others = {book.nodes[low]["chapter"].split("_")[0]: low for low in drawn.pred[name] if low not in nodes}
        tip = node["notebook"].cells[0].source.split("\n\n")[1].lstrip("> ")
        tip = "\n".join([tip, *map("atom_mini.{}".format, node["modules"])])
        tip += "".join(f"\n{number}: {', '.join(book.edges[low, name])}" for number, low in others.items())
        shapes.append(draw_box(node, at[name], f"on {', '.join(others)}" if others else "", tip))
    right, top = COLUMNS * COLUMN + GUTTER // 2, min(y for _, y in at.values())
    return (
        f'<div class="map-box"><svg class="book-map" viewBox="{-right} {top - 1:.0f} {2 * right} {HEIGHT + 2 - top:.0f}" '
        f'role="group" aria-label="Map of {part}: chapters, and who imports whom"><marker id="tip" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>{"".join(shapes)}</svg></div>'
    )


def draw(book: nx.DiGraph) -> str:
    """The map: the first part, and each later one folded. On a phone each is a list."""
    shown = []
    for part, nodes in parts(book).items():
        links = "".join(f'<li><a href="{book.nodes[name]["chapter"]}.html">{escape(book.nodes[name]["title"])}</a></li>'
                        for name in nodes)  # fmt: skip
        both = f'{draw_part(book, part, nodes)}<ul class="map-list">{links}</ul>'
        state = " open" if not shown else ""
        shown.append(
            f'<details class="part"{state}><summary>{part} <span>{len(nodes)} chapters</span></summary>{both}</details>'
        )
    return "\n".join(shown) + "\n"


def hour(book: nx.DiGraph) -> str:
    """The hour's path, as a line of nodes."""
    nodes = {node["chapter"].split("_")[0]: node for _, node in book.nodes.items()}
    items = ""
    for number, question in HOUR.items():
        node = nodes[number]
        about = f"<b>{escape(node['title'])}</b>{question}<small>{node['minutes']} minutes</small>"
        items += f'<li><a href="{node["chapter"]}.html">{about}</a></li>'
    return f'<ol class="hour">{items}</ol>\n'
