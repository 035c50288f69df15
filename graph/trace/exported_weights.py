"""The weights of an exported program, and how it gets more of them."""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)


class ExportedWeights:
    """Placeholders of parameters and buffers, by name in the module that was exported.

    Args:
        program: it; `placeholder` completes its graph, signature and tensors.
        root: the module that was exported.

    Attributes:
        names: of the placeholders.
    """

    def __init__(self, program: torch.export.ExportedProgram, root: torch.nn.Module) -> None:
        self._program, self._root = program, root
        placeholders = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
        self._by_name = {
            str(spec.target): placeholders[spec.arg.name]
            for spec in program.graph_signature.input_specs
            if spec.kind in _WEIGHTS
        }
        self.names = {node: name for name, node in self._by_name.items()}

    def placeholder(self, name: str, like: fx.Node) -> fx.Node:
        """The placeholder of a weight; one that the program did not have yet becomes `like`."""
        if name not in self._by_name:
            self._add(name, like)
        return self._by_name[name]

    def _add(self, name: str, like: fx.Node) -> None:
        graph = self._program.graph
        with graph.inserting_after(like):
            node = graph.placeholder("w_" + "".join(c if c.isalnum() else "_" for c in name))
        node.meta = dict(like.meta)
        specs = self._program.graph_signature.input_specs
        place = next(i for i, spec in enumerate(specs) if spec.arg.name == like.name)
        spec = dataclasses.replace(specs[place], arg=TensorArgument(name=node.name), target=name)
        specs.insert(place + 1, spec)
        tensor = operator.attrgetter(name)(self._root)
        self._tensors_of(spec)[name] = tensor
        self._by_name[name] = node
        self.names[node] = name

    def _tensors_of(self, spec: InputSpec) -> dict[str, torch.Tensor]:
        is_kept = spec.kind is InputKind.PARAMETER or spec.persistent
        tensors: dict[str, torch.Tensor] = (
            self._program.state_dict if is_kept else self._program.constants
        )
        return tensors
