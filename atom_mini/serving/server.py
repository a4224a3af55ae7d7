"""OpenAI's API over HTTP: typed requests, bounded queues, and answers that stop when the client leaves (chapter 81)."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from importlib.resources import files
from types import FrameType
from typing import Any, cast

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge
from prometheus_client import Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ..checkpoint import JsonObject
from ..engine_core import EngineCore, StepOutput
from ..forms import Form
from ..llm import as_list
from ..options.args import EngineArgs
from ..options.help import Serve, given
from ..parallel.core_client import EngineCoreClient
from ..parallel.manager import EngineDead
from ..sequence import Sequence, SequenceStatus
from .api import EVENTS, JSON, Answer, Api, JsonResponse, Parts
from .api import event_stream, read_body
from .async_llm import AsyncLLM, Stream
from .protocol import (
    ApiError, ApiRequest, ChatCompletionRequest, CompletionRequest, Offsets, end_reason,
    named_field, read_answer, read_request,
)  # fmt: skip
from .tools import PlainReader
from ..text import NO_TOKEN_LEFT, RequestOutput, TextPiece

Kind = type[Counter | Gauge | Histogram]  # of Prometheus
COUNTED: dict[str, tuple[Kind, str]] = {  # vLLM's name -> its kind, its help
    "prompt_tokens": (Counter, "Tokens in the prompts of finished answers."),
    "generation_tokens": (Counter, "Generated tokens."),
    "prefix_cache_queries": (Counter, "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": (Counter, "Prompt tokens found in the prefix cache."),
    "external_prefix_cache_queries": (Counter, "Prompt tokens looked up in host memory."),
    "external_prefix_cache_hits": (Counter, "Prompt tokens loaded from host memory."),
    "num_requests_running": (Gauge, "Answers that are being computed."),
    "num_requests_waiting": (Gauge, "Answers that wait to be computed."),
    "kv_cache_usage_perc": (Gauge, "Share of cache blocks in use, from 0 to 1."),
    "time_to_first_token_seconds": (Histogram, "Time until an answer's first token."),
    "request_time_per_output_token_seconds": (Histogram, "Time per later token."),
    "e2e_request_latency_seconds": (Histogram, "Time until an answer's last token."),
}


def failure(out: RequestOutput) -> ApiError:
    """What a client is told of an answer that did not end by itself. Options that leave no token are the client's."""
    status = {NO_TOKEN_LEFT: 400}.get(str(out.stop_reason), 500) if out.finish_reason == "error" else 503
    return ApiError(status, f"{out.finish_reason}: {out.stop_reason}")


