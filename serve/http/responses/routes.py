"""POST, GET and DELETE /v1/responses, and the cancelling of one in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.kernels.base.errors import QueueFullError, RequestError
from girih.serve.config import ServeConfig
from girih.serve.http.base.errors import as_api_error, json_response, renamed_params
from girih.serve.http.base.state import open_request
from girih.serve.http.generation.chat_job import ChatChunk, ChatJob, start_chat
from girih.serve.http.generation.logprobs import LogprobsFormatter
from girih.serve.http.generation.sampling import check_temperature
from girih.serve.http.generation.streaming import KEEP_ALIVE, EventStream, event
from girih.serve.http.responses.background import BackgroundRuns
from girih.serve.http.responses.items import as_messages
from girih.serve.http.responses.output import OutputBuilder, new_id
from girih.serve.http.responses.protocol import PARAMS, SENT_AS, ResponsesRequest, as_chat
from girih.serve.http.responses.store import ResponseStore, StoredResponse

router = APIRouter()
INCOMPLETE = {"length": "max_output_tokens", "abort": "abort"}
"""Finish reasons of an answer that was cut off, and how the response gives them."""
MAX_PAGE = 100
CONTINUED = ("completed", "incomplete")
"""Status of a response that a later turn may go on from."""


class Responses:
    """The turns of one server.

    Attributes:
        stored: those that can be continued or read again.
        running: those that run without a client that waits.
    """

    def __init__(self, config: ServeConfig) -> None:
        # Several API processes would each know a part of the responses: then none are kept.
        kept = config.max_stored_responses if config.api_processes == 1 else 0
        self.stored = ResponseStore(kept, config.max_stored_bytes)
        self.running = BackgroundRuns()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answer input items, streamed or whole; the answer is kept for later turns."""
    state, body, served = await open_request(request, ResponsesRequest)
    kept = _kept(request)
    check_temperature(body.temperature)
    _check_background(body, kept, state.config.max_stored_responses)
    history = _history(body, kept.stored)
    opening = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = as_chat(body, opening + history)
    with renamed_params(PARAMS):
        job = await start_chat(request, chat, served, state, "resp_")
    # A client may send one x-request-id with several turns; each is kept.
    job.plan.response_id = kept.stored.free_id(job.plan.response_id)
    writer = _ResponseWriter(body, job, history, kept.stored)
    if body.stream:
        events = writer.events(state.config.keep_alive_seconds)
        return EventStream(events, job.streams, job.headers(body, SENT_AS))
    if body.background:
        begun = writer.begun()
        kept.running.start(job, writer.run())
        return json_response(begun, headers=job.headers(body, SENT_AS))
    news = await job.whole(request)
    if news is None:
        return Response(status_code=499)
    return json_response(writer.whole(news[0]), headers=job.headers(body, SENT_AS))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response, and end it if it still runs."""
    _store(request).get(response_id)
    await _kept(request).running.cancel(response_id)
    _store(request).delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """Return a stored response, as far as it is."""
    if request.query_params.get("stream") == "true":
        raise RequestError("a stored response is not streamed again; leave stream out", "stream")
    return json_response(_store(request).get(response_id).body)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that runs in the background; it keeps what it has so far."""
    body = _store(request).get(response_id).body
    if not body["background"]:
        raise RequestError(
            f"{response_id[:80]!r} does not run in the background; only such a response can be "
            "cancelled: close the connection of any other",
            param="response_id",
        )
    await _kept(request).running.cancel(response_id)
    return json_response(_store(request).get(response_id).body)


@router.get("/v1/responses/{response_id}/input_items")
async def get_input_items(request: Request, response_id: str) -> Response:
    """Return what a stored response answered, a page of it; the last item comes first."""
    items = _store(request).get(response_id).input_items
    asked = request.query_params
    order, after, limit = asked.get("order", "desc"), asked.get("after"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:80]!r}; it must be asc or desc", param="order")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise RequestError(f"limit is {limit[:80]!r}; it must be 1 to {MAX_PAGE}", param="limit")
    items = items[::-1] if order == "desc" else items
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"after is {after[:80]!r}, which is no item here", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    more = len(items) > len(page)
    return json_response({"object": "list", "data": page, "has_more": more, **ends})


def _kept(request: Request) -> Responses:
    kept: Responses = request.app.state.responses
    return kept


def _store(request: Request) -> ResponseStore:
    return _kept(request).stored


def _check_background(body: ResponsesRequest, kept: Responses, limit: int) -> None:
    if not body.background:
        return
    if body.stream:
        raise RequestError(
            "background and stream are both true; a response in the background is not streamed, "
            "ask GET /v1/responses/ID for it",
            param="background",
        )
    if body.store is False or not kept.stored.keeps_any:
        raise RequestError(
            "background is true, but the response would not be stored, so that nobody could read "
            "it (store is false, or serve.max_stored_responses is 0)",
            param="background",
        )
    if len(kept.running) >= limit:
        raise QueueFullError(
            f"{len(kept.running)} responses run in the background, serve.max_stored_responses "
            f"is {limit}: try again later"
        )


