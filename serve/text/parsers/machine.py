"""A parser that is fed text in pieces and written as if it had the whole text.

A format is a generator over a `Machine`: it asks for text with `yield from`, and waits there until
more comes. What it does depends on the characters only, never on how they were cut, so any split
of a text gives the same content, reasoning and calls.

    push(text) ─▶ buffer ─▶ format's generator ─▶ ChatDelta
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from girih.serve.text.parsers.parts import ChatDelta, ToolCallDelta

Run = Generator[None, None, None]
"""A running format: it yields when it needs more text."""

JSON_SPACE = " \t\r\n"


def random_id() -> str:
    """Return an id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class Context:
    """Facts of a request that a format may use.

    Attributes:
        tools: the functions offered, name → JSON schema of its arguments.
        is_thinking: whether the prompt ends inside the model's reasoning.
        has_thought: whether the prompt ends with reasoning that is over already.
        max_calls: further calls are dropped; None for no limit.
        make_id: gives ids to calls.
    """

    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_thinking: bool = False
    has_thought: bool = False
    max_calls: int | None = None
    make_id: Callable[[], str] = random_id


class Machine:
    """The buffer of one output and what was found in it so far.

    Args:
        context: of the request.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.num_calls = 0
        self._buffer = ""
        self._ended = False
        self._delta = ChatDelta()
        self._space = ""  # white space that is shown only when more content follows
        self._after_call = False
        self._arguments_seen = False

    # ---- the driver's side ----

    def feed(self, text: str) -> None:
        """Add text to the buffer."""
        self._buffer += text

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def take(self) -> ChatDelta:
        """Return what was found since the last time."""
        delta, self._delta = self._delta, ChatDelta()
        return delta

    # ---- reading ----

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it, "" at the end."""
        while not self._buffer and not self._ended:
            yield
        return self._buffer[:1]

    def skip(self, characters: str = JSON_SPACE) -> Generator[None, None, str]:
        """Read over any of `characters`; returns what was read."""
        skipped = ""
        while True:
            rest = self._buffer.lstrip(characters)
            skipped += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            if rest or self._ended:
                return skipped
            yield

    def starts_with(self, *markers: str) -> Generator[None, None, str]:
        """Read the longest of `markers` that is next; returns it, else ""."""
        while not self._ended and any(
            len(marker) > len(self._buffer) and marker.startswith(self._buffer)
            for marker in markers
        ):
            yield
        found = max((m for m in markers if self._buffer.startswith(m)), key=len, default="")
        self._buffer = self._buffer[len(found) :]
        return found

    def close_call(self, end: str, *following: str) -> Run:
        """Read over `end`; drop the beginning of it, or of a next marker, that the text ends in."""
        yield from self.starts_with(end)
        yield from self.skip()
        while not self._ended and any(
            len(marker) > len(self._buffer) and marker.startswith(self._buffer)
            for marker in following
        ):
            yield
        if self._ended and any(marker.startswith(self._buffer) for marker in (end, *following)):
            self._buffer = ""

    def until(
        self, markers: Sequence[str], show: Callable[[str], None]
    ) -> Generator[None, None, str]:
        """Read up to the first of `markers` and over it.

        Args:
            markers: none of them begins with another.
            show: gets the text before it, as it comes.

        Returns:
            The marker, or "" when the text ended without one.
        """
        while True:
            found = [(self._buffer.find(m), m) for m in markers if m in self._buffer]
            if found:
                place, marker = min(found)
                text, self._buffer = self._buffer[:place], self._buffer[place + len(marker) :]
            else:
                keep = 0 if self._ended else _num_to_hold(self._buffer, markers)
                place = len(self._buffer) - keep
                text, self._buffer, marker = self._buffer[:place], self._buffer[place:], ""
            if text:
                show(text)
            if marker or self._ended:
                return marker
            yield

    def read_until(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """Return the text up to the first of `markers`, and the marker ("" at the end)."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        return "".join(pieces), marker

    def rest(self, show: Callable[[str], None]) -> Run:
        """Read to the end."""
        yield from self.until((), show)

    def while_true(self, is_inside: Callable[[str], bool], show: Callable[[str], None]) -> Run:
        """Read characters as long as `is_inside` says so, asked once for each in order."""
        while True:
            size = 0
            goes_on = True
            for character in self._buffer:
                goes_on = is_inside(character)
                if not goes_on:
                    break
                size += 1
            text, self._buffer = self._buffer[:size], self._buffer[size:]
            if text:
                show(text)
            if not goes_on or self._ended:
                return
            yield

    # ---- findings ----

    def content(self, text: str) -> None:
        """Show text to the client; white space around calls is left out."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        stripped = text.rstrip()
        if not stripped:
            self._space += text
            return
        self._delta.content += self._space + stripped
        self._space = text[len(stripped) :]

    def reasoning(self, text: str) -> None:
        """Show reasoning."""
        self._delta.reasoning += text

    def call(self, name: str) -> None:
        """Begin a call."""
        self._space = ""
        self._after_call = True
        self.num_calls += 1
        self._arguments_seen = False
        if self._is_wanted():
            piece = ToolCallDelta(self.num_calls - 1, self.context.make_id(), name)
            self._delta.merge(ChatDelta(tool_calls=[piece]))

    def arguments(self, text: str) -> None:
        """Continue the arguments of the call that was begun last."""
        self._arguments_seen = True
        if self._is_wanted() and text:
            piece = ToolCallDelta(self.num_calls - 1, arguments=text)
            self._delta.merge(ChatDelta(tool_calls=[piece]))

    def end_call(self) -> None:
        """The call is complete; without arguments it gets an empty object."""
        if not self._arguments_seen:
            self.arguments("{}")

    def whole_call(self, name: str, arguments: dict[str, Any]) -> None:
        """A call whose arguments were not JSON text."""
        self.call(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))

    def flush(self) -> None:
        """At the end: trailing white space is content unless there were calls."""
        if self.num_calls == 0:
            self._delta.content += self._space
        self._space = ""

    def drop_space(self) -> None:
        """Forget white space that no content has followed yet."""
        self._space = ""

    def _is_wanted(self) -> bool:
        limit = self.context.max_calls
        return limit is None or self.num_calls <= limit


def _num_to_hold(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `markers`."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


class FormatParser:
    """Drives a format; see `ChatParser`.

    Args:
        run: the format.
        context: of the request.
    """

    def __init__(self, run: Callable[[Machine], Run], context: Context) -> None:
        self._machine = Machine(context)
        self._run: Run | None = run(self._machine)

    def push(self, text: str, token_ids: Sequence[int]) -> ChatDelta:
        """Take more text; return what is certain by now."""
        self._machine.feed(text)
        self._step()
        return self._machine.take()

    def finish(self) -> ChatDelta:
        """Return what was held back when the output ended."""
        self._machine.end()
        while self._run is not None:
            self._step()
        self._machine.flush()
        return self._machine.take()

    def _step(self) -> None:
        if self._run is not None and next(self._run, self) is self:
            self._run = None
