"""Tools and response formats: the form that a client asks for, and the calls that an answer makes (chapter 81)."""

from __future__ import annotations

import json
import re
import uuid
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..checkpoint import JsonObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # Qwen's and Hermes' format
HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class Strict(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A part of a request, in which every field is known."""


class JsonSchema(Strict, frozen=True):
    """A schema by name. `strict` changes nothing: an answer always has the form."""

    name: str
    schema: JsonObject = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict, frozen=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema', and only with it")


class Function(Strict, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject = {}
    strict: bool | None = None


class Tool(Strict, frozen=True):
    """A tool: a function."""

    function: Function
    type: Literal["function"] = "function"

    def as_json(self) -> JsonObject:
        """As templates read it."""
        return {"type": "function", "function": msgspec.to_builtins(self.function)}

    @property
    def schema(self) -> JsonObject:
        """The schema of its arguments."""
        return {"type": "object"} | self.function.parameters


class FunctionName(Strict, frozen=True):
    """The name of a function."""

    name: str


class NamedTool(Strict, frozen=True):
    """The tool that the model has to call."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(Strict, frozen=True):
    """A call in an earlier message. `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Strict, frozen=True):
    """A call in an earlier message, which a message of the role "tool" answers."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"

    def as_json(self) -> JsonObject:
        """As templates read it: with arguments as an object, if they are one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def calls_grammar(tools: list[Tool], spaces: str) -> str:
    """The grammar of a call of one of `tools`: its name, and arguments that have its schema."""
    rules = []
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        schema = tool.schema | {"x-guidance": {"whitespace_pattern": spaces}}
        rules.append(f'call_{i}: {head} json_{i} "}}"\njson_{i}: %json {json.dumps(schema)}')
    start = " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([f"start: {start}", *rules])


def new_call(index: int, name: str, arguments: str) -> JsonObject:
    """The first delta of a call."""
    call: JsonObject = {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
    return {"tool_calls": [call | {"function": {"name": name, "arguments": arguments}}]}


def more_arguments(text: str) -> JsonObject:
    """A later delta of the only call."""
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


class PlainReader:
    """Reads an answer without calls. `read` turns new text into deltas."""

    num_calls = 0
    is_call_reason = False  # whether "tool_calls" becomes the reason of its end

    def read(self, text: str, reason: str | None) -> list[JsonObject]:
        """The deltas of new text; `reason` is set with the last one."""
        return [{"content": text}] if text else []


class NamedReader(PlainReader):
    """Reads the arguments of a function whose name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, text: str, reason: str | None) -> list[JsonObject]:
        if self.num_calls == 0:
            self.num_calls = 1
            return [new_call(0, self.name, text)]
        return [more_arguments(text)] if text else []


class RequiredReader(PlainReader):
    """Reads a call of `calls_grammar`: the name, and then the arguments without the last brace."""

    is_call_reason = True

    def __init__(self) -> None:
        self.held = ""  # text that is not shown yet
        self.arguments = ""  # those that are

    def read(self, text: str, reason: str | None) -> list[JsonObject]:
        self.held += text
        found: list[JsonObject] = []
        head = None if self.num_calls else HEAD.match(self.held)
        if head:
            self.num_calls = 1
            self.held = self.held[head.end() :]
            found.append(new_call(0, json.loads(head[1]), ""))
        if not self.num_calls:  # cut off before the name's end
            return [{"content": self.held}] if reason and self.held else []
        keep = reason is None or (reason == "stop" and self._is_whole())  # the last brace is not an argument
        self.is_call_reason = bool(keep)  # a call that a stop string cut off is none
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        self.arguments += shown
        return [*found, more_arguments(shown)] if shown else found

    def _is_whole(self) -> bool:
        """Whether the text is arguments and a brace: a stop string may have cut it off."""
        try:
            json.loads((self.arguments + self.held)[:-1])
        except (ValueError, RecursionError):
            return False
        return self.held.endswith("}")


class AutoReader(PlainReader):
    """Reads text in which calls may occur, each as JSON between two tags."""

    is_call_reason = True

    def __init__(self) -> None:
        self.held = ""  # text that may belong to a call

    def _call(self, body: str) -> JsonObject:
        """The delta of what stood between two tags: a call, or text if it is none."""
        try:
            name, arguments = (json.loads(body)[key] for key in ("name", "arguments"))
            good = isinstance(name, str) and isinstance(arguments, dict)
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            return {"content": f"{OPEN}{body}{CLOSE}"}
        self.num_calls += 1
        return new_call(self.num_calls - 1, name, json.dumps(arguments, ensure_ascii=False))

    def read(self, text: str, reason: str | None) -> list[JsonObject]:
        self.held += text
        found: list[JsonObject] = []
        while (start := self.held.find(OPEN)) >= 0:
            end = self.held.find(CLOSE, start)
            if end < 0:
                break
            if before := self.held[:start].strip() and self.held[:start]:
                found.append({"content": before})
            found.append(self._call(self.held[start + len(OPEN) : end]))
            self.held = self.held[end + len(CLOSE) :]
        size = len(self.held) if reason else self._num_certain()
        shown, self.held = self.held[:size], self.held[size:]
        if shown and (shown.strip() or not self.num_calls):  # spaces between calls are dropped
            found.append({"content": shown})
        return found

    def _num_certain(self) -> int:
        """How many characters cannot belong to a call."""
        if (start := self.held.find(OPEN)) >= 0:
            return start
        return next((i for i in range(len(self.held)) if OPEN.startswith(self.held[i:]) or not self.held[i:].strip()),
                    len(self.held))  # fmt: skip


def make_reader(tools: list[Tool], choice: ToolChoice) -> PlainReader:
    """The reader of an answer to a request with these tools."""
    if isinstance(choice, NamedTool):
        return NamedReader(choice.function.name)
    if not tools or choice == "none":
        return PlainReader()
    return RequiredReader() if choice == "required" else AutoReader()


def join_deltas(deltas: list[JsonObject]) -> JsonObject:
    """The deltas of a whole answer as one message's fields: its content, and its calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: list[JsonObject] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}
