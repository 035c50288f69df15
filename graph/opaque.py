"""The ops that split a program: attention and recurrences, which see more than their own token."""

from __future__ import annotations

import torch
from torch import fx

import girih.kernels.ops  # registers girih::attention  # noqa: F401
from girih.kernels.state_ops import STATE_OPS, StateOp

ATTENTION = torch.ops.girih.attention.default
_STATE_TARGETS = {getattr(torch.ops.girih, name).default: op for name, op in STATE_OPS.items()}


def is_attention(node: fx.Node) -> bool:
    """Whether a node is an attention call."""
    return node.target is ATTENTION


def state_op(node: fx.Node) -> StateOp | None:
    """The recurrent op a node calls, if it calls one."""
    return _STATE_TARGETS.get(node.target)  # type: ignore[arg-type]


def is_opaque(node: fx.Node) -> bool:
    """Whether a node becomes a step of its own."""
    return node.target is ATTENTION or node.target in _STATE_TARGETS
