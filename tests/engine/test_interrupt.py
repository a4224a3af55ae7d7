"""Ctrl-C at any line of the host's code: what is asked next is right, and the books balance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from show import check_blocks, check_trace
from symbolic import LaunchingSymbolicRunner, Request, SymbolicRunner, Trial
from test_spyre import RectangularSymbols

import atom_mini
from atom_mini import LLM, EngineArgs, SamplingParams
from atom_mini.engine_core import EngineCore
from atom_mini.options.build import make_scheduler
from atom_mini.scheduling.overlap import OverlapCore
from atom_mini.sequence import Sequence
from atom_mini.trace.trace import record

PACKAGE = str(Path(atom_mini.__file__).parent)
STRIDE = 7  # every seventh line is enough for each day; 1 tries them all, in some minutes
FAR = 19  # for the kinds that share most of their lines with others
DEVICE = ("models.py", "attention.py", "sampler.py")  # torch's side, called hundreds of times a step


class Tripwire:
    """Raises KeyboardInterrupt before the `at`-th line of the package that runs (counting from 1)."""

    module = ""  # only lines of modules that end so

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""
        self.files: list[str] = []  # of the lines that ran

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.endswith(DEVICE) or not name.endswith(self.module):
            return None
        if event == "line":
            self.left -= 1
            self.files.append(Path(name).name)
            if self.left == 0:
                self.where = f"{Path(name).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self

    def run(self, action: Callable[[], object]) -> bool:
        """Whether `action` was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return bool(self.where)


REQUESTS = [  # two share a beginning; the pool is too small for all
    Request(0, [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=7, ignore_eos=True)),
    Request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=4, ignore_eos=True)),
    Request(0, [2, 2], SamplingParams(max_tokens=8, seed=3)),
]
KINDS: dict[str, dict[str, Any]] = {
    "hash": {},
    "radix": {"prefix_cache": "radix"},
    "no cache": {"prefix_cache": "none"},
    "interleaved": {"interleave_decode": True},
    "mixed": {"enable_mixed_steps": True},
    "traced": {"trace": True},
    "overlap": {"overlap": True},
    "overlap, radix": {"overlap": True, "prefix_cache": "radix"},
    "overlap, traced": {"overlap": True, "trace": True},
    "spyre": {"scheduler": "spyre", "chunk_size": 4, "max_model_len": 20, "num_kvcache_blocks": 12},
}


def make_core(options: dict[str, Any]) -> EngineCore:
    small = {"num_kvcache_blocks": 6, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    config = EngineArgs(kv_cache_block_size=4, **small | options)
    if config.overlap:
        launching = LaunchingSymbolicRunner(config, 12, False, bool, lambda: True)
        return OverlapCore(config, launching, make_scheduler(config))
    kind = RectangularSymbols if config.scheduler == "spyre" else SymbolicRunner
    return EngineCore(config, kind(config, 12, strict=False), make_scheduler(config))


def serve(core: EngineCore, seqs: list[Sequence]) -> None:
    """As somebody would who has been interrupted: add those that are not in it, and go on."""
    for seq in seqs:
        if seq.id not in core.scheduler.seqs and not seq.is_finished:
            core.add(seq)
    while core.step():
        pass


def expect_whole(core: EngineCore) -> None:
    scheduler = core.scheduler
    check_blocks(scheduler.block_manager, scheduler.running)
    queued = [*scheduler.running, *scheduler.waiting]
    assert sorted(s.id for s in queued) == sorted(scheduler.seqs), "a request is in no queue"


def interrupt_everywhere(
    make: Callable[[], EngineCore], requests: list[Request], trace: bool, stride: int = STRIDE,
    kind: type[Tripwire] = Tripwire, least: int = 30,
) -> None:  # fmt: skip
    """At one line in `stride`; then the same requests go on, and others come, and all see the oracle's tokens."""
    trial, at, places = Trial(make().config, (), 12, [], 0.0), 0, set()
    expected = [trial.expected(request)[:2] for request in requests]
    while True:
        at += stride
        core, wire = make(), kind(at)
        written = record(core) if trace else None
        seqs = [Sequence(r.prompt, 4, r.params, id=i) for i, r in enumerate(requests)]
        if not wire.run(lambda core=core, seqs=seqs: serve(core, seqs)):  # type: ignore[misc]
            break
        places.add(wire.where)
        if not core.is_torn:
            expect_whole(core)
        serve(core, seqs)
        later = [Sequence(r.prompt, 4, r.params, id=9 + i) for i, r in enumerate(requests)]
        serve(core, later)
        expect_whole(core)
        for seq, (tokens, hashes) in zip(seqs + later, expected * 2, strict=True):
            assert seq.completion_token_ids == tokens, f"{wire.where}: request {seq.id} has other tokens"
            assert [h for entry in seq.logprobs for h in entry.values()] == hashes, wire.where
        if written is not None:
            check_trace(written)
    assert len(places) > least, "the wire hardly trips"


class SequenceWire(Tripwire):
    """In `Sequence`, where each token becomes final by one line."""

    module = "/sequence.py"


def test_every_line_of_a_sequence() -> None:
    """A token and the end that comes with it are known at once: a stride may miss the line between them."""
    interrupt_everywhere(lambda: make_core({}), REQUESTS, trace=False, stride=1, kind=SequenceWire, least=10)


OFTEN = ("hash", "overlap, radix")  # in them, most lines of the others run, too


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_interrupted_at_any_line(kind: str) -> None:
    stride = STRIDE if kind in OFTEN else FAR
    interrupt_everywhere(lambda: make_core(KINDS[kind]), REQUESTS, "trace" in KINDS[kind], stride)


class Torn(KeyboardInterrupt):
    """The second of two interrupts."""


def test_interrupted_while_a_step_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call undoes the rest of it first."""
    core = make_core({})
    seqs = [Sequence(r.prompt, 4, r.params, id=i) for i, r in enumerate(REQUESTS)]
    expected = [Trial(core.config, (), 12, [], 0.0).expected(request)[0] for request in REQUESTS]
    for seq in seqs:
        core.add(seq)
    core.step()
    with monkeypatch.context() as patch, pytest.raises(Torn):
        patch.setattr(core.runner, "forward", interrupt)
        patch.setattr("atom_mini.scheduler.deque", lambda _: interrupt(kind=Torn))  # nobody runs or waits
        core.step()
    assert core.is_torn
    serve(core, seqs)
    assert [seq.completion_token_ids for seq in seqs] == expected
    expect_whole(core)


def interrupt(*_: Any, kind: type[BaseException] = KeyboardInterrupt) -> Any:
    raise kind


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_the_whole_llm_interrupted(overlap: bool) -> None:
    """Text, tensors and all: some lines of a call, and the next call is right."""
    prompts = ["Once upon a time", "12 + 7 =", "Once upon a day"]
    sampling = SamplingParams(max_tokens=6, stop=" a", ignore_eos=True, temperature=0)
    with LLM("tiny", device="cpu", num_kvcache_blocks=40, max_num_seqs=4, overlap=overlap) as llm:
        expected = [(out.text, out.token_ids) for out in llm.generate(prompts, sampling)]
        at, tripped = 1, 0
        while True:
            wire = Tripwire(at)
            if not wire.run(lambda: llm.generate(prompts, sampling)):
                break
            at, tripped = at + 101, tripped + 1
            got = [(out.text, out.token_ids) for out in llm.generate(prompts, sampling)]
            assert got == expected, wire.where
            expect_whole(llm.engine_core)
        assert tripped > 10