class Meters:
    """Counts of the engine's work, for Prometheus and for the page."""

    def __init__(self, model: str, engine: AsyncLLM) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()
        own = self.registry
        labels = ["model_name", "finished_reason"]
        ends = Counter("vllm:request_success", "Finished answers.", labels, registry=own)
        self.ends = partial(ends.labels, model)
        self.of: dict[str, Any] = {
            name: kind(f"vllm:{name}", about, ["model_name"], registry=own).labels(model)
            for name, (kind, about) in COUNTED.items()
        }  # fmt: skip
        self.num_steps = 0
        self.steps: deque[JsonObject] = deque(maxlen=300)  # the last ones
        self.num_pages = 0  # open pages, which read the steps

    def waiting(self) -> list[Sequence]:
        """The sequences that have no token yet, in order of arrival."""
        seqs = self.engine.llm.engine_core.scheduler.seqs
        return [s for s in [*seqs.values()] if s.status is SequenceStatus.WAITING]

    def record(self, step: StepOutput) -> None:
        """Count a step. The engine's thread calls it."""
        self.num_steps += 1
        new = step.output.token_ids
        self.of["generation_tokens"].inc(sum(map(len, new.values())))
        if self.num_pages:
            self.steps.append({
                "step": self.num_steps, "kind": step.batch.type.name.lower(),
                "ms": round(1e3 * step.seconds, 2), "tokens": step.batch.total_tokens_num,
                "ran": [seq.id for seq in step.seqs],
                "decodes": [s.id for s in step.seqs
                            if s.num_completion_tokens > len(new.get(s.id, ()))],
                "waiting": [seq.id for seq in self.waiting()][:50],
                "ended": {seq.id: seq.leave_reason for seq in step.finished},
            })  # fmt: skip

    def finish(self, out: RequestOutput) -> None:
        """Count a finished request."""
        self.ends(out.finish_reason).inc()
        self.of["prompt_tokens"].inc(len(out.prompt_token_ids))
        loaded = min(out.metrics.get("loaded_tokens", 0), out.num_cached_tokens)
        found = out.num_cached_tokens - loaded
        self.of["prefix_cache_queries"].inc(len(out.prompt_token_ids))
        self.of["prefix_cache_hits"].inc(found)
        if self.engine.llm.config.kv_offloading_size is not None:
            self.of["external_prefix_cache_queries"].inc(len(out.prompt_token_ids) - found)
            self.of["external_prefix_cache_hits"].inc(loaded)
        self.of["time_to_first_token_seconds"].observe(out.ttft)
        self.of["request_time_per_output_token_seconds"].observe(out.tpot)
        self.of["e2e_request_latency_seconds"].observe(out.latency)

    def state(self) -> dict[str, int | float]:
        """The engine's state now. Raises the error of its last step, if that failed."""
        if self.engine.error is not None:
            raise self.engine.error
        found = engine_counts(self.engine.llm.engine_core)
        config = self.engine.llm.config
        blocks = config.num_kvcache_blocks or 1
        self.of["num_requests_running"].set(found["running"])
        self.of["num_requests_waiting"].set(found["waiting"])
        self.of["kv_cache_usage_perc"].set(1 - found["free_blocks"] / blocks)
        needed = next((seq.num_blocks for seq in self.waiting()), 0)
        more = {"blocks": blocks, "needed": needed, "max_num_seqs": config.max_num_seqs}
        return found | more


def engine_counts(core: EngineCore | EngineCoreClient) -> dict[str, int | float]:
    """Requests and free blocks of an engine core, in this process or in others."""
    if isinstance(core, EngineCoreClient):
        return core.metrics()
    scheduler = core.scheduler
    return {
        "waiting": len(scheduler.waiting), "running": len(scheduler.running),
        "preemptions": scheduler.num_preemptions,
        "free_blocks": scheduler.block_manager.num_free_blocks,
    }  # fmt: skip


ENDPOINTS: dict[str, type[ApiRequest]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest,
}  # fmt: skip


