"""The parts of an HTTP API that need no engine: answers, events, errors, and keys (chapter 81)."""

from __future__ import annotations

import hmac
import traceback
from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..options.help import Serve
from ..parallel.manager import EngineDead
from .protocol import ApiError

JSON = "application/json"
EVENTS = "text/event-stream"
Parts = AsyncGenerator[Any, None]  # of an answer


class Answer(StreamingResponse):
    """An answer in parts, until the client leaves. An error before the first part is an HTTP error."""

    async def stream_response(self, send: Send) -> None:
        parts = cast(Parts, self.body_iterator)

        async def started() -> Parts:
            yield first
            async for part in parts:
                yield part

        async with aclosing(parts):
            first = await anext(parts)
            self.body_iterator = started()
            await super().stream_response(send)


class JsonResponse(Response):
    """A value as JSON."""

    media_type = JSON

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


async def read_body(request: Request, limit: int) -> bytes:
    """The body. ApiError if it exceeds `limit` bytes; ClientDisconnect."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise ApiError(413, f"the body exceeds max_body={limit} bytes: send less")
    return bytes(data)


def api_error(error: Exception) -> ApiError:
    """What a client gets for an exception."""
    match error:
        case ApiError():
            return error
        case ClientDisconnect():
            return ApiError(499, "the client has left")
        case EngineDead():
            return ApiError(503, str(error).splitlines()[0], code="engine_dead")
        case ValueError() | RecursionError():
            return ApiError(400, str(error))
    return ApiError(500, f"the server has failed: {type(error).__name__}")


HEADERS = {401: {"www-authenticate": "Basic"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}


async def error_response(request: Request, error: Exception) -> Response:
    """An error as JSON. Starlette calls it for whatever a route has raised."""
    if isinstance(error, HTTPException):  # Starlette's own: 404, 405
        where = f"{request.method} {request.url.path}: {error.detail}"
        code = "not_found" if error.status_code == 404 else None
        body = ApiError(error.status_code, where, code=code).body()
        return JsonResponse(body, error.status_code, error.headers)
    known = api_error(error)
    return JsonResponse(known.body(), known.status, HEADERS.get(known.status))


DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def event_stream(values: Parts) -> Parts:
    """Values as events. An error before the first is raised; later ones are events."""
    has_begun = False
    try:
        async for value in values:
            yield event(value)
            has_begun = True
    except Exception as error:
        if not has_begun:
            raise
        if not isinstance(error, ApiError | EngineDead):
            traceback.print_exception(error)  # elsewhere uvicorn does
        yield event(api_error(error).body())
    yield DONE


ERRORS = (ApiError, ClientDisconnect, EngineDead, Exception, HTTPException, RecursionError, ValueError)


class Api(Starlette):
    """Routes behind a key, whose errors have OpenAI's shape."""

    def __init__(self, settings: Serve, routes: list[Route]) -> None:
        bound = f"[{settings.host}]" if ":" in settings.host else settings.host
        hosts = [bound, "localhost", "127.0.0.1", "[::1]", *settings.allowed_host]
        trust = Middleware(TrustedHostMiddleware, hosts, www_redirect=False)
        handlers = dict.fromkeys(ERRORS, error_response)
        pages = Middleware(CORSMiddleware, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        middleware = [trust, pages] if settings.allowed_origins else [trust]
        super().__init__(routes=routes, middleware=middleware, exception_handlers=handlers)
        self.settings = settings

    def has_key(self, headers: Headers) -> bool:
        """Whether a request with these headers may pass."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        with suppress(ValueError):  # not base64
            if kind == "Basic":
                token = b64decode(token).decode().partition(":")[2]
        key = self.settings.api_key or token
        return hmac.compare_digest(token.encode(), key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = bool(self.settings.allowed_origins) and scope["method"] == "OPTIONS"
        is_free = scope["path"] == "/health" or asks
        if is_free or self.has_key(Headers(scope=scope)):
            return await super().__call__(scope, receive, send)
        wrong = ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        await (await error_response(Request(scope), wrong))(scope, receive, send)
