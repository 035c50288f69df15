"""What a pass is: a function over a graph, with its facts declared beside it.

    @register_pass(phase=Phase.CANONICALIZE)
    def drop_noise(graph: fx.Graph, ctx: PassContext) -> int: ...   # number of rewrites

A pass works in place, reads nothing but its arguments, and returns how many rewrites it made (0
means the graph is untouched). A candidate it declines goes to `ctx.refuse` with the reason. Timing,
linting, dumping and switching off are the runner's work (`passes/runner.py`), never a pass's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from girih.graph.weight_plan import WeightPlan
from girih.kernels.target import Target


class Phase(Enum):
    """Part of the pipeline a pass belongs to, in order."""

    CANONICALIZE = "canonicalize"
    FUSE = "fuse"
    LOWER = "lower"


@dataclass
class PassContext:
    """What a pass may read and write beside the graph.

    Attributes:
        target: what the program is compiled for.
        weights: the plan of the graph's weights; a pass that changes weights changes it too.
        notes: reasons for declined candidates, collected by the runner.
    """

    target: Target
    weights: WeightPlan
    notes: list[str] = field(default_factory=list)

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Say why a candidate was left alone."""
        self.notes.append(f"{node.name}: {reason}")


PassFn = Callable[[fx.Graph, PassContext], int]


@dataclass(frozen=True)
class Pass:
    """A registered pass."""

    name: str
    phase: Phase
    run: PassFn
    summary: str


PASSES: dict[str, Pass] = {}


def register_pass(phase: Phase) -> Callable[[PassFn], PassFn]:
    """Register a function as the pass of its own name."""

    def register(function: PassFn) -> PassFn:
        name = function.__name__
        summary = (function.__doc__ or "").strip().splitlines()[0]
        PASSES[name] = Pass(name, phase, function, summary)
        return function

    return register


def insert_call(
    graph: fx.Graph,
    before: fx.Node,
    target: torch._ops.OpOverload,
    args: tuple[object, ...],
    origin: fx.Node,
) -> fx.Node:
    """Insert a call before `before`, with its value's shape and the origin of `origin`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
    if "nn_module_stack" in origin.meta:
        node.meta["nn_module_stack"] = origin.meta["nn_module_stack"]
    return node


def insert_weight(
    graph: fx.Graph, name: str, like: torch.Tensor, shape: tuple[int, ...], after: fx.Node
) -> fx.Node:
    """Insert a weight placeholder of `like`'s dtype and device."""
    with graph.inserting_after(after):
        node = graph.placeholder("w_" + "".join(c if c.isalnum() else "_" for c in name))
    node.meta["val"] = like.new_empty(shape)
    node.meta["weight"] = name
    return node


def refresh_values(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Recompute what depends on `changed` nodes, as far as shapes or strides become others."""
    pending = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or pending.isdisjoint(node.all_input_nodes):
            continue
        value = node.target(
            *fx.node.map_arg(node.args, lambda n: n.meta["val"]),
            **fx.node.map_arg(node.kwargs, lambda n: n.meta["val"]),
        )
        if _layout(value) != _layout(node.meta["val"]):
            node.meta["val"] = value
            pending.add(node)


def _layout(value: object) -> object:
    """Shape and strides as text: comparing symbolic sizes would fix them."""
    if isinstance(value, torch.Tensor):
        return str(value.shape), str(value.stride())
    return [_layout(v) for v in value] if isinstance(value, (list, tuple)) else None
