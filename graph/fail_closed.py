"""What must hold of a traced graph, so that nothing compiles that would be silently wrong.

    1. attention and recurrences were captured, and nothing is written in place
    2. no tensor has two dimensions that depend on the number of tokens
    3. outside the captured ops, a token's row depends on that token only

The third makes packing several sequences into one step right: only captured ops, which get the
boundaries of sequences, may look at other tokens.
"""

from __future__ import annotations

import torch
from torch import fx

from girih.graph.opaque import is_opaque
from girih.kernels.errors import TraceError


def check_captured(graph: fx.Graph, architecture: str) -> None:
    """Refuse graphs that would compute something else than the model, silently.

    Raises:
        TraceError: names the first operation that breaks a rule, and its module.
    """
    if not any(is_opaque(node) for node in graph.nodes):
        raise TraceError(
            f"{architecture} does not route its attention through transformers' attention "
            "interface, so it cannot be paged; this architecture is not supported"
        )
    for node in graph.nodes:
        if writes(node):
            raise TraceError(
                f"{architecture} writes to a tensor in place ({_where(node)}): unsupported"
            )
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and num_token_dims(value) > 1 and node.users:
            raise TraceError(
                f"{architecture} computes a tokens x tokens tensor outside attention "
                f"({_where(node)}): unsupported"
            )


def writes(node: fx.Node) -> bool:
    """Whether a node changes one of its operands."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def num_token_dims(value: torch.Tensor) -> int:
    """How many dimensions depend on the number of tokens."""
    return sum(1 for size in value.shape if isinstance(size, torch.SymInt))


def _where(node: fx.Node) -> str:
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
