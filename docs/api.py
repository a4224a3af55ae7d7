"""What the package holds, read from its source with `ast`: names, signatures, docstrings. Nothing is imported.

From it come the API pages and the links of the chapters: a name in backticks points to its entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "atom_mini"
UPSTREAM = {  # first folder of a path in the chapters -> where that file is
    "atom": "https://github.com/ROCm/ATOM/blob/main/",
    "nanovllm": "https://github.com/GeeeekExplorer/nano-vllm/blob/main/",
    "vllm": "https://github.com/vllm-project/vllm/blob/main/",
    "minisgl": "https://github.com/sgl-project/mini-sglang/blob/main/python/",
    "sendnn_inference": "https://github.com/torch-spyre/sendnn-inference/blob/main/",  # vLLM on IBM Spyre
}
ENGINES = ("ATOM", "vLLM", "SGL", "Spyre")
FENCES = re.compile(  # fenced code, headings, links, HTML: no links are made in these
    r"(^```.*?^```|^~~~.*?^~~~|^#+ .*?$|\[[^\]\n]*\]\([^)\n]*\)|<[^>\n]+>)", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"(?<![`\\}])`([^`\n]+)`(?!`)")


@dataclass
class Symbol:
    """A public name: a class, a function, a constant, or (dotted) a member of a class."""

    name: str
    kind: str  # the directive of Sphinx's Python domain that shows it
    signature: str = ""
    doc: str = ""
    options: dict[str, str] = field(default_factory=dict)
    members: list[Symbol] = field(default_factory=list)


@dataclass
class Module:
    """One module: its chapter (`03_block_manager`), its docstring, its public names, its imports from the package."""

    name: str
    chapter: str
    doc: str
    symbols: list[Symbol]
    imports: dict[str, list[str]]  # module -> names taken from it
    uses_torch: bool


def _comment(lines: list[str], node: ast.stmt) -> str:
    """The comment at the end of a statement."""
    _, _, comment = lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset :].partition("#")
    return comment.strip()


def _signature(node: ast.FunctionDef, bound: bool) -> str:
    args = node.args
    if bound:
        args.args = args.args[1:]
    for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:  # "Name" in quotes is the name
        if isinstance(arg.annotation, ast.Constant) and isinstance(arg.annotation.value, str):
            arg.annotation = ast.parse(arg.annotation.value, mode="eval").body
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(args)}){returns}"


def _function(node: ast.FunctionDef, prefix: str = "") -> Symbol:
    marks = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    doc, name = ast.get_docstring(node) or "", prefix + node.name
    if marks & {"property", "cached_property"}:
        returns = {"type": ast.unparse(node.returns)} if node.returns else {}
        return Symbol(name, "property", "", doc, returns)
    static = "staticmethod" in marks
    options = dict.fromkeys(sorted(marks & {"classmethod", "staticmethod", "abstractmethod"}), "")
    return Symbol(name, "method" if prefix else "function", _signature(node, bool(prefix) and not static), doc, options)


def _attributes(node: ast.stmt, lines: list[str], owner: str = "", prefix: str = "") -> Iterator[Symbol]:
    """The public names that an assignment sets: plain ones, or with `owner` "self" those of an instance."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return
    options = {"type": ast.unparse(node.annotation)} if isinstance(node, ast.AnnAssign) else {}
    for target in [node.target] if isinstance(node, ast.AnnAssign) else node.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if len(parts) > 1 and isinstance(node.value, ast.Tuple) else [node.value] * len(parts)
        for part, value in zip(parts, values, strict=False):
            home, _, name = ast.unparse(part).rpartition(".")
            if home == owner and name.isidentifier() and not name.startswith("_"):
                text = ast.unparse(value) if value and not owner else ""
                short = {"value": text} if 0 < len(text) <= 60 and not text.startswith("field(") else {}
                yield Symbol(
                    prefix + name, "attribute" if prefix else "data", "", _comment(lines, node), options | short
                )


def _class(node: ast.ClassDef, lines: list[str]) -> Symbol:
    """A class with its fields, its public methods, and the attributes that its methods set."""
    out, prefix = Symbol(node.name, "class", "", ast.get_docstring(node) or ""), node.name + "."
    if node.bases:
        out.options["bases"] = ", ".join(ast.unparse(b) for b in node.bases)
    found: dict[str, Symbol] = {}
    for item in node.body:
        found |= {s.name: s for s in _attributes(item, lines, "", prefix)}
        if isinstance(item, ast.FunctionDef):
            for sub in [s for s in ast.walk(item) if isinstance(s, ast.stmt)]:
                for symbol in _attributes(sub, lines, "self", prefix):
                    found.setdefault(symbol.name, symbol)
            if item.name == "__init__":
                out.signature, init = _signature(item, True).removesuffix(" -> None"), ast.get_docstring(item)
                out.doc = "\n\n".join(filter(None, [out.doc, init]))
            elif not item.name.startswith("_"):
                found[prefix + item.name] = _function(item, prefix)
    out.members = list(found.values())
    return out


def read_module(path: Path) -> Module:
    """One file of the package."""
    source = path.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    symbols: list[Symbol] = []
    imports: dict[str, list[str]] = {}
    torch = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = (node.module or "").removeprefix(PACKAGE + ".")
            if node.level or (node.module or "").startswith(PACKAGE + "."):
                imports.setdefault(origin, []).extend(a.name for a in node.names)
            torch |= origin.split(".")[0] == "torch"
        elif isinstance(node, ast.Import):
            torch |= any(a.name.split(".")[0] == "torch" for a in node.names)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            symbols.append(_class(node, lines))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            symbols.append(_function(node))
        symbols += _attributes(node, lines)
    chapter = re.search(r"File to edit: \.\./nbs/(\w+)\.ipynb", source)
    return Module(path.stem, chapter[1] if chapter else "", ast.get_docstring(tree) or "", symbols, imports, torch)


