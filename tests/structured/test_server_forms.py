"""Response formats, biases, and tools over HTTP: as OpenAI's own client sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from atom_mini.serving.protocol import end_reason
from atom_mini.serving.tools import AutoReader, NamedReader, RequiredReader, join_deltas

pytest.importorskip("llguidance")
pytest.importorskip("starlette")
from test_server import CHAT, TALK, TEXT, Served, X, complain, events, serving

DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": DAYS}, "required": ["city", "days"],
        "additionalProperties": False}  # fmt: skip
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def chat(served: Served, **more: Any) -> Any:
    response = served.post(TALK, CHAT | {"max_tokens": 80, "temperature": 0} | more)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(served: Served, **more: Any) -> tuple[dict[str, Any], str]:
    """(the joined deltas, the reason of the end) of a stream."""
    found = served.events(TALK, CHAT | {"max_tokens": 80, "temperature": 0} | more)
    choices = [event["choices"][0] for event in found]
    return join_deltas([choice["delta"] for choice in choices]), choices[-1]["finish_reason"]


def test_a_response_format_is_kept(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    assert json.loads(chat(served, response_format=schema)["message"]["content"])["city"] in ("Oslo", "Lima")
    message, reason = streamed(served, response_format=schema)
    assert set(json.loads(message["content"])) == {"city", "days"} and reason == "stop"
    whole = chat(served, response_format={"type": "json_object"}, max_tokens=200, temperature=1, seed=1)
    assert whole["finish_reason"] == "length" or isinstance(json.loads(whole["message"]["content"]), dict)
    assert "content" in chat(served, response_format={"type": "text"}, max_tokens=2)["message"]
    text = served.post(TEXT, X | {"structured_outputs": {"choice": ["no", "yes"]}, "n": 2, "seed": 1}).json()
    assert {choice["text"] for choice in text["choices"]} <= {"no", "yes"}


def test_biases_and_words(served: Served) -> None:
    """JSON's names are strings, so a bias has its token's id as one."""
    body = X | {"max_tokens": 3, "temperature": 0}
    free = served.post(TEXT, body | {"logprobs": 0}).json()["choices"][0]
    forced = served.post(TEXT, body | {"logit_bias": {"50": 100}}).json()["choices"][0]
    assert forced["text"] != free["text"]
    only = served.post(TEXT, body | {"allowed_token_ids": [50]}).json()["choices"][0]
    assert only["text"] == forced["text"]
    assert served.post(TEXT, body | {"bad_words": [free["text"].strip() or "x"]}).status_code == 200
    complain(served.post(TEXT, body | {"logit_bias": {"50": 101}}), 400, "logit_bias")
    complain(served.post(TEXT, body | {"logit_bias": {"x": 1}}), 400, "logit_bias")
    complain(served.post(TEXT, body | {"logit_bias": {"99999": 1}}), 400, "logit_bias")


def test_options_that_leave_no_token_are_the_clients_error(served: Served) -> None:
    """Where no answer can begin, and where one cannot go on; the server answers others as before."""
    complain(served.post(TEXT, X | {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]}), 400, "allowed_token_ids")
    for more in ({"allowed_token_ids": [19]}, {"bad_words": ["x"]}):
        failed = served.post(TEXT, X | {"structured_outputs": {"regex": "1x"}} | more)
        assert failed.status_code == 400 and "no token is left" in failed.json()["error"]["message"], failed.text
    assert served.post(TEXT, X | {"structured_outputs": {"regex": "1x"}}).json()["choices"][0]["text"] == "1x"


SPACED = {"type": "function", "function": {"name": "a", "parameters": {"x-guidance": {"whitespace_flexible": True}}}}
STRIN = {"name": "a", "schema": {"type": "strin"}}
FROB = {"type": "function", "function": {"name": "a", "parameters": {"frob": 1}}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json"}}, "response_format", "Invalid enum"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema goes with"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"frob": 1}}}}, "response_format", "frob"),
    ({"response_format": {"type": "json_schema", "json_schema": STRIN}}, "structured_outputs", "strin"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "different forms"),
    ({"structured_outputs": {"regex": "[0-9"}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "regexp"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "cook"}}}, "tool_choice", "names 'cook'"),
    ({"tools": [SPACED], "tool_choice": "required"}, "tools", "x-guidance"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"), ({"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "matching regex"),
    ({"tools": [FROB], "tool_choice": "required"}, "tools", "frob"),
    ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "different forms"),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "structured_outputs", "ignore_eos"),
    ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "says"), WRONG, ids=lambda x: str(x)[:30])
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str, says: str) -> None:
    assert says in complain(served.post(TALK, CHAT | body), 400, param)


def test_a_tool_that_must_be_called_is_called(served: Served) -> None:
    """By its name, or any; whole and streamed: arguments that have the schema."""
    for choice, reason in (({"type": "function", "function": {"name": "weather"}}, "stop"), ("required", "tool_calls")):
        for tools in ([WEATHER], [WEATHER, CLOCK]):
            whole = chat(served, tools=tools, tool_choice=choice, logit_bias={})
            (call,) = whole["message"]["tool_calls"]
            assert call["function"]["name"] in ("weather", "clock") and call["type"] == "function" and call["id"]
            arguments = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "clock" or arguments["city"] in ("Oslo", "Lima")
            assert (whole["finish_reason"], whole["message"]["content"]) == (reason, None)
            message, end = streamed(served, tools=tools, tool_choice=choice)
            assert end == reason and message["tool_calls"][0]["function"] == call["function"]
    cut = chat(served, tools=[WEATHER], tool_choice="required", max_tokens=9)
    assert cut["finish_reason"] == "length"


def test_a_conversation_with_calls_is_read_again(served: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
    talk = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]  # fmt: skip
    response = served.post(TALK, {"model": "tiny", "messages": talk, "tools": [WEATHER], "max_tokens": 4})
    assert response.status_code == 200, response.text


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
TEXTS = {
    "Hello": ("Hello", []), CALL: (None, ["weather"]), f"I look. {CALL}": ("I look. ", ["weather"]),
    f"{CALL}\n{CALL}": (None, ["weather"] * 2),
    "a < b <tool": ("a < b <tool", []), "<tool_call>nonsense</tool_call>": ("<tool_call>nonsense</tool_call>", []),
    '<tool_call>{"name": "x"': ('<tool_call>{"name": "x"', []), f"{CALL} and then": (" and then", ["weather"]), " ": (" ", []),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t[:20])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_between_tags_are_found_in_pieces_of_any_size(text: str, size: int) -> None:
    reader, deltas = AutoReader(), []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for i, piece in enumerate(pieces):
        deltas += reader.read(piece, "stop" if i + 1 == len(pieces) else None)
    message, (content, names) = join_deltas(deltas), TEXTS[text]
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names == ["weather"] * reader.num_calls


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_a_required_call_is_read_in_pieces_of_any_size(size: int, reason: str) -> None:
    arguments = '{"city": "Oslo}"}'
    text = '{"name": "weather", "arguments": ' + arguments + ("}" if reason == "stop" else "")
    for reader, given in ((RequiredReader(), text), (NamedReader("weather"), arguments)):
        deltas: list[Any] = []
        for i in range(0, len(given), size):
            deltas += reader.read(given[i : i + size], reason if i + size >= len(given) else None)
        (call,) = join_deltas(deltas)["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": arguments}


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("arguments", ['{"city": "xy', '{"city": {"a": 1}', '{"n": 1', "{"])
def test_a_required_call_that_a_stop_string_cut_off_loses_nothing(size: int, arguments: str) -> None:
    """It is not reported as a call that is whole."""
    text, reader, deltas = '{"name": "weather", "arguments": ' + arguments, RequiredReader(), []
    for i in range(0, len(text), size):
        deltas += reader.read(text[i : i + size], "stop" if i + size >= len(text) else None)
    (call,) = join_deltas(deltas)["tool_calls"]
    assert call["function"]["arguments"] == arguments and end_reason(reader, "stop") == "stop"


def test_a_stop_string_in_a_required_call(served: Served) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["xyz"]}}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    done = chat(served, tools=[tool], tool_choice="required", stop=["z"])
    assert done["finish_reason"] == "stop"
    assert done["message"]["tool_calls"][0]["function"]["arguments"].endswith('"xy')


def test_openais_client_parses_a_pydantic_model(served: Served) -> None:
    openai = pytest.importorskip("openai")
    from enum import Enum

    from pydantic import BaseModel, Field

    class Colour(str, Enum):
        RED, BLUE = "red", "blue"

    class Car(BaseModel):
        colour: Colour
        doors: bool | None
        tags: list[Colour] = Field(max_length=2)

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    done = client.chat.completions.parse(model="tiny", messages=CHAT["messages"], response_format=Car, max_tokens=200, seed=3,
                                         temperature=1)  # fmt: skip
    car = done.choices[0].message.parsed
    assert isinstance(car, Car) and car.colour in Colour
    with client.chat.completions.stream(model="tiny", messages=CHAT["messages"], response_format=Car, max_tokens=200, seed=3,
                                        temperature=1) as stream:  # fmt: skip
        assert stream.get_final_completion().choices[0].message.parsed == car

    class Weather(BaseModel):
        city: Colour

    tool = openai.pydantic_function_tool(Weather)
    for choice in ("required", {"type": "function", "function": {"name": "Weather"}}):
        done = client.chat.completions.parse(model="tiny", messages=CHAT["messages"], tools=[tool], tool_choice=choice,
                                             max_tokens=80)  # fmt: skip
        (call,) = done.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
    whole = client.chat.completions.create(model="tiny", messages=CHAT["messages"], logit_bias={"50": 100}, max_tokens=2)
    assert whole.choices[0].message.content
    client.close()


def test_a_bomb_does_not_hold_up_others(served: Served) -> None:
    """It is read in another thread than the engine's, and refused."""
    bomb = {"structured_outputs": {"regex": "(a{1000}){60}"}}
    assert "too many" in complain(served.post(TALK, CHAT | bomb), 400, "structured_outputs")
    assert events(served.post(TALK, CHAT | {"stream": True, "max_tokens": 2}))
