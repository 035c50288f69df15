"""A tile's graph as JSON: how it reaches a compiling process and stays readable in a bundle.

Inputs carry dtype and shape (symbolic sizes by name); calls carry the operator's name and plain
arguments. Reading a file back gives a graph that runs, prints and compiles like the original.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import girih.kernels.ops.all_ops  # registers the ops named in files  # noqa: F401
from girih.graph.ir.trace_lock import one_at_a_time
from girih.kernels.base.errors import BundleError

_PYTHON_OPS = {
    f"operator.{f.__name__}": f
    for f in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv,
        operator.mod, operator.truediv, operator.neg, operator.eq, operator.ne, operator.lt,
        operator.le, operator.gt, operator.ge,
    )
}  # fmt: skip


def tile_to_json(graph: fx.Graph) -> dict[str, Any]:
    """Encode a graph (placeholders, calls of operators, one output: a tuple, or one tensor)."""
    numbers: dict[fx.Node, int] = {}
    inputs, calls = [], []
    outputs: list[int] | int = []
    for node in graph.nodes:
        if node.op == "output":
            result = node.args[0]
            single = isinstance(result, fx.Node)
            outputs = numbers[result] if single else [numbers[n] for n in result]
            continue
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            inputs.append(_encode_input(node.meta["val"]))
        else:
            kwargs = {k: _encode(v, numbers) for k, v in node.kwargs.items()}
            call = {"op": _op_name(node.target), "args": _encode(node.args, numbers)}
            calls.append({**call, "kwargs": kwargs} if kwargs else call)
    return {"inputs": inputs, "calls": calls, "outputs": outputs}


def tile_from_json(data: dict[str, Any], device: str = "cpu", shapes: bool = True) -> fx.Graph:
    """Decode a graph.

    Args:
        data: what `tile_to_json` made.
        device: of the inputs.
        shapes: give every node its `meta["val"]` again. It takes about a second for a tile and
            is not needed to run the graph.

    Raises:
        BundleError: an operator that this build of torch and girih does not have.
    """
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(data["inputs"]))]
    for row in data["calls"]:
        args = _decode(row["args"], nodes)
        kwargs = {k: _decode(v, nodes) for k, v in row.get("kwargs", {}).items()}
        nodes.append(graph.call_function(_op(row["op"]), tuple(args), kwargs))
    outputs = data["outputs"]
    result = nodes[outputs] if isinstance(outputs, int) else tuple(nodes[i] for i in outputs)
    graph.output(result).meta["val"] = None
    if shapes:
        _infer_shapes(nodes, data["inputs"], device)
    return graph


@one_at_a_time
def _infer_shapes(nodes: list[fx.Node], inputs: list[dict[str, Any]], device: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    named = {size for row in inputs for size in row["shape"] if isinstance(size, str)}
    sizes = _SymbolicSizes(mode, named)
    for node, row in zip(nodes, inputs, strict=False):
        node.meta["val"] = sizes.tensor(row, device)
    for node in nodes[len(inputs) :]:
        assert callable(node.target), "only inputs are not calls"
        with mode, enable_python_dispatcher():
            node.meta["val"] = node.target(
                *fx.node.map_arg(node.args, lambda n: n.meta["val"]),
                **fx.node.map_arg(node.kwargs, lambda n: n.meta["val"]),
            )


def write_tile(graph: fx.Graph, path: Path) -> None:
    """Write a tile graph to a file."""
    path.write_text(json.dumps(tile_to_json(graph), indent=0))


def read_tile(path: Path, shapes: bool = True) -> fx.Graph:
    """Read a tile graph from a file; see `tile_from_json`."""
    return tile_from_json(json.loads(path.read_text()), shapes=shapes)


def _encode_input(value: torch.Tensor) -> dict[str, Any]:
    shape = [s if isinstance(s, int) else str(s.node.expr) for s in value.shape]
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": shape}


class _SymbolicSizes:
    """The sizes of a tile's inputs: one symbol per name, multiples of a named one from it.

    Args:
        mode: of the tensors.
        names: every size of an input that is no number.
    """

    def __init__(self, mode: FakeTensorMode, names: set[str]) -> None:
        self._mode = mode
        self._names = names
        self._known: dict[str, Any] = {}

    def tensor(self, row: dict[str, Any], device: str) -> torch.Tensor:
        shape = [self._size(s) if isinstance(s, str) else s for s in row["shape"]]
        with self._mode:
            return torch.empty(shape, dtype=getattr(torch, row["dtype"]), device=device)

    def _size(self, name: str) -> Any:
        if name not in self._known:
            factor, _, base = name.partition("*")
            is_multiple = factor.isdigit() and base in self._names
            self._known[name] = int(factor) * self._size(base) if is_multiple else self._symbol()
        return self._known[name]

    def _symbol(self) -> Any:
        """A new symbolic size."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        real = torch.empty(example_size(len(self._known)), device="meta")
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
        return self._mode.from_tensor(real, symbolic_context=context).shape[0]


def example_size(number: int) -> int:
    """The size that stands for the n-th symbol, unlike every other one."""
    return 37 - 14 * number if number < 3 else 9 + 14 * number


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"operator.{target.__name__}"


def _op(name: str) -> Any:
    if name in _PYTHON_OPS:
        return _PYTHON_OPS[name]
    namespace, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError as error:
        raise BundleError(f"tile uses operator {name}, which this torch does not have") from error


def _encode(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"%": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_encode(v, numbers) for v in value]
    for kind in (torch.dtype, torch.memory_format, torch.layout):
        if isinstance(value, kind):
            return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    raise BundleError(f"tile holds an argument of type {type(value).__name__}: {value!r}")


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes) for v in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "%":
            return nodes[content]
        if kind == "torch":
            return getattr(torch, content)
        return torch.device(content) if kind == "device" else float.fromhex(content)
    return value
