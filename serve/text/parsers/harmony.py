"""gpt-oss: messages in channels. analysis is reasoning, final is content, commentary has calls.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
"""

from __future__ import annotations

import re

from girih.serve.text.parsers.machine import Machine, Run

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def run(machine: Machine) -> Run:
    """See `machine`; text outside of messages is content."""
    while True:
        machine.drop_space()
        header = yield from machine.until((CHANNEL, START), machine.content)
        if not header:
            return
        head, found = yield from machine.read_until(MESSAGE)
        if not found:
            return
        yield from _message(machine, head)


def _message(machine: Machine, head: str) -> Run:
    recipient = RECIPIENT.search(head)
    if recipient is not None:
        machine.call(recipient.group(1))
        yield from machine.until(ENDS, machine.arguments)
        machine.end_call()
        return
    is_reasoning = "analysis" in head
    yield from machine.until(ENDS, machine.reasoning if is_reasoning else machine.content)
