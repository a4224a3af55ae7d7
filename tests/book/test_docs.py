"""The site: what it says about the package, and how it behaves in a browser (skipped with a reason without one)."""

from __future__ import annotations

import ast
import functools
import html.parser
import http.server
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
NO_SPHINX = 'the site needs Sphinx: pip install -e ".[docs]", or make test-docs'
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]

sys.path.insert(0, str(ROOT / "docs"))
import book_site  # noqa: E402
import map as book_map  # noqa: E402
import player as book_player  # noqa: E402
import playground  # noqa: E402

PACKAGE = "atom_mini"
BOOK = book_map.read_book()
CHAPTERS = dict(BOOK.nodes(data="chapter"))
MODULES = [module for _, modules in BOOK.nodes(data="modules") for module in modules]
MODULE = {module.split(".")[-1]: module for module in MODULES}  # wherever its folder is


def is_public(name: str) -> bool:
    """A name, and not a private one."""
    return name.isidentifier() and not name.startswith("_")


def symbols(module: str) -> dict[str, list[str]]:
    """What the source of a module makes public: constants, functions, and classes with what they hold, __init__ too."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(book_map.source_of(module).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and is_public(node.name):
            found[node.name] = []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            stored = [n.id for n in parts if isinstance(n.ctx, ast.Store)]
            found |= {name: [] for name in stored if is_public(name)}
        if not isinstance(node, ast.ClassDef) or not is_public(node.name):
            continue
        for item in node.body:
            names = [item.name] if isinstance(item, ast.FunctionDef) else []
            names += [ast.unparse(item.target)] if isinstance(item, ast.AnnAssign) else []
            if names == ["__init__"]:
                parts = [n for n in ast.walk(item) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
                names = [n.attr for n in parts if ast.unparse(n.value) == "self"]
            found[node.name] += [f"{node.name}.{name}" for name in names if is_public(name)]
    return found


SYMBOLS = {module: symbols(module) for module in MODULES}
FULL = {f"{PACKAGE}.{m}.{s}" for m, found in SYMBOLS.items() for owner in found for s in [owner, *found[owner]]}


# Without a browser and without a built site.


def linked(markdown: str, page: str = "") -> str:
    """The Markdown of a page as HTML-like text, with the links that the hook makes."""
    pytest.importorskip("furo", reason=NO_SPHINX)
    import conf
    from docutils.core import publish_doctree
    from myst_parser.parsers.docutils_ import Parser
    from sphinx.domains.python import ObjectEntry

    entries = {full: ObjectEntry("api/" + conf.split(full)[0], full, "class", False) for full in FULL}
    env = SimpleNamespace(domains=SimpleNamespace(python_domain=SimpleNamespace(objects=entries)))
    builder = SimpleNamespace(get_relative_uri=lambda source, target: f"{target}.html")
    doctree = publish_doctree(markdown, parser=Parser(), settings_overrides={"myst_suppress_warnings": ["myst"]})
    conf.link_names(SimpleNamespace(env=env, builder=builder), doctree, page)
    return str(doctree)


def test_a_name_means_what_its_chapter_says() -> None:
    """The chapter's own first, then any that is unique; plain words only from modules that the chapter imports."""
    pytest.importorskip("furo", reason=NO_SPHINX)
    from conf import resolve

    assert resolve("can_append", "", FULL) == f"{PACKAGE}.block_manager.BlockManager.can_append"
    overlap = f"{PACKAGE}.{MODULE['overlap']}"
    for page in ("", MODULE["overlap"]):  # a class and a method, wherever the module is
        for name in ("OverlapCore", "OverlapScheduler.advance"):
            assert resolve(name, page, FULL) == f"{overlap}.{name}"
    assert resolve("advance", MODULE["overlap"], FULL) == f"{overlap}.OverlapScheduler.advance"
    assert resolve("EngineCore(config, runner)", "", FULL) == f"{PACKAGE}.engine_core.EngineCore"
    assert resolve("step", "engine_core", FULL) == f"{PACKAGE}.engine_core.EngineCore.step"
    assert resolve("factor", "models", FULL) is None  # RoPE's, not the delay gate's
    text = "# `Scheduler`\n\n[`Scheduler`](x.md) and `Scheduler`.\n\n```python\n`Scheduler`\n```"
    assert linked(text).count(f"{PACKAGE}.scheduler.Scheduler") == linked("`Scheduler`").count("scheduler.Scheduler")
    assert linked("| ours | ATOM |\n|---|---|\n| `Scheduler` | `Scheduler` |").count("api/scheduler.html#") == 1
    assert "github.com/ROCm/ATOM/blob/main/atom/config.py" in linked("Read on: `atom/config.py`")


