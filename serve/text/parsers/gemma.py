"""Gemma: call:NAME{key:<escape>text<escape>,number:3} between markers.

FunctionGemma and Gemma 4 differ in their markers only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from girih.serve.text.parsers.machine import Machine, Run


@dataclass(frozen=True)
class Marks:
    """The markers of one model's calls.

    Attributes:
        start: before a call.
        end: after it.
        quote: around texts.
    """

    start: str
    end: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')
PREFIX = "call:"


def make_run(marks: Marks) -> Callable[[Machine], Run]:
    """The format of one model."""

    def run(machine: Machine) -> Run:
        while (yield from machine.until((marks.start,), machine.content)):
            text, _ = yield from machine.read_until(marks.end)
            call = read_call(text, marks.quote)
            if call is None:
                machine.content(marks.start + text)
            else:
                machine.whole_call(*call)

    return run


def read_call(text: str, quote: str) -> tuple[str, dict[str, Any]] | None:
    """The call in a text; None when there is none."""
    name, brace, rest = text.strip().removeprefix(PREFIX).partition("{")
    if not text.strip().startswith(PREFIX) or not brace or not name.strip():
        return None
    try:
        arguments = _Reader("{" + rest, quote).value()
    except (ValueError, IndexError, RecursionError):
        return None
    return name.strip(), arguments


class _Reader:
    """Reads the loose notation of the arguments."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._place = 0

    def value(self) -> Any:
        """One value; raises ValueError or IndexError when it is damaged."""
        text, quote = self._text, self._quote
        if text.startswith(quote, self._place):
            start = self._place + len(quote)
            end = text.index(quote, start)
            self._place = end + len(quote)
            return text[start:end]
        if text[self._place] == "{":
            return dict(self._items("}", self._pair))
        if text[self._place] == "[":
            return self._items("]", self.value)
        if text[self._place] == '"':
            value, self._place = json.JSONDecoder(strict=False).raw_decode(text, self._place)
            return value
        word = self._word(",}]")
        try:
            return json.loads(word)
        except ValueError:
            return word

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        self._place += 1
        items: list[Any] = []
        while True:
            self._skip(" \n,")
            if self._text[self._place] == closing:
                self._place += 1
                return items
            items.append(read())

    def _pair(self) -> tuple[str, Any]:
        if self._text.startswith((self._quote, '"'), self._place):
            key = str(self.value())
            self._skip(" ")
        else:
            key = self._word(":")
        self._place += 1  # the colon
        self._skip(" \n")
        return key, self.value()

    def _word(self, ends: str) -> str:
        start = self._place
        while self._text[self._place] not in ends:
            self._place += 1
        if self._place == start:
            raise ValueError("an empty word")
        return self._text[start : self._place].strip()

    def _skip(self, characters: str) -> None:
        while self._text[self._place] in characters:
            self._place += 1
