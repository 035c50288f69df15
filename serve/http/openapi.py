"""The OpenAPI document: every route, its body with examples, its answers and errors."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from girih import __version__
from girih.serve.http import answers
from girih.serve.http.admin import info
from girih.serve.http.anthropic import routes as messages
from girih.serve.http.anthropic.protocol import CountTokensRequest, MessagesRequest
from girih.serve.http.base.bodies import Body
from girih.serve.http.base.errors import json_response
from girih.serve.http.generation.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from girih.serve.http.openai import chat, completions, generate
from girih.serve.http.openai.generate import GenerateRequest
from girih.serve.http.openapi_links import LINKS, operation_id
from girih.serve.http.pooling import routes as pooling
from girih.serve.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from girih.serve.http.responses import routes as responses
from girih.serve.http.responses.protocol import ResponsesRequest

router = APIRouter()
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "A field is wrong; the message names it, the value seen, and what is allowed.",
    401: "A valid API key is needed.",
    404: "No such model or object.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON, or is compressed in an unknown way.",
    429: "The queue is full; try again later.",
    500: "The server failed.",
    503: "The server is loading, draining or dead; try again later.",
}
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
PAGE = [
    {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        ("limit", "Most items.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        ("order", "desc: the last first.", {"enum": ["asc", "desc"], "default": "desc"}),
        ("after", "The id of the item before the page.", {"type": "string"}),
    )
]
OF_BODIES = (408, 413, 415, 429)
ROUTERS = [m.router for m in (chat, completions, responses, messages, generate, pooling, info)]
"""Of the routes that the document describes."""
TAGS = {
    "Tokens": ("tokenize", "/inference/"),
    "Answers": ("/chat/", "completions", "/responses", "/messages"),
    "Vectors, scores, classes": ("embeddings", "/pooling", "classify", "score", "rerank"),
    "Server": ("",),
}
"""Group of operations → what is in their paths; the first that fits."""


@dataclass(frozen=True)
class RouteDoc:
    """The documentation of a route.

    Attributes:
        answer: shape of a 200.
        body: shape of the request body, None for none.
        example: a body that works.
        streams: whether `stream` turns the answer into events.
        is_open: whether no key is needed.
        tasks: what the model must be for, one of these; () for any.
    """

    answer: type[BaseModel]
    body: type[Body] | None = None
    example: Any = None
    streams: bool = False
    is_open: bool = False
    tasks: tuple[str, ...] = ()


_HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
ROUTES: dict[str, RouteDoc] = {
    "POST /v1/chat/completions": RouteDoc(
        answers.ChatCompletion, ChatCompletionRequest, {"messages": _HELLO}, streams=True
    ),
    "POST /v1/completions": RouteDoc(
        answers.Completion, CompletionRequest, {"prompt": "Once upon a time"}, streams=True
    ),
    "POST /v1/responses": RouteDoc(
        answers.ResponseObject, ResponsesRequest, {"input": "Why is the sky blue?"}, streams=True
    ),
    "GET /v1/responses/{response_id}": RouteDoc(answers.ResponseObject),
    "DELETE /v1/responses/{response_id}": RouteDoc(answers.DeletedResponse),
    "POST /v1/responses/{response_id}/cancel": RouteDoc(answers.ResponseObject),
    "GET /v1/responses/{response_id}/input_items": RouteDoc(answers.InputItems),
    "POST /v1/messages": RouteDoc(
        answers.Message, MessagesRequest, {"messages": _HELLO, "max_tokens": 64}, streams=True
    ),
    "POST /v1/messages/count_tokens": RouteDoc(
        answers.TokenCount, CountTokensRequest, {"messages": _HELLO}
    ),
    "POST /inference/v1/generate": RouteDoc(
        answers.Generation, GenerateRequest, {"token_ids": [1, 2, 3]}, streams=True
    ),
    "POST /v1/embeddings": RouteDoc(
        answers.EmbeddingList,
        EmbeddingRequest,
        {"input": ["Hello!", "Bye."]},
        tasks=("embed",),
    ),
    "POST /pooling": RouteDoc(
        answers.PooledList, PoolingRequest, {"input": "Hello!"}, tasks=("embed", "classify")
    ),
    **{
        f"POST {path}": RouteDoc(
            answers.ClassList, ClassifyRequest, {"input": "I like it."}, tasks=("classify",)
        )
        for path in ("/v1/classify", "/classify")
    },
    **{
        f"POST {path}": RouteDoc(
            answers.ScoreList,
            ScoreRequest,
            {"text_1": "A cat.", "text_2": ["A dog.", "A tax."]},
            tasks=("embed", "classify"),
        )
        for path in ("/v1/score", "/score")
    },
    **{
        f"POST {path}": RouteDoc(
            answers.Ranking,
            RerankRequest,
            {"query": "pets", "documents": ["A dog.", "A tax."], "top_n": 1},
            tasks=("embed", "classify"),
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    "POST /tokenize": RouteDoc(answers.Tokens, TokenizeRequest, {"prompt": "Hello!"}),
    "POST /v1/tokenize": RouteDoc(answers.Tokens, TokenizeRequest, {"prompt": "Hello!"}),
    "POST /detokenize": RouteDoc(answers.Text, DetokenizeRequest, {"tokens": [1, 2, 3]}),
    "POST /v1/detokenize": RouteDoc(answers.Text, DetokenizeRequest, {"tokens": [1, 2, 3]}),
    "GET /v1/models": RouteDoc(answers.ModelList),
    "GET /v1/models/{name}": RouteDoc(answers.ModelDetails),
    "GET /health": RouteDoc(answers.Health, is_open=True),
    "GET /ready": RouteDoc(answers.Readiness, is_open=True),
    "GET /ping": RouteDoc(answers.Health, is_open=True),
    "POST /ping": RouteDoc(answers.Health, is_open=True),
    "GET /load": RouteDoc(answers.ServerLoad, is_open=True),
    "GET /version": RouteDoc(answers.Version, is_open=True),
}


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request) -> Response:
    """Return the OpenAPI document."""
    app: FastAPI = request.app
    needs_key = bool(app.state.server.config.api_keys)
    return json_response(await asyncio.to_thread(make_document, needs_key))


@functools.cache
def make_document(needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        needs_key: whether the server was given API keys.
    """
    paths: dict[str, dict[str, Any]] = {}
    summaries = dict(_summaries())
    for name, route in ROUTES.items():
        method, _, path = name.partition(" ")
        paths.setdefault(path, {})[method.lower()] = {
            "summary": summaries[name],
            **_operation(method, path, route, needs_key),
        }
    components: dict[str, Any] = {"schemas": _schemas()}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "girih",
            "version": __version__,
            "description": "OpenAI-compatible serving. Fields that are not listed are ignored "
            "and named in the response header x-girih-ignored.",
        },
        "tags": [{"name": name} for name in TAGS],
        "paths": paths,
        "components": components,
    }


