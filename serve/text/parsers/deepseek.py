"""DeepSeek V3 (arguments in a fenced block) and V3.1 (arguments as they are), told apart by it."""

from __future__ import annotations

from girih.serve.text.parsers.json_calls import value
from girih.serve.text.parsers.machine import Machine, Run

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


def run(machine: Machine) -> Run:
    """See `machine`."""
    while (yield from machine.until((CALLS, CALL, CALLS_END), machine.content)) in (CALLS, CALL):
        yield from machine.skip()
        yield from machine.starts_with(CALL)
        yield from _call(machine)
        yield from machine.until((CALL_END,), lambda _: None)
    yield from machine.rest(machine.content)


def _call(machine: Machine) -> Run:
    first, marker = yield from machine.read_until(SEPARATOR)
    if not marker:
        machine.content(CALL + first)
        return
    yield from machine.skip()
    if (yield from machine.peek()) == "{":  # V3.1: NAME<sep>{...}
        machine.call(first.strip())
    else:  # V3: "function"<sep>NAME, then the fenced arguments
        name, _ = yield from machine.read_until("\n")
        machine.call(name.strip())
        yield from machine.starts_with(FENCE + "json", FENCE)
        yield from machine.skip()
    yield from value(machine, machine.arguments)
    machine.end_call()