def test_hidden_cells_and_directives_stay_behind() -> None:
    """A staged chapter has no `#|` line, no hidden cell, and a text for every figure."""
    for name, node in book_map.read_book().nodes.items():
        hidden = {cell.source for cell in node["notebook"].cells if cell.source.startswith("#| hide\n")}
        methods = sum(bool(re.match(r"(#\|.*\n)*@patch", cell.source)) for cell in node["notebook"].cells)
        staged = json.loads(book_site.stage_chapter(node))
        assert sum("".join(cell["source"]).startswith("@patch") for cell in staged["cells"]) == methods
        for cell in staged["cells"]:
            source = "".join(cell["source"])
            assert not re.search(r"^#\|", source, re.MULTILINE) or cell["cell_type"] == "markdown"
            assert source and source not in hidden
            assert "solution" not in cell["metadata"].get("tags", []) or "hide-input" in cell["metadata"]["tags"]
            figures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
            assert not figures or len(cell["metadata"]["mystnb"]["image"]["alt"]) > 30, (name, source)


def test_what_is_absent_would_attach_to_what_is_there() -> None:
    """Every name in backticks on the page stands in the package, or on the short list of what is meant to be new."""
    page, new = (ROOT / "docs" / "absent.md").read_text(), {"B A x", "[2, N, K, S, D]", "n"}
    files = [*(ROOT / "atom_mini").rglob("*.py"), ROOT / "nbs/_book/show.py"]
    source = "\n".join(path.read_text() for path in files)
    names = set(re.findall(r"`([^`]+)`", page)) - new
    assert len(names) > 20
    assert not [name for name in names if not re.search(rf"\b{name.split('.')[-1]}\b", source)]
    assert re.findall(r"(?m)^## (.*)$", page)[:5] == [
        "LoRA: many adapters, one model", "A KV cache in FP8", "Pipeline parallelism", "Attention backends", "Vision"
    ]  # fmt: skip


@pytest.fixture(scope="session")
def runs() -> dict[tuple[Any, ...], dict[str, Any]]:
    """The recorded runs of the scheduler to play with, by the settings of its sliders."""
    return dict(zip(playground.grid(), playground.recorded()["runs"], strict=True))


def longest(run: dict[str, Any]) -> int:
    """The longest wait between two tokens of a request, in ms."""
    return max(person[3] for person in run["people"])


def computed(run: dict[str, Any]) -> int:
    """Tokens of prompts."""
    return sum(n for step in run["steps"] for _, n in step[-1])


