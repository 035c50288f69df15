"""The page at `/` and the status it draws."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from girih import __version__
from girih.kernels.base.errors import EngineError
from girih.serve.engine.async_engine import AsyncEngine
from girih.serve.http.base.errors import json_response
from girih.serve.http.base.state import ServerState
from girih.serve.web import PAGES, read_page

ANSWER_SECONDS = 5.0  # a step may be running; the page asks again anyway
router = APIRouter(include_in_schema=False)

# Nothing but this server's own files runs, loads or is asked; nobody may frame the page.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """Return one file of the page."""
    content, kind = read_page(request.url.path)
    return Response(content, media_type=kind, headers=HEADERS)


for _path in PAGES:
    router.add_api_route(_path, page, methods=["GET"])


@router.get("/status")
async def status(request: Request) -> Response:
    """Return what the page shows: readiness, the model, and the engine's counters."""
    state: ServerState = request.app.state.server
    body: dict[str, Any] = {**state.readiness(), "version": __version__}
    served = state.served
    if served is not None and state.is_ready:
        names = {"model": served.name, "key": served.key, "max_model_len": served.max_model_len}
        body |= {**names, **await _counters(served.engine), **await state.engine_readiness()}
    return json_response(body, headers={"cache-control": "no-store"})


async def _counters(engine: AsyncEngine) -> dict[str, Any]:
    """Return the engine's counters, {} when it does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return {
                "engine": await engine.call("stats"),
                "step_seconds": await engine.call("step_seconds"),
            }
    except (EngineError, TimeoutError):
        return {}
