"""Tracing that does not grow with depth: three layers of each kind are traced, others stamped.

A decoder is a list of layers that mostly do the same with other weights. While a model is traced,
the first two and the last layer of each kind run as they are, between markers; every other one is a
`girih::layer_copy` call, which `expand` replaces by the nodes of the first. Layers to be left out
are hidden: they show no modules and no tensors meanwhile, since the exporter's work grows with
both. What makes two layers one kind is what a module can see: classes, plain attributes, shapes of
its tensors, entries of the configuration about its position, and the arguments it is called with.
Computing with the layer's number is what this cannot see; where it tells the first, the second or
the last layer apart, their nodes differ, and all layers are traced.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from girih.graph.ir.text import SymbolNames, tensor_layout, value_text
from girih.graph.trace.exported_weights import ExportedWeights

# Fewer layers than this are traced as they are.
MIN_LAYERS = 4
_PLAIN_TYPES = (bool, int, float, str, type(None))
_CONTENTS = ("_modules", "_parameters", "_buffers")
_MODULE_STATE = frozenset(torch.nn.Module().__dict__) | {"layer_idx", "layer_id", "layer_index"}

torch.library.define("girih::layer_begin", "(Tensor[] inputs, int layer) -> ()")
torch.library.define("girih::layer_end", "(Tensor output, int layer) -> ()")
torch.library.define(
    "girih::layer_copy", "(Tensor[] inputs, int like, int layer, int template) -> Tensor"
)


@torch.library.register_fake("girih::layer_begin")
def _layer_begin(inputs: list[torch.Tensor], layer: int) -> None:
    return None


@torch.library.register_fake("girih::layer_end")
def _layer_end(output: torch.Tensor, layer: int) -> None:
    return None


@torch.library.register_fake("girih::layer_copy")
def _layer_copy(inputs: list[torch.Tensor], like: int, layer: int, template: int) -> torch.Tensor:
    return torch.empty_like(inputs[like])


_BEGIN = torch.ops.girih.layer_begin.default
_END = torch.ops.girih.layer_end.default
_COPY = torch.ops.girih.layer_copy.default
fx.node.has_side_effect(_BEGIN)
fx.node.has_side_effect(_END)


class StampError(Exception):
    """Two layers that looked alike do not compute alike; the model must be traced in full."""


class HiddenLayerError(Exception):
    """A layer that was hidden has to run as it is; the model must be traced with all in sight."""


@dataclass
class _Kind:
    """Layers with one fingerprint that are called with one form of arguments.

    Attributes:
        traced: layers that ran as they are, the template first.
        copies: layers that were left out.
        like: which tensor argument has the layout of the result; None when none has.
        tree: structure of the result: True where its one tensor is.
    """

    traced: list[int] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    like: int | None = None
    tree: Any = None


class LayerStamps:
    """While active, further layers of a kind become `girih::layer_copy` calls.

    Args:
        root: the module that is exported; parameter names are relative to it.
        hides: hide the layers that will be copies if all of a fingerprint are called alike.
    """

    def __init__(self, root: torch.nn.Module, hides: bool = False) -> None:
        self._root, self._hides = root, hides
        self._layers: list[tuple[str, torch.nn.Module, str]] = []
        self._kinds: dict[tuple[str, Any], _Kind] = {}
        for path, layers in _layer_lists(root):
            for index, layer in enumerate(layers):
                self._layers.append((f"{path}.{index}", layer, fingerprint(layer, index)))
        counts = Counter(mark for _, _, mark in self._layers)
        self._repeated = {mark for mark, count in counts.items() if count > 2}
        self._last = {mark: number for number, (_, _, mark) in enumerate(self._layers)}
        self._hidden: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> LayerStamps:
        met: Counter[str] = Counter()
        for number, (_, layer, mark) in enumerate(self._layers):
            if mark not in self._repeated:
                continue
            layer.forward = self._stand_in(number, layer.forward, mark)
            if self._hides and met[mark] >= 2 and number != self._last[mark]:
                self._hidden[number] = {name: vars(layer)[name] for name in _CONTENTS}
                vars(layer).update({name: {} for name in _CONTENTS})
            met[mark] += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        for number, (_, layer, mark) in enumerate(self._layers):
            if mark in self._repeated:
                del layer.forward  # the class's own is there again
            vars(layer).update(self._hidden.get(number, {}))

    def must_show(self, error: BaseException) -> bool:
        """Return whether an export seems to have failed with `error` because layers were hidden."""
        cause: BaseException | None = error if self._hidden else None
        while cause is not None and not isinstance(cause, (HiddenLayerError, AttributeError)):
            cause = cause.__cause__ or cause.__context__
        return cause is not None

    def expand(self, program: torch.export.ExportedProgram) -> int:
        """Replace the markers and copies in a program by the layers' nodes.

        Args:
            program: what was exported meanwhile; it gets the weights of the copies.

        Returns:
            How many layers were stamped out.

        Raises:
            StampError: two layers of a kind have different nodes.
        """
        graph, weights = program.graph, ExportedWeights(program, self._root)
        segments = self._segments(graph, weights)
        for kind in self._kinds.values():
            if kind.copies:
                self._require_alike(kind, segments)
        copies = graph.find_nodes(op="call_function", target=_COPY)
        for node in copies:
            inputs, _, layer, template = node.args
            result = segments[template].stamp(node, list(inputs), self._layers[layer][0])
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        for target in (_BEGIN, _END):
            for node in graph.find_nodes(op="call_function", target=target):
                graph.erase_node(node)
        return len(copies)

    def _require_alike(self, kind: _Kind, segments: dict[int, _Segment]) -> None:
        """Compare the layers of a kind that were traced; the last of them must be among these."""
        first = kind.traced[0]
        reached_last = kind.traced[-1] in self._last.values()
        if not reached_last or len({segments[layer].text() for layer in kind.traced}) > 1:
            raise StampError(
                f"{self._layers[first][0]} and the layers like it do not all compute alike"
            )

    def _segments(self, graph: fx.Graph, weights: ExportedWeights) -> dict[int, _Segment]:
        segments: dict[int, _Segment] = {}
        current: _Segment | None = None
        for node in graph.nodes:
            if node.target is _BEGIN:
                inputs, layer = node.args
                path = self._layers[layer][0]
                current = _Segment(path, list(inputs), weights)
                segments[layer] = current
            elif node.target is _END:
                assert current is not None, "a layer ends that never began"
                current.output = node.args[0]
                current = None
            elif current is not None:
                current.nodes.append(node)
        return segments

    def _stand_in(self, number: int, forward: Callable[..., Any], mark: str) -> Callable[..., Any]:
        def traced_or_copied(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            form = _arguments_form(leaves)
            if form is None:
                self._require_sight(number)
                return forward(*args, **kwargs)
            kind = self._kinds.setdefault((mark, (str(tree), form)), _Kind())
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            known = len(kind.traced) >= 2 and number not in kind.traced and kind.like is not None
            if known and number != self._last[mark]:
                kind.copies.add(number)
                copy = _COPY(tensors, kind.like, number, kind.traced[0])
                return pytree.tree_map(lambda leaf: copy if leaf else None, kind.tree)
            self._require_sight(number)
            if number not in kind.traced:
                kind.traced.append(number)
            _BEGIN(tensors, number)
            result = forward(*args, **kwargs)
            output = _only_tensor(result)
            _END(tensors[0] if output is None else output, number)
            if output is not None:
                layouts = [tensor_layout(tensor) for tensor in tensors]
                layout = tensor_layout(output)
                kind.like = layouts.index(layout) if layout in layouts else None
                kind.tree = pytree.tree_map(lambda leaf: isinstance(leaf, torch.Tensor), result)
            return result

        return traced_or_copied

    def _require_sight(self, number: int) -> None:
        if number in self._hidden:
            raise HiddenLayerError(
                f"{self._layers[number][0]} is called otherwise than the layers like it"
            )


def _only_tensor(result: Any) -> torch.Tensor | None:
    """The tensor in a result that holds one tensor and otherwise only None, else None."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
    alone = len(leaves) == 1 and isinstance(leaves[0], torch.Tensor)
    return leaves[0] if alone else None


