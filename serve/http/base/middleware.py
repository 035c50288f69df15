"""Middleware of every request: id, access line, key, body limits (plain ASGI, no buffering)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from girih.serve.config import ServeConfig
from girih.serve.http.base.encodings import CODINGS, DecodedBody, content_coding
from girih.serve.http.base.errors import ApiError
from girih.serve.http.base.http_metrics import NotingSend
from girih.serve.logs import request_id
from girih.serve.web import PAGES

logger = logging.getLogger("girih.access")
OPEN_PATHS = ("/health", "/ready", "/ping", "/version", "/docs", "/openapi.json", *PAGES)
METRICS_PATHS = ("/metrics", "/load")
QUIET_PATHS = (*OPEN_PATHS, "/load", "/status")  # asked often: not in the log by default


class RequestIds:
    """Gives every request an id, the client's `x-request-id` if it sent one, and sends it back.

    It is kept in `request.state.request_id`; a handler may change it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        state = scope.setdefault("state", {})
        state["request_id"] = given or uuid.uuid4().hex
        state["has_own_id"] = bool(given)
        request_id.set(state["request_id"])  # for log lines

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                headers["request-id"] = state["request_id"]  # anthropic's clients look for this
            await send(message)

        await self._app(scope, receive, naming)


class AccessLog:
    """Logs method, path, status, time and request id; never the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve and log one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        noting = NotingSend(send)
        try:
            await self._app(scope, receive, noting)
        finally:
            ms = (time.perf_counter() - started) * 1000
            client = (scope.get("client") or ("-",))[0]
            path = ascii(scope["path"])[1:-1]
            level = logging.DEBUG if path in QUIET_PATHS else logging.INFO  # probes ask often
            method, status = scope["method"], noting.status
            named = {"request_id": ascii(scope["state"]["request_id"])[1:-1]}
            logger.log(level, "%s %s %s %d %.1f ms", client, method, path, status, ms, extra=named)


class Guard:
    """Refuses requests without a valid key and bodies too large or too slow; decodes bodies."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._keys = [key.encode() for key in config.api_keys]
        self._admin_keys = [config.admin_key.encode()] if config.admin_key else []
        self._max_bytes = config.max_body_bytes
        self._body_seconds = config.body_seconds
        self._open_paths = OPEN_PATHS if config.metrics.guard else (*OPEN_PATHS, *METRICS_PATHS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer it with the refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._may_enter(scope["path"], headers):
            error = ApiError(401, "a valid API key is needed (Authorization: Bearer KEY)")
            await error.response()(scope, receive, send)
            return
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await self._too_large(int(declared)).response()(scope, receive, send)
            return
        try:
            coding = content_coding(headers)
        except ApiError as error:
            response = error.response()
            response.headers["accept-encoding"] = ", ".join(CODINGS)
            await response(scope, receive, send)
            return
        limited = self._limited(receive)
        if coding is not None:
            limited = DecodedBody(limited, coding, self._max_bytes)
        await self._app(scope, limited, send)

    def _may_enter(self, path: str, headers: Headers) -> bool:
        is_admin = path.startswith("/admin/") and bool(self._admin_keys)
        keys = self._admin_keys if is_admin else self._keys
        return not keys or path in self._open_paths or _has_key(headers, keys)

    def _limited(self, receive: Receive) -> Receive:
        seen = 0
        deadline = time.monotonic() + self._body_seconds
        is_whole = False

        async def counting() -> Message:
            nonlocal seen, is_whole
            if is_whole:  # only a disconnect can come now
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow(seen) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if seen > self._max_bytes:
                    raise self._too_large(seen)
            return message

        return counting

    def _too_slow(self, size: int) -> ApiError:
        return ApiError(
            408,
            f"{size} bytes of the body arrived in {self._body_seconds:g} s, but not all of it "
            "(serve.body_seconds)",
        )

    def _too_large(self, size: int) -> ApiError:
        return ApiError(
            413,
            f"the body has {size} bytes or more; this server takes at most {self._max_bytes} "
            "(serve.max_body_bytes)",
        )


def _has_key(headers: Headers, keys: list[bytes]) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    shown = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # All keys are compared, so that the time does not tell which one was close.
    sent = shown.encode("latin-1")  # the bytes on the wire, which headers are read by
    hits = [hmac.compare_digest(sent, key) for key in keys]
    return any(hits)
