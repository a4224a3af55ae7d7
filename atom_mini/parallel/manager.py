"""Starts another process, reads its messages and its log, and notices its death (chapter 70b)."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import zmq

from ..fields import EngineFields, Recipe
from ..sequence import Sequence
from .engine_process import AHEAD, UtilityOutput, Dead, FromEngine, Message, Output, Ready
from .engine_process import Refused, Shutdown, Utility
from .engine_process import decode_frame, encode, open_sockets
from .start import LOAD

LOG = 4000  # characters of the log to keep
GRACE = 2.0  # seconds to end without force
TICK, PAUSE = 0.25, 0.01  # seconds between two checks, and while it is full
# what a new process runs: it imports nothing from the current folder
COMMAND = "import sys; sys.path[:] = filter(None, sys.path); from atom_mini.parallel.start import main; main()"


class EngineDead(RuntimeError):
    """The engine's process has died: why, and the end of its log. Make a new `LLM`."""


def describe_end(code: int) -> str:
    """How a process ended, from its return code."""
    name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
    return f"killed by {name}" if code < 0 else f"exit code {code}"


def meeting_place() -> tempfile.TemporaryDirectory[str]:
    """A folder for sockets that only its owner may enter, with a path short enough."""
    home = tempfile.gettempdir()
    is_long = len(os.fsencode(home)) > zmq.IPC_PATH_MAX_LEN - 45
    home = "/tmp" if is_long else home
    return tempfile.TemporaryDirectory(prefix="atom_mini-", dir=home, ignore_cleanup_errors=True)


