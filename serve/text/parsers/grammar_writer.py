"""Collects the rules of one Lark grammar, and gives out the expressions that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from girih.runtime.structured.lark import lark_escaped, quoted
from girih.runtime.structured.tag_grammar import json_in_lark

ANY, SOME = "(.|\\n)*", "(.|\\n)+"
"""Regular expressions of any text, and of any but the empty one."""


@dataclass(frozen=True)
class Tool:
    """A function as the grammar sees it.

    Attributes:
        name: its name.
        schema: JSON schema of its arguments.
    """

    name: str
    schema: dict[str, Any]


class Writer:
    """Collects rules.

    Args:
        control_id: id of a control token by its text, None for anything else.
        template: the model's chat template.
    """

    def __init__(self, control_id: Callable[[str], int | None], template: str = "") -> None:
        self.lines: list[str] = []
        self.template = template
        self._control_id = control_id

    def text(self, text: str) -> str:
        """Expression for fixed text, "" for none; a control token is itself."""
        if not text:
            return ""
        token_id = self._control_id(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def is_control(self, text: str) -> bool:
        """Return whether a text is one control token."""
        return self._control_id(text) is not None

    def rule(self, expression: str) -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def json(self, schema: Any) -> str:
        """Expression for JSON of a schema."""
        return self.rule(json_in_lark(schema))

    def until(self, end: str, inside: Sequence[str] = (), unless: Sequence[str] = ()) -> str:
        """Expression for text up to and including the first `end`.

        Args:
            end: a marker.
            inside: regular expressions; the text before it is all of them.
            unless: regular expressions; the text before it is the start of none.
        """
        if self.is_control(end):
            text = self._terminal([f"/{part}/" for part in inside or [SOME]], unless)
            return f"({text}{'' if inside else '?'} {self.text(end)})"
        mark = lark_escaped(end)
        # A marker that `inside` could run over is the end all the same.
        over = [f"{ANY}{mark}{SOME}"] if inside else []
        whole = _joined([f"/({part}){mark}/" for part in inside or [ANY]], [*unless, *over])
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {whole}")
        return name

    def anything(self, unless: Sequence[str] = ()) -> str:
        """Expression for free text, or none."""
        return f"{self._terminal([f'/{SOME}/'], unless)}?"

    def _terminal(self, parts: Sequence[str], unless: Sequence[str]) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {_joined(parts, unless)}")
        return name

    def pick(self, expressions: Sequence[str]) -> str:
        """Expression for one of several."""
        return self.rule(" | ".join(expressions))


def _joined(parts: Sequence[str], unless: Sequence[str]) -> str:
    return " & ".join([*parts, *(f"~/{barred}/" for barred in unless)])


def listed(items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Expression for items in order, of which some may be left out.

    Args:
        items: (expression, whether it must be there).
        separator: expression between two items.

    Returns:
        "" when nothing can be there.
    """
    options: list[str] = []
    for index, (expression, is_required) in enumerate(items):
        rest = [f"({separator} {e})" + ("" if must else "?") for e, must in items[index + 1 :]]
        options.append(" ".join([expression, *rest]))
        if is_required:
            return f"({' | '.join(options)})"
    return f"({' | '.join(options)})?" if options else ""
