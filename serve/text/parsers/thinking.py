"""Reasoning between two markers, most often <think> and </think>."""

from __future__ import annotations

from collections.abc import Callable

from girih.serve.text.parsers.machine import Machine, Run


def make_run(start: str, end: str, is_always_first: bool = False) -> Callable[[Machine], Run]:
    """The part of a format that reads reasoning; what follows it is left to the next part.

    Args:
        start: opens the reasoning; only the first thing in the output can, unless the prompt did.
        end: closes it.
        is_always_first: an output that begins without `start` is reasoning too.
    """

    def run(machine: Machine) -> Run:
        context = machine.context
        if not context.is_thinking:
            space = yield from machine.skip()
            opened = yield from machine.starts_with(start)
            if not opened and (context.has_thought or not is_always_first):
                machine.content(space)
                return
        else:
            yield from machine.skip()
            yield from machine.starts_with(start)
        yield from machine.skip()
        shown = _Trimmed(machine.reasoning)
        yield from machine.until((end,), shown)
        yield from machine.skip()

    return run


class _Trimmed:
    """Passes text on without the white space at its end."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._space = ""

    def __call__(self, text: str) -> None:
        stripped = text.rstrip()
        if not stripped:
            self._space += text
            return
        self._show(self._space + stripped)
        self._space = text[len(stripped) :]
