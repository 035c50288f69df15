"""Body of POST /v1/responses, and how its fields are called in a chat request."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from girih.kernels.base.errors import RequestError
from girih.serve.http.base.bodies import Integer, Part, make_body
from girih.serve.http.generation.protocol import (
    FORM_FIELDS,
    SAMPLER_FIELDS,
    ChatCompletionRequest,
    FormFields,
    SamplerFields,
    described,
)

LOGPROBS = "message.output_text.logprobs"
# Fields that a chat request has under the same name.
SAME = (
    "stream",
    "stream_interval",
    "logit_bias",
    "top_logprobs",
    "priority",
    "cache_salt",
    "request_id",
    "chat_template_kwargs",
    "vllm_xargs",
    "parallel_tool_calls",
    *SAMPLER_FIELDS,
    *FORM_FIELDS,
)
PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
"""Field of a chat request → field here, for error messages."""
SENT_AS = {"reasoning_effort": "reasoning.effort"}
"""The same, for fields without effect."""

INPUT_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "examples": ["Why is the sky blue?", [{"role": "user", "content": "Hello!"}]],
}


class Reasoning(Part):
    """`reasoning` of a request."""

    effort: str | None = Field(None, description="As reasoning_effort of a chat request.")
    summary: str | None = Field(None, description="Not written: the reasoning itself is sent.")


class TextOptions(Part):
    """`text` of a request."""

    format: dict[str, Any] | None = Field(
        None, description="text, json_object or json_schema.", examples=[{"type": "text"}]
    )
    verbosity: str | None = Field(None, description="Has no effect.")


class ResponsesRequest(SamplerFields, FormFields):
    """Body of POST /v1/responses."""

    not_supported: ClassVar[tuple[str, ...]] = ("prompt", "conversation", "response_format")
    unset_when_empty = (*not_supported, "tools", "previous_response_id", "request_id")

    model: str | None = described("The served model; it may be left out.")
    input: str | list[dict[str, Any]] = Field(
        description="A user's text, or items: messages, function calls and their outputs.",
        json_schema_extra=INPUT_SCHEMA,
    )
    instructions: str | None = described("The system message of this turn.")
    previous_response_id: str | None = described("A stored response that this one continues.")
    store: bool | None = described("Keep the response (the default) for later turns.")
    metadata: dict[str, str] | None = described("Kept with the response.")
    include: list[str] | None = described("Extra output.", examples=[[LOGPROBS]])
    max_output_tokens: Integer | None = described("Longest output in tokens.", minimum=1)
    reasoning: Reasoning | None = described("How long to think.")
    text: TextOptions | None = described("Shape of the output.")
    tools: list[dict[str, Any]] | None = described("Functions the model may call.")
    tool_choice: str | dict[str, Any] | None = described("none, auto, required or a function.")
    parallel_tool_calls: bool | None = described("Allow several calls in one answer.")
    truncation: str | None = described(
        "Nothing is ever dropped from a conversation.", enum=["auto", "disabled", None]
    )
    stream: bool | None = described("Send the answer as server-sent events.")
    stream_interval: Integer | None = described("Fewest tokens per event.", minimum=1)
    background: bool | None = described(
        "Answer at once, and go on without a client; GET tells how far it is (needs store)."
    )
    logit_bias: dict[str, float] | None = described("Token id → value added to its logit.")
    top_logprobs: Integer | None = described("Alternatives per output token.", minimum=0)
    priority: Integer | None = described("Lower is served first (policy priority only).")
    cache_salt: str | None = described("Prefixes are shared only with equal salts.", minLength=1)
    vllm_xargs: dict[str, Any] | None = described("Arguments of the server's logits processors.")
    request_id: str | None = described("Id of the answer; the header x-request-id wins.")
    chat_template_kwargs: dict[str, Any] | None = described("Further names for the template.")
    prompt: Any = None
    conversation: Any = None
    response_format: Any = None

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probabilities are part of the output."""
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    def ignored_fields(self) -> list[str]:
        """Names of what has no effect here."""
        nested = [f"include.{name}" for name in self.include or [] if name != LOGPROBS]
        if self.reasoning is not None and self.reasoning.summary is not None:
            nested.append("reasoning.summary")
        if self.text is not None and self.text.verbosity is not None:
            nested.append("text.verbosity")
        return sorted([*super().ignored_fields(), *nested])


def as_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Return the chat request that answers `body`.

    Raises:
        RequestError: a field has no counterpart.
    """
    _refuse_unsupported(body)
    fields: dict[str, Any] = {
        name: value for name in SAME if (value := getattr(body, name)) is not None
    }
    fields |= {"messages": messages, "logprobs": body.wants_logprobs}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _chat_format(body.text.format)
    if body.tools:
        fields["tools"] = [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields["tool_choice"] = _chat_choice(body.tool_choice)
    return make_body(ChatCompletionRequest, fields)


def _refuse_unsupported(body: ResponsesRequest) -> None:
    for name in body.not_supported:
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} is not supported by this server; leave it out", name)
    if body.truncation == "auto":
        body.ignore("truncation")
    elif body.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {body.truncation[:80]!r}; it must be auto or disabled (this server "
            "drops no part of a conversation by itself)",
            param="truncation",
        )


def _chat_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _chat_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"tools[{index}].type is {tool.get('type')!r}; this server supports 'function' only",
            param="tools",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
