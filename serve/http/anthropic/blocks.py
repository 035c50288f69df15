"""Content blocks to chat messages, and chat deltas to content blocks with their events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from girih.kernels.base.errors import RequestError
from girih.serve.text.parsers.parts import ChatDelta, ToolCallDelta

Event = tuple[str, dict[str, Any]]
"""Name, fields."""


def as_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation in blocks.

    Raises:
        RequestError: no messages, an unknown role, or a block that is not text or a tool's.
    """
    if not messages:
        raise RequestError("messages is empty; it must have at least one", param="messages")
    plain: list[dict[str, Any]] = []
    if system:
        plain.append({"role": "system", "content": _text(system, "system", "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise RequestError(
                f"{where}.role is {str(role)[:80]!r}; it must be user or assistant",
                param="messages",
            )
        if isinstance(content, str):
            plain.append({"role": role, "content": content})
        elif role == "user":
            plain += _user_messages(_blocks(content, where), where)
        else:
            plain.append(_assistant_message(_blocks(content, where), where))
    return plain


def _user_messages(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            rest.append(block)
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise RequestError(f"{where} has a tool_result without tool_use_id", param="messages")
        content = _text(block.get("content") or "", where, "messages")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if rest or not blocks:
        messages.append({"role": "user", "content": _text(rest, where, "messages")})
    return messages


def _assistant_message(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # nobody but its maker can read that
            texts.append(block)
    return {**message, "content": _text(texts, where, "messages")}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(
            f"{where}.content is {type(content).__name__}; it must be a string or a list of blocks",
            param="messages",
        )
    return content


def _text(content: Any, where: str, param: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        text = block.get("text") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"{where} has a block of type {str(kind)[:80]!r}; this model takes text",
                param=param,
            )
        texts.append(text)
    return "\n".join(texts)


class BlockBuilder:
    """Content blocks so far; at most one of them, the last, is still open.

    Attributes:
        blocks: the blocks; the input of a tool is put in when its block is closed.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open: str | None = None  # "thinking", "text", or "call N"
        self._arguments = ""

    @property
    def has_tool_use(self) -> bool:
        """True if the model called a tool."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def push(self, parts: ChatDelta) -> Iterator[Event]:
        """Add news; yields their events."""
        for kind, text in (("thinking", parts.reasoning), ("text", parts.content)):
            if text:
                yield from self._switch(kind)
                self.blocks[-1][kind] += text
                yield self._delta({"type": f"{kind}_delta", kind: text})
        for piece in parts.tool_calls:
            yield from self._switch(f"call {piece.index}", piece)
            if piece.arguments:
                self._arguments += piece.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def finish(self) -> Iterator[Event]:
        """Close the last block; an empty answer is an empty text."""
        if not self.blocks:
            yield from self._switch("text")
        yield from self._close()

    def _switch(self, kind: str, call: ToolCallDelta | None = None) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._arguments = ""
        if call is not None:
            call_id = call.id or f"toolu_{uuid.uuid4().hex}"
            block = {"type": "tool_use", "id": call_id, "name": call.name or "", "input": {}}
        elif kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.blocks.append(block)
        start = {"index": len(self.blocks) - 1, "content_block": dict(block)}
        yield "content_block_start", start

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _read_input(self._arguments)
        yield "content_block_stop", {"index": len(self.blocks) - 1}
        self._open = None


def _read_input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
