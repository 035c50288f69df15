"""Calls as one JSON list: [{"name": ..., "parameters": {...}}, ...], or as a single object."""

from __future__ import annotations

from girih.serve.text.parsers.json_calls import call_object
from girih.serve.text.parsers.machine import JSON_SPACE, Machine, Run


def run(machine: Machine) -> Run:
    """See `machine`; text that begins otherwise is content."""
    before = yield from machine.skip()
    before += yield from machine.starts_with("[")
    before += yield from machine.skip()
    while (yield from machine.peek()) == "{":
        text = yield from call_object(machine)
        if text is not None:
            machine.content(before + text)
            before = ""
            break
        before = ""
        yield from machine.skip(JSON_SPACE + ",]")
    else:
        machine.content(before)
    yield from machine.rest(machine.content)
