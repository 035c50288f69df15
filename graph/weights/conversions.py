"""Conversions of checkpoint tensors to the model's: renames, stacked experts, split projections.

transformers describes both as transforms of names and tensors. They are read once, while a model is
traced, and recorded as data: a plain name, or a `Conversion`, which is the small graph of tensor
operations from its sources. Loading replays that graph and needs no transformers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from girih.graph.ir.tile_file import tile_from_json, tile_to_json
from girih.graph.ir.weight_plan import Conversion, Source
from girih.graph.weights.checkpoint import Checkpoint
from girih.kernels.base.errors import TraceError


def read_source(source: Source, checkpoint: Checkpoint, dtype: str) -> torch.Tensor:
    """Read what one source of a weight stands for.

    Args:
        source: a checkpoint name, or a conversion of several.
        checkpoint: where tensors are read from.
        dtype: of the result, and of what a conversion computes on.

    Raises:
        WeightError: a tensor is missing or damaged.
    """
    if isinstance(source, str):
        return checkpoint.read(source, dtype)
    inputs = [checkpoint.read(name, dtype) for name in source.sources]
    result: torch.Tensor = _module(source.graph).forward(*inputs)[0]
    return result


@functools.lru_cache(maxsize=64)
def _module(text: str) -> fx.GraphModule:
    return fx.GraphModule({}, tile_from_json(json.loads(text)))


def plan_sources(model: Any, checkpoint: Checkpoint, dtype: str) -> dict[str, Source]:
    """Where each tensor of a model comes from in a checkpoint.

    Args:
        model: the model on the meta device.
        checkpoint: its weights; only names and shapes are read.
        dtype: weights' compute dtype.

    Returns:
        By the model's tensor name; a tensor the checkpoint does not give is not in it.

    Raises:
        TraceError: a conversion of transformers fails on the checkpoint's shapes.
    """
    sources: dict[str, Source] = {}
    for target, mapping, names in _groups(model, checkpoint):
        if mapping is None:
            sources[target] = names[0]
        else:
            sources.update(_recorded(target, mapping, names, model, checkpoint, dtype))
    return sources


@dataclass
class _Group:
    """Checkpoint tensors that make one model tensor (or several, by splitting)."""

    mapping: Any
    names: list[str]


def model_names(model: Any, names: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Map checkpoint tensors to their names in transformers' model.

    Args:
        model: the model on the meta device.
        names: of checkpoint tensors, from any version of transformers that it can load.

    Returns:
        By checkpoint name: the model's tensor, and the pattern of the converter that makes it
        (None: a plain copy). Names that mean nothing to the model are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mappings = get_model_conversion_mapping(model)
    renamings = [m for m in mappings if isinstance(m, WeightRenaming)]
    converters = [m for m in mappings if isinstance(m, WeightConverter)]
    known = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, tuple[str, str | None]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target in known:
            found[name] = (target, pattern)
    return found


def _groups(model: Any, checkpoint: Checkpoint) -> list[tuple[str, Any, list[str]]]:
    """(model tensor, converter or None, checkpoint names), in checkpoint order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key

    mappings = get_model_conversion_mapping(model)
    converters = [m for m in mappings if isinstance(m, WeightConverter)]
    by_pattern = {p: m for m in converters for p in m.source_patterns}
    names = sorted(checkpoint.names(), key=dot_natural_key)
    groups: dict[str, _Group] = {}
    for name, (target, pattern) in model_names(model, names).items():
        mapping = None if pattern is None else deepcopy(by_pattern[pattern])
        group = groups.setdefault(target, _Group(mapping, []))
        if group.mapping is not None:
            group.mapping.add_tensor(target, name, pattern, len(group.names))
        group.names.append(name)
    return [(target, g.mapping, g.names) for target, g in groups.items()]


def _recorded(
    target: str, mapping: Any, names: list[str], model: Any, checkpoint: Checkpoint, dtype: str
) -> dict[str, Source]:
    """Run a converter on empty tensors and record what it does to them."""
    collected = {k: list(v) for k, v in mapping.collected_tensors.items()}

    def convert(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        mapping.collected_tensors = {
            pattern: [tensors[i] for i in order] for pattern, order in collected.items()
        }
        results = mapping.convert(target, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in results.items()}

    kind = getattr(torch, dtype)
    inputs = [torch.empty(checkpoint.shape(n), dtype=kind, device="meta") for n in names]
    try:
        graph, keys = _record(convert, inputs)
    except Exception as error:
        raise TraceError(
            f"the checkpoint's tensors {names[0]}, … do not become {target}: {error}"
        ) from error
    return {
        key: Conversion(key, tuple(names), json.dumps(tile_to_json(_only(graph, number))))
        for number, key in enumerate(keys)
    }


def _record(
    function: Callable[..., dict[str, torch.Tensor]], inputs: list[torch.Tensor]
) -> tuple[fx.Graph, list[str]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    keys: list[str] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = function(*tensors)
        keys[:] = list(results)
        return tuple(results.values())

    return make_fx(flat)(*inputs).graph, keys


def _only(graph: fx.Graph, number: int) -> fx.Graph:
    """A copy with one of the results, as a graph file writes it."""
    copy = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            results = node.args[0]
            copy.output((known[results[number]],)).meta["val"] = None
            continue
        known[node] = copy.node_copy(node, lambda n: known[n])
        known[node].meta = {"val": node.meta.get("val")}
    for node in reversed(list(copy.nodes)):
        if node.op == "call_function" and not node.users:
            copy.erase_node(node)
    return copy
