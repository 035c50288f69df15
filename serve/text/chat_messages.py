"""Messages of a conversation as a chat template wants them: checked, plain, without nulls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from girih.kernels.base.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "user", "assistant", "tool", "developer")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients and templates know a message's reasoning."""


Arguments = dict[str, Any] | str
"""Arguments of a call: a map; a text, as it was sent, where that is no JSON object."""


def plain_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Check one message, join its text parts into one string, read the arguments of its calls.

    What is null, and an empty list of calls, is left out: clients send the fields of their own
    records, and templates ask whether a field is there.

    Raises:
        RequestError: unknown role, no content, a part that is not text, or a call without a name.
    """
    where = f"messages[{index}]"
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {str(role)[:80]!r}; it must be one of {', '.join(ROLES)}",
            param="messages",
        )
    content = message.get("content", "" if role == "assistant" else None)
    if isinstance(content, list):
        content = "\n".join(_part_text(part, where) for part in content)
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {json_type(content)}; it must be a string or a list of text parts",
            param="messages",
        )
    plain = {**message, "content": content}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    calls = plain.pop("tool_calls", [])
    if calls != []:
        plain["tool_calls"] = _plain_calls(calls, where)
    return plain


def json_type(value: Any) -> str:
    """Return JSON's name of a value's type."""
    names = {type(None): "null", dict: "an object", list: "a list", bool: "a boolean", str: "text"}
    return names.get(type(value), "a number")


def damaged_calls(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Places of the arguments in plain messages that are no JSON object."""
    return [
        f"messages[{index}].tool_calls[{number}].function.arguments"
        for index, message in enumerate(messages)
        for number, call in enumerate(message.get("tool_calls", ()))
        if isinstance(call["function"]["arguments"], str)
    ]


def with_arguments(
    messages: Sequence[dict[str, Any]], read: Callable[[Arguments], Arguments]
) -> list[dict[str, Any]]:
    """Plain messages with the arguments of each call replaced by what `read` makes of them."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": read(function["arguments"])}}

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    ]


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Clients send arguments as JSON text; templates want them as a map."""
    if not isinstance(calls, list):
        raise RequestError(
            f"{where}.tool_calls is {json_type(calls)}; it must be a list", param="messages"
        )
    plain: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls[{number}] has no function with a name", param="messages"
            )
        arguments = _read_arguments(function.get("arguments"))
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _read_arguments(arguments: Any) -> Arguments:
    """Control characters inside strings, which models write, are taken as they are."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, strict=False) if arguments.strip() else None
        except (ValueError, RecursionError):
            return arguments
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(
        f"{where}.content has a part of type {str(kind)[:80]!r}; this model takes parts of type "
        "text only",
        param="messages",
    )