class _Segment:
    """The nodes of one traced layer.

    Args:
        path: the layer's module path.
        inputs: the tensors it was called with.
        weights: of the program.
    """

    def __init__(self, path: str, inputs: list[fx.Node], weights: ExportedWeights) -> None:
        self.path = path
        self.inputs = inputs
        self.nodes: list[fx.Node] = []
        self.output: Any = None
        self._weights = weights

    def text(self) -> str:
        """Write down the layer's computation in terms of its inputs and its own weights."""
        names = {node: f"in{position}" for position, node in enumerate(self.inputs)}
        symbols = SymbolNames()
        lines = []
        for node in self._computing():
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Name(self._name(n, names)))
            lines.append(f"{value_text(node.meta.get('val'), symbols)} {node.target} {arguments}")
            names[node] = str(len(lines))
        return "\n".join([*lines, f"return {self._name(self.output, names)}"])

    def stamp(self, place: fx.Node, inputs: list[fx.Node], path: str) -> fx.Node:
        """Insert the layer before `place`, with other inputs and the weights of layer `path`."""
        here: dict[fx.Node, fx.Node] = dict(zip(self.inputs, inputs, strict=True))
        graph = place.graph
        for node, name in list(self._weights.names.items()):
            if name.startswith(self.path + "."):
                here[node] = self._weights.placeholder(path + name[len(self.path) :], like=node)
        with graph.inserting_before(place):
            for node in self._computing():
                new = graph.node_copy(node, lambda n: here.get(n, n))
                new.meta = _moved(node.meta, self.path, path)
                here[node] = new
        return here[self.output]

    def _computing(self) -> Iterator[fx.Node]:
        """Nodes that hold data; sizes are the same for every layer and stay where they are."""
        for node in self.nodes:
            if not isinstance(node.meta.get("val"), (int, torch.SymInt)):
                yield node

    def _name(self, node: fx.Node, names: dict[fx.Node, str]) -> str:
        if node in names:
            return names[node]
        if node in self._weights.names:
            return self._weights.names[node].replace(self.path + ".", "own.")
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt)):
            return str(value)
        raise StampError(f"{self.path} uses {node.name}, which it was not called with")


