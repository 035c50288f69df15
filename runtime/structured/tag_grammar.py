"""Structural tags as Lark: free text with constrained parts between tags.

Takes the format {"format": {...}} and the older {"structures": [...], "triggers": [...]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.closing import prepare
from girih.runtime.structured.gbnf import as_lark
from girih.runtime.structured.lark import lark_escaped, quoted, unslashed
from girih.runtime.structured.llguidance_numbers import fit

CONTENTS = ("json_schema", "const_string", "any_text", "regex", "grammar", "sequence", "or", "tag")
# White space between two JSON tokens: a model that is let go on fills its answer with newlines.
WHITE_SPACE = r"[ \t]|\n[ \t]{0,32}"
NO_FORMAT = 'the structural tag needs "format", or "structures" and "triggers"'
TEXT = "TEXT: /(.|\\n)+/"


def as_format(tag: Any) -> dict[str, Any] | None:
    """The format of a structural tag, the older form rewritten; None when it has neither."""
    if not isinstance(tag, dict):
        return None
    if isinstance(tag.get("format"), dict):
        return dict(tag["format"])
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        return None
    tags = [
        {
            "type": "tag",
            "begin": entry.get("begin"),
            "content": {"type": "json_schema", "json_schema": entry.get("schema", {})},
            "end": entry.get("end"),
        }
        for entry in structures
        if isinstance(entry, dict)
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def schemas_of(structured: StructuredOutput) -> Iterator[tuple[str, Any]]:
    """The JSON schemas of a form, each with its place in it ("" when it is all there is)."""
    if structured.kind == "json_schema":
        yield "", json.loads(structured.text)
    elif structured.kind == "structural_tag":
        for place, node in contents(as_format(json.loads(structured.text)), "json_schema"):
            yield f"{place}/json_schema", node["json_schema"]


def grammars_of(structured: StructuredOutput) -> Iterator[str]:
    """The grammars that a form was given, in GBNF or Lark."""
    if structured.kind == "grammar":
        yield structured.text
    elif structured.kind == "structural_tag":
        for _, node in contents(as_format(json.loads(structured.text)), "grammar"):
            yield str(node["grammar"])


def contents(node: Any, kind: str, place: str = "/format") -> Iterator[tuple[str, dict[str, Any]]]:
    """The contents of one type in a format, with their places."""
    if not isinstance(node, dict):
        return
    if node.get("type") == kind and kind in node:
        yield place, node
    for name in ("content", "elements", "tags"):
        part = node.get(name)
        if isinstance(part, list):
            for index, child in enumerate(part):
                yield from contents(child, kind, f"{place}/{name}/{index}")
        else:
            yield from contents(part, kind, f"{place}/{name}")


def prepared_format(structured: StructuredOutput) -> dict[str, Any]:
    """The format of a structural tag, its schemas prepared.

    Raises:
        RequestError: it has none.
    """
    found = as_format(json.loads(structured.text))
    if found is None:
        raise structured.error(NO_FORMAT)
    for _, node in contents(found, "json_schema"):
        node["json_schema"] = prepare(node["json_schema"], structured.is_closed)
    return found


def why_no_lark(tag: Any) -> str | None:
    """Why a structural tag cannot be written as Lark; None when it can."""
    found = as_format(tag)
    if found is None:
        return NO_FORMAT
    return _why_not(found, "/format")


def _why_not(node: Any, place: str) -> str | None:
    if not isinstance(node, dict):
        return f"the structural tag has no format at {place}"
    kind = node.get("type")
    if kind == "triggered_tags":
        return _why_not_triggered(node, place)
    if kind not in CONTENTS:
        return f"the structural tag has the type {kind!r} at {place}, which is not known"
    if kind in ("sequence", "or"):
        return _first_fault(node.get("elements"), f"{place}/elements")
    if kind == "tag":
        if not isinstance(node.get("begin"), str) or not isinstance(node.get("end"), str):
            return f"begin and end of the tag at {place} must be texts"
        return _why_not(node.get("content"), f"{place}/content")
    field = {"const_string": "value", "regex": "pattern", "grammar": "grammar"}.get(kind)
    if field is not None and not (isinstance(node.get(field), str) and node[field]):
        return f"the structural tag needs a text at {place}/{field}"
    if kind == "json_schema" and node.get("style", "json") != "json":
        return f"the structural tag has the style {node['style']!r} at {place}"
    return None


def _first_fault(nodes: Any, place: str) -> str | None:
    if not isinstance(nodes, list) or not nodes:
        return f"the structural tag needs a list at {place}"
    faults = (_why_not(node, f"{place}/{index}") for index, node in enumerate(nodes))
    return next((fault for fault in faults if fault is not None), None)


def _why_not_triggered(node: dict[str, Any], place: str) -> str | None:
    triggers = node.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        return f"the structural tag needs texts at {place}/triggers"
    fault = _first_fault(node.get("tags"), f"{place}/tags")
    if fault is not None:
        return fault
    for index, tag in enumerate(node["tags"]):
        if tag["type"] != "tag" or sum(tag["begin"].startswith(t) for t in triggers) != 1:
            return f"the tag at {place}/tags/{index} must begin with one of the triggers"
    return None


def tag_to_lark(structured: StructuredOutput) -> str:
    """The Lark grammar of a structural tag that `why_no_lark` has nothing against."""
    writer = _Writer(structured.is_compact)
    start = writer.rule(prepared_format(structured))
    return "\n".join([f"start: {start}", *writer.lines, TEXT]) + "\n"


class _Writer:
    """Collects rules; `rule` returns the expression that stands for a format."""

    def __init__(self, is_compact: bool) -> None:
        self.lines: list[str] = []
        self._is_compact = is_compact

    def rule(self, node: dict[str, Any]) -> str:
        """The expression of a format; every rule it needs is in `lines`."""
        kind = node["type"]
        if kind == "const_string":
            return quoted(node["value"])
        if kind == "any_text":
            return "TEXT?"
        if kind == "regex":
            return self._named(f"/{unslashed(node['pattern'])}/", is_terminal=True)
        if kind == "json_schema":
            return self._named(json_in_lark(node["json_schema"], self._is_compact))
        if kind == "grammar":
            return self._named(f"%lark {{\n{as_lark(node['grammar'])}\n}}")
        if kind == "sequence":
            return self._named(" ".join(self.rule(part) for part in node["elements"]))
        if kind == "or":
            return self._named(" | ".join(self.rule(part) for part in node["elements"]))
        if kind == "tag":
            return self._tag(node, quoted(node["begin"]))
        return self._triggered(node)

    def _tag(self, node: dict[str, Any], begin: str) -> str:
        content = node["content"]
        if content["type"] == "any_text" and node["end"]:
            rest = self._lazy(node["end"])
            return self._named(f"{begin} {rest}")
        return self._named(f"{begin} {self.rule(content)} {quoted(node['end'])}")

    def _triggered(self, node: dict[str, Any]) -> str:
        calls = []
        for trigger in node["triggers"]:
            tags = [
                self._tag(tag, quoted(tag["begin"].removeprefix(trigger)))
                for tag in node["tags"]
                if tag["begin"].startswith(trigger)
            ]
            if tags:
                calls.append(f"{self._lazy(trigger)} ({' | '.join(tags)})")
        one = self._named(" | ".join(calls))
        must = node.get("at_least_one")
        if node.get("stop_after_first"):
            return one if must else self._named(f"{one} | TEXT?")
        return self._named(f"{one}{'+' if must else '*'} TEXT?")

    def _lazy(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        name = f"u{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: /(.|\\n)*{lark_escaped(end)}/")
        return name

    def _named(self, expression: str, is_terminal: bool = False) -> str:
        name = f"{'T' if is_terminal else 'r'}{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def with_options(schema: Any, is_compact: bool) -> dict[str, Any]:
    """A schema for llguidance, which is told what white space may be between JSON tokens."""
    if isinstance(schema, bool):  # options can be set on objects only
        schema = {"$defs": {"all": schema}, "$ref": "#/$defs/all"}
    fit(schema)
    options = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": WHITE_SPACE}
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **options}}


def json_in_lark(schema: Any, is_compact: bool = False) -> str:
    """JSON of a schema in Lark."""
    return f"%json {json.dumps(with_options(schema, is_compact))}"
