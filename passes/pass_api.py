"""The interface of a pass: a function over a graph, with its facts declared beside it.

    @register_pass(expects=lambda graph, target: None)
    def drop_noise(graph: fx.Graph, ctx: PassContext) -> int: ...   # number of rewrites

Its phase, its line of the catalogue and its place are in `passes/pipeline.py`.

A pass works in place, reads nothing but its arguments, and returns how many rewrites it made (0
means the graph is untouched). A candidate it declines goes to `ctx.refuse` with the reason. Timing,
linting, dumping and switching off are the runner's work (`passes/runner.py`), never a pass's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from girih.graph.ir.weight_plan import WeightPlan
from girih.kernels.base.target import Target
from girih.passes.infer import empty_value, infer_value, value_layout


@dataclass
class PassContext:
    """The context that a pass may read and write beside the graph.

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
ExpectFn = Callable[[fx.Graph, Target], str | None]


@dataclass(frozen=True)
class Pass:
    """A registered pass.

    Attributes:
        name: also its switch, `opt.passes.NAME`.
        run: the rewrite.
        expects: why the pass ought to find something in a graph for a target, or None where it
            need not. It looks for less than the pass does, so that a pattern that broke is noticed.
    """

    name: str
    run: PassFn
    expects: ExpectFn


PASSES: dict[str, Pass] = {}


def register_pass(expects: ExpectFn) -> Callable[[PassFn], PassFn]:
    """Register a function as the pass of its own name."""

    def register(function: PassFn) -> PassFn:
        name = function.__name__
        PASSES[name] = Pass(name, function, expects)
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
    node.meta["val"] = infer_value(node)
    if "nn_module_stack" in origin.meta:
        node.meta["nn_module_stack"] = origin.meta["nn_module_stack"]
    return node


def insert_weight(
    graph: fx.Graph, name: str, like: torch.Tensor, shape: tuple[int, ...], after: fx.Node
) -> fx.Node:
    """Insert a weight placeholder of `like`'s dtype and device."""
    with graph.inserting_after(after):
        node = graph.placeholder("w_" + "".join(c if c.isalnum() else "_" for c in name))
    node.meta["val"] = empty_value(like, shape)
    node.meta["weight"] = name
    return node


def refresh_values(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Recompute what depends on `changed` nodes, as far as shapes or strides become others.

    A view of what now lies in memory with gaps becomes a reshape, which copies.
    """
    pending = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or pending.isdisjoint(node.all_input_nodes):
            continue
        try:
            value = infer_value(node)
        except (RuntimeError, ValueError):
            if node.target is not torch.ops.aten.view.default:
                raise
            node.target = torch.ops.aten.reshape.default
            value = infer_value(node)
        if value_layout(value) != value_layout(node.meta["val"]):
            node.meta["val"] = value
            pending.add(node)
