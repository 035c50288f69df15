"""Random values to verify with: weights like a trained model's in scale, and inputs of one step."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import fx

from girih.graph.ir.text import size_parts
from girih.graph.ir.weight_plan import CONSTANT, WeightPlan

# Sizes that tiles and passes run with; odd, distinct, unlike any dimension of a model.
VERIFY_SIZES = {"T": 13, "S": 3}


class RandomCheckpoint:
    """A checkpoint of random tensors, the same in every process: what `load_weights` reads.

    Args:
        plan: a plan as traced, whose entries say the shape of each source.
    """

    def __init__(self, plan: WeightPlan) -> None:
        self._shapes = {
            source: entry.shape
            for entry in plan.entries.values()
            if entry.form != CONSTANT and len(entry.sources) == 1
            for source in entry.sources
        }

    def read(self, name: str, dtype: str) -> torch.Tensor:
        """A tensor: matrices keep the scale of their input, vectors lie around 1."""
        shape = self._shapes[name]
        values = torch.randn(shape, generator=_generator(name))
        if len(shape) > 1:
            values /= math.sqrt(shape[-1])
        else:
            values = 1.0 + 0.2 * values
        return values.to(getattr(torch, dtype))


def random_step(graph: fx.Graph, symbols: dict[str, str]) -> dict[fx.Node, torch.Tensor]:
    """Values for the step inputs of a model graph: one sequence of T tokens, S rows wanted."""
    tokens, rows = VERIFY_SIZES["T"], VERIFY_SIZES["S"]
    known = {
        "ids": lambda: torch.randint(_vocabulary(graph), (tokens,), generator=_generator("ids")),
        "positions": lambda: torch.arange(tokens),
        "logits_index": lambda: torch.tensor([tokens - 1, 2, 5])[:rows],
    }
    values = {}
    for node in graph.find_nodes(op="placeholder"):
        name = node.meta.get("input")
        if name is not None:
            make = known.get(name)
            sizes = {symbol: VERIFY_SIZES[label] for symbol, label in symbols.items()}
            values[node] = make() if make else _zeros(node.meta["val"], sizes)
    return values


def random_tensors(graph: fx.Graph, sizes: list[int]) -> list[torch.Tensor]:
    """Values for the inputs of a tile, whose symbolic sizes get `sizes` in order of appearance.

    Integers count up from 0: they are token ids, positions or row numbers, and in range as such;
    what looks up a smaller table (token types) starts again at its end.
    """
    known: dict[str, int] = {}
    values = []
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta["val"]
        shape = []
        for size in value.shape:
            factor, name = (size, "") if isinstance(size, int) else size_parts(size)
            if name and name not in known:
                known[name] = sizes[min(len(known), len(sizes) - 1)]
            shape.append(factor * known[name] if name else factor)
        drawn = _tile_input(shape, value.dtype, number)
        values.append(drawn % table_rows(node) if value.dtype == torch.int64 else drawn)
    return values


def relative_rmse(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of `expected`; inf when only one has a NaN."""
    if found.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    a, b = found.double(), expected.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    finite = b.isfinite()
    difference = float((a - b)[finite].square().mean().sqrt())
    scale = float(b[finite].square().mean().sqrt())
    return difference / scale if scale else difference


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""Largest relative RMSE that rounding alone explains, for one rewrite or one tile."""


def tolerance(dtype: torch.dtype) -> float:
    """The bound for a dtype; 0 for integers and truth values."""
    return TOLERANCE.get(dtype, 0.0)


def _tile_input(shape: list[int], dtype: torch.dtype, number: int) -> torch.Tensor:
    generator = _generator(f"tile input {number}")
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        count = math.prod(shape)
        return torch.arange(count, dtype=dtype).reshape(shape)
    return torch.randn(shape, generator=generator).to(dtype)


def table_rows(node: fx.Node) -> int:
    """Rows of the smallest table that the numbers of `node` look up, as they are or reshaped."""
    rows = [1 << 62]
    for user in node.users:
        if user.target is torch.ops.aten.embedding.default and user.args[1] is node:
            rows.append(int(user.args[0].meta["val"].shape[0]))
        elif user.target in _RESHAPES:
            rows.append(table_rows(user))
    return min(rows)


_RESHAPES = {
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
}


def _vocabulary(graph: fx.Graph) -> int:
    """Rows of the smallest table that token ids look up."""
    tables = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    return min((int(n.args[0].meta["val"].shape[0]) for n in tables), default=32)


def _zeros(value: Any, sizes: dict[str, int]) -> torch.Tensor:
    shape = [s if isinstance(s, int) else sizes.get(str(s), VERIFY_SIZES["T"]) for s in value.shape]
    return torch.zeros(shape, dtype=value.dtype)


def _generator(name: str) -> torch.Generator:
    """A generator seeded by a name, alike in every process."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.Generator().manual_seed(seed)
