"""Builds the output items of a response from chat deltas, and the events that tell of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from girih.serve.text.parsers.parts import ChatDelta, ToolCallDelta

Event = tuple[str, dict[str, Any]]
"""Name without "response.", fields."""


def new_id(prefix: str) -> str:
    """Return a fresh id such as "msg_3f..."."""
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputBuilder:
    """Output items so far; at most one of them, the last, is still open.

    Logprobs are those of a message. Tokens that made no text of their own (part of a character,
    held back for a stop string, reasoning before it) give theirs to the next text, or to the
    message when it closes; what comes after that (tool calls) is in the whole response only.

    Attributes:
        items: the items.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None  # "reasoning", "message", or "call N"
        self._pending: list[dict[str, Any]] = []  # logprobs that no message has yet

    def push(self, parts: ChatDelta, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add news; yields their events."""
        self._pending += logprobs
        if parts.reasoning:
            yield from self._switch("reasoning")
            yield from self._add_text("reasoning_text", parts.reasoning)
        if parts.content:
            yield from self._switch("message")
            yield from self._add_text("output_text", parts.content)
        for piece in parts.tool_calls:
            yield from self._switch(f"call {piece.index}", piece)
            if piece.arguments:
                self.items[-1]["arguments"] += piece.arguments
                yield self._event("function_call_arguments.delta", delta=piece.arguments)

    def finish(self, status: str) -> Iterator[Event]:
        """Close the last item as "completed" or "incomplete"; an empty answer is an empty text."""
        if not self.items:
            yield from self._switch("message")
        yield from self._close(status)
        messages = [item for item in self.items if item["type"] == "message"]
        if messages:
            self._take_logprobs(messages[-1])

    def as_message(self) -> dict[str, Any]:
        """The answer as a chat message for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item["type"] == "message":
                message["content"] += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                message["reasoning_content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
        return message

    def _switch(self, kind: str, call: ToolCallDelta | None = None) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close("completed")
        self._open = kind
        part: dict[str, Any] = {
            "type": "output_text",
            "text": "",
            "annotations": [],
            "logprobs": [],
        }
        if call is not None:
            item: dict[str, Any] = {
                "id": new_id("fc"),
                "type": "function_call",
                "call_id": call.id or new_id("call"),
                "name": call.name or "",
                "arguments": "",
            }
        elif kind == "message":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
        else:
            item = {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        item["status"] = "in_progress"
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": _copy(item)}
        if call is None:
            item["content"] = [part]
            yield self._event("content_part.added", content_index=0, part={**part})

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        self.items[-1]["content"][0]["text"] += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "output_text":
            fields["logprobs"] = self._take_logprobs(self.items[-1])
        yield self._event(f"{kind}.delta", **fields)

    def _take_logprobs(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Give `message` the logprobs that wait, and return them."""
        taken, self._pending = self._pending, []
        message["content"][0]["logprobs"] += taken
        return taken

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "message":
            self._take_logprobs(self.items[-1])
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            fields = {"content_index": 0, "text": part["text"]}
            if "logprobs" in part:
                fields["logprobs"] = part["logprobs"]
            yield self._event(f"{part['type']}.done", **fields)
            yield self._event("content_part.done", content_index=0, part=part)
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}
        self._open = None

    def _event(self, name: str, /, **fields: Any) -> Event:
        head = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return name, {**head, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now; its content grows later."""
    return {**item, "content": list(item["content"])} if "content" in item else dict(item)
