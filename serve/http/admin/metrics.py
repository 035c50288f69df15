"""Metrics, for whoever runs the server."""

from __future__ import annotations

import asyncio
import re

from fastapi import APIRouter, Request, Response

from girih.kernels.base.errors import EngineError
from girih.serve.http.base.state import ServerState

router = APIRouter()

METRICS_SECONDS = 5.0  # a core that does not answer by then is reported as down
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OWN_NAME = re.compile(r"^((?:# (?:HELP|TYPE) )?)girih:", re.MULTILINE)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format; only `engine_up 0` while there is no engine."""
    state: ServerState = request.app.state.server
    text = await _engine_metrics(state)
    prefix = state.config.metrics.prefix.replace("\\", r"\\")
    return Response(_OWN_NAME.sub(rf"\g<1>{prefix}", text), media_type=CONTENT_TYPE)


async def _engine_metrics(state: ServerState) -> str:
    up = "# HELP girih:engine_up Whether the engine answers.\n# TYPE girih:engine_up gauge\n"
    if state.served is None:
        return f"{up}girih:engine_up 0\n"
    seen = state.http_seen.take()
    try:
        answer = state.served.engine.call("metrics", http=seen)
        text: str = await asyncio.wait_for(answer, METRICS_SECONDS)
    except (EngineError, TimeoutError):
        return f"{up}girih:engine_up 0\n"
    return f"{text}{up}girih:engine_up 1\n"
