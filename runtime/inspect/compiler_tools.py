"""The compiler's tools of the command line: lowering a model or a dump, comparing graphs."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch

from girih.graph.bundle.bundle import open_bundle
from girih.graph.bundle.files import BundleKey, named_bundle, read_key
from girih.graph.ir.text import SymbolNames, graph_text
from girih.graph.ir.verify_result import verify_report
from girih.graph.partition.graph_file import read_graph
from girih.graph.partition.partition import Program
from girih.graph.tiles.inductor import TileFn, load_tile
from girih.graph.trace.trace import node_origin, trace
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.progress import Progress, no_progress
from girih.kernels.base.target import Target, why_not_runnable
from girih.kernels.bench import measure_peaks
from girih.kernels.build.library import load_library
from girih.passes.build.build import lower_and_partition
from girih.passes.build.key import bundle_dir, bundle_key
from girih.passes.runner import Graphed, Lowered, lower
from girih.runtime.inspect.explain_page import Measured, PageData, render
from girih.runtime.inspect.machine_load import OtherWork
from girih.runtime.inspect.tile_stats import SIZES, TileCost, tile_cost
from girih.runtime.records.config import EngineConfig
from girih.runtime.start.context import target_of
from girih.runtime.start.wanted import model_spec


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
    return lower(source, config.opt, target_of(config))


def write_page(config: EngineConfig, path: Path, progress: Progress = no_progress) -> None:
    """Write the stages of a model's compilation as an HTML page; times only from a cached bundle.

    Raises:
        ConfigError: the file cannot be written.
    """
    spec, target = model_spec(config.model, progress), target_of(config)
    traced = trace(spec, progress)
    with tempfile.TemporaryDirectory(prefix="girih-page-") as directory:
        opt = dataclasses.replace(config.opt, dump=directory)
        lowered, program = lower_and_partition(traced, opt, target)
        differences = {
            record.name: file.read_text()
            for record in lowered.records
            for file in Path(directory).glob(f"*_{record.name}.diff")
        }
    key = bundle_key(spec, config.opt, target)
    page = render(
        PageData(
            title=f"{spec.name} at {config.opt.level} for {target.device} {target.isa}",
            summary=spec.as_text() + verify_report(program.verified),
            records=lowered.records,
            differences=differences,
            layout=program.layout,
            notes={tile.key: tile.note for tile in program.tiles.values()},
            measured=_measured(config, program, key, target),
            key=key.as_text() if config.opt.compile else "nothing is compiled at this level\n",
            graph=lowered.as_text(),
        )
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"explain.html is {path}, which cannot be written: {error}") from error


def _measured(config: EngineConfig, program: Program, key: BundleKey, target: Target) -> Measured:
    """Costs of the tiles, with times and machine limits when their code is at hand and runs."""
    named = config.compile.bundle
    path = named_bundle(named) if named else bundle_dir() / key.digest
    found = read_key(path) if config.opt.compile else None
    if found != key or target.device != "cpu" or why_not_runnable(target.isa):
        return Measured(_costs(program, {}))
    torch.set_num_threads(target.threads)
    bundle = open_bundle(path)
    load_library(bundle.library)
    others = OtherWork()
    costs = _costs(program, {k: load_tile(bundle.package(k)) for k in program.tiles})
    limits = measure_peaks(bundle.library, getattr(torch, dict(key.entries)["model.dtype"]))
    peaks = limits.gflops, limits.gbytes
    return Measured(costs, peaks, target.threads, others.remark())


def _costs(program: Program, compiled: dict[str, TileFn]) -> dict[str, list[TileCost]]:
    return {
        tile.key: [tile_cost(tile.graph, tokens, compiled.get(tile.key)) for tokens in SIZES]
        for tile in program.tiles.values()
    }


def named_texts(configs: list[EngineConfig], progress: Progress = no_progress) -> list[str]:
    """The lowered graph of one model under several switches, by node name."""
    source = _traced(configs[0], progress)
    results = [lower(source, config.opt, target_of(config)) for config in configs]
    return [_named(r.source, r) for r in results]


def named_text(source: Graphed) -> str:
    """Text of a graph by node name, in which only changes differ."""
    return _named(source, source)


def _named(source: Graphed, graphed: Graphed | Lowered) -> str:
    return graph_text(graphed.graph, SymbolNames(source.symbols), node_origin, by_name=True)


def _traced(config: EngineConfig, progress: Progress) -> Graphed:
    return trace(model_spec(config.model, progress), progress)
