"""docs/figures.md's tables, from the files that the benchmarks write: `make figures` runs them and then this.

`python tests/bench/figures.py FOLDER` reads cpu.json, host_step.json, full_size.json, speculation.json, families.json,
busy.json and real.json there, or the last one alone. It writes results/readme.json, with machine, date and commit, and the
same numbers into the tables of index.ipynb. tests/book/test_examples.py compares the two. The sentences around the tables are
for a person to read again.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from noise import band

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "bench" / "results" / "readme.json"
INDEX = ROOT / "nbs" / "index.ipynb"
Table = dict[str, list[str]]  # the name of a row -> its cells
WHOLE = 4  # from this one on, tables are written as a whole: each engine that was measured has a row
RANDOM = "random Qwen3, 29 M"  # as real.py calls it
SECOND = "The same on the random Qwen3 of 29 M parameters, with random tokens:\n\n"  # above its table
OURS = ("atom_mini, packed", "atom_mini, compiled")  # in bold
NAMES = {"transformers generate": "transformers `generate`"}
DRAFTS = {  # row -> task, drafter
    "lookup, a list that is copied": ("copy", "lookup"),
    "lookup, questions about facts in the prompt": ("recall", "lookup"),
    "EAGLE-3 head, stories": ("story", "EAGLE head"),
    "lookup, stories (its few guesses are wrong)": ("story", "lookup"),
    "lookup, stories, when it finds nothing": ("story", "lookup, in vain"),
}


def rate(value: float) -> str:
    return f"{value:.1f}" if value < 20 else f"{value:.0f}"


def ratio(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def engines(works: list[dict[str, Any]]) -> Table:
    """Of each engine, tokens per second and the ratio to `generate` for each of `works`."""
    table: Table = {}
    for name in works[0]["engines"]:
        found = [work["engines"][name] for work in works]
        cells = [text for f in found for text in (rate(f["tokens_per_second"]), ratio(f["ratio_to_generate"]))]
        table[NAMES.get(name, name)] = [f"**{cell}**" if name in OURS else cell for cell in cells]
    return table


def speed(cpu: dict[str, Any]) -> Table:
    works = [cpu["many"], cpu["one"]]
    best = [f"{100 * work['engines']['atom_mini, compiled']['share_of_limit']:.0f} %" for work in works]
    limit = "atom_mini, of what this machine could do at best (bandwidth and matrix rate measured in the same run)"
    return engines(works) | {limit: [best[0], "", best[1], ""]}


def small(host: dict[str, Any], full: dict[str, Any]) -> Table:
    """Host times, and the two models of full size."""
    kinds = [key.removesuffix(", 256") for key in host if key.endswith(", 256") and not key.startswith("replayed")]
    spans = [[ms for kind in kinds for ms in host[f"{kind}, {n}"]] for n in (256, 512)]
    times = " / ".join(f"{min(ms):.1f} to {max(ms):.1f}" for ms in spans)
    sizes = [shape for shape in full.values() if isinstance(shape, dict) and "weights_bytes" in shape]
    gigabytes, seconds, errors = (
        " and ".join(form.format(shape[key] / scale).replace("e-0", "e-") for shape in sizes)
        for form, key, scale in (
            ("{:.1f}", "weights_bytes", 1e9),
            ("{:.0f}", "seconds", 1),
            ("{:.0e}", "largest_logit_difference", 1),
        )
    )
    peak = max(shape["anonymous_share"] for shape in sizes)
    replay = "host time of a decode step that is replayed on a GPU, 256 sequences, without the driver's call"
    return {
        "host time per decode step, without the model, 256 / 512 sequences":
            [f"{times} ms, for contexts of 128 to 4,096 tokens"],
        "logits against transformers, Qwen3-0.6B and Llama-3.2-1B shapes, float32, random weights":
            [f"differ by at most {errors}"],
        f"loading them ({gigabytes} GB), peak memory": [f"{seconds} s, {peak:.2f} x the weights"],
        f"{replay} (measured on a CPU)": [f"{host['replayed, 256'][0]:.2f} ms"],
    }  # fmt: skip


def import_seconds() -> float:
    """The least of five processes that import the package, less those that do nothing."""
    def least(code: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    return least("from atom_mini import LLM") - least("")


def drafts(results: list[dict[str, Any]]) -> Table:
    """Tokens per step, and speed against no drafts, by batch."""
    table: Table = {}
    for name, (task, drafter) in DRAFTS.items():
        rows = [row for row in results if (row["task"], row["drafter"]) == (task, drafter)]
        table[name] = [f"{row['tokens per step']:.1f}, {ratio(row['ratio'])} x" for row in rows]
    return table


def drafts_sentence(results: list[dict[str, Any]]) -> str:
    """The noise, what drafts cost in vain, and how right the formula is."""
    low, high = band(results)
    others = [row for row in results if row["drafter"] != "none"]
    vain = [1 - row["ratio"] for row in others if row["drafter"] == "lookup, in vain"]
    errors = sorted(abs(row["predicted"] / row["ratio"] - 1) for row in others)
    near = sum(error <= 0.2 for error in errors)
    return (
        f"In the same run, lookups that draft nothing lie between {low:.2f} and {high:.2f} x. "
        f"One that finds nothing costs {100 * statistics.fmean(vain):.1f} % (mean of {len(vain)} cases, "
        f"{100 * max(vain):.0f} % at most), and chapter [54](nbs/speculation/54_when_it_pays.ipynb)'s formula, "
        f"with step and drafter times measured in the same run, is {100 * statistics.median(errors):.0f} % off in the "
        f"median, within 20 % in {near} of "
        f"{len(errors)} cases."
    )


def busy_sentence(busy: dict[str, Any]) -> str:
    """What two busy loops cost, with either way to wait, where Numba decodes and where torch does."""

    def pair(kind: str, loops: int) -> str:
        found = busy[f"tiny, 1 request{kind}, {loops} loops"]
        return " and ".join(f"{statistics.median(rates):,.0f}" for rates in found.values())

    compiled, torch = ((pair(kind, 2), pair(kind, 0)) for kind in ("", ", torch"))
    return (
        f"tokens/s: {compiled[0]} (alone {compiled[1]}), because the compiled decode has its own barrier; with "
        f"`packed=True`, in torch, {torch[0]} (alone {torch[1]})."
    )


def mixture(families: dict[str, Any]) -> Table:
    batches = list(families["experts"])
    works = [families[f"{batch} requests"] for batch in batches]
    counts = [[f"{n:.1f}".removesuffix(".0") for n in families["experts"][batch]] for batch in batches]
    cells = [cell for counted, formula in counts for cell in (f"{counted} ({formula})", "")]
    return engines(works) | {"different experts in a layer's step, counted (by formula)": cells}


def real_model(works: list[dict[str, Any]], batches: list[str]) -> Table:
    """Of each engine, by batch: tokens per second, the ratio to `generate`, and the share of the bandwidth."""
    table: Table = {"tokens per second": [text for batch in batches for text in (batch, "", "of bandwidth")]}
    for name in works[0]["engines"]:
        found = [work["engines"][name] for work in works]
        table[NAMES.get(name, name)] = [
            text for f in found
            for text in (rate(f["tokens_per_second"]), ratio(f["ratio_to_generate"]), f"{100 * f['share_of_bandwidth']:.0f} %")
        ]  # fmt: skip
    return table


def real_tables(real: dict[str, Any]) -> list[Table]:
    """Of SmolLM2 and, where it was measured, of the random Qwen3."""
    models = [real, *filter(None, [real.get(RANDOM)])]
    batches = [name for name in real if name.endswith(("request", "requests"))]
    heads = [batch if not number else batch.split()[0] for number, batch in enumerate(batches)]
    return [real_model([model[batch] for batch in batches], heads) for model in models]


def stamp(machine: dict[str, Any]) -> dict[str, str]:
    """Where and when: in parts, and as the page says it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cores = f"{machine['threads']} core{'s' * (machine['threads'] > 1)}"
    where, date = f"{cores} of an {machine['cpu']}", machine["date"][:10]
    python = ".".join(machine["python"].split(".")[:2])
    said = f"Measured on {date} on {where} ({machine['instructions']}), Python {python}, torch {machine['torch']}, "
    said += f"transformers {machine['transformers']}"
    return {"machine": where, "date": date, "commit": commit.strip(), "stamp": said}


