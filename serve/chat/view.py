"""Shows a chat: colours on a terminal, answers alone elsewhere."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.text import Text

from girih.serve.chat.backends import Piece

KEPT = "\n\t"
LEFT_OUT = ("Cc", "Cs")  # what steers a terminal, and halves of characters, which none shows


def printable(text: str) -> str:
    """Return text without control characters, so that no answer can steer the terminal."""
    return "".join(c for c in text if c in KEPT or unicodedata.category(c) not in LEFT_OUT)


class View:
    """Writes answers to stdout, and notes to stdout on a terminal only.

    Args:
        console: where to write.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._in_thought = False

    @property
    def is_terminal(self) -> bool:
        """True if a person watches."""
        return self._console.is_terminal

    def piece(self, piece: Piece) -> None:
        """Show part of an answer."""
        if self._in_thought and not piece.is_thought and piece.text:
            self._write("\n\n")
            self._in_thought = False
        self._in_thought = self._in_thought or piece.is_thought
        self._write(printable(piece.text), "dim italic" if piece.is_thought else "")

    def end_answer(self, summary: str) -> None:
        """End the line of an answer and show its figures."""
        self._in_thought = False
        self._write("\n")
        if summary:
            self.note(summary)

    def note(self, text: str) -> None:
        """Show something about the chat, not of it."""
        if self.is_terminal:
            self._write(printable(text) + "\n", "dim")

    def error(self, text: str) -> None:
        """Show what went wrong."""
        self._write(printable(text) + "\n", "red")

    def _write(self, text: str, style: str = "") -> None:
        if text:
            self._console.print(Text(text, style=style), end="")
            self._console.file.flush()
