"""Builds the site: `python docs/book_site.py [--serve]`. The result is build/site; everything in it is local."""
# Stages the chapters of nbs/, the pages of docs/, a page per module and the map in build/stage, then runs Sphinx.

import re
import shutil
import subprocess
import sys

import nbformat
import networkx as nx
from map import ROOT, chapter_of, draw, hour, parts, read_book, source_of
from player import player
from playground import playground, recorded

from atom_mini.options.args import TOGETHER

sys.path.append(str(ROOT / "kernels"))  # appended: a folder of ours hides no installed package
import book as books
import machines
from show import as_markdown

STAGE, SITE, MATHJAX = (ROOT / "build" / name for name in ("stage", "site", "node_modules/mathjax/es5/tex-svg.js"))

KINDS = "exercise|check|solution"


def flat(text: str) -> str:
    """Markdown with its links to chapters and to pages of docs/ as on the site, where all lie in one folder."""
    text = re.sub(r"\]\((?:\.\./)*docs/", "](", text)
    text = re.sub(r"!\[([^\]]*)\]\((_static/\S+)\)", r'```{raw} html\n<img src="\2" alt="\1">\n```', text)
    text = re.sub(r"\]\((?:\.\./)*atom_mini/([\w/]+)\.py\)", _page_of_module, text)
    return re.sub(r"\]\((?:\.\./)*(?:\w+/)*(\w+\.ipynb)", r"](\1", text)


def _page_of_module(link: re.Match[str]) -> str:
    """A link to the page of a module, if a chapter has it."""
    module = link[1].replace("/", ".")
    return f"](api/{module}.md)" if chapter_of(source_of(module).read_text()) else link[0]


def stage_chapter(node: dict) -> str:
    """The notebook as the site shows it: no hidden cells, no `#|` lines, alt texts, under its title a line of links.

    An exercise's solution stands folded under its check; the stylesheet says what the other cells are.
    """
    notebook, api = node["notebook"], ", ".join(f"[{module}](api/{module}.md)" for module in node["modules"])
    notebook.cells = books.unmove_solutions(notebook.cells)
    _, promise, *rest = notebook.cells[0].source.split("\n\n")
    links = f"{{.lead-links}}\n{node['part']} · {node['minutes']} minutes · this page is a notebook, "
    links += (
        f"`{books.path_of(node['chapter']).relative_to(ROOT)}` · [open it in Colab]({books.colab(node['chapter'])})"
    )
    head = [f"# {node['title']}", promise, f"{links} · API of {api}" if api else links]
    notebook.cells[0].source = "\n\n".join([*head, *rest])
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = flat(cell.source)
            prose = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*$#]", r"\1", cell.source).strip()  # no links, no markup
            sentence = re.split(r"(?<=[.?!:])\s", prose)[-1]
            continue
        # A screen reader reads the sentence before a figure, and the words on its axes.
        alt = " ".join(["Figure:", sentence, *re.findall(r'(?:title|label)\w*[(=]f?"([^"]+)"', cell.source)])
        tags = ["exported"] if "#| export" in cell.source else re.findall(rf"^#\| *({KINDS})\n", cell.source)
        is_folded = bool(re.search(r"(?m)^#\| *fold$", cell.source))
        prompts = {f"code_prompt_{state}": "Code" if is_folded else "Solution" for state in ("show", "hide")}
        tags += ["hide-input"] if is_folded or "solution" in tags else []
        tags += ["remove-input"] if re.match(r"from show import (where|finished)\n", cell.source) else []
        cell.metadata = {"tags": tags, "mystnb": {"image": {"alt": alt}, **prompts}}
        cell.source = (
            "" if re.search(r"(?m)^#\|\s*hide\s*$", cell.source) else re.sub(r"(?m)^#\|.*\n*", "", cell.source)
        )
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    return nbformat.writes(notebook)


def link_module(text: str, page_of: dict[str, str]) -> str:
    """A cell of a table that names a module, `scheduling.overlap`, as a link to its page."""
    page = page_of.get(text)
    return f"[`{text}`]({page}.md)" if page else f"`{text}`"


def contents(groups: dict[str, list[str]], *options: str) -> str:
    """A table of contents for each group of pages, under its name."""
    trees = ("\n".join([f":caption: {name}", *options, "", *pages]) for name, pages in groups.items() if pages)
    return "\n\n".join(f"```{{toctree}}\n{tree}\n```" for tree in trees)


