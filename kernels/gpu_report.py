"""One block of text from what `make gpu` has written so far, to paste into an issue.

    python kernels/gpu_report.py OUT    # prints the block, and writes it to OUT/report.txt

Any file may be missing or broken: a run may be cut off after any step. What is missing is said in its line. Needs no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "---- atom_mini on a GPU ----", "---- end ----"
FILES = ("limits", "tokens", "rates", "kernels", "common", "steps", "nano-vllm", "transformers", "mixtures", "sweep",
         "profile")  # fmt: skip
NOT_YET = "not measured (slot {}, kernels/slots.sh)"
Facts = dict[str, Any]


def read(out: Path) -> dict[str, Facts]:
    """The JSON files that are there; an empty one in place of each that is missing, or cut off while it was written."""
    found: dict[str, Facts] = {}
    for name in FILES:
        try:
            found[name] = json.loads((out / f"{name}.json").read_text())
        except (OSError, ValueError):
            found[name] = {}
    return found


def row(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def part(files: dict[str, Facts], file: str, *names: str) -> Facts:
    """`names` below a file's parts; {} where one is missing."""
    found: Any = files[file].get("parts", {})
    for name in names:
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def number(value: Any, unit: str = "") -> str:
    """Three digits; a dash for what was not measured."""
    if not isinstance(value, int | float):
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def limits(files: dict[str, Facts]) -> Facts:
    """Of the first file that has them: every run of bench.py measures them again."""
    every = (part(files, name, "limits") for name in FILES)
    return next((found for found in every if found.get("read_bandwidth")), {})


def card(files: dict[str, Facts]) -> Iterator[str]:
    """What it ran on, with what, and how fast this card reads."""
    machine = next((facts["machine"] for facts in files.values() if facts.get("machine")), {})
    if machine.get("dry"):
        yield "DRY RUN: toy shapes on a CPU, its figures mean nothing"
    units, memory = machine.get("compute_units"), machine.get("memory_bytes")
    sizes = f", {units} units, {memory / 2**30:.0f} GiB" if units and memory else ""
    yield row("card", str(machine.get("device", "unknown: no step has written a file")) + sizes)
    kit = " ".join(f"{name} {machine[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if machine.get(key))
    yield row("driver", f"{machine.get('driver') or 'unknown'}{', ' * bool(kit)}{kit}")
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "python") if machine.get(name)]
    yield row("software", ", ".join(versions) or "unknown")
    yield row("date", f"{machine.get('date', 'unknown')}, atom_mini {commit()}")
    found = limits(files)
    if not found:
        yield row("read rate", NOT_YET.format(1))
        return
    yield row("read rate", f"{number(found['read_bandwidth'] / 1e9, 'GB/s')}, measured in this run; copy "
              f"{number(found['bandwidth'] / 1e9, 'GB/s')}, product {number(found['matrix_rate'] / 1e12, 'TFLOP/s')}, "
              f"smallest kernel {number(found['launch_seconds'] * 1e6, 'us')}")  # fmt: skip


def commit() -> str:
    """The commit that ran, and whether files were changed; nothing known without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20).stdout.strip() or "without git"
    except (OSError, subprocess.SubprocessError):
        return "without git"


def tokens(files: dict[str, Facts]) -> Iterator[str]:
    """Are they the CPU's?"""
    models = files["tokens"].get("models", {})
    if not models:
        yield row("tokens", NOT_YET.format(1))
    for model, engines in models.items():
        said = [f"{kind} {found['equal']} of {found['requests']}" for kind, found in engines.items()
                if isinstance(found, dict) and "equal" in found]  # fmt: skip
        yield row("tokens", f"equal to the CPU's, {model}: {', '.join(said) or '-'}")
        for kind, found in engines.items():
            for parting in found.get("partings", []) if isinstance(found, dict) else []:
                apart = f", where the CPU's two likeliest are {parting['apart']:.1e} apart" if "apart" in parting else ""
                yield f"  DIFFERS: {kind}, request {parting['request']} from token {parting['token']}{apart}"
    if models and not any(name.startswith("SmolLM2") for name in models):
        yield row("", "SmolLM2: not here (make real)")


