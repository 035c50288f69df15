"""Request bodies: which fields exist, of which type (values are checked by `sampling`).

A field named here is either obeyed or refused; a field that is not is reported in the response
header `x-girih-ignored`.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from girih.serve.api.errors import ApiError

logger = logging.getLogger("girih.serve")
_reported: set[str] = set()


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(BaseModel):
    """A request body; unknown fields are kept aside."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def ignored_fields(self) -> list[str]:
        """Names of fields this server does not know."""
        return sorted(self.model_extra or {})


class SamplingBody(Body):
    """Fields that chat and text completions share."""

    not_supported: ClassVar[tuple[str, ...]] = (
        "structured_outputs",
        "use_beam_search",
        "length_penalty",
        "logprob_token_ids",
        "prompt_embeds",
        "thinking_token_budget",
        "repetition_detection",
        "kv_transfer_params",
        "watermarking",
    )

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    response_format: dict[str, Any] | None = None

    structured_outputs: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logprob_token_ids: Any = None
    prompt_embeds: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    watermarking: Any = None


class CompletionRequest(SamplingBody):
    """Body of /v1/completions."""

    not_supported: ClassVar[tuple[str, ...]] = (*SamplingBody.not_supported, "suffix")

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: Any = None


class ChatCompletionRequest(SamplingBody):
    """Body of /v1/chat/completions."""

    not_supported: ClassVar[tuple[str, ...]] = (
        *SamplingBody.not_supported,
        "tools",
        "functions",
        "function_call",
        "chat_template",
        "documents",
        "audio",
        "reasoning_effort",
        "echo",
    )

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Any = None
    modalities: list[str] | None = None

    tools: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    documents: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    echo: Any = None


class TokenizeRequest(Body):
    """Body of /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


BodyType = TypeVar("BodyType", bound=Body)


def parse_body(kind: type[BodyType], raw: bytes) -> BodyType:
    """Read a JSON body.

    Raises:
        ApiError: 400, not JSON, or a field of the wrong type (names the first few).
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _as_api_error(error) from error
    for name in body.ignored_fields():
        if name not in _reported and len(_reported) < 1000:
            _reported.add(name)
            logger.warning("request field %r is not known and was ignored", name[:64])
    return body


def ignored_header(body: Body) -> dict[str, str]:
    """Return the header that names ignored fields, {} when there are none."""
    names = [name.encode("ascii", "replace").decode()[:64] for name in body.ignored_fields()[:20]]
    printable = [name for name in names if name.isprintable()]
    return {"x-girih-ignored": ", ".join(printable)} if printable else {}


def _as_api_error(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problems[0]['msg']}", code="json")
    texts: list[str] = []
    for problem in problems[:4]:
        field = ".".join(str(part) for part in problem["loc"]) or "body"
        seen = repr(problem["input"])[:80] if problem["type"] != "missing" else "missing"
        texts.append(f"{field}: {problem['msg']} (got {seen})")
    param = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
    return ApiError(400, "; ".join(texts), param)
