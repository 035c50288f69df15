"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from girih import __version__
from girih.serve.http import openapi, reference
from girih.serve.http.admin import admin, metrics, web
from girih.serve.http.base.errors import install_error_handlers
from girih.serve.http.base.http_metrics import HttpMetrics
from girih.serve.http.base.middleware import AccessLog, Guard, RequestIds
from girih.serve.http.base.state import ServerState
from girih.serve.http.responses.routes import Responses

SHOWN_HEADERS = ("x-request-id", "x-girih-ignored", "x-girih-warnings", "retry-after")
"""Headers that scripts of other origins may read."""

Lifespan = Callable[[], AbstractAsyncContextManager[None]]


def create_app(state: ServerState, lifespan: Lifespan | None = None) -> FastAPI:
    """Return the application.

    Args:
        state: shared by all handlers; the model is put there when it is ready.
        lifespan: entered while the application runs (builds and closes the engine).
    """

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        if lifespan is None:
            yield
            return
        async with lifespan():
            yield

    app = FastAPI(
        title="girih", version=__version__, openapi_url=None, docs_url=None, lifespan=alive
    )
    app.state.server = state
    app.state.responses = Responses(state.config)
    install_error_handlers(app)
    routers = [*openapi.ROUTERS, *(m.router for m in (openapi, reference, metrics, web))]
    if state.config.admin_key is not None:
        routers.append(admin.router)
    for router in routers:
        _answer_head(router)
        app.include_router(router)
    # The one added last is outermost.
    app.add_middleware(Guard, config=state.config)
    app.add_middleware(HttpMetrics, seen=state.http_seen)
    if state.config.log_requests:
        app.add_middleware(AccessLog)
    app.add_middleware(RequestIds)
    if state.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
        )
    return app


def _answer_head(router: APIRouter) -> None:
    """Have HEAD answered as GET is; uvicorn leaves the body out."""
    for route in router.routes:
        if isinstance(route, Route) and "GET" in (route.methods or ()):
            route.methods = {*(route.methods or ()), "HEAD"}
