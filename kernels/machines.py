"""The facts of each GPU: recorded by `make kernels` and `make execute`, shown in README and, whole, on the site.

`kernels/results/targets.json` says for each target what the compiler made of the kernels and what their machine code
did when it was executed; and with which Triton, and of which kernels. A test fails once these have changed.
`python kernels/machines.py` prints the tables.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "kernels" / "results" / "targets.json"
MODULES = ("gpu/triton_attention", "gpu/triton_ops", "gpu/sampling_kernels", "gpu/tile_configs", "families/grouped",
           "families/latent_kernel", "gpu/fused")  # fmt: skip
HOST = ("TileConfig", "amd", "product_type", "FusedOps")  # what a launch's options depend on, beside kernels and tables
NEVER = "**never**"
Facts = dict[str, Any]


def is_compiled(node: ast.stmt) -> bool:
    """A Triton function, a table, or one of `HOST`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name in HOST or any("jit" in ast.unparse(d) for d in node.decorator_list)
    return isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" not in ast.unparse(node)


def source() -> str:
    """A digest of the kernels and how they are launched, without comments and docstrings."""
    nodes = [n for m in MODULES for n in ast.parse((ROOT / "atom_mini" / f"{m}.py").read_text()).body if is_compiled(n)]
    for inner in [inner for node in nodes for inner in ast.walk(node)]:
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:]
    return hashlib.sha256("\n".join(map(ast.unparse, nodes)).encode()).hexdigest()[:16]


def stamp() -> Facts:
    """Of what something was found, and with what."""
    import triton

    try:
        from triton.backends.amd.compiler import get_amd_codegen_revision as revision
    except ImportError:  # other versions of Triton do not tell
        return {"source": source(), "triton": triton.__version__}
    return {"source": source(), "triton": triton.__version__, "llvm": revision()[:12]}


def load() -> dict[str, Facts]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def record(target: str, what: str, facts: Facts) -> None:
    """Keep what was found; the date is that of the first time it was found so."""
    known, facts = load(), {**facts, **stamp()}
    before = known.setdefault(target, {}).get(what, {})
    is_known = {**before, "date": ""} == {**facts, "date": ""}
    known[target][what] = {**facts, "date": before["date"] if is_known else date.today().isoformat()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(known.items(), key=lambda item: order(item[0]))), indent=1) + "\n")


def order(target: str) -> tuple[bool, int, str]:
    """CDNA, RDNA, NVIDIA."""
    return not target.startswith("gfx"), len(target), target


class Run(NamedTuple):
    """A run of `make gpu`: the card's own name, the day, and in words what its block says."""

    card: str
    date: str
    result: str


def runs() -> list[Run]:
    """Of every block in kernels/results/*.txt and every record of `kernels/bench.py` there."""
    folder, found = RESULTS.parent, list[Run]()
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text()
        said = {name: (re.findall(rf"(?m)^{name} +(.+)$", text) or [""])[0] for name in ("card", "date")}
        failed = len(re.findall(r"(?m)^  (?:FAILED|DIFFERS|slot)", text))
        absent = len(re.findall(r"(?m)^[\w/ ]+ not measured \(", text))
        result = f"{failed} failed" + f", {absent} not measured" * bool(absent)
        found.append(Run(said["card"].split(", ")[0], said["date"][:10], result))
    for path in sorted(folder.glob("*.json")):
        machine = json.loads(path.read_text()).get("machine") if path != RESULTS else None
        if machine:
            found.append(Run(machine["device"], machine.get("date", "")[:10], f"figures: kernels/results/{path.name}"))
    return found


def is_card(cards: str, device: str) -> bool:
    """Whether a device is one of these: an RX 9070 is not an RX 9070 XT."""
    return bool(re.search(rf"\b({cards.replace(', ', '|')})\b(?! XT| GRE)", device))


def measured_on(cards: str) -> str:
    """The GPUs of a target that `make gpu` has been run on, by their own names."""
    return ", ".join(sorted({run.card for run in runs() if is_card(cards, run.card)})) or NEVER


def executed(facts: Facts) -> str:
    """How the machine code did."""
    if not facts:
        return "no"
    return "right" if facts["right"] == facts["cases"] else f"{facts['right']} of {facts['cases']} cases right"


def spills(kernels: dict[str, Facts]) -> str:
    names = sorted({name.split(", ")[-1] for name, kernel in kernels.items() if kernel["spills"]})
    return f"{', '.join(names)}: {max(k['spills'] for k in kernels.values())}" if names else "none"


def lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def summary() -> str:
    """README's table, a row a target."""
    known, rows = load(), []
    for target, facts in known.items():
        found, kernels = facts["compiled"], facts["compiled"]["kernels"].values()
        right = f"{found['launches']} kernels" + f", {found['faults']} with faults" * bool(found["faults"])
        most = f"{max(k['registers'] for k in kernels)}, {max(k['lds'] for k in kernels) / 1024:.0f} KiB"
        rows.append([f"`{target}`", found["cards"], right, executed(facts.get("executed", {})), spills(found["kernels"]), most,
                     ", ".join(found["refused"]) or "nothing", measured_on(found["cards"])])  # fmt: skip
    return lines(["target", "GPUs", "compiled", "executed, in NumPy", "spilled registers", "registers, LDS at most",
                  "refused", "run on such a GPU"], rows) + f"\n\n{made_with(known)}"  # fmt: skip


def made_with(known: dict[str, Facts]) -> str:
    """The compilers, with their dates."""
    facts = [found for target in known.values() for found in target.values()]
    tools = sorted({f"Triton {f['triton']}" + f" and its LLVM {f['llvm']}" * bool(f.get("llvm")) for f in facts})
    days = sorted({f["date"] for f in facts})
    return f"Made with {', '.join(tools)}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}; no ROCm was installed."


def cell(kernel: Facts | None) -> str:
    """Of one kernel on one target."""
    if kernel is None:
        return ""
    lds = f"{kernel['lds']} B" if 0 < kernel["lds"] < 1024 else f"{kernel['lds'] / 1024:.3g}"
    spilled = f", **{kernel['spills']} spilled**" * bool(kernel["spills"])
    return f"{kernel['registers']}, {lds}, {kernel['waves']:g}{spilled}"


def whole() -> str:
    """The site's tables: a row a kernel, a column a target; then why something is refused, and what was executed."""
    known = load()
    names = dict.fromkeys(name for facts in known.values() for name in facts["compiled"]["kernels"])
    rows = [[name, *[cell(facts["compiled"]["kernels"].get(name)) for facts in known.values()]] for name in names]
    runs = [[f"`{target}`", f"{run['right']} of {run['cases']}", f"{run['instructions']:,}", run["llvm"], run["date"]]
            for target, facts in known.items() if (run := facts.get("executed"))]  # fmt: skip
    heads = ["target", "cases right", "wave instructions", "LLVM", "date"]
    refusals = [[f"`{target}`", name, why] for target, facts in known.items()
                for name, why in facts["compiled"]["refused"].items()]  # fmt: skip
    tables = {"Kernel by kernel": lines(["", *[f"`{target}`" for target in known]], rows),
              "Refused": lines(["target", "", "because"], refusals), "Executed": lines(heads, runs)}  # fmt: skip
    return "\n\n".join([summary(), *[f"## {name}\n\n{table}" for name, table in tables.items()]])


if __name__ == "__main__":
    print(whole())
