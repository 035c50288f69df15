"""Shapes, dtypes and strides of a call's result, from those of its operands.

Running an operator on fake tensors takes milliseconds, and layers repeat: results are remembered
by operator and operand layouts, per tracing session (a symbol has its meaning only there).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)

from girih.graph.ir.text import known_layout

_known: WeakKeyDictionary[FakeTensorMode, dict[Hashable, Any]] = WeakKeyDictionary()


def infer_value(node: fx.Node) -> Any:
    """Infer the result of a call, as fake tensors or sizes, from the values of its operands."""
    assert callable(node.target), "only calls have a value to infer"
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    known = _flat((args, kwargs, node.meta.get("val")))
    mode = next((v.fake_mode for v in known if isinstance(v, FakeTensor)), None)
    if mode is None or _makes_sizes(node.target):
        return node.target(*args, **kwargs)
    memory = _known.setdefault(mode, {})
    key = (node.target, value_layout(args), value_layout(kwargs))
    if key not in memory:
        # A call without tensor operands (arange) knows of no mode. torch's own memory costs as much
        # as a call, and answers none that this one does not.
        with mode, disable_fake_tensor_cache(mode):
            memory[key] = node.target(*args, **kwargs)
    return memory[key]


def empty_value(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The value of a weight of `like`'s dtype and device."""
    if not isinstance(like, FakeTensor):
        return like.new_empty(shape)
    memory = _known.setdefault(like.fake_mode, {})
    key = ("empty", like.dtype, like.device, shape)
    if key not in memory:
        memory[key] = like.new_empty(shape)
    value: torch.Tensor = memory[key]
    return value


def value_layout(value: Any) -> Hashable:
    """Everything a result's type depends on: layouts of tensors, sizes, plain arguments."""
    if isinstance(value, torch.Tensor):
        return (*known_layout(value), value.device)
    if isinstance(value, (list, tuple)):
        return tuple(value_layout(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, value_layout(v)) for k, v in sorted(value.items()))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ("size", value.node.expr)
    return (type(value), value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _flat(v)]
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in _flat(v)]
    return [value]


def _makes_sizes(target: Any) -> bool:
    """Return whether a result has sizes that no operand has, new ones in each call."""
    tags = getattr(target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