def news() -> str:
    """The messages of the commits, by day, in Markdown; nothing where there is no git."""
    command = ["git", "log", "--no-merges", "--date=short", "--format=%ad %s"]
    found = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        if shutil.which("git")
        else []
    )
    lines, day = [], ""
    for date, said in (line.split(" ", 1) for line in found if " " in line):
        lines += [f"\n## {date}\n"] if date != day else []
        lines.append("- " + re.sub(r"([\\`*_<>\[\]{}$#|])", r"\\\1", said))
        day = date
    return "\n".join(lines) or "This copy of the project came without its history."


def llms(book: nx.DiGraph) -> str:
    """`llms.txt`: what this is, and every chapter in a line, with its promise."""
    lines = [
        "# atom_mini",
        "",
        "> An LLM serving engine that reads like a book, and a package that runs: notebooks define it in order.",
        "",
    ]
    lines += ["- [How to change it](CONTRIBUTING.html)", "- [What goes together](together.html)", "- [API](api.html)"]
    for part, names in parts(book).items():
        lines += ["", f"## {part}", ""]
        for node in (book.nodes[name] for name in names):
            promise = node["notebook"].cells[0].source.split("\n\n")[1].lstrip("> ").replace("\n", " ")
            lines.append(f"- [{node['title']}]({node['chapter']}.html): {promise}")
    return "\n".join(lines) + "\n"


def stage() -> dict[str, str]:
    """Every source of the site, by path."""
    book = read_book()
    modules = {module: node for node in book.nodes.values() for module in node["modules"]}
    page_of = {module: f"api/{module}" for module in modules}
    nodes_of = {part: [book.nodes[name] for name in names] for part, names in parts(book).items()}
    chapters = {part: [node["chapter"] for node in nodes] for part, nodes in nodes_of.items()}
    pages = {
        part: [f"api/{module}" for node in nodes for module in node["modules"]] for part, nodes in nodes_of.items()
    }
    files = {
        "map.html": draw(book),
        "hour.html": hour(book),
        "player.html": player(),
        "machines.txt": machines.whole(),
    }
    files |= {"news.txt": news(), "llms.txt": llms(book)}
    files |= {"together.txt": as_markdown(TOGETHER), "playground.html": playground(recorded())}
    files |= {"chapters.txt": contents(chapters, ":hidden:"), "modules.txt": contents(pages, ":maxdepth: 2")}
    for page in (ROOT / "docs").glob("*.md"):
        files[page.name] = f"---\ntocdepth: 3\n---\n\n{flat(page.read_text())}"
    modules_cell = r"(?<=[|,:] )`([\w./]+)`(?= \||, `|; )"
    files["chapters.md"] = re.sub(modules_cell, lambda cell: link_module(cell[1], page_of), files["chapters.md"])
    files |= {f"examples/{path.name}": path.read_text() for path in (ROOT / "docs" / "examples").glob("*.py")}
    for node in book.nodes.values():
        files[f"{node['chapter']}.ipynb"] = stage_chapter(node)
    for module, node in modules.items():
        how = "Written in" if "AUTOGENERATED" in source_of(module).read_text() else "A plain module; its chapter is"
        head = f"# {module}\n\n{{.lead-links}}\n{how} [](../{node['chapter']}.ipynb)."
        files[f"api/{module}.md"] = f"{head}\n\n```{{eval-rst}}\n.. automodule:: atom_mini.{module}\n```\n"
    return files


def build() -> None:
    """Stage, then run Sphinx with warnings as errors; from nothing, so that no warning hides behind an old page."""
    if not MATHJAX.exists():  # fetched once; the site serves this one file of it itself
        subprocess.run(["npm", "install", "--silent", "--prefix", ROOT / "build", "mathjax@3.2.2"], check=True)
    print(
        "writing the sources of the pages; then Sphinx reads and writes about 150 of them, for some minutes", flush=True
    )
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for name, content in stage().items():
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / name).write_text(content)
    options = ["-EW", "--keep-going", "-c", ".", "-d", STAGE / "_doctrees"]
    if subprocess.run([sys.executable, "-m", "sphinx", *options, STAGE, SITE], cwd=ROOT / "docs").returncode:
        raise SystemExit("the site has warnings")
    shutil.copy(STAGE / "llms.txt", SITE)
    print(f"built {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    build()
    if "--serve" in sys.argv:
        subprocess.run([sys.executable, "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", SITE])
