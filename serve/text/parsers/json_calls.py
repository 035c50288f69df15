"""Calls written as JSON objects: {"name": "f", "arguments": {...}}, read as they come."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator

from girih.serve.text.parsers.machine import JSON_SPACE, Machine, Run

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")


class _Broken(Exception):
    """The text is not the JSON it seemed to be."""


class ValueScanner:
    """Tells where a JSON value ends: ask it once for each character, in order."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False
        self._done = False

    def __call__(self, character: str) -> bool:
        """Return whether `character` belongs to the value."""
        if self._done:
            return False
        if self._in_string:
            self._in_string_character(character)
            return True
        if self._depth == 0 and self._begun and character in ",}]" + JSON_SPACE:
            return False  # a number, true, false or null is over
        self._begun = True
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self._done = self._depth <= 0
        return True

    def _in_string_character(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self._done = self._depth == 0


def value(machine: Machine, show: Callable[[str], None]) -> Run:
    """Read one JSON value."""
    yield from machine.while_true(ValueScanner(), show)


def read_value(machine: Machine) -> Generator[None, None, str]:
    """Return the text of one JSON value."""
    pieces: list[str] = []
    yield from value(machine, pieces.append)
    return "".join(pieces)


def call_object(machine: Machine) -> Generator[None, None, str | None]:
    """Read a call that is one JSON object.

    Returns:
        None for a call; else the text that was read and is none.
    """
    reader = _ObjectReader(machine)
    with contextlib.suppress(_Broken):
        yield from reader.read()
    return reader.end()


class _ObjectReader:
    """Reads the members of one object; streams the arguments once the name is known."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._raw = ""
        self._has_name = False
        self._early = ""  # arguments that came before the name

    def read(self) -> Run:
        """Read from "{" to the "}" that closes it."""
        yield from self._expect("{")
        while True:
            yield from self._space(JSON_SPACE + ",")
            character = yield from self._machine.peek()
            if character in ("}", ""):
                yield from self._expect("}")
                return
            yield from self._member()

    def end(self) -> str | None:
        """Close the call; returns the text when it is none."""
        if not self._has_name:
            return self._raw
        self._machine.end_call()
        return None

    def _member(self) -> Run:
        key = yield from self._string()
        yield from self._space(JSON_SPACE)
        yield from self._expect(":")
        yield from self._space(JSON_SPACE)
        if key in NAMES and not self._has_name:
            self._begin(str((yield from self._string())))
        elif key in ARGUMENTS:
            yield from self._arguments()
        else:
            yield from value(self._machine, self._keep)

    def _begin(self, name: str) -> None:
        self._has_name = True
        self._machine.call(name)
        if self._early:
            self._machine.arguments(self._early)

    def _arguments(self) -> Run:
        character = yield from self._machine.peek()
        if character == '"':  # some models put the JSON text into a string
            self._show_arguments(str((yield from self._string())))
        elif character == "n":  # null: no arguments
            yield from value(self._machine, self._keep)
        else:
            yield from value(self._machine, self._show_and_keep)

    def _show_and_keep(self, text: str) -> None:
        self._keep(text)
        self._show_arguments(text)

    def _show_arguments(self, text: str) -> None:
        if self._has_name:
            self._machine.arguments(text)
        else:
            self._early += text

    def _keep(self, text: str) -> None:
        if not self._has_name:
            self._raw += text

    def _space(self, characters: str) -> Run:
        self._keep((yield from self._machine.skip(characters)))

    def _expect(self, character: str) -> Run:
        found = yield from self._machine.starts_with(character)
        if not found:
            raise _Broken
        self._keep(found)

    def _string(self) -> Generator[None, None, object]:
        text = yield from read_value(self._machine)
        self._keep(text)
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError) as error:
            raise _Broken from error
