"""Routes for the operator, under a key of their own; without `serve.admin_key` they do not exist.

With several API processes, pausing and the prefix cache concern the one core they share; aborting
reaches the requests of the process that answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from girih.serve.engine.async_engine import AsyncEngine
from girih.serve.http.base.bodies import Body, ignored_header, read_body
from girih.serve.http.base.errors import ApiError, json_response
from girih.serve.http.base.state import Served, ServerState
from girih.serve.http.generation.protocol import described

router = APIRouter(prefix="/admin")
POLL_SECONDS = 0.05
HIDDEN = ("api_keys", "admin_key")


class ReloadRequest(Body):
    """Body of /admin/reload_weights."""

    path: str | None = described("Model source; the present files again when it is left out.")
    mode: str | None = described('What becomes of unfinished requests: "refuse", "wait", "abort".')


class AbortRequest(Body):
    """Body of /admin/abort."""

    request_id: str | None = described("Whose requests to end; all when it is left out.")


def _served(request: Request) -> Served:
    state: ServerState = request.app.state.server
    return state.require(None)


def _running(request: Request) -> Served:
    """The model, also while the server drains: its requests still run then."""
    state: ServerState = request.app.state.server
    return state.served or state.require(None)


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Make no further steps; requests wait with what they have."""
    await _running(request).engine.call("pause")
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Go on after a pause."""
    await _running(request).engine.call("resume")
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
    count = _running(request).engine.abort(body.request_id)
    return json_response({"num_aborted": count}, headers=ignored_header(body))


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give up weights and KV cache (?level=1), compiled code too (?level=2), until /admin/wake.

    ?mode= says what becomes of unfinished requests: "refuse" (default), "wait" or "abort".
    """
    asked = request.query_params
    level = asked.get("level", "1")
    mode = asked.get("mode", "refuse")
    number = int(level) if level.isdecimal() and len(level) < 10 else level
    state = await _ask(_served(request).engine, "sleep", level=number, mode=mode)
    found = state["sleep_level"]  # 0: woken while it waited
    return json_response({"status": "asleep" if found else "awake", "level": found})


@router.post("/wake")
async def wake(request: Request) -> Response:
    """Take back what a sleep gave up."""
    await _ask(_served(request).engine, "wake")
    return json_response({"status": "awake"})


@router.post("/reload_weights")
async def reload_weights(request: Request) -> Response:
    """Load other weights of the same model; cached prefixes are forgotten."""
    body = await read_body(request, ReloadRequest)
    engine = _served(request).engine
    await _ask(engine, "reload_weights", path=body.path, mode=body.mode or "refuse")
    return json_response({"status": "ok"}, headers=ignored_header(body))


@router.post("/profile/start")
async def profile_start(request: Request) -> Response:
    """Record the steps from now on (needs `runtime.profile_dir`)."""
    await _served(request).engine.call("profile_start")
    return json_response({"status": "profiling"})


@router.post("/profile/stop")
async def profile_stop(request: Request) -> Response:
    """End recording; the answer names the trace, a file on the server's machine."""
    path = await _running(request).engine.call("profile_stop")
    return json_response({"status": "ok", "file": path})


async def _ask(engine: AsyncEngine, method: str, **arguments: Any) -> dict[str, Any]:
    """Have the core do something, and wait while it waits for running requests to end.

    Raises:
        BusyError, RequestError: it refuses.
        ApiError: it failed after the wait.
    """
    state = msgspec.to_builtins(await engine.call(method, **arguments))
    while state["pending"] is not None:
        await asyncio.sleep(POLL_SECONDS)
        state = msgspec.to_builtins(await engine.call("operation"))
    if state["error"] is not None:
        raise ApiError(400, state["error"], code="failed")
    return dict(state)


@router.get("/config")
async def config(request: Request) -> Response:
    """Return the settings of the front end; keys are left out."""
    state: ServerState = request.app.state.server
    settings = dataclasses.asdict(state.config)
    shown = {name: value for name, value in settings.items() if name not in HIDDEN}
    return json_response({"serve": shown})