def test_what_the_page_with_sliders_says(runs: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """docs/play.md's sentences about the runs hold: those about all settings at all, the others at those named."""
    atom, interleaved, overlapped, spyre = playground.POLICIES
    done = {setting: run["steps"][-1][1] for setting, run in runs.items()}
    for policy, *rest in runs:
        assert policy == overlapped or done[(overlapped, *rest)] < done[(policy, *rest)]
        assert done[(policy, *rest)] <= done[(spyre, *rest)]
        assert rest[0] != 8 or (runs[(policy, *rest)]["preempted"] > 0) == (policy != spyre)
    plain, turns = (runs[policy, 32, 8, 30, "off"] for policy in (atom, interleaved))
    assert 3 * longest(turns) < longest(plain)
    assert sum(p[1] for p in turns["people"]) > sum(p[1] for p in plain["people"])
    for _, blocks, budget, rate, cache in runs:
        if cache == "on" and (blocks == 32 or (blocks, rate) == (8, 4)):
            without, with_it = (computed(runs[atom, blocks, budget, rate, cache]) for cache in ("off", "on"))
            assert (without - with_it >= 20) == (blocks == 32)


def test_the_pages_say_what_is_played() -> None:
    """The numbers of docs/play.md and of the first page, from where they are set."""
    play, first = ((ROOT / "docs" / f"{name}.md").read_text().replace("\n", " ") for name in ("play", "index"))
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    requests = book_player.five_requests()
    prompts, outputs = ([str(n) for n in row] for row in zip(*((len(r.prompt), r.max_tokens) for r in requests), strict=True))
    reported = [f"prompts of {', '.join(prompts[:-1])} and {prompts[-1]} tokens that ask for"]
    reported += [f"ask for {', '.join(outputs[:-1])} and {outputs[-1]}.", f"A block holds {words[playground.SIZE]} tokens"]
    reported += [f"{words[playground.MAX_NUM_SEQS]} requests may run", f"A step takes {playground.HOST:g} ms on the host"]
    reported += [f"{playground.WEIGHTS:g} ms for reading the weights, {playground.TOKEN:g} ms for each token"]
    reported += [f"{playground.READ:g} ms for each token that is attended to", f"{words[len(playground.KNOBS)]} sliders"]
    spyre = playground.POLICIES["Spyre's"]
    reported += [f"chunks have {words[spyre['chunk_size']]} tokens and its volume is at most {spyre['max_batch_tkv_limit']}"]
    reported += [f"{words[len(playground.load(4))].capitalize()} requests, one engine"]
    assert [text for text in reported if text not in play] == []
    longest = max(-(-(len(r.prompt) + r.max_tokens) // playground.SIZE) for r in requests)
    assert min(playground.KNOBS["blocks"]) == longest + 1 and f"**{longest + 1} blocks** are one more than" in play
    blocks, size = (book_player.TIGHT[name] for name in ("num_kvcache_blocks", "kv_cache_block_size"))
    assert f"{words[len(requests)].capitalize()} requests share a cache of {words[blocks]} blocks of {words[size]} tokens" in first


def test_the_modelled_steps_leave_the_device_idle_only_for_the_host() -> None:
    """One step at a time the device waits for each plan; two in flight it waits only when nobody is there."""
    for policy, idle in (("ATOM's", playground.HOST), ("overlapped", 0)):
        spans = playground.run(policy, 32, 16, "all at once", "off").spans
        gaps = [start - before for (_, before), (start, _) in itertools.pairwise(spans)]
        assert gaps == pytest.approx([idle] * len(gaps))


def test_the_guidance_names_what_is_there() -> None:
    """Every file and target on the page for contributors exists."""
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text()
    files = set(re.findall(r"(?:nbs|tests|docs|atom_mini)/[\w./]*", page))
    assert len(files) > 6 and not [name for name in files if not (ROOT / name).exists()]
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"`make ([\w-]+)`", page)) <= targets and {"score", "pdf"} <= targets


def test_the_snippets_about_other_documents_run() -> None:
    """Each goes on from the first; what they assert holds for the engine of today."""
    first, *others = re.findall(r"```python\n(.*?)```", (ROOT / "tests" / "data" / "errata.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(first, names)
    assert len(others) > 30
    for snippet in others:
        exec(snippet, dict(names))


# The built site.


class Page(html.parser.HTMLParser):
    """One page: its ids, what it links to, what it loads, its images without a text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.no_alt: list[str] = []
        self.has_nested_links = bool(re.search(r"<a\b[^>]*href(?:(?!</a>).)*<a\b", path.read_text(), re.DOTALL))
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
    """The site page by page, built now, unless `make docs` has just built it."""
    if not importlib.util.find_spec("myst_nb") or not importlib.util.find_spec("furo"):
        pytest.skip(NO_SPHINX)
    if not book_site.MATHJAX.exists() and not shutil.which("npm"):
        pytest.skip("the site needs MathJax, and there is no npm to fetch it")
    if "SITE_IS_BUILT" not in os.environ:
        done = subprocess.run([sys.executable, ROOT / "docs" / "book_site.py"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return {p: Page(p) for p in sorted(SITE.rglob("*.html"))}


@pytest.mark.slow
def test_links_resolve_and_images_have_texts(pages: dict[Path, Page]) -> None:
    """Every internal link ends at a page and an id that exist; none lies in another; what a page loads is a file of the
    site."""
    broken = [(path.name, "a link in a link") for path, page in pages.items() if page.has_nested_links]
    for path, page in pages.items():
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                broken += [(path.name, url)] if url in page.loads else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target in pages and (not parts.fragment or unquote(parts.fragment) in pages[target].ids)
            broken += [] if known or (target not in pages and target.is_file()) else [(path.name, url)]
        broken += [(path.name, "no alt", src) for src in page.no_alt]
    assert not broken


def test_every_name_in_all_has_an_entry(pages: dict[Path, Page]) -> None:
    """What a module exports is what its API page shows."""
    for module in MODULES:
        source = book_map.source_of(module).read_text()
        if exported := re.search(r"^__all__ = (\[.*?\])", source, re.MULTILINE | re.DOTALL):
            found = re.findall(r"'(\w+)'", exported[1])
        else:  # a plain module
            found = re.findall(r"(?m)^(?:async )?(?:def|class) (\w+)", source)
        names = {f"{PACKAGE}.{module}.{name}" for name in found if not name.startswith("_")}
        assert names and names <= pages[SITE / "api" / f"{module}.html"].ids, module


# In a browser.


@pytest.fixture(scope="module")  # while it is open an event loop runs, and no other test could run one
def browser() -> Iterator[Any]:
    """Chromium from the system, headless."""
    api = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install -e ".[docs]", or make test-docs')
    if not CHROMIUM:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def url(pages: dict[Path, Page]) -> Iterator[str]:
    """The site on a free port of 127.0.0.1."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
    # and waits for the icon, too: whoever goes on while it is under way makes it a failed request
    page.goto = functools.partial(page.goto, wait_until="networkidle")
    page.on("console", lambda m: wrong.append((page.url, m.text)) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append((page.url, str(e))))
    page.on("requestfailed", lambda r: wrong.append((page.url, "failed", r.url)))
    page.on("response", lambda r: wrong.append((page.url, r.status, r.url)) if r.status >= 400 else None)
    page.on("request", lambda r: None if r.url.startswith((url, "data:", "file://")) else wrong.append((page.url, r.url)))
    yield page
    context.close()
    assert not wrong


# The words of a page's tables that do not stand on one line.
BROKEN_WORDS = r"""() => [...document.querySelectorAll("table.docutils :is(td, th)")].flatMap(cell => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [], range = document.createRange();
  for (let node; node = walker.nextNode();) for (const word of node.textContent.matchAll(/\w+/g)) {
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (range.getBoundingClientRect().height > 1.5 * range.getClientRects()[0]?.height) broken.push(word[0]);
  }
  return broken;
})"""


@pytest.mark.parametrize("part", range(4))
@pytest.mark.slow
def test_every_page_loads_and_fits_a_phone(tab: Any, pages: dict[Path, Page], part: int) -> None:
    """No error, nothing foreign (see `tab`), images drawn; at 1280 and 390 px no horizontal scroll, no word broken."""
    wide, broken = [], []
    for path in [*pages][part::4]:
        tab.set_viewport_size({"width": 1280, "height": 900})
        tab.goto(path.relative_to(SITE).as_posix())
        drawn = "[...document.images].every(i => i.loading == 'lazy' || i.complete && i.naturalWidth)"
        assert tab.evaluate(drawn), path
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 844})
            boxes = "[document.documentElement, ...document.querySelectorAll('.content')]"  # the theme scrolls the latter
            if tab.evaluate(f"{boxes}.some(box => box.scrollWidth > box.clientWidth)"):
                wide.append((path.name, width))
            broken += [(path.name, width, word) for word in tab.evaluate(BROKEN_WORDS)]
    assert not wide
    assert not broken


@pytest.mark.parametrize("word, page", [("can_append", "block_manager"), ("preemption", "scheduler"), ("volumetric", "41c_look")])
@pytest.mark.parametrize("from_file", [False, True])
def test_search_finds(tab: Any, word: str, page: str, from_file: bool) -> None:
    """Typed into the box on the landing page, served or opened from a file."""
    tab.goto(f"file://{SITE}/index.html" if from_file else "index.html")
    tab.fill("input.sidebar-search", word)
    tab.press("input.sidebar-search", "Enter")
    tab.wait_for_selector("#search-results ul.search li a")
    tab.wait_for_function("document.querySelector('#search-results .search-summary').textContent.includes('found')")
    assert page in " ".join(tab.locator("#search-results ul.search a").evaluate_all("all => all.map(a => a.href)"))


@pytest.mark.parametrize("chapter", ["30_timeline", "41_spyre"])
def test_timelines_play(tab: Any, chapter: str) -> None:
    """The recorded run stands in a frame of its own, drawn."""
    tab.goto(f"{chapter}.html")
    frame = tab.frame_locator("iframe").first
    frame.locator("svg, canvas, table").first.wait_for()
    assert len(frame.locator("body").inner_text()) > 100


@pytest.mark.parametrize("width", [1440, 390])
def test_no_frame_is_cut_off(tab: Any, pages: dict[Path, Page], width: int) -> None:
    """In every step of its run, each player is as high as what it shows."""
    tab.set_viewport_size({"width": width, "height": 900})
    cut = []
    for path in [path for path in pages if "<iframe" in path.read_text()]:
        tab.goto(path.relative_to(SITE).as_posix())
        for frame in tab.frames[1:]:
            frame.locator("#what", has_text="Step ").wait_for()
            for step in range(int(frame.locator("#scrub").get_attribute("max")) + 1):
                frame.locator("#scrub").evaluate("(e, n) => { e.value = n; e.dispatchEvent(new Event('input')) }", step)
                tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")  # its size is observed
                missing = frame.evaluate("document.documentElement.scrollHeight - document.documentElement.clientHeight")
                cut += [(path.name, step, missing)] * (missing > 0)
    assert not cut


PIXELS = """(canvas, [n, line, lines]) => {
  const high = canvas.height / lines, data = canvas.getContext("2d").getImageData(n, line * high, 1, high).data;
  return [...new Set(Array.from({ length: high }, (_, y) => `rgb(${data.slice(4 * y, 4 * y + 3).join(", ")})`))];
}"""  # the colours of a request in a step, from top to bottom


def test_the_player_shows_verdicts(browser: Any, tmp_path: Path) -> None:
    """Of a decode with drafts each request's accepted, bonus and rejected tokens, in their colours, in chip and lane."""
    from atom_mini import LLM, SamplingParams

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    prompts, params = ["Mia has a red cat. Ben has a red", "12 + 7 ="], SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kvcache_blocks=64, trace=True, speculative_config=drafts) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        trace = llm.trace
    trace.save_html(tmp_path / "run.html")
    page, wrong, painted, lanes = browser.new_page(), [], set[int](), [*trace.requests]
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.goto(f"file://{tmp_path}/run.html")
    page.locator("#what", has_text="Step 0 ").wait_for()
    assert page.locator("#legend").inner_text().split()[-3:] == ["accepted", "bonus", "rejected"]
    colours = page.locator("#legend i").evaluate_all("all => all.slice(-3).map(i => i.style.background)")
    for n, view in enumerate(trace._views()):
        page.locator("#scrub").evaluate("(e, n) => { e.value = n; e.dispatchEvent(new Event('input')) }", n)
        for id, counts in view["verified"].items():
            chip = page.locator("#running span").nth(view["running"].index(id))
            marks = chip.locator("i").evaluate_all("all => all.map(i => i.style.background)")
            assert marks == [colours[k] for k, many in enumerate(counts) for _ in range(many)]
            if view["phases"][id] == "decode":
                kinds = [k for k, many in enumerate(counts) if many]
                assert page.locator("canvas").evaluate(PIXELS, [n, lanes.index(id), 2]) == [colours[k] for k in kinds]
                painted.update(kinds)
    page.locator("#names span").first.hover()
    assert "drafts: " in page.locator("#about").inner_text()
    assert painted == {0, 1, 2} and not wrong
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_sliders_choose_a_run(tab: Any, runs: dict[tuple[Any, ...], dict[str, Any]], width: int) -> None:
    """Every place of every slider shows the numbers of its own run; lanes are in the player's colours; it plays."""
    tab.set_viewport_size({"width": width, "height": 844})
    tab.goto("play.html")
    tab.locator("#lanes tr td:nth-child(3)").first.wait_for()
    places, chosen = [*playground.KNOBS.values()], list(playground.START)
    for knob, several in enumerate(places):
        for place in range(len(several)):
            chosen[knob] = place
            tab.locator("#knobs input").nth(knob).fill(str(place))
            run = runs[tuple(places[k][i] for k, i in enumerate(chosen))]
            shown = tab.locator("#lanes tr td:nth-child(3)").all_inner_texts()
            assert [int(text) for text in shown[:-1]] == [person[1] for person in run["people"]]
    tab.locator("#policies button").first.click()
    assert tab.locator("#knobs output").first.inner_text() == "ATOM's"
    policy = tab.locator("#knobs input").first
    policy.press("ArrowRight")  # without a mouse, and said aloud
    assert tab.locator("#knobs output").first.inner_text() == policy.get_attribute("aria-valuetext") == "interleaved"
    policy.press("ArrowLeft")
    last = int(tab.locator("#scrub").get_attribute("max") or 0)
    tab.locator("#scrub").fill(str(last - 3))
    tab.locator("#play").click()
    tab.locator("#what", has_text=f"Step {last} of {last}").wait_for()
    red = tab.locator("#lanes canvas").first.evaluate(
        "c => [...c.getContext('2d').getImageData(0, 8, c.width, 1).data.slice(0, 4000)].join().includes('228,87,46')"
    )
    assert red and not tab.locator("#lanes").evaluate("e => e.parentNode.scrollWidth > e.parentNode.parentNode.clientWidth")