def environment(share: int = 1) -> dict[str, str]:
    """Environment variables for a process with our modules and with our number of threads divided by `share`."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path if isinstance(p, str))
    own = os.environ | {"PYTHONPATH": path}
    if torch := sys.modules.get("torch"):
        own["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // share))
    return own


class CoreManager(Thread):
    """Starts process number `number`, reads its messages, and notices its death (ATOM's
    word). `recipe`: see `checks.as_recipe`; `bell`: gets an item for each new result."""

    reads: object = FromEngine  # the messages that it knows
    kind = "engine"  # what messages and logs call it
    entry = LOAD  # what its process loads
    share = 1  # how many processes share our number of threads
    is_group = True  # the process leads a group, which ends with it

    def __init__(self, number: int, recipe: Recipe, config: EngineFields, bell: SimpleQueue[None]) -> None:
        super().__init__(name=f"{self.kind} {number}", daemon=True)
        self.recipe = recipe | {"name": self.name, "number": number, "load": self.entry}
        self.config = config
        self.ping = config.ping_timeout  # seconds
        self.bell = bell
        self.seqs: dict[int, Sequence] = {}  # its unfinished requests
        self.messages: deque[Output | Refused] = deque()  # not used yet
        # question -> the queue in which `ask` waits
        self.answers: dict[int, SimpleQueue[dict[str, int | float]]] = {}
        self.sending = Lock()
        self.log = ""
        self.outbox: zmq.Socket | None = None
        self.process: Any = None
        self.ready: Ready | None = None
        self.is_refusal = False  # the process refused its options or its checkpoint
        self.dead: Exception | None = None  # why it ended
        self.last_heard = math.inf  # when, since it is ready
        self.deadline = (math.inf, "")  # for its next message, and what a miss means
        self.closing = math.inf  # when it must have ended
        MANAGERS.add(self)

    def send(self, message: Message | bytes) -> None:
        """Send a message or frame, if the process lives. ValueError if it is too large."""
        frame = message if isinstance(message, bytes) else encode(message)
        with self.sending, suppress(zmq.Again):  # it does not read: the thread will notice
            if self.outbox is not None:
                self.outbox.send(frame, zmq.DONTWAIT)

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start the process, out of reach of a terminal's Ctrl-C."""
        command = [sys.executable, "-c", COMMAND, self.entry, json.dumps(self.recipe)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0,
            env=environment(self.share), start_new_session=self.is_group,
        )  # fmt: skip

    def _read_log(self) -> bool:
        """Keep and pass on what the process has printed; False if there is nothing."""
        os.set_blocking(self.process.stdout.fileno(), False)  # others may hold it open
        data = self.process.stdout.read(2**16) or b""
        text = data.decode(errors="replace")
        self.log = (self.log + text)[-LOG:]
        with suppress(Exception):  # our own output may be closed
            print(text, end="", file=sys.stderr)
        return bool(data)

    def _receive(self, frame: bytes) -> str | None:
        """Handle a message from the process; returns why it is dead, if it says so."""
        message = decode_frame(frame, self.reads)
        self.last_heard = time.monotonic()
        self.deadline = (math.inf, "")
        return self._handle(message)

    def _handle(self, message: Any) -> str | None:
        match message:
            case Ready():
                assert self.outbox is not None
                with self.sending:
                    self.outbox.poll(1000, zmq.POLLOUT)  # until both directions are open
                self.ready = message
            case UtilityOutput():
                self.answers.pop(message.id, SimpleQueue()).put(message.values)
            case Dead():
                self.is_refusal = message.is_refusal
                return message.why
            case _:
                self.messages.append(message)
        if len(self.messages) < 2:  # else the bell has rung
            self.bell.put(None)
        return None

    def _check_clock(self, now: float) -> str | None:
        """Send a ping after a silence; returns why it is dead, if a limit has passed."""
        if now > self.last_heard + self.ping / 4 and self.deadline[0] == math.inf:
            self.deadline = (now + 0.75 * self.ping, f"no answer within ping_timeout={self.ping} seconds")
            self.send(Utility(0))
        limits = [self.deadline, (self.closing, "it did not end by itself")]
        return next((why for limit, why in limits if now > limit), None)

    def is_full(self) -> bool:
        """Whether enough results are queued, and no answer is awaited."""
        waits = self.answers or min(self.deadline[0], self.closing) < math.inf
        waits = waits or self.process.poll() is not None  # it may have sent the cause
        return len(self.messages) >= AHEAD and not waits

    def _listen(self, inbox: zmq.Socket) -> str:
        """Read messages and the log until the process is dead; returns why."""
        log = self.process.stdout.fileno()
        logs = 1  # 0 when its pipe is closed
        limit = self.config.ready_timeout
        why = None
        self.deadline = (time.monotonic() + limit, f"no READY after ready_timeout={limit} seconds")
        while why is None:
            now = time.monotonic()  # before the look: this process may be stopped
            sources = [log] * logs + [inbox] * (not self.is_full())
            pause = TICK if inbox in sources else PAUSE
            news, *_ = zmq.select(sources, [], [], pause)
            if log in news:
                logs = self._read_log()
            if inbox in news:
                why = self._receive(inbox.recv())
            elif (code := self.process.poll()) is None:
                why = self._check_clock(now)
            elif not inbox.poll(100):  # no last message
                why = describe_end(code)
        return why

    def _kill(self) -> None:
        """Kill the process; if it leads a group, the whole group."""
        pid = self.process.pid
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL) if self.is_group else self.process.kill()

    def run(self) -> None:
        """The thread. `dead` is set when everything has been cleaned up."""
        context = zmq.Context()
        path = f"{self.recipe['meeting']}/{self.name}"
        try:
            inbox, self.outbox = open_sockets(context, path, is_engine=False)
            with self._start_process() as self.process:  # closes its pipes, and waits for its end
                try:
                    why = self._listen(inbox)
                finally:
                    self._kill()
                    self._read_log()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        with self.sending:
            context.destroy(linger=0)
            self.outbox = None
        cause = f"{self.name} is dead: {why}\n{self.log}".rstrip()
        self.dead = ValueError(why) if self.is_refusal else EngineDead(cause)
        self.bell.put(None)

    def check_alive(self) -> None:
        """Raise EngineDead if it has died; ValueError if it refused its options."""
        if dead := self.dead:
            raise type(dead)(*dead.args)  # a new one for each caller

    def ask(self) -> dict[str, int | float]:
        """The engine's counts, from its loop."""
        answer = SimpleQueue[dict[str, int | float]]()
        self.answers[id(answer)] = answer
        self.send(Utility(id(answer)))
        while True:
            self.check_alive()
            with suppress(Empty):
                return answer.get(timeout=1)

    def end(self, grace: float = GRACE) -> None:
        """Tell it to end, and have it killed after `grace` seconds; does not wait."""
        until = time.monotonic() + (grace if self.ready else 0)
        self.closing = min(self.closing, until)
        self.send(Shutdown(0))


MANAGERS: weakref.WeakSet[CoreManager] = weakref.WeakSet()


def close_all(managers: list[CoreManager]) -> None:
    """End all of them, and wait until they have ended. A second call does nothing."""
    for manager in managers:
        manager.end()
    for manager in managers:
        with suppress(RuntimeError):  # it has not started, or this is its thread
            manager.join()


def forget() -> None:
    """In a forked child: mark all engines dead, and close its ends of their pipes."""
    for manager in [*MANAGERS]:
        manager.dead = EngineDead("this is a fork of the engine's front: make a new LLM")
        manager.outbox = None
        manager.sending = Lock()
        if manager.process is not None:
            manager.process.stdin.close()


os.register_at_fork(after_in_child=forget)
