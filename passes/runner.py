"""Runs passes: switching, counting, timing, checking and dumping, for all of them alike.

`lower` is the only way a graph is rewritten. After each pass the graph is linted, dead code is
removed, and the pass is held to its word: it reported rewrites if and only if the text changed.
"""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from girih.graph.text import SymbolNames, digest, graph_text
from girih.graph.trace import Traced, node_origin
from girih.graph.weight_plan import WeightPlan
from girih.kernels.errors import PassError
from girih.kernels.target import Target
from girih.passes.options import OptConfig
from girih.passes.pass_api import Pass, PassContext
from girih.passes.pipeline import pipeline


@dataclass(frozen=True)
class PassRecord:
    """What one pass did.

    Attributes:
        name: the pass.
        enabled: False when it was switched off (all counts are then 0).
        rewrites: number it reported.
        nodes_before, nodes_after: size of the graph.
        milliseconds: time in the pass itself.
        notes: candidates it declined, with reasons.
    """

    name: str
    enabled: bool
    rewrites: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """The graph after the passes.

    Attributes:
        traced: where it came from.
        opt: the switches that were used.
        target: what it was lowered for.
        graph: the rewritten graph (a copy: `traced.graph` is untouched).
        weights: the plan of the weights the graph now takes.
        records: one per pass, in order.
    """

    traced: Traced
    opt: OptConfig
    target: Target
    graph: fx.Graph
    weights: WeightPlan
    records: tuple[PassRecord, ...]

    def as_text(self) -> str:
        """Canonical text with origins."""
        return graph_text(self.graph, SymbolNames(self.traced.symbols), node_origin)

    def report(self) -> str:
        """The pass table."""
        lines = [f"{'pass':24s} {'rewrites':>8s}  {'nodes':>13s}  {'ms':>7s}  notes"]
        for r in self.records:
            nodes = f"{r.nodes_before} → {r.nodes_after}" if r.enabled else ""
            notes = "off" if not r.enabled else _notes_text(r.notes)
            lines.append(
                f"{r.name:24s} {r.rewrites:8d}  {nodes:>13s}  {r.milliseconds:7.1f}  {notes}"
            )
        return "\n".join(lines) + "\n"

    @property
    def key(self) -> str:
        """Hash of the lowered graph's text."""
        return digest(graph_text(self.graph, SymbolNames(self.traced.symbols)))


def lower(traced: Traced, opt: OptConfig, target: Target) -> Lowered:
    """Run the enabled passes over a copy of the traced graph.

    Raises:
        PassError: a pass broke the graph or misreported its rewrites; names the pass.
    """
    graph = _copy(traced.graph)
    context = PassContext(target, WeightPlan(list(traced.weights.entries.values())))
    dump = _Dump(Path(opt.dump), traced) if opt.dump else None
    records = []
    text = graph_text(graph, SymbolNames(traced.symbols))
    for number, item in enumerate(pipeline(), start=1):
        if getattr(opt.passes, item.name).enabled:
            record, text = _run_one(item, graph, context, text, traced)
            if dump and record.rewrites:
                dump.write(number, item.name, graph)
        else:
            record = PassRecord(item.name, False, 0, 0, 0, 0.0, ())
        records.append(record)
    used = {n.meta["weight"] for n in graph.nodes if "weight" in n.meta}
    plan = context.weights.restrict(used)
    return Lowered(traced, opt, target, graph, plan, tuple(records))


def _run_one(
    item: Pass, graph: fx.Graph, context: PassContext, text_before: str, traced: Traced
) -> tuple[PassRecord, str]:
    """Run a pass; returns its record and the graph's text after it."""
    known = set(graph.nodes)
    nodes_before = len(known)
    context.notes = []
    started = time.perf_counter()
    try:
        rewrites = item.run(graph, context)
        graph.lint()
    except Exception as error:
        raise PassError(f"pass {item.name} failed: {error}") from error
    milliseconds = (time.perf_counter() - started) * 1e3
    for node in graph.nodes:
        if node not in known:
            node.meta.setdefault("made_by", item.name)
    text = graph_text(graph, SymbolNames(traced.symbols))
    changed = text != text_before
    if changed != (rewrites > 0):
        raise PassError(
            f"pass {item.name} reported {rewrites} rewrites but the graph "
            f"{'changed' if changed else 'did not change'}"
        )
    notes = tuple(context.notes)
    record = PassRecord(
        item.name, True, rewrites, nodes_before, len(graph.nodes), milliseconds, notes
    )
    return record, text


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    new = copy.output(output)
    new.meta.update(next(n for n in graph.nodes if n.op == "output").meta)
    return copy


def _notes_text(notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    return f"refused {notes[0]}{more}"


class _Dump:
    """Writes the graph's text after each pass that changed something, and the diff to before."""

    def __init__(self, directory: Path, traced: Traced) -> None:
        self._directory = directory
        self._symbols = traced.symbols
        self._last = traced.as_text()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "000_traced.txt").write_text(self._last)

    def write(self, number: int, name: str, graph: fx.Graph) -> None:
        text = graph_text(graph, SymbolNames(self._symbols), node_origin)
        stem = f"{number:03d}_{name}"
        (self._directory / f"{stem}.txt").write_text(text)
        diff = difflib.unified_diff(
            self._last.splitlines(), text.splitlines(), "before", name, lineterm="", n=2
        )
        (self._directory / f"{stem}.diff").write_text("\n".join(diff) + "\n")
        self._last = text
