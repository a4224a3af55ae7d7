"""Builds the site: `python docs/book_site.py [--serve]`. The result is build/site; everything in it is local.

Stages the chapters of `nbs/` and the pages of `docs/` in build/stage, with the API pages and the map, then runs Sphinx.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import functools
import http.server
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import map as book_map
from api import ROOT, Linker, index_page, module_page, read_package

STAGE, SITE, MATHJAX = ROOT / "build" / "stage", ROOT / "build" / "site", ROOT / "build" / "mathjax" / "tex-svg.js"
LABELS = {"set_title", "set_xlabel", "set_ylabel", "title", "xlabel", "ylabel", "suptitle"}


def chapters() -> dict[str, dict[str, Any]]:
    """The notebooks of the book by name, without the index, which is the README."""
    paths = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))
    return {p.stem: json.loads(p.read_text()) for p in paths}


def title(name: str, notebook: dict[str, Any]) -> str:
    """`03 Block manager`: the number from the file, the words from the first heading."""
    heading = "".join(notebook["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
    return f"{name.split('_')[0]} {heading}"


def alt_text(code: str, prose: str) -> str:
    """What a figure shows, for those who do not see it: the sentence before it, and the words on its axes."""
    words = []
    for node in ast.walk(ast.parse(re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE))):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", "")
            values = node.args[:1] if called in LABELS else []
            values += [k.value for k in node.keywords if k.arg in LABELS]
            words += [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    lines = [line.strip() for line in prose.splitlines() if line.strip() and not line.startswith(("|", "```"))]
    text = " ".join([line for line in lines if line[0] != "#"] or [line.lstrip("# ") for line in lines])
    sentence = re.split(r"(?<=[.?!:]) ", re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*$]", r"\1", text))[-1]
    return f"Figure: {sentence.rstrip(':.')}. Labels: {', '.join(words) or 'none'}."


def stage_chapter(name: str, notebook: dict[str, Any], module: str, linker: Linker) -> str:
    """The notebook as the site shows it: no hidden cells, no `#|` lines, links, alt texts."""
    cells: list[dict[str, Any]] = []
    prose = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if not cells:
                links = f" · API of [{module}](api/{module}.md)" if module else ""
                _, _, rest = source.partition("\n\n> ")
                quote, _, rest = rest.partition("\n\n")
                strip = f"{{.lead-links}}\nThis page is a notebook, `nbs/{name}.ipynb`{links}"
                source = f"# {title(name, notebook)}\n\n> {quote}\n\n{strip}\n\n{rest}"
            cells.append(cell | {"source": linker.link(source, module)})
            prose = source
            continue
        marks = set(re.findall(r"^#\|\s*(\w+)", source, re.MULTILINE))
        code = "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip("\n")
        if code and not marks & {"hide", "default_exp"}:
            metadata: dict[str, Any] = {"tags": ["exported"] if marks & {"export", "exporti"} else []}
            if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
                metadata["mystnb"] = {"image": {"alt": alt_text(code, prose)}}
            cells.append(cell | {"source": code, "metadata": metadata})
    language = {"language_info": {"name": "python", "pygments_lexer": "python"}}
    return json.dumps(notebook | {"cells": cells, "metadata": notebook["metadata"] | language})


def figure(notebook: dict[str, Any], number: int) -> bytes:
    """The chapter's figure of that number, counted from 1, as stored in the notebook."""
    outputs = [o["data"] for cell in notebook["cells"] for o in cell.get("outputs", []) if "data" in o]
    return base64.b64decode([d["image/png"] for d in outputs if "image/png" in d][number - 1])


def stage() -> dict[str, str | bytes]:
    """Every source of the site, by path."""
    books, modules = chapters(), read_package()
    linker, module_of = Linker(modules), {m.chapter: m.name for m in modules.values()}
    files: dict[str, str | bytes] = {"_map.svg": book_map.draw(modules, {n: title(n, b) for n, b in books.items()})}
    readme = (ROOT / "README.md").read_text().replace("(nbs/", "(")
    files["_readme.md"] = re.sub(r"\| `(\w+)` \|", r"| [`\1`](api/\1.md) |", readme)
    for name, notebook in books.items():
        files[f"{name}.ipynb"] = stage_chapter(name, notebook, module_of.get(name, ""), linker)
    for module in modules.values():
        files[f"api/{module.name}.md"] = module_page(module, title(module.chapter, books[module.chapter]), linker)
    files["api/index.md"] = index_page(modules, linker)
    pages = sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        text = linker.link(page.read_text()).replace("](../nbs/", "](")
        text = text.replace("PAGES\n", "".join(f"{p.stem}\n" for p in pages if p.stem != "index"))
        for name, number in re.findall(r"\(figure:(\w+)#(\d+)\)", text):
            files[f"figures/{name}-{number}.png"] = figure(books[name], int(number))
        files[page.name] = re.sub(r"\(figure:(\w+)#(\d+)\)", r"(figures/\1-\2.png)", text)
    return files


def fetch_mathjax() -> None:
    """MathJax, once, from npm: one file, which the site then serves itself."""
    if MATHJAX.exists():
        return
    if not shutil.which("npm"):
        raise SystemExit(f"no npm to fetch MathJax: put es5/tex-svg.js of mathjax 3.2.2 at {MATHJAX}")
    MATHJAX.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", "mathjax@3.2.2"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as tar:
            member = tar.extractfile("package/es5/tex-svg.js")
            MATHJAX.write_bytes((member or io.BytesIO()).read())


def build() -> None:
    """Stage, then run Sphinx with warnings as errors; from nothing, so that no warning hides behind an old page."""
    fetch_mathjax()
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for name, content in stage().items():
        (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (STAGE / name).write_bytes(content.encode() if isinstance(content, str) else content)
    options = ["-b", "html", "-E", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs"), "-d", str(STAGE / "_doctrees")]
    if subprocess.run([sys.executable, "-m", "sphinx", *options, str(STAGE), str(SITE)]).returncode:
        raise SystemExit("the site has warnings")
    print(f"built {SITE.relative_to(ROOT)}/index.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *args: Any) -> None:
        """No line per request."""


def server(port: int) -> http.server.ThreadingHTTPServer:
    """The site on 127.0.0.1, for this machine only; port 0 takes a free one."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Quiet, directory=str(SITE)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="then serve it on 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    build()
    if options.serve:
        print(f"http://127.0.0.1:{options.port}  (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server(options.port).serve_forever()
