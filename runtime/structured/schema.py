"""JSON schemas before a grammar library sees them, and the place of what it does not like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from girih.runtime.records.structured_output import children

# Formats the grammar library enforces; any other is an annotation, as JSON Schema has it.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items: a list in old drafts
ALONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
DEFINITIONS = ("/$defs/", "/definitions/")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_TRIALS = 400


def subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas inside a schema, each with its JSON pointer from there."""
    if isinstance(schema, dict):
        alone = ((f"/{name}", schema.get(name)) for name in ALONE)
        for place, child in (*_in_maps(schema), *_in_lists(schema), *alone):
            if isinstance(child, dict | bool):
                yield place, child


def _in_maps(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in IN_MAPS:
        if isinstance(schema.get(name), dict):
            for key, child in schema[name].items():
                yield f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", child


def _in_lists(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in IN_LISTS:
        if isinstance(schema.get(name), list):
            for index, child in enumerate(schema[name]):
                yield f"/{name}/{index}", child


def places(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all those inside it that are objects, each with its JSON pointer."""
    stack = [("", schema)]
    while stack:
        place, part = stack.pop()
        if isinstance(part, dict):
            yield place, part
            stack += [(place + step, child) for step, child in subschemas(part)]


def literals(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers and other values that a schema itself compares with, each with its keyword."""
    stack = [(name, part[name]) for name in (*BOUNDS, "const", "enum") if name in part]
    while stack:
        name, value = stack.pop()
        stack += [(name, child) for _, child in children(value)]
        if not isinstance(value, dict | list):
            yield name, value


def resolve(schema: Any, reference: str) -> Any:
    """The schema that a local reference (`#/...`) names, or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = schema
    for step in unquote(reference).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        inner = dict(enumerate(node)) if isinstance(node, list) else node
        place = int(key) if isinstance(node, list) and key.isdecimal() else key
        if not isinstance(inner, dict) or place not in inner:
            return None
        node = inner[place]
    return node


def find_fault(schema: Any, fault_of: Callable[[Any], str]) -> tuple[str, str]:
    """Look for the smallest part that has the fault of the whole.

    Args:
        schema: has a fault.
        fault_of: the fault of a schema; empty without one.

    Returns:
        Its JSON pointer and the fault.
    """
    message = fault_of(schema)
    node, place, trials = schema, "", 0
    definitions = {}
    if isinstance(schema, dict):
        definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    found = True
    while found and trials < MAX_TRIALS:
        found = False
        for step, child in subschemas(node):
            trials += 1
            alone = {**definitions, **child} if isinstance(child, dict) else child
            if child is not node and fault_of(alone) == message:
                node, place, found = child, place + step, True
                break
            if trials >= MAX_TRIALS:
                break
    return place or "/", message
