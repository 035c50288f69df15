"""Bodies of /v1/messages and its token counter, and their chat request."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from girih.kernels.base.errors import RequestError
from girih.serve.http.anthropic.blocks import as_messages
from girih.serve.http.base.bodies import Body, Integer, Part, make_body
from girih.serve.http.generation.protocol import (
    FORM_FIELDS,
    ChatCompletionRequest,
    FormFields,
    described,
)

SAME = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "priority",
    "cache_salt",
    "request_id",
    *FORM_FIELDS,
)
PARAMS = {
    "stop": "stop_sequences",
    "response_format": "output_config",
}
"""Field of a chat request → field here, for error messages."""

TEXT_OR_BLOCKS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"enum": ["text", "thinking", "tool_use", "tool_result"]},
                    "text": {"type": "string"},
                },
            },
        },
    ]
}
MESSAGES_SCHEMA: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": TEXT_OR_BLOCKS},
    },
}
MESSAGES_EXAMPLE = [[{"role": "user", "content": "Why is the sky blue?"}]]


class Thinking(Part):
    """`thinking` of a request."""

    type: str = Field(
        description="enabled, disabled or adaptive.",
        json_schema_extra={"enum": ["enabled", "disabled", "adaptive"]},
    )
    budget_tokens: Integer | None = Field(None, description="Has no effect.")


class OutputConfig(Part):
    """`output_config` of a request."""

    effort: str | None = Field(None, description="As reasoning_effort of a chat request.")
    format: dict[str, Any] | None = Field(
        None, description="Shape of the output.", examples=[{"type": "json_schema", "schema": {}}]
    )


class CountTokensRequest(Body):
    """Body of /v1/messages/count_tokens."""

    unset_when_empty = ("tools",)

    model: str | None = described("The served model; it may be left out.")
    messages: list[dict[str, Any]] = Field(
        description="The conversation; a last message of the assistant is continued.",
        json_schema_extra=MESSAGES_SCHEMA,
        examples=MESSAGES_EXAMPLE,
    )
    system: str | list[dict[str, Any]] | None = described("The system message.")
    tools: list[dict[str, Any]] | None = described("Functions the model may call.")
    tool_choice: dict[str, Any] | None = described("auto, any, none, or a tool.")
    thinking: Thinking | None = described("Whether to think first.")
    chat_template_kwargs: dict[str, Any] | None = described("Further names for the template.")

    def ignored_fields(self) -> list[str]:
        """Names of what has no effect here."""
        has_budget = self.thinking is not None and self.thinking.budget_tokens is not None
        nested = ["thinking.budget_tokens"] if has_budget else []
        return sorted([*super().ignored_fields(), *nested])

    @property
    def sent_as(self) -> dict[str, str]:
        """Field of a chat request → field here, for fields without effect."""
        names = {
            "reasoning_effort": "output_config.effort",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        }
        if self.thinking is not None:
            names["chat_template_kwargs.enable_thinking"] = "thinking"
        return names


class MessagesRequest(CountTokensRequest, FormFields):
    """Body of POST /v1/messages."""

    unset_when_empty = ("request_id",)

    max_tokens: Integer = Field(
        description="Longest output in tokens.", json_schema_extra={"minimum": 1}, examples=[64]
    )
    stop_sequences: list[str] | None = described("Strings that end the output.")
    stream: bool | None = described("Send the answer as server-sent events.")
    temperature: float | None = described("0 is greedy.", minimum=0, maximum=1)
    top_p: float | None = described("Nucleus mass.", exclusiveMinimum=0, maximum=1)
    top_k: Integer | None = described("Best k tokens; 0 and -1 are off.", minimum=-1)
    output_config: OutputConfig | None = described("Effort and shape of the output.")
    priority: Integer | None = described("Lower is served first (policy priority only).")
    cache_salt: str | None = described("Prefixes are shared only with equal salts.", minLength=1)
    request_id: str | None = described("Id of the answer; the header x-request-id wins.")


def as_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """Return the chat request that answers (or counts) `body`.

    Raises:
        RequestError: a field has no counterpart.
    """
    messages = as_messages(body.system, body.messages)
    fields: dict[str, Any] = {"messages": messages, "max_tokens": 1}
    if messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_chat_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _chat_choice(body.tool_choice)
    fields["chat_template_kwargs"] = {**_thinking(body), **(body.chat_template_kwargs or {})}
    if isinstance(body, MessagesRequest):
        fields |= _sampling(body)
    return make_body(ChatCompletionRequest, fields)


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: value for name in SAME if (value := getattr(body, name)) is not None
    }
    fields["max_tokens"] = body.max_tokens
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.output_config is not None and body.output_config.format is not None:
        form = body.output_config.format
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        fields["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return fields


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    if body.thinking is None or body.thinking.type == "adaptive":
        return {}
    if body.thinking.type not in ("enabled", "disabled"):
        raise RequestError(
            f"thinking.type is {body.thinking.type[:80]!r}; it must be enabled, disabled or "
            "adaptive",
            param="thinking",
        )
    return {"enable_thinking": body.thinking.type == "enabled"}


def _chat_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise RequestError(
            f"tools[{index}] has type {str(tool.get('type'))[:80]!r}; it must have a name and an "
            "input_schema",
            param="tools",
        )
    function: dict[str, Any] = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    named = {"auto": "auto", "any": "required", "none": "none"}
    fields: dict[str, Any] = {}
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in named:
        fields["tool_choice"] = named[kind]
    else:
        raise RequestError(
            f"tool_choice.type is {str(kind)[:80]!r}; it must be auto, any, none or tool",
            param="tool_choice",
        )
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields
