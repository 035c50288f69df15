"""Shared by chat and text completions: planning requests, usage, ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from girih.kernels.base.errors import RequestError
from girih.runtime.records.request import EngineRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.http.base.state import Served
from girih.serve.http.generation.protocol import SamplingBody, StreamOptions
from girih.serve.text.output_processor import Delta
from girih.serve.text.prompts import check_prompt_ids, split_n
from girih.serve.text.sampling_defaults import check_text_room

# Larger bodies are tokenized in a worker thread, so that other requests go on.
TRACE_HEADERS = ("traceparent", "tracestate")  # of W3C
LONG_BODY = 50_000


@dataclass
class Plan:
    """One HTTP request as requests for the core; choice index = prompt index * n + k.

    Attributes:
        response_id: id shown to the client.
        created: Unix time.
        prompts: token ids of each prompt.
        params: sampling of each choice of one prompt.
        requests: what the core gets.
    """

    response_id: str
    created: int
    prompts: list[list[int]]
    params: list[SamplingParams]
    requests: list[EngineRequest]

    def prompt_of(self, index: int) -> list[int]:
        """Return the prompt of a choice."""
        return self.prompts[index // len(self.params)]


@dataclass
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def add(self, prompt_index: int, delta: Delta) -> None:
        """Count one delta."""
        self.completion_tokens += len(delta.token_ids)
        self.cached[prompt_index] = max(self.cached.get(prompt_index, 0), delta.num_cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(self.cached.values())

    def body(self) -> dict[str, Any]:
        """Return the `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def of_chunk(self, options: StreamOptions) -> dict[str, Any]:
        """Return the field of a chunk before the last: null, as OpenAI has it, unless it runs."""
        if not options.include_usage:
            return {}
        return {"usage": self.body() if options.continuous_usage_stats else None}


def make_plan(
    http: Request,
    body: SamplingBody,
    served: Served,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    prefix: str,
) -> Plan:
    """Check prompts and parameters and make the requests for the core.

    Raises:
        RequestError: a token id outside the vocabulary.
    """
    for prompt in prompts:
        check_prompt_ids(prompt, served.vocab_size)
    params.check_vocabulary(served.vocab_size)
    name = request_name(http, body.request_id)
    singles = split_n(params)
    now = time.monotonic()
    requests = [
        EngineRequest(
            request_id=f"{name}-{prompt_index}-{k}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt,
            sampling=single,
            eos_token_ids=served.eos_token_ids,
            arrival_time=now,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            trace=trace_headers(http),
        )
        for prompt_index, prompt in enumerate(prompts)
        for k, single in enumerate(singles)
    ]
    return Plan(prefix + name, int(time.time()), list(prompts), singles, requests)


def trace_headers(http: Request) -> dict[str, str]:
    """The client's place in a distributed trace."""
    headers = http.headers
    return {name: value for name in TRACE_HEADERS if (value := headers.get(name)) is not None}


def refuse_endless(text: str, served: Served) -> None:
    """Raise `RequestError` for a text that cannot fit, before it is tokenized."""
    if len(text) > LONG_BODY:
        check_text_room(text, served.tokenizer.longest_token, served.max_model_len)


def truncate_prompt(prompt: list[int], keep: int | None, longest: int) -> list[int]:
    """Keep the last `keep` tokens (-1: the `longest` that the context allows).

    Raises:
        RequestError: `keep` is 0 or below -1.
    """
    if keep is None:
        return prompt
    if keep == 0 or keep < -1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}; it must be at least 1, or -1 for the context's "
            "length",
            param="truncate_prompt_tokens",
        )
    return prompt[-(longest if keep == -1 else keep) :]


def request_name(http: Request, given: str | None) -> str:
    """The id of a request: its header's, its body's, or a new one.

    Args:
        http: the request.
        given: `request_id` of its body.

    Raises:
        RequestError: the id cannot be sent back.
    """
    if given is not None and not http.state.has_own_id:
        _check_name(given)
        http.state.request_id = given
    name = str(http.state.request_id)
    _check_name(name)
    return name


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= 256 or not name.isprintable() or not name.isascii():
        raise RequestError(
            f"request_id has {len(name)} characters; it must have 1 to 256 printable ASCII ones",
            param="request_id",
        )
