"""Canonical text of an FX graph: what is printed, diffed, tested and hashed.

    %3: bf16[T, 576] = aten.mul.Tensor(%1, %2)

Names do not appear: values are numbered in order, symbolic sizes are renamed, so two graphs that
compute the same way have the same text. Dumps, pass tests, tile keys and `explain` all use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

SHORT_DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


class SymbolNames:
    """Gives symbolic sizes stable names, in order of first appearance.

    Args:
        known: names for symbols that have a meaning of their own, e.g. {"s11": "T"}.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self._known = dict(known or {})
        self._seen: dict[str, str] = {}
        self._texts: dict[Hashable, str] = {}

    def text(self, size: Any) -> str:
        """Text of an int or SymInt."""
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        if expression not in self._texts:
            text = str(expression)
            for symbol in sorted((str(s) for s in expression.free_symbols), key=len, reverse=True):
                text = text.replace(symbol, self._name(symbol))
            self._texts[expression] = text
        return self._texts[expression]

    def tensor_text(self, value: torch.Tensor) -> str:
        """Type text of a tensor, remembered: layouts are few, and symbolic strides are slow."""
        key = known_layout(value)
        if key not in self._texts:
            shape = ", ".join(self.text(s) for s in value.shape)
            text = f"{SHORT_DTYPES.get(value.dtype, str(value.dtype))}[{shape}]"
            if not value.is_contiguous():
                text += " strides[" + ", ".join(self.text(s) for s in value.stride()) + "]"
            self._texts[key] = text
        return self._texts[key]

    def _name(self, symbol: str) -> str:
        if symbol in self._known:
            return self._known[symbol]
        return self._seen.setdefault(symbol, f"d{len(self._seen)}")


def tensor_layout(value: torch.Tensor) -> tuple[Hashable, ...]:
    """Dtype, shape and strides of a tensor, to compare and look up without fixing symbols."""
    sizes = (s if isinstance(s, int) else s.node.expr for s in (*value.shape, *value.stride()))
    return (value.dtype, *sizes)


_layouts: MutableMapping[torch.Tensor, tuple[Hashable, ...]] = WeakIdKeyDictionary()


def known_layout(value: torch.Tensor) -> tuple[Hashable, ...]:
    """`tensor_layout` of a graph's value, which stays as it is: remembered as long as it lives."""
    layout = _layouts.get(value)
    if layout is None:
        layout = _layouts[value] = tensor_layout(value)
    return layout


def size_parts(size: Any) -> tuple[int, str]:
    """Factor and name of a symbolic size: (4, "s11") for 4*s11, (1, its text) for no multiple."""
    factor, base = size.node.expr.as_coeff_Mul()
    return (int(factor), str(base)) if base.is_Symbol else (1, str(size.node.expr))


def target_name(target: Any) -> str:
    """Readable name of a call target, e.g. "aten.mul.Tensor" or "operator.add"."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', target)}"


def value_text(value: Any, symbols: SymbolNames) -> str:
    """Type text of a node's value, e.g. "bf16[T, 576]"; strides are added when not contiguous."""
    if isinstance(value, torch.Tensor):
        return symbols.tensor_text(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(value_text(v, symbols) for v in value) + ")"
    if isinstance(value, torch.SymInt):
        return "int " + symbols.text(value)
    return type(value).__name__ if value is not None else "none"


def graph_text(
    graph: fx.Graph,
    symbols: SymbolNames | None = None,
    note: Callable[[fx.Node], str] | None = None,
    by_name: bool = False,
) -> str:
    """Canonical text of `graph`, one line per node.

    Args:
        graph: any FX graph whose nodes carry `meta["val"]`.
        symbols: names for symbolic sizes; None numbers them by first appearance.
        note: optional comment per node (left out of the text that is hashed).
        by_name: call values by their node's name instead of a number. Names outlive passes, so
            that the difference of two such texts holds what changed and nothing else.
    """
    symbols = symbols or SymbolNames()
    numbers: dict[fx.Node, int | str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], numbers, symbols)}")
            continue
        numbers[node] = node.name if by_name else len(numbers)
        line = f"%{numbers[node]}: {value_text(node.meta.get('val'), symbols)} = "
        if node.op == "placeholder":
            line += "input"
        else:
            line += f"{target_name(node.target)}({_arguments(node, numbers, symbols)})"
        comment = note(node) if note else ""
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def digest(text: str) -> str:
    """SHA-256 of a text, as 16 hex digits (tile and graph keys)."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _arguments(node: fx.Node, numbers: dict[fx.Node, int | str], symbols: SymbolNames) -> str:
    parts = [_argument(a, numbers, symbols) for a in node.args]
    parts += [f"{k}={_argument(v, numbers, symbols)}" for k, v in sorted(node.kwargs.items())]
    return ", ".join(parts)


def _argument(arg: Any, numbers: dict[fx.Node, int | str], symbols: SymbolNames) -> str:
    if isinstance(arg, fx.Node):
        return f"%{numbers[arg]}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(_argument(a, numbers, symbols) for a in arg) + "]"
    if isinstance(arg, torch.dtype):
        return SHORT_DTYPES.get(arg, str(arg))
    if isinstance(arg, torch.SymInt):
        return symbols.text(arg)
    return repr(arg)
