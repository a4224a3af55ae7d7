"""Sphinx's settings. The sources are what `book_site.py` has staged; nothing is executed, imported or fetched here."""

from __future__ import annotations

import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from api import Linker, read_package  # noqa: E402

OURS = Linker(read_package()).full

project = html_title = "atom_mini"
author = copyright = "atom_mini contributors"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_*"]
add_module_names = False
python_maximum_signature_line_length = 96
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # outputs are stored in the notebooks
nb_merge_streams = True
mathjax_path = "tex-svg.js"  # from npm, beside the other static files
copybutton_selector = "div:not(.output) > div.highlight > pre"
viewcode_follow_imported_members = False  # or it would import the package

html_theme = "furo"
html_static_path = [str(ROOT / "docs" / "_static"), str(ROOT / "build" / "mathjax")]
html_favicon = str(ROOT / "docs" / "_static" / "favicon.svg")
html_css_files = ["site.css"]
html_js_files = [("site.js", {"priority": 900})]
html_copy_source = html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "top_of_page_buttons": [],
    "light_css_variables": {f"color-brand-{use}": "#a3320b" for use in ("primary", "content", "visited")},
    "dark_css_variables": {f"color-brand-{use}": "#ff9d73" for use in ("primary", "content", "visited")},
}


def find_source(app: Sphinx, name: str) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """A module's source and where its names are, for the [source] links, without importing it."""
    analyzer = ModuleAnalyzer.for_file(ROOT / Path(*name.split(".")).with_suffix(".py"), name)
    analyzer.find_tags()
    return analyzer.code, analyzer.tags


def unlink_foreign_types(app: Sphinx, doctree: nodes.document) -> None:
    """In a signature only classes of the package are links: Python's `type` is not somebody's field `type`."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("reftype") == "class" and node["reftarget"].split(".")[-1] not in OURS:
            node.replace_self(node.children)


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.connect("viewcode-find-source", find_source)
    app.connect("doctree-read", unlink_foreign_types)
