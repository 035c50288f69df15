"""`girih serve`: the HTTP server."""

from __future__ import annotations

import functools
import socket
from typing import TYPE_CHECKING

from girih.conf.compose import compose_config, to_engine_config, to_record
from girih.graph.progress import Progress
from girih.kernels.errors import ConfigError
from girih.runtime.config import EngineConfig
from girih.serve.commands import Options
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.core_build import build_core, build_watched
from girih.serve.logs import LogSettings
from girih.serve.port import check_certificate, open_port
from girih.serve.progress import ProgressDisplay
from girih.serve.spans import require_packages

if TYPE_CHECKING:
    from girih.serve.engine_start import Built, EngineStart


def run(words: list[str], options: Options) -> int:
    """Serve until a signal."""
    config = compose_config("serve", words)
    engine = to_engine_config(config)
    serve = to_record(ServeConfig, config["serve"])
    sampling = to_record(SamplingConfig, config["sampling"])
    logs = LogSettings("WARNING" if options.quiet else "INFO", serve.log_style)
    logs.apply()
    if serve.otlp_endpoint is not None:
        require_packages()
    if serve.api_processes > 1:
        return _run_fleet(engine, serve, sampling, logs)
    return _run_one(engine, serve, sampling, logs, options)


def _run_one(
    engine: EngineConfig,
    serve: ServeConfig,
    sampling: SamplingConfig,
    logs: LogSettings,
    options: Options,
) -> int:
    check_certificate(serve)
    listener = open_port(serve.host, serve.port)
    start = way_to_start(engine, logs, serve.otlp_endpoint)
    start.begin()  # a core imports torch while this process imports what serves HTTP
    try:
        return _serve(start, listener, engine.scheduler.policy, serve, sampling, options)
    finally:
        start.close()


def _serve(
    start: EngineStart,
    listener: socket.socket,
    policy: str,
    serve: ServeConfig,
    sampling: SamplingConfig,
    options: Options,
) -> int:
    from girih.serve.server import GirihServer, exit_now

    display = ProgressDisplay(options.quiet)

    def announce(line: str) -> None:
        display.close()
        print(line, flush=True)

    server = GirihServer(
        start,
        serve,
        sampling=sampling,
        policy=policy,
        progress=display,
        announce=announce,
    )
    try:
        code = server.run(listener)
    finally:
        display.close()
    if server.is_building:
        exit_now(code)
    return code


def _run_fleet(
    engine: EngineConfig, serve: ServeConfig, sampling: SamplingConfig, logs: LogSettings
) -> int:
    if engine.runtime.process == "inline":
        raise ConfigError(
            f"serve.api_processes is {serve.api_processes}; more than one need a core in a "
            "process of its own: set runtime=process"
        )
    from girih.serve.api_fleet import ApiFleet, FleetSettings

    settings = FleetSettings(
        config=serve,
        sampling=sampling,
        policy=engine.scheduler.policy,
        restarts=engine.runtime.restart == "on-failure",
        logs=logs,
    )
    build = functools.partial(build_core, engine, logs, otlp_endpoint=serve.otlp_endpoint)
    return ApiFleet(build, settings).run()


def way_to_start(
    engine: EngineConfig, logs: LogSettings, otlp_endpoint: str | None = None
) -> EngineStart:
    """Return how to come by the engine that `engine` describes."""
    from girih.serve.engine_start import InlineStart, ProcessStart

    if engine.runtime.process == "process":
        restarts = engine.runtime.restart == "on-failure"
        build = functools.partial(build_core, engine, logs, otlp_endpoint=otlp_endpoint)
        return ProcessStart(build, restarts)
    return InlineStart(functools.partial(_build_inline, engine, otlp_endpoint))


def _build_inline(engine: EngineConfig, otlp_endpoint: str | None, progress: Progress) -> Built:
    from girih.serve.engine_start import Built
    from girih.serve.tokenizer import load_tokenizer

    handle = build_watched(engine, progress, otlp_endpoint)
    return Built(handle, load_tokenizer(handle.model_path))
