"""The HTTP server for this process alone: a free loopback port and a random key.

Work that speaks HTTP anyway (a batch file) then has one way to every route, local or not.
"""

from __future__ import annotations

import secrets
import threading

from girih.kernels.base.progress import Progress
from girih.runtime.client.client import CoreClient
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.http.server import GirihServer


class LocalServer:
    """Starts on entry and waits until the model answers; stops on exit.

    Args:
        client: the way to the engine.
        sampling: overrides of the model's sampling defaults.
        policy: the scheduler's policy.
        progress: told about the start-up work.

    Attributes:
        key: what requests must show as a bearer token.
    """

    def __init__(
        self, client: CoreClient, sampling: SamplingConfig, policy: str, progress: Progress
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self._settled = threading.Event()
        self._error: BaseException | None = None
        self._server = GirihServer(
            client,
            ServeConfig(port=0, api_keys=(self.key,), log_requests=False, drain_seconds=0.0),
            sampling=sampling,
            policy=policy,
            progress=progress,
            announce=lambda line: self._settled.set(),
        )
        self._thread = threading.Thread(target=self._run, name="girih-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.port}"

    def __enter__(self) -> LocalServer:
        self._thread.start()
        try:
            self._settled.wait()
        except BaseException:
            self._server.stop()
            raise
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run()
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        self._settled.set()
