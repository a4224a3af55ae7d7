"""The gaps in running answers while prompts arrive: one engine, prefill first or with mixed steps, and two engines apart.

Four answers run. Then prompts of 256 tokens, all different, arrive at a fixed rate. A gap is the time between two tokens of
one of the four answers, as the caller sees them, from the first arrival until the last prompt has its first token. All
engines are in processes of their own, on the same cores: one engine has all threads, and of two engines each has half.
A prompt is one step with prefill first, and chunks of 64 tokens beside decodes in mixed steps. The engines serve the load in
turns, round by round. A figure is the median over the rounds. The price is measured, too: the same answers without prompts,
and prompts without answers.

Run on a quiet machine: `python tests/bench/apart.py --json tests/bench/results/apart.json`. It prints a table and writes
the figures with the machine's facts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from atom_mini.options.command_line import spin_less

spin_less(os.environ)  # as the command does, before torch is loaded

import torch  # noqa: E402
import transformers  # noqa: E402
from cpu import make_checkpoint  # noqa: E402
from figures import stamp  # noqa: E402
from report import OtherLoad, machine, print_table, write_json  # noqa: E402
from score import percentile  # noqa: E402

from atom_mini import LLM, SamplingParams  # noqa: E402

PLAIN: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 32, "max_model_len": 2048, "max_num_batched_tokens": 512,
    "num_kvcache_blocks": 1024, "engine_process": True,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "prefill first": {},
    "mixed steps": {"enable_mixed_steps": True, "max_num_batched_tokens": 64},
    "apart": {"kv_transfer_config": [{"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}]},
}
ANSWERS, PROMPT, VOCABULARY = 4, 256, 4000
LONG = SamplingParams(max_tokens=1900, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
TIMES = ("gap p50", "gap p99", "longest gap", "first token", "second token")
RATES = ("answers beside", "answers alone", "prompts alone")  # tokens per second
FIGURES = TIMES + RATES
Figures = dict[str, float]


def serve(llm: LLM, prompts: list[list[int]], period: float) -> Figures:
    """Serve the load; the figures, in seconds."""
    answers = {llm.add_request([7 + i] * 9, LONG): list[float]() for i in range(ANSWERS)}
    asked, came, begin = dict[int, float](), dict[int, list[float]](), 0.0
    while not begin or len(asked) < len(prompts) or not all(len(times) == 2 for times in came.values()):
        now = time.perf_counter()
        if not begin and all(len(times) > 9 for times in answers.values()):
            begin = now
        if begin and len(asked) < len(prompts) and now >= begin + period * len(asked):
            id = llm.add_request(prompts[len(asked)], SHORT)
            asked[id], came[id] = begin + period * len(asked), []
        step = llm.step()
        now = time.perf_counter()
        for id, new in step.output.token_ids.items() if step else ():
            (answers | came)[id].extend([now] * len(new))
    end = max(times[0] for times in came.values())
    for id in answers:
        llm.abort(id)
    gaps = [b - a for times in answers.values() for a, b in pairwise(times) if begin <= b <= end]
    assert gaps and all(len(times) < 1900 for times in answers.values()), "the answers are too short"
    return {
        "gap p50": percentile(gaps, 0.5), "gap p99": percentile(gaps, 0.99), "longest gap": max(gaps),
        "first token": statistics.median(times[0] - asked[id] for id, times in came.items()),
        "second token": statistics.median(times[1] - times[0] for times in came.values()),
        "answers beside": len(gaps) / (end - begin),
    }  # fmt: skip


def alone(llm: LLM, prompts: list[list[int]]) -> Figures:
    """What the price is: tokens per second of the same answers without prompts, and of prompts without answers."""
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    outs = llm.generate([[7 + i] * 9 for i in range(ANSWERS)], params, use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, SHORT, use_tqdm=False)
    seconds = time.perf_counter() - start
    each = statistics.median(out.tpot for out in outs)
    return {"answers alone": ANSWERS / each, "prompts alone": PROMPT * len(prompts) / seconds}


def both(llm: LLM, prompts: list[list[int]], others: list[list[int]], period: float) -> Figures:
    return serve(llm, prompts, period) | alone(llm, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two arrivals")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rng, others, runs = random.Random(0), OtherLoad(), list[dict[str, Figures]]()

    def fresh(count: int) -> list[list[int]]:
        return [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_checkpoint(Path(folder))
        engines = {name: stack.enter_context(LLM(folder, **PLAIN | more)) for name, more in ENGINES.items()}
        for llm in engines.values():
            serve(llm, fresh(2), args.period)
        names = [*engines]
        for n in range(args.rounds):
            order = names[n % 3 :] + names[: n % 3]
            prompts, more = fresh(args.prompts), fresh(8)
            runs.append({name: both(engines[name], prompts, more, args.period) for name in order})
    middle = {name: {f: statistics.median(run[name][f] for run in runs) for f in FIGURES} for name in names}
    head = ["engine", *(f"{name}, ms" for name in TIMES), *(f"{name}, tokens/s" for name in RATES)]
    print_table(head, [[name, *(f"{v[f] * (1000 if f in TIMES else 1):.0f}" for f in FIGURES)] for name, v in middle.items()])
    result = stamp(machine()) | {"rounds": len(runs), "prompts": args.prompts, "period": args.period, "engines": middle}
    result |= {"answers": ANSWERS, "prompt": PROMPT, "other_load": others.share()}
    print(f"\nothers used {100 * (result['other_load'] or 0):.0f} % of the processors")
    write_json(args.json, result)


if __name__ == "__main__":
    main()