@pytest.mark.parametrize("width", [1280, 1366, 1440, 1920])
def test_code_is_not_cut(tab: Any, width: int) -> None:
    """88 characters fit without scrolling, in the widest of the fonts that the theme asks for (0.62 em a character)."""
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto("04b_scheduler.html")
    room = tab.locator("div.cell_input pre").first.evaluate(
        """pre => (pre.clientWidth - parseFloat(getComputedStyle(pre).paddingLeft) * 2)
        / parseFloat(getComputedStyle(pre).fontSize)"""
    )
    assert room >= 88 * 0.62


def test_the_scorecards_figure_is_not_cut(browser: Any) -> None:
    """Every word of README's figure lies inside it, with the system's widest font."""
    page = browser.new_page()
    page.goto((ROOT / "docs" / "_static" / "score.svg").as_uri())
    inside = """() => [...document.querySelectorAll("text")].every(text => {
      const box = text.getBBox(), all = document.documentElement.viewBox.baseVal;
      return box.x >= 0 && box.x + box.width <= all.width && box.y + box.height <= all.height;
    })"""
    assert page.evaluate(inside)
    page.close()


@pytest.mark.slow
def test_part_one_is_printed(pages: dict[Path, Page], browser: Any) -> None:
    """All its chapters, in one file."""
    book_pdf = importlib.import_module("book_pdf")
    whole, first = book_pdf.whole(), next(iter(book_map.parts(BOOK).values()))
    assert whole.count("<article") == len(first) and BOOK.nodes[first[-1]]["title"] in whole
    assert whole.count("<details") == whole.count("<details open") > len(first)  # solutions are printed, too
    subprocess.run([sys.executable, ROOT / "docs" / "book_pdf.py"], check=True, capture_output=True)
    pdf = (SITE.parent / "part_one.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and len(pdf) > 1_000_000


def test_options_are_shown_as_they_are_written(pages: dict[Path, Page]) -> None:
    """Not as what pydantic makes of them."""
    made = re.compile(r"FieldInfo\(|PydanticUndefined")
    assert not [path.name for path in pages if path.parent.name == "api" and made.search(path.read_text())]
    assert "Annotated[float, Field(gt=0, le=1)]" in re.sub("<.*?>", "", (SITE / "api" / "config.html").read_text())
