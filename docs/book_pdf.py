"""The first part as one printable file: `python docs/book_pdf.py` prints the pages of the built site with Chromium."""

import re
import shutil

from book_site import SITE
from map import parts, read_book

PRINT = """<style>
body, article { width: auto !important; margin: 0 !important; background: #fff !important; color: #000 !important; }
article { break-before: page; font-size: 10pt; }
.headerlink, .copybtn, .lead-links { display: none !important; }
div.highlight pre { white-space: pre-wrap; font-size: 8pt; }
img, svg, .cell { break-inside: avoid; max-width: 100%; }
</style>"""


def whole() -> str:
    """All pages of the first part in one, with the head of one that has formulas."""
    book = read_book()
    chapters = [book.nodes[name]["chapter"] for name in next(iter(parts(book).values()))]
    pages = [(SITE / f"{chapter}.html").read_text() for chapter in chapters]
    head = next(page for page in pages if "tex-svg" in page).split("<body", 1)[0]
    articles = [re.search(r"<article.*?</article>", page, re.DOTALL) for page in pages]
    text = "".join(found[0] for found in articles if found).replace("<details", "<details open")  # on paper
    return f"{head}{PRINT}<body>{text}</body></html>"


def main() -> None:
    """Write build/part_one.pdf. SystemExit without a site, Playwright or Chromium, with what is missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("no Playwright: pip install -e '.[docs]', or make pdf") from None
    chromium = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    if not chromium or not (SITE / "index.html").exists():
        raise SystemExit("no Chromium on this machine" if not chromium else "no site: make docs")
    page_file, pdf = SITE / "part_one.html", SITE.parent / "part_one.pdf"
    page_file.write_text(whole())
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        tab.goto(page_file.as_uri())
        tab.wait_for_function("!window.MathJax?.startup?.promise || document.querySelector('mjx-container')")
        tab.pdf(path=pdf, format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "16mm"))
        browser.close()
    page_file.unlink()
    print(f"printed {pdf.relative_to(SITE.parents[1])}, {pdf.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
