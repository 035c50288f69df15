"""From the body of /v1/completions to prompts and requests for the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from girih.kernels.base.errors import RequestError
from girih.serve.config import ServeConfig
from girih.serve.http.base.state import Served, ServerState
from girih.serve.http.generation.protocol import CompletionRequest
from girih.serve.http.generation.requests import Plan, make_plan, refuse_endless, truncate_prompt
from girih.serve.http.generation.sampling import (
    check_priority,
    completion_logprobs,
    refuse_with_stream,
    sampling_fields,
)
from girih.serve.http.openai.infill import infill_prompt
from girih.serve.text.sampling_defaults import check_room
from girih.serve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class TextPrompt:
    """One prompt.

    Attributes:
        text: as the client gave it; None for token ids.
        token_ids: what the model reads.
    """

    text: str | None
    token_ids: list[int]


def plan_completion(
    http: Request, body: CompletionRequest, served: Served, state: ServerState
) -> tuple[list[TextPrompt], Plan]:
    """Check a body and make its requests.

    Raises:
        RequestError: a field cannot be obeyed, or a prompt is empty or too long.
    """
    refuse_with_stream(body)
    limits = state.config
    fields = sampling_fields(body, served.tokenizer, limits)
    num_top = completion_logprobs(body, limits)
    fields["logprobs"] = num_top
    if body.echo and num_top is not None:
        if body.stream:
            raise RequestError(
                "echo with logprobs cannot be streamed; set stream to false", param="echo"
            )
        fields["prompt_logprobs"] = max(num_top, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:  # it scores the prompt, whether that is shown or not
        fields.setdefault("prompt_logprobs", 0)
    fields["max_tokens"] = body.max_tokens
    params = served.defaults.build(fields, max_tokens=DEFAULT_MAX_TOKENS)
    check_priority(body.priority, served.policy)
    longest = served.max_model_len - (not params.scores_only)
    prompts: list[TextPrompt] = []
    for prompt in _read_prompts(body, served, limits):
        kept = truncate_prompt(prompt.token_ids, body.truncate_prompt_tokens, longest)
        check_room(len(kept), body.max_tokens, served.max_model_len)
        whole = len(kept) == len(prompt.token_ids)
        prompts.append(TextPrompt(prompt.text if whole else None, kept))
    return prompts, make_plan(
        http, body, served, [prompt.token_ids for prompt in prompts], params, "cmpl-"
    )


def _read_prompts(body: CompletionRequest, served: Served, limits: ServeConfig) -> list[TextPrompt]:
    prompt = body.prompt
    if prompt is None or prompt == []:
        raise RequestError(
            "prompt is missing; give a string, a list of token ids, or a list of these",
            param="prompt",
        )
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    items: list[Any] = [prompt] if is_single else list(prompt)
    if len(items) > limits.max_prompts:
        raise RequestError(
            f"prompt has {len(items)} entries; this server allows at most {limits.max_prompts}",
            param="prompt",
        )
    num_choices = len(items) * (body.n or 1)
    if num_choices > limits.max_choices:
        raise RequestError(
            f"{len(items)} prompts with n {body.n} ask for {num_choices} choices; this server "
            f"allows at most {limits.max_choices} in one request",
            param="n",
        )
    tokenizer = served.tokenizer
    for item in items:
        if isinstance(item, str) and body.truncate_prompt_tokens is None:
            refuse_endless(item, served)
    if body.suffix is not None:
        return [_read_infill(body, item, tokenizer) for item in items]
    special = body.add_special_tokens is not False
    return [
        TextPrompt(item, tokenizer.encode(item, special))
        if isinstance(item, str)
        else TextPrompt(None, item)
        for item in items
    ]


def _read_infill(body: CompletionRequest, item: Any, tokenizer: Tokenizer) -> TextPrompt:
    in_the_way = {
        "echo": bool(body.echo),
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "prompt as token ids": not isinstance(item, str),
    }
    for name, is_given in in_the_way.items():
        if is_given:
            raise RequestError(
                f"suffix cannot be combined with {name}; leave one of them out", param="suffix"
            )
    return TextPrompt(item, infill_prompt(item, body.suffix or "", tokenizer))
