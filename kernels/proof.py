"""The tables of docs/proof.md: what has been shown, where, when, by which command, and what it does not prove.

Every number comes from a recorded file or from a test: kernels/results/, tests/bench/results/, and the cases that pytest
collects. A block that `make gpu` has printed counts as a run once it is a file in kernels/results/,
`CARD.txt`. `python kernels/proof.py` prints the tables.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache

import machines
from machines import ROOT, Facts, lines

RESULTS = ROOT / "tests" / "bench" / "results"
TESTS = ROOT / "tests"
NOT_YET = "**no run yet: `make gpu`**"
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1102", "gfx1151", "gfx1200", "gfx1201", "sm_90", "sm_100", "sm_120")
CARDS = {  # -> the target whose code runs on it
    "MI300X": "gfx942", "MI355X": "gfx950", "RX 7900 XTX": "gfx1100", "RX 9070": "gfx1201", "H100": "sm_90",
    "RTX 4090": "sm_89", "RTX 5090": "sm_120",
}  # fmt: skip
HEAD = ["what", "where", "when", "command", "what it does not prove"]
EACH = "every run of CI"


@cache
def collected(area: str) -> list[str]:
    """The cases of a folder of tests, as pytest names them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", TESTS / area]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()


def cases(*functions: str) -> int:
    """How many cases these tests have: `engine/test_fuzz.py::test_the_fuzz_catches`, ..."""
    found = 0
    for name in functions:
        of_one = [case for case in collected(name.split("/")[0]) if case.split("[")[0] == f"tests/{name}"]
        assert of_one, f"no test is called {name}"
        found += len(of_one)
    return found


def constant(file: str, pattern: str) -> int:
    """A number that stands in a test."""
    found = re.search(pattern, (TESTS / file).read_text())
    assert found, f"{file} has nothing like {pattern}"
    return int(found[1])


