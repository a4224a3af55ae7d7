"""Folds the methods that notebooks add with `@patch` (atom_mini/patch.py) into their classes: the package is plain Python.

`fold` takes a module as nbdev has written it, in which a method still stands in the cell where the chapter adds it.
The method moves behind the body of its class, in the order of the cells, with all comments above it in its cell; the
cell disappears if nothing else is in it. Text is moved, not rewritten: only `@patch` and its import, the class in the
first parameter's annotation and the class in `@SomeClass.name.setter` go, because inside the class they are known.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
ONLY_NOTEBOOKS = {"fastcore", "nbdev", "execnb"}  # what the package must not import
IMPORT = re.compile(r"\n\n?from (?:\.+|\w+\.)patch import patch(?=\n)")
MARKER = "# %% "  # nbdev's line above each cell


class Method(NamedTuple):
    """A function under `@patch` and the name of the class that it belongs to."""

    node: Function
    owner: str

    @property
    def parameter(self) -> ast.arg | None:
        """The first one, whose annotation goes; None in a static method."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        return arguments[0] if arguments and not isinstance(self.node.decorator_list[0], ast.Call) else None

    @property
    def is_setter(self) -> bool:
        """Whether it is written under `@SomeClass.name.setter`."""
        return any(ast.unparse(d) == f"{self.owner}.{self.node.name}.setter" for d in self.node.decorator_list)

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.owner}.{self.node.name}: {text}")


def fold(text: str) -> str:
    """The module `text` without `@patch`. Text without it comes back as it is.

    Raises ValueError, naming class and method, for what would not mean the same inside the class: see `check`.
    """
    plain = IMPORT.sub("", text)
    tree, lines = ast.parse(plain), plain.split("\n")
    check_imports(tree)
    methods = [Method(node, owner(node)) for node in tree.body if is_patched(node)]
    strays = [node for node in ast.walk(tree) if is_patched(node) and node not in tree.body]
    if strays:
        raise ValueError(f"{strays[0].name}: @patch works at the top level of a cell only")
    if not methods:
        return text if plain == text else tidy(lines)
    behind, gone = defaultdict(list), set()
    seats = {id(node): seat for node, seat in find_seats(tree, lines)}
    for method in methods:
        home = check(method, tree, lines)
        seat = seats[id(method.node)]
        gone.update(seat)
        behind[body_end(home, lines)] += ["", *inside(method, seat, lines)]
    kept = [line for n, old in enumerate(lines, 1) if n not in gone for line in [old, *behind[n]]]
    return tidy(kept)


def is_patched(node: ast.AST) -> TypeGuard[Function]:
    """Whether one of its decorators is `@patch` or `@patch(...)`."""
    return isinstance(node, Function) and any(map(is_patch, node.decorator_list))


def is_patch(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(name, ast.Name) and name.id == "patch"


def owner(node: Function) -> str:
    """The class that `self: C`, `cls: type[C]` or, for a static method, `@patch(C)` names."""
    first, *others = node.decorator_list
    if not is_patch(first) or any(map(is_patch, others)):
        raise ValueError(f"{node.name}: @patch stands once, above all other decorators")
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in others)
    if isinstance(first, ast.Call) != is_static:
        raise ValueError(f"{node.name}: @patch(SomeClass) is for static methods, and they need it")
    arguments = [*node.args.posonlyargs, *node.args.args][:1]
    hint = first.args[0] if isinstance(first, ast.Call) and first.args else arguments and arguments[0].annotation
    if isinstance(hint, ast.Subscript) and ast.unparse(hint.value) == "type":
        hint = hint.slice
    if not isinstance(hint, ast.Name) or (isinstance(first, ast.Call) and (first.keywords or len(first.args) > 1)):
        raise ValueError(f"{node.name}: @patch needs one class: `self: SomeClass`, `cls: type[SomeClass]` or, "
                         "for a static method, @patch(SomeClass)")  # fmt: skip
    return hint.id


