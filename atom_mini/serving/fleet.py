"""An application of Ray Serve: a server in each replica, which Ray places, watches, and restarts (chapter 82)."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.routing import Mount

from ..checkpoint import JsonObject
from ..errors import install, require
from ..options.args import EngineArgs
from ..options.build import choose_scheduler
from ..options.help import Fleet, Serve, given
from .async_llm import AsyncLLM
from .protocol import ApiError
from .server import Server

CLOSED = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_ENABLE_HA_PROXY": "0"}


def start_ray(address: str | None) -> None:
    """Join the Ray cluster at `address`, or start one on this machine. ValueError
    without Ray, OSError if nothing listens at `address`."""
    require(find_spec("ray") is not None, f"Ray is not installed: {install('ray')}")
    host, _, port = (address or "").rpartition(":")
    if port.isdigit():  # Ray itself would try for minutes
        socket.create_connection((host, int(port)), 5).close()
    for name, value in CLOSED.items():  # before Ray is imported
        os.environ.setdefault(name, value)
    import ray

    own: dict[str, bool] = {} if address else {"include_dashboard": False}
    ray.init(address or "local", log_to_driver=False, **own)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # not Ray's, which aborts


ONE_ENGINE = {"/", "/events", "/metrics"}  # routes that show a single engine


class Engine:
    """An engine and its server, in a process of Ray's."""

    server: Server

    def __init__(self, options: JsonObject, settings: Serve) -> None:
        Engine.server = Server(AsyncLLM(**options), settings)

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine does not answer."""
        try:
            await self.server.ask_state()
        except ApiError as error:
            raise RuntimeError(str(error)) from None


def make_app() -> Starlette:
    """The server of this process, without the routes that show a single engine."""
    router = Engine.server.router
    router.routes = [r for r in router.routes if getattr(r, "path", "") not in ONE_ENGINE]
    return Starlette(routes=[Mount("", Engine.server)])


def scaling(settings: Fleet) -> dict[str, float]:
    """Ray's `autoscaling_config`: how many engines, and when that changes."""
    return {
        "min_replicas": settings.replicas,
        "max_replicas": settings.max_replicas or settings.replicas,
        "target_ongoing_requests": settings.max_ongoing / 2,
        "upscale_delay_s": 30, "downscale_delay_s": 600,
    }  # fmt: skip


def resources(config: EngineArgs, settings: Fleet) -> dict[str, float]:
    """Ray's `ray_actor_options`: the cores of an engine, and a GPU for each of its
    ranks. ValueError if a cluster of our own has too few."""
    import ray

    have = ray.cluster_resources()
    ranks = config.tensor_parallel_size * config.data_parallel_size
    on_gpu = config.device == "cuda" or (config.device is None and "GPU" in have)
    each = {"CPU": settings.cpus, "GPU": ranks * on_gpu}
    for kind, one in each.items() if settings.address is None else ():
        need, most = settings.replicas * one, have.get(kind, 0)
        if need > most:
            raise ValueError(
                f"replicas={settings.replicas} need {need:g} {kind}, of {most:g} here: "
                "lower it, or set address to a larger cluster"
            )
    return {"num_cpus": each["CPU"], "num_gpus": each["GPU"]}


def build(args: JsonObject) -> object:
    """The fleet as an application of Ray Serve. `args`: fields of `Fleet`, and options of `LLM`."""
    from ray import serve

    names = {f.name for f in fields(Fleet)}
    settings = Fleet(**{k: v for k, v in args.items() if k in names})
    rest = {k: v for k, v in args.items() if k not in names}
    options = {"engine_process": True} | rest
    config = EngineArgs(**options)
    choose_scheduler(config)  # raises ValueError for a wrong `scheduler_cls`
    deployment = serve.deployment(
        serve.ingress(make_app)(Engine), name="engine",
        ray_actor_options=resources(config, settings),
        autoscaling_config=scaling(settings),
        max_ongoing_requests=settings.max_ongoing,
        max_queued_requests=settings.max_queue,
        health_check_period_s=1, graceful_shutdown_timeout_s=settings.grace,
    )  # fmt: skip
    return deployment.bind(options, settings)


def run_fleet(args: argparse.Namespace) -> None:
    """Serve until a signal ends it. ValueError if the engines cannot start."""
    settings = Fleet(**given(args, Fleet))
    choose_scheduler(EngineArgs(**given(args, EngineArgs)))  # checks them before Ray starts
    if settings.address is None:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.create_server((settings.host, settings.port), family=family).close()
    start_ray(settings.address)
    from ray import serve

    app = build(given(args, Fleet) | given(args, EngineArgs))
    place = {"host": settings.host, "port": settings.port}
    serve.start("HeadOnly", http_options=place | {"keep_alive_timeout_s": 30})
    try:
        serve.run(app, name="atom_mini", route_prefix="/")
        print(f"the fleet is at http://{settings.host}:{settings.port}", flush=True)
        with suppress(KeyboardInterrupt):  # and SIGTERM
            while True:
                signal.pause()
    except RuntimeError as error:
        raise ValueError(f"{error} Ray's logs are in /tmp/ray/session_latest") from None
    finally:
        with suppress(TimeoutError):  # after 60 seconds; Ray goes on without us
            serve.delete("atom_mini")
