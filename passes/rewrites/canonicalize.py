"""Canonical form: no asserts, no no-ops, one device, no repeated computation, no dead code."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

import girih.kernels.ops.schemas  # registers girih::attention  # noqa: F401
from girih.kernels.base.target import Target
from girih.passes.pass_api import PassContext, insert_call, register_pass

aten = torch.ops.aten

_ASSERTS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
# Ops whose result is their first argument when `_is_identity` agrees.
_MAYBE_IDENTITY = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.slice.Tensor,
    aten.expand.default,
    aten.contiguous.default,
    aten.view.default,
    aten.reshape.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
}


def _expects(graph: fx.Graph, target: Target) -> str | None:
    asserts = any(n.target in _ASSERTS for n in graph.nodes)
    return "the graph holds assertions of the tracer" if asserts else None


@register_pass(expects=_expects)
def canonicalize(graph: fx.Graph, ctx: PassContext) -> int:
    """Drop asserts, no-op casts and views, repeated nodes and dead code; fix the device.

    %a = to(%x: bf16, bf16); %b = cos(%p); %c = cos(%p)   ->   %x; %b

    Refuses nothing: every rewrite keeps the values bit for bit.
    """
    count = _drop_asserts(graph)
    count += _name_cast_dtypes(graph)
    count += _rewrite_device(graph, torch.device(ctx.target.device))
    count += _drop_identities(graph)
    count += _contiguous_attention_operands(graph)
    count += _merge_repeated(graph)
    before = len(graph.nodes)
    graph.eliminate_dead_code()
    return count + before - len(graph.nodes)


def _drop_asserts(graph: fx.Graph) -> int:
    doomed = [n for n in graph.nodes if n.target in _ASSERTS]
    for node in doomed:
        graph.erase_node(node)
    return len(doomed)


def _name_cast_dtypes(graph: fx.Graph) -> int:
    """Write `type_as(x, y)` as a cast to y's dtype, which needs no y."""
    nodes = graph.find_nodes(op="call_function", target=aten.type_as.default)
    for node in nodes:
        source, like = node.args
        cast = insert_call(graph, node, aten.to.dtype, (source, like.meta["val"].dtype), node)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)
    return len(nodes)


def _rewrite_device(graph: fx.Graph, device: torch.device) -> int:
    """Replace the tracing device ("meta") in arguments by the target's."""

    def fix(value: Any) -> Any:
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return device if is_meta else value

    count = 0
    for node in graph.nodes:
        args = fx.node.map_aggregate(node.args, fix)
        kwargs = fx.node.map_aggregate(node.kwargs, fix)
        if repr(args) != repr(node.args) or repr(kwargs) != repr(node.kwargs):
            node.args, node.kwargs = args, kwargs
            count += 1
    return count


def _drop_identities(graph: fx.Graph) -> int:
    count = 0
    for node in list(graph.nodes):
        if node.target in _MAYBE_IDENTITY and _is_identity(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            count += 1
    return count


def _is_identity(node: fx.Node) -> bool:
    """Return whether a cast, view or copy returns its operand unchanged (type, shape, strides)."""
    if node.target is aten.dropout.default:
        return node.args[2] is False
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return bool(
        before.dtype == after.dtype
        and before.shape == after.shape
        and before.stride() == after.stride()
    )


def _contiguous_attention_operands(graph: fx.Graph) -> int:
    """Give attention contiguous q, k, v [T, H, D], so that the tile writes that layout directly."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.girih.attention.default):
        for i in range(3):
            operand = node.args[i]
            if operand.target is aten.clone.default or operand.meta["val"].is_contiguous():
                continue
            copy = insert_call(graph, node, aten.clone.default, (operand,), operand)
            copy.kwargs = {"memory_format": torch.contiguous_format}
            copy.meta["val"] = operand.meta["val"].contiguous()
            node.update_arg(i, copy)
            count += 1
    return count


def _merge_repeated(graph: fx.Graph) -> int:
    """Let equal pure calls on equal operands be computed once (common subexpressions)."""
    seen: dict[Hashable, fx.Node] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            count += 1
    return count


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        nondeterministic = torch.Tag.nondeterministic_seeded in target.tags
        return not target._schema.is_mutable and not nondeterministic
    return getattr(target, "__module__", "") == operator.__name__ or target in (
        operator.getitem,
        operator.add,
        operator.mul,
    )


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return (type(value), value) if not isinstance(value, (fx.Node, torch.SymInt)) else value