def collect(folder: Path, old: dict[str, Any]) -> dict[str, Any]:
    """What readme.json is to hold. Rows that no benchmark measures stay. ValueError if a file is of another machine."""
    names = ("cpu", "host_step", "full_size", "speculation", "families", "busy")
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    known = {name: result.get("machine", result)["cpu"] for name, result in found.items()}
    if len({*known.values()}) > 1:
        raise ValueError(f"the files are of several machines: {known}")
    new = [
        speed(found["cpu"]),
        small(found["host_step"], found["full_size"]) | {"`from atom_mini import LLM`": [f"{import_seconds():.1f} s"]},
        drafts(found["speculation"]["results"]),
        mixture(found["families"]),
    ]
    said = {"drafts": drafts_sentence(found["speculation"]["results"]), "busy": busy_sentence(found["busy"])}
    return {**old, **stamp(found["cpu"]), **said, "tables": updated(old["tables"][:WHOLE], new) + old["tables"][WHOLE:]}


def collect_real(folder: Path, old: dict[str, Any]) -> dict[str, Any]:
    """The same of real.json alone: its tables have a stamp of their own, with the peers' versions."""
    real = json.loads((folder / "real.json").read_text())
    said = ", ".join([stamp(real["machine"])["stamp"], *real.get("peers", {}).values()])
    work = f"{real['input']} tokens of English in and {real['output']} out"
    return {**old, "real": said, "real_work": work, "tables": old["tables"][:WHOLE] + real_tables(real)}


