"""Checks of every pass: a sound graph, true shapes, an honest count."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from girih.graph.ir.text import SymbolNames, tensor_layout, value_text
from girih.graph.trace.trace import node_origin
from girih.kernels.base.errors import PassError
from girih.passes.infer import infer_value, value_layout


class GraphState:
    """The state of a graph before a pass: its nodes and their operands.

    Operand tuples and values are replaced, never altered, so identity tells a change.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = {n: _facts(n) for n in graph.nodes}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def changed(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that are new, have other operands, or read a node whose value became another."""
        result: list[fx.Node] = []
        values: set[fx.Node] = set()
        for node in graph.nodes:
            before = self._nodes.get(node)
            same_call = before is not None and _same(before[:3], _facts(node)[:3])
            if not same_call or not values.isdisjoint(node.all_input_nodes):
                result.append(node)
            if before is None or before[3] is not node.meta.get("val"):
                values.add(node)
        return result


def _facts(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs, node.meta.get("val")


def _same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def check_values(name: str, changed: list[fx.Node]) -> None:
    """Hold the recorded dtype, shape and strides of changed calls against their operators.

    Raises:
        PassError: a node says something else than its operator gives; names both.
    """
    for node in changed:
        if node.op != "call_function":
            continue
        recorded, found = node.meta.get("val"), infer_value(node)
        if _type(recorded) != _type(found):
            symbols, place = SymbolNames(), node_origin(node).strip()
            raise PassError(
                f"pass {name} left a wrong shape on {node.name} ({place}): it says "
                f"{value_text(recorded, symbols)}, {node.target} gives "
                f"{value_text(found, symbols)}"
            )


def _type(value: Any) -> Hashable:
    """Dtype, shape and strides; not the device, which a graph records as it was traced."""
    return tensor_layout(value) if isinstance(value, torch.Tensor) else value_layout(value)


def check_count(name: str, rewrites: int, changed: bool) -> None:
    """Hold a pass to its word: it reports rewrites if and only if the text changed.

    Raises:
        PassError: it does not.
    """
    if changed != (rewrites > 0):
        raise PassError(
            f"pass {name} reported {rewrites} rewrites but the graph "
            f"{'changed' if changed else 'did not change'}"
        )
