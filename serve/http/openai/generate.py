"""POST /inference/v1/generate: token ids in, token ids out, no text in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.bodies import Body, Integer, ignored_header, make_body
from girih.serve.http.base.errors import json_response, renamed_params
from girih.serve.http.base.state import Served, open_request
from girih.serve.http.generation.logprobs import LogprobsFormatter
from girih.serve.http.generation.protocol import (
    FORM_FIELDS,
    SAMPLER_FIELDS,
    CompletionRequest,
    StreamOptions,
    described,
)
from girih.serve.http.generation.requests import Plan, Usage
from girih.serve.http.generation.streaming import (
    EventStream,
    choice_events,
    collect,
    run_until_disconnect,
    submit_all,
)
from girih.serve.http.openai.completion_plan import plan_completion
from girih.serve.text.output_processor import Delta

router = APIRouter()

SAMPLING = frozenset(
    {
        *(name for name in SAMPLER_FIELDS if name != "stop"),
        "n",
        "max_tokens",
        "logit_bias",
        "allowed_token_ids",
        "logprobs",
        "prompt_logprobs",
        "vllm_xargs",
        "response_format",
        *FORM_FIELDS,
    }
)
"""Entries of `sampling_params`, with the meaning they have in /v1/completions."""
PARAMS = {
    "prompt": "token_ids",
    **dict.fromkeys(("vllm_xargs", "response_format", *FORM_FIELDS), "sampling_params"),
}
"""Field of a completion request → field here, for error messages."""
TEXT_ONLY = ("stop", "include_stop_str_in_output", "bad_words", "skip_special_tokens")


class GenerateRequest(Body):
    """Body of /inference/v1/generate."""

    model: str | None = described("The served model; it may be left out.")
    token_ids: list[Integer] = Field(
        description="The prompt.", json_schema_extra={"minItems": 1}, examples=[[1, 2, 3]]
    )
    sampling_params: dict[str, Any] | None = described(
        f"Any of {', '.join(sorted(SAMPLING))}.",
        properties={
            name: {k: v for k, v in schema.items() if (name, k) != ("temperature", "maximum")}
            for name, schema in sorted(CompletionRequest.model_json_schema()["properties"].items())
            if name in SAMPLING
        },
        examples=[{"max_tokens": 4, "temperature": 0}],
    )
    stream: bool | None = described("Send the answer as server-sent events.")
    stream_options: StreamOptions | None = described("What a stream also carries.")
    stream_interval: Integer | None = described("Fewest tokens per chunk.", minimum=1)
    priority: Integer | None = described("Lower is served first (policy priority only).")
    cache_salt: str | None = described("Prefixes are shared only with equal salts.", minLength=1)
    request_id: str | None = described("Id of the answer; the header x-request-id wins.")

    def ignored_fields(self) -> list[str]:
        """Names of what has no effect here."""
        unknown = set(self.sampling_params or {}) - SAMPLING
        return sorted([*super().ignored_fields(), *(f"sampling_params.{n}" for n in unknown)])


@router.post("/inference/v1/generate")
async def generate(request: Request) -> Response:
    """Continue token ids, streamed or whole."""
    state, body, served = await open_request(request, GenerateRequest)
    completion = _as_completion(body)
    with renamed_params(PARAMS):
        _, plan = plan_completion(request, completion, served, state)
        streams = await submit_all(served.engine, plan.requests)
    writer = _GenerateWriter(body, served, plan)
    if body.stream:
        chunks = choice_events(writer, streams, body, state.config.keep_alive_seconds)
        return EventStream(chunks, streams, ignored_header(body, completion))
    deltas = await run_until_disconnect(request, collect(streams))
    if deltas is None:
        return Response(status_code=499)
    return json_response(writer.whole(deltas), headers=ignored_header(body, completion))


def _as_completion(body: GenerateRequest) -> CompletionRequest:
    sampling = body.sampling_params or {}
    for name in TEXT_ONLY:
        if sampling.get(name) not in (None, [], False):
            raise RequestError(
                f"sampling_params.{name} works on text, which this route does not make; use "
                "stop_token_ids, or /v1/completions",
                param="sampling_params",
            )
    fields = {name: value for name, value in sampling.items() if name in SAMPLING}
    for name in ("stream", "stream_options", "stream_interval", "priority", "cache_salt"):
        if (value := getattr(body, name)) is not None:
            fields[name] = value.model_dump() if name == "stream_options" else value
    fields |= {"prompt": [body.token_ids], "request_id": body.request_id}
    return make_body(CompletionRequest, fields)


class _GenerateWriter:
    """Writes the answer to one request in both forms."""

    def __init__(self, body: GenerateRequest, served: Served, plan: Plan) -> None:
        self._body = body
        self._plan = plan
        params = plan.params[0]
        self.head = {
            "request_id": plan.response_id.removeprefix("cmpl-"),
            "object": "token_completion",
            "created": plan.created,
            "model": served.name,
        }
        self._logprobs = LogprobsFormatter(served.tokenizer, True, params.logprobs or 0)
        self._prompt_logprobs = LogprobsFormatter(
            served.tokenizer, True, params.prompt_logprobs or 0
        )
        self.usage = Usage(len(plan.prompts[0]))

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [self.choice(index, delta) for index, delta in enumerate(deltas)]
        body = {**self.head, "choices": choices, "usage": self.usage.body()}
        records = deltas[0].prompt_logprobs
        if records is not None:
            body["prompt_logprobs"] = self._prompt_logprobs.prompt(records)
        return body

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return what is new in a choice, and count it."""
        self.usage.add(0, delta)
        records = delta.logprobs
        return {
            "index": index,
            "token_ids": delta.token_ids,
            "logprobs": None if records is None else self._logprobs.chat(records),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
