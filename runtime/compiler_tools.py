"""What the command line shows of the compiler: lowering a model or a dump, and comparing graphs."""

from __future__ import annotations

from pathlib import Path

from girih.graph.graph_file import read_graph
from girih.graph.progress import Progress, no_progress
from girih.graph.spec import load_spec
from girih.graph.text import SymbolNames, graph_text
from girih.graph.trace import node_origin, trace
from girih.kernels.target import Target, resolve_target
from girih.passes.runner import Graphed, Lowered, lower
from girih.runtime.config import EngineConfig


def lower_source(
    config: EngineConfig, dump: Path | None, progress: Progress = no_progress
) -> Lowered:
    """Run the passes over a model, or over a dumped graph.

    Args:
        config: model, switches and target.
        dump: a `NNN_PASS.json` of `opt.dump`; None traces the model.
        progress: observer.
    """
    source = read_graph(dump) if dump else _traced(config, progress)
    return lower(source, config.opt, _target(config))


def named_texts(configs: list[EngineConfig], progress: Progress = no_progress) -> list[str]:
    """The lowered graph of one model under several switches, by node name."""
    source = _traced(configs[0], progress)
    results = [lower(source, config.opt, _target(config)) for config in configs]
    return [_named(r.source, r) for r in results]


def named_text(source: Graphed) -> str:
    """Text of a graph by node name, in which only changes differ."""
    return _named(source, source)


def _named(source: Graphed, graphed: Graphed | Lowered) -> str:
    return graph_text(graphed.graph, SymbolNames(source.symbols), node_origin, by_name=True)


def _traced(config: EngineConfig, progress: Progress) -> Graphed:
    return trace(load_spec(config.model.source, config.model.dtype, progress), progress)


def _target(config: EngineConfig) -> Target:
    wanted = config.target
    return resolve_target(wanted.device, wanted.isa, wanted.threads)
