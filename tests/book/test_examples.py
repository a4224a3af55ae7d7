"""What the site's pages and the README show as code runs as it stands there."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import book
import pytest
from places import chapters

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "bench" / "results" / "readme.json").read_text())
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text()]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:python -m atom_mini|atom-mini) .*$|`(?:python -m atom_mini|atom-mini) [^`|]*`", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_of_a_page_run(page: Path) -> None:
    """In order, in one namespace; they contain their own assertions."""
    namespace: dict[str, Any] = {}
    snippets = PYTHON.findall(page.read_text())
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, page.name, "exec"), namespace)


def test_readme_example_prints_what_the_readme_says() -> None:
    """The ten lines, in a process of their own."""
    readme = (ROOT / "README.md").read_text()
    example = next(s for s in PYTHON.findall(readme) if "from atom_mini import" in s)
    printed = re.search(r"```text\n(.*?)```", readme[readme.index(example) :], re.DOTALL)
    result = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True)
    assert printed is not None and result.stdout.split() == printed[1].split(), result.stderr


EXAMPLES = {
    "chat_stream": "20 + 21 = 41.",
    "offline_batch": "What does Ben like? Ben likes plums.",
    "own_model": "HalvedForCausalLM",
    "own_scheduler": "finished: '12 + 7 ='\nfinished: 'Mia has a red hen.'",
}


def test_all_examples_are_known() -> None:
    assert {path.stem for path in (ROOT / "docs" / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """From any folder, in a process of its own, as its first line says."""
    script = ROOT / "docs" / "examples" / f"{name}.py"
    assert f"python docs/examples/{name}.py" in script.read_text().splitlines()[0]
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and EXAMPLES[name] in done.stdout, done.stderr


def test_readme_commands_run() -> None:
    """Each call of the program that README and the pages beside it show; of those that serve until they are stopped, or
    need Ray, only their help."""
    commands = [c.strip("`") for c in COMMAND.findall(book.written())]
    assert commands
    for command in commands:
        words = re.sub(r"^(python -m atom_mini|atom-mini)", f"{sys.executable} -m atom_mini", command)
        words = re.sub(r"(?<=-m atom_mini)( (?:serve|fleet|batch)\b).*", r"\1 --help", words).replace(" COMMAND", "")
        result = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        assert result.returncode == 0, (command, result.stderr)


def assert_same_figures(page: str, recorded: dict[str, Any]) -> None:
    """Every number in the tables of the section *Figures*, and on which machine and day they were measured."""
    section = re.split(r"\n##? ", page.split("## Figures")[1])[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert len(tables) == len(recorded["tables"])
    for table, rows in zip(tables, recorded["tables"], strict=True):
        lines = [line for line in table.splitlines() if not re.fullmatch(r"[|\- ]+", line)]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert {name: values for name, *values in cells} == rows
    assert all(recorded[name] in section for name in ("stamp", "drafts", "busy", "real")) and recorded["commit"]
    assert recorded["machine"] in recorded["stamp"] and recorded["date"] in recorded["stamp"]


def test_readme_figures_are_the_recorded_ones() -> None:
    assert_same_figures(book.written(), RECORDED)


@pytest.mark.parametrize(("option", "said"), [
    ("compiled", "{:.1f} times as fast for one request, {:.1f} times for 8, and {:.1f} times for 32"),
    ("packed", "is {:.1f}, {:.1f} and {:.1f} times as fast"),
])  # fmt: skip
def test_what_readme_says_of_the_options_for_a_cpu_is_recorded(option: str, said: str) -> None:
    real = json.loads((ROOT / "tests" / "bench" / "results" / "real.json").read_text())
    found = [real[batch]["engines"] for batch in ("1 request", "8 requests", "32 requests")]
    rates = {way: [each[way]["tokens_per_second"] for each in found] for way in ("atom_mini", f"atom_mini, {option}")}
    gains = [fast / plain for plain, fast in zip(*rates.values(), strict=True)]
    assert said.format(*gains) in (ROOT / "README.md").read_text()
    generate = [each["transformers generate"]["tokens_per_second"] for each in found]
    assert all(ours > theirs for ours, theirs in zip(rates["atom_mini"], generate, strict=True))


def test_what_readme_says_of_overlap_on_a_cpu_is_recorded() -> None:
    score = json.loads((ROOT / "tests" / "bench" / "results" / "score_amd_epyc_2.json").read_text())
    compiled, overlapped = (score["rungs"][rung]["tokens per second"] for rung in ("compiled", "overlapped"))
    assert f"costs time: {overlapped:.0f} instead of {compiled:.0f} tokens/s" in (ROOT / "README.md").read_text()
    assert overlapped < compiled and score["rungs"]["graphs"] is None, "a GPU has run it: say so"


def test_what_the_page_of_figures_says_of_a_processor_without_avx512_is_recorded() -> None:
    results = ROOT / "tests" / "bench" / "results"
    real, other = (json.loads((results / f"{name}.json").read_text()) for name in ("real", "real_avx2"))
    loads = "1 request", "8 requests", "32 requests"

    def said(engine: str) -> str:
        return "{:.2g}, {:.2g}, and {:.2g}".format(*(other[load]["engines"][engine]["ratio_to_generate"] for load in loads))

    page = (ROOT / "docs" / "figures.md").read_text()
    packed, fast, int8 = (said(f"atom_mini, {kind}") for kind in ("packed", "compiled", "compiled, int8"))
    assert f"the default {said('atom_mini')}, packed {packed}, compiled {fast}, and compiled int8 {int8}" in page
    seconds = (other[loads[2]]["engines"][name]["seconds"] for name in ("transformers generate", "atom_mini"))
    rounds = sorted(theirs / ours for theirs, ours in zip(*seconds, strict=True))
    assert f"it is {rounds[0]:.2f} to {rounds[-1]:.2f} times as fast" in page and len(rounds) == 5
    assert f"measured on {other['date'][:10]} on 2 cores of an {other['cpu']} ({other['instructions']})" in page
    assert 0.4 < other[loads[0]]["gigabytes_per_second"] / real[loads[0]]["gigabytes_per_second"] < 0.6


def test_what_readme_says_of_drafts_holds_in_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """"For one request and for four, a lookup gains much on copies and 16 to 31 % on answers", of which 16 is noise, "with more,
    it gains beyond the noise only on 64 copies", and a head gains nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    table = {row: cells for row, cells in RECORDED["tables"][2].items() if row}
    found = {row: [float(cell.split(", ")[1].rstrip(" x")) for cell in cells] for row, cells in table.items()}
    results = json.loads((ROOT / "tests" / "bench" / "results" / "speculation.json").read_text())["results"]
    for row, task in (("lookup, a list that is copied", "copy"), ("lookup, questions about facts in the prompt", "recall")):
        ratios = [r["ratio"] for r in results if (r["task"], r["drafter"]) == (task, "lookup") and r["batch"] <= 4]
        assert len(ratios) == 2 and min(ratios) > (1.2 if task == "copy" else 1)
        if task == "recall":
            gains = "{:.0f} to {:.0f} % on answers".format(*(100 * ratio - 100 for ratio in ratios))
            assert gains in (ROOT / "docs" / "figures.md").read_text()
        assert found[row][:2] == [float(f"{ratio:.2g}") for ratio in ratios]  # the page has this record's
    assert max(found["EAGLE-3 head, stories"]) < 1
    gained = importlib.import_module("noise").faster(results, "lookup")
    assert {*gained} == {("copy", 1), ("copy", 4), ("copy", 64), ("recall", 4)}


