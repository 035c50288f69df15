"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.kernels.errors import RequestError
from girih.runtime.request import TokenLogprobs
from girih.serve.api.errors import as_api_error, json_response
from girih.serve.api.generation import Plan, Usage, make_plan, truncate_prompt
from girih.serve.api.logprobs import LogprobsFormatter
from girih.serve.api.protocol import CompletionRequest, ignored_header, parse_body
from girih.serve.api.sampling import (
    check_effective,
    completion_logprobs,
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
from girih.serve.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete prompts, streamed or whole."""
    state: ServerState = request.app.state.server
    state.require(None)
    body = parse_body(CompletionRequest, await request.body())
    served = state.require(body.model)
    texts, plan = _plan(request, body, served, state)
    streams = await submit_all(served.engine, plan.requests)
    writer = _CompletionWriter(body, served, plan, texts)
    if body.stream:
        chunks = writer.chunks(streams, state.config.keep_alive_seconds)
        return EventStream(chunks, streams, ignored_header(body))
    deltas = await run_until_disconnect(request, collect(streams))
    if deltas is None:
        return Response(status_code=499)
    return json_response(writer.whole(deltas), headers=ignored_header(body))


def _plan(
    http: Request, body: CompletionRequest, served: Served, state: ServerState
) -> tuple[list[str | None], Plan]:
    refuse_with_stream(body)
    fields = sampling_fields(body, served.tokenizer, state.config)
    num_top = completion_logprobs(body, state.config)
    fields["logprobs"] = num_top
    if body.echo and num_top is not None:
        if body.stream:
            raise RequestError(
                "echo with logprobs cannot be streamed; set stream to false", param="echo"
            )
        fields["prompt_logprobs"] = max(num_top, body.prompt_logprobs or 0)
    # Echo with max_tokens 0 scores the prompt: one token is computed and not shown.
    scores_only = bool(body.echo) and body.max_tokens == 0
    fields["max_tokens"] = 1 if scores_only else body.max_tokens
    params = served.defaults.build(fields, max_tokens=DEFAULT_MAX_TOKENS)
    check_effective(params, body.priority, served.policy)
    texts: list[str | None] = []
    prompts: list[list[int]] = []
    for text, token_ids in _read_prompts(body, served.tokenizer, state.config.max_prompts):
        kept = truncate_prompt(token_ids, body.truncate_prompt_tokens, served.max_model_len)
        check_room(len(kept), body.max_tokens, served.max_model_len)
        texts.append(text if len(kept) == len(token_ids) else None)
        prompts.append(kept)
    return texts, make_plan(http, body, served, prompts, params, "cmpl-")


def _read_prompts(
    body: CompletionRequest, tokenizer: Tokenizer, max_prompts: int
) -> list[tuple[str | None, list[int]]]:
    prompt = body.prompt
    if prompt is None or prompt == []:
        raise RequestError(
            "prompt is missing; give a string, a list of token ids, or a list of these",
            param="prompt",
        )
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    items: list[Any] = [prompt] if is_single else list(prompt)
    if len(items) > max_prompts:
        raise RequestError(
            f"prompt has {len(items)} entries; this server allows at most {max_prompts}",
            param="prompt",
        )
    special = body.add_special_tokens is not False
    return [
        (item, tokenizer.encode(item, special)) if isinstance(item, str) else (None, item)
        for item in items
    ]


class _CompletionWriter:
    """Writes the answer to one request in both forms."""

    def __init__(
        self,
        body: CompletionRequest,
        served: Served,
        plan: Plan,
        texts: list[str | None],
    ) -> None:
        self._body = body
        self._plan = plan
        self._texts = texts
        self._tokenizer = served.tokenizer
        self._scores_only = bool(body.echo) and body.max_tokens == 0
        self._head = {
            "id": plan.response_id,
            "object": "text_completion",
            "created": plan.created,
            "model": served.name,
            "system_fingerprint": served.key,
        }
        self._formatters = [
            LogprobsFormatter(
                served.tokenizer, bool(body.return_tokens_as_token_ids), body.logprobs or 0
            )
            for _ in plan.requests
        ]
        self._prompt_formatter = LogprobsFormatter(
            served.tokenizer, False, body.prompt_logprobs or 0
        )
        self._usage = Usage(sum(len(prompt) for prompt in plan.prompts))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = []
        for index, delta in enumerate(deltas):
            self._count(index, delta)
            choices.append(self._choice(index, delta, is_first=True))
        return {**self._head, "choices": choices, "usage": self._usage.body()}

    async def chunks(
        self, streams: Sequence[RequestStream], keep_alive_seconds: float
    ) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        seen: set[int] = set()
        options = self._body.stream_options
        with_usage = options is not None and options.include_usage
        running = options is not None and with_usage and options.continuous_usage_stats
        try:
            interval = self._body.stream_interval or 1
            async for item in interleave(streams, keep_alive_seconds, interval):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                index, delta = item
                raise_if_failed(delta)
                self._count(index, delta)
                choice = self._choice(index, delta, is_first=index not in seen)
                seen.add(index)
                chunk = {**self._head, "choices": [choice]}
                yield event({**chunk, "usage": self._usage.body()} if running else chunk)
            if with_usage:
                yield event({**self._head, "choices": [], "usage": self._usage.body()})
        except Exception as error:  # the status line is sent: tell it in the stream
            yield event(as_api_error(error).body())
        yield DONE

    def _count(self, index: int, delta: Delta) -> None:
        prompt_index = index // len(self._plan.params)
        self._usage.add(prompt_index, delta, count_tokens=not self._scores_only)

    def _choice(self, index: int, delta: Delta, is_first: bool) -> dict[str, Any]:
        prompt = self._plan.prompt_of(index)
        echoed = bool(self._body.echo) and is_first
        text = "" if self._scores_only else delta.text
        token_ids = [] if self._scores_only else delta.token_ids
        records: list[TokenLogprobs | None] = list(delta.logprobs or [])
        if self._scores_only:
            records = []
        if echoed:
            text = self._prompt_text(index) + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._scores_only else delta.finish_reason,
        }
        if self._body.logprobs is not None:
            shown_ids = token_ids
            if echoed and delta.prompt_logprobs is not None:
                shown_ids = prompt + token_ids
                records = [*delta.prompt_logprobs, *records]
            choice["logprobs"] = self._formatters[index].completion(records, shown_ids)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_formatter.prompt(delta.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt
        return choice

    def _prompt_text(self, index: int) -> str:
        text = self._texts[index // len(self._plan.params)]
        if text is not None:
            return text
        return self._tokenizer.decode(self._plan.prompt_of(index), skip_special_tokens=False)