def check_imports(tree: ast.Module) -> None:
    """Only notebooks use nbdev's libraries."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name.split(".")[0] in ONLY_NOTEBOOKS:
                raise ValueError(f"the package must not import {name}: import it in a cell that is not exported")


def check(method: Method, tree: ast.Module, lines: list[str]) -> ast.ClassDef:
    """The class to fold it into. Raises ValueError if the method would mean something else there."""
    node, name = method.node, method.owner
    homes = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == name]
    origins = [n for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if (a.asname or a.name) == name]
    if origins:
        raise method.error(f"{name} is imported from {'.' * origins[0].level}{origins[0].module or ''}: a notebook "
                           "adds methods to its own classes only; derive one")  # fmt: skip
    if len(homes) != 1:
        raise method.error(f"the module defines {len(homes)} classes {name} at its top level, not 1")
    home = homes[0]
    if home.lineno > node.lineno:
        raise method.error(f"it is added before {name} is defined")
    last = home.body[-1]
    if lines[last.lineno - 1][: last.col_offset].strip() or ast.unparse(home.body[0]) in ("pass", "..."):
        raise method.error(f"give {name} a docstring or fields, not `pass` or `...`")
    others = [m for m in tree.body if is_patched(m) and m.lineno < node.lineno and owner(m) == name]
    is_bound = node.name in names_bound([*home.body, *others])
    if is_bound and not method.is_setter:
        raise method.error("the class has it already; do not export a version that is replaced later")
    if method.is_setter and not is_bound:
        raise method.error("its property is not in the class yet")
    if mangled := next((word for word in identifiers(node) if re.fullmatch(r"__\w*[^\W_]_?", word)), None):
        raise method.error(f"inside a class {mangled} is another name: use one underscore")
    later = names_bound([n for n in tree.body if home.lineno < n.lineno < node.lineno and not is_patched(n)])
    at_once = [*node.decorator_list[1:], *node.args.defaults, *[d for d in node.args.kw_defaults if d]]
    if late := later & {word for part in at_once for word in identifiers(part)}:
        raise method.error(f"its decorators and defaults need {sorted(late)[0]}: define it before {name}")
    return home


def names_bound(body: list[ast.stmt]) -> set[str]:
    """The names that these statements define."""
    names = {n.name for n in body if isinstance(n, Function | ast.ClassDef)}
    targets = [n for n in body if isinstance(n, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    names |= {n.id for stmt in targets for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    imports = [alias for n in body if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names]
    return names | {alias.asname or alias.name.split(".")[0] for alias in imports}


def identifiers(node: ast.AST) -> Iterator[str]:
    """Every name in it: of variables, attributes, parameters, functions."""
    for n in ast.walk(node):
        yield from (getattr(n, key) for key in ("id", "attr", "arg", "name") if isinstance(getattr(n, key, None), str))


def find_seats(tree: ast.Module, lines: list[str]) -> Iterator[tuple[ast.stmt, range]]:
    """The lines (from 1) of each top-level statement, with the comments above it and those that end its cell."""
    end = 0
    for node in tree.body:
        start, end = end + 1, body_end(node, lines)
        markers = [n for n in range(start, node.lineno) if lines[n - 1].startswith(MARKER)]
        start = max([start, *(n + 1 for n in markers)])
        rest = range(end + 1, len(lines) + 1)
        rest = range(end + 1, next((n for n in rest if re.match(r"[^#\s]|# %% ", lines[n - 1])), len(lines) + 1))
        if rest.stop > len(lines) or lines[rest.stop - 1].startswith(MARKER):
            end = max([end, *(n for n in rest if lines[n - 1].strip())])
        yield node, range(start, end + 1)


def body_end(node: ast.stmt, lines: list[str]) -> int:
    """Its last line; indented comments right below it are part of it."""
    end = node.end_lineno
    while end < len(lines) and re.match(r"\s+#", lines[end]):
        end += 1
    return end


def inside(method: Method, seat: range, lines: list[str]) -> list[str]:
    """The lines of the method as they stand in the class."""
    node, owner = method.node, method.owner
    text = {n: lines[n - 1] for n in seat}
    for decorator in node.decorator_list:
        start = text[decorator.lineno]
        if is_patch(decorator):
            if start.strip() != f"@{ast.unparse(decorator)}":
                raise method.error("nothing else stands in the line of @patch")
            del text[decorator.lineno]
        elif ast.unparse(decorator).startswith(f"{owner}.{node.name}."):
            text[decorator.lineno] = start.replace(f"@{owner}.", "@", 1)
    if (arg := method.parameter) and arg.annotation:
        line = text[arg.lineno].encode()  # columns count bytes
        if arg.lineno != arg.end_lineno:
            raise method.error(f"{arg.arg} and its class stand in one line")
        text[arg.lineno] = (line[: arg.col_offset] + arg.arg.encode() + line[arg.end_col_offset :]).decode()
    fixed = lines_within_strings(node, lines)
    moved = [line if n in fixed or not line.strip() else f"    {line}" for n, line in text.items()]
    while not moved[0].strip():
        moved.pop(0)
    return moved


def lines_within_strings(node: Function, lines: list[str]) -> set[int]:
    """The lines that begin inside a string, docstrings excepted: no space may be put before them."""
    functions = [n for n in ast.walk(node) if isinstance(n, Function | ast.ClassDef) and ast.get_docstring(n)]
    documented, within, opened = {n.body[0].lineno for n in functions}, set(), []
    source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, first, last = tokenize.tok_name[token.type], token.start[0] + node.lineno - 1, token.end[0] + node.lineno - 1
        if kind == "FSTRING_START":  # Python 3.12 and later
            opened.append(first)
        elif kind == "FSTRING_END":
            within.update(range(opened.pop() + 1, last + 1))
        elif kind == "STRING" and first not in documented:
            within.update(range(first + 1, last + 1))
    return within


def tidy(lines: list[str]) -> str:
    """Without cells that are empty now, and with the blank lines between cells as nbdev writes them."""
    starts = [n for n, line in enumerate(lines) if line.startswith(MARKER)]
    cells = [lines[a:b] for a, b in zip([0, *starts], [*starts, len(lines)], strict=True)]
    texts = [re.sub(r"^(# %% .*\n)\n+", r"\1", "\n".join(cell)).rstrip("\n") for cell in cells]
    return "\n\n".join(t for t in texts if not (t.startswith(MARKER) and "\n" not in t)) + "\n"
