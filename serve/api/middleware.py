"""What every request passes: access line, key check, body limit (plain ASGI, no buffering)."""

from __future__ import annotations

import hmac
import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from girih.serve.api.errors import ApiError
from girih.serve.config import ServeConfig

logger = logging.getLogger("girih.access")
OPEN_PATHS = ("/health", "/ready", "/version")


class AccessLog:
    """Logs method, path, status and time; never the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve and log one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            ms = (time.perf_counter() - started) * 1000
            client = (scope.get("client") or ("-",))[0]
            path = ascii(scope["path"])[1:-1]
            level = logging.DEBUG if path in OPEN_PATHS else logging.INFO  # probes ask often
            logger.log(level, "%s %s %s %d %.1f ms", client, scope["method"], path, status, ms)


class Guard:
    """Refuses requests without a valid key, and bodies over the limit."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_keys]
        self._max_bytes = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer it with the refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            error = ApiError(401, "a valid API key is needed (Authorization: Bearer KEY)")
            await error.response()(scope, receive, send)
            return
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._too_large(int(declared)).response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # All keys are compared, so that the time does not tell which one was close.
        hits = [hmac.compare_digest(shown.encode(), key) for key in self._keys]
        return any(hits)

    def _limited(self, receive: Receive) -> Receive:
        seen = 0

        async def counting() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_bytes:
                    raise self._too_large(seen)
            return message

        return counting

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes or more; this server takes at most {self._max_bytes} "
            "(serve.max_body_bytes)",
        )
