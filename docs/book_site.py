"""Builds the site: `python docs/book_site.py [--serve]`. The result is build/site; everything in it is local."""
# Stages the chapters of nbs/, the pages of docs/, a page per module and the map in build/stage, then runs Sphinx.

import re
import shutil
import subprocess
import sys

import nbformat
from map import ROOT, draw, read_book

STAGE, SITE, MATHJAX = (ROOT / "build" / name for name in ("stage", "site", "node_modules/mathjax/es5/tex-svg.js"))


def stage_chapter(chapter: str, title: str, module: str, notebook: nbformat.NotebookNode) -> str:
    """The notebook as the site shows it: no hidden cells, no `#|` lines, alt texts, under its title a line of links."""
    api = f" · API of [{module}](api/{module}.md)" if module else ""
    _, promise, *rest = notebook.cells[0].source.split("\n\n")
    links = f"{{.lead-links}}\nThis page is a notebook, `nbs/{chapter}.ipynb`{api}"
    notebook.cells[0].source = "\n\n".join([f"# {title}", promise, links, *rest])
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*$#]", r"\1", cell.source).strip()  # no links, no markup
            sentence = re.split(r"(?<=[.?!:])\s", prose)[-1]
            continue
        # Who does not see a figure hears the sentence before it, and the words on its axes.
        alt = " ".join(["Figure:", sentence, *re.findall(r'(?:title|label)\w*[(=]f?"([^"]+)"', cell.source)])
        tags = ["exported"] if "#| export" in cell.source else []
        cell.metadata = {"tags": tags, "mystnb": {"image": {"alt": alt}}}
        cell.source = "" if "#| hide" in cell.source else re.sub(r"(?m)^#\|.*\n*", "", cell.source)
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    return nbformat.writes(notebook)


def figure(match: re.Match[str]) -> str:
    """For `figure:04_scheduler#1`, the first figure stored in that notebook, as a data URL."""
    images = re.findall(r'"image/png": "([^"]+)"', (ROOT / "nbs" / f"{match[1]}.ipynb").read_text())
    return "data:image/png;base64," + images[int(match[2]) - 1].replace(r"\n", "")


def stage() -> dict[str, str]:
    """Every source of the site, by path."""
    book = read_book()
    readme = (ROOT / "README.md").read_text().replace("(nbs/", "(")
    files = {"map.svg": draw(book), "readme.txt": re.sub(r"\| `(\w+)` \|", r"| [`\1`](api/\1.md) |", readme)}
    for page in (ROOT / "docs").glob("*.md"):
        files[page.name] = re.sub(r"figure:(\w+)#(\d+)", figure, page.read_text().replace("](../nbs/", "]("))
    for name, room in book.nodes.items():
        chapter, module = room["chapter"], name if room["module"] else ""
        files[f"{chapter}.ipynb"] = stage_chapter(chapter, room["title"], module, room["notebook"])
        if module:
            head = f"# {name}\n\n{{.lead-links}}\nWritten in [](../{chapter}.ipynb)."
            files[f"api/{name}.md"] = f"{head}\n\n```{{eval-rst}}\n.. automodule:: atom_mini.{name}\n```\n"
    return files


def build() -> None:
    """Stage, then run Sphinx with warnings as errors; from nothing, so that no warning hides behind an old page."""
    if not MATHJAX.exists():  # fetched once; the site serves this one file of it itself
        subprocess.run(["npm", "install", "--silent", "--prefix", ROOT / "build", "mathjax@3.2.2"], check=True)
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for name, content in stage().items():
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / name).write_text(content)
    options = ["-EWq", "--keep-going", "-c", ".", "-d", STAGE / "_doctrees"]
    if subprocess.run([sys.executable, "-m", "sphinx", *options, STAGE, SITE], cwd=ROOT / "docs").returncode:
        raise SystemExit("the site has warnings")
    print(f"built {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    build()
    if "--serve" in sys.argv:
        subprocess.run([sys.executable, "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", SITE])
