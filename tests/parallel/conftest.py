"""Fixtures of the tests of several processes: a limit, a clean end, and an engine that only counts.

What needs msgspec is imported by the fixtures: the tests that need none of it run without.
"""

from __future__ import annotations

import gc
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom_mini import EngineArgs

LIMIT = 90  # seconds: longer than anything here takes


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """End a test that hangs, with a stack."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises an exception, even if the tests' parent ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def watching() -> list[threading.Thread]:
    """The threads that watch processes."""
    return [t for t in threading.enumerate() if t.name.startswith("engine")]


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that must be empty afterwards, without a process left."""
    from deployed import processes, wait_for

    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short, as sockets lie in it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    threads = len(watching())
    yield folder
    gc.collect()
    wait_for(lambda: not processes("load_(engine|rank)", str(folder)))
    wait_for(lambda: len(watching()) <= threads)
    assert [*folder.iterdir()] == []
    folder.rmdir()


FAKE = """
import os, sys
if "parallel.start" in " ".join(sys.orig_argv):  # or a script that names it
    import time
    import atom_mini.config
    from atom_mini.checkpoint import ModelSpec
    from atom_mini.options import build
    from atom_mini.engine_core import EngineCore
    from atom_mini.scheduler import ScheduledBatchOutput

    class Counting:
        "The next token of a sequence is its length plus 100, after a while."
        def forward(self, batch):
            time.sleep(float(os.environ.get("FAKE_STEP", "0.001")))
            {in_forward}
            rows = zip(batch.req_ids, batch.context_lens.tolist(), batch.is_sampled)
            return ScheduledBatchOutput({{i: (100 + n,) for i, n, gets in rows if gets}})

    class Pool:
        "Copies nothing."
        path, form = "", "fake"
        open = run = drop = lose = lambda *_: None
        is_busy = False
        def receive(self, *_):
            from atom_mini.parallel.kv_transfer import Arrival
            return Arrival.HERE

    def make_pool(config):
        if "kv_connector" not in config.kv_transfer_config[0]:
            return Pool()
        import torch
        from types import SimpleNamespace
        from atom_mini.parallel.connectors import P2pNcclConnector
        blocks = torch.zeros(1, 2, config.num_kvcache_blocks, 1, 4, 1)
        return P2pNcclConnector(config, SimpleNamespace(kv_cache=blocks))

    def make_core(config):
        {in_loading}
        parts = config, Counting(), build.make_scheduler(config)
        if config.kv_transfer_config is None:
            return EngineCore(*parts)
        from atom_mini.parallel.kv_transfer import TransferCore
        return TransferCore(*parts, make_pool(config))

    rope = {{"rope_type": "default"}}
    spec = ModelSpec("fake", 958, 1, 1, 1, 1, 1, 1, 2048, 1e-6, rope)
    atom_mini.config.read_model = lambda *args: spec
    atom_mini.config.read_defaults = lambda *args: ((), {{}})  # it starts in a moment
    build.make_core = make_core
"""


@pytest.fixture
def fake(tidy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a client whose engine only counts: it starts fast, and a test can make it fail."""
    from deployed import SMALL

    from atom_mini.parallel.core_client import EngineCoreClient

    file = tmp_path / "sitecustomize.py"
    file.write_text(FAKE.format(in_forward="pass", in_loading="pass"))
    monkeypatch.syspath_prepend(tmp_path)

    def make(in_forward: str = "pass", in_loading: str = "pass", kind: Any = None, **more: Any) -> Any:
        file.write_text(FAKE.format(in_forward=in_forward, in_loading=in_loading))
        options: dict[str, Any] = {"engine_process": True, **SMALL, **more}
        made = kind("tiny", **options) if kind else EngineCoreClient(EngineArgs("tiny", **options))
        assert [*Path(tempfile.gettempdir()).iterdir()] == [], "the sockets' folder is still there"
        return made

    return make
