"""OpenAI's requests as typed records, and the shapes of its answers and errors (chapter 81)."""

from __future__ import annotations

import codecs
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from ..checkpoint import JsonObject
from ..config import SamplingParams
from ..errors import NOT_HERE, shortened
from ..forms import Form
from ..llm import TemplateOptions, check_template_options
from ..text import Request as EngineRequest
from ..text import Tokenizer, decode
from .tools import NamedTool, PlainReader, ResponseFormat, Tool, ToolCall, ToolChoice
from .tools import calls_grammar, join_deltas, make_reader


class ApiError(Exception):
    """An error for a client: its HTTP status, its message, and the wrong field."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, shortened(message)
        self.param, self.code = param and shortened(param, 100), code

    def body(self) -> JsonObject:
        """The error in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        about = {"message": self.message, "type": kind}
        return {"error": about | {"param": self.param, "code": self.code}}


T = TypeVar("T", bound="ApiRequest")  # one kind of request
Stop = Annotated[str, Meta(max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=16)]  # each is searched for


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`include_usage`: the last chunk counts tokens. `continuous_usage_stats` (vLLM's): every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Offsets:
    """Counts at which character of an answer each of its tokens begins. The tokens of one character have its place."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.size: int | None = None  # characters so far; None before the first text

    def next(self, tokenizer: Tokenizer, id: int) -> int:
        """The place of the next token."""
        place = self.size or 0
        if decode(tokenizer, [id, id]):  # else a special token, which the text leaves out
            text = self.decoder.decode(token_bytes(tokenizer, id))
            if self.size is None and not decode(tokenizer, [id]).startswith(" "):
                text = text.removeprefix(" ")  # as some decoders do at the beginning
            self.size = place + len(text)
        return place


class ApiRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both endpoints."""

    model: str | None = None  # None: the model that is served
    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    stop: Stop | Stops = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # how many besides the chosen token's
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Stop], Meta(max_length=64)] = []
    structured_outputs: JsonObject | None = None  # vLLM's: fields of `StructuredOutputsParams`
    response_format: ResponseFormat = ResponseFormat("text")
    user: str = ""  # changes nothing, nor do the next two
    metadata: dict[str, str] = {}
    store: bool = False

    # of an answer: the prefix of its id, its type, the type of its chunks
    name: ClassVar[tuple[str, str, str]]

    @property
    def num_logprobs(self) -> int | None:
        """How many log probabilities besides the chosen token's; None for none at all."""
        if isinstance(self, ChatCompletionRequest):
            return (self.top_logprobs or 0) if self.logprobs else None
        return self.logprobs

    def params(self, choice: int = 0) -> SamplingParams:
        """The options of answer `choice`. ApiError names one that is wrong."""
        options = {f.name: getattr(self, f.name) for f in fields(SamplingParams)}
        options |= {"logprobs": self.num_logprobs, "n": 1, "structured_outputs": self.form()}
        if self.seed is not None:
            options["seed"] = self.seed + choice
        try:
            return SamplingParams(**options)
        except ValueError as error:
            wrong = first_wrong(options)
            field = wrong and self.field_of(wrong)
            text = re.sub(r": set SamplingParams\(\w+=\.\.\.\)$", "", str(error))  # a client has none
            raise ApiError(400, text.replace(f"{wrong}=", f"{field}="), field) from None

    def field_of(self, option: str) -> str:
        """The field that sets an option of `SamplingParams`."""
        return option

    def wanted_forms(self) -> dict[str, JsonObject]:
        """The forms that the request asks for, by the field that does: those of `StructuredOutputsParams`."""
        found: dict[str, JsonObject] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs
        if self.response_format.json_schema is not None:
            found["response_format"] = {"json": self.response_format.json_schema.schema}
        if self.response_format.type == "json_object":
            found["response_format"] = {"json_object": True}
        return found

    def form(self) -> Form | None:
        """The form of the answer, or None. ApiError if it is wrong, or if two fields ask for one."""
        wanted = self.wanted_forms()
        if len(wanted) > 1:
            wrong = f"{' and '.join(wanted)} ask for different forms: leave all but one out"
            raise ApiError(400, wrong, [*wanted][-1])
        for name, fields_of_form in wanted.items():
            from atom_mini.structured.params import StructuredOutputsParams

            try:
                return StructuredOutputsParams(**fields_of_form)
            except (ValueError, TypeError) as error:
                raise ApiError(400, f"{name}: {error}", name) from None
        return None

    def reader(self) -> PlainReader:
        """What finds calls in the text of an answer."""
        return PlainReader()

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: JsonObject | None = None,
        delta: JsonObject | None = None,
    ) -> JsonObject:
        """One answer, or a piece of it. `delta`: what a reader has made of its text."""
        content: JsonObject = {"text": text}
        if isinstance(self, ChatCompletionRequest) and self.stream:
            plain = {"content": text} if text else {}
            content = {"delta": plain if delta is None else delta}
        elif isinstance(self, ChatCompletionRequest):
            message = {"role": "assistant", "content": text, "refusal": None} | (delta or {})
            content = {"message": message | {"annotations": []}}
        ends = {"logprobs": logprobs, "finish_reason": reason}
        return {"index": index} | content | ends

    def head(self, model: str) -> JsonObject:
        """The fields that all chunks of an answer share."""
        short, whole, chunk = self.name
        return {
            "id": f"{short}-{uuid.uuid4().hex}", "object": chunk if self.stream else whole,
            "created": int(time.time()), "model": model,
        }  # fmt: skip

    def usage(self, requests: list[EngineRequest], new: int) -> JsonObject:
        """Token counts: of the prompts, each of which has `n` consecutive `requests`, and of `new` generated tokens."""
        seqs = [request.seq for request in requests[:: self.n]]
        prompt = sum(seq.num_prompt_tokens for seq in seqs)
        cached = sum(seq.num_cached_tokens for seq in seqs)
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def logprobs_json(
        self, found: list[dict[int, float]] | None, ids: list[int],
        tokenizer: Tokenizer | None, offsets: Offsets
    ) -> JsonObject | None:
        """Log probabilities `found` of the next tokens `ids` of an answer, whose places in
        its text `offsets` counts; None if the request did not ask for them."""
        most = self.num_logprobs
        if most is None:
            return None
        assert found is not None and tokenizer is not None
        rows = [token_logprobs(*pair, most, tokenizer) for pair in zip(found, ids, strict=True)]
        if isinstance(self, ChatCompletionRequest):
            return {"content": [first | {"top_logprobs": top} for first, *top in rows], "refusal": None}
        return {
            "tokens": [name_of(first) for first, *_ in rows],
            "token_logprobs": [first["logprob"] for first, *_ in rows],
            "top_logprobs": [by_name([*top, first]) for first, *top in rows],
            "text_offset": [offsets.next(tokenizer, id) for id in ids],
        }  # fmt: skip