def engines(names: list[str]) -> dict[str, Any]:
    """What tests/bench/cpu.py finds out of one workload, invented."""
    found = {"tokens_per_second": 123.4, "ratio_to_generate": 0.876, "share_of_limit": 0.456}
    return {"engines": {name: dict(found) for name in names}}


def test_make_figures_records_what_the_page_then_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files like those of the benchmarks, with other numbers: in the record and, cell by cell, in the page."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    figures = importlib.import_module("figures")
    monkeypatch.setattr(figures, "import_seconds", lambda: 0.25)
    stamp = {"date": "2031-05-06T07:08:09", "cpu": "Abacus", "threads": 3, "instructions": "beads", "python": "3.14.1",
             "torch": "9.9", "transformers": "8.8"}  # fmt: skip
    plain = ["transformers generate", "atom_mini, packed"]
    both = engines([*plain[:1], "transformers continuous batching", "atom_mini, compiled"])
    rows = [{"task": task, "drafter": drafter, "batch": n, "tokens per step": 4.44, "ratio": 0.75, "predicted": 0.9,
             "accepted": None}
            for task, drafter in figures.DRAFTS.values() for n in (1, 4, 16, 64)]  # fmt: skip
    sizes = [{"weights_bytes": n * 1e9, "seconds": 7.0, "largest_logit_difference": 3e-5, "anonymous_share": 1.1}
             for n in (2.4, 4.9)]  # fmt: skip
    host = {f"greedy, {n}": [0.31, 0.42, 0.53] for n in (256, 512)} | {"replayed, 256": [0.64]}
    experts = {str(n): [40.04, 42.0] for n in (1, 8, 32)}
    waits = {f"tiny, 1 request{kind}, {loops} loops": {"300000": [1.0, 1234.4, 9e4], "10000": [20.0 + loops]}
             for kind in ("", ", torch") for loops in (0, 2)}  # fmt: skip
    files = {"cpu": {"many": both, "one": both}, "host_step": host, "busy": waits, "full_size": dict(zip("ab", sizes, strict=True)),
             "speculation": {"results": rows},
             "families": {"experts": experts} | {f"{n} requests": engines(plain) for n in experts}}  # fmt: skip
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(stamp | found))
    new = figures.collect(tmp_path, RECORDED)
    page = figures.write_page(book.written(), RECORDED, new)
    assert_same_figures(page, new)
    reported = ["**123**", "0.88", "46 %", "0.3 to 0.5 / 0.3 to 0.5 ms", "3e-5 and 3e-5", "7 and 7 s, 1.10 x", "0.2 s",
            "0.64 ms", "4.4, 0.75 x", "40 (42)", "2031-05-06", "3 cores of an Abacus",
            "1,234 and 22 (alone 1,234 and 20), because",
            "lie between 0.75 and 0.75 x. One",
            "costs 25.0 % (mean of 4 cases, 25 %", "20 % off in the median, within 20 % in 20 of 20"]  # fmt: skip
    assert all(text in page for text in reported), [text for text in reported if text not in page]
    with pytest.raises(AssertionError):
        assert_same_figures(page, RECORDED)
    (tmp_path / "cpu.json").write_text(json.dumps(stamp | files["cpu"] | {"cpu": "another"}))
    with pytest.raises(ValueError, match="several machines"):
        figures.collect(tmp_path, RECORDED)