class Server(Api):
    """OpenAI's API on an engine."""

    def __init__(self, engine: AsyncLLM, settings: Serve) -> None:
        gets = {
            "/": self.page, "/events": self.events, "/health": self.health,
            "/metrics": self.metrics, "/openapi.json": self.openapi,
            "/v1/models": self.models, "/v1/models/{name:path}": self.named_model,
        }  # fmt: skip
        posts = {p: partial(self.answer, kind=kind) for p, kind in ENDPOINTS.items()}
        routes = [Route(path, handler) for path, handler in gets.items()]
        routes += [Route(path, f, methods=["POST"]) for path, f in posts.items()]
        super().__init__(settings, routes)
        self.engine = engine
        self.model = settings.served_model_name or str(engine.llm.config.model)
        self.streams: dict[Stream, int] = {}  # unfinished: how many answers each has
        self.is_leaving = False
        self.meters = Meters(self.model, engine)
        engine.llm.listeners.append(self.meters)

    async def prompts(self, request: ApiRequest) -> list[str | list[int]]:
        """The prompts for the engine. ApiError for a conversation that the checkpoint's template does not accept."""
        if isinstance(request, CompletionRequest):
            return as_list(request.prompt)
        assert isinstance(request, ChatCompletionRequest)
        chat = [message.as_json() for message in request.messages]
        options = request.add_generation_prompt, request.template_options()
        try:
            return [await self.engine.format_chat(chat, *options)]
        except Exception as error:  # a template may raise anything
            raise ApiError(400, f"messages: {error}", "messages") from None

    def check_limits(self, prompts: int, n: int) -> None:
        """ApiError if `n` answers to each of `prompts` prompts exceed a limit now."""
        limits = self.settings
        if n > limits.max_choices:
            raise ApiError(400, f"n={n} exceeds max_choices={limits.max_choices}", "n")
        if prompts > limits.max_prompts:
            wrong = f"{prompts} prompts exceed max_prompts={limits.max_prompts}: send fewer"
            raise ApiError(400, wrong, "prompt")
        if self.is_leaving:
            raise ApiError(503, "the server is shutting down", code="leaving")
        unfinished = sum(self.streams.values())
        if unfinished + n * prompts > limits.max_queue:
            wrong = f"{unfinished} answers are unfinished, of max_queue={limits.max_queue}"
            raise ApiError(429, f"{wrong}: try again later", code="queue_full")

    async def check_form(self, form: Form | None) -> None:
        """ValueError if no answer can have the form. It is read in the tokenizer's thread, while the engine runs."""
        if form is not None:
            checked = self.engine.tokenizing.submit(form.check, self.engine.llm.config.vocabulary)
            await asyncio.wrap_future(checked)

    async def pieces(self, request: ApiRequest, stream: Stream) -> AsyncIterator[TextPiece]:
        """Pieces of text until all answers are finished. ApiError if one fails."""
        if request.num_logprobs is not None and self.engine.llm.tokenizer is None:
            raise ApiError(400, f"{self.model} has no tokenizer to name tokens with: leave logprobs out", "logprobs")
        count = len(as_list(getattr(request, "prompt", "")))  # a chat is one prompt
        self.check_limits(count, request.n)
        params = [request.params(i) for _ in range(count) for i in range(request.n)]
        self.streams[stream] = len(params)
        try:
            await self.check_form(params[0].structured_outputs)
            prompts = await self.prompts(request)
            many = [prompt for prompt in prompts for _ in range(request.n)]
            async for piece in self.engine.follow(stream, many, params):
                if out := piece.output:
                    if out.finish_reason not in ("stop", "length"):
                        raise failure(out)
                    self.meters.finish(out)
                yield piece
        except Exception as error:
            is_ours = error is stream.error and not isinstance(error, ApiError | EngineDead)
            if isinstance(error, ValueError) and not is_ours:
                raise ApiError(400, str(error), named_field(str(error), request)) from None
            if not is_ours:
                raise
            raise ApiError(500, f"the engine has failed: {error!r}") from None  # a step
        finally:
            del self.streams[stream]

    async def answer(self, http: Request, kind: type[ApiRequest]) -> Response:
        """The handler of both endpoints."""
        if not http.headers.get("content-type", "").lower().startswith(JSON):
            raise ApiError(415, f"send content-type: {JSON}")  # a page's form cannot
        request = read_request(await read_body(http, self.settings.max_body), kind)
        if request.model not in (None, self.model):
            wrong = f"model={request.model!r} is not served here, {self.model!r} is"
            raise ApiError(404, wrong, "model", "model_not_found")
        if request.stream:
            return Answer(event_stream(self.chunks(request)), media_type=EVENTS)
        return Answer(self.whole(request), media_type=JSON)

    async def whole(self, request: ApiRequest) -> Parts:
        """All answers as one document, in one part."""
        stream = Stream()
        outs = {piece.index: piece.output async for piece in self.pieces(request, stream) if piece.output}
        tokenizer = self.engine.llm.tokenizer
        choices = []
        for i, out in sorted(outs.items()):
            logprobs = request.logprobs_json(out.logprobs, out.token_ids, tokenizer, Offsets())
            message, reason = read_answer(request, out.text, out.finish_reason)
            choices.append(request.choice(i, out.text, reason, logprobs, message))
        new = sum(len(out.token_ids) for out in outs.values())
        counts = request.usage(stream.requests, new)
        yield msgspec.json.encode(request.head(self.model) | {"choices": choices, "usage": counts})

    async def chunks(self, request: ApiRequest) -> Parts:
        """The chunks of a stream."""
        stream = Stream()
        new = 0
        options = request.stream_options
        is_chat = isinstance(request, ChatCompletionRequest)
        counts = {"usage": None} if options.include_usage else {}
        head = request.head(self.model) | counts
        first = {"delta": {"role": "assistant", "content": ""}}
        sent: list[int] = []  # tokens of each answer
        offsets: list[Offsets] = []
        readers: list[PlainReader] = []
        async for piece in self.pieces(request, stream):
            if not sent:
                sent = [0] * len(stream.requests)
                offsets = [Offsets() for _ in sent]
                readers = [request.reader() for _ in sent]
                for i in range(len(sent) * is_chat):
                    yield head | {"choices": [request.choice(i, "", None) | first]}
            i, ids = piece.index, piece.token_ids
            rows = stream.requests[i].seq.logprobs[sent[i] : sent[i] + len(ids)]
            sent[i] += len(ids)
            logprobs = request.logprobs_json(rows, ids, self.engine.llm.tokenizer, offsets[i])
            new += len(ids)
            reason = piece.finish_reason
            *earlier, last = readers[i].read(piece.text, reason) or [{}]
            for delta in earlier:
                yield head | {"choices": [request.choice(i, "", None, None, delta)]}
            reason = end_reason(readers[i], reason)
            chunk = head | {"choices": [request.choice(i, piece.text, reason, logprobs, last)]}
            if options.include_usage and options.continuous_usage_stats:
                chunk["usage"] = request.usage(stream.requests, new)
            yield chunk
        if options.include_usage:
            yield head | {"choices": [], "usage": request.usage(stream.requests, new)}

    async def ask_state(self) -> dict[str, int | float]:
        """The state that the engine reports. ApiError (503) if it does not answer."""
        limit = self.settings.health_timeout
        try:
            return await asyncio.wait_for(self.engine.submit(self.meters.state), limit)
        except asyncio.TimeoutError:
            wrong = f"the engine has not answered within health_timeout={limit} seconds"
            raise ApiError(503, wrong, code="engine_hung") from None
        except Exception as error:
            raise ApiError(503, str(error), code="engine_dead") from None

    async def health(self, request: Request) -> Response:
        """Status 200 while the engine's loop answers."""
        return JsonResponse({"status": "ok"} | await self.ask_state())

    async def metrics(self, request: Request) -> Response:
        """The numbers for Prometheus; of a dead engine, the last ones."""
        with suppress(ApiError):
            await self.ask_state()
        return Response(generate_latest(self.meters.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """A list of the one model."""
        return JsonResponse({"object": "list", "data": [self.about_model()]})

    async def named_model(self, request: Request) -> Response:
        """The one model. ApiError (404) for another name."""
        if (name := request.path_params["name"]) != self.model:
            raise ApiError(404, f"model {name!r} is not served here, {self.model!r} is", "model", "model_not_found")
        return JsonResponse(self.about_model())

    def about_model(self) -> JsonObject:
        """What a client learns about the model."""
        length = self.engine.llm.config.max_model_len
        about = {"object": "model", "created": int(time.time()), "owned_by": "atom_mini"}
        root = str(self.engine.llm.config.model)  # where its weights are
        return {"id": self.model, "root": root, "max_model_len": length} | about

    async def openapi(self, request: Request) -> Response:
        """A description of the routes."""
        kinds, parts = msgspec.json.schema_components(
            ENDPOINTS.values(), ref_template="#/components/schemas/{name}"
        )
        answers = {"responses": {"default": {"description": "an answer, or an error"}}}
        routes = cast(list[Route], self.routes)
        paths: JsonObject = {}
        for route in routes:
            part = {"in": "path", "required": True, "schema": {"type": "string"}}
            names = [{"name": name} | part for name in route.param_convertors]
            paths[route.path_format] = {"get": answers | {"parameters": names}}
        for path, kind in zip(ENDPOINTS, kinds, strict=True):
            body = {"required": True, "content": {JSON: {"schema": kind}}}
            paths[path] = {"post": answers | {"requestBody": body}}
        info = {"title": "atom_mini", "version": "1"}
        document = {"openapi": "3.1.0", "info": info, "paths": paths}
        return JsonResponse(document | {"components": {"schemas": parts}})

    async def page(self, request: Request) -> Response:
        """A page with a chat and the engine's steps."""
        return HTMLResponse((files("atom_mini") / "serving" / "page.html").read_bytes())

    async def events(self, request: Request) -> Response:
        """The engine's steps and state, ten times a second."""
        return Answer(event_stream(self.engine_events()), media_type=EVENTS)

    async def engine_events(self) -> Parts:
        """New steps and the state, until the server shuts down."""
        self.meters.num_pages += 1
        last = self.meters.num_steps
        try:
            while True:
                state = await self.ask_state()
                new = [step for step in [*self.meters.steps] if step["step"] > last]
                last = new[-1]["step"] if new else last
                yield {"steps": new, "state": state}
                if self.is_leaving:
                    return
                await asyncio.sleep(0.1)
        finally:
            self.meters.num_pages -= 1


MARGIN = 20.0  # seconds after the grace


def end_process(seconds: float) -> None:
    """End this process, whatever its threads wait for."""
    print(f"the server still runs {seconds:.0f} seconds after the signal: it is ended", file=sys.stderr, flush=True)
    os._exit(1)


class GracefulServer(uvicorn.Server):
    """A uvicorn server that gives unfinished answers time, and then ends them."""

    def __init__(self, app: Server) -> None:
        limit = int(app.settings.grace) + 5  # for clients that do not read the error
        super().__init__(uvicorn.Config(
            app, lifespan="off", ws="none", log_level=app.settings.log_level,
            timeout_keep_alive=30,  # longer than clients keep a connection
            timeout_graceful_shutdown=limit,
        ))  # fmt: skip
        self.app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down. A signal's handler, also before uvicorn runs."""
        if not self.should_exit:
            most = self.app.settings.grace + MARGIN
            clock = threading.Timer(most, end_process, [most])
            clock.daemon = True
            clock.start()
        super().handle_exit(sig, frame)

    def end_answers(self) -> None:
        """End all unfinished answers with an error."""
        for stream in self.app.streams:
            stream.put(ApiError(503, "the server is shutting down", code="leaving"))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket, and wait for the answers."""
        self.app.is_leaving = True
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.app.settings.grace, self.end_answers)
        await super().shutdown(sockets)
        timer.cancel()


def run_serve(args: argparse.Namespace) -> None:
    """Listen, load, and serve until a signal ends it."""
    settings = Serve(**given(args, Serve))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    engine = AsyncLLM(**{"engine_process": True} | given(args, EngineArgs))
    app = Server(engine, settings)
    server = GracefulServer(app)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn re-raises them at its end
        signal.signal(number, server.handle_exit)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # new objects from one collection to the next
    host, port = listener.getsockname()[:2]
    bound = f"[{host}]" if ":" in host else host
    print(f"{app.model} is served at http://{bound}:{port}", flush=True)
    if host in ("0.0.0.0", "::") and not settings.allowed_host:
        print('for clients elsewhere, add --allowed-host NAME (or "*" for any name)', flush=True)
    try:
        server.run([listener])
    finally:
        asyncio.run(engine.close())
