"""POST /v1/embeddings, /v1/classify, /v1/score, /v1/rerank (and their shorter names), /pooling."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.bodies import ignored_header
from girih.serve.http.base.errors import json_response, renamed_params
from girih.serve.http.base.state import open_request
from girih.serve.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from girih.serve.http.pooling.work import PooledWork, read_inputs, usage_of
from girih.serve.text.texts import (
    ScorePlan,
    check_dimensions,
    embedding_of,
    label_of,
    match_pairs,
    plan_scores,
    pooling_of,
    vector_of,
)

router = APIRouter()
GONE = 499  # the client went away: nobody reads the answer
SCORING = ("embed", "classify")


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Embed texts."""
    state, body, served = await open_request(request, EmbeddingRequest, ("embed",))
    work = PooledWork(request, body, state, served)
    return await _vectors(work, body, lambda value: {"object": "embedding", "embedding": value})


@router.post("/pooling")
async def pooling(request: Request) -> Response:
    """Return what the model makes of texts: embeddings, or values of labels."""
    state, body, served = await open_request(request, PoolingRequest, SCORING)
    if body.task not in (None, served.facts.task):
        raise RequestError(
            f"task is {body.task[:80]!r}, but the model's is {served.facts.task!r}; leave it out",
            param="task",
        )
    work = PooledWork(request, body, state, served)
    return await _vectors(work, body, lambda value: {"object": "pooling", "data": value})


async def _vectors(
    work: PooledWork, body: EmbeddingRequest, as_entry: Callable[[Any], dict[str, Any]]
) -> Response:
    """Answer with a vector per text; `as_entry` makes an entry of `data` out of one."""
    pooling = pooling_of(work.served.facts)
    work.check()
    _check_format(body.encoding_format)
    check_dimensions(body.dimensions, pooling)
    texts = await work.read(lambda: read_inputs(body, work, body.dimensions))
    deltas = await work.run(texts)
    if deltas is None:
        return Response(status_code=GONE)
    width = body.dimensions or pooling.width

    def shown(pooled: bytes) -> Any:
        if body.encoding_format == "base64":
            return base64.b64encode(pooled).decode()
        return embedding_of(pooled, pooling, width)

    data = [
        {**as_entry(shown(delta.pooled or b"")), "index": index}
        for index, delta in enumerate(deltas)
    ]
    answer = {**work.head("embd"), "usage": usage_of(texts, deltas), "data": data}
    return json_response(answer, headers=ignored_header(body))


@router.post("/v1/classify")
@router.post("/classify")
async def classify(request: Request) -> Response:
    """Classify texts."""
    state, body, served = await open_request(request, ClassifyRequest, ("classify",))
    work, pooling = PooledWork(request, body, state, served), pooling_of(served.facts)
    work.check()
    texts = await work.read(lambda: read_inputs(body, work))
    deltas = await work.run(texts)
    if deltas is None:
        return Response(status_code=GONE)
    data = []
    for index, delta in enumerate(deltas):
        probs = vector_of(delta.pooled or b"")
        label = label_of(probs, pooling)
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
    answer = {**work.head("classify"), "data": data, "usage": usage_of(texts, deltas)}
    return json_response(answer, headers=ignored_header(body))


@router.post("/v1/score")
@router.post("/score")
async def score(request: Request) -> Response:
    """Score texts against others."""
    state, body, served = await open_request(request, ScoreRequest, SCORING)
    work = PooledWork(request, body, state, served)
    work.check()
    name, pairs = _pairs(body)
    work.check_count("text_2", len(pairs))
    scored = await _score(work, pairs, name)
    if scored is None:
        return Response(status_code=GONE)
    scores, usage = scored
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    answer = {**work.head("score"), "data": data, "usage": usage}
    return json_response(answer, headers=ignored_header(body))


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(request: Request) -> Response:
    """Order documents by how well they fit a query."""
    state, body, served = await open_request(request, RerankRequest, SCORING)
    work = PooledWork(request, _as_truncated(body), state, served)
    work.check()
    query, documents = _ranked(body)
    work.check_count("documents", len(documents))
    scored = await _score(work, [(query, document) for document in documents], "query")
    if scored is None:
        return Response(status_code=GONE)
    scores, usage = scored
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in best[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    head = work.head("rerank")
    answer = {"id": head["id"], "model": head["model"], "results": results, "usage": usage}
    return json_response(answer, headers=ignored_header(body))


async def _score(
    work: PooledWork, pairs: list[tuple[str, str]], first: str
) -> tuple[list[float], dict[str, Any]] | None:
    """Scores and usage; None when the client went away. `first`: the field of the first texts."""
    served, options = work.served, work.options()

    def plan() -> ScorePlan:
        work.check_room(first, [text for text, _ in pairs])
        work.check_room(work.source, [text for _, text in pairs])
        with renamed_params({"prompt": work.source, "input": work.source}):
            return plan_scores(pairs, served.tokenizer, served.facts, options)

    planned = await work.read(plan)
    deltas = await work.run(planned.texts)
    if deltas is None:
        return None
    scores = planned.scores([delta.pooled or b"" for delta in deltas])
    return scores, usage_of(planned.texts, deltas)


def _check_format(wanted: str | None) -> None:
    if wanted not in (None, "float", "base64"):
        raise RequestError(
            f"encoding_format is {wanted[:80]!r}; it must be float or base64",
            param="encoding_format",
        )


def _pairs(body: ScoreRequest) -> tuple[str, list[tuple[str, str]]]:
    """The field of the first texts, and the texts to score, whatever names their fields have."""
    first = {n: v for n in ("text_1", "data_1", "queries") if (v := getattr(body, n)) is not None}
    second = {
        n: v
        for n in ("text_2", "data_2", "documents", "items")
        if (v := getattr(body, n)) is not None
    }
    for found, wanted in ((first, "text_1"), (second, "text_2")):
        if len(found) != 1:
            given = ", ".join(found) or "nothing"
            raise RequestError(
                f"{given} is given for {wanted}; give text_1 and text_2 (or data_1 and data_2, "
                "queries and documents), each once",
                param=wanted,
            )
    (name_1, texts_1), (name_2, texts_2) = *first.items(), *second.items()
    return name_1, match_pairs(texts_1, texts_2, (name_1, name_2))


def _ranked(body: RerankRequest) -> tuple[str, list[str]]:
    if body.query is None or body.documents is None:
        missing = "query" if body.query is None else "documents"
        raise RequestError(f"{missing} is missing; give a query and documents", param=missing)
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n is {body.top_n}; it must be 0 (all) or more", param="top_n")
    documents = []
    for index, document in enumerate(body.documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"documents[{index}] has no text; give a string or an object with the field 'text'",
                param="documents",
            )
        documents.append(text)
    return body.query, documents


def _as_truncated(body: RerankRequest) -> RerankRequest:
    """The body with `max_tokens_per_doc` under its usual name."""
    limit = body.max_tokens_per_doc
    if limit is None or body.truncate_prompt_tokens is not None:
        return body
    return body.model_copy(update={"truncate_prompt_tokens": limit})
