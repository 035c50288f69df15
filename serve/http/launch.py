"""Runs `girih serve` once a core's process has been started."""

from __future__ import annotations

import dataclasses
import functools
import socket
from typing import TYPE_CHECKING

from girih.graph.files.sources import is_hub_id
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.garbage import set_aside
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.client.client import CoreClient
from girih.runtime.records.config import EngineConfig
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.engine.build import build_core, build_watched
from girih.serve.engine.spans import require_packages
from girih.serve.http.port import check_certificate, open_port
from girih.serve.logs import LogSettings
from girih.serve.progress import ProgressDisplay

if TYPE_CHECKING:
    from girih.runtime.client.spawn import SpawnedCore


def launch(
    engine: EngineConfig,
    serve: ServeConfig,
    sampling: SamplingConfig,
    quiet: bool,
    ahead: SpawnedCore,
) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        engine: what to serve.
        serve: how.
        sampling: overrides of the model's sampling defaults.
        quiet: draw no progress, log warnings only.
        ahead: the process for the core, if one is wanted.
    """
    engine, serve = agreed_names(engine, serve)
    logs = LogSettings("WARNING" if quiet else "INFO", serve.log_style)
    logs.apply()
    if serve.otlp_endpoint is not None:
        require_packages()
    if serve.api_processes > 1:
        return _run_fleet(engine, serve, sampling, logs, ahead)
    client = client_of(engine, logs, serve.otlp_endpoint, ahead)
    return _run_one(client, engine.scheduler.policy, serve, sampling, quiet)


def agreed_names(engine: EngineConfig, serve: ServeConfig) -> tuple[EngineConfig, ServeConfig]:
    """Return both configurations with one idea of the model's name.

    A model of the hub also answers to its full id, by which other servers call it.

    Raises:
        ConfigError: both name the model.
    """
    names, source = serve.model_names, engine.model.source
    if names and engine.model.name is not None:
        raise ConfigError(
            f"model.name is {engine.model.name!r} and serve.model_names is {list(names)}; set one"
        )
    if not names and engine.model.name is None and is_hub_id(source):
        names = (source.rpartition("/")[2], source)
    if not names:
        return engine, serve
    model = dataclasses.replace(engine.model, name=names[0])
    return (
        dataclasses.replace(engine, model=model),
        dataclasses.replace(serve, model_names=names),
    )


def _run_one(
    client: CoreClient,
    policy: str,
    serve: ServeConfig,
    sampling: SamplingConfig,
    quiet: bool,
) -> int:
    try:
        check_certificate(serve)
        listener = open_port(serve.host, serve.port)
        with ProgressDisplay(quiet) as display:
            display(ProgressEvent("start", 0, None, "the engine"))
            client.start()  # before what serves HTTP is imported
            return _serve(client, listener, policy, serve, sampling, display)
    finally:
        client.close()


def _serve(
    client: CoreClient,
    listener: socket.socket,
    policy: str,
    serve: ServeConfig,
    sampling: SamplingConfig,
    display: ProgressDisplay,
) -> int:
    from girih.serve.http.server import GirihServer, exit_now

    def announce(line: str) -> None:
        display.close()
        set_aside()
        print(line, flush=True)

    server = GirihServer(
        client,
        serve,
        sampling=sampling,
        policy=policy,
        progress=display,
        announce=announce,
    )
    code = server.run(listener)
    if server.is_building:
        display.close()
        exit_now(code)
    return code


def _run_fleet(
    engine: EngineConfig,
    serve: ServeConfig,
    sampling: SamplingConfig,
    logs: LogSettings,
    ahead: SpawnedCore,
) -> int:
    if engine.runtime.process == "inline":
        raise ConfigError(
            f"serve.api_processes is {serve.api_processes}; more than one need a core in a "
            "process of its own: set runtime=process"
        )
    from girih.serve.http.fleet import ApiFleet, FleetSettings

    settings = FleetSettings(
        config=serve,
        sampling=sampling,
        policy=engine.scheduler.policy,
        restarts=engine.runtime.restart == "on-failure",
        logs=logs,
    )
    build = functools.partial(build_core, engine, logs, otlp_endpoint=serve.otlp_endpoint)
    return ApiFleet(build, settings, ahead).run()


def client_of(
    engine: EngineConfig,
    logs: LogSettings,
    otlp_endpoint: str | None = None,
    ahead: SpawnedCore | None = None,
) -> CoreClient:
    """Return the way to the engine that `engine` describes; `start` makes it.

    Args:
        engine: what is wanted.
        logs: how a core of its own process logs.
        otlp_endpoint: where spans go, or None.
        ahead: a core's process that is on its way; ended where none is wanted.
    """
    if engine.runtime.process == "process":
        from girih.runtime.client.supervisor import ProcessTransport

        restarts = engine.runtime.restart == "on-failure"
        build = functools.partial(build_core, engine, logs, otlp_endpoint=otlp_endpoint)
        return CoreClient(ProcessTransport(build, restarts, ahead))
    from girih.runtime.client.local_transport import LocalTransport

    if ahead is not None:
        ahead.discard()
    build = functools.partial(build_watched, engine, otlp_endpoint=otlp_endpoint)
    return CoreClient(LocalTransport(build))
