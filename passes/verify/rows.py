"""Level "rows": each token's row depends on that token only, verified by running a program's tiles.

Between attentions and recurrences nothing may look at other tokens, or the sequences of a step
would mix. `fail_closed` refuses the operators that are known to; this finds those it does not know.
Each distinct tile runs eagerly on a few tokens together, in another order, some of them, and one by
one: a token's row must come out the same each time.

Everything is float64, whatever the model's dtype. Batches of different size round differently, and
in float64 that is so far below any value that it flips no choice of experts and crosses no
threshold. So nothing is forgiven: a row is equal within 1e-9 of its largest entry, or the model is
refused. Rows are of very different size, so that thresholds on values are met from both sides.

No weight is made in full: products go through few dimensions (`float64.py`), and the rows of other
matrices overlap in memory. Integers are small numbers, that tables they look up have rows for.

It is a test: what only blocks of more than `_TOKENS` tokens share is not seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from girih.graph.ir.program import TileStep
from girih.graph.ir.random_values import table_rows
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.partition.partition import Program, Tile
from girih.graph.trace.fail_closed import where
from girih.kernels.base.errors import TraceError
from girih.passes.verify.float64 import float64_graph, wide

_TOKENS = 7
_ALL = list(range(_TOKENS))
# Which tokens run together, and in which order.
_ORDERS = [_ALL[::-1], [4, 0, 2], *([token] for token in _ALL)]
_TOLERANCE = 1e-9  # of the largest entry of a row
_FLOOR = 1e-3  # what rows of smaller entries are measured by


def verify_rows(program: Program, symbols: dict[str, str], architecture: str) -> VerifyResult:
    """Run every distinct tile of a program, as the module says.

    Args:
        program: as split.
        symbols: names of the symbolic sizes, {"s11": "T", ...}.
        architecture: for messages.

    Raises:
        TraceError: a token's row depends on other tokens, or a tile does not run; names the tile,
            the first operation at fault, its module and the line of the model's source.
    """
    started = time.perf_counter()
    weights = {number: name for name, number in program.layout.weights.items()}
    worst, seen = 0.0, set()
    for step in program.layout.steps:
        if not isinstance(step, TileStep) or step.tile in seen:
            continue
        seen.add(step.tile)
        known = [program.constants.get(weights.get(number, "")) for number in step.inputs]
        with torch.no_grad():
            rows = _TileRows(program.tiles[step.tile], known, symbols, architecture)
            worst = max(worst, rows.run())
    compared = f"{len(seen)} tiles, each token's row beside others and alone"
    return VerifyResult("rows", compared, worst, _TOLERANCE, time.perf_counter() - started)


@dataclass(frozen=True)
class _Axis:
    """The dimension of a value that has rows for tokens.

    Attributes:
        dim: its position.
        label: "T", or "S": the wanted tokens, here all of them from the last to the first.
        rows: rows of one token, one behind the other.
    """

    dim: int
    label: str
    rows: int

    def places(self, order: Sequence[int]) -> torch.Tensor:
        """Where the rows of some tokens lie along the dimension when all of them are there."""
        if self.label == "S":
            order = [_TOKENS - 1 - token for token in reversed(order)]
        return torch.tensor(
            [token * self.rows + row for token in order for row in range(self.rows)]
        )


def _axis(value: torch.Tensor, symbols: dict[str, str]) -> _Axis | None:
    """The axis of a value; None when no size follows the number of tokens.

    Raises:
        ValueError: a size is no multiple of it.
    """
    found = [(i, size) for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    if not found:
        return None
    (dim, size), *others = found
    free = list(size.node.expr.free_symbols)
    rows = size.node.expr / free[0] if len(free) == 1 else None
    if others or not isinstance(rows, sympy.Integer):
        raise ValueError(f"has the shape {list(value.shape)}, which is no row for each token")
    return _Axis(dim, symbols.get(str(free[0]), "T"), int(rows))


class _TileRows:
    """One tile, and values to run it on.

    Args:
        tile: the tile.
        known: values of the inputs that are constants of the model; None elsewhere.
        symbols: names of the symbolic sizes.
        architecture: for messages.
    """

    def __init__(
        self,
        tile: Tile,
        known: list[torch.Tensor | None],
        symbols: dict[str, str],
        architecture: str,
    ) -> None:
        self._tile, self._symbols, self._architecture = tile, symbols, architecture
        placeholders = tile.graph.find_nodes(op="placeholder")
        self._axes = [self._axis_of(node) for node in placeholders]
        self._inputs = [
            _drawn(node, axis, number) if value is None else _as_double(value)
            for number, (node, axis, value) in enumerate(
                zip(placeholders, self._axes, known, strict=True)
            )
        ]
        [self._results] = [n.args[0] for n in tile.graph.nodes if n.op == "output"]
        self._wide = float64_graph(tile.graph)

    def run(self) -> float:
        """Run the tokens together and apart; returns the largest difference of a row."""
        axes = [self._axis_of(node) for node in self._results]
        whole = self._call(_ALL)
        for node, result in zip(self._results, whole, strict=True):
            if not bool(result.isfinite().any()):
                raise self._refusal(node, "gives no finite number on random values")
        worst = 0.0
        for order in _ORDERS:
            for expected, found, axis in zip(whole, self._call(order), axes, strict=True):
                difference = _difference(expected, found, axis, order)
                if difference > _TOLERANCE:
                    raise self._mixes(order, difference)
                worst = max(worst, difference)
        return worst

    def _axis_of(self, node: fx.Node) -> _Axis | None:
        try:
            return _axis(node.meta["val"], self._symbols)
        except ValueError as error:
            raise self._refusal(node, str(error)) from error

    def _taken(self, order: Sequence[int]) -> list[torch.Tensor]:
        """The inputs, of some of the tokens."""
        return [
            x if axis is None else _rows(x, axis, order)
            for x, axis in zip(self._inputs, self._axes, strict=True)
        ]

    def _call(self, order: Sequence[int]) -> list[torch.Tensor]:
        try:
            return list(self._wide.module(*self._taken(order)))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            last = self._values(order)[1]
            node = self._wide.origins.get(last, last)
            raise self._refusal(node, f"does not run on {len(order)} tokens: {reason}") from error

    def _values(self, order: Sequence[int]) -> tuple[dict[fx.Node, Any], fx.Node]:
        """The value of each node, up to one that fails, and the last one that ran or failed."""
        recorder = _Recorder(self._wide.module)
        try:
            recorder.run(*self._taken(order))
        except Exception:
            return recorder.values, recorder.last
        return recorder.values, recorder.last

    def _mixes(self, order: Sequence[int], difference: float) -> TraceError:
        """Names the first value that is not the same alone."""
        whole, part = self._values(_ALL)[0], self._values(order)[0]
        nodes = {copy: self._wide.origins[copy] for copy in part if copy in self._wide.origins}
        differ = (n for c, n in nodes.items() if self._differs(n, whole[c], part[c], order))
        return self._refusal(
            next(differ, self._results[0]),
            "gives a token something else when other tokens are beside it (relative difference "
            f"{difference:.1e}), which would mix the sequences of a step",
        )

    def _differs(self, node: fx.Node, whole: Any, part: Any, order: Sequence[int]) -> bool:
        try:
            pairs = [
                (a, b, _axis(value, self._symbols))
                for a, b, value in zip(*map(_flat, (whole, part, node.meta["val"])), strict=True)
                if isinstance(value, torch.Tensor)
            ]
            return any(_difference(a, b, x, order) > _TOLERANCE for a, b, x in pairs)
        except ValueError:  # several rows of a token may lie in any order inside a tile
            return False

    def _refusal(self, node: fx.Node, what: str) -> TraceError:
        return TraceError(
            f"{self._architecture}: {where(node)} {what}: unsupported (tile {self._tile.key}: "
            f"{self._tile.note})"
        )


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self.last = next(iter(module.graph.nodes))

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        value = super().run_node(n)
        if n.op == "call_function":
            self.values[n] = value
        return value


def _rows(x: torch.Tensor, axis: _Axis, order: Sequence[int]) -> torch.Tensor:
    """The rows of some tokens. Integers for wanted tokens are the numbers of their rows."""
    if axis.label == "S" and not x.is_floating_point():
        return torch.arange(len(order)).flip(0).to(x.dtype)
    return x.index_select(axis.dim, axis.places(order))


def _difference(
    whole: torch.Tensor, part: torch.Tensor, axis: _Axis | None, order: Sequence[int]
) -> float:
    """The largest difference between what tokens get together and apart, by each row's largest."""
    wanted, dim = whole, 0
    if axis is not None:
        wanted, dim = whole.index_select(axis.dim, axis.places(order)), axis.dim
    if part.shape != wanted.shape:
        return math.inf
    if wanted.ndim == 0 or axis is None:
        part, wanted = part.reshape(1, -1), wanted.reshape(1, -1)
    a, b = (x.movedim(dim, 0).flatten(1) for x in (part, wanted))
    same = (a == b) | (a.isnan() & b.isnan())
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if bool(same.all()) else math.inf
    scale = b.abs().masked_fill(~b.isfinite(), 0.0).amax(1, keepdim=True).clamp_min(_FLOOR)
    error = ((a - b).abs() / scale).masked_fill(same, 0.0).nan_to_num(math.inf)
    return float(error.max()) if error.numel() else 0.0


