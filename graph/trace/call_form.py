"""The form of a call of a module: the structure of its arguments as text, tensors left open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

PLAIN_TYPES = (bool, int, float, str, type(None))


class Unfit(Exception):
    """A module cannot stay eager by itself; the message says why, without its name."""


@dataclass(frozen=True)
class TensorForm:
    """A tensor argument: its dtype, and its shape with None where tokens are counted."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def dim(self) -> int | None:
        """The dimension of tokens."""
        return self.shape.index(None) if None in self.shape else None


@dataclass(frozen=True)
class CallForm:
    """The structure of a call's arguments, tensors left open.

    Attributes:
        tree: of (positional, named) arguments.
        leaves: plain values, and forms of tensors.
    """

    tree: str
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """The tensor arguments in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    @property
    def source(self) -> tuple[int, int]:
        """The first tensor with tokens, and its dimension of them."""
        return next((i, t.dim) for i, t in enumerate(self.tensors) if t.dim is not None)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments with `tensors` in their places."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, TensorForm) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(self.tree))
        return args, kwargs

    def as_text(self) -> str:
        """JSON, for a bundle."""
        leaves = [
            {"tensor": [x.dtype, x.shape]} if isinstance(x, TensorForm) else x for x in self.leaves
        ]
        return json.dumps([self.tree, leaves])

    @classmethod
    def from_text(cls, text: str) -> CallForm:
        """Inverse of `as_text`."""
        tree, leaves = json.loads(text)

        def leaf(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            dtype, shape = value["tensor"]
            return TensorForm(dtype, tuple(shape))

        return cls(tree, tuple(leaf(x) for x in leaves))


def form_of(args: Any, kwargs: Any) -> tuple[CallForm, list[torch.Tensor]]:
    """Return the form of a call while tracing, and its tensors."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    forms = [_tensor_form(x) if isinstance(x, torch.Tensor) else _plain(x) for x in leaves]
    if not any(isinstance(x, TensorForm) and x.dim is not None for x in forms):
        raise Unfit("is called with no row per token")
    return CallForm(pytree.treespec_dumps(tree), tuple(forms)), tensors


def _plain(value: Any) -> Any:
    if not isinstance(value, PLAIN_TYPES):
        raise Unfit(f"is called with a {type(value).__name__}")
    return value


def _tensor_form(value: torch.Tensor) -> TensorForm:
    counted = [isinstance(size, torch.SymInt) for size in value.shape]
    dtype = str(value.dtype).removeprefix("torch.")
    if any(counted) and not value.dtype.is_floating_point:
        raise Unfit(f"is called with a number per token ({dtype}), positions or choices")
    symbols = [s for s in value.shape if isinstance(s, torch.SymInt)]
    if len(symbols) > 1 or any(not s.node.expr.is_Symbol for s in symbols):
        raise Unfit(f"is called with a tensor of {list(value.shape)}")
    return TensorForm(
        dtype, tuple(None if c else s for c, s in zip(counted, value.shape, strict=True))
    )
