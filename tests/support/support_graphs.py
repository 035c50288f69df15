"""Small functions captured as graphs, the way `trace` captures models, for tests of passes.

    graph = capture(f, weights={"w": (8, 4)}, inputs={"x": ("T", 4)})

`f` takes the weights, then the inputs. Sizes "T" and "S" are symbolic; an input "logits_index" is
int64. Passes run on the result exactly as the runner would run them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from girih.graph.ir.text import SymbolNames, graph_text
from girih.graph.ir.weight_plan import PACKED, PLAIN, WeightEntry, WeightPlan
from girih.kernels.base.target import Target
from girih.kernels.ops import reference
from girih.kernels.ops.packing import pack_rows, packed_shape
from girih.passes.pass_api import PassContext, PassFn

TARGET = Target("cpu", "avx2", 2, "g++")
SIZES = {"T": 37, "S": 5}

Shape = tuple[int | str, ...]


@dataclass
class Captured:
    """A graph with its plan and the names of its sizes."""

    graph: fx.Graph
    context: PassContext
    symbols: dict[str, str]

    @property
    def text(self) -> str:
        return graph_text(self.graph, SymbolNames(self.symbols))

    def apply(self, run: PassFn) -> int:
        """Run a pass in place and lint."""
        count = run(self.graph, self.context)
        self.graph.lint()
        return count

    def tidy(self) -> None:
        """Drop dead nodes and read sizes of inputs first, as capturing does."""
        self.graph.eliminate_dead_code()
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
            last.append(node)

    def call(self, weights: dict[str, torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Run the graph on real tensors; entries of the plan are filled from `weights`."""
        plan = self.context.weights.entries
        named = [
            filled(plan[n.meta["weight"]], weights) for n in self.graph.nodes if "weight" in n.meta
        ]
        result: torch.Tensor = _Run(fx.GraphModule({}, self.graph)).run(*named, *inputs)
        return result


class _Run(fx.Interpreter):
    """Runs graphs on the reference kernels, whichever library the process has loaded."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.girih.packed_linear.default:
            return reference.packed_linear(*args)
        return super().call_function(target, args, kwargs)


def filled(entry: WeightEntry, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor of a plan entry, made of its sources."""
    logical = torch.cat([weights[s] for s in entry.sources])
    if entry.form != PACKED:
        return logical
    n, k = entry.shape
    packed = torch.zeros(packed_shape(n, k, logical.dtype, TARGET.isa), dtype=logical.dtype)
    pack_rows(packed, logical, 0)
    return packed


def capture(
    function: Callable[..., Any],
    weights: dict[str, Shape],
    inputs: dict[str, Shape],
    dtype: torch.dtype = torch.float32,
) -> Captured:
    """Capture a function with symbolic sizes."""

    class Module(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    named = {**weights, **inputs}
    examples = tuple(_example(name, shape, dtype) for name, shape in named.items())
    dims = {name: torch.export.Dim(name, min=2, max=1 << 16) for name in SIZES}
    dynamic = tuple(
        {i: dims[s] for i, s in enumerate(shape) if isinstance(s, str)} for shape in named.values()
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            Module(),
            examples,
            dynamic_shapes=(dynamic,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    return _described(exported.graph, weights, inputs)


def values(shapes: dict[str, Shape], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random values of the given shapes ("logits_index": row numbers below T)."""
    result = []
    for name, shape in shapes.items():
        sizes = [SIZES.get(s, s) if isinstance(s, str) else s for s in shape]
        if name in ("logits_index", "ids"):
            result.append(torch.randint(0, 20, sizes))
        else:
            result.append(torch.randn(sizes, dtype=dtype))
    return result


def _example(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sizes = [SIZES.get(s, s) if isinstance(s, str) else s for s in shape]
    integer = name in ("logits_index", "ids")
    return torch.zeros(sizes, dtype=torch.int64 if integer else dtype, device="meta")


def _described(graph: fx.Graph, weights: dict[str, Shape], inputs: dict[str, Shape]) -> Captured:
    plan, symbols = WeightPlan(), {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, (name, shape) in zip(placeholders, {**weights, **inputs}.items(), strict=True):
        value = node.meta["val"]
        if name in weights:
            node.meta["weight"] = name
            dtype = str(value.dtype).removeprefix("torch.")
            plan.add(WeightEntry(name, PLAIN, tuple(value.shape), dtype, (name,)))
        else:
            node.meta["input"] = name
            for size, label in zip(value.shape, shape, strict=True):
                if isinstance(label, str):
                    symbols[str(size.node.expr)] = label
    output = next(n for n in graph.nodes if n.op == "output")
    if len(output.args[0]) == 1:
        output.args = (output.args[0][0],)
    return Captured(graph, PassContext(TARGET, plan), symbols)
