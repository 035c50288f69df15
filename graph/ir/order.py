"""One order of nodes for one computation, whatever order the tracer met them in.

transformers walks sets here and there (layer types, for the rotary tables), so that independent
nodes come in the order of a hash. Data flow alone decides here: depth first from the result,
operands in the order of the arguments. Work stands right before what first reads it, so values live
shortly, and layers that compute alike keep one order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import fx


def canonical_order(graph: fx.Graph, inputs: tuple[str, ...]) -> None:
    """Reorder a graph in place.

    Args:
        graph: placeholders, calls without side effects other than assertions, one output.
        inputs: names (`meta["input"]`) of the placeholders that stand first, in this order; weights
            follow by first use.
    """
    output = next(n for n in graph.nodes if n.op == "output")
    order: dict[fx.Node, None] = {}
    _visit(output, order)
    rest = [n for n in graph.nodes if n not in order and n.op != "placeholder"]
    marks = _marks(rest, order)
    for node in sorted((n for n in rest if not n.users), key=marks.__getitem__):
        _visit(node, order)
    calls = [n for n in order if n.op not in ("placeholder", "output")]
    read = dict.fromkeys(operand for node in calls for operand in node.all_input_nodes)
    found = dict.fromkeys((*read, *graph.find_nodes(op="placeholder")))
    ranks = {name: rank for rank, name in enumerate(inputs)}
    placeholders = [n for n in found if n.op == "placeholder"]
    placeholders.sort(key=lambda n: ranks.get(n.meta.get("input", ""), len(ranks)))
    for node in (*placeholders, *calls):
        output.prepend(node)


def _visit(root: fx.Node, order: dict[fx.Node, None]) -> None:
    """Add `root` behind all that it depends on, its first operand first."""
    stack = [(root, iter(root.all_input_nodes))]
    while stack:
        node, operands = stack[-1]
        following = next((n for n in operands if n not in order), None)
        if following is None:
            stack.pop()
            order.setdefault(node)
        else:
            stack.append((following, iter(following.all_input_nodes)))


def _marks(nodes: Iterable[fx.Node], order: dict[fx.Node, None]) -> dict[fx.Node, str]:
    """A text for each node that equals another's only if both compute the same.

    Args:
        nodes: in an order in which operands come first; nothing that is needed depends on them.
        order: the nodes that have a place already.
    """
    marks = {node: str(place) for place, node in enumerate(order)}
    for node in nodes:
        operands = [marks.get(n, n.name) for n in node.all_input_nodes]
        facts = fx.map_arg((node.args, node.kwargs), lambda n: marks.get(n, n.name))
        text = f"{node.target} {operands} {facts}"
        marks[node] = hashlib.sha256(text.encode()).hexdigest()
    return marks
