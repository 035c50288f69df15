"""Routes that describe the server: health, readiness, version, models, tokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from girih import __version__
from girih.graph.files.task import TASKS
from girih.kernels.base.errors import RequestError
from girih.runtime.records.pooling_params import PoolingFacts
from girih.serve.config import ServeConfig
from girih.serve.http.base.bodies import ignored_header
from girih.serve.http.base.errors import RETRY_SECONDS, ApiError, json_response
from girih.serve.http.base.state import Served, ServerState, open_request
from girih.serve.http.generation.protocol import (
    DetokenizeRequest,
    TokenizeRequest,
    refuse_for_messages,
)
from girih.serve.http.generation.rendering import render_messages
from girih.serve.http.generation.requests import LONG_BODY, refuse_endless
from girih.serve.text.prompts import check_prompt_ids

router = APIRouter()


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process makes progress (loading too); 503 when the engine died or is stuck."""
    alive, detail = _state(request).health()
    if alive:
        return json_response({"status": "ok"})
    raise ApiError(503, detail, code="unhealthy")


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when requests are answered; 503 with progress until then."""
    state = _state(request)
    body = state.readiness()
    if state.is_ready:
        body |= await state.engine_readiness()
        if body["status"] == "ready":
            return json_response(body)
    return json_response(body, 503, {"retry-after": str(RETRY_SECONDS)})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health, but 503 until the model is loaded: SageMaker sends requests after a 200."""
    if _state(request).served is None:
        raise ApiError(
            503, "the model is not loaded yet; /ready tells how far it is", code="loading"
        )
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Response:
    """Return how many requests are being answered, by this process if there are several."""
    state = _state(request)
    in_background = len(request.app.state.responses.running)
    return json_response({"server_load": state.http_seen.num_working + in_background})


@router.get("/version")
async def version() -> Response:
    """Return girih's version."""
    return json_response({"version": __version__})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the served model, once under each of its names."""
    served = _state(request).require(None)
    return json_response({"object": "list", "data": [_card(served, n) for n in served.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe the served model: its sampling defaults, or how it pools, and the limits."""
    state = _state(request)
    served = state.require(name)
    card = {**_card(served, name), "limits": _limits(served, state)}
    pooling = served.facts.pooling
    if pooling is not None:
        return json_response({**card, "default_sampling": None, "pooling": _pooling(pooling)})
    sampling = {**served.defaults.values, "max_tokens": served.defaults.max_tokens}
    return json_response({**card, "default_sampling": sampling, "pooling": None})


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the ids of a text or a conversation."""
    state, body, served = await open_request(request, TokenizeRequest, TASKS)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if len(await request.body()) > LONG_BODY:
        tokens = await asyncio.to_thread(_tokens_of, body, served, state.config)
    else:
        tokens = _tokens_of(body, served, state.config)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": served.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [served.tokenizer.token_text(token_id) for token_id in tokens]
    return json_response(answer, headers=ignored_header(body))


def _tokens_of(body: TokenizeRequest, served: Served, config: ServeConfig) -> list[int]:
    if body.prompt is not None:
        refuse_for_messages(body, "add_special_tokens")
        refuse_endless(body.prompt, served)
        return served.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    return render_messages(body, served, config)


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of ids."""
    _, body, served = await open_request(request, DetokenizeRequest, TASKS)
    if body.tokens:
        check_prompt_ids(body.tokens, served.vocab_size)
    text = served.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))
    return json_response({"prompt": text}, headers=ignored_header(body))


def _limits(served: Served, state: ServerState) -> dict[str, Any]:
    config = state.config
    return {
        "max_model_len": served.max_model_len,
        "vocab_size": served.vocab_size,
        "prompts": config.max_prompts,
        "choices": config.max_choices,
        "n": config.max_n,
        "stop": config.max_stop_strings,
        "logprobs": config.max_logprobs,
        "body_bytes": config.max_body_bytes,
    }


def _pooling(pooling: PoolingFacts) -> dict[str, Any]:
    return {
        "mode": pooling.mode,
        "width": pooling.width,
        "activation": pooling.activation,
        "is_matryoshka": pooling.can_cut,
        "dimensions": list(pooling.dimensions),
        "labels": list(pooling.labels),
    }


def _card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "girih",
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
        "task": served.facts.task,
        "has_chat_template": bool(served.tokenizer.chat_templates),
    }
