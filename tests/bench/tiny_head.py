"""What training-time test is worth for the built-in model's EAGLE head (chapter 91): short runs with and without it.

Both runs have the same seed and the same text. With `--ahead 1` the head reads the target's states only, with
`--ahead 3` it also learns to read its own. Nothing here is a time, so the machine may be busy. For 300 steps, a run
takes 10 to 20 minutes on a core.

Run: `python tests/bench/tiny_head.py [--steps N] [--json tests/bench/results/tiny_head.json]`
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from report import machine, write_json

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "nbs" / "_book"), str(Path(__file__).resolve().parent)]
from figures import stamp  # noqa: E402
from script import load  # noqa: E402

from atom_mini import LLM, SamplingParams  # noqa: E402

AHEAD = (1, 3)
DRAFTS = (1, 2, 3, 6)


def texts(model: Any, tok: Any, encode: Any) -> dict[str, list[list[int]]]:
    """Prompts that no head has seen: stories, and questions of two kinds."""
    rng = random.Random("never trained on")
    found = {"stories": [encode(model.story_doc(rng, False))[0][:20] for _ in range(32)]}
    asked = {"recall": [model.recall_doc(rng, 20, 1, model.KINDS, True) for _ in range(32)]}
    asked["sums"] = [model.sum_doc(rng, True, test=True) for _ in range(32)]
    return found | {kind: [tok.encode(model.prompt_and_answer(doc)[0]) for doc in docs] for kind, docs in asked.items()}


def drafted(docs: list[list[int]], num_drafts: int, folder: Path) -> float:
    """Tokens per step."""
    config = {"method": "eagle3", "num_speculative_tokens": num_drafts, "model": str(folder)}
    with LLM("tiny", speculative_config=config, device="cpu", num_kvcache_blocks=600) as llm:
        llm.generate(docs, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        return float(llm.engine_core.scheduler.spec_stats.tokens_per_step)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    head = load("91_tiny_head")
    model = load("90_tiny_model")
    tok = head.AutoTokenizer.from_pretrained(Path(str(head.files("atom_mini"))) / "tiny")
    docs, found = texts(model, tok, model.encoder(tok)), dict[str, Any]()
    for ahead in AHEAD:
        with TemporaryDirectory() as folder:
            log = head.train(Path(folder), steps=args.steps, ahead=ahead, own_tokens=100_000)
            tokens = {kind: {n: drafted(prompts, n, Path(folder)) for n in DRAFTS} for kind, prompts in docs.items()}
        found[str(ahead)] = {"steps": args.steps, "last": log[-1], "tokens": tokens}
        print(ahead, tokens, flush=True)
    write_json(args.json, stamp(machine()) | {"heads": found})


if __name__ == "__main__":
    main()
