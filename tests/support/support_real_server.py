"""The real server in a thread of this process, over a real engine without compilation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from support_engines import eager_engine

from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import LocalTransport
from girih.runtime.start.launch import Engine
from girih.serve.config import ServeConfig
from girih.serve.http.server import GirihServer
from girih.serve.text.tokenizer import load_tokenizer


@contextlib.contextmanager
def serving(model: Path, serve: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """Serve a model directory; yields the URL, checks the engine at the end.

    Args:
        model: the directory.
        serve: fields of `ServeConfig`.
        options: of the engine, as for `LLM`.
    """
    wanted = {"threads": 1, "num_blocks": 300, "name": "tiny", **options}
    engines: list[Engine] = []

    def build(progress: Any) -> Engine:
        engines.append(eager_engine(model, **wanted))
        return engines[0]

    config = ServeConfig(
        **{"port": 0, "drain_seconds": 1.0, "log_requests": False, **(serve or {})}
    )
    server = GirihServer(
        CoreClient(LocalTransport(build)),
        config,
        tokenizer=load_tokenizer(model),
        announce=lambda line: None,
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield _wait_until_ready(server, thread)
        core = engines[0].core
        deadline = time.monotonic() + 20
        while core.scheduler.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        core.check_integrity()
        assert core.scheduler.requests == {}
    finally:
        server.stop()
        thread.join(20)


def _wait_until_ready(server: GirihServer, thread: threading.Thread) -> str:
    deadline = time.monotonic() + 240  # a busy machine is slow to import torch
    while time.monotonic() < deadline and thread.is_alive():
        url = f"http://127.0.0.1:{server.port}"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return url
        time.sleep(0.05)
    raise AssertionError(f"the server did not become ready: {server.error}")
