"""One error shape for every route: {"error": {"message", "type", "param", "code"}, "type"}."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from girih.kernels.base.errors import (
    BusyError,
    EngineError,
    GirihError,
    QueueFullError,
    RequestError,
    UnavailableError,
)

logger = logging.getLogger("girih.serve")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# Where nothing says it more exactly; a status that is missing has no word (null).
CODES = {
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_supported",
    429: "rate_limit_exceeded",
}
RETRY_SECONDS = 1
CLIENT_CLOSED = 499  # as nginx logs it
MAX_MESSAGE = 1500


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Have refusals name a field as this route's clients know it; `names`: field → name here."""
    try:
        yield
    except RequestError as error:
        param = names.get(error.param or "", error.param)
        raise RequestError(str(error), param, error.code) from error


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what is wrong, the value seen, what is allowed.
        param: the request field at fault.
        code: a short machine-readable word; None takes the status's own, if it has one.
        retry_after: seconds after which a retry makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the JSON body; `type` at the top is what Anthropic's clients look for."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {
            "type": "error",
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code or CODES.get(self.status),
            },
        }

    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Encode `body` as a JSON response."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def as_api_error(error: Exception) -> ApiError:
    """Translate girih's own errors; anything else is a 500 that names no internals."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, _shortened(str(error)), error.param, error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), retry_after=RETRY_SECONDS)
    if isinstance(error, BusyError):
        return ApiError(409, str(error), code="busy")
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable", retry_after=RETRY_SECONDS)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error", retry_after=RETRY_SECONDS)
    logger.error("request failed", exc_info=error)
    detail = str(error) if isinstance(error, GirihError) else type(error).__name__
    return ApiError(500, f"the server failed on this request: {detail}")


def _shortened(message: str) -> str:
    """A message may quote a template's or a grammar's own words, however long."""
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure answer in the one shape."""

    async def from_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def from_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        route = f"{request.method} {request.url.path}"
        hint = ""
        if request.url.path.startswith("/admin/") and not request.app.state.server.config.admin_key:
            hint = "; the operator's routes exist with serve.admin_key=KEY"
        allowed = (error.headers or {}).get("Allow", "another method")
        message = {
            404: f"no route {route}{hint}",
            405: f"{route} is not allowed; use {allowed}",
        }.get(error.status_code, str(error.detail))
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    async def to_nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)  # its client left while it sent the request

    app.add_exception_handler(ClientDisconnect, to_nobody)
    for kind in (ApiError, GirihError, Exception):
        app.add_exception_handler(kind, from_error)
    app.add_exception_handler(HTTPException, from_http)
