"""Compute after the last attention only the rows whose logits are wanted."""

from __future__ import annotations

import math

import torch
from torch import fx

from girih.graph.ir.opaque import is_opaque, is_result, opaque_results
from girih.kernels.base.target import Target
from girih.passes.pass_api import PassContext, insert_call, refresh_values, register_pass

aten = torch.ops.aten

_SELECTORS = {aten.index_select.default, aten.index.Tensor}


def _expects(graph: fx.Graph, target: Target) -> str | None:
    selector = _find_selector(graph)
    if selector is None or is_opaque(selector.args[0]) or is_result(selector.args[0]):
        return None
    return "rows are selected below the last attention"


@register_pass(expects=_expects)
def gather_last_rows(graph: fx.Graph, ctx: PassContext) -> int:
    """Move the selection of the needed rows up to just behind the last attention.

    %o = attention(..)[T]; %h = mlp(%o)[T]; %y = index(%h, idx)[S]
      ->  %s = index_select(%o, idx)[S]; %y = mlp(%s)[S]

    A prefill of 1024 tokens then runs its last output projection, MLP and norm on one row. Refuses
    when an operation between does not work row by row on the token dimension, or is also read by
    another than those between.
    """
    selector = _find_selector(graph)
    if selector is None:
        return 0
    index = next(n for n in graph.nodes if n.meta.get("input") == "logits_index")
    region = _rows_region(graph, selector)
    blocked = [n for n in region if not _works_by_row(n)]
    for node in blocked:
        ctx.refuse(node, f"{node.target} may mix rows; the selection stays below it")
    inside = {*region, selector}
    shared = [n for n in region if not inside.issuperset(n.users)]
    for node in shared:
        ctx.refuse(node, "its rows are read elsewhere too; the selection stays below it")
    if blocked or shared or not region:
        return 0
    return _move_selection(graph, selector, index, region)


def _find_selector(graph: fx.Graph) -> fx.Node | None:
    for node in graph.nodes:
        if node.target in _SELECTORS and _token_dim(node.args[0]) is not None:
            uses = node.all_input_nodes[1:]
            if any(n.meta.get("input") == "logits_index" for n in uses):
                return node
    return None


def _rows_region(graph: fx.Graph, selector: fx.Node) -> list[fx.Node]:
    """Nodes from the last attention or recurrence to the selector, along the tokens, in order."""
    last = [n for n in graph.nodes if is_opaque(n)][-1]
    results = opaque_results(last)
    after: set[fx.Node] = {*results}
    region = []
    for node in graph.nodes:
        if node is selector:
            break
        if any(n in after for n in node.all_input_nodes):
            after.add(node)
            region.append(node)
    used_below = {selector}
    for node in reversed(region):
        if any(u in used_below for u in node.users):
            used_below.add(node)
    return [n for n in region if n in used_below]


def _token_dim(node: object) -> int | None:
    """The dimension of symbolic size, when there is exactly one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    dims = [i for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    return dims[0] if len(dims) == 1 else None


_BY_ROW = {
    aten.linear.default,
    aten.mean.dim,
    aten.unsqueeze.default,
    aten.select.int,
    aten.view.default,
    aten.reshape.default,
    aten.to.dtype,
    aten.clone.default,
    aten.contiguous.default,
    aten.slice.Tensor,
}


def _works_by_row(node: fx.Node) -> bool:
    """Return whether a row of the result needs only the same row of the operands."""
    if _token_dim(node) is None:
        return False
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    if node.target is aten.mean.dim:
        rank = node.args[0].meta["val"].ndim
        return _token_dim(node.args[0]) not in [d % rank for d in node.args[1]]
    if node.target in (aten.view.default, aten.reshape.default):
        return _keeps_rows(node)
    if node.target is aten.layer_norm.default:
        return bool(_token_dim(node) < node.meta["val"].ndim - len(node.args[1]))
    if node.target is aten.slice.Tensor:
        dim = node.args[1] % node.meta["val"].ndim if len(node.args) > 1 else 0
        return dim != _token_dim(node)
    return node.target in _BY_ROW


def _keeps_rows(view: fx.Node) -> bool:
    """Return whether a view leaves the token dimension whole and where it was."""
    names_size = any(isinstance(s, fx.Node) for s in view.args[1])
    return names_size and _rows(view.args[0]) == _rows(view)


def _rows(node: fx.Node) -> tuple[int, str] | None:
    """Elements before the token dimension, and its size."""
    dim = _token_dim(node)
    if dim is None:
        return None
    shape = node.meta["val"].shape
    return math.prod(shape[:dim]), str(shape[dim])


def _move_selection(
    graph: fx.Graph, selector: fx.Node, index: fx.Node, region: list[fx.Node]
) -> int:
    """Select rows of what enters the region, and let the region work on S rows."""
    inside = set(region)
    selected: dict[fx.Node, fx.Node] = {}
    num_rows = insert_call(graph, region[0], aten.sym_size.int, (index, 0), selector)
    for node in region:
        for operand in list(node.all_input_nodes):
            if operand in inside:
                continue
            if isinstance(operand.meta.get("val"), torch.SymInt):
                node.replace_input_with(operand, num_rows)
            elif _token_dim(operand) is not None:
                if operand not in selected:
                    args = (operand, _token_dim(operand), index)
                    selected[operand] = insert_call(
                        graph, node, aten.index_select.default, args, operand
                    )
                node.replace_input_with(operand, selected[operand])
    last = selector.args[0]
    selector.replace_all_uses_with(last)
    graph.erase_node(selector)
    refresh_values(graph, [num_rows, *selected.values(), last])
    return len(selected)
