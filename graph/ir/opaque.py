"""The ops that split a program: attention, recurrences, and modules that stay eager."""

from __future__ import annotations

import operator

import torch
from torch import fx

import girih.kernels.ops.eager
import girih.kernels.ops.schemas  # registers girih::attention  # noqa: F401
from girih.kernels.ops.state import STATE_OPS, StateOp

ATTENTION = torch.ops.girih.attention.default
EAGER = torch.ops.girih.eager_module.default
_STATE_TARGETS = {getattr(torch.ops.girih, name).default: op for name, op in STATE_OPS.items()}


def is_attention(node: fx.Node) -> bool:
    """Return whether a node is an attention call."""
    return node.target is ATTENTION


def state_op(node: fx.Node) -> StateOp | None:
    """The recurrent op a node calls, if it calls one."""
    return _STATE_TARGETS.get(node.target)  # type: ignore[arg-type]


def is_eager(node: fx.Node) -> bool:
    """Return whether a node calls a module that stays eager."""
    return node.target is EAGER


def mixes_tokens(node: fx.Node) -> bool:
    """Return whether a node sees more than its own token: attention, or a recurrence."""
    return node.target is ATTENTION or node.target in _STATE_TARGETS


def is_opaque(node: fx.Node) -> bool:
    """Return whether a node becomes a step of its own."""
    return mixes_tokens(node) or is_eager(node)


def is_result(node: fx.Node) -> bool:
    """Return whether a node only names one of the results of an eager module."""
    return node.target is operator.getitem and is_eager(node.args[0])  # type: ignore[arg-type]


def opaque_results(node: fx.Node) -> list[fx.Node]:
    """The values an opaque node makes: itself, or the results of an eager module."""
    return [u for u in node.users if is_result(u)] if is_eager(node) else [node]
