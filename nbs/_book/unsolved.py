"""The check of an unsolved exercise says so in one line, and Run All goes on.

The hidden first cell of each chapter imports this. It changes nothing outside a notebook's kernel.
"""

from __future__ import annotations

import re
from typing import Any

from IPython import get_ipython

CHECK = re.compile(r"#\|\s*check\n# Exercise (\d+)\n")
UNSOLVED = (AssertionError, NotImplementedError)


def install(shell: Any) -> None:
    """From now on a check that fails in `shell` prints which exercise to work on, instead of a traceback."""

    def before_cell(info: Any) -> None:
        found = CHECK.match(info.raw_cell)

        def explain(shell: Any, kind: type, error: Exception, traceback: Any, tb_offset: Any = None) -> None:
            why = f" ({error})" if str(error) else ""
            print(f"Exercise {found and found[1]} is not solved yet: edit the cell above{why}")

        shell.set_custom_exc(UNSOLVED if found else (), explain)

    shell.events.register("pre_run_cell", before_cell)


if hasattr(get_ipython(), "kernel"):
    install(get_ipython())