@pytest.fixture
def scorecard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes README's table and figure of the recorded scores."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    return importlib.import_module("scorecard")


def test_readme_scorecard_is_the_recorded_one(scorecard: Any) -> None:
    """Table and figure are made of the file; each rung that was not run says what it needs."""
    score, readme = scorecard.read(), book.written()
    table = scorecard.as_markdown(score)
    assert table in readme and scorecard.FIGURE.read_text() == scorecard.as_svg(score)
    assert f"]({scorecard.FIGURE.relative_to(ROOT)})" in readme.split("\n## ")[0]
    assert set(score["rungs"]) == set(scorecard.RUNGS) and score["commit"] and score["date"] in table
    assert set(score["built-in"]["rungs"]) == set(scorecard.RUNGS)
    for rung, needs in scorecard.RUNGS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| {rung} |"))
        assert (f"needs {needs}: not measured" in row) == (score["rungs"][rung] is None)
    changed = {**score, "rungs": score["rungs"] | {"paged": dict.fromkeys(score["rungs"]["paged"], 0.77)}}
    assert scorecard.as_markdown(changed) not in readme and scorecard.as_svg(changed) != scorecard.as_svg(score)
    assert all(f"{rate:,}" in readme for _, rate in scorecard.PUBLISHED.values())


def test_chapters_say_of_a_rung_what_the_file_says(scorecard: Any) -> None:
    """The cells are written by `make score`; each rung that was run is told of in a chapter."""
    reported = set[str]()
    for path in chapters():
        for cell in json.loads(path.read_text())["cells"]:
            if text := scorecard.lines_of(cell):
                (output,) = cell["outputs"]
                assert "".join(output["text"]) == text, path.name
                reported |= set(re.findall(r'"([^"]+)"', "".join(cell["source"])))
    assert reported == {rung for rung, found in scorecard.read()["rungs"].items() if found}


def test_chapters_say_of_a_benchmark_what_its_file_says(capsys: Any) -> None:
    """The cells that read a record print today what they have printed."""
    found = 0
    for path in chapters():
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if "from show import recorded\n" in source:
                exec(compile(source, path.name, "exec"), {})
                (output,) = cell["outputs"]
                assert "".join(output["text"]) == capsys.readouterr().out, path.name
                found += 1
    assert found


