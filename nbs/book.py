"""Keeps the book in order: `python nbs/book.py run|export|readme [NOTEBOOK ...]`.

run     execute the notebooks (cells marked `#| eval: false`, gpu or slow excepted), store outputs, clean
export  write the package from the notebooks
readme  write README.md from index.ipynb
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from execnb.nbio import NbCell, read_nb, write_nb
from execnb.shell import CaptureShell
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbdev_export
from nbdev.export import nb_export

ROOT = Path(__file__).resolve().parent.parent
SKIP = re.compile(r"^#\|\s*(eval:\s*false|gpu|slow)\b", re.MULTILINE)
SETUP = "%config InlineBackend.figure_formats = ['png']"


def notebooks(names: list[str]) -> list[Path]:
    """The notebooks named, or all of them in reading order."""
    return [Path(n) for n in names] or sorted((ROOT / "nbs").glob("*.ipynb"))


def run(path: Path) -> None:
    """Execute one notebook from top to bottom in a fresh shell and store its outputs; stop at the first error."""
    nb = read_nb(path)
    shell = CaptureShell(path.parent)
    shell.run(SETUP)
    started = time.perf_counter()
    for cell in nb.cells:
        if cell.cell_type != "code" or SKIP.search(cell.source):
            continue
        shell.cell(cell)
        if shell.exc:
            raise SystemExit(f"{path.name}: the cell failed\n{cell.source}\n{shell.prettytb(path)}")
    nb.metadata = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    clean_nb(nb)
    write_nb(nb, path)
    print(f"{path.name}: {time.perf_counter() - started:.1f} s")


def readme(path: Path | None = None) -> str:
    """README.md's text: the markdown cells of index.ipynb, its code cells fenced, their printed outputs indented."""
    parts = []
    for cell in read_nb(path or ROOT / "nbs" / "index.ipynb").cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code" and "#| hide" not in cell.source:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_printed(cell)] if _printed(cell) else []
    return "\n\n".join(parts) + "\n"


def _printed(cell: NbCell) -> str:
    text = "".join("".join(o.get("text", "")) for o in cell.outputs if o.output_type == "stream")
    return "```text\n" + text.rstrip() + "\n```" if text else ""


def main(command: str, *names: str) -> None:
    os.chdir(ROOT)
    if command == "run":
        paths = notebooks(list(names))
        for path in paths:
            if len(paths) == 1:
                run(path)
            else:  # a process each, so that no chapter sees what another has imported or counted
                subprocess.run([sys.executable, __file__, "run", path], check=True)
    elif command == "export":
        get_config()
        if names:
            for name in names:
                nb_export(name)
        else:
            nbdev_export()
    elif command == "readme":
        (ROOT / "README.md").write_text(readme())
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["help"]))
