"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from girih.runtime.records.request import TokenLogprobs
from girih.serve.http.base.bodies import ignored_header
from girih.serve.http.base.errors import json_response
from girih.serve.http.base.state import Served, open_request
from girih.serve.http.generation.logprobs import LogprobsFormatter, TextOffsets, prompt_offsets
from girih.serve.http.generation.protocol import CompletionRequest
from girih.serve.http.generation.requests import LONG_BODY, Plan, Usage
from girih.serve.http.generation.sampling import check_temperature
from girih.serve.http.generation.streaming import (
    EventStream,
    choice_events,
    collect,
    run_until_disconnect,
    submit_all,
)
from girih.serve.http.openai.completion_plan import TextPrompt, plan_completion
from girih.serve.text.output_processor import Delta

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Complete prompts, streamed or whole."""
    state, body, served = await open_request(request, CompletionRequest)
    check_temperature(body.temperature)
    if len(await request.body()) > LONG_BODY:
        prompts, plan = await asyncio.to_thread(plan_completion, request, body, served, state)
    else:
        prompts, plan = plan_completion(request, body, served, state)
    streams = await submit_all(served.engine, plan.requests)
    writer = _CompletionWriter(body, served, plan, prompts)
    if body.stream:
        chunks = choice_events(writer, streams, body, state.config.keep_alive_seconds)
        return EventStream(chunks, streams, ignored_header(body))
    deltas = await run_until_disconnect(request, collect(streams))
    if deltas is None:
        return Response(status_code=499)
    return json_response(writer.whole(deltas), headers=ignored_header(body))


class _CompletionWriter:
    """Writes the answer to one request in both forms."""

    def __init__(
        self, body: CompletionRequest, served: Served, plan: Plan, prompts: list[TextPrompt]
    ) -> None:
        self._body = body
        self._plan = plan
        self._prompts = prompts
        self._tokenizer = served.tokenizer
        self.head = {
            "id": plan.response_id,
            "object": "text_completion",
            "created": plan.created,
            "model": served.name,
            "system_fingerprint": served.key,
        }
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = LogprobsFormatter(served.tokenizer, as_ids, body.logprobs or 0)
        self._prompt_logprobs = LogprobsFormatter(
            served.tokenizer, False, body.prompt_logprobs or 0
        )
        self._offsets = [self._start_offsets(index) for index in range(len(plan.requests))]
        self._begun: set[int] = set()
        self.usage = Usage(sum(len(prompt) for prompt in plan.prompts))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self.choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self.head, "choices": choices, "usage": self.usage.body()}

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return what is new in a choice, and count it."""
        prompt_index = index // len(self._plan.params)
        self.usage.add(prompt_index, delta)
        is_first = index not in self._begun
        self._begun.add(index)
        echoed = bool(self._body.echo) and is_first
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(index) + delta.text if echoed else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs_of(index, delta, echoed)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs.prompt(delta.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._plan.prompt_of(index)
        return choice

    def _logprobs_of(self, index: int, delta: Delta, echoed: bool) -> dict[str, Any]:
        records: list[TokenLogprobs | None] = [*(delta.logprobs or [])]
        shown = token_ids = delta.token_ids
        offsets = [self._offsets[index].push(token_id) for token_id in token_ids]
        if echoed and delta.prompt_logprobs is not None:
            prompt = self._plan.prompt_of(index)
            shown = prompt + token_ids
            records = [*delta.prompt_logprobs, *records]
            before = prompt_offsets(self._tokenizer, self._prompt_text(index), prompt)
            offsets = before + offsets
        return self._logprobs.completion(records, shown, offsets)

    def _start_offsets(self, index: int) -> TextOffsets:
        start = len(self._prompt_text(index)) if self._body.echo else 0
        skips = self._body.skip_special_tokens is not False
        return TextOffsets(self._tokenizer, skips, self._plan.prompt_of(index), start)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // len(self._plan.params)]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
