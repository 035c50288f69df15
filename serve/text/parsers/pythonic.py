"""Calls as a Python list: [get_weather(city="Oslo", days=2), now()], the whole answer."""

from __future__ import annotations

import ast
from typing import Any

from girih.serve.text.parsers.machine import Machine, Run

START, END = "<|python_start|>", "<|python_end|>"
CONSTANTS = {"true": True, "false": False, "null": None}
MAX_CHARACTERS = 100_000


def run(machine: Machine) -> Run:
    """See `machine`; text that is no list of calls is content."""
    before = yield from machine.skip()
    before += yield from machine.starts_with(START)
    before += yield from machine.skip()
    if (yield from machine.peek()) != "[":
        machine.content(before)
        yield from machine.rest(machine.content)
        return
    pieces: list[str] = []
    yield from machine.while_true(ListScanner(), pieces.append)
    text = "".join(pieces)
    calls = read_calls(text)
    if calls is None:
        machine.content(before + text)
    else:
        for name, arguments in calls:
            machine.whole_call(name, arguments)
        yield from machine.skip()
        yield from machine.close_call(END)
    yield from machine.rest(machine.content)


class ListScanner:
    """Tells where a Python list ends: ask it once for each character, in order."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._done = False

    def __call__(self, character: str) -> bool:
        """Return whether `character` belongs to the list."""
        if self._done:
            return False
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            self._quote = "" if character == self._quote else self._quote
        elif character in "'\"":
            self._quote = character
        else:
            self._depth += (character in "[({") - (character in "])}")
            self._done = self._depth == 0
        return True


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of a Python list; None when it is anything else."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** in a call")
        arguments[keyword.arg] = _value(keyword.value)
    return ast.unparse(node.func), arguments


def _value(node: ast.expr) -> Any:
    """A literal; true, false and null of JSON are taken too."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(k)): _value(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a JSON value")
    return value
