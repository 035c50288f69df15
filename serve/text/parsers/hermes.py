"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

from girih.serve.text.parsers.json_calls import call_object
from girih.serve.text.parsers.machine import Machine, Run

START, END = "<tool_call>", "</tool_call>"


def run(machine: Machine) -> Run:
    """See `machine`."""
    while (yield from machine.until((START,), machine.content)):
        space = yield from machine.skip()
        text = yield from call_object(machine)
        if text is not None:
            machine.content(START + space + text)
            continue
        yield from machine.skip()
        yield from machine.close_call(END, START)