def collect_drafts(folder: Path, old: dict[str, Any]) -> dict[str, Any]:
    """The same of speculation.json alone, with its day."""
    found = json.loads((folder / "speculation.json").read_text())
    said = {"drafts": drafts_sentence(found["results"]), "drafts_date": f"measured on {found['date'][:10]}"}
    *before, table = old["tables"][:3]
    return {**old, **said, "tables": [*before, table | drafts(found["results"]), *old["tables"][3:]]}


def updated(old: list[Table], new: list[Table]) -> list[Table]:
    """The tables with their new rows. ValueError for a row that they do not have."""
    for before, after in zip(old, new, strict=True):
        if extra := after.keys() - before.keys():
            raise ValueError(f"docs/figures.md has no row {sorted(extra)}: write it into index.ipynb and readme.json first")
    return [before | after for before, after in zip(old, new, strict=True)]


def as_markdown(rows: Table) -> str:
    """A table whose first row is its head."""
    lines = [f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in (name, *cells))}|" for name, cells in rows.items()]
    return "\n".join([lines[0], "|---" * lines[0].count("|", 1) + "|", *lines[1:]]) + "\n"


def write_page(text: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """`text` (index.ipynb's markdown) with the new cells in the rows of the section *Figures*, and the new stamp. The last
    tables are written as a whole; one that the page does not have follows them, and one without figures goes."""
    before, section = text.split("## Figures", 1)
    section, *rest = re.split(r"(?=\n##? )", section, maxsplit=1)
    tables = enumerate(new["tables"])

    def table(found: re.Match[str]) -> str:
        number, rows = next(tables, (WHOLE, None))
        if number >= WHOLE:
            return as_markdown(rows) if rows else ""
        lines = []
        for line in found[0].splitlines():
            name = line.strip("|").split("|")[0].strip()
            is_rule = re.fullmatch(r"[|\- ]+", line)
            lines.append(line if is_rule or name not in rows else f"| {' | '.join([name, *rows[name]])} |")
        return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"

    section = re.sub(r"(?m)(?:^\|.*\n)+", table, section)
    if len(new["tables"]) < len(old["tables"]):
        section = section.replace(f"\n{SECOND}", "")
    for _, rows in tables:
        *_, last = re.finditer(r"(?m)(?:^\|.*\n)+", section)
        section = f"{section[: last.end()]}\n{SECOND}{as_markdown(rows)}{section[last.end() :]}"
    for name in ("stamp", "drafts", "busy", "drafts_date"):
        section = section.replace(old[name], new[name], 1)
    before_real, _, after_real = section.rpartition(old["real"])  # the last: it may begin like the stamp
    section = f"{before_real}{new['real']}{after_real}"
    section = re.sub(r"\d+ tokens of English in and \d+ out", new.get("real_work", r"\g<0>"), section)
    return before + "## Figures" + section + "".join(rest)


def main(folder: str) -> None:
    old = new = json.loads(RECORDED.read_text())
    if (Path(folder) / "cpu.json").exists():
        new = collect(Path(folder), new)
    if (Path(folder) / "speculation.json").exists():
        new = collect_drafts(Path(folder), new)
    if (Path(folder) / "real.json").exists():
        new = collect_real(Path(folder), new)
    page = json.loads(INDEX.read_text())
    for cell in page["cells"]:
        text = "".join(cell["source"])
        if "## Figures" in text:
            cell["source"] = write_page(text, old, new).splitlines(keepends=True)
    INDEX.write_text(json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    RECORDED.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    print("recorded; now read the sentences around the tables, and run: make book")


if __name__ == "__main__":
    main(*sys.argv[1:])
