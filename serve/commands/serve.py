"""`girih serve`: the HTTP server."""

from __future__ import annotations

import logging
import sys

from girih.conf.compose import compose_config, to_engine_config, to_record
from girih.graph.progress import Progress
from girih.serve.commands import Options
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.progress import ProgressDisplay


def run(words: list[str], options: Options) -> int:
    """Serve until a signal."""
    config = compose_config("serve", words)
    engine_config = to_engine_config(config)
    serve_config = to_record(ServeConfig, config["serve"])
    sampling = to_record(SamplingConfig, config["sampling"])
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING if options.quiet else logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    from girih.serve.server import Built, GirihServer, exit_now

    display = ProgressDisplay(options.quiet)

    def build(progress: Progress) -> Built:
        from girih.runtime.launch import build_engine
        from girih.serve.tokenizer import load_tokenizer

        handle = build_engine(engine_config, progress)
        return Built(handle, load_tokenizer(handle.model_path))

    def announce(line: str) -> None:
        display.close()
        print(line, flush=True)

    server = GirihServer(
        build,
        serve_config,
        sampling=sampling,
        policy=engine_config.scheduler.policy,
        progress=display,
        announce=announce,
    )
    try:
        code = server.run()
    finally:
        display.close()
    if server.is_building:
        exit_now(code)
    return code
