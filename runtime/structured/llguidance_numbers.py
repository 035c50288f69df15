"""Integers of a JSON schema, which llguidance reads as float64, and takes for int64 after that.

Bounds of numbers that need not be whole are float64 in most of JSON's readers too, and left alone.
"""

from __future__ import annotations

from typing import Any

from girih.runtime.structured.schema import BOUNDS, literals, places

LOWER = ("minimum", "exclusiveMinimum")
LARGEST = 2**63 - 1  # what larger ones become
LEAST = -(2**63) + 1024  # of float64, the smallest that the library has digits for


def rounded(schema: Any) -> str:
    """An integer that would become another, with its place; empty without one."""
    for place, part in places(schema):
        for name, value in literals(part):
            if isinstance(value, int) and not _is_kept(name, value, _is_whole(part)):
                return f"{name} {str(value)[:40]}, at {place or '/'}"
    return ""


def fit(schema: Any) -> None:
    """Raise lower bounds that the library has no digits for to the least it has (in place)."""
    for _, part in places(schema):
        for name in LOWER:
            value = part.get(name)
            if isinstance(value, int) and _is_whole(part):
                part[name] = max(value, LEAST)


def _is_whole(part: dict[str, Any]) -> bool:
    kinds = part.get("type")
    if isinstance(kinds, list):
        return "integer" in kinds and "number" not in kinds
    return kinds == "integer"


def _is_kept(name: str, value: int, is_whole: bool) -> bool:
    if name not in BOUNDS:
        return abs(value) <= LARGEST and _is_exact(value)
    # From an exclusive bound it takes a step in float64.
    reach = 1 if name.startswith("exclusive") else 0
    is_beyond = value <= LEAST - reach if name in LOWER else value >= LARGEST + reach
    if is_beyond or not is_whole:
        return True
    return all(_is_exact(value + step) for step in range(-reach, reach + 1))


def _is_exact(value: int) -> bool:
    return value == LARGEST or (value.bit_length() < 1024 and int(float(value)) == value)
