"""Mistral: [TOOL_CALLS] and a JSON list of calls, or NAME[ARGS]{...} (NAME{...}) for each call."""

from __future__ import annotations

from girih.serve.text.parsers.json_calls import call_object, value
from girih.serve.text.parsers.machine import JSON_SPACE, Machine, Run

START, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
ID_MARK = "[CALL_ID]"


def run(machine: Machine) -> Run:
    """See `machine`."""
    while (yield from machine.until((START,), machine.content)):
        space = yield from machine.skip()
        if (yield from machine.starts_with("[")):
            yield from _list(machine, START + space + "[")
        else:
            yield from _named(machine)


def _list(machine: Machine, before: str) -> Run:
    before += yield from machine.skip()
    while (yield from machine.peek()) == "{":
        text = yield from call_object(machine)
        if text is not None:
            machine.content(before + text)
            return
        before = ""
        yield from machine.skip(JSON_SPACE + ",")
    yield from machine.starts_with("]")


def _named(machine: Machine) -> Run:
    name: list[str] = []
    yield from machine.while_true(lambda c: c not in "[{" + JSON_SPACE, name.append)
    yield from machine.skip()
    if (yield from machine.starts_with(ID_MARK)):
        yield from machine.while_true(lambda c: c not in "[{", lambda _: None)
    yield from machine.starts_with(ARGUMENTS)
    yield from machine.skip()
    if not name or (yield from machine.peek()) != "{":
        machine.content(START + "".join(name))
        return
    machine.call("".join(name))
    yield from value(machine, machine.arguments)
    machine.end_call()
