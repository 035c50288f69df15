"""One matrix product instead of several on the same input (QKV, gate/up)."""

from __future__ import annotations

import torch
from torch import fx

from girih.graph.ir.weight_plan import PLAIN, WeightEntry
from girih.kernels.base.target import Target
from girih.passes.pass_api import (
    PassContext,
    insert_call,
    insert_weight,
    refresh_values,
    register_pass,
)

aten = torch.ops.aten


def _expects(graph: fx.Graph, target: Target) -> str | None:
    return "several linears read one tensor" if _sibling_groups(graph) else None


@register_pass(expects=_expects)
def merge_sibling_linears(graph: fx.Graph, ctx: PassContext) -> int:
    """Merge linears that read the same tensor into one, as a change of the weight plan.

    %q = linear(%x, wq); %k = linear(%x, wk)
      ->  %y = linear(%x, w{q,k}); %q = slice(%y, 0:nq); %k = slice(%y, nq:)

    Nothing is concatenated here or after loading: the plan's merged entry lists its sources and
    the loader fills row ranges. Refuses weights with other users (tied embeddings) and siblings of
    which only some have a bias.
    """
    parts: list[fx.Node] = []
    count = 0
    for x, siblings in _sibling_groups(graph):
        mergeable = [n for n in siblings if _is_mergeable(n, x, ctx)]
        if len(mergeable) < 2:
            continue
        if len({len(n.args) > 2 and n.args[2] is not None for n in mergeable}) > 1:
            ctx.refuse(mergeable[0], "only some of the siblings have a bias")
            continue
        parts += _merge(graph, x, mergeable, ctx)
        count += 1
    refresh_values(graph, parts)  # a part is a strided view where a linear was contiguous
    return count


def _sibling_groups(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        groups.setdefault(node.args[0], []).append(node)
    return [(x, nodes) for x, nodes in groups.items() if len(nodes) > 1]


def _is_mergeable(node: fx.Node, x: fx.Node, ctx: PassContext) -> bool:
    for operand in node.args[1:]:
        if operand is None:
            continue
        if (
            "weight" not in operand.meta
            or ctx.weights.entries[operand.meta["weight"]].form != PLAIN
        ):
            return False
        if len(operand.users) > 1:
            ctx.refuse(node, f"{operand.meta['weight']} has other users")
            return False
    return True


def _merge(graph: fx.Graph, x: fx.Node, linears: list[fx.Node], ctx: PassContext) -> list[fx.Node]:
    """Returns the parts that take the places of `linears`."""
    weight = _merged_weight(graph, [n.args[1] for n in linears], ctx)
    args: tuple[fx.Node, ...] = (x, weight)
    if len(linears[0].args) > 2 and linears[0].args[2] is not None:
        args = (*args, _merged_weight(graph, [n.args[2] for n in linears], ctx))
    first = linears[0]
    merged = insert_call(graph, first, aten.linear.default, args, first)
    parts = []
    start = 0
    for node in linears:
        rows = int(node.meta["val"].shape[-1])
        part = insert_call(graph, first, aten.slice.Tensor, (merged, -1, start, start + rows), node)
        node.replace_all_uses_with(part)
        parts.append(part)
        start += rows
    for node in linears:
        operands = [a for a in node.args[1:] if a is not None]
        graph.erase_node(node)
        for operand in operands:
            graph.erase_node(operand)
    return parts


def _merged_weight(graph: fx.Graph, parts: list[fx.Node], ctx: PassContext) -> fx.Node:
    entries = [ctx.weights.entries.pop(p.meta["weight"]) for p in parts]
    shape = (sum(e.shape[0] for e in entries), *entries[0].shape[1:])
    name = _merged_name([e.name for e in entries])
    sources = tuple(s for e in entries for s in e.sources)
    ctx.weights.add(WeightEntry(name, PLAIN, shape, entries[0].dtype, sources))
    return insert_weight(graph, name, parts[0].meta["val"], shape, parts[-1])


def _merged_name(names: list[str]) -> str:
    """ "layers.0.{q_proj,k_proj}.weight" for names that differ in one dotted part."""
    split = [n.split(".") for n in names]
    if len({len(s) for s in split}) == 1:
        columns = list(zip(*split, strict=True))
        parts = [c[0] if len(set(c)) == 1 else "{" + ",".join(c) + "}" for c in columns]
        return ".".join(parts)
    return "{" + ",".join(names) + "}"
