"""Reads a person's lines: an editable prompt on a terminal, plain lines from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from girih.serve.chat.session import ChatSession
from girih.serve.chat.settings import Settings
from girih.serve.chat.view import View

FILE_COMMANDS = ("/save", "/load")


def talk(session: ChatSession, view: View) -> None:
    """Handle lines until the person leaves."""
    lines = _typed_lines(session, view) if sys.stdin.isatty() else _piped_lines()
    for line in lines:
        session.handle(line)
        if session.is_over:
            return


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _typed_lines(session: ChatSession, view: View) -> Iterator[str]:
    prompt: PromptSession[str] = PromptSession(
        completer=CommandCompleter(session),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        prompt_continuation="  ",
    )
    while True:
        try:
            yield prompt.prompt(FormattedText([("bold ansicyan", "› ")]))
        except KeyboardInterrupt:
            view.note("Ctrl-D or /quit leaves")
        except EOFError:
            return


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class CommandCompleter(Completer):
    """Completes commands, names of settings, and files."""

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """Yield what may stand at the cursor."""
        line = document.text_before_cursor
        command, space, rest = line.partition(" ")
        if not line.startswith("/"):
            return
        if not space:
            yield from _starting(command, list(self._session.commands))
        elif command == "/set":
            word = rest.rpartition(" ")[2]
            yield from _starting(word, [f"{name}=" for name in Settings.names])
        elif command in FILE_COMMANDS:
            yield from self._paths.get_completions(Document(rest), event)


def _starting(word: str, known: list[str]) -> Iterator[Completion]:
    for name in known:
        if name.startswith(word):
            yield Completion(name, start_position=-len(word))