class CompletionRequest(ApiRequest):
    """POST /v1/completions: one prompt or several, as text or as token ids."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]

    name = ("cmpl", "text_completion", "text_completion")


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation. The null fields come with answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None  # None: calls alone
    name: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None  # of a result: the call that it answers
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None

    def __post_init__(self) -> None:
        self.role = "system" if self.role == "developer" else self.role
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing, and there are no tool_calls: add it")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id goes with the role 'tool', and only with it")

    def as_json(self) -> JsonObject:
        """As templates read it."""
        calls = [call.as_json() for call in self.tool_calls or ()]
        more: JsonObject = {"tool_calls": calls} if calls else {}
        return {**msgspec.to_builtins(self), "content": self.content or "", **more}


class ChatCompletionRequest(ApiRequest, kw_only=True):
    """POST /v1/chat/completions: a conversation, whose next message is the answer."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: int | None = None  # the newer name of `max_tokens`
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateOptions = {}  # more variables for the template
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True  # changes nothing

    name = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs=true: set it", "top_logprobs")
        try:
            check_template_options(self.chat_template_kwargs)
        except ValueError as error:
            raise ApiError(400, str(error), "chat_template_kwargs") from None
        self._check_tools()

    def _check_tools(self) -> None:
        """ApiError for two tools of one name, and for a choice of a tool that is not there."""
        names = [tool.function.name for tool in self.tools]
        if len({*names}) < len(names):
            raise ApiError(400, f"tools has two functions of one name among {names}: rename one", "tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            wrong = f"tool_choice names {choice.function.name!r}, and tools has {names}"
            raise ApiError(400, f"{wrong}: name one of these", "tool_choice")
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice='required' needs tools: add one", "tool_choice")

    def wanted_forms(self) -> dict[str, JsonObject]:
        """Also the form of a call that the model has to make."""
        found, choice = super().wanted_forms(), self.tool_choice
        if isinstance(choice, NamedTool):
            (tool,) = (tool for tool in self.tools if tool.function.name == choice.function.name)
            found["tool_choice"] = {"json": tool.schema}
        elif choice == "required":
            from atom_mini.structured.params import SPACES, as_schema

            for tool in self.tools:
                check_tool(tool, as_schema)
            found["tool_choice"] = {"grammar": calls_grammar(self.tools, SPACES)}
        return found

    def field_of(self, option: str) -> str:
        if option == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "top_logprobs" if option == "logprobs" else option

    def reader(self) -> PlainReader:
        return make_reader(self.tools, self.tool_choice)

    def template_options(self) -> TemplateOptions:
        """The variables for the template, with the tools that the model may call."""
        tools = [tool.as_json() for tool in self.tools if self.tool_choice != "none"]
        return self.chat_template_kwargs | ({"tools": tools} if tools else {})


def check_tool(tool: Tool, check: Callable[[JsonObject], object]) -> None:
    """ApiError if the parameters of a tool are no JSON schema."""
    try:
        check(tool.schema)
    except ValueError as error:
        raise ApiError(400, f"tools: {tool.function.name}: {error}", "tools") from None


def read_answer(request: ApiRequest, text: str, reason: str | None) -> tuple[JsonObject, str | None]:
    """A whole answer: (the fields of its message, why it ended)."""
    reader = request.reader()
    return join_deltas(reader.read(text, reason)), end_reason(reader, reason)


def end_reason(reader: PlainReader, reason: str | None) -> str | None:
    """Why an answer ended, in OpenAI's words."""
    return "tool_calls" if reason == "stop" and reader.num_calls and reader.is_call_reason else reason


NEUTRAL: dict[str, list[object]] = {  # field -> its values that ask for nothing
    "tools": [[]], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True, False],  # of the older endpoint
    "functions": [[]], "function_call": ["none"],
    "modalities": [["text"]], "audio": [], "reasoning_effort": [],
    "best_of": [1], "suffix": [""], "echo": [False], "service_tier": ["auto"],
}  # fmt: skip
NEUTRAL |= {  # vLLM's defaults, which its clients send
    "detokenize": [True], "include_stop_str_in_output": [False],
    "length_penalty": [1], "logits_processors": [[]], "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True], "use_beam_search": [False],
}


