"""The site: what it says about the package, and how it behaves in a browser (skipped with a reason without one)."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]

sys.path.insert(0, str(ROOT / "docs"))
import book_site  # noqa: E402
import map as book_map  # noqa: E402
from api import PACKAGE, Linker, read_package  # noqa: E402

MODULES = read_package()
LINKER = Linker(MODULES)


# Without a browser and without Sphinx: the bridge from notebooks and package to pages.


def test_every_name_in_all_has_an_entry() -> None:
    """What a module exports is what its API page shows."""
    for module in MODULES.values():
        source = (ROOT / PACKAGE / f"{module.name}.py").read_text()
        exported = re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL)
        names = {s.name for s in module.symbols}
        assert exported and {n for n in re.findall(r"'(\w+)'", exported[1]) if not n.startswith("_")} <= names, (
            module.name
        )


def test_a_name_means_what_its_chapter_says() -> None:
    """The chapter's own first, then any that is unique; plain words only from modules that the chapter imports."""
    assert LINKER.resolve("can_append") == f"{PACKAGE}.block_manager.BlockManager.can_append"
    assert LINKER.resolve("EngineCore(config, runner)") == f"{PACKAGE}.engine_core.EngineCore"
    assert LINKER.resolve("step", "engine_core") == f"{PACKAGE}.engine_core.EngineCore.step"
    assert LINKER.resolve("factor", "models") is None  # RoPE's, not the delay gate's
    assert (
        LINKER.link("# `Scheduler`\n\n[`Scheduler`](x.md) and `Scheduler`.\n\n```python\n`Scheduler`\n```").count(
            "py:obj"
        )
        == 1
    )
    assert LINKER.link("| ours | ATOM |\n|---|---|\n| `Scheduler` | `Scheduler` |").count("py:obj") == 1
    assert "github.com/ROCm/ATOM/blob/main/atom/config.py" in LINKER.link("Read on: `atom/config.py`")


def test_hidden_cells_and_directives_stay_behind() -> None:
    """A staged chapter has no `#|` line, no hidden cell, and a text for every figure."""
    for name, notebook in book_site.chapters().items():
        staged = json.loads(book_site.stage_chapter(name, notebook, "", LINKER))
        for cell in staged["cells"]:
            assert not re.search(r"^#\|", cell["source"], re.MULTILINE) or cell["cell_type"] == "markdown"
            figures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
            assert not figures or len(cell["metadata"]["mystnb"]["image"]["alt"]) > 30, (name, cell["source"])


def test_the_map_shows_the_real_imports() -> None:
    """Every chapter is a room, no arrow points down, and the wings are what the design says."""
    edges, titles = book_map.imports(MODULES), {n: book_site.title(n, nb) for n, nb in book_site.chapters().items()}
    svg, floor = book_map.draw(MODULES, titles), book_map.floors(edges)
    assert all(f'href="{name}.html"' in svg for name in titles)
    assert all(floor[low] < floor[up] for low, up in book_map.reduced(edges))
    sides = {name: book_map.wing(name, MODULES, edges) for name in MODULES}
    assert (
        sides["scheduler"] == sides["engine_core"] == "left"
        and sides["model_runner"] == "right"
        and sides["llm"] == "top"
    )


# The built site.


class Page(html.parser.HTMLParser):
    """One page: its ids, what it links to, what it loads, its images without a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.no_alt: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what matters of one tag."""
        at = {k: v or "" for k, v in attrs}
        self.ids |= {at["id"]} if "id" in at else set()
        if tag == "a" and "href" in at:
            self.links.append(at["href"])
        if tag in ("img", "script") and "src" in at:
            self.loads.append(at["src"])
        if tag == "link" and at.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(at["href"])
        if tag == "img" and not at.get("alt"):
            self.no_alt.append(at["src"])


