"""Conditions a traced graph must meet, so that nothing compiles that would be silently wrong.

    1. attention and recurrences were captured, and nothing is written in place
    2. no value's size grows with the square of the number of tokens
    3. outside the captured ops, a token's row depends on that token only

The third makes packing several sequences into one step right: only captured ops, which get the
boundaries of sequences, may look at other tokens. Here operators that are known to mix tokens are
refused early; others are found by running the tiles (`passes/verify/rows.py`), or the module that
stays eager (`eager_verify.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from girih.graph.ir.opaque import is_opaque, mixes_tokens
from girih.kernels.base.errors import TraceError


def check_captured(graph: fx.Graph, architecture: str) -> None:
    """Refuse graphs that would compute something else than the model, silently.

    Raises:
        TraceError: names the first operation that breaks a rule, and its module.
    """
    if not any(mixes_tokens(node) for node in graph.nodes):
        raise TraceError(
            f"{architecture} does not route its attention through transformers' attention "
            "interface, so it cannot be paged; this architecture is not supported"
        )
    for node in graph.nodes:
        if writes(node):
            raise TraceError(
                f"{architecture} writes to a tensor in place ({where(node)}): unsupported"
            )
        values = [v for v in _flat(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        if node.users and any(_token_power(value) > 1 for value in values):
            raise TraceError(
                f"{architecture} computes a tokens x tokens tensor outside attention "
                f"({where(node)}): unsupported"
            )
    _check_rows(graph, architecture)


aten = torch.ops.aten

# Position of the dimension argument of operations that combine entries along dimensions, and its
# default. What has none combines along all.
_ALONG: dict[Any, tuple[int, Any]] = {
    aten.sum.dim_IntList: (1, None), aten.mean.dim: (1, None), aten.amax.default: (1, ()),
    aten.amin.default: (1, ()), aten.max.dim: (1, None), aten.min.dim: (1, None),
    aten.argmax.default: (1, None), aten.argmin.default: (1, None), aten.prod.dim_int: (1, None),
    aten.softmax.int: (1, None), aten._softmax.default: (1, None), aten.any.dim: (1, None),
    aten.log_softmax.int: (1, None), aten._log_softmax.default: (1, None), aten.all.dim: (1, None),
    aten.cumsum.default: (1, None), aten.cumprod.default: (1, None), aten.diff.default: (2, -1),
    aten.logsumexp.default: (1, None), aten.var.correction: (1, None), aten.flip.default: (1, None),
    aten.std.correction: (1, None), aten.topk.default: (2, -1), aten.sort.default: (1, -1),
    aten.sort.stable: (2, -1), aten.argsort.default: (1, -1), aten.roll.default: (2, None),
    aten.linalg_vector_norm.default: (2, None), aten.norm.ScalarOpt_dim: (2, None),
    aten.cat.default: (1, 0),
}  # fmt: skip
_NEIGHBOURS = {
    aten.conv1d.default, aten.conv1d.padding, aten.convolution.default, aten.unfold.default,
    aten.avg_pool1d.default, aten.max_pool1d.default,
}  # fmt: skip


# They take a tensor for its dtype and device only.
_NEW = {
    aten.new_ones.default, aten.new_zeros.default, aten.new_empty.default, aten.new_full.default,
}  # fmt: skip


def _check_rows(graph: fx.Graph, architecture: str) -> None:
    """Refuse operations outside the captured ones whose rows depend on other tokens."""
    live = _live(graph)
    for node in graph.nodes:
        if node not in live or node.op != "call_function" or is_opaque(node):
            continue
        reason = _mixes_tokens(node)
        if reason:
            raise TraceError(
                f"{architecture} {reason} outside attention and recurrences ({where(node)}), "
                "which would mix the sequences of a step: unsupported"
            )


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that the result depends on."""
    live: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
    return live


def _mixes_tokens(node: fx.Node) -> str | None:
    operands = [n for n in node.all_input_nodes if _token_dim(n) is not None]
    if not operands or node.target in _NEW:
        return None
    if node.target in _NEIGHBOURS:
        return "combines neighbouring tokens"
    values = [v for v in _flat(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    if values and all(num_token_dims(v) == 0 for v in values):
        return "combines all tokens of a step"
    first = operands[0]
    token_dim, rank = _token_dim(first), first.meta["val"].ndim
    if node.target in _ALONG:
        place, default = _ALONG[node.target]
        given = node.args[place] if len(node.args) > place else node.kwargs.get("dim", default)
        dims = list(range(rank)) if given in (None, (), []) else _flat(given)
        if token_dim in [d % rank for d in dims]:
            return "combines tokens along a step"
    if node.target is aten.slice.Tensor and _cuts(node, token_dim, rank):
        return "takes some tokens of a step"
    if node.target is aten.constant_pad_nd.default:
        padded = {rank - 1 - i // 2 for i, n in enumerate(node.args[1]) if n != 0}
        return "shifts tokens" if token_dim in padded else None
    return None


def _cuts(node: fx.Node, token_dim: int | None, rank: int) -> bool:
    """Return whether a slice leaves out tokens."""
    dim = node.args[1] if len(node.args) > 1 else 0
    if dim % rank != token_dim:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return str(before.shape[token_dim]) != str(after.shape[token_dim])


def _token_dim(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or num_token_dims(value) != 1:
        return None
    return next(i for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt))


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def writes(node: fx.Node) -> bool:
    """Return whether a node changes one of its operands."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def num_token_dims(value: torch.Tensor) -> int:
    """Count the dimensions that depend on the number of tokens."""
    return sum(1 for size in value.shape if isinstance(size, torch.SymInt))


def _token_power(value: torch.Tensor) -> int:
    """The power of the number of tokens that a tensor's size grows with, from its shape alone.

    [T, T] grows with the second, as does what lies flat in one dimension, [T * T].
    """
    return sum(_degree(size.node.expr) for size in value.shape if isinstance(size, torch.SymInt))


@lru_cache(maxsize=1024)
def _degree(size: sympy.Expr) -> int:
    try:
        return int(sympy.total_degree(size))
    except sympy.PolynomialError:  # rounded, as in T // 4
        return 1


def where(node: fx.Node) -> str:
    """The operation, the module it came from, and the line of the model's source."""
    stack = node.meta.get("nn_module_stack")
    module = list(stack.values())[-1][0] if stack else ""
    module = module.removeprefix("L['self'].").removeprefix("model.")
    return f"{node.target} at {module}{source_line(node)}"


def source_line(node: fx.Node) -> str:
    """ " (modeling_x.py:12)" from a node's stack trace, or ""."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for line in reversed(lines):
        if "/models/" in line and 'File "' in line:
            path, rest = line.split('File "')[1].split('", line ')
            return f" ({path.rsplit('/', 1)[-1]}:{rest.split(',')[0]})"
    return ""