def check_neutral(name: str, value: object) -> None:
    """ApiError unless `value`, of a field that is not served, asks for nothing."""
    if value not in NEUTRAL.get(name, []):
        why = NOT_HERE.get(name, "leave it out")
        wrong = f"{name}={value!r}"[:200]
        raise ApiError(400, f"{wrong} is not served here: {why}", name)


def read_field(name: str, value: object, kind: object) -> Any:
    """`value` as `kind`; ApiError if it is something else."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{name}: {error}", name) from None


def read_request(body: bytes, kind: type[T]) -> T:
    """The request in `body`. ApiError names the field that is wrong; RecursionError, or
    UnicodeDecodeError, for a body that no parser reads."""
    try:
        raw = msgspec.json.decode(body, type=JsonObject)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not a JSON object: {error}") from None
    types = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in raw.items():
        if name not in types and name not in NEUTRAL and name not in NOT_HERE:
            raise ApiError(400, f"{name} is not a field of this request: leave it out", name)
        if name not in types and value is not None:
            check_neutral(name, value)
    given = {n: v for n, v in raw.items() if n in types and v is not None}
    for name in types:
        if types[name].required and name not in given:
            raise ApiError(400, f"{name} is missing: add it", name)
    return kind(**{n: read_field(n, v, types[n].type) for n, v in given.items()})


def first_wrong(options: JsonObject) -> str | None:
    """The first option that makes `SamplingParams` refuse those up to it."""
    given: JsonObject = {}
    for name, value in options.items():
        given[name] = value
        try:
            SamplingParams(**given)
        except ValueError:
            return name
    return None


def named_field(message: str, request: ApiRequest) -> str | None:
    """The field of `request` with whose name `message` begins, if any."""
    word = re.split(r"\W", message, maxsplit=1)[0]
    return word if word in request.__struct_fields__ else None


@lru_cache(maxsize=8)
def added_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that were added to a vocabulary, by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {id: token.content for id, token in added.items()}


@lru_cache(maxsize=8)
def byte_letters(tokenizer: Tokenizer) -> dict[str, int]:
    """The byte for each letter of a byte-level vocabulary; empty for other kinds."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if "ByteLevel" not in repr(getattr(backend, "decoder", None)):
        return {}
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def token_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """The bytes of token `id`, which need not be whole characters."""
    token = tokenizer.convert_ids_to_tokens(id) or ""
    letters = byte_letters(tokenizer)
    if letters and id in added_texts(tokenizer):
        return token.encode()
    if letters.keys() >= set(token):
        return bytes(map(letters.__getitem__, token))
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    text = token.replace("▁", " ") if "▁" in token else tokenizer.decode([id])
    return text.encode()


def token_logprobs(row: dict[int, float], chosen: int, most: int, tokenizer: Tokenizer) -> list[JsonObject]:
    """The chosen token and the `most` likely ones of `row`, each with its text, its log probability, and its bytes."""
    best = sorted(row, key=row.__getitem__, reverse=True)[:most]
    found = [(id, tokenizer.decode([id])) for id in [chosen, *best]]
    return [{"token": text, "logprob": row[id], "bytes": [*token_bytes(tokenizer, id)]} for id, text in found]


def name_of(token: JsonObject) -> str:
    """The name of a token in a completion: its text, or its bytes if these are a part of a character."""
    try:
        bytes(token["bytes"]).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])
    return token["token"]


def by_name(tokens: list[JsonObject]) -> dict[str, float]:
    """The log probabilities of tokens, best first, by name; the first of each name."""
    found: dict[str, float] = {}
    for token in tokens:
        found.setdefault(name_of(token), token["logprob"])
    return found
