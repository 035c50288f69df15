"""A whole graph with its weight plan as JSON: what dumps write and `girih passes` reads again.

{"calls": …, "inputs": …, "outputs": …,     as in a tile's file
 "device": "meta" | "cpu",                           as traced, or made for a target
 "roles": [{"weight": NAME} | {"input": NAME}, …],   one per placeholder
 "names": [name of each node],
 "origins": [module path or "", …],                  one per call
 "weights": [plan entry, …]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from girih.graph.ir.text import SymbolNames, graph_text
from girih.graph.ir.tile_file import tile_from_json, tile_to_json
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.trace.trace import node_origin
from girih.kernels.base.errors import BundleError


@dataclass(frozen=True)
class StoredGraph:
    """A graph read from a file: what passes need of a traced model.

    Attributes:
        graph: placeholders with their roles, calls, one output.
        weights: the plan of its weights.
        symbols: names of the symbolic sizes.
        constants: empty; a file holds no tensor values.
    """

    graph: fx.Graph
    weights: WeightPlan
    symbols: dict[str, str]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def as_text(self) -> str:
        """Canonical text with origins."""
        return graph_text(self.graph, SymbolNames(self.symbols), node_origin)


def write_graph(graph: fx.Graph, weights: WeightPlan, path: Path) -> None:
    """Write a graph whose placeholders carry `meta["weight"]` or `meta["input"]`."""
    placeholders = graph.find_nodes(op="placeholder")
    calls = [n for n in graph.nodes if n.op == "call_function"]
    document = {
        **tile_to_json(graph),
        "device": _device(graph),
        "roles": [{k: n.meta[k] for k in ("weight", "input") if k in n.meta} for n in placeholders],
        "names": [n.name for n in graph.nodes],
        "origins": [_module(n) for n in calls],
        "weights": weights.to_json(),
    }
    path.write_text(json.dumps(document))


def read_graph(path: Path) -> StoredGraph:
    """Read a graph back; its canonical text is that of the graph that was written.

    Raises:
        BundleError: the file is missing, or holds something else.
    """
    try:
        document = json.loads(path.read_text())
        roles, names, origins = document["roles"], document["names"], document["origins"]
        plan = WeightPlan.from_json(document["weights"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{path} is not a dumped graph: {error}; opt.dump=DIR writes them as NNN_PASS.json"
        ) from error
    graph = tile_from_json(document, document["device"])
    for node, role in zip(graph.find_nodes(op="placeholder"), roles, strict=True):
        node.meta.update(role)
    for node, name in zip(graph.nodes, names, strict=True):
        node._rename(name)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for node, origin in zip(calls, origins, strict=True):
        if origin:
            node.meta["nn_module_stack"] = {"": (origin, "")}
    return StoredGraph(graph, plan, symbol_names(graph))


def symbol_names(graph: fx.Graph) -> dict[str, str]:
    """Names of the symbolic sizes: S counts the wanted rows, T the tokens."""
    names: dict[str, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        size = node.meta["val"].shape[0] if "input" in node.meta else None
        if isinstance(size, torch.SymInt):
            label = "S" if node.meta["input"] == "logits_index" else "T"
            names.setdefault(str(size.node.expr), label)
    return names


def _module(node: fx.Node) -> Any:
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def _device(graph: fx.Graph) -> str:
    """The device that calls name: the tracer's, until `canonicalize` put the target's there."""
    found: list[torch.device] = []

    def note(value: Any) -> Any:
        if isinstance(value, torch.device):
            found.append(value)
        return value

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), note)
    return "meta" if any(d.type == "meta" for d in found) else "cpu"
