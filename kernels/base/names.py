"""Suggestions for names that are misspelt: the only place that measures likeness."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(word: str, known: Iterable[str], count: int, cutoff: float = 0.6) -> list[str]:
    """Return up to `count` entries of `known` that are like `word`, the most similar first."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=cutoff)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of `known` most like `word`, or None when nothing is close."""
    return next(iter(nearest_names(word, known, 1, cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean 'NAME'? " for the nearest name, or "" when nothing is close."""
    name = nearest(word, known, cutoff)
    return f"did you mean '{name}'? " if name is not None else ""


def unknown_name(owner: str, kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `owner` has no field or option `name`, which one is near, and which there are."""
    names = list(known)
    return (
        f"{owner} has no {kind} '{name}'; {did_you_mean(name, names)}"
        f"{kind.capitalize()}s: {', '.join(names)}"
    )