def test_what_a_rung_is_said_to_have_done(scorecard: Any) -> None:
    """Two requests whose times are known: rates, waits, who was in time, and the bytes of the steps."""
    score = importlib.import_module("score")
    about = score.Model("", 16.0, 1.0, 0.1, 50, weights=1000, token=7)
    load = [score.Request(0.0, [1] * 10, 3), score.Request(1.0, [1] * 20, 2)]
    times = [[0.5, 0.55, 0.6], [3.0, 3.05]]  # the second waits 2 s for its first token
    found = score.figures(about, load, times, bandwidth=1e9)
    assert found["tokens per second"] == pytest.approx(5 / 3.05) and found["goodput"] == pytest.approx(1 / 3.05)
    assert (found["TTFT p50"], found["TTFT p99"]) == pytest.approx((2.0, 2.0)) and found["ITL p99"] == pytest.approx(0.05)
    read = 5 * 1000 + 7 * (10 + 11 + 12 + 20 + 21)
    assert found["share of bandwidth"] == pytest.approx(read / 3.05 / 1e9)
    assert score.figures(about, load, times, 0.0)["share of bandwidth"] is None
    together = [[0.5, 0.5, 0.6], [3.0, 3.0]]  # drafts: two tokens of one step
    assert score.bytes_read(about, load, together, True) == 3 * 1000 + 7 * (11 + 12 + 21)
    with pytest.raises(AssertionError, match="asked for"):
        score.figures(about, load, [times[0], times[1][:1]], 1e9)
    assert score.make_load(about) == score.make_load(about) and len(score.make_load(about)) == 64
    ours = {rung for rung, needs in scorecard.RUNGS.items() if not needs} - {"small"}
    assert all(score.options_of(rung) for rung in ours)


@pytest.mark.slow
def test_readme_says_how_long_the_package_is() -> None:
    """In the table beside the others, as it was when the page was made: within a fiftieth. If not: run index.ipynb."""
    measure = importlib.import_module("measure")
    said = re.findall(r"\| about ([\d,]+) \| a run on any GPU", book.written())
    lines = sum(measure.weights()[1].values())
    assert len(said) == 1 and abs(int(said[0].replace(",", "")) - lines) < 0.02 * lines, (said, lines)


def test_readme_counts_what_is_there(scorecard: Any) -> None:
    """Numbers in its sentences that something else says, too."""
    readme, score, cpu = book.written(), importlib.import_module("score"), importlib.import_module("cpu")
    shape = {f"num_{kind}_heads": cpu.SHAPE[f"num_{kind}_heads"] for kind in ("attention", "key_value")} | cpu.SHAPE
    load = score.make_load(score.Model("", 48.0, 1.0, 0.1, shape["vocab_size"], 0, 0))
    lengths, wanted = [len(r.prompt) for r in load], [r.output for r in load]
    assert min(lengths) >= 24 and max(lengths) <= 96 and min(wanted) >= 12 and max(wanted) <= 36
    alike = sum(r.prompt[:48] == load[1].prompt[:48] for r in load)
    assert alike == len(load) / 2
    assert f"{len(load)} requests that come at random times (Poisson), prompts of 24 to 96 tokens of which half" in readme
    rungs = [name for name, needs in scorecard.RUNGS.items() if needs == "transformers"]
    assert len(rungs) == 2 and "The first two rungs are transformers, and *small* is" in readme
    rates = {name: found and found["tokens per second"] for name, found in scorecard.read()["rungs"].items()}
    tiny = {name: found and found["tokens per second"] for name, found in scorecard.read()["built-in"]["rungs"].items()}
    assert rates["small"] < rates["chunked"] and tiny["small"] > tiny["chunked"], "fewer of the larger model, more of the other"
    assert rates["overlapped"] < rates["compiled"] and rates["ranks"] < rates["chunked"], "on two cores they cost"
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert python and f"You need Python {python[1]} or newer" in readme
    torch = re.search(r"(?m)^TORCH +\?= (.+)$", makefile)
    assert torch and f"the default is `{torch[1]}`" in readme
    numbers = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    documents = {line.split("\t")[0] for line in (ROOT / "tests" / "data" / "documents.tsv").read_text().splitlines()[1:]}
    absent = re.findall(r"(?m)^## (?!And)", (ROOT / "docs" / "absent.md").read_text())
    assert f"[{numbers[len(documents)]} documents]" in readme and f"[{numbers[len(absent)]} more things]" in readme
    planted = (ROOT / "tests" / "kernels" / "test_amd.py").read_text().split("def test_all_planted_errors")[1]
    noticed = re.findall(r"\((\d+) %\)", planted)
    said = "{} % of the sampled barriers, {} % of the waits and {} % of the vector instructions".format(*noticed)
    assert said in readme