def _operation(method: str, path: str, route: RouteDoc, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(route.answer)}}
    if route.streams:
        content["text/event-stream"] = {"schema": EVENT}
    operation: dict[str, Any] = {
        "operationId": operation_id(f"{method} {path}"),
        "tags": [next(tag for tag, parts in TAGS.items() if any(part in path for part in parts))],
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    if f"{method} {path}" in LINKS:
        operation["responses"]["200"]["links"] = LINKS[f"{method} {path}"]
    if route.tasks:
        operation["description"] = f"For a model whose task is {' or '.join(route.tasks)}."
    if parameters := _parameters(path):
        operation["parameters"] = parameters
    if route.body is not None:
        media = {"schema": _ref(route.body), "example": route.example}
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    if needs_key and not route.is_open:
        operation["security"] = [{"key": []}]
    for status, text in ERRORS.items():
        if status in OF_BODIES and route.body is None:
            continue
        schema = _ref(answers.Error)
        if path == "/ready" and status == 503:
            schema = _ref(answers.Readiness)
        operation["responses"][str(status)] = {
            "description": text,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(path: str) -> list[dict[str, Any]]:
    name = path.partition("{")[2].partition("}")[0]
    if not name:
        return []
    in_path = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return [in_path, *(PAGE if path.endswith("/input_items") else ())]


def _summaries() -> Iterator[tuple[str, str]]:
    """ "METHOD path" of every handler, and the first line of what it says of itself."""
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods or ():
                name = f"{method} {route.path}".replace(":path", "")
                yield name, (route.endpoint.__doc__ or "").partition("\n")[0]


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}


def _schemas() -> dict[str, Any]:
    bodies = {route.body for route in ROUTES.values() if route.body is not None}
    models = [
        *((model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)),
        *((route.answer, "validation") for route in ROUTES.values()),
        (answers.Error, "validation"),
    ]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = definitions["$defs"]
    for body in bodies:
        properties = schemas[body.__name__]["properties"]
        for name in getattr(body, "not_supported", ()):
            properties.pop(name, None)
    return schemas
