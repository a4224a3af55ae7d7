"""`python -m atom_mini`: the commands of `options.command_line`, and those of the server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

try:
    from atom_mini.options.args import EngineArgs
    from atom_mini.options.command_line import COMMANDS, Command, main
    from atom_mini.options.help import Batch, Fleet, Serve
except ModuleNotFoundError as error:
    if not str(error.name).startswith("atom_mini"):
        raise
    sys.exit(f"error: the command line needs {error.name}, which is not here")

if TYPE_CHECKING:
    import argparse


def run_serving(args: argparse.Namespace) -> None:
    """Run serve, fleet, or batch; ValueError if what it needs is not installed."""
    from atom_mini.errors import install

    try:
        match args.name:
            case "serve":
                from atom_mini.serving.server import run_serve as run
            case "fleet":
                from atom_mini.serving.fleet import run_fleet as run
            case _:
                from atom_mini.serving.batch import run_batch as run
    except ModuleNotFoundError as error:
        needed = install("ray" if args.name == "fleet" else "server")
        if str(error.name).startswith("atom_mini"):
            needed = "it is not here"
        raise ValueError(f"{args.name} needs {error.name}: {needed}") from None
    run(args)


COMMANDS["serve"] = Command(run_serving, "model", Serve.__doc__, (Serve, EngineArgs))
COMMANDS["fleet"] = Command(run_serving, "model", Fleet.__doc__, (Fleet, EngineArgs))
COMMANDS["batch"] = Command(run_serving, "model source target", Batch.__doc__, (Batch, EngineArgs))

if __name__ == "__main__":
    raise SystemExit(main())
