"""What a chapter defines without exporting it: `load("90_tiny_model")` is a module made of its cells under `#| script`.

    python nbs/_book/script.py 90_tiny_model train --out tiny    # its `main`
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from types import ModuleType

from places import ROOT, path_of

SCRIPT = re.compile(r"(?m)^#\| *script *$")


def load(chapter: str) -> ModuleType:
    """The module, once loaded also to be imported by its name (`tiny_model`). ValueError if the chapter has no such cell."""
    name = re.sub(r"^\d+[a-z]?_", "", chapter)
    if name in sys.modules:
        return sys.modules[name]
    file = path_of(chapter, ROOT)
    cells = ["".join(c["source"]) for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]
    cells = [cell for cell in cells if SCRIPT.search(cell)]
    cells.sort(key=lambda cell: "from __future__" not in cell)  # it must come first
    if not cells:
        raise ValueError(f"{file.name} has no cell under `#| script`")
    source, module = "\n\n".join(cells) + "\n", ModuleType(name)
    module.__file__ = f"{file}.py"  # no file, but tracebacks show its lines
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
    sys.modules[name] = module
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


if __name__ == "__main__":
    sys.modules["script"] = sys.modules["__main__"]
    load(sys.argv[1]).main(sys.argv[2:])
