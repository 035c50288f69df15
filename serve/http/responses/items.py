"""Input items to chat messages."""

from __future__ import annotations

from typing import Any

from girih.kernels.base.errors import RequestError

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def as_messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages that `input` stands for.

    Calls and reasoning join the assistant message they belong to.

    Raises:
        RequestError: an item of an unknown type or without its fields.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            messages.append(_call_output(item, where))
        elif kind == "reasoning":
            texts = item.get("content") or item.get("summary") or []
            messages.append(
                {"role": "assistant", "content": "", "reasoning_content": _text(texts, where)}
            )
        else:
            raise RequestError(
                f"{where}.type is {str(kind)[:80]!r}; this server takes message, function_call, "
                "function_call_output and reasoning",
                param="input",
            )
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    content = _text(item.get("content"), where)
    last = messages[-1] if messages else {}
    if item.get("role") == "assistant" and "reasoning_content" in last and not last["content"]:
        last["content"] = content
    else:
        messages.append({"role": item.get("role"), "content": content})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {name: _string(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
    call_id = _string(item.get("call_id"), f"{where}.call_id")
    return {"id": call_id, "type": "function", "function": function}


def _call_output(item: dict[str, Any], where: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": _string(item.get("call_id"), f"{where}.call_id"),
        "content": _text(item.get("output"), where),
    }


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {type(value).__name__}; it must be a string", param="input")
    return value


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is {type(content).__name__}; it must be a string or a list of text "
            "parts",
            param="input",
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RequestError(
                f"{where}.content has a part of type {str(kind)[:80]!r}; this model takes text "
                "parts only",
                param="input",
            )
        texts.append(text)
    return "\n".join(texts)
