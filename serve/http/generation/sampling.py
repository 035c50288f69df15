"""From a request body to `SamplingParams`: limits, refusals, defaults."""

from __future__ import annotations

from typing import Any

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import plain_extra_args
from girih.serve.config import ServeConfig
from girih.serve.http.base.errors import renamed_params
from girih.serve.http.generation.protocol import (
    SAMPLER_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingBody,
)
from girih.serve.http.generation.structured import structured_output
from girih.serve.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
COPIED = (
    *(name for name in SAMPLER_FIELDS if name != "stop"),
    "n",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "skip_special_tokens",
    "prompt_logprobs",
)


def sampling_fields(
    body: SamplingBody, tokenizer: Tokenizer, limits: ServeConfig
) -> dict[str, Any]:
    """Return the body's sampling values under the names of `SamplingParams`.

    Raises:
        RequestError: a limit is passed, or a field cannot take effect here.
    """
    _refuse_unsupported(body)
    _check_limits(body, limits)
    fields: dict[str, Any] = {
        name: value for name in COPIED if (value := getattr(body, name)) is not None
    }
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    if body.bad_words:
        fields["bad_words"] = _bad_words(body.bad_words, tokenizer)
    if body.vllm_xargs:
        with renamed_params({"extra_args": "vllm_xargs"}):
            fields["extra_args"] = plain_extra_args(body.vllm_xargs)
    fields["structured"] = structured_output(body, tokenizer)
    return fields


def check_temperature(temperature: float | None, most: float = 2) -> None:
    """Raise `RequestError` for a temperature that the API whose shape a route has does not take."""
    if temperature is not None and not 0 <= temperature <= most:
        raise RequestError(
            f"temperature is {temperature:g}; it must be 0 (greedy) to {most:g}, as in the API of "
            "this route: /inference/v1/generate has no upper limit",
            param="temperature",
        )


def refuse_with_stream(body: SamplingBody) -> None:
    """Raise `RequestError` for combinations that a stream cannot carry."""
    options = body.stream_options
    if options is not None and not body.stream:
        if options.include_usage or options.continuous_usage_stats:
            raise RequestError(
                "stream_options is set but stream is not true; set stream, or leave it out",
                param="stream_options",
            )
        body.ignore("stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise RequestError(
            "stream_options.continuous_usage_stats is true, but include_usage is not; set "
            "include_usage, or leave it out",
            param="stream_options",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be sent in a stream; set stream to false",
            param="prompt_logprobs",
        )
    if body.stream_interval is not None and body.stream_interval < 1:
        raise RequestError(
            f"stream_interval is {body.stream_interval}; it must be at least 1 token",
            param="stream_interval",
        )


def completion_logprobs(body: CompletionRequest, limits: ServeConfig) -> int | None:
    """Return the number of alternatives per token, or None for no logprobs."""
    return _checked_logprobs("logprobs", body.logprobs, limits)


def chat_logprobs(body: ChatCompletionRequest, limits: ServeConfig) -> int | None:
    """Return the number of alternatives per token, or None for no logprobs."""
    top = _checked_logprobs("top_logprobs", body.top_logprobs, limits)
    if top and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {top} but logprobs is not true; set logprobs to true",
            param="top_logprobs",
        )
    return (top or 0) if body.logprobs else None


def check_priority(priority: int | None, policy: str) -> None:
    """Raise `RequestError` for a priority that the scheduler's policy would not look at."""
    if priority and policy != "priority":
        raise RequestError(
            f"priority is {priority}, but the server schedules by {policy!r}; leave it out, or "
            "start the server with scheduler.policy=priority",
            param="priority",
        )


def check_salt(salt: str | None) -> None:
    """Raise `RequestError` for a cache salt of a length that is not allowed."""
    if salt is not None and not 1 <= len(salt) <= 128:
        raise RequestError(
            f"cache_salt has {len(salt)} characters; it must have 1 to 128", param="cache_salt"
        )


def _refuse_unsupported(body: SamplingBody) -> None:
    if isinstance(body, ChatCompletionRequest) and body.function_call in ("none", "auto"):
        body.function_call = None  # without functions it says nothing
        body.ignore("function_call")
    for name in body.not_supported:
        value = getattr(body, name)
        if value not in (None, False) and not (name == "length_penalty" and value == 1.0):
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
    if isinstance(body, ChatCompletionRequest) and body.modalities not in (None, ["text"]):
        raise RequestError(
            f"modalities is {body.modalities!r}; this model produces ['text'] only",
            param="modalities",
        )


def _check_limits(body: SamplingBody, limits: ServeConfig) -> None:
    if body.n is not None and body.n > limits.max_n:
        raise RequestError(f"n is {body.n}; this server allows at most {limits.max_n}", param="n")
    if isinstance(body.stop, list) and len(body.stop) > limits.max_stop_strings:
        raise RequestError(
            f"stop has {len(body.stop)} entries; this server allows at most "
            f"{limits.max_stop_strings}",
            param="stop",
        )
    _checked_logprobs("prompt_logprobs", body.prompt_logprobs, limits)
    check_salt(body.cache_salt)
    if isinstance(body, CompletionRequest) and body.best_of not in (None, body.n or 1):
        raise RequestError(
            f"best_of is {body.best_of}; this server does not rank completions: leave it out, or "
            "set it to n",
            param="best_of",
        )


def _checked_logprobs(name: str, value: int | None, limits: ServeConfig) -> int | None:
    if value is not None and not 0 <= value <= limits.max_logprobs:
        raise RequestError(
            f"{name} is {value}; it must be 0 to {limits.max_logprobs} "
            "(the server's serve.max_logprobs)",
            param=name,
        )
    return value


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise RequestError(
                f"logit_bias has the key {key[:80]!r}; keys must be token ids", param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and after a space."""
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} entries; it may have at most {MAX_BAD_WORDS}",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word:
            raise RequestError(
                "bad_words has an empty entry; every entry must be a word", param="bad_words"
            )
        for text in (word, f" {word}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
