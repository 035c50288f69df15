"""A reasoning format and a tool format as one parser."""

from __future__ import annotations

from girih.serve.text.parsers.machine import Context, FormatParser, Machine, Run
from girih.serve.text.parsers.registry import ReasoningFormat, ToolFormat


def make_parser(
    reasoning: ReasoningFormat | None, tools: ToolFormat | None, context: Context
) -> FormatParser:
    """A parser that reads reasoning first, then content and calls; None leaves that part out."""

    def run(machine: Machine) -> Run:
        if reasoning is not None:
            yield from reasoning.run(machine)
        if tools is not None:
            yield from tools.run(machine)
        yield from machine.rest(machine.content)

    return FormatParser(run, context)
