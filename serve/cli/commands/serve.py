"""`girih serve`: the HTTP server. A core's process imports torch while this one gets ready."""

from __future__ import annotations

from girih.runtime.client.spawn import core_ahead
from girih.serve.cli.verbs import Options


def run(words: list[str], options: Options) -> int:
    """Serve until a signal."""
    with core_ahead() as ahead:
        # Imported beside the core's imports; Hydra alone takes half a second.
        from girih.conf.compose import compose_config
        from girih.kernels.base.records import to_record
        from girih.serve.cli.preflight import engine_of
        from girih.serve.config import SamplingConfig, ServeConfig
        from girih.serve.http.launch import launch

        config = compose_config("serve", words)
        serve = to_record(ServeConfig, config["serve"])
        sampling = to_record(SamplingConfig, config["sampling"])
        return launch(engine_of(config), serve, sampling, options.quiet, ahead)
