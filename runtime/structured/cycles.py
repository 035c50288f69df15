"""Schemas that no finite text satisfies, because what they need comes back to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from girih.runtime.records.structured_output import children
from girih.runtime.structured.schema import DEFINITIONS, resolve, subschemas

Place = tuple[str, Any]
"""A JSON pointer and the schema there."""


def find_cycle(schema: Any) -> list[str]:
    """Look for a part in use that no finite text satisfies.

    Recursion with a way out (an optional property, an empty list, another option) is fine.

    Returns:
        Pointers of the parts on the way round, the first one again at the end; empty without one.
    """
    used = _used(schema)
    needs = {key: [*_in_place(schema, *used[key]), *_inside(*used[key])] for key in used}
    finite: set[int] = set()
    size = -1
    while size < len(finite):
        size = len(finite)
        for key in reversed(used):  # inner parts come later
            if all(any(_is_finite(part, finite) for _, part in one) for one in needs[key]):
                finite.add(key)
    start = next((key for key in used if key not in finite), None)
    return [] if start is None else _way_round(start, used, needs, finite)


def _is_finite(part: Any, finite: set[int]) -> bool:
    return not isinstance(part, dict) or id(part) in finite


def _used(schema: Any) -> dict[int, Place]:
    """Every part that is reached from the whole, by its id."""
    used: dict[int, Place] = {}
    queue: list[Place] = [("#", schema)]
    for place, part in queue:
        if isinstance(part, dict) and id(part) not in used:
            used[id(part)] = (place, part)
            inner = subschemas(part)
            queue += [(place + p, child) for p, child in inner if not p.startswith(DEFINITIONS)]
            queue += _target(schema, part)
    return used


def _target(schema: Any, part: dict[str, Any]) -> list[Place]:
    reference = part.get("$ref")
    return [(reference, resolve(schema, reference))] if isinstance(reference, str) else []


def _in_place(schema: Any, place: str, part: dict[str, Any]) -> Iterator[list[Place]]:
    """Lists of parts; a text has to satisfy one of each list."""
    if target := _target(schema, part):
        yield target
    for name in ("allOf", "anyOf", "oneOf"):
        listed = part[name] if isinstance(part.get(name), list) else []
        options = [(f"{place}/{name}/{step}", child) for step, child in children(listed)]
        if name == "allOf":
            yield from [[option] for option in options]
        elif options:
            yield [option for option in options if option[1] is not False] or options


def _inside(place: str, part: dict[str, Any]) -> Iterator[list[Place]]:
    """The same of parts that an object or a list must contain."""
    kind = part.get("type", "object" if "properties" in part else None)
    if kind in ("object", ["object"]) and isinstance(part.get("required"), list):
        named = part["properties"] if isinstance(part.get("properties"), dict) else {}
        for name in filter(lambda n: isinstance(n, str), part["required"]):
            step = f"properties/{name}" if name in named else "additionalProperties"
            yield [(f"{place}/{step}", named.get(name, part.get("additionalProperties")))]
    elif kind in ("array", ["array"]) and isinstance(part.get("minItems"), int):
        rest, least = part.get("items"), part["minItems"]
        first = rest if isinstance(rest, list) else part.get("prefixItems")
        listed = [child for _, child in children(first)][:least]
        yield from [[(f"{place}/items/{index}", child)] for index, child in enumerate(listed)]
        if least > len(listed):
            yield [(f"{place}/items", rest)]


def _way_round(
    start: int, used: dict[int, Place], needs: dict[int, list[list[Place]]], finite: set[int]
) -> list[str]:
    """From a part that is not finite through what it needs, until a part comes again."""
    way: list[int] = []
    while start not in way:
        way.append(start)
        missing = next(
            one for one in needs[start] if not any(_is_finite(p, finite) for _, p in one)
        )
        start = id(missing[0][1])
    return [used[key][0] for key in [*way[way.index(start) :], start]]