def read_package(root: Path = ROOT) -> dict[str, Module]:
    """All modules that a chapter exports, in the order of the chapters."""
    modules = [read_module(p) for p in sorted((root / PACKAGE).glob("*.py"))]
    return {m.name: m for m in sorted(modules, key=lambda m: m.chapter) if m.chapter}


def _shield(markdown: str) -> str:
    """Hide the names in table columns that another engine heads: its `Scheduler` is not ours."""
    foreign: list[bool] = []
    lines = []
    for line in markdown.split("\n"):
        cells = line.split("|")
        if not line.startswith("|"):
            foreign = []
        elif not foreign:
            foreign = [any(engine in cell for engine in ENGINES) for cell in cells]
        for i in [i for i, there in enumerate(foreign[: len(cells)]) if there]:
            cells[i] = CODE.sub(lambda m: m[0] if "/" in m[1] else m[0].replace("`", "\0"), cells[i])
        lines.append("|".join(cells))
    return "\n".join(lines)


class Linker:
    """Turns names in backticks into links: to the API for ours, to GitHub for a file of another engine."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.imports = {m.name: m.imports for m in modules.values()}
        self.full: dict[str, str] = {}  # "Scheduler.schedule" -> "atom_mini.scheduler.Scheduler.schedule"
        self.short: dict[str, list[str]] = {}  # "schedule" -> all members of that name
        for module in modules.values():
            for symbol in module.symbols:
                for s in [symbol, *symbol.members]:
                    self.full.setdefault(s.name, f"{PACKAGE}.{module.name}.{s.name}")
                    self.short.setdefault(s.name.split(".")[-1], []).append(f"{PACKAGE}.{module.name}.{s.name}")

    def resolve(self, text: str, module: str = "") -> str | None:
        """The full name that `text` means in the chapter of `module`, if it can only mean one."""
        if not re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", text):
            return None
        name = text.split("(")[0].removeprefix(PACKAGE + ".").removeprefix(module + "." if module else "")
        found = self.short.get(name, [])
        own = [full for full in found if full.startswith(f"{PACKAGE}.{module}.")]
        owners = {full.split(".")[1] for full in found}
        # Another module's field: if only one has it, and a plain word (`factor`) only if this module imports that one.
        clear = len(owners) == 1 and ("_" in name or owners <= {*self.imports.get(module, {})})
        return own[0] if own else self.full.get(name) or (found[0] if clear else None)

    def _link(self, match: re.Match[str], module: str) -> str:
        text = match[1]
        target = self.resolve(text, module)
        if target:
            return f"{{py:obj}}`{text.replace('<', '')} <{target}>`"
        base = UPSTREAM.get(text.split("/")[0])
        return f"[`{text}`]({base}{text})" if base and re.fullmatch(r"[\w/.-]+(\.\w+|/)", text) else match[0]

    def link(self, markdown: str, module: str = "") -> str:
        """`markdown` with links; fenced code, headings, HTML, what is a link already and other engines' names stay."""
        parts = FENCES.split(_shield(markdown))
        text = "".join(p if i % 2 else CODE.sub(lambda m: self._link(m, module), p) for i, p in enumerate(parts))
        return text.replace("\0", "`")


def _entry(symbol: Symbol, module: str, linker: Linker, depth: int = 0) -> str:
    fence = ":" * (5 - depth)
    name = symbol.name.split(".")[-1] if depth else symbol.name
    bases = symbol.options.get("bases", "")
    options = "".join(f":{key}: {value}\n" for key, value in symbol.options.items() if key != "bases")
    body = [f"Bases: {linker.link(f'`{bases}`', module)}."] if bases else []
    body += [linker.link(symbol.doc, module)] + [_entry(m, module, linker, depth + 1) for m in symbol.members]
    text = "\n\n".join(part for part in body if part)
    return f"{fence}{{py:{symbol.kind}}} {name}{symbol.signature}\n{options}\n{text}\n{fence}\n"


def module_page(module: Module, title: str, linker: Linker) -> str:
    """The API page of one module, in MyST Markdown."""
    uses = ", ".join(f"[{name}]({name}.md)" for name in module.imports if name)
    head = f"# {module.name}\n\n> {linker.link(module.doc, module.name)}\n\n"
    head += f"{{.lead-links}}\nWritten in [{title}](../{module.chapter}.ipynb)."
    head += f" Imports {uses or 'nothing of the package'}.\n"
    entries = "\n".join(_entry(s, module.name, linker) for s in module.symbols)
    return f"{head}\n```{{py:module}} {PACKAGE}.{module.name}\n```\n\n{entries}"


def index_page(modules: dict[str, Module], linker: Linker) -> str:
    """All modules and their public names on one page."""
    rows = []
    for m in modules.values():
        names = ", ".join(f"{{py:obj}}`{s.name} <{PACKAGE}.{m.name}.{s.name}>`" for s in m.symbols)
        rows.append(f"## [{m.name}]({m.name}.md)\n\n{linker.link(m.doc, m.name)}\n\n{names}\n")
    toc = "```{toctree}\n:hidden:\n\n" + "\n".join(modules) + "\n```\n\n"
    text = "Every public name, from the docstrings of the package. *[source]* shows the code; the chapter explains it."
    return f"# API reference\n\n{text} {{ref}}`Every name <genindex>` is also in one list.\n\n{toc}" + "\n".join(rows)
