"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.errors import as_api_error, json_response
from girih.serve.http.base.state import open_request
from girih.serve.http.generation.chat_job import ChatChunk, ChatJob, start_chat
from girih.serve.http.generation.logprobs import LogprobsFormatter
from girih.serve.http.generation.protocol import ChatCompletionRequest, StreamOptions
from girih.serve.http.generation.sampling import check_temperature
from girih.serve.http.generation.streaming import DONE, KEEP_ALIVE, EventStream, event
from girih.serve.text.chat_messages import plain_message
from girih.serve.text.parsers.parts import ToolCallDelta

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state, body, served = await open_request(request, ChatCompletionRequest)
    check_temperature(body.temperature)
    echo = _echoed_text(body)
    job = await start_chat(request, body, served, state, "chatcmpl-")
    writer = _ChatWriter(job, echo)
    if body.stream:
        chunks = writer.chunks(state.config.keep_alive_seconds)
        return EventStream(chunks, job.streams, job.headers(body))
    news = await job.whole(request)
    if news is None:
        return Response(status_code=499)
    return json_response(writer.whole(news), headers=job.headers(body))


def _echoed_text(body: ChatCompletionRequest) -> str:
    if not body.echo:
        return ""
    messages = body.messages or []
    if not messages or messages[-1].get("role") != "assistant":
        raise RequestError(
            "echo is true, but the last message is not the assistant's, so there is nothing to "
            "repeat; leave it out",
            param="echo",
        )
    return str(plain_message(messages[-1], len(messages) - 1)["content"])


class _ChatWriter:
    """Writes the answer to one request in both forms."""

    def __init__(self, job: ChatJob, echo: str) -> None:
        self._job = job
        self._body = job.body
        self._options = job.body.stream_options or StreamOptions()
        self._plan = job.plan
        self._echo = echo
        self._head = {
            "id": job.plan.response_id,
            "created": job.plan.created,
            "model": job.served.name,
            "system_fingerprint": job.served.key,
        }
        tokenizer = job.served.tokenizer
        self._logprobs = LogprobsFormatter(
            tokenizer, bool(self._body.return_tokens_as_token_ids), self._body.top_logprobs or 0
        )
        self._prompt_logprobs = LogprobsFormatter(tokenizer, False, self._body.prompt_logprobs or 0)

    def whole(self, choices: Sequence[ChatChunk]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(news) for news in choices],
            "usage": self._job.usage_body(),
        }
        prompt_logprobs = choices[0].delta.prompt_logprobs
        if prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs.prompt(prompt_logprobs)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self._plan.prompts[0]
        return body

    async def chunks(self, keep_alive_seconds: float) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        begun: set[int] = set()
        try:
            async for news in self._job.news(keep_alive_seconds):
                if news is None:
                    yield KEEP_ALIVE
                    continue
                # The role goes with the first token, as one write: clients take it for that token.
                role = b"" if news.index in begun else event(self._first_chunk(news.index))
                begun.add(news.index)
                yield role + event(self._chunk([self._delta_choice(news)]))
            if self._options.include_usage:
                yield event({**self._chunk([]), "usage": self._job.usage_body()})
        except Exception as error:  # the status line is sent: tell it in the stream
            yield event(as_api_error(error).body())
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        # Reasoning is counted once, in the end.
        return {**chunk, **self._job.usage.of_chunk(self._options)}

    def _first_chunk(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._chunk([choice])
        if self._body.return_token_ids and index == 0:
            chunk["prompt_token_ids"] = self._plan.prompts[0]
        return chunk

    def _delta_choice(self, news: ChatChunk) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        delta |= self._shown_reasoning(news)
        if news.parts.content:
            delta["content"] = news.parts.content
        if news.parts.tool_calls:
            delta["tool_calls"] = [_call_piece(piece) for piece in news.parts.tool_calls]
        return {**self._ending(news), "delta": delta}

    def _choice(self, news: ChatChunk) -> dict[str, Any]:
        parts = news.parts
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echo + parts.content,
            "refusal": None,
        }
        message |= self._shown_reasoning(news)
        if parts.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [_whole_call(call) for call in parts.tool_calls]
        return {**self._ending(news), "message": message}

    def _shown_reasoning(self, news: ChatChunk) -> dict[str, str]:
        """The reasoning under both names that clients know."""
        text = news.parts.reasoning
        if not text or self._body.include_reasoning is False:
            return {}
        return {"reasoning": text, "reasoning_content": text}

    def _ending(self, news: ChatChunk) -> dict[str, Any]:
        records = news.delta.logprobs
        reason = news.finish_reason
        if reason == "tool_calls" and self._job.form.is_named:
            reason = "stop"  # as OpenAI has it: the call was no decision of the model
        choice: dict[str, Any] = {
            "index": news.index,
            "logprobs": None if records is None else self._logprobs.chat(records),
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = news.delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = news.delta.token_ids
        return choice


def _call_piece(piece: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": piece.arguments}
    if piece.name is not None:
        function["name"] = piece.name
    body: dict[str, Any] = {"index": piece.index, "function": function}
    if piece.id is not None:
        body |= {"id": piece.id, "type": "function"}
    return body


def _whole_call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
