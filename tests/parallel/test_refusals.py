"""What several processes cannot do is refused, with the value and what to change, before any
process starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_family

from atom_mini import EngineArgs
from atom_mini.parallel import checks, manager
from atom_mini.scheduler import Scheduler

DP, TP = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}
PROCESS = {"engine_process": True}
EAGLE = {"speculative_config": {"method": "eagle3"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (PROCESS | {"trace": True}, "trace=True does not go with engine_process=True"),
    ({"engine_process": "yes"}, "engine_process='yes' must be True or False"),
    (PROCESS | {"ping_timeout": 0}, "ping_timeout=0 must be a number above 0"),
    ({"ping_timeout": 5.0}, "ping_timeout has no effect with engine_process=False"),
    (PROCESS | {"device": Path("cpu")}, "device="),
    ({"data_parallel_size": 0}, "data_parallel_size=0 must be a whole number from 1"),
    ({"routing": "prefix"}, "routing has no effect with data_parallel_size=1"),
    ({"lockstep": True}, "lockstep has no effect with data_parallel_size=1"),
    (DP | {"routing": "round_robin"}, "routing='round_robin' must be 'load' or 'prefix'"),
    (DP | {"enable_expert_parallel": True}, "qwen3 has no experts"),
    (DP | {"enable_expert_parallel": True, "lockstep": False}, "lockstep=False does not go with"),
    ({"enable_expert_parallel": True}, "needs several ranks or engines: raise"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number from 1"),
    ({"tensor_parallel_size": 3}, "does not divide num_attention_heads=4: set it to 2"),
    (TP | {"collective_timeout": 0}, "collective_timeout=0 must be a number above 0"),
    (TP | {"collective_timeout": 1e300}, "collective_timeout=1e+300 must be a number above 0"),
    ({"collective_timeout": 5.0}, "collective_timeout has no effect with tensor_parallel_size=1"),
    (TP | EAGLE | {"enforce_eager": False}, "enforce_eager=False does not go with EAGLE or MTP"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        EngineArgs("tiny", **options)


def test_experts_must_divide(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path, num_experts=6, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="data_parallel_size=4 does not divide num_experts=6"):
        EngineArgs(str(tmp_path), data_parallel_size=4, enable_expert_parallel=True)
    assert EngineArgs(str(tmp_path), data_parallel_size=3, enable_expert_parallel=True).lockstep


@pytest.mark.parametrize(
    ("options", "missing"),
    [({"engine_process": True}, "zmq"), (TP, "zmq"), (DP, "msgspec")],
)
def test_without_the_extra(
    options: dict[str, Any], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = lambda name: None if name == missing else object()  # noqa: E731
    monkeypatch.setattr(checks, "find_spec", have)
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.* needs {missing}: run pip"):
        EngineArgs("tiny", **options)


def test_what_is_sent_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was given, as JSON; of `sys.path` the strings; and no class that another process
    cannot import."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    more: Any = {"max_num_seqs": 3, "speculative_config": drafts, "ready_timeout": 9}
    config = EngineArgs("tiny", engine_process=True, **more)
    recipe = json.loads(json.dumps(config.recipe))
    assert recipe["options"].keys() == {"max_num_seqs", "speculative_config"}
    there = EngineArgs(recipe["model"], **recipe["options"])
    assert there.speculative_config == config.speculative_config and not there.engine_process
    monkeypatch.setattr(sys, "path", [Path("/x"), "/y", "/z"])
    assert manager.environment()["PYTHONPATH"] == "/y:/z"

    class Inner(Scheduler):
        """Another process cannot import it."""

    with pytest.raises(ValueError, match=r"Inner is defined in .*: move it .*engine_process=False"):
        EngineArgs("tiny", engine_process=True, scheduler_cls=Inner)
    EngineArgs("tiny", scheduler_cls=Inner)


def test_importing_the_engine_brings_no_socket_along() -> None:
    code = "import sys, atom_mini; sys.exit(bool({'zmq', 'msgspec', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