MAKEFILE = (ROOT / "Makefile").read_text()
CPU_WHEELS = re.findall(r"(?m)^CPU_WHEELS := (.+)$", MAKEFILE)[0]
NO_GPU = pytest.mark.skipif(bool(shutil.which("nvidia-smi")) or Path("/dev/kfd").exists(), reason="there is a GPU")
STAMP = "--eval=.DEFAULT_GOAL = $(TORCH_STAMP)"
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin; sed s/3,9,1/3,12,1/ "$0" > .venv/bin/python; chmod +x .venv/bin/python ;;
*"-m pip"*) echo "$*" >> pip.log ;;
*) exec {python} -c "import sys; sys.version_info = ({version}); $2" ;;
esac
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an index of wheels, as far as `make` looks at it."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "torch").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def install(folder: Path, *variables: str, version: str = "3,12,1") -> subprocess.CompletedProcess[str]:
    """`make` installs torch with a Python that only notes what pip is asked for, in `pip.log`."""
    python = folder / "python"
    python.write_text(FAKE_PYTHON.format(python=sys.executable, version=version))
    python.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", f"PYTHON={python}", STAMP, *variables]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's torch has no CUDA")
@pytest.mark.parametrize("case", [pytest.param("no GPU", marks=NO_GPU), "GPU", "own torch", "no answer"])
def test_without_a_gpu_torch_comes_from_the_index_of_cpu_wheels(case: str, wheels: str, tmp_path: Path) -> None:
    """Not for a GPU, not for a torch that was asked for, and not if the index does not answer."""
    if case == "GPU":
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    index = "http://127.0.0.1:9" if case == "no answer" else wheels
    made = install(tmp_path, f"CPU_WHEELS={index}", *["TORCH=torch==2.12"] * (case == "own torch"))
    assert made.returncode == 0, made.stderr
    (asked,) = (tmp_path / "pip.log").read_text().splitlines()
    assert (f"--extra-index-url {wheels}" in asked) == (case == "no GPU") == ("about 1.4 GB" in made.stderr)
    assert asked.endswith("torch==2.12" if case == "own torch" else " torch==2.13.0")


def test_a_python_that_is_too_old_is_refused_and_its_venv_made_again(tmp_path: Path) -> None:
    """In one line, before anything is installed; a venv that has such a Python does not stay."""
    made = install(tmp_path, version="3,9,1")
    assert made.returncode and "atom_mini needs Python 3.10 or newer" in made.stderr and not (tmp_path / ".venv").exists()
    left = tmp_path / ".venv" / "bin" / "python"
    left.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "python", left)
    made = install(tmp_path)
    assert made.returncode == 0 and "3,12,1" in left.read_text() and (tmp_path / "pip.log").exists()


def test_the_index_of_cpu_wheels_brings_no_cuda() -> None:
    """What pip would install, where that index can be asked."""
    try:
        urlopen(f"{CPU_WHEELS}/torch/", timeout=5).close()
    except OSError as error:
        pytest.skip(f"{CPU_WHEELS} does not answer: {error}")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--extra-index-url", CPU_WHEELS]
    result = subprocess.run([*command, "torch==2.13.0"], capture_output=True, text=True, check=True)
    assert "torch-2.13.0+cpu" in result.stdout and "nvidia" not in result.stdout


def test_the_wheel_holds_the_chapters_modules_and_the_built_in_model(tmp_path: Path) -> None:
    """Every module of a chapter and nothing else that is code: no index of nbdev's, nothing of the appendix."""
    skipped = shutil.ignore_patterns("__pycache__", "_modidx.py")
    shutil.copytree(ROOT / "atom_mini", tmp_path / "atom_mini", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("atom_mini/")}
    chapters = set().union(*({book.module_of(path), *book.continued(path)} for path in book.notebooks([]))) - {None}
    modules = {f"atom_mini/{str(module).replace('.', '/')}.py" for module in chapters}
    paths = {p for p in (ROOT / "atom_mini").rglob("*.py") if "AUTOGENERATED" not in p.read_text()}
    by_hand = {path.relative_to(ROOT).as_posix() for path in paths}
    by_hand |= {f"{name.rpartition('/')[0]}/__init__.py" for name in modules}
    assert {n for n in names if n.endswith(".py")} == modules | by_hand
    assert not [n for n in names if "tiny" in n and n.endswith(".py")]
    tiny = {path.relative_to(ROOT).as_posix() for path in (ROOT / "atom_mini" / "tiny").rglob("*") if path.is_file()}
    pages = {"atom_mini/trace/timeline.html", "atom_mini/serving/page.html"}
    editable = "from setuptools import build_meta; build_meta.build_editable('editable')"
    subprocess.run([sys.executable, "-c", editable], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "editable").glob("*.whl")
    hooks = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    assert not hooks, "editors and type checkers read a path, but no import hook"
    assert names - modules - by_hand == tiny | pages | {"atom_mini/py.typed"} and len(tiny) > 8
