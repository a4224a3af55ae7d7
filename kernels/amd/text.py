"""The assembly as Triton writes it: instructions with their lines of Python, labels, directives, arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .machine import TARGETS, Target
from .memory import Fault


class Unknown(Exception):
    """This machine has no such instruction, or not in this form."""


@dataclass
class Instruction:
    """`v_add_f32_dpp v2, v2, v2 row_shr:8`: name, operands, modifiers {"row_shr": 8}."""

    text: str
    target: Target
    name: str = ""
    operands: list[str] = field(default_factory=list)
    modifiers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, _, rest = self.text.partition(" ")
        pieces = [piece.strip() for piece in re.split(r",\s*(?![^\[(]*[\])])", rest)] if rest.strip() else []
        words = re.findall(r"\w+:\[[^]]*\]|\w+\(\w+\)|\S+", pieces.pop()) if pieces else []
        while words and (len(words) > 1 or re.match(r"[a-z]\w+:", words[0])) and self.name != "s_waitcnt":
            key, _, value = words.pop().partition(":")
            numbers = [int(number, 0) for number in re.findall(r"-?\b(?:0x[0-9a-f]+|\d+)\b", value)]
            self.modifiers[key] = numbers if value[:1] == "[" else numbers[0] if numbers else value or True
        self.operands = [*pieces, *words]

    def take(self, modifier: str, default: Any = 0) -> Any:
        """The value of a modifier; what is never taken is not known."""
        return self.modifiers.pop(modifier, default)

    def halves(self, modifier: str, default: int) -> list[int]:
        """A modifier with a number for each of up to three sources."""
        return [*self.take(modifier, []), *[default] * 3][:3]


@dataclass
class Assembly:
    """One kernel's text, taken apart."""

    target: Target
    lines: list[tuple[str, str]]  # (instruction, file:line of Python)
    labels: dict[str, int]  # instruction that a label stands before
    directives: dict[str, int]  # of .amdhsa_: scratch, arguments, what s registers hold at the start
    arguments: list[tuple[int, int, str]]  # offset, size, kind


def between(text: str, start: str, end: str) -> str:
    """A Fault if the text ends early."""
    first = text.find(start)
    last = text.find(end, first + len(start))
    if first < 0 or last < 0:
        raise Fault(f"the assembly is not whole: no {(start if first < 0 else end).strip()}")
    return text[first + len(start) : last]


def read_assembly(text: str) -> Assembly:
    """Take a text apart. A Fault if it is not whole, or for another machine."""
    found = re.search(r'\.amdgcn_target "[^"]*-(gfx\w+)', text)
    if not found or found[1] not in TARGETS:
        raise Fault(f"target {found[1] if found else 'not named'}: known are {', '.join(TARGETS)}")
    name = between(text, "\t.amdhsa_kernel ", "\n").strip()
    settings = re.findall(r"\.amdhsa_(\w+) (\d+)", between(text, f".amdhsa_kernel {name}", ".end_amdhsa_kernel"))
    metadata = between(text, "amdhsa.kernels:", ".end_amdgpu_metadata").split(".group_segment_fixed_size")[0]
    fields = r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)"
    arguments = [(int(at), int(size), kind) for at, size, kind in re.findall(fields, metadata)]
    lines, labels = read_lines(between(text, f"\n{name}:", ".amdhsa_kernel"))
    return Assembly(TARGETS[found[1]], lines, labels, {key: int(n) for key, n in settings}, arguments)


def read_lines(body: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The instructions and labels of a function's body."""
    lines, labels, files, where = [], {}, {}, ""
    for raw in body.splitlines():
        line = raw.split(";")[0].split("//")[0].strip()
        if found := re.match(r'\.file\s+(\d+) (?:".*?" )?"(.*?)"', line):
            files[found[1]] = found[2].rsplit("/")[-1]
        elif found := re.match(r"\.loc\s+(\d+) (\d+)", line):
            where = f"{files.get(found[1])}:{found[2]}" if found[2] != "0" else where
        elif line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line.startswith(".section"):
            break
        elif line and not line.startswith("."):
            lines.append((re.sub(r"\s+", " ", line), where))
    return lines, labels
