"""Finds what xgrammar would silently ignore in a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from girih.runtime.records.structured_output import children
from girih.runtime.structured.schema import BOUNDS, FORMATS, literals, places

UNKNOWN = {
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems",
    "unevaluatedProperties", "additionalItems", "propertyNames", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
# It looks at the first of these that a schema has, and at nothing beside it.
FIRST = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
LITERAL = ("const", "enum")
# A schema without a type is one of an object or a list where it has one of these, else of anything.
SHAPES = ("properties", "additionalProperties", "items", "prefixItems")
OTHER = {
    "minItems", "maxItems", "required", "patternProperties", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "multipleOf", *BOUNDS,
}  # fmt: skip
CONSTRAINTS = {*OTHER, *FIRST, *SHAPES}
KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
}  # fmt: skip
LARGEST = 2**63 - 1
LARGEST_STEP = 1024
LONGEST = 256  # characters; its automata of longer patterns are slow, and then wrong


def passed_over(schema: Any) -> str:
    """The first thing that xgrammar would not keep, with its place; empty without one."""
    for place, part in places(schema):
        for fault in _faults(part):
            return f"{fault}, at {place or '/'}"
    return ""


def fit(schema: Any) -> None:
    """Say what xgrammar would decide otherwise by itself (in place).

    It closes objects of which nothing is said, and puts control characters into texts of a certain
    length, but not into those of a pattern.
    """
    for _, part in places(schema):
        if "properties" in part or "patternProperties" in part or part.get("type") == "object":
            part.setdefault("additionalProperties", True)
        if "minLength" in part or "maxLength" in part:
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = rf"^[^\x00-\x1f]{{{least},{most}}}$"


def _faults(part: dict[str, Any]) -> Iterator[str]:
    """Yield what would be ignored of a schema itself, apart from those inside it."""
    yield from sorted(UNKNOWN & part.keys())
    yield from _beside(part)
    yield from _numbers(part)
    yield from _wrong_types(part)
    reference, together = part.get("$ref", "#"), part.get("allOf", ())
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        yield f"the reference {str(reference)[:80]!r}"
    if isinstance(together, list) and len(together) > 1:
        yield "allOf with more than one schema"
    yield from (f"an empty {name}" for name in FIRST if part.get(name) == [])
    listed = [name for name, _ in children(part.get("properties"))]
    if isinstance(part.get("required"), list) and (not listed or "additionalProperties" in part):
        yield from (f"required {str(n)[:80]!r}" for n in part["required"] if n not in listed)


def _beside(part: dict[str, Any]) -> Iterator[str]:
    """Constraints that are lost beside others."""
    first = next((name for name in FIRST if name in part), None)
    if first is not None:
        keeps_type = first in LITERAL
        lost = (CONSTRAINTS | (set() if keeps_type else {"type"})) & part.keys() - {first}
        yield from (f"{name} beside {first}" for name in sorted(lost))
    elif "type" not in part and not any(name in part for name in SHAPES):
        yield from (f"{name} without a type" for name in sorted(OTHER & part.keys()))
    yield from _texts(part)


def _wrong_types(part: dict[str, Any]) -> Iterator[str]:
    """Literals that the type beside them does not allow."""
    kinds = part.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(kinds, list):
        options = [child for _, child in children(part.get("enum"))]
        for value in [part["const"]] if "const" in part else options:
            kind = KINDS.get(type(value), "null")
            if kind not in kinds and not (kind == "integer" and "number" in kinds):
                yield f"type beside {str(value)[:40]!r}"


def _texts(part: dict[str, Any]) -> Iterator[str]:
    first = ["format"] if str(part.get("format")) in FORMATS else []
    first += ["pattern"] if "pattern" in part else []
    lengths = [n for n in ("minLength", "maxLength") if n in part]
    if len(first) + bool(lengths) > 1:
        yield f"{[*first, *lengths][1]} beside {first[0]}"
    if any(mark in str(part.get("pattern")) for mark in ('"', "\\\\")):
        yield "a pattern with quotes or backslashes"
    for name in lengths:
        if not (isinstance(part[name], int) and 0 <= part[name] <= LONGEST):
            yield f"{name} {str(part[name])[:40]}"


def _numbers(part: dict[str, Any]) -> Iterator[str]:
    step = part.get("multipleOf", 1)
    is_whole = isinstance(step, int) and part.get("type") == "integer"
    if "multipleOf" in part and not (is_whole and 0 < step <= LARGEST_STEP):
        yield f"multipleOf {str(step)[:40]}"
    for name, value in literals(part):
        if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            yield f"{name} {str(value)[:40]}"
