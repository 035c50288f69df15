"""Notes every HTTP request for the metrics, which the core keeps (`runtime/observe/metrics.py`)."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

UNCOUNTED = ("/health", "/ready", "/ping", "/load", "/version", "/metrics")
LIMIT = 10_000  # requests noted while nobody asks for metrics; later ones are not counted

Seen = tuple[str, str, int, float]
"""Method, route, status, seconds."""


class HttpSeen:
    """Requests that were answered and not counted yet.

    Attributes:
        num_working: requests that are being answered, of routes that make the model work.
    """

    def __init__(self) -> None:
        self.num_working = 0
        self._seen: list[Seen] = []

    def add(self, seen: Seen) -> None:
        """Note a request."""
        if len(self._seen) < LIMIT:
            self._seen.append(seen)

    def take(self) -> list[Seen]:
        """Return what was noted and forget it."""
        seen, self._seen = self._seen, []
        return seen


class NotingSend:
    """A `send` that notes the status of the answer (0 until it starts)."""

    def __init__(self, send: Send) -> None:
        self.status = 0
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class HttpMetrics:
    """Notes method, route, status and duration of every request but probes."""

    def __init__(self, app: ASGIApp, seen: HttpSeen) -> None:
        self._app = app
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve and note one request."""
        if scope["type"] != "http" or scope["path"] in UNCOUNTED:
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        noting = NotingSend(send)
        is_work = scope["method"] == "POST" and not scope["path"].startswith("/admin/")
        self._seen.num_working += is_work
        try:
            await self._app(scope, receive, noting)
        finally:
            self._seen.num_working -= is_work
            # The route, not the path: a path can be anything and would be a series of its own.
            route = getattr(scope.get("route"), "path", "none")
            self._seen.add((scope["method"], route, noting.status, time.monotonic() - started))
