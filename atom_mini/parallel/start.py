"""The process of an engine or of a rank: from its recipe to its last message (chapter 70)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from importlib import import_module

import zmq

from ..fields import Recipe
from .engine_process import Dead, encode, open_sockets

LOAD = "atom_mini.options.process:load_engine"  # loaded by its process


def serve(recipe: Recipe, inbox: zmq.Socket, outbox: zmq.Socket) -> int:
    """Load and run; returns the exit code, 0 after SHUTDOWN."""
    is_loaded = False
    try:
        module, name = recipe.get("load", LOAD).split(":")
        run = getattr(import_module(module), name)(recipe, inbox, outbox)
        is_loaded = True
        run()
        return 0
    except BaseException as error:
        is_refusal = not is_loaded and isinstance(error, ValueError)
        if not is_refusal:
            traceback.print_exc()
        text = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        outbox.send(encode(Dead(0, text, is_refusal)))
        return 1


def end_with_front(folder: str) -> None:
    """Wait for the end of standard input, remove `folder`, and kill the process group that this process leads."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the process that the last argument, a recipe in JSON, describes."""
    recipe = json.loads(sys.argv[-1])
    context = zmq.Context()
    meeting = recipe["meeting"]
    threading.Thread(target=end_with_front, args=[meeting], daemon=True).start()
    inbox, outbox = open_sockets(context, f"{meeting}/{recipe['name']}", is_engine=True)
    code = serve(recipe, inbox, outbox)
    context.destroy(linger=1000)
    sys.stdout.flush()
    os._exit(code)  # other threads may hang