def _history(body: ResponsesRequest, store: ResponseStore) -> list[dict[str, Any]]:
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = store.get(body.previous_response_id, "previous_response_id")
        if found.messages is None:
            raise RequestError(
                f"the response {body.previous_response_id[:80]!r} is {found.body['status']}; only "
                f"one that is {' or '.join(CONTINUED)} can be continued",
                param="previous_response_id",
            )
        before = found.messages
    return [*before, *as_messages(body.input)]


class _ResponseWriter:
    """Writes one response in both forms, and keeps it."""

    def __init__(
        self,
        body: ResponsesRequest,
        job: ChatJob,
        history: list[dict[str, Any]],
        store: ResponseStore,
    ) -> None:
        self._body = body
        self._job = job
        self._history = history
        self._store = store
        self._output = OutputBuilder()
        self._logprobs = LogprobsFormatter(job.served.tokenizer, False, body.top_logprobs or 0)
        self._number = 0
        self._input_items = _input_items(body)

    def whole(self, news: ChatChunk) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        for _ in self._output.push(news.parts, self._logprobs_of(news)):
            pass
        for _ in self._output.finish(_status(news)):
            pass
        return self._finished(news)

    async def events(self, keep_alive_seconds: float) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        try:
            yield self._event("created", {"response": self._response("in_progress")})
            yield self._event("in_progress", {"response": self._response("in_progress")})
            async for news in self._job.news(keep_alive_seconds):
                if news is None:
                    yield KEEP_ALIVE
                    continue
                for name, fields in self._output.push(news.parts, self._logprobs_of(news)):
                    yield self._event(name, fields)
                if news.finish_reason is not None:
                    for name, fields in self._output.finish(_status(news)):
                        yield self._event(name, fields)
                    yield self._event(_status(news), {"response": self._finished(news)})
        except Exception as error:  # the status line is sent: tell it in the stream
            response = self._response("failed", error=_failure(error))
            yield self._event("failed", {"response": response})

    def begun(self) -> dict[str, Any]:
        """Return and store the body of an answer that runs in the background."""
        response = self._response("in_progress")
        self._keep(response)
        return response

    async def run(self) -> None:
        """Wait for the answer and store it, whatever becomes of it."""
        try:
            news = await self._job.unwatched()
            self.whole(news)
        except Exception as error:  # nobody waits: tell it to who asks
            self._keep(self._response("failed", error=_failure(error)))

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        kind = f"response.{name}"
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\n".encode() + event(body)

    def _logprobs_of(self, news: ChatChunk) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._logprobs.chat(news.delta.logprobs or [])["content"]
        return entries

    def _finished(self, news: ChatChunk) -> dict[str, Any]:
        status = _status(news)
        is_aborted = news.finish_reason == "abort"
        if is_aborted and self._body.background:
            status = "cancelled"
        reason = INCOMPLETE.get(news.finish_reason or "")
        details = None if reason is None or status == "cancelled" else {"reason": reason}
        response = self._response(status, usage=self._usage(), incomplete_details=details)
        if is_aborted and not self._body.background:
            response["store"] = False  # no later turn goes on from what an operator ended
        if response["store"]:
            self._keep(response)
        return response

    def _keep(self, response: dict[str, Any]) -> None:
        is_over = response["status"] in CONTINUED
        messages = [*self._history, self._output.as_message()] if is_over else None
        self._store.put(StoredResponse(response, self._input_items, messages))

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._job.num_reasoning_tokens()},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body, params = self._body, self._job.plan.params[0]
        text = body.text.format if body.text is not None else None
        effort = body.reasoning.effort if body.reasoning is not None else None
        return {
            "id": self._job.plan.response_id,
            "object": "response",
            "created_at": self._job.plan.created,
            "model": self._job.served.name,
            "status": status,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": body.store is not False and self._store.keeps_any,
            "temperature": params.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


def _failure(error: Exception) -> dict[str, Any]:
    return {"code": "server_error", "message": as_api_error(error).message}


def _status(news: ChatChunk) -> str:
    return "incomplete" if news.finish_reason in INCOMPLETE else "completed"


def _input_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]]
    if isinstance(body.input, str):
        part = {"type": "input_text", "text": body.input}
        items = [{"type": "message", "role": "user", "content": [part]}]
    else:
        items = body.input
    return [{**item, "id": _id_of(item)} for item in items]


def _id_of(item: dict[str, Any]) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else new_id("item")