def stamps() -> list[Facts]:
    """The machines of the recorded benchmarks, each with the set of instructions that torch used."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    found = [record["machine"] if isinstance(record.get("machine"), dict) else record for record in records]
    return [facts for facts in found if facts.get("instructions")]


def cpus() -> Iterator[list[str]]:
    """A row for each set of instructions."""
    recorded = stamps()
    for instructions in sorted({facts["instructions"] for facts in recorded}):
        here = [facts for facts in recorded if facts["instructions"] == instructions]
        where = ", ".join(sorted({facts["cpu"] for facts in here}))
        yield [
            "the engine's speed beside other engines' ([figures](docs/figures.md))",
            f"CPU with {instructions}: {where}", span(facts["date"][:10] for facts in here), "`make figures`, `make score`",
            "speed on another CPU, on more cores, or under Windows or macOS",
        ]  # fmt: skip
    yield [
        "a row of the compiled int8, float32 and bfloat16 products has the same bits in every batch",
        "the same CPU, compiled for AVX2 alone", EACH, "`make test-rest`: tests/cpu/test_eight_bits.py",
        "the other tests on a CPU without AVX-512, and how fast one is",
    ]  # fmt: skip
    yield [
        "nothing", "CPU with NEON (ARM)", "never", "`make test` there",
        "everything: torch's kernels and Numba's loops are others",
    ]  # fmt: skip


def on_a_cpu() -> Iterator[list[str]]:
    """What CI shows about the engine itself."""
    parity = cases("engine/test_parity.py::test_logits_equal_transformers",
                   "families/test_families.py::test_logits_equal_transformers")  # fmt: skip
    yield [
        f"logits equal those of transformers: {parity} cases of all families, with random weights", "CPU, float32", EACH,
        "`make test`, `make test-rest`: tests/engine/test_parity.py, tests/families/",
        "full sizes: the models are small; 16-bit types are compared more loosely",
    ]  # fmt: skip
    yield [
        "greedy tokens of SmolLM2-135M-Instruct are those of transformers, in the engine's main configurations", "CPU", EACH,
        "`make real`, `make test-real`", "other pretrained weights: this is the only real model that is tested",
    ]  # fmt: skip
    planted = cases(
        "engine/test_fuzz.py::test_the_fuzz_catches", "engine/test_fuzz.py::test_the_fuzz_catches_it_in_mixed_steps",
        "scheduling/test_overlap.py::test_the_fuzz_catches", "scheduling/test_radix.py::test_the_fuzz_catches_in_the_tree",
        "scheduling/test_spyre.py::test_the_fuzz_can_fail",
    )  # fmt: skip
    trials = constant("engine/test_fuzz.py", r"run_many\(range\(first, first \+ (\d+)\)\)")
    trials *= cases("engine/test_fuzz.py::test_outputs_equal_the_oracle_whatever_happens_on_the_way")
    yield [
        f"schedules, blocks and outputs equal an oracle's under random loads ({trials:,} in the first of the fuzzers); "
        f"{planted} planted faults are found", "CPU, a symbolic model", EACH,
        "`make test`, `make test-rest`: tests/engine/test_fuzz.py, tests/scheduling/",
        "a fault that needs a larger pool or a longer run than the trials have",
    ]  # fmt: skip
    faults = sum(path.read_text().count("\n@ ") for path in (TESTS / "faults").glob("*.txt"))
    yield [
        f"tests notice {faults} planted faults, spread over the package: each in a copy of it, each by the test it names",
        "CPU", "2026-12-01", "`make test-faults`", "a fault of another kind",
    ]  # fmt: skip
    near, far = (constant("engine/test_interrupt.py", rf"{name} = (\d+)") for name in ("STRIDE", "FAR"))
    yield [
        f"an interrupt (Ctrl-C) before a line of the host's code leaves an engine that is right; one line in {near} "
        f"of two kinds of engines is tried, and one in {far} of the others",
        "CPU", EACH, "`make test`, `make test-rest`: tests/engine/test_interrupt.py",
        "an interrupt inside torch, Triton or a driver",
    ]  # fmt: skip


def kernels() -> Iterator[list[str]]:
    """The rows of the kernels, without a GPU."""
    functions = ("test_attention", "test_several_queries_of_a_sequence", "test_rotate_and_store", "test_add_rms_norm",
                 "test_silu_and_mul", "test_sample")  # fmt: skip
    count = cases(*(f"gpu/test_kernels.py::{name}" for name in functions))
    yield [
        f"the kernels compute what torch computes, in {count} cases; the engine on them gives transformers' logits",
        "CPU, Triton's interpreter", EACH,
        "`make test`, `make test-rest`: tests/gpu/test_kernels.py, tests/engine/test_parity.py",
        "what a compiler makes of them: the interpreter is NumPy, one program after another, without races or shared memory",
    ]  # fmt: skip
    known = machines.load()
    compiled = [facts["compiled"] for target, facts in known.items() if target in TARGETS]
    launches, faults = (sum(facts[name] for facts in compiled) for name in ("launches", "faults"))
    yield [
        f"Triton compiles the kernels for {len(compiled)} of {len(TARGETS)} targets: {launches:,} kernels, {faults} with faults",
        "CPU, cross-compiled, without ROCm or CUDA", span(facts["date"] for facts in compiled), "`make kernels`",
        "that they run, or how fast; another Triton's code",
    ]  # fmt: skip
    runs = [facts["executed"] for facts in known.values() if "executed" in facts]
    right, tried, waves = (sum(run[name] for run in runs) for name in ("right", "cases", "instructions"))
    yield [
        f"AMD's machine code computes the right numbers: {right} of {tried} cases on {len(runs)} targets, "
        f"{waves:,} wave instructions", "CPU, an emulator in NumPy", span(run["date"] for run in runs), "`make execute`",
        "time; caches and the order of writes between workgroups; what the emulator and the manuals both have wrong; "
        "NVIDIA's machine code",
    ]  # fmt: skip
    yield from fences()


def fences() -> Iterator[list[str]]:
    """The memory model, where kernels/fences.json is."""
    path = ROOT / "kernels" / "fences.json"
    if not path.exists():
        return
    known = json.loads(path.read_text())
    bad = [triton for triton, targets in known.items() if any(targets.values())]
    yield [
        f"what {len(known)} Tritons write around an atomic add: {len(bad)} of them ({', '.join(bad)}) leave out a wait or an "
        "invalidation that a merge inside a kernel would need, so ours is a second launch",
        "CPU, read from assembly; executed in the emulator with the caches of dies and WGPs", EACH,
        "`make fences` for all, `make test` for the Triton that is installed",
        "that a GPU has the memory model of its manual; that a missing wait does harm on a given card",
    ]  # fmt: skip


def span(days: Iterable[str]) -> str:
    """The first day, and the last if it is another."""
    ordered = sorted(days)
    return " to ".join(dict.fromkeys([ordered[0], ordered[-1]]))


def targets() -> str:
    """A row for each compile target."""
    known, rows = machines.load(), []
    for target in TARGETS:
        facts = known.get(target, {})
        compiled, ran = facts.get("compiled"), facts.get("executed")
        run = f"{ran['right']} of {ran['cases']} cases, {ran['date']}" if ran else "no"
        if compiled:
            said = f"{compiled['launches']} kernels, {compiled['faults']} faults, {compiled['date']}"
            rows.append([f"`{target}`", compiled["cards"], said, run, ", ".join(compiled["refused"]) or "nothing"])
        else:
            rows.append([f"`{target}`", "", "not recorded: `make kernels`", run, ""])
    return lines(["target", "GPUs", "compiled", "executed in the emulator", "refused"], rows)


def gpus() -> str:
    """A row for each card that we ask for, and for every other card with a run."""
    runs, rows = machines.runs(), []
    for card, target in CARDS.items():
        mine = [run for run in runs if machines.is_card(card, run.card)]
        compiled = f"`{target}`" if target in TARGETS else f"`{target}`, not compiled here"
        rows += [[run.card, compiled, run.date, run.result] for run in mine] or [[card, compiled, "", NOT_YET]]
    others = [run for run in runs if not any(machines.is_card(card, run.card) for card in CARDS)]
    rows += [[run.card, "", run.date, run.result] for run in others]
    return lines(["card", "target", "when", "what its block says"], rows)


def shown() -> str:
    """The first table: all that has been shown."""
    return lines(HEAD, [*cpus(), *on_a_cpu(), *kernels()])


if __name__ == "__main__":
    print("\n\n".join([shown(), targets(), gpus()]))