@pytest.fixture(scope="session")
def pages() -> dict[Path, Page]:
    """The site, built now, page by page."""
    if not importlib.util.find_spec("myst_nb") or not importlib.util.find_spec("furo"):
        pytest.skip('the site needs Sphinx: pip install -e ".[docs]", or make test-docs')
    if not book_site.MATHJAX.exists() and not shutil.which("npm"):
        pytest.skip("the site needs MathJax, and there is no npm to fetch it")
    done = subprocess.run([sys.executable, ROOT / "docs" / "book_site.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {p: Page(p) for p in sorted(SITE.rglob("*.html"))}


def test_links_resolve_and_images_have_texts(pages: dict[Path, Page]) -> None:
    """Every internal link ends at a page and an id that exist; what a page loads is a file of the site."""
    broken = []
    for path, page in pages.items():
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                broken += [(path.name, url)] if url in page.loads else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target in pages and (not parts.fragment or unquote(parts.fragment) in pages[target].ids)
            broken += [] if known or (target not in pages and target.is_file()) else [(path.name, url)]
        broken += [(path.name, "no alt", src) for src in page.no_alt]
    assert not broken


def test_any_name_is_two_clicks_away(pages: dict[Path, Page]) -> None:
    """The landing page leads to the list of every name, that to every entry; top-level names show their source."""
    assert {"genindex.html", "api/index.html"} <= set(pages[SITE / "index.html"].links)
    index, contents = set(pages[SITE / "genindex.html"].links), set(pages[SITE / "api" / "index.html"].links)
    for module in MODULES.values():
        sources = pages[SITE / "_modules" / PACKAGE / f"{module.name}.html"].ids
        for symbol in module.symbols:
            full = f"{PACKAGE}.{module.name}.{symbol.name}"
            assert f"{module.name}.html#{full}" in contents, full
            assert symbol.kind == "data" or symbol.name in sources, f"no source for {full}"
            for member in symbol.members:
                assert f"api/{module.name}.html#{PACKAGE}.{module.name}.{member.name}" in index, member.name


def test_names_in_the_chapters_are_links(pages: dict[Path, Page]) -> None:
    """A public name in backticks is a link to its entry, in a chapter's text (not in headings and tables)."""
    for name in book_site.chapters():
        text = re.sub(r"<(h\d|table)\b.*?</\1>", "", (SITE / f"{name}.html").read_text(), flags=re.DOTALL)
        plain = re.findall(r'<code class="docutils literal notranslate"><span class="pre">(\w+)</span></code>', text)
        assert not [p for p in plain if p in LINKER.full], name


# In a browser.


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium from the system, headless."""
    api = pytest.importorskip(
        "playwright.sync_api", reason='no Playwright: pip install -e ".[docs]", or make test-docs'
    )
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def url(pages: dict[Path, Page]) -> Iterator[str]:
    """The site on a free port of 127.0.0.1."""
    server = book_site.server(0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def tab(browser: Any, url: str) -> Iterator[Any]:
    """A fresh tab that fails the test on a console error, a failed request, or a request to another host."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, base_url=url, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url.rstrip("/"))
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append((page.url, m.text)) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append((page.url, str(e))))
    page.on("requestfailed", lambda r: wrong.append((page.url, "failed", r.url)))
    page.on("response", lambda r: wrong.append((page.url, r.status, r.url)) if r.status >= 400 else None)
    page.on(
        "request", lambda r: None if r.url.startswith((url, "data:", "file://")) else wrong.append((page.url, r.url))
    )
    yield page
    context.close()
    assert not wrong


def test_every_page_loads_and_fits_a_phone(tab: Any, pages: dict[Path, Page]) -> None:
    """No error, nothing foreign (see `tab`), every image drawn, and no horizontal scroll, wide or at 390 px."""
    wide = []
    for path in pages:
        tab.set_viewport_size({"width": 1280, "height": 900})
        tab.goto(path.relative_to(SITE).as_posix())
        assert tab.evaluate("[...document.images].every(i => i.loading == 'lazy' || i.complete && i.naturalWidth)"), (
            path
        )
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 844})
            boxes = (
                "[document.documentElement, ...document.querySelectorAll('.content')]"  # the theme scrolls the latter
            )
            if tab.evaluate(f"{boxes}.some(box => box.scrollWidth > box.clientWidth)"):
                wide.append((path.name, width))
    assert not wide


@pytest.mark.parametrize(
    "word, page", [("can_append", "block_manager"), ("preemption", "scheduler"), ("volumetric", "04_scheduler")]
)
@pytest.mark.parametrize("from_file", [False, True])
def test_search_finds(tab: Any, word: str, page: str, from_file: bool) -> None:
    """Typed into the box on the landing page, served or opened from a file."""
    tab.goto(f"file://{SITE}/index.html" if from_file else "index.html")
    tab.fill("input.sidebar-search", word)
    tab.press("input.sidebar-search", "Enter")
    tab.wait_for_selector("#search-results ul.search li a")
    tab.wait_for_function("document.querySelector('#search-results .search-summary').textContent.includes('found')")
    assert page in " ".join(tab.locator("#search-results ul.search a").evaluate_all("all => all.map(a => a.href)"))


def test_dark_mode(tab: Any) -> None:
    """The switch darkens the page, and the next page remembers."""
    tab.goto("index.html")
    for _ in range(3):
        if tab.get_attribute("body", "data-theme") != "dark":
            tab.locator(".theme-toggle:visible").first.click()
    tab.goto("04_scheduler.html")
    assert tab.get_attribute("body", "data-theme") == "dark"
    red = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert int(red) < 60


def test_copy_button_math_figures_and_solutions(tab: Any) -> None:
    """One chapter that has all of them."""
    tab.goto("05_attention.html")
    cell = tab.locator("div.cell_input div.highlight").first
    cell.hover()
    cell.locator("button.copybtn").click()
    assert tab.evaluate("navigator.clipboard.readText()").strip() == cell.locator("pre").inner_text().strip()
    tab.wait_for_selector("mjx-container svg")
    assert not tab.locator("mjx-merror, [data-mml-node=merror]").count()
    assert tab.locator("div.cell_output img").count() >= 3
    solution = tab.locator("details li").first
    assert not solution.is_visible()
    tab.locator("details summary", has_text="Solutions").click()
    assert solution.is_visible()


def test_the_map_leads_to_the_chapters(tab: Any) -> None:
    """A click on a room opens its chapter; previous and next go on from there."""
    tab.goto("index.html")
    tab.locator("svg.book-map a", has_text="Scheduler").first.click()
    assert tab.url.endswith("04_scheduler.html")
    tab.locator("a.next-page").click()
    assert tab.url.endswith("05_attention.html")
