"""Help for single families: what transformers' interfaces do not reach, by name and in one place.

An adaptation replaces methods of one model class for the time of a trace, where a model writes its
attention, experts or recurrence out by hand; the replacement computes the same and leaves an op of
girih in the graph. Classes are named, so that nothing applies by accident. Beside them stand the
three general ones: tables of attention classes, rotary tables that depend on the longest sequence,
and encoders whose positions do not start at zero.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from girih.graph.adapt.adapted_classes import METHODS
from girih.graph.adapt.capture import NAME
from girih.graph.adapt.rotary import PinnedRotary

# Settings that change how a model computes, not what; with these values it does so in one piece.
_NEUTRAL = {
    "rescale_every": 0,  # RWKV halves weights in place every so many layers, and undoes it
    "max_inference_chunksize": 1 << 40,  # xLSTM cuts long sequences and carries its own state
}

Replaced = tuple[type, str, Any]


class Adaptations:
    """Context in which every adaptation that applies to a model is in place.

    Args:
        model: the model to be traced, on the meta device.
        longest: tokens of the longest sequence; None for what the model allows.

    Attributes:
        applied: names of the adapted classes, sorted.
    """

    def __init__(self, model: torch.nn.Module, longest: int | None = None) -> None:
        self._model = model
        self._replaced: list[Replaced] = []
        self._rotary = PinnedRotary(model, longest)
        found = {type(part).__name__: type(part) for part in model.modules()}
        self._classes = {name: found[name] for name in METHODS if name in found}
        self.applied = sorted(self._classes)

    def __enter__(self) -> Adaptations:
        for name, owner in self._classes.items():
            for method, replacement in METHODS[name].items():
                self._replaced.append((owner, method, owner.__dict__[method]))
                setattr(owner, method, replacement)
        self._rotary.freeze()
        for name, value in _NEUTRAL.items():
            if hasattr(self._model.config, name):
                setattr(self._model.config, name, value)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rotary.restore()
        for owner, method, original in self._replaced:
            setattr(owner, method, original)
        self._replaced.clear()

    def constants(self) -> dict[str, torch.Tensor]:
        """Values of buffers that are not what the model's own code would compute."""
        return self._rotary.constants()

    def first_position(self) -> int:
        """Position id of a sequence's first token (RoBERTa's lie behind the padding id)."""
        for part in self._model.modules():
            if hasattr(part, "create_position_ids_from_input_ids"):
                return int(part.padding_idx) + 1  # type: ignore[arg-type]
        return 0


@contextmanager
def attention_classes(auto_class: Any, config: Any) -> Iterator[None]:
    """Let a model that looks its attention class up by name find the eager one."""
    owner = auto_class._model_mapping.get(type(config), None)
    module = sys.modules[owner.__module__] if isinstance(owner, type) else None
    names = [n for n in dir(module) if n.endswith("_ATTENTION_CLASSES")]
    tables = [getattr(module, name) for name in names]
    for table in tables:
        table[NAME] = table["eager"]
    try:
        yield
    finally:
        for table in tables:
            del table[NAME]
