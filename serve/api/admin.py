"""Routes for the operator, under a key of their own; without `serve.admin_key` they do not exist.

With several API processes, pausing and the prefix cache concern the one core they share; aborting
reaches the requests of the process that answers.
"""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request, Response

from girih.serve.api.bodies import Body, ignored_header, read_body
from girih.serve.api.errors import json_response
from girih.serve.api.protocol import described
from girih.serve.api.state import Served, ServerState

router = APIRouter(prefix="/admin")
HIDDEN = ("api_keys", "admin_key")


class AbortRequest(Body):
    """Body of /admin/abort."""

    request_id: str | None = described("Whose requests to end; all when it is left out.")


def _served(request: Request) -> Served:
    state: ServerState = request.app.state.server
    return state.require(None)


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Make no further steps; requests wait with what they have."""
    await _served(request).engine.call("pause")
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Go on after a pause."""
    await _served(request).engine.call("resume")
    return json_response({"status": "running"})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    await _served(request).engine.call("reset_prefix_cache")
    return json_response({"status": "ok"})


@router.post("/abort")
async def abort(request: Request) -> Response:
    """End running requests; their clients get what there is, with finish reason "abort"."""
    body = await read_body(request, AbortRequest)
    count = _served(request).engine.abort(body.request_id)
    return json_response({"num_aborted": count}, headers=ignored_header(body))


@router.get("/config")
async def config(request: Request) -> Response:
    """Return the settings of the front end; keys are left out."""
    state: ServerState = request.app.state.server
    settings = dataclasses.asdict(state.config)
    shown = {name: value for name, value in settings.items() if name not in HIDDEN}
    return json_response({"serve": shown})
