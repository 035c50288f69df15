"""Reads the attention mask that a model requests, instead of building it.

transformers hands a mask function (a tree of closures) to the registered mask builder. Tracing must
not build a tokens x tokens tensor, and must not lose what only the mask says (a window, chunks), so
the builder registered here reads the tree and returns an empty tensor that stands for it. A closure
it does not know is refused.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from girih.kernels.base.errors import TraceError


@dataclass(frozen=True)
class Mask:
    """Which tokens a token sees.

    Attributes:
        causal: no later ones.
        window: itself and `window - 1` before it (when not causal: also after it); 0: no limit.
        chunk: those of its own chunk of this many tokens; 0: no chunks.
    """

    causal: bool = False
    window: int = 0
    chunk: int = 0


class MaskRequests:
    """The masks asked for during one trace, by the tensors that stand for them."""

    def __init__(self) -> None:
        self._known: list[Mask] = []
        self._stand_ins: list[tuple[torch.Tensor, Mask]] = []

    def stand_in(self, mask: Mask, device: Any) -> torch.Tensor:
        """A tensor to hand to the model in place of the mask.

        Different masks get different shapes, so that layers called with them are told apart.
        """
        if mask not in self._known:
            self._known.append(mask)
        shape = (1, 1, 1, 1 + self._known.index(mask))
        tensor = torch.empty(shape, dtype=torch.bool, device=device)
        self._stand_ins.append((tensor, mask))
        return tensor

    def find(self, tensor: torch.Tensor) -> Mask | None:
        """The mask a tensor stands for; None: the model made another tensor of it."""
        return next((mask for known, mask in self._stand_ins if known is tensor), None)


def read_mask(function: Callable[..., Any]) -> Mask:
    """Read a mask function of `transformers.masking_utils`.

    Raises:
        TraceError: it holds a closure whose meaning is not known here.
    """
    return _read(function, Mask())


# What each leaf of a mask function changes, from the values in its closure.
_LEAVES: dict[str, Callable[[dict[str, Any], Mask], Mask]] = {
    "causal_mask_function": lambda inside, mask: replace(mask, causal=True),
    "bidirectional_mask_function": lambda inside, mask: mask,
    "packed_sequence_mask_function": lambda inside, mask: mask,
    "sliding_window_overlay": lambda inside, mask: replace(
        mask, window=int(inside["sliding_window"])
    ),
    "sliding_window_bidirectional_overlay": lambda inside, mask: replace(
        mask, window=int(inside["sliding_window"]) + 1
    ),
    "_bidirectional_window_overlay": lambda inside, mask: replace(  # Gemma 3 as an embedder
        mask, window=int(inside["sliding_window"])
    ),
    "chunked_overlay": lambda inside, mask: replace(mask, chunk=int(inside["chunk_size"])),
}


def _read(function: Callable[..., Any], mask: Mask) -> Mask:
    name = function.__qualname__.split(".<locals>")[0]
    inside = _closure(function)
    if name == "and_masks":
        for part in inside["mask_functions"]:
            mask = _read(part, mask)
        return mask
    if name == "or_masks":
        return _union([_read(part, mask) for part in inside["mask_functions"]])
    if name in ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
        return _read(inside["mask_function"], mask)
    if name in _LEAVES:
        return _LEAVES[name](inside, mask)
    if _always_true(function):
        return mask
    raise TraceError(
        f"an attention mask of an unknown kind ({function.__module__}.{function.__qualname__}); "
        "known are causal, bidirectional, sliding-window and chunked masks"
    )


def _union(masks: list[Mask]) -> Mask:
    """The mask among `masks` that lets through all that the others do."""
    for mask in masks:
        if all(_contains(mask, other) for other in masks):
            return mask
    raise TraceError(f"a union of attention masks that is none of them: {masks}")


def _contains(mask: Mask, other: Mask) -> bool:
    if mask == other or mask == Mask():
        return True
    same_kind = not mask.causal and mask.chunk == other.chunk
    return same_kind and 0 < other.window <= mask.window


def _always_true(function: Callable[..., Any]) -> bool:
    """Return whether a function is `lambda *args: torch.tensor(True, ...)`."""
    code = function.__code__
    reads = {i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")}
    return not reads and True in code.co_consts and "tensor" in code.co_names


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return {n: c.cell_contents for n, c in zip(names, function.__closure__ or (), strict=True)}
