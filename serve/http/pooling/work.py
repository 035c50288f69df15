"""Shared by the four routes: from checked texts to the core's answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from girih.kernels.base.errors import RequestError
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.records.request import EngineRequest
from girih.serve.http.base.errors import ApiError, renamed_params
from girih.serve.http.base.state import Served, ServerState
from girih.serve.http.generation.protocol import refuse_for_messages
from girih.serve.http.generation.rendering import render_messages
from girih.serve.http.generation.requests import (
    LONG_BODY,
    Usage,
    refuse_endless,
    request_name,
    trace_headers,
)
from girih.serve.http.generation.sampling import check_priority, check_salt
from girih.serve.http.generation.streaming import collect, run_until_disconnect, submit_all
from girih.serve.http.pooling.protocol import PooledBody, TextsBody
from girih.serve.text.output_processor import Delta
from girih.serve.text.texts import PooledText, TextOptions, read_text

T = TypeVar("T")
SOURCES = ("messages", "text_2", "data_2", "documents", "items")


@dataclass(frozen=True)
class PooledWork:
    """One HTTP request on its way.

    Attributes:
        http: the request.
        body: its fields.
        state: of the server.
        served: the model.
    """

    http: Request
    body: PooledBody
    state: ServerState
    served: Served

    @property
    def source(self) -> str:
        """The field that the texts are of, for errors; of pairs the second text's."""
        given = (name for name in SOURCES if getattr(self.body, name, None) is not None)
        return next(given, "input")

    def check(self) -> None:
        """Raise `RequestError` for a field that cannot be obeyed."""
        for name in self.body.not_supported:
            if getattr(self.body, name) is not None:
                raise RequestError(f"{name} is not supported; use use_activation", param=name)
        check_priority(self.body.priority, self.served.policy)
        check_salt(self.body.cache_salt)

    def options(self, dimensions: int | None = None) -> TextOptions:
        """Return the text options that a body asks for."""
        body = self.body
        params = PoolingParams(dimensions=dimensions, use_activation=body.use_activation)
        marks = body.add_special_tokens is not False
        return TextOptions(body.truncate_prompt_tokens, marks, params)

    def check_count(self, name: str, count: int) -> None:
        """Raise `RequestError` when a field holds no text, or too many."""
        largest = self.state.config.max_prompts
        if not 1 <= count <= largest:
            raise RequestError(
                f"{name} has {count} entries; it must have 1 to {largest} (serve.max_prompts)",
                param=name,
            )

    def check_room(self, name: str, texts: Sequence[str]) -> None:
        """Raise `RequestError` for a text of a field that cannot fit, unless it is to be cut."""
        if self.body.truncate_prompt_tokens is None:
            with renamed_params({"prompt": name}):
                for text in texts:
                    refuse_endless(text, self.served)

    async def read(self, work: Callable[[], T]) -> T:
        """Tokenize; long bodies in a thread, so that other requests go on."""
        if len(await self.http.body()) > LONG_BODY:
            return await asyncio.to_thread(work)
        return work()

    async def run(self, texts: Sequence[PooledText]) -> list[Delta] | None:
        """The core's answers; None when the client went away.

        Raises:
            GirihError: the core takes no requests now, or not so many.
            ApiError: the model failed on a text, or an operator ended the request.
        """
        name, now = request_name(self.http, self.body.request_id), time.monotonic()
        requests = [
            EngineRequest(
                request_id=f"{name}-{place}-0-{uuid.uuid4().hex[:8]}",
                prompt_token_ids=text.token_ids,
                pooling=text.params,
                arrival_time=now,
                priority=self.body.priority or 0,
                cache_salt=self.body.cache_salt,
                trace=trace_headers(self.http),
            )
            for place, text in enumerate(texts)
        ]
        with renamed_params({"input": self.source}):
            streams = await submit_all(self.served.engine, requests)
        deltas = await run_until_disconnect(self.http, collect(streams))
        if deltas is not None and any(delta.finish_reason == "abort" for delta in deltas):
            raise ApiError(503, "the request was aborted by the server's operator", code="aborted")
        return deltas

    def head(self, prefix: str) -> dict[str, Any]:
        """The first fields of an answer."""
        return {
            "id": f"{prefix}-{self.http.state.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self.served.name,
        }


def usage_of(texts: Sequence[PooledText], deltas: Sequence[Delta]) -> dict[str, Any]:
    """Token counts of an answer."""
    usage = Usage(sum(len(text.token_ids) for text in texts))
    for place, delta in enumerate(deltas):
        usage.add(place, delta)
    return usage.body()


def read_inputs(
    body: TextsBody, work: PooledWork, dimensions: int | None = None
) -> list[PooledText]:
    """The texts of `input`, or the conversation of `messages`.

    Raises:
        RequestError: there is none, there are both, or one cannot be read.
    """
    if body.messages is not None:
        return [_conversation(body, work, dimensions)]
    refuse_for_messages(body, "add_special_tokens")
    given = body.input
    if given is None:
        raise RequestError(
            "input is missing; give a text, token ids or a list of these, or messages",
            param="input",
        )
    is_single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    inputs: list[Any] = [given] if is_single else list(given)
    work.check_count("input", len(inputs))
    work.check_room("input", [text for text in inputs if isinstance(text, str)])
    served, options = work.served, work.options(dimensions)
    return [read_text(text, served.tokenizer, served.facts, options) for text in inputs]


def _conversation(body: TextsBody, work: PooledWork, dimensions: int | None) -> PooledText:
    if body.input is not None:
        raise RequestError("input and messages are both given; leave one out", param="messages")
    served, config = work.served, work.state.config
    with renamed_params({"input": "messages"}):
        ids = render_messages(body, served, config, opens_answer=False)
        return read_text(ids, served.tokenizer, served.facts, work.options(dimensions))
