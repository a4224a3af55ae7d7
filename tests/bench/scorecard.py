"""README's table and figure of the scorecard, and its lines in the chapters, from results/score_*.json, which score.py writes.
No torch here."""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "nbs" / "_book"))  # appended: a folder of ours hides no installed package
from places import chapters  # noqa: E402

RESULTS = ROOT / "tests" / "bench" / "results"
FIGURE = ROOT / "docs" / "_static" / "score.svg"
RUNGS = {  # rung -> what it needs; "" is this engine on a CPU
    "naive loop": "transformers", "padded batch": "transformers", "small": "", "continuous": "", "paged": "", "prefix cache": "",
    "chunked": "", "compiled": "", "overlapped": "", "drafted": "", "own process": "", "server": "", "ranks": "",
    "Triton": "a GPU", "small kernels": "a GPU", "graphs": "a GPU",
}  # fmt: skip
PUBLISHED = {"nano-vLLM": ("an H200", 20_806), "vLLM": ("an MI300X", 14_995)}  # by others, of Qwen3-0.6B
COLOURS = {"transformers": "#7f8fa3", "": "#4d9de0"}


def file_for(machine: dict[str, Any]) -> Path:
    """One file a machine: of its processor's name and how many threads there were."""
    words = re.sub(r"[^a-z0-9]+", "_", str(machine["cpu"]).lower()).strip("_")
    return RESULTS / f"score_{words}_{machine['threads']}.json"


def read() -> dict[str, Any]:
    """What README shows: the file that was written last, by its date."""
    return max((json.loads(path.read_text()) for path in RESULTS.glob("score_*.json")), key=lambda one: one["versions"]["date"])


def cells(found: dict[str, Any]) -> list[str]:
    """A rung's figures, as the table has them."""
    ms = [f"{1000 * found[name]:.0f}" for name in ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")]
    share = "" if found["share of bandwidth"] is None else f"{100 * found['share of bandwidth']:.0f} %"
    return [f"{found['tokens per second']:.0f}", *ms, f"{found['goodput']:.1f}", share]


def beside(score: dict[str, Any]) -> str:
    """What others used of the processors, if it was more than a little."""
    share = score["other_load"] or 0
    return f" Others used {100 * share:.0f} % of the processor meanwhile: take ratios." if share > 0.05 else ""


def as_markdown(score: dict[str, Any]) -> str:
    """The table. A rung that was not run says what it needs."""
    both = [score, score["built-in"]]
    goals = [f"{1000 * one['objective']['TTFT']:.0f} ms, the others every {1000 * one['objective']['TPOT']:.0f} ms" for one in both]
    head = "tokens/s | TTFT p50, ms | p99 | ITL p50, ms | p99 | requests/s in time | of the bandwidth | "
    head += "built-in: tokens/s | requests/s in time"
    lines = [f"{score['stamp']}.{beside(score)} In time: a first token within {goals[0]}; of the built-in model {goals[1]}. "
             f"{both[0]['rate']:g} requests come in a second, to the built-in model {both[1]['rate']:g}. "
             f"The loop got the first {score['looped']} of 64.", "", f"| | {head} |", f"|---{'|---' * 9}|"]  # fmt: skip
    for rung, needs in RUNGS.items():
        found, small = (one["rungs"].get(rung) for one in both)
        missing = f"needs {needs}: not measured" if needs else "not measured yet: `make score`"
        row = [*cells(found), cells(small)[0], cells(small)[5]] if found else [missing, *[""] * 8]
        lines.append(f"| {rung} | {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def as_lines(*rungs: str) -> str:
    """What a chapter says of some rungs: a line each."""
    score = read()
    lines = [f"{score['machine']}, {score['date']}, 29 M parameters"]
    for rung in rungs:
        rate, first, _, gap, late, *_ = cells(score["rungs"][rung])
        lines.append(f"{rung:12} {rate:>4} tokens/s, first token {first:>5} ms, then every {gap:>4} ms (p99 {late:>4})")
    return "\n".join(lines)


def as_svg(score: dict[str, Any]) -> str:
    """The rungs as bars: tokens per second, and how long half of the requests waited for their first token."""
    rungs = {name: found for name, found in score["rungs"].items() if found}
    most, high = max(found["tokens per second"] for found in rungs.values()), 26
    lines = [f"{score['machine']}, {score['date']}, 29 M parameters. Grey: transformers, blue: atom_mini.",
             beside(score).strip()]  # fmt: skip
    shapes = ['<text x="12" y="21" font-weight="600">The same 64 requests, from a loop around a model to an engine</text>']
    for n, (name, found) in enumerate(rungs.items()):
        y, wide = 34 + high * n, 170 * found["tokens per second"] / most
        first, *_ = cells(found)
        said = f"{first} tokens/s, first token after {found['TTFT p50']:.2g} s"
        said += f" (the first {score['looped']} requests)" * (name == "naive loop")
        shapes.append(
            f'<text x="102" y="{y + 15}" text-anchor="end">{escape(name)}</text><rect x="110" y="{y}" width="{wide:.0f}" '
            f'height="{high - 6}" fill="{COLOURS[RUNGS[name]]}"/><text x="{116 + wide:.0f}" y="{y + 15}">{said}</text>'
        )
    tall = 52 + high * len(rungs)
    shapes += [f'<text x="12" y="{tall + 16 * n}" font-size="12">{line}</text>' for n, line in enumerate(filter(None, lines))]
    tall += 16 * (sum(map(bool, lines)) - 1) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{tall}" viewBox="0 0 600 {tall}" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#33393f"><title>The same 64 requests on each rung</title>'
        f'<rect width="600" height="{tall}" fill="#fbfaf7"/>{"".join(shapes)}</svg>\n'
    )


LINES = re.compile(r"rungs\((.+)\)$")  # a chapter's cell


def lines_of(cell: dict[str, Any]) -> str | None:
    """What a chapter's cell prints, if it is about rungs."""
    found = LINES.search("".join(cell["source"])) if cell["cell_type"] == "code" else None
    return as_lines(*re.findall(r'"([^"]+)"', found[1])) + "\n" if found else None


def write_pages() -> None:
    """README's figure, and the chapters' lines."""
    FIGURE.write_text(as_svg(read()))
    for path in chapters():
        page = json.loads(path.read_text())
        reported = [(cell, text) for cell in page["cells"] if (text := lines_of(cell))]
        for cell, text in reported:
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]
        if reported:
            path.write_text(json.dumps(page, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
