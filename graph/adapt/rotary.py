"""Rotary tables that transformers picks by the longest sequence at hand, pinned for a whole start.

"dynamic" and "longrope" tables change when any sequence of a step grows beyond the original length,
so one long request would change the results of every other, and keys in the cache would be turned
by another table than the queries. Here a model has one table for all sequences:

    dynamic    the unchanged one; it is not served beyond its original length
    longrope   the short factors, if no longer sequence is allowed; else the long ones, which
               transformers takes for sequences beyond the original length only
"""

from __future__ import annotations

from typing import Any

import torch


class PinnedRotary:
    """The length-dependent rotary tables of a model.

    Args:
        model: the model to be traced.
        longest: tokens of the longest sequence; None for what its configuration allows.
    """

    def __init__(self, model: torch.nn.Module, longest: int | None = None) -> None:
        self._longest = longest
        self._parts = [
            (name, part, layer_type)
            for name, part in model.named_modules()
            for layer_type, kind in _rope_types(part)
            if "dynamic" in kind or kind == "longrope"
        ]
        self._kinds: list[tuple[Any, Any]] = []
        self._values: dict[str, torch.Tensor] = {}

    def freeze(self) -> None:
        """Compute the tables for the longest sequence and keep the modules from changing them."""
        for name, part, layer_type in self._parts:
            prefix = "" if layer_type is None else f"{layer_type}_"
            table, scaling = self._table(part, layer_type)
            setattr(part, f"{prefix}attention_scaling", scaling)
            self._kinds.append((part, part.rope_type))
            pinned = "pinned"
            part.rope_type = (
                pinned if layer_type is None else {**part.rope_type, layer_type: pinned}
            )
            self._values[f"{name}.{prefix}inv_freq"] = table

    def restore(self) -> None:
        """Let the modules say again of what kind they are, which their own code looks up."""
        while self._kinds:
            part, kind = self._kinds.pop()
            part.rope_type = kind

    def constants(self) -> dict[str, torch.Tensor]:
        """Values of the pinned buffers, by name."""
        return dict(self._values)

    def _table(self, part: Any, layer_type: str | None) -> tuple[torch.Tensor, float]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = part.rope_type if layer_type is None else part.rope_type[layer_type]
        longest = self._longest or int(part.config.max_position_embeddings)
        options = {} if layer_type is None else {"layer_type": layer_type}
        table, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, "cpu", seq_len=longest, **options)
        return table, float(scaling)


def _rope_types(part: torch.nn.Module) -> list[tuple[str | None, str]]:
    kind = getattr(part, "rope_type", None)
    if isinstance(kind, str):
        return [(None, kind)]
    return list(kind.items()) if isinstance(kind, dict) else []
