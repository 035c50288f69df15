"""Objects that list their properties have no others, unless their schema says that they may.

A place in the JSON is described by a schema and those that it takes in (allOf, anyOf, oneOf, $ref);
they are closed together: the outermost one gets the names of all, each option of anyOf gets those
around it as well, and what is taken in by reference is a copy that stays open.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from girih.runtime.structured.schema import FORMATS, resolve, subschemas

SAYS = ("additionalProperties", "unevaluatedProperties")
OPTIONS = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *OPTIONS)
OWN_NAME = ("$id", "$anchor", "$schema", "$defs", "definitions")

Names = dict[str, bool]
"""Properties that a schema names; whether it lists them (or only requires them)."""


def prepare(schema: Any, is_closed: bool) -> Any:
    """Leave out unknown formats, and close objects (in place).

    Args:
        schema: any JSON schema.
        is_closed: close objects with an empty list of properties too.
    """
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
                del node["format"]
            stack.extend(child for _, child in subschemas(node))
    close_objects(schema, is_closed)
    return schema


def close_objects(schema: Any, with_empty: bool) -> None:
    """Close the objects of a schema (in place).

    Args:
        schema: any JSON schema.
        with_empty: an empty list of properties counts as a list.
    """
    _Closing(schema, with_empty).run()


class _Closing:
    def __init__(self, schema: Any, with_empty: bool) -> None:
        self._schema = schema
        self._source = copy.deepcopy(schema)  # what references meant before anything was closed
        self._with_empty = with_empty
        self._places = [schema]  # schemas that describe a place by themselves
        self._done: set[int] = set()
        self._known: dict[int, Names | None] = {}
        self._open: dict[str, str] = {}  # reference → one to an open copy

    def run(self) -> None:
        seen: set[int] = set()
        while self._places:
            node = self._places.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                self._close(node, {})
                self._places += _inner(node)

    def _close(self, node: Any, around: Names) -> None:
        """Close what describes a place; schemas around it name further properties."""
        if not isinstance(node, dict) or id(node) in self._done:
            return
        self._done.add(id(node))
        options = [name for name in OPTIONS if isinstance(node.get(name), list)]
        is_split = len(options) == 1
        own = self._found_names(node, but=options) if is_split else self._names(node)
        if own is None:
            return
        names = _joined(around, own)
        if is_split:
            for option in node[options[0]]:
                self._close(option, names)
        elif _is_cover(node) and not around:
            for part in _parts_in(node):
                self._close(part, {})
        elif any(names.values()) or (self._with_empty and "properties" in node):
            self._finish(node, names, is_alone=not around)

    def _finish(self, node: dict[str, Any], names: Names, is_alone: bool) -> None:
        least = node.get("minProperties", 0)
        if isinstance(least, int) and least > len(names):
            return
        is_alone = is_alone and node.keys().isdisjoint({"$ref", "const", "enum", *IN_PLACE})
        self._open_parts(node)
        listed = _listed(node)
        node["properties"] = {**listed, **{n: True for n in names if n not in listed}}
        node["additionalProperties"] = False
        if is_alone:
            node.setdefault("type", "object")

    def _names(self, node: dict[str, Any]) -> Names | None:
        """Collect the names of a schema and those it includes; None if one allows further names."""
        if id(node) not in self._known:
            self._known[id(node)] = None  # it may take in itself
            self._known[id(node)] = self._found_names(node, ())
        return self._known[id(node)]

    def _found_names(self, node: dict[str, Any], but: Collection[str]) -> Names | None:
        if any(name in node for name in SAYS):
            return None
        names = _joined(dict.fromkeys(_required(node), False), dict.fromkeys(_listed(node), True))
        for part in self._parts(node, but):
            inner = self._names(part)
            if inner is None or "patternProperties" in part:
                return None
            names = _joined(names, inner)
        return names

    def _parts(self, node: dict[str, Any], but: Collection[str]) -> Iterator[dict[str, Any]]:
        """The schemas that a schema takes in."""
        yield from _parts_in(node, but)
        target = resolve(self._source, str(node.get("$ref")))
        if isinstance(target, dict):
            yield target

    def _open_parts(self, node: dict[str, Any]) -> None:
        """Have a schema, and those in it, take in open copies of what they refer to."""
        if isinstance(node.get("$ref"), str):
            node["$ref"] = self._opened(node["$ref"])
        for part in _parts_in(node):
            self._open_parts(part)

    def _opened(self, reference: str) -> str:
        target = resolve(self._source, reference)
        definitions = self._schema.setdefault("$defs", {})
        if not isinstance(target, dict) or not isinstance(definitions, dict):
            return reference
        if reference not in self._open:
            name = f"open-{len(definitions)}"
            self._open[reference] = f"#/$defs/{name}"
            copied = {k: copy.deepcopy(v) for k, v in target.items() if k not in OWN_NAME}
            definitions[name] = copied
            self._done.add(id(copied))
            self._places.append(copied)
            self._open_parts(copied)
        return self._open[reference]


def _joined(first: Names, second: Names) -> Names:
    both = {**first, **second}
    return {name: first.get(name, False) or second.get(name, False) for name in both}


def _required(node: dict[str, Any]) -> Iterator[str]:
    required = node.get("required")
    return (n for n in required if isinstance(n, str)) if isinstance(required, list) else iter(())


def _listed(node: dict[str, Any]) -> dict[str, Any]:
    properties = node.get("properties")
    return properties if isinstance(properties, dict) else {}


def _parts_in(node: dict[str, Any], but: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The schemas that a schema takes in and holds itself."""
    for name in IN_PLACE:
        parts = node.get(name)
        if name not in but and isinstance(parts, list):
            yield from (part for part in parts if isinstance(part, dict))


def _is_cover(node: dict[str, Any]) -> bool:
    """Return whether a schema names nothing itself and includes one that is closed elsewhere."""
    if any(name in node for name in ("properties", "patternProperties", "required", *OPTIONS)):
        return False
    return len([*_parts_in(node)]) + ("$ref" in node) == 1


def _inner(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas inside one that describe other places."""
    for place, child in subschemas(node):
        if not isinstance(child, dict):
            continue
        if place.startswith(tuple(f"/{name}/" for name in IN_PLACE)):
            yield from _inner(child)
        else:
            yield child
