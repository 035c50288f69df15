"""One conversation being answered: what chat completions, responses and messages share.

ChatCompletionRequest ─▶ start_chat ─▶ ChatJob ─▶ ChatChunk, streamed or whole ─▶ a writer
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from girih.serve.engine.async_engine import RequestStream
from girih.serve.http.base.bodies import Body, ignored_header
from girih.serve.http.base.errors import renamed_params
from girih.serve.http.base.state import Served, ServerState
from girih.serve.http.generation.chat_form import ChatForm, formats_of
from girih.serve.http.generation.protocol import ChatCompletionRequest
from girih.serve.http.generation.rendering import is_long, render_messages, template_of
from girih.serve.http.generation.requests import Plan, Usage, make_plan, truncate_prompt
from girih.serve.http.generation.sampling import (
    chat_logprobs,
    check_priority,
    refuse_with_stream,
    sampling_fields,
)
from girih.serve.http.generation.streaming import (
    close_all,
    collect,
    interleave,
    raise_if_failed,
    run_until_disconnect,
    submit_all,
)
from girih.serve.text.chat_messages import damaged_calls, plain_message
from girih.serve.text.output_processor import Delta
from girih.serve.text.parsers.parts import ChatDelta, ChatParser
from girih.serve.text.sampling_defaults import check_room

MAX_WARNINGS = 20


@dataclass
class ChatChunk:
    """A new chunk of one choice.

    Attributes:
        index: which choice.
        delta: text, tokens, logprobs.
        parts: the same text split into content, reasoning and tool calls.
        finish_reason: set on the last news of the choice.
    """

    index: int
    delta: Delta
    parts: ChatDelta = field(default_factory=ChatDelta)
    finish_reason: str | None = None


class ChatJob:
    """The requests of one conversation while they run.

    Args:
        body: what was asked.
        served: the model.
        plan: the requests.
        streams: their outputs, one per choice.
        form: how the text of a choice is read.
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        served: Served,
        plan: Plan,
        streams: Sequence[RequestStream],
        form: ChatForm,
    ) -> None:
        self.body = body
        self.served = served
        self.plan = plan
        self.streams = streams
        self.usage = Usage(len(plan.prompts[0]))
        self.form = form
        make_parser = form.parser_factory(plan.prompts[0])
        self._parsers: list[ChatParser] = [make_parser() for _ in streams]
        self._called = [False] * len(streams)
        self._reasoning = [""] * len(streams)

    def headers(self, body: Body, sent_as: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return what the response's headers tell of the request that the client sent.

        Args:
            body: as it was sent; the chat request may have been made from it.
            sent_as: field of the chat request → field of `body`.
        """
        ignored = ignored_header(body, self.body, sent_as)
        places = damaged_calls(
            [
                plain_message(message, index) if message.get("tool_calls") else {}
                for index, message in enumerate(self.body.messages or ())
            ]
        )
        if not places:
            return ignored
        text = "; ".join(f"{place} is not a JSON object" for place in places[:MAX_WARNINGS])
        return {**ignored, "x-girih-warnings": text}

    def close(self) -> None:
        """Abort what still runs."""
        close_all(self.streams)

    def abort(self) -> None:
        """End what still runs; who reads gets what there is, with finish reason "abort"."""
        self.served.engine.end(self.streams)

    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, counted on its text."""
        encode = self.served.tokenizer.encode
        return sum(len(encode(text, add_special_tokens=False)) for text in self._reasoning if text)

    def usage_body(self) -> dict[str, Any]:
        """Return the `usage` object, with the reasoning's share when there is some."""
        body = self.usage.body()
        if any(self._reasoning):
            body["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens()}
        return body

    async def whole(self, http: Request) -> list[ChatChunk] | None:
        """Wait for every choice; None when the client went away.

        Raises:
            ApiError: one of them failed in the engine.
        """
        deltas = await run_until_disconnect(http, collect(self.streams))
        if deltas is None:
            return None
        return [self._take(index, delta) for index, delta in enumerate(deltas)]

    async def unwatched(self) -> ChatChunk:
        """Wait for the one choice of a request whose client does not.

        Raises:
            ApiError: it failed in the engine.
        """
        [delta] = await collect(self.streams)
        return self._take(0, delta)

    async def news(self, keep_alive_seconds: float) -> AsyncIterator[ChatChunk | None]:
        """Yield news as they come; None after a silence.

        Raises:
            ApiError: one of the choices failed in the engine.
        """
        interval = self.body.stream_interval or 1
        async for item in interleave(self.streams, keep_alive_seconds, interval):
            if item is None:
                yield None
                continue
            index, delta = item
            raise_if_failed(delta)
            yield self._take(index, delta)

    def _take(self, index: int, delta: Delta) -> ChatChunk:
        self.usage.add(0, delta)
        parser = self._parsers[index]
        parts = parser.push(delta.text, delta.token_ids)
        if delta.finish_reason is not None:
            parts.merge(parser.finish())
        self._called[index] |= bool(parts.tool_calls)
        self._reasoning[index] += parts.reasoning
        reason = delta.finish_reason
        if reason == "stop" and self._called[index]:
            reason = "tool_calls"
        return ChatChunk(index, delta, parts, reason)


async def start_chat(
    http: Request, body: ChatCompletionRequest, served: Served, state: ServerState, prefix: str
) -> ChatJob:
    """Check a conversation and hand it to the engine.

    Args:
        http: the HTTP request.
        body: the conversation and its settings.
        served: the model.
        state: the server's settings.
        prefix: of the response id.

    Raises:
        GirihError: it is refused.
    """
    with renamed_params({"prompt": "messages"}):
        if is_long(body):
            plan, form = await asyncio.to_thread(_plan, http, body, served, state, prefix)
        else:
            plan, form = _plan(http, body, served, state, prefix)
        streams = await submit_all(served.engine, plan.requests)
    return ChatJob(body, served, plan, streams, form)


def _plan(
    http: Request, body: ChatCompletionRequest, served: Served, state: ServerState, prefix: str
) -> tuple[Plan, ChatForm]:
    config = state.config
    refuse_with_stream(body)
    fields = sampling_fields(body, served.tokenizer, state.config)
    fields["logprobs"] = chat_logprobs(body, state.config)
    wanted = body.max_completion_tokens
    fields["max_tokens"] = body.max_tokens if wanted is None else wanted
    prompt = truncate_prompt(
        render_messages(body, served, config),
        body.truncate_prompt_tokens,
        served.max_model_len - 1,
    )
    template = template_of(body, served, config)
    formats = formats_of(template, config.tool_parser, config.reasoning_parser)
    form = ChatForm(body, served.tokenizer, formats)
    fields["structured"] = form.structured(fields["structured"], prompt)
    if form.needs_control_tokens:
        fields["skip_special_tokens"] = False
    sent = "max_tokens" if wanted is None else "max_completion_tokens"
    with renamed_params({"max_tokens": sent}):
        params = served.defaults.build(fields, max_tokens=None)
        check_priority(body.priority, served.policy)
        check_room(len(prompt), params.max_tokens, served.max_model_len)
    return make_plan(http, body, served, [prompt], params, prefix), form
