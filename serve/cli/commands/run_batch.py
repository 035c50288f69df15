"""`girih run-batch`: answer a file of requests."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import httpx
from rich.progress import Progress as Bar

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.records import to_record
from girih.serve.address import server_root
from girih.serve.cli.preflight import engine_of
from girih.serve.cli.verbs import Options
from girih.serve.config import SamplingConfig
from girih.serve.offline.batch_lines import BatchOutput, read_lines
from girih.serve.offline.batch_run import BatchCounts, BatchRun
from girih.serve.progress import ProgressDisplay, finished_bar

TIMEOUT_SECONDS = 3600.0  # one answer may wait for many others


def run(words: list[str], options: Options) -> int:
    """Answer every line of the input that the output does not answer yet."""
    config = compose_config("run-batch", words)
    for name in ("input", "output"):
        if not config[name]:
            raise ConfigError(f"{name} is missing; write `girih run-batch input=FILE output=FILE`")
    if config["concurrency"] < 1:
        raise ConfigError(f"concurrency is {config['concurrency']}; it must be at least 1")
    with BatchOutput(config["output"]) as output:
        total = output.check(read_lines(config["input"]))
        if len(output.done) == total:
            print(f"all {total} lines were answered before", file=sys.stderr)
            return 0
        counts = _answer_all(config, output, total, options)
    print(counts, file=sys.stderr)
    return 0


def _answer_all(
    config: dict[str, Any], output: BatchOutput, total: int, options: Options
) -> BatchCounts:
    if config["url"]:
        key = config["api_key"] or os.environ.get("OPENAI_API_KEY")
        url = server_root("url", config["url"])
        return asyncio.run(_run(config, output, total, options, (url, key)))
    engine = engine_of(config)
    sampling = to_record(SamplingConfig, config["sampling"])
    from girih.serve.http.launch import client_of
    from girih.serve.http.local_server import LocalServer
    from girih.serve.logs import LogSettings

    with ExitStack() as stack:
        with ProgressDisplay(options.quiet) as progress:
            client = client_of(engine, LogSettings("WARNING"))
            server = LocalServer(client, sampling, engine.scheduler.policy, progress)
            stack.enter_context(server)
        return asyncio.run(_run(config, output, total, options, (server.url, server.key)))


async def _run(
    config: dict[str, Any],
    output: BatchOutput,
    total: int,
    options: Options,
    server: tuple[str, str | None],
) -> BatchCounts:
    url, key = server
    client = httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(TIMEOUT_SECONDS, connect=10.0),
        limits=httpx.Limits(max_connections=None),
    )
    shown: AbstractContextManager[Bar | None] = (
        nullcontext() if options.quiet else finished_bar(total, "lines")
    )
    async with client:
        with shown as bar:

            def draw(counts: BatchCounts) -> None:
                if bar is not None:
                    done = counts.kept + counts.answered + counts.refused + counts.unusable
                    bar.update(bar.task_ids[0], completed=done)

            batch = BatchRun(client, output, config["concurrency"], draw)
            await batch.run(read_lines(config["input"]))
    return batch.counts