class _Name(str):
    """A name that prints bare."""

    def __repr__(self) -> str:
        return str(self)


def fingerprint(layer: torch.nn.Module, index: int) -> str:
    """Hash of everything but weights and position that a layer's code can see (16 hex digits)."""
    digest = hashlib.sha256()
    for name, module in layer.named_modules():
        digest.update(f"{name}: {type(module).__module__}.{type(module).__qualname__}\n".encode())
        for attribute, value in sorted(module.__dict__.items()):
            if attribute not in _MODULE_STATE:
                digest.update(f"  {attribute} = {_attribute_text(value, index)}\n".encode())
        tensors = {**module._parameters, **module._buffers}
        for tensor_name, tensor in tensors.items():
            layout = tensor_layout(tensor) if tensor is not None else None
            digest.update(f"  {tensor_name}: {layout}\n".encode())
    return digest.hexdigest()[:16]


def _attribute_text(value: Any, index: int) -> str:
    """Text that is equal for equal attributes; objects of unknown kinds only equal themselves."""
    if isinstance(value, (*_PLAIN_TYPES, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_attribute_text(entry, index) for entry in value)}]"
    if isinstance(value, dict):
        return _attribute_text(sorted(value.items(), key=str), index)
    if isinstance(value, functools.partial):
        return f"partial {_attribute_text([value.func, value.args, value.keywords], index)}"
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):  # a configuration, shared
        return f"config {id(value)} {_per_layer_entries(value, index)}"
    return f"{type(value).__name__} {id(value)}"


def _per_layer_entries(config: Any, index: int) -> list[tuple[str, Any]]:
    """Entries of the configuration's lists that are about layer `index`."""
    count = getattr(config, "num_hidden_layers", None)
    entries = []
    for name, value in sorted(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count and index < len(value):
            entries.append((name, repr(value[index])))
        elif isinstance(value, (list, tuple)) and index in value:
            entries.append((name, "listed"))
    return entries


def _layer_lists(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists of layers, none of which shares a tensor with another module."""
    owners = Counter(id(t) for m in root.modules() for t in m._parameters.values() if t is not None)
    found: list[str] = []
    for path, module in root.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) < MIN_LAYERS:
            continue
        if any(path.startswith(outer + ".") for outer in found):
            continue
        found.append(path)
        apart = len({id(layer) for layer in module}) == len(module)
        if apart and all(owners[id(tensor)] == 1 for tensor in module.parameters()):
            yield path, module


def _arguments_form(leaves: list[Any]) -> tuple[Any, ...] | None:
    """Return a key that calls of one kind share; None for arguments that could hold state."""
    form: list[Any] = []
    seen: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            same = seen.setdefault(id(leaf), len(seen))
            form.append((same, str(leaf.device), *map(str, tensor_layout(leaf))))
        elif isinstance(leaf, _PLAIN_TYPES):
            form.append((type(leaf).__name__, leaf))
        else:
            return None
    return tuple(form) if seen else None


def _moved(meta: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Copy of a node's meta, its module path said for another layer."""
    moved = dict(meta)
    stack = meta.get("nn_module_stack")
    if stack:
        moved["nn_module_stack"] = {
            key.replace(old, new): (place.replace(old, new), kind)
            for key, (place, kind) in stack.items()
        }
    return moved
