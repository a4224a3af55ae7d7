"""Whether a GPU chooses the CPU's tokens: the built-in model, and SmolLM2-135M-Instruct where `make real` has made it.

Both run in float32: in bfloat16 two tokens of nearly equal probability may change places. Where the tokens of a request
differ, the first place is told, and how far apart the CPU found its two likeliest tokens there: a hair's breadth is
rounding, much more is an error.

Run: `python kernels/same_tokens.py OUT [--dry-run]`. It writes OUT/tokens.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {}, "no graphs": {"enforce_eager": True}, "overlapped": {"overlap": True},
}  # fmt: skip
FACTS = "Ada lives in Rome. Ben likes plums. Mia has a red cat."
BUILT_IN = ["Once upon a time", "12 + 7 =", f"{FACTS} What does Mia have?", "20 + 21 =", FACTS * 8]


def compare(wanted: Sequence[Any], found: Sequence[Any]) -> dict[str, Any]:
    """How many requests have equal tokens, and of those that have not, where they part."""
    partings = []
    for number, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if want.token_ids == got.token_ids:
            continue
        pairs = zip(want.token_ids, got.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(want.token_ids), len(got.token_ids)))
        parting: dict[str, Any] = {"request": number, "token": place}
        if want.logprobs and place < len(want.logprobs):
            first, second = sorted(want.logprobs[place].values(), reverse=True)[:2]
            parting["apart"] = first - second
        partings.append(parting)
    return {"requests": len(wanted), "equal": len(wanted) - len(partings), "partings": partings}


def models(dry: bool) -> list[str]:
    """The built-in model, and the real one if it is here; an interpreter would take long for it."""
    from real_weights import is_whole

    return ["built-in model", *["SmolLM2-135M-Instruct"] * (is_whole() and not dry)]


def requests_of(name: str, dry: bool) -> tuple[str, list[Any], list[dict[str, Any]]]:
    """(model, prompts, parameters): the built-in model's also with seeded sampling, the real one's greedy."""
    from real_prompts import prompts
    from real_weights import FOLDER

    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2 if dry else 32}
    if name == "built-in model":
        texts = BUILT_IN[1:2] if dry else BUILT_IN
        return "tiny", 2 * texts, [greedy] * len(texts) + [greedy | {"temperature": 0.8, "seed": 5}] * len(texts)
    from transformers import AutoTokenizer

    ids = [*prompts(AutoTokenizer.from_pretrained(FOLDER)).values()][::-3]  # a long one, too; the CPU needs its time
    return str(FOLDER), ids, [greedy] * len(ids)


def answers(model: str, prompts: list[Any], params: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The outputs of an engine of its own."""
    from atom_mini import LLM, SamplingParams

    with LLM(model, dtype="float32", num_kvcache_blocks=2000, max_num_seqs=32, **options) as llm:
        return llm.generate(prompts, [SamplingParams(**each) for each in params], use_tqdm=False)


def compare_model(bench: Any, name: str, results: dict[str, Any], save: Callable[[], None]) -> None:
    """All engines on the device beside one on the CPU, which also says how likely its tokens were."""
    model, prompts, params = requests_of(name, bench.dry)
    likely = [each | {"logprobs": 2} for each in params]
    wanted = answers(model, prompts, likely, device="cpu", attention="torch", compiled=False)
    kernels = {"attention": "triton", "compiled": False} if bench.dry else {}
    for kind, options in ENGINES.items():
        results[kind] = {}
        with bench.guarded(f"tokens of {name}, {kind}", results[kind]):
            results[kind] |= compare(wanted, answers(model, prompts, params, device=bench.device.type, **kernels, **options))
        print(f"{name}, {kind}: {results[kind]}", flush=True)
        save()


def main() -> int:
    """Compare both models; the exit code: 0, 1 if a token differs or an engine failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for tokens.json")
    parser.add_argument("--dry-run", action="store_true", help="few tokens, in Triton's interpreter, to test this program")
    args = parser.parse_args()
    import bench as program

    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
    elif (lack := program.missing()) is not None:
        print(f"kernels/same_tokens.py needs a CUDA or ROCm device and Triton: {lack}. --dry-run tests it without.")
        return 2
    import torch
    from timing import Bench, device_names

    if args.dry_run:
        torch.set_num_threads(1)
    bench = Bench(torch.device("cpu" if args.dry_run else "cuda"), args.dry_run)
    results: dict[str, dict[str, Any]] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    machine = device_names(bench)

    def save() -> None:
        file = {"machine": machine, "failures": bench.failures, "models": results}
        (args.out / "tokens.json").write_text(json.dumps(file, indent=1) + "\n")

    for name in models(bench.dry):
        results[name] = {}
        with bench.guarded(name, results[name]):
            compare_model(bench, name, results[name], save)
        save()
    engines = [found for model in results.values() for found in model.values() if isinstance(found, dict)]
    return 1 if bench.failures or any(found["partings"] for found in engines) else 0


if __name__ == "__main__":
    sys.exit(main())
