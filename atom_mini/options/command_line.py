"""`atom-mini generate | chat | bench | trace | info`: the engine from a shell and for scripts (chapter 14)."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import atom_mini
from ..checkpoint import JsonObject
from ..config import SamplingParams
from ..errors import require
from ..llm import Chat, chat_tokenizer
from .args import EngineArgs
from .build import LLM, choose_scheduler
from .help import add_fields, given
from ..text import RequestOutput
from ..trace.trace import Metrics, Trace


Figures = dict[str, Any]  # name -> a number, or a list of numbers


def answers_in(outs: list[RequestOutput]) -> list[RequestOutput]:
    """All answers in the results `outs`. With `n` above 1, a result has several."""
    return [answer for out in outs for answer in out.outputs]


def draft_stats(llm: LLM) -> Any:
    """The counts of drafts (chapter 50's `SpecStats`); None without speculation."""
    return getattr(llm.engine_core.scheduler, "spec_stats", None)


def figures(llm: LLM, outs: list[RequestOutput]) -> Figures:
    """The engine's counts, seconds, and tokens/s, and the mean TTFT and TPOT of `outs`
    in milliseconds. With speculation, also the tokens per step and sequence, the share
    accepted at each place, and how many steps accepted 0, 1, 2, ... drafts."""
    rates = ("prefill_tokens_per_second", "decode_tokens_per_second")
    report = asdict(llm.metrics) | {name: getattr(llm.metrics, name) for name in rates}
    answers = answers_in(outs)
    for name in ("ttft", "tpot") if answers else ():
        report[f"mean_{name}_ms"] = 1e3 * fmean(out[name] for out in answers)
    if stats := draft_stats(llm):
        accepted = range(max(stats.histogram, default=-1) + 1)
        report["tokens_per_step"] = stats.tokens_per_step
        report["accepted_by_place"] = stats.acceptance
        report["steps_by_accepted"] = [stats.histogram[n] for n in accepted]
    return report


SUMMARY = (
    "prefill {prefill_tokens_per_second:,.0f} tokens/s, decode {decode_tokens_per_second:,.0f} tokens/s, "
    "TTFT {mean_ttft_ms:,.1f} ms, TPOT {mean_tpot_ms:,.1f} ms"
)


def took(number: int, out: RequestOutput) -> str:
    """A line with the tokens and times of one answer."""
    count, cached = len(out.prompt_token_ids), out.num_cached_tokens
    prompt = f"{count} prompt tokens ({cached} cached)"
    times = f"TTFT {1e3 * out.ttft:,.1f} ms, TPOT {1e3 * out.tpot:,.1f} ms"
    return f"{number}: {prompt}, {len(out.token_ids)} new, {times}, {out.finish_reason}"


def print_report(report: Figures, as_json: bool = False) -> None:
    """Print a report as one JSON document, or as lines."""
    if as_json:
        return print(json.dumps(report))
    for name, value in report.items():
        values = value if isinstance(value, list) else [value]
        words = (v if isinstance(v, str) else f"{round(v, 2):,}" for v in values)
        print(f"{name:31}", *words)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a timeline: JSON if the file's name ends with .json, else a page."""
    make = trace.to_json if path.name.endswith(".json") else trace.to_html
    path.write_text(make(), "utf-8")
    print(f"timeline: {path}", file=sys.stderr)


def show_texts(llm: LLM, prompts: list[str] | list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """Generate and print: one prompt piece by piece, several at the end."""
    if len(prompts) != 1 or params.n > 1:
        outs = llm.generate(prompts, params)
        print("\n\n".join(f"{out.prompt or ''}{out.text}" for out in answers_in(outs)))
        return outs
    pieces = llm.stream(prompts, params)  # raises before a bad prompt is printed
    if isinstance(prompts[0], str):  # not the token ids of a chat
        print(prompts[0], end="", flush=True)
    for piece in pieces:
        print(piece.text, end="\n" * piece.finished, flush=True)
    return [piece.output] if piece.output else []  # the last piece has the result


EXAMPLES = ["Once upon a time", "Mia has a red cat. What does Mia have?", "12 + 7 ="]


def prompts_of(typed: list[str]) -> list[str]:
    """The typed prompts. For "-", the lines of stdin. For none, the lines of a pipe, or else `EXAMPLES`."""
    if typed not in ([], ["-"]):
        return typed
    lines: list[str] = []
    if sys.stdin and (typed or not sys.stdin.isatty()):  # may be None
        with suppress(OSError):  # closed
            lines = [*filter(None, sys.stdin.read().splitlines())]
    return lines if typed else lines or EXAMPLES


def run_generate(args: argparse.Namespace) -> None:
    """Complete prompts, and print the texts."""
    prompts: list[str] | list[list[int]] = prompts_of(args.prompts)
    if args.trace:
        args.output.open("a").close()  # a bad path fails now, not after the run
    complete = LLM.generate if args.json else show_texts
    with LLM(**given(args, EngineArgs)) as llm:
        if args.chat:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = [*map(llm.format_chat, chats)]
        outs = complete(llm, prompts, args.params)
        if args.json:
            print(json.dumps([asdict(out) for out in outs]))
        answers = answers_in(outs)
        for number, out in enumerate(answers, 1) if len(answers) > 1 else ():
            print(took(number, out), file=sys.stderr)
        if outs:
            print(SUMMARY.format(**figures(llm, outs)), file=sys.stderr)
        if llm.trace is not None:
            save_trace(llm.trace, args.output)


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Figures:
    """Generate, and return the `figures` of this run alone."""
    llm.generate([0], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    llm.metrics = Metrics()
    if stats := draft_stats(llm):
        scheduler: Any = llm.engine_core.scheduler
        scheduler.spec_stats = type(stats)()
    outs = llm.generate(prompts, params)
    answers = answers_in(outs)  # each is a request of the engine
    return {"requests": len(answers), "seconds": max(a.latency for a in answers)} | figures(llm, outs)


def run_bench(args: argparse.Namespace) -> None:
    """Measure the engine on random prompts of 1 to --input-len tokens."""
    count, longest = args.num_requests, args.input_len
    if count < 1 or longest < 1:
        raise ValueError(f"num_requests={count}, input_len={longest}: both must be at least 1")
    with LLM(**given(args, EngineArgs)) as llm:
        rng = random.Random(args.params.seed or 0)
        ids = range(llm.config.spec.vocab_size)
        prompts = [rng.choices(ids, k=rng.randint(1, longest)) for _ in range(count)]
        report = measure(llm, prompts, replace(args.params, ignore_eos=True))
    print_report({"model": args.model} | report, args.json)


def run_info(args: argparse.Namespace) -> None:
    """Show what memory a checkpoint needs and what fits, without loading it."""
    from atom_mini.options.info import describe  # imports torch

    config = EngineArgs(**given(args, EngineArgs))
    choose_scheduler(config)  # raises ValueError for a wrong `scheduler_cls`
    print_report(describe(config), args.json)


def print_answer(
    llm: LLM, messages: Chat, params: SamplingParams,
    outs: list[RequestOutput] | None = None,
) -> dict[str, str]:
    """Print and return the next message. Ctrl-C ends it and keeps the text so far.
    Append the output of a finished answer to `outs`."""
    pieces = llm.stream(llm.format_chat(messages), params)
    text = ""
    try:
        for piece in pieces:
            print(piece.text, end="", flush=True)
            text += piece.text
        if piece.output and outs is not None:
            outs.append(piece.output)
        is_cut = piece.finish_reason == "length"
        print(" [cut by max_tokens or max_model_len]" if is_cut else "")
    except KeyboardInterrupt:
        print(" [stopped]")
    return {"role": "assistant", "content": text}


CHAT_HELP = """/help          show this list
/reset         forget the conversation
/stats         tokens and times of each answer, and of the engine
/trace [FILE]  write a timeline (after a start with --trace)
/exit          leave, like Ctrl-D (Ctrl-C stops an answer)"""


def respond(llm: LLM, messages: Chat, line: str, params: SamplingParams, outs: list[RequestOutput]) -> None:
    """Run the command `line`, or append it and its answer to `messages`, and the
    output to `outs`. Raises ValueError for an unknown command."""
    match line.split():
        case ["/help"]:
            print(CHAT_HELP)
        case ["/reset"]:
            messages.clear()
        case ["/stats"]:
            for number, out in enumerate(outs, 1):
                print(took(number, out))
            print_report({"messages": len(messages)} | figures(llm, []))
        case ["/trace", *file]:
            if llm.trace is None:
                raise ValueError("there is no trace; start with --trace")
            save_trace(llm.trace, Path(" ".join(file) or "trace.html"))
        case [word, *_]:
            require(word[0] != "/", f"{word} is not a command; /help lists them")
            question = {"role": "user", "content": line}
            messages += [question, print_answer(llm, [*messages, question], params, outs)]


def run_chat(args: argparse.Namespace, read: Callable[[str], str] = input) -> None:
    """Chat with a model; /help lists the commands."""
    require(args.params.n == 1, f"n={args.params.n} must be 1 with chat; leave out --n")
    messages: Chat = []
    outs: list[RequestOutput] = []
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401 - `input` uses it
    with LLM(**given(args, EngineArgs)) as llm, suppress(EOFError):  # Ctrl-D
        chat_tokenizer(llm.tokenizer, llm.config.model)
        size = f"up to {llm.config.max_model_len:,} tokens of conversation"
        print(f"{llm.config.model}, {size}. Ask something; /help lists the commands.")
        while (line := read("> ").strip()) != "/exit":
            try:
                respond(llm, messages, line, args.params, outs)
            except (OSError, ValueError) as error:
                print(f"[{error}]")
    print()


SPINS = "10000"  # about 100 microseconds


def spin_less(environ: MutableMapping[str, str]) -> None:
    """Make waiting OpenMP threads sleep soon, unless `environ` says how they wait."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = SPINS


class Command(NamedTuple):
    """A command: its function, arguments, and options."""

    run: Callable[[argparse.Namespace], None]
    own: str = ""  # its own arguments, see `ARGUMENTS`
    about: str | None = None  # what --help says; None: its function's docstring
    options: tuple[Any, ...] = (SamplingParams, EngineArgs)  # dataclasses


COMMANDS = {
    "generate": Command(run_generate, "prompts --chat --output --json"),
    "chat": Command(run_chat),
    "bench": Command(run_bench, "--num-requests --input-len --json"),
    "trace": Command(
        run_generate, "prompts --chat --output --json",
        about="Complete prompts, record every step, and write the timeline as a page.",
    ),
    "info": Command(run_info, "model --json", options=(EngineArgs,)),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "prompts": {"nargs": "*", "default": [], "help": "- reads them from stdin"},
    "--chat": {"action": "store_true", "help": "ask each prompt as a user's message"},
    "--output": {"type": Path, "default": "trace.html",
                 "help": "file of the timeline: .html or .json"},
    "--num-requests": {"type": int, "default": 32, "help": "requests (default: 32)"},
    "--input-len": {"type": int, "default": 128, "help": "most tokens (default: 128)"},
    "--json": {"action": "store_true", "help": "print one JSON document only"},
    "--debug": {"action": "store_true", "help": "show an error's traceback"},
    "model": {"nargs": "?", "default": argparse.SUPPRESS, "help": "as --model"},
    "source": {"type": Path, "help": "file of requests, one per line"},
    "target": {"type": Path, "help": "file to append the answers to"},
}


def make_parser(chosen: str) -> argparse.ArgumentParser:
    """The parser of the command line, with the options of the command `chosen`."""
    more = "Without a command: generate. Options: atom-mini COMMAND --help"
    parser = argparse.ArgumentParser("atom-mini", epilog=more)
    parser.add_argument("--version", action="version", version=f"atom-mini {atom_mini.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = command.about or command.run.__doc__
        own = [*command.own.split(), "--debug"]
        words = " ".join(word for word in own if word[0] != "-")
        words = words.replace("prompts", "[prompts]")
        sub = commands.add_parser(
            name, help=about, description=about, allow_abbrev=False,
            usage=f"atom-mini {name} {words} [options]".replace("  ", " "),
        )  # fmt: skip
        sub.set_defaults(name=name, parser=sub, model="tiny", trace=name == "trace")
        if name == "chat":  # answers may be longer
            sub.set_defaults(max_tokens=512)
        for argument in own:
            sub.add_argument(argument, **ARGUMENTS[argument])
        for kind in command.options if name == chosen else ():
            add_fields(sub, kind)
    return parser


def command_of(arguments: list[str]) -> str:
    """The command in `arguments`; ValueError if it does not exist."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help", "--version") or first in COMMANDS:
        return first
    if re.fullmatch("[a-z][a-z_-]*", first):
        names = [*COMMANDS, "--help"]
        found = get_close_matches(first, names, n=1)
        hint = f"did you mean {found[0]}?" if found else f"use {', '.join(names)}."
        raise ValueError(f"{first!r} is not a command: {hint} For a prompt: atom-mini generate {first}")
    return "generate"


def check_order(arguments: list[str], prompts: list[str]) -> None:
    """Raise ValueError for options before a command, which would become a prompt."""
    late = [word for word in prompts if word in COMMANDS and arguments[0][:1] == "-"]
    if late:
        rest = [word for word in arguments if word != late[0]]
        first = shlex.join(["atom-mini", late[0], *rest])
        as_prompt = shlex.join(["atom-mini", "generate", *arguments])
        raise ValueError(f"options before {late[0]!r}: put the command first: {first} (as a prompt: {as_prompt})")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; the default command is `generate`. Raises ValueError for
    an unknown command, and for options that `SamplingParams` refuses."""
    name = command_of(arguments)
    words = arguments if name in arguments[:1] else [name, *arguments]
    parser = make_parser(name)
    args, unknown = parser.parse_known_args(words)
    if words is not arguments:
        check_order(arguments, args.prompts)
    if unknown:
        flags = re.findall(r"--[\w-]+", args.parser.format_help())
        found = get_close_matches(unknown[0], flags, n=1)
        hint = f" (did you mean {found[0]}?)" if found else ""
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    args.params = read_params(given(args, SamplingParams))
    return args


def read_object(name: str, text: str) -> JsonObject:
    """The JSON object of an option. ValueError if it is none."""
    wrong = f"{name}={text!r} must be a JSON object"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}: {error}") from None
    require(isinstance(value, dict), wrong)
    return value


def read_params(values: JsonObject) -> SamplingParams:
    """The options of a request, of which a bias and a form are JSON. ValueError for a wrong one."""
    if "logit_bias" in values:
        biases = read_object("logit_bias", values["logit_bias"])
        values["logit_bias"] = {int(id) if id.isdigit() else id: by for id, by in biases.items()}
    if "structured_outputs" in values:
        from atom_mini.structured.params import StructuredOutputsParams

        form = read_object("structured_outputs", values["structured_outputs"])
        values["structured_outputs"] = StructuredOutputsParams(**form)
    return SamplingParams(**values)


def as_flag(found: re.Match[str]) -> str:
    """`set --top-p`, for the `set SamplingParams(top_p=...)` of a message."""
    return f"set --{found[1].replace('_', '-')}"


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 success, 1 failure, 2 an impossible request, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "torch" not in sys.modules:  # which reads the variable once
        spin_less(os.environ)
    try:
        args = parse(arguments)
        COMMANDS[args.name].run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (`head`) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        if "--debug" in arguments:
            raise
        text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
        text = re.sub(r"\bset \w+\((\w+)=\.\.\.\)", as_flag, " ".join(text.split()))
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
