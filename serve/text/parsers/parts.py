"""Parts of a chat answer: content, reasoning, tool calls; split from text as it comes.

Delta (text, ids) ─▶ ChatParser ─▶ ChatDelta ─▶ the writer of chat, responses or messages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class ToolCallDelta:
    """A piece of one tool call.

    Attributes:
        index: which call of the answer, from 0.
        id: with the first piece only.
        name: the function; with the first piece only.
        arguments: more of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ChatDelta:
    """News of one choice in the terms of a chat.

    Attributes:
        content: more of the visible answer.
        reasoning: more of the thinking before it.
        tool_calls: pieces of calls, in order.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def merge(self, later: ChatDelta) -> None:
        """Append `later` to this delta; the pieces of one call become one."""
        self.content += later.content
        self.reasoning += later.reasoning
        for piece in later.tool_calls:
            known = next((call for call in self.tool_calls if call.index == piece.index), None)
            if known is None:
                self.tool_calls.append(
                    ToolCallDelta(piece.index, piece.id, piece.name, piece.arguments)
                )
                continue
            known.id = known.id or piece.id
            known.name = known.name or piece.name
            known.arguments += piece.arguments


class ChatParser(Protocol):
    """Splits the text of one choice; any way of cutting the text gives the same whole."""

    def push(self, text: str, token_ids: Sequence[int]) -> ChatDelta:
        """Take more text (and the tokens it came from); return what is certain by now."""

    def finish(self) -> ChatDelta:
        """Return what was held back when the output ended."""


ParserFactory = Callable[[], ChatParser]
"""Makes the parser of one choice."""


class PlainText:
    """The parser of a model that only talks: all text is content."""

    def push(self, text: str, token_ids: Sequence[int]) -> ChatDelta:
        """Return the text as content."""
        return ChatDelta(content=text)

    def finish(self) -> ChatDelta:
        """Nothing is ever held back."""
        return ChatDelta()
