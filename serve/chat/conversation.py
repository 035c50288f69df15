"""The messages of a conversation, and their file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from girih.kernels.base.errors import RequestError

Message = dict[str, Any]


@dataclass
class Conversation:
    """The messages so far.

    Attributes:
        system: instructions that come before everything, or None.
        turns: messages of the user and the assistant, oldest first.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """Return all messages as a model's template takes them."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + self.turns

    def add(self, role: str, text: str) -> None:
        """Append a message."""
        self.turns.append({"role": role, "content": text})

    def save(self, file: str) -> None:
        """Write the messages as JSON.

        Raises:
            RequestError: the file cannot be written.
        """
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=2)
        try:
            Path(file).expanduser().write_text(text + "\n", "utf-8", "backslashreplace")
        except OSError as error:
            raise RequestError(f"{file} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, file: str) -> Conversation:
        """Read what `save` wrote, or a plain list of messages.

        Raises:
            RequestError: the file cannot be read or holds no messages.
        """
        try:
            content = json.loads(Path(file).expanduser().read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"{file} cannot be read: {error}") from error
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RequestError(
                f'{file} holds no messages; a list of {{"role": …, "content": …}} is needed, '
                'alone or under "messages"'
            )
        system = [m["content"] for m in messages if m["role"] == "system"]
        return cls(
            "\n".join(system) if system else None, [m for m in messages if m["role"] != "system"]
        )


def _is_message(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("role") in ("system", "user", "assistant")
        and isinstance(entry.get("content"), str)
    )
