"""Linears run on weights kept in the kernel's own layout."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

import girih.kernels.ops.schemas  # registers the packed ops  # noqa: F401
from girih.graph.ir.weight_plan import PACKED, PLAIN
from girih.kernels.base.target import Target
from girih.kernels.ops.packing import packed_shape
from girih.passes.pass_api import PassContext, insert_call, insert_weight, register_pass

aten = torch.ops.aten


def _expects(graph: fx.Graph, target: Target) -> str | None:
    if target.device != "cpu":
        return None
    linears = graph.find_nodes(op="call_function", target=aten.linear.default)
    on_weights = any("weight" in n.args[1].meta for n in linears)
    return "there are linears on weights" if on_weights else None


@register_pass(expects=_expects)
def pack_linears(graph: fx.Graph, ctx: PassContext) -> int:
    """Replace linears by `girih::packed_linear`, and embeddings that share their weight.

    %y = linear(%x [1, T, K], w [N, K])  ->  %y = packed_linear(%x, w.packed, N)

    The weight exists once, packed while it is loaded. Refuses weights that are computed in the
    graph or that something else than linears and embeddings reads, and targets that are no CPU.
    """
    count = 0
    if ctx.target.device != "cpu":
        ctx.refuse(next(iter(graph.nodes)), f"packing is a layout of CPUs, not {ctx.target.device}")
        return 0
    for weight in [n for n in graph.nodes if "weight" in n.meta]:
        linears = [u for u in weight.users if _is_linear_on(u, weight)]
        if not linears:
            continue
        linear_like = all(_takes_rows(u) for u in linears)
        others = [u for u in weight.users if u not in linears and not _is_embedding_of(u, weight)]
        if others or not linear_like or ctx.weights.entries[weight.meta["weight"]].form != PLAIN:
            ctx.refuse(linears[0], f"{weight.meta['weight']} has other users than linears")
            continue
        count += _pack(graph, weight, ctx)
    return count


def _is_linear_on(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is aten.linear.default and node.args[1] is weight


def _takes_rows(linear: fx.Node) -> bool:
    """Return whether the operand is [T, K], or has only dimensions of size 1 before that."""
    x = linear.args[0].meta["val"]
    return x.ndim >= 2 and all(size == 1 for size in x.shape[:-2])


def _is_embedding_of(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is aten.embedding.default and node.args[0] is weight


def _pack(graph: fx.Graph, weight: fx.Node, ctx: PassContext) -> int:
    entry = ctx.weights.entries[weight.meta["weight"]]
    n, k = entry.shape
    shape = packed_shape(n, k, getattr(torch, entry.dtype), ctx.target.isa)
    ctx.weights.add(dataclasses.replace(entry, form=PACKED))
    packed = insert_weight(graph, entry.name, weight.meta["val"], shape, weight)
    users = list(weight.users)
    for user in users:
        if user.target is aten.embedding.default:
            new = _packed_embedding(graph, user, packed, k)
        else:
            new = _packed_linear(graph, user, packed, n)
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(weight)
    return len(users)


def _packed_linear(graph: fx.Graph, linear: fx.Node, packed: fx.Node, n: int) -> fx.Node:
    """The op takes x [T, K]: leading dimensions of size 1 are dropped and put back around it."""
    x, bias = linear.args[0], linear.args[2] if len(linear.args) > 2 else None
    leading = x.meta["val"].ndim - 2
    for _ in range(leading):
        x = insert_call(graph, linear, aten.select.int, (x, 0, 0), linear)
    y = insert_call(
        graph, linear, torch.ops.girih.packed_linear.default, (x, packed, bias, n), linear
    )
    for _ in range(leading):
        y = insert_call(graph, linear, aten.unsqueeze.default, (y, 0), linear)
    return y


def _packed_embedding(graph: fx.Graph, node: fx.Node, packed: fx.Node, k: int) -> fx.Node:
    """Gather embedding rows out of a packed weight (tied embeddings exist once).

    Row i lies in panel i // W at column i % W, spread over the depth of the panel.
    """
    ids = node.args[1]
    shape = packed.meta["val"].shape
    pairs = packed.meta["val"].dtype == torch.bfloat16
    width = shape[2] // 2 if pairs else shape[2]

    def call(target: torch._ops.OpOverload, *args: object) -> fx.Node:
        return insert_call(graph, node, target, args, node)

    panel = call(aten.bitwise_right_shift.Tensor_Scalar, ids, width.bit_length() - 1)
    column = call(aten.bitwise_and.Scalar, ids, width - 1)
    table = call(aten.view.default, packed, [shape[0], shape[1], width, 2]) if pairs else packed
    rows = call(aten.index.Tensor, table, [panel, None, column])
    if not pairs:
        return rows
    flat = call(aten.flatten.using_ints, rows, -2, -1)
    return flat if flat.meta["val"].shape[-1] == k else call(aten.slice.Tensor, flat, -1, 0, k)
