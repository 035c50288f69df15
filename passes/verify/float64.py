"""A tile's graph as `verify_rows` runs it: in float64, on the CPU, and without weights in full.

A product with a weight costs as much as the weight is large. What the check asks of it (a row of
the result depends on the same row of the operand, on all of it) holds as well for a product
through `RANK` dimensions:

    linear(%x [T, K], %w [N, K])  ->  %x @ %down [K, 8] @ %up [8, N]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import girih.kernels.ops.experts
import girih.kernels.ops.schemas  # registers packed_linear  # noqa: F401

aten = torch.ops.aten

RANK = 8


@dataclass(frozen=True)
class Float64Graph:
    """A graph to run on float64.

    Attributes:
        module: inputs like the tile's, all of them.
        origins: the tile's node that each of its nodes stands for.
    """

    module: fx.GraphModule
    origins: dict[fx.Node, fx.Node]


def float64_graph(graph: fx.Graph) -> Float64Graph:
    """The float64 form of a tile's graph."""
    build = _Build(fx.Graph(), {}, {}, {})
    live = _live(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            build.keep(node, build.graph.placeholder(node.name))
        elif node.op == "output":
            build.graph.output(fx.map_arg(node.args[0], build.copies.__getitem__))
        elif node in live:
            build.add(node)
    return Float64Graph(fx.GraphModule(build.factors, build.graph), build.origins)


@dataclass
class _Build:
    """A float64 graph under construction."""

    graph: fx.Graph
    copies: dict[fx.Node, fx.Node]
    origins: dict[fx.Node, fx.Node]
    factors: dict[str, torch.Tensor]

    def keep(self, node: fx.Node, copy: fx.Node) -> None:
        """Let `copy` stand for a node of the tile."""
        self.copies[node] = copy
        self.origins[copy] = node

    def add(self, node: fx.Node) -> None:
        """Add the float64 form of a call."""
        product = _product_of(node)
        self.keep(node, self._call(node) if product is None else self._product(product))
        if _makes_floats(node):
            wide = self.graph.call_function(aten.to.dtype, (self.copies[node], torch.float64))
            self.keep(node, wide)

    def _call(self, node: fx.Node) -> fx.Node:
        # Weights lie in overlapping memory, of which not every view exists.
        target = aten.reshape.default if node.target is aten.view.default else node.target
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _wide)
        args, kwargs = fx.map_arg((args, kwargs), self.copies.__getitem__)
        return self.graph.call_function(target, args, kwargs)

    def _product(self, product: _Product) -> fx.Node:
        x, bias, experts = (
            None if n is None else self.copies[n]
            for n in (product.x, product.bias, product.experts)
        )
        depth = int(product.x.meta["val"].shape[-1])
        down, up = self._random(depth, RANK), self._random(RANK, product.width)
        if experts is not None:
            return self.graph.call_function(_run_experts, (x, down, up, bias, experts))
        scale = None
        if product.several:  # the matrices differ
            count = math.prod(product.several)
            values = torch.linspace(1, 2, count, dtype=torch.float64)
            scale = self._factor(values.view(*product.several, 1, 1))
        return self.graph.call_function(_run_product, (x, down, up, bias, scale))

    def _random(self, rows: int, columns: int) -> fx.Node:
        generator = torch.Generator().manual_seed(len(self.factors))
        values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return self._factor(values / math.sqrt(rows))

    def _factor(self, values: torch.Tensor) -> fx.Node:
        name = f"factor{len(self.factors)}"
        self.factors[name] = values
        return self.graph.get_attr(name)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Return the values that the results depend on, weights of products aside."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            live.update(node.all_input_nodes)
        elif node in live:
            product = _product_of(node)
            live.update(node.all_input_nodes if product is None else product.operands)
    return live


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for another: float64, or complex128, or itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _wide(value: Any) -> Any:
    """An argument as it is for float64 on the CPU."""
    if isinstance(value, torch.dtype):
        return wide(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _makes_floats(node: fx.Node) -> bool:
    """Return whether floats are made of integers or of nothing: torch makes them float32."""
    operands = (n.meta["val"] for n in node.all_input_nodes)
    return _is_float(node.meta["val"]) and not any(map(_is_float, operands))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- products ----

# Positions of the operand with rows, the weight, and the bias.
_PRODUCTS: dict[Any, tuple[int, int, int | None]] = {
    aten.linear.default: (0, 1, 2),
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.matmul.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    torch.ops.girih.packed_linear.default: (0, 1, 2),
    torch.ops.girih.expert_linear.default: (0, 1, 2),
}
_SEVERAL = {aten.bmm.default, aten.matmul.default}


@dataclass(frozen=True)
class _Product:
    """A product with a weight.

    Attributes:
        x: the operand with rows.
        bias: added to the result, or None.
        experts: chooses among the weights of experts, or None.
        several: leading sizes of a weight that is several matrices.
        width: entries of a row of the result.
    """

    x: fx.Node
    bias: fx.Node | None
    experts: fx.Node | None
    several: tuple[int, ...]
    width: int

    @property
    def operands(self) -> list[fx.Node]:
        """All but the weight."""
        return [n for n in (self.x, self.bias, self.experts) if n is not None]


def _product_of(node: fx.Node) -> _Product | None:
    """The product that a node computes, when its right operand is the same for all tokens."""
    if node.target not in _PRODUCTS or node.kwargs:
        return None
    given: list[Any] = [*node.args, None]
    at_x, at_weight, at_bias = _PRODUCTS[node.target]
    x, weight, bias = given[at_x], given[at_weight], None if at_bias is None else given[at_bias]
    left, right = x.meta["val"], weight.meta["val"]
    follows_tokens = any(isinstance(size, torch.SymInt) for size in right.shape)
    if not _is_float(left) or right.ndim < 2 or follows_tokens:
        return None
    experts = node.args[3] if node.target is torch.ops.girih.expert_linear.default else None
    several = tuple(right.shape[:-2]) if node.target in _SEVERAL else ()
    return _Product(x, bias, experts, several, int(node.meta["val"].shape[-1]))


def _run_product(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """x [..., K] -> [..., N], like a product with a matrix [K, N], or one per scale [..., 1, 1]."""
    y = x @ down @ up
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def _run_experts(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
) -> torch.Tensor:
    """x [T, K] or [T, C, K] -> [T, C, N], like `girih::expert_linear`."""
    rows = x.unsqueeze(1).expand(*experts.shape, x.shape[-1]) if x.ndim == 2 else x
    y = (rows @ down @ up) * (1.0 + 0.1 * experts.unsqueeze(-1))
    return y if bias is None else y + bias[experts.clamp(0, bias.shape[0] - 1)]
