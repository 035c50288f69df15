"""Level "passes": what each pass left is run against what it found, on random values.

Values are kept per node. After a pass only changed nodes are computed again, and each is compared
with its value before; a node that survives hands on its old value. So an error cannot hide behind
the rounding of the layers above it, and the first node that differs is the rewrite at fault.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

import girih.kernels.ops.schemas  # registers the reference operators  # noqa: F401
from girih.graph.ir.random_values import RandomCheckpoint, random_step, relative_rmse, tolerance
from girih.graph.ir.verify_result import VerifyResult, worst_of
from girih.graph.ir.weight_plan import CONSTANT, WeightPlan
from girih.graph.trace.trace import node_origin
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import PassError

if TYPE_CHECKING:
    from girih.graph.weights.checkpoint import Checkpoint
    from girih.passes.runner import Graphed


class PassVerifier:
    """Values of every node of a graph that passes rewrite.

    Args:
        source: where the graph came from.
        graph: the copy that passes rewrite; as yet untouched.
        isa: layout of packed weights.
    """

    def __init__(self, source: Graphed, graph: fx.Graph, isa: str) -> None:
        self._graph, self._isa = graph, isa
        self._checkpoint = cast("Checkpoint", RandomCheckpoint(source.weights))
        self._constants = _constants(source)
        self._values: dict[fx.Node, Any] = {}
        self._values.update(random_step(graph, source.symbols))
        with torch.no_grad():
            for node in graph.nodes:
                if node not in self._values:
                    self._values[node] = self._compute(node, self._values, source.weights)

    def verify(self, name: str, changed: list[fx.Node], weights: WeightPlan) -> VerifyResult:
        """Run what a pass changed.

        Returns:
            The largest relative RMSE of a node that has a value before and after.

        Raises:
            PassError: a value differs by more than its dtype's rounding; names the first node.
        """
        started = time.perf_counter()
        stale = set(changed)
        values: dict[fx.Node, Any] = {}
        results = []
        with torch.no_grad():
            for node in self._graph.nodes:
                before = self._values.get(node)
                inputs = node.all_input_nodes
                moved = any(values[n] is not self._values.get(n) for n in inputs)
                if node in self._values and node not in stale and not moved:
                    values[node] = before
                    continue
                after = self._compute(node, values, weights)
                error = _difference(after, before)
                if error is not None:
                    result = self._result(name, node, after, error)
                    results.append(result.require(PassError, _advice(name)))
                values[node] = _carried(after, before)
        self._values = values
        worst = worst_of("passes", _compared(name), results)
        return replace(worst, seconds=time.perf_counter() - started)

    def _compute(self, node: fx.Node, values: dict[fx.Node, Any], weights: WeightPlan) -> Any:
        if node.op == "placeholder":
            entry = weights.entries[node.meta["weight"]]
            plan = WeightPlan([entry])
            return load_weights(plan, self._checkpoint, self._constants, self._isa)[entry.name]
        args = fx.node.map_arg(node.args, values.__getitem__)
        if node.op == "output":
            return args[0]
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
        return node.target(*args, **kwargs)

    @staticmethod
    def _result(name: str, node: fx.Node, after: Any, error: float) -> VerifyResult:
        bound = tolerance(after.dtype)
        place = f"{node.name} ({node_origin(node) or node.op}), {after.dtype}"
        where = "" if error <= bound else place
        return VerifyResult("passes", _compared(name), error, bound, first_difference=where)


def _compared(name: str) -> str:
    return f"values before and after {name}"


def _advice(name: str) -> str:
    return (
        f"The pass changed what the model computes: switch it off with opt.passes.{name}=false; "
        "opt.dump=DIR shows its rewrites"
    )


def _difference(after: Any, before: Any) -> float | None:
    """Relative RMSE; None where there is nothing to compare (a new node, other rows)."""
    both = isinstance(after, torch.Tensor) and isinstance(before, torch.Tensor)
    if not both or after.shape != before.shape or after.dtype != before.dtype:
        return None
    return relative_rmse(after, before)


def _carried(after: Any, before: Any) -> Any:
    """The old value where it can stand for the new one, so that roundings do not add up."""
    if _difference(after, before) is None or after.stride() != before.stride():
        return after
    return before


def _on_cpu(value: Any) -> Any:
    """The tracer's device in arguments means the one that values are on."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _constants(source: Graphed) -> dict[str, torch.Tensor]:
    """Constants by name; a dump that was read back has none, and small numbers stand in."""
    values = dict(source.constants)
    for entry in source.weights.entries.values():
        if entry.form == CONSTANT and entry.name not in values:
            count = torch.Size(entry.shape).numel()
            numbers = torch.linspace(0.1, 1.0, count).reshape(entry.shape)
            values[entry.name] = numbers.to(getattr(torch, entry.dtype))
    return values