def rates(files: dict[str, Facts]) -> Iterator[str]:
    """Tokens per second by the number of requests, and the common benchmark."""
    ours, nano = part(files, "rates", "rates"), part(files, "nano-vllm", "nano_vllm")
    loads = list(dict.fromkeys(load for found in ours.values() if isinstance(found, dict) for load in found if load.isdigit()))
    if not loads:
        yield row("tokens/s", NOT_YET.format(2))
    else:
        yield row("tokens/s", f"at {', '.join(loads)} requests, Qwen3-0.6B's shape in bfloat16, 128 tokens in, 256 out")
        beside = {"nano-vLLM": nano.get("rates", {})}
        for name, found in {**ours, **beside}.items():
            if isinstance(found, dict) and any(load in found for load in loads):
                yield row("", f"{name}: {', '.join(number(found.get(load)) for load in loads)}")
    runs = {"plain": part(files, "common", "common"), "overlapped": part(files, "common", "overlap", "common"),
            "transformers": part(files, "transformers", "transformers"), "nano-vLLM": nano}  # fmt: skip
    said = [f"{name} {number(found['tokens_per_second'])}" for name, found in runs.items() if "tokens_per_second" in found]
    yield row("benchmark", f"256 requests, tokens/s: {', '.join(said)}" if said else NOT_YET.format(2))
    if nano.get("attention"):
        yield row("", f"nano-vLLM's attention: {nano['attention']}")
    elif files["nano-vllm"]:
        yield row("", f"nano-vLLM: {nano.get('skipped') or nano.get('error') or 'not reached'}")


def shares(name: str, found: Facts, share: Callable[[Facts], float | None]) -> Iterator[str]:
    """A line for each model or kernel, with the share of each of its shapes."""
    lines: dict[str, list[str]] = {}
    for shape, facts in found.items():
        if isinstance(facts, dict) and (value := share(facts)) is not None:
            split = re.match(r"(.*?) ?((?:batch )?\d+(?: context \d+| x \d+)?)$", shape)
            kernel, size = split.groups() if split else (shape, "")
            size = size.removeprefix("batch ").replace(" context ", " x ")
            lines.setdefault(kernel, []).append(f"{size} {percent(value)}".strip())
    for kernel, sizes in lines.items():
        yield f"  {', '.join(filter(None, [name, kernel]))}: {', '.join(sizes)}"


def kernels(files: dict[str, Facts]) -> Iterator[str]:
    """Each kernel's bytes per second as a share of what this card reads; products, of its matrix rate."""
    found, limit = part(files, "kernels", "kernels"), limits(files)
    if not found or not limit:
        yield row("kernels", NOT_YET.format(2))
        return
    yield row("kernels", "share of the read rate, by batch x context, or by tokens")

    def of_read(facts: Facts) -> float | None:
        rate = facts.get("GB_per_second")
        return None if rate is None else 1e9 * rate / limit["read_bandwidth"]

    for key, name in {"decode_attention": "decode", "latent_decode": "latents", "small_kernels": "", "experts": "experts"}.items():
        yield from shares(name, found.get(key, {}), of_read)
    yield row("", "share of the matrix rate")
    yield from shares("prefill", found.get("prefill_attention", {}), lambda facts: facts.get("of_matrix_rate"))


def steps(files: dict[str, Facts]) -> Iterator[str]:
    """Whole steps beside their roofline."""
    models = {name: found for name, found in part(files, "steps", "steps").items() if isinstance(found, dict)}
    if not models:
        yield row("steps", NOT_YET.format(2))
        return
    yield row("steps", "share of the roofline, decodes by batch x context")
    for name, found in models.items():
        sizes = {shape.removeprefix("decode "): facts for shape, facts in found.items() if shape.startswith("decode ")}
        yield from shares(name, sizes, lambda facts: facts.get("of_roofline"))


