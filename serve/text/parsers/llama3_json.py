"""Llama 3: the answer is {"name": ..., "parameters": {...}}, several with ";" between them."""

from __future__ import annotations

from girih.serve.text.parsers.json_calls import call_object
from girih.serve.text.parsers.machine import JSON_SPACE, Machine, Run

TAG = "<|python_tag|>"


def run(machine: Machine) -> Run:
    """See `machine`; text that begins otherwise is content."""
    space = yield from machine.skip()
    tag = yield from machine.starts_with(TAG)
    while (yield from machine.peek()) == "{":
        text = yield from call_object(machine)
        if text is not None:
            machine.content(space + tag + text)
            break
        space = tag = ""
        yield from machine.skip(JSON_SPACE + ";,")
    else:
        machine.content(space + tag)
    yield from machine.rest(machine.content)
