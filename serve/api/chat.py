"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.kernels.errors import RequestError
from girih.serve.api.errors import as_api_error, json_response
from girih.serve.api.generation import Plan, Usage, make_plan, truncate_prompt
from girih.serve.api.logprobs import LogprobsFormatter
from girih.serve.api.protocol import ChatCompletionRequest, ignored_header, parse_body
from girih.serve.api.sampling import (
    chat_logprobs,
    check_effective,
    refuse_with_stream,
    sampling_fields,
)
from girih.serve.api.state import Served, ServerState
from girih.serve.api.streaming import (
    DONE,
    KEEP_ALIVE,
    EventStream,
    collect,
    event,
    interleave,
    raise_if_failed,
    run_until_disconnect,
    submit_all,
)
from girih.serve.async_engine import RequestStream
from girih.serve.output_processor import Delta
from girih.serve.sampling_defaults import check_room

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state: ServerState = request.app.state.server
    state.require(None)
    body = parse_body(ChatCompletionRequest, await request.body())
    served = state.require(body.model)
    plan = _plan(request, body, served, state)
    streams = await submit_all(served.engine, plan.requests)
    writer = _ChatWriter(body, served, plan)
    if body.stream:
        chunks = writer.chunks(streams, state.config.keep_alive_seconds)
        return EventStream(chunks, streams, ignored_header(body))
    deltas = await run_until_disconnect(request, collect(streams))
    if deltas is None:
        return Response(status_code=499)
    return json_response(writer.whole(deltas), headers=ignored_header(body))


def _plan(http: Request, body: ChatCompletionRequest, served: Served, state: ServerState) -> Plan:
    refuse_with_stream(body)
    fields = sampling_fields(body, served.tokenizer, state.config)
    fields["logprobs"] = chat_logprobs(body, state.config)
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = body.max_completion_tokens
    elif body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    params = served.defaults.build(fields, max_tokens=None)
    check_effective(params, body.priority, served.policy)
    prompt = truncate_prompt(
        render_messages(body, served), body.truncate_prompt_tokens, served.max_model_len
    )
    check_room(len(prompt), params.max_tokens, served.max_model_len)
    return make_plan(http, body, served, [prompt], params, "chatcmpl-")


def render_messages(body: Any, served: Served) -> list[int]:
    """Return the token ids of a body's conversation.

    Raises:
        RequestError: no messages, or the chat template refuses them.
    """
    if not body.messages:
        raise RequestError("messages is empty; it must have at least one", param="messages")
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    variables = body.chat_template_kwargs or {}
    reserved = {"messages", "special_tokens", "add_generation_prompt", "continue_final_message"}
    if reserved & set(variables):
        raise RequestError(
            f"chat_template_kwargs sets {sorted(reserved & set(variables))}, which have fields of "
            "their own",
            param="chat_template_kwargs",
        )
    text = served.tokenizer.render_chat(
        body.messages,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        **variables,
    )
    return served.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))


class _ChatWriter:
    """Writes the answer to one request in both forms."""

    def __init__(self, body: ChatCompletionRequest, served: Served, plan: Plan) -> None:
        self._body = body
        self._plan = plan
        self._head = {
            "id": plan.response_id,
            "created": plan.created,
            "model": served.name,
            "system_fingerprint": served.key,
        }
        self._logprobs = LogprobsFormatter(
            served.tokenizer, bool(body.return_tokens_as_token_ids), body.top_logprobs or 0
        )
        self._prompt_logprobs = LogprobsFormatter(
            served.tokenizer, False, body.prompt_logprobs or 0
        )
        self._usage = Usage(len(plan.prompts[0]))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        for delta in deltas:
            self._usage.add(0, delta)
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(*pair) for pair in enumerate(deltas)],
            "usage": self._usage.body(),
        }
        if deltas[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs.prompt(deltas[0].prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._plan.prompts[0]
        return body

    async def chunks(
        self, streams: Sequence[RequestStream], keep_alive_seconds: float
    ) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        try:
            for index in range(len(streams)):
                yield event(self._first_chunk(index))
            interval = self._body.stream_interval or 1
            async for item in interleave(streams, keep_alive_seconds, interval):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                index, delta = item
                raise_if_failed(delta)
                self._usage.add(0, delta)
                yield event(self._chunk([self._delta_choice(index, delta)]))
            options = self._body.stream_options
            if options is not None and options.include_usage:
                yield event({**self._chunk([]), "usage": self._usage.body()})
        except Exception as error:  # the status line is sent: tell it in the stream
            yield event(as_api_error(error).body())
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        options = self._body.stream_options
        if options is not None and options.include_usage and options.continuous_usage_stats:
            chunk["usage"] = self._usage.body()
        return chunk

    def _first_chunk(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk([choice])
        if self._body.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = self._plan.prompts[0]
        return chunk

    def _delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._ending(index, delta)
        choice["delta"] = {"content": delta.text} if delta.text else {}
        return choice

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._ending(index, delta)
        choice["message"] = {"role": "assistant", "content": delta.text, "refusal": None}
        choice["stop_reason"] = delta.stop_reason
        return choice

    def _ending(self, index: int, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None if delta.logprobs is None else self._logprobs.chat(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice
