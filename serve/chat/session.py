"""A chat, line by line: commands change it, anything else is a message to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from girih.kernels.base.errors import GirihError, RequestError
from girih.serve.chat.backends import ChatBackend, Piece, longest_answer
from girih.serve.chat.conversation import Conversation, Message
from girih.serve.chat.interrupt import StopOnInterrupt
from girih.serve.chat.settings import Settings
from girih.serve.chat.view import View


@dataclass(frozen=True)
class Command:
    """One /command.

    Attributes:
        usage: how it is written.
        help: what it does.
        run: takes what follows the command.
    """

    usage: str
    help: str
    run: Callable[[str], None]


class ChatSession:
    """One conversation with one model.

    Args:
        backend: who answers.
        view: where text goes.
        settings: sampling values to start with.
        conversation: what was said before.
    """

    def __init__(
        self,
        backend: ChatBackend,
        view: View,
        settings: Settings,
        conversation: Conversation | None = None,
    ) -> None:
        self.conversation = conversation or Conversation()
        self.is_over = False
        self._backend = backend
        self._view = view
        self._settings = settings
        self.commands = {
            "/help": Command("/help", "list the commands", self._help),
            "/clear": Command("/clear", "forget all but the system message", self._clear),
            "/system": Command("/system [TEXT]", "show or set the system message", self._system),
            "/set": Command("/set [NAME=VALUE …]", "show or change sampling settings", self._set),
            "/retry": Command("/retry", "answer the last message anew", self._retry),
            "/save": Command("/save FILE", "write the conversation as JSON", self._save),
            "/load": Command("/load FILE", "read a saved conversation", self._load),
            "/quit": Command("/quit", "leave (also Ctrl-D)", self._quit),
        }

    def handle(self, line: str) -> None:
        """Obey a command, or answer a message; a mistake is shown, not raised."""
        text = line.strip()
        try:
            if text.startswith("/") and "\n" not in text:
                self._command(text)
            elif self._backend.continues:  # white space is part of a text
                self._ask(line)
            elif text:
                self._ask(text)
        except GirihError as error:
            self._view.error(str(error))

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = self.commands.get(name)
        if command is None:
            raise RequestError(f"unknown command {name}; there are {', '.join(self.commands)}")
        command.run(rest.strip())

    def _ask(self, text: str) -> None:
        before = list(self.conversation.turns)
        if text:
            self.conversation.add("user", text)
        if self.conversation.turns:
            self._answer(before)

    def _answer(self, before: list[Message]) -> None:
        """Answer what was said; on an error the turns are those of `before` again."""
        try:
            answer = self._stream()
        except GirihError:
            self.conversation.turns = before
            raise
        self.conversation.add("assistant", answer)

    def _stream(self) -> str:
        """Show the answer as it comes; returns what was shown, also when it was stopped."""
        meter = _Meter()
        pieces = self._backend.answer(self.conversation.messages(), self._settings)
        parts: list[str] = []
        stopped = False
        stop = StopOnInterrupt(at_once=self._backend.may_be_interrupted)
        try:
            with stop, closing(pieces):  # type: ignore[type-var]
                for piece in pieces:
                    meter.note(piece)
                    self._view.piece(piece)
                    if not piece.is_thought:
                        parts.append(piece.text)
                    stopped = stop.requested
                    if stopped:
                        break
        except KeyboardInterrupt:
            stopped = True
        limit = longest_answer(self._backend, self._settings)
        self._view.end_answer(meter.summary(stopped, limit))
        return "".join(parts)

    def _help(self, _: str) -> None:
        width = max(len(command.usage) for command in self.commands.values())
        for command in self.commands.values():
            self._view.note(f"{command.usage.ljust(width)}  {command.help}")
        self._view.note("Ctrl-C stops an answer. Esc Enter starts a new line.")

    def _clear(self, _: str) -> None:
        self.conversation = Conversation(self.conversation.system)
        self._view.note("forgotten")

    def _system(self, text: str) -> None:
        if text and self._backend.continues:
            raise RequestError("a model without a chat template takes no system message")
        if text:
            self.conversation.system = text
        self._view.note(f"system: {self.conversation.system or '(none)'}")

    def _set(self, words: str) -> None:
        for word in words.split():
            self._settings.set(word)
        values = self._settings.changed()
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        self._view.note(shown or "everything is at the model's defaults")
        self._view.note(f"settings: {', '.join(self._settings.names)}")

    def _retry(self, _: str) -> None:
        before = list(self.conversation.turns)
        if not before:
            raise RequestError("there is nothing to answer yet")
        if before[-1]["role"] == "assistant":
            self.conversation.turns.pop()
        self._answer(before)

    def _save(self, file: str) -> None:
        self.conversation.save(_named(file, "/save"))
        self._view.note(f"saved to {file}")

    def _load(self, file: str) -> None:
        self.conversation = Conversation.load(_named(file, "/load"))
        self._view.note(f"{len(self.conversation.turns)} messages from {file}")

    def _quit(self, _: str) -> None:
        self.is_over = True


class _Meter:
    """Counts tokens and seconds of one answer."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0
        self._reason: str | None = None

    def note(self, piece: Piece) -> None:
        """Digest a piece."""
        if self._first is None and (piece.text or piece.num_tokens):
            self._first = time.perf_counter()
        self._tokens += piece.num_tokens
        self._reason = piece.finish_reason or self._reason

    def summary(self, stopped: bool, max_tokens: int | None) -> str:
        """Return one line about the answer."""
        return ", ".join(self._facts(stopped, max_tokens))

    def _facts(self, stopped: bool, max_tokens: int | None) -> Iterator[str]:
        if stopped:
            yield "stopped"
        if self._reason == "length":
            limit = "the context is full" if max_tokens is None else f"max_tokens={max_tokens}"
            yield f"cut off ({limit})"
        if self._first is None:
            return
        if self._tokens:
            yield f"{self._tokens} token{'s' * (self._tokens != 1)}"
            seconds = time.perf_counter() - self._first
            if self._tokens > 1 and seconds > 0:
                yield f"{(self._tokens - 1) / seconds:.1f} tokens/s"
        yield f"first after {self._first - self._started:.2f} s"


def _named(file: str, command: str) -> str:
    if not file:
        raise RequestError(f"{command} needs the name of a file")
    return file
