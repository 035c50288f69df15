"""Reads a configuration's rotary embedding without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RotaryFacts:
    """Kinds of rotary embedding, and the lengths at which they change.

    Attributes:
        kinds: names as transformers has them, sorted ("default", "yarn", …).
        short_length: tokens of the longest sequence that "longrope" computes with its short
            factors; None for the other kinds.
        reach: tokens that "yarn" stretches its original length to; None for the other kinds.
    """

    kinds: tuple[str, ...]
    short_length: int | None
    reach: int | None


def read_rotary(config: Mapping[str, Any]) -> RotaryFacts:
    """Read the facts from the configuration of a language model; what has no sense is left out."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    inner = list(given.values()) if isinstance(given, dict) else []
    by_layer_type = any(isinstance(value, dict) for value in inner)
    parts = inner if by_layer_type else [given]
    kinds: set[str] = set()
    short, reach = [], []
    for part in parts:
        if not isinstance(part, dict):
            continue
        # Phi 3's first files call longrope "su" and "yarn".
        kind = "longrope" if "long_factor" in part else part.get("rope_type", part.get("type"))
        kinds.add(str(kind or "default"))
        original = part.get("original_max_position_embeddings")
        if kind == "longrope":
            original = config.get("original_max_position_embeddings", original)
            short.append(original or config.get("max_position_embeddings"))
        factor = part.get("factor")
        if kind == "yarn" and isinstance(original, int) and isinstance(factor, int | float):
            reach.append(int(original * factor))
    lengths = [length for length in short if isinstance(length, int)]
    return RotaryFacts(tuple(sorted(kinds)), min(lengths, default=None), max(reach, default=None))