# ---- values ----


def _as_double(value: torch.Tensor) -> torch.Tensor:
    return value.to(wide(value.dtype))


def _drawn(node: fx.Node, axis: _Axis | None, number: int) -> torch.Tensor:
    """A value for an input: activations of very different size, weights, or small integers."""
    value = node.meta["val"]
    rows = axis.rows if axis else 0
    shape = [s if isinstance(s, int) else rows * _TOKENS for s in value.shape]
    generator = torch.Generator().manual_seed(number)
    if value.dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    dtype = wide(value.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        numbers = torch.arange(math.prod(shape), dtype=value.dtype) * 5
        return (numbers % min(table_rows(node), _TOKENS)).reshape(shape)
    if axis is None:
        return _weight(shape, dtype, generator)
    sizes = torch.logspace(-2, 2, _TOKENS, dtype=torch.float64)[torch.tensor(_ALL) * 3 % _TOKENS]
    along = [-1 if dim == axis.dim else 1 for dim in range(len(shape))]
    values = torch.randn(shape, generator=generator, dtype=dtype)
    return values * sizes.repeat_interleave(rows).view(along)


def _weight(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Vectors around 1; the rows of a matrix overlap in memory, so that none takes much."""
    if len(shape) < 2:
        return 1.0 + 0.2 * torch.randn(shape, generator=generator, dtype=dtype)
    strides = [2 * (len(shape) - dim) - 1 for dim in range(len(shape))]
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    values = torch.randn(max(length, 1), generator=generator, dtype=dtype)
    return (values / math.sqrt(shape[-1])).as_strided(shape, strides)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
