"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.serve.http.anthropic.blocks import BlockBuilder
from girih.serve.http.anthropic.protocol import (
    PARAMS,
    CountTokensRequest,
    MessagesRequest,
    as_chat,
)
from girih.serve.http.base.bodies import ignored_header
from girih.serve.http.base.errors import as_api_error, json_response, renamed_params
from girih.serve.http.base.state import open_request
from girih.serve.http.generation.chat_job import ChatChunk, ChatJob, start_chat
from girih.serve.http.generation.rendering import is_long, render_messages
from girih.serve.http.generation.sampling import check_temperature
from girih.serve.http.generation.streaming import KEEP_ALIVE, EventStream, event

router = APIRouter()
STOP_REASONS = {
    "length": "max_tokens",
    "abort": "max_tokens",  # the only name this API has for an answer that was cut off
    "tool_calls": "tool_use",
    "stop": "end_turn",
}


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state, body, served = await open_request(request, MessagesRequest)
    check_temperature(body.temperature, most=1)
    chat = as_chat(body)
    with renamed_params(PARAMS):
        job = await start_chat(request, chat, served, state, "msg_")
    writer = _MessageWriter(job)
    if body.stream:
        events = writer.events(state.config.keep_alive_seconds)
        return EventStream(events, job.streams, job.headers(body, body.sent_as))
    news = await job.whole(request)
    if news is None:
        return Response(status_code=499)
    return json_response(writer.whole(news[0]), headers=job.headers(body, body.sent_as))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Return how many tokens a conversation has as a prompt."""
    state, body, served = await open_request(request, CountTokensRequest)
    chat = as_chat(body)
    if is_long(chat):
        tokens = await asyncio.to_thread(render_messages, chat, served, state.config)
    else:
        tokens = render_messages(chat, served, state.config)
    headers = ignored_header(body, chat, body.sent_as)
    return json_response({"input_tokens": len(tokens)}, headers=headers)


class _MessageWriter:
    """Writes one message in both forms."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._builder = BlockBuilder()
        self._has_started = False

    def whole(self, news: ChatChunk) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        for _ in self._builder.push(news.parts):
            pass
        for _ in self._builder.finish():
            pass
        return {**self._message(), **self._ending(news)}

    async def events(self, keep_alive_seconds: float) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer, those of one piece of news together.

        The message starts with its first token: only then is known how much of the prompt came
        from the cache, and clients take the first event for that token.
        """
        try:
            async for news in self._job.news(keep_alive_seconds):
                if news is None:
                    yield _event("ping") if self._has_started else KEEP_ALIVE
                    continue
                yield b"".join(self._events_of(news))
        except Exception as error:  # the status line is sent: tell it in the stream
            yield _event("error", error=as_api_error(error).body()["error"])

    def _events_of(self, news: ChatChunk) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            yield _event("message_start", message=self._message())
        for name, fields in self._builder.push(news.parts):
            yield _event(name, **fields)
        if news.finish_reason is not None:
            for name, fields in self._builder.finish():
                yield _event(name, **fields)
            yield _event("message_delta", delta=self._ending(news), usage=self._usage())
            yield _event("message_stop")

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._job.plan.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.served.name,
            "content": self._builder.blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._job.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    def _ending(self, news: ChatChunk) -> dict[str, Any]:
        stop = news.delta.stop_reason
        reason = STOP_REASONS[news.finish_reason or "stop"]
        if reason == "end_turn" and self._builder.has_tool_use:
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reason, "stop_sequence": None}


def _event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\n".encode() + event({"type": name, **fields})
