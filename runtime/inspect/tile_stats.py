"""Costs of a tile: bytes it must move, operations it must do, and the time it takes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from girih.graph.ir.random_values import random_tensors
from girih.graph.tiles.inductor import TileFn
from girih.runtime.inspect.machine_load import OtherWork

aten = torch.ops.aten
SIZES = (1, 256)
"""Tokens per step that tiles are looked at with: decoding, and a prefill chunk."""

SHORTEST_SECONDS, LONGEST_SECONDS = 0.3, 2.0
AGREEING, AGREEMENT = 5, 1.05  # so many calls within this factor of the fastest

_LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default}
_PRODUCTS = {
    torch.ops.girih.packed_linear.default,
    aten.linear.default,
    aten.mm.default,
    aten.bmm.default,
}
_VIEWS = {aten.view.default, aten.reshape.default, aten.unsqueeze.default}


@dataclass(frozen=True)
class TileCost:
    """One call of a tile.

    Attributes:
        tokens: size of every symbolic dimension.
        num_bytes: inputs read and results written once; of tables only the rows looked up.
        flops: multiplications and additions of its matrix products.
        seconds: fastest of several calls, or None when it was not compiled.
    """

    tokens: int
    num_bytes: int
    flops: int
    seconds: float | None

    def share_of(self, bytes_per_second: float, flops_per_second: float) -> float | None:
        """Time that the nearer limit of the machine allows over the time taken."""
        if self.seconds is None:
            return None
        least = max(self.num_bytes / bytes_per_second, self.flops / flops_per_second)
        return least / self.seconds


def tile_cost(graph: fx.Graph, tokens: int, compiled: TileFn | None) -> TileCost:
    """Count, and measure when there is code."""
    seconds = _fastest(graph, tokens, compiled) if compiled else None
    return TileCost(tokens, _bytes(graph, tokens), _flops(graph, tokens), seconds)


def _fastest(graph: fx.Graph, tokens: int, compiled: TileFn) -> float:
    inputs = random_tensors(graph, [tokens])
    samples: list[float] = []
    with torch.inference_mode():
        compiled(list(inputs))  # its first call touches memory for the first time
        begun, others = time.perf_counter(), OtherWork()
        while not is_enough(samples, time.perf_counter() - begun, others):
            started = time.perf_counter()
            compiled(list(inputs))
            samples.append(time.perf_counter() - started)
    return min(samples)


def is_enough(samples: list[float], seconds: float, others: OtherWork) -> bool:
    """Return whether the fastest call is known: several took about as long, or time is up.

    On a busy machine most calls wait for a thread that does not run, about as long each; then only
    patience counts.
    """
    if not samples or seconds < SHORTEST_SECONDS:
        return False
    limit = AGREEMENT * min(samples)
    agreed = sum(sample <= limit for sample in samples) >= AGREEING
    return seconds >= LONGEST_SECONDS or (agreed and not others.remark())


def _bytes(graph: fx.Graph, tokens: int) -> int:
    total = 0
    for node in graph.find_nodes(op="placeholder"):
        lookups = _lookups(node)
        read = [node] if lookups is None else lookups
        total += sum(_nbytes(n.meta["val"], tokens) for n in read)
    output = next(n for n in graph.nodes if n.op == "output")
    return total + sum(_nbytes(n.meta["val"], tokens) for n in output.args[0])


def _lookups(node: fx.Node) -> list[fx.Node] | None:
    """The look-ups that are all that reads a table; None when something reads it whole."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in _LOOKUPS and user.args[0] is node:
            found.append(user)
        elif user.target in _VIEWS and _lookups(user) is not None:
            found += _lookups(user) or []
        else:
            return None
    return found


def _flops(graph: fx.Graph, tokens: int) -> int:
    total = 0
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            depth = _shape(node.args[0].meta["val"], tokens)[-1]
        elif node.target is aten.addmm.default:
            depth = _shape(node.args[1].meta["val"], tokens)[-1]
        else:
            continue
        total += 2 * depth * math.prod(_shape(node.meta["val"], tokens))
    return total


def _nbytes(value: Any, tokens: int) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    num_bytes: int = math.prod(_shape(value, tokens)) * value.dtype.itemsize
    return num_bytes


def _shape(value: torch.Tensor, tokens: int) -> list[int]:
    return [s if isinstance(s, int) else _size(s, tokens) for s in value.shape]


def _size(size: Any, tokens: int) -> int:
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, tokens)))
