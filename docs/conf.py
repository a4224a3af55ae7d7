"""Sphinx's settings; how the package is read, and how names become links. No notebook is executed here."""

import re
from dataclasses import is_dataclass

from docutils import nodes
from map import ROOT, imports, read_book, source_of
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode, traverse_parent

project = html_title = copyright = "atom_mini"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx.ext.mathjax", "sphinx_copybutton"]

myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4  # the entries of errata.md
nb_execution_mode = "off"  # outputs are stored in the notebooks
smartquotes = False  # `prefix_cache='hash'` in a table is code
mathjax_path = "tex-svg.js"  # from npm, beside the other static files
copybutton_selector = "div:not(.output) > div.highlight > pre"

autodoc_default_options = {"members": True, "undoc-members": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = add_module_names = viewcode_follow_imported_members = False
autodoc_mock_imports = ["triton", "numba", "llvmlite"]  # extras; and what a mocked decorator leaves is still a function
default_role = "literal"  # what single backticks in a docstring mean
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_theme_options = {"dark_css_variables": {"figure-filter": "invert(0.9) hue-rotate(180deg)"}}
html_static_path = [f"{ROOT}/docs/_static", f"{ROOT}/build/node_modules/mathjax/es5/tex-svg.js"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["frames.js"]
# A search shows excerpts, but a browser does not let a page opened from a file read its neighbours.
html_js_files += [(None, {"body": "if (location.protocol=='file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false"})]
html_copy_source = html_show_sphinx = False

BOOK = read_book()
NODE_OF_MODULE = {module: name for name, node in BOOK.nodes.items() for module in node["modules"]}
MODULE_OF_PAGE = {node["chapter"]: name for name, node in BOOK.nodes.items()} | {f"api/{m}": m for m in NODE_OF_MODULE}
SMALL = ("small", "gpu.small")
UPSTREAM = {  # first folder of a path in the chapters -> where that file is on GitHub; the last is vLLM on IBM Spyre
    "atom": "ROCm/ATOM/blob/main", "nanovllm": "GeeeekExplorer/nano-vllm/blob/main",
    "vllm": "vllm-project/vllm/blob/main", "minisgl": "sgl-project/mini-sglang/blob/main/python",
    "sendnn_inference": "torch-spyre/sendnn-inference/blob/main",
}  # fmt: skip


def split(full: str) -> tuple[str, str] | None:
    """The module of a name and the name in it: `atom_mini.scheduling.overlap.OverlapCore.step` after the third dot."""
    pieces = full.split(".")[1:]
    ends = (n for n in range(1, len(pieces)) if ".".join(pieces[:n]) in NODE_OF_MODULE)
    return next(((".".join(pieces[:n]), ".".join(pieces[n:])) for n in ends), None)


def resolve(text: str, module: str, names: set[str]) -> str | None:
    """Which of the full `names` a `text` means on a page about `module`: its own first, else what is clear."""
    name = re.sub(r"\(.*\)$", "", text).removeprefix(f"{module.split('.')[-1]}.")
    parts = [pair for full in names if full.endswith(f".{name}") and (pair := split(full))]
    large = [p for p in parts if p[0] not in SMALL]  # the small engine's names are the large one's, but on its own pages
    parts = parts if module in SMALL else large or parts
    own = [p for p in parts if p[0] == module]
    exact = [p for p in parts if name.endswith(p[1])]  # a class, a function, or with its class before it
    # Another module's field: if no other has it, and a plain word (`factor`) only if this module imports that one.
    here = NODE_OF_MODULE.get(module)
    known = [p for p in parts if "_" in name or BOOK.has_edge(NODE_OF_MODULE[p[0]], here)]
    found = own + exact + known * (len({p[0] for p in parts}) == 1)
    return next((".".join(["atom_mini", *pair]) for pair in found), None)


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Names in backticks become links: ours to the API, a file of another engine to GitHub."""
    entries = app.env.domains.python_domain.objects
    plain = [n for n in doctree.findall(nodes.literal) if not [*traverse_parent(n, (nodes.title, nodes.reference))]]
    for node in plain:
        text, folder = node.astext(), node.astext().split("/")[0]
        cell = next(traverse_parent(node, nodes.entry), None)
        head = cell.parent.parent.parent.next_node(nodes.row)[cell.parent.index(cell)].astext() if cell else ""
        is_foreign = re.search("ATOM|vLLM|SGL|Spyre", head)  # another engine heads this column: not our `Scheduler`
        full = None if is_foreign else resolve(text, MODULE_OF_PAGE.get(page, ""), set(entries))
        if folder in UPSTREAM and re.fullmatch(r"[\w/.-]+(\.\w+|/)", text):
            url = f"https://github.com/{UPSTREAM[folder]}/{text}"
            node.replace_self(nodes.reference("", "", node.deepcopy(), refuri=url))
        elif full:
            to_page, anchor, *_ = entries[full]
            node.replace_self(make_refnode(app.builder, page, to_page, anchor, node.deepcopy(), full))


def find_attributes(app: Sphinx) -> None:
    """Autodoc shows attributes that have a comment with `#:`. Make it see one in each comment, and where none is."""
    for module in NODE_OF_MODULE:
        name, source = f"atom_mini.{module}", source_of(module).read_text()
        marked = re.sub(r"(?m)^( +(?:\w+, )?self\.|[A-Z])[\w., ]+(: .*)? = ", r"#:\n\g<0>", source.replace("  # ", "  #: "))
        ModuleAnalyzer.cache["module", name] = analyzer = ModuleAnalyzer.for_string(source, name)
        analyzer.analyze()
        analyzer.attr_docs = ModuleAnalyzer.for_string(marked, name).find_attr_docs()


def signature(app: Sphinx, what: str, name: str, obj: object, opts: object, args: str, result: str) -> tuple[str, str]:
    """A dataclass's would repeat its fields. `type` is Python's, not a field of that name. A name that stayed as it is
    written is what its module imports: the small engine has classes of the same names."""
    if isinstance(obj, type) and is_dataclass(obj):
        return "", result
    texts = [args and re.sub(r": type\b", ": ~builtins.type", args), result]
    module = (split(name) or [""])[0]
    for origin, short in imports(module, source_of(module).read_text()) if module else ():
        full = f"~atom_mini.{origin}.{short}"
        texts = [text and re.sub(rf"(?<![\w.~]){re.escape(short)}\b", full, text) for text in texts]
    return texts[0], texts[1]


def docstring(app: Sphinx, what: str, name: str, obj: type, options: object, lines: list[str]) -> None:
    """In our docstrings a star is a star, and a letter may follow the code; a class begins with what it extends."""
    lines[:] = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line.replace("*", r"\*")) for line in lines]
    if what == "class" and getattr(obj, "__base__", None) not in (None, object):  # a TypeVar has none
        lines[:0] = [f"Bases: `{obj.__base__.__name__}`.", ""]


def leave_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """The `type` of `type[...]` in a signature is Python's own, and no field of that name."""
    for name in [n for n in doctree.findall(addnodes.pending_xref) if n["reftarget"] == "type"]:
        name.replace_self(name.children)


PYDANTIC = re.compile(r"FieldInfo\(|PydanticUndefined")  # in a type that pydantic has read


def as_written(app: Sphinx, doctree: nodes.document) -> None:
    """Types with limits as their source has them: `Annotated[int, FieldInfo(...)]` is what pydantic makes of them."""
    for note in [n for n in doctree.findall(addnodes.desc_annotation) if PYDANTIC.search(n.astext())]:
        owner, _, field = note.parent["fullname"].rpartition(".")
        written = ModuleAnalyzer.cache["module", note.parent["module"]].annotations.get((owner, field), "")
        note[:] = [nodes.Text(f": {written}")]
    for alias in [n for n in doctree.findall(nodes.paragraph) if PYDANTIC.search(n.astext())]:
        named = alias.parent.parent[0]
        code = ModuleAnalyzer.cache["module", named["module"]].code
        written = re.search(rf"(?m)^{named['fullname']} = (.+?)(  #.*)?$", code)
        alias[:] = [nodes.Text("alias of "), nodes.literal("", written[1] if written else "")]


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.connect("builder-inited", find_attributes)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("doctree-read", leave_builtins)
    app.connect("doctree-read", as_written)
    app.connect("doctree-resolved", link_names)
