"""Qwen3-Coder: <function=NAME> with <parameter=KEY> elements inside <tool_call>."""

from __future__ import annotations

import json
from typing import Any

from girih.serve.text.parsers.machine import Machine, Run

START, FUNCTION, END = "<tool_call>", "<function=", "</tool_call>"
PARAMETER, PARAMETER_END, FUNCTION_END = "<parameter=", "</parameter>", "</function>"


def run(machine: Machine) -> Run:
    """See `machine`; a value is text where the function's schema says string, else JSON."""
    while marker := (yield from machine.until((START, FUNCTION), machine.content)):
        if marker == START:
            space = yield from machine.skip()
            if not (yield from machine.starts_with(FUNCTION)):
                machine.content(START + space)
                continue
        name, end = yield from machine.read_until(">")
        if not end:
            machine.content(FUNCTION + name)
            return
        yield from _call(machine, name.strip())
        yield from machine.skip()
        yield from machine.close_call(END, START, FUNCTION)


def _call(machine: Machine, name: str) -> Run:
    machine.call(name)
    schema = machine.context.tools.get(name, {})
    opening = "{"
    while True:
        _, marker = yield from machine.read_until(PARAMETER, FUNCTION_END, END)
        if marker != PARAMETER:
            break
        key, _ = yield from machine.read_until(">")
        text, closed = yield from machine.read_until(PARAMETER_END)
        if not closed:
            return
        value = typed(_without_frame(text), _schema_of(schema, key))
        pair = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        machine.arguments(opening + pair)
        opening = ", "
    machine.arguments("}" if opening == ", " else "{}")


def _without_frame(text: str) -> str:
    """The template puts each value on lines of its own."""
    return text.removeprefix("\n").removesuffix("\n")


def _schema_of(schema: dict[str, Any], key: str) -> dict[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def typed(text: str, schema: dict[str, Any]) -> Any:
    """A value written without quotes, as its schema wants it."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["string"]:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    other = {list: "array", dict: "object", type(None): "null"}.get(type(value))
    return text if "string" in kinds and other not in kinds else value