def tests(out: Path) -> Iterator[str]:
    """How many passed, and the name of each that failed."""
    seen = False
    for file in sorted(out.glob("tests-*.jsonl")):
        seen, ends = True, list(outcomes(file))
        count = {kind: sum(end["outcome"] == kind for end in ends) for kind in ("passed", "skipped", "failed")}
        said = ", ".join(f"{number} {kind}" for kind, number in count.items() if number or kind != "skipped")
        yield row("tests", f"{file.stem.removeprefix('tests-')}: {said}")
        for end in ends:
            if end["outcome"] == "failed":
                yield f"  FAILED {end['test']}: {one_line(end['why'])}"
    if not seen:
        yield row("tests", NOT_YET.format(1))


def outcomes(file: Path) -> Iterator[Facts]:
    """The lines of a file whose last one may be cut off."""
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def one_line(text: str, length: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def failures(out: Path, files: dict[str, Facts]) -> Iterator[str]:
    """The steps that ended badly, each with the last line that it printed; then every error that a step has written."""
    for summary in sorted(out.glob("slot[123].txt")):
        log = summary.with_suffix(".log")
        said = log.read_text(errors="replace") if log.exists() else ""
        for code, seconds, name in re.findall(r"(?m)^ *(\d+) +(\d+) s  (.*)$", summary.read_text()):
            if code != "0":
                printed = re.findall(rf"(?ms)^==== {re.escape(name.split(' (longer')[0])}: [^\n]*\n(.*?)(?=^==== |\Z)", said)
                last = next((line for line in reversed("".join(printed[-1:]).splitlines()) if line.strip()), "nothing")
                yield f"  {summary.stem}, {name}: exit code {code} after {seconds} s; last line: {one_line(last)}"
    for name, facts in files.items():
        for path, error in errors(facts.get("parts") or facts.get("models") or facts.get("steps") or {}):
            yield f"  {name}.json, {path}: {one_line(error)}"


def errors(facts: Facts, path: str = "") -> Iterator[tuple[str, str]]:
    """(where, what) of each error below."""
    for name, value in facts.items():
        if name == "error":
            yield path, str(value)
        elif isinstance(value, dict):
            yield from errors(value, f"{path} / {name}" if path else name)


def ended(out: Path) -> Iterator[str]:
    """Which steps ended, slot by slot."""
    for summary in sorted(out.glob("slot[123].txt")):
        lines = re.findall(r"(?m)^ *(\d+) +(\d+) s  (.*)$", summary.read_text())
        right = sum(code == "0" for code, _, _ in lines)
        yield row(summary.stem, f"{right} of {len(lines)} steps went well, {sum(int(s) for _, s, _ in lines)} s")


def block(out: Path) -> str:
    """The whole text. A section that cannot be made says so, and the others stand."""
    files = read(out)
    bad = partial(failures, out, files)
    sections: dict[str, Callable[[], Iterator[str]]] = {
        "card": partial(card, files), "tokens": partial(tokens, files), "tests": partial(tests, out),
        "tokens/s": partial(rates, files), "kernels": partial(kernels, files), "steps": partial(steps, files),
        "slots": partial(ended, out), "failures": bad,
    }  # fmt: skip
    lines = [BEGIN]
    for name, section in sections.items():
        try:
            found = list(section())
        except Exception as error:  # a file of an unforeseen shape
            found = [row(name, f"cannot be told: {type(error).__name__}: {error}")]
        if name == "failures":
            found = [row("failed", "nothing" if not found else ""), *found]
        lines += found
    return "\n".join([*(line.rstrip() for line in lines), END]) + "\n"


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("python kernels/gpu_report.py OUT: the folder that kernels/slots.sh has written to")
    text = block(Path(sys.argv[1]))
    (Path(sys.argv[1]) / "report.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
