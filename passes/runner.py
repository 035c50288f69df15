"""Runs passes: switching, counting, timing, checking and dumping, for all of them alike.

`lower` is the only way a graph is rewritten. After each pass the graph is linted, the shapes of
what changed are held against the operators, and the pass is held to its word: it reported rewrites
if and only if the text changed. `opt.verify` also runs what changed on random values.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import fx

from girih.graph.ir.text import SymbolNames, digest, graph_text
from girih.graph.ir.trace_lock import one_at_a_time
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.trace.trace import node_origin
from girih.kernels.base.errors import PassError
from girih.kernels.base.target import Target
from girih.passes.checks import GraphState, check_count, check_values
from girih.passes.dump import Dump
from girih.passes.options import OptConfig
from girih.passes.pass_api import Pass, PassContext
from girih.passes.pipeline import pipeline
from girih.passes.report import PassRecord, pass_table
from girih.passes.verify.passes import PassVerifier


class Graphed(Protocol):
    """A model as a graph: `Traced`, or a dump that was read back."""

    @property
    def graph(self) -> fx.Graph:
        """Placeholders with roles, calls, one output."""

    @property
    def weights(self) -> WeightPlan:
        """The plan of its weights."""

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Values of constant entries."""

    @property
    def symbols(self) -> dict[str, str]:
        """Names of symbolic sizes."""

    def as_text(self) -> str:
        """Canonical text with origins."""


@dataclass(frozen=True)
class Lowered:
    """The graph after the passes.

    Attributes:
        source: where it came from.
        opt: the switches that were used.
        target: what it was lowered for.
        graph: the rewritten graph (a copy: `source.graph` is untouched).
        weights: the plan of the weights the graph now takes.
        records: one per pass, in order.
    """

    source: Graphed
    opt: OptConfig
    target: Target
    graph: fx.Graph
    weights: WeightPlan
    records: tuple[PassRecord, ...]

    def as_text(self) -> str:
        """Canonical text with origins."""
        return graph_text(self.graph, SymbolNames(self.source.symbols), node_origin)

    def report(self) -> str:
        """The pass table."""
        return pass_table(self.records)

    @property
    def key(self) -> str:
        """Hash of the lowered graph's text."""
        return digest(graph_text(self.graph, SymbolNames(self.source.symbols)))


@one_at_a_time
def lower(source: Graphed, opt: OptConfig, target: Target) -> Lowered:
    """Run the enabled passes over a copy of a graph.

    Raises:
        PassError: a pass broke the graph, misreported its rewrites, changed values (`opt.verify`)
            or found nothing where it ought to (`opt.strict`); names the pass.
    """
    run = _Run(source, opt, target)
    wanted = opt.runs()
    for number, item in enumerate(pipeline(), start=1):
        if item.name in wanted:
            run.apply(number, item)
        else:
            run.records.append(PassRecord(item.name, False))
    return run.finish()


class _Run:
    """One application of the pipeline."""

    def __init__(self, source: Graphed, opt: OptConfig, target: Target) -> None:
        self.source, self.opt, self.target = source, opt, target
        self.graph = _copy(source.graph)
        self.context = PassContext(target, WeightPlan(list(source.weights.entries.values())))
        self.records: list[PassRecord] = []
        self._text = self._canonical_text()
        self._verifier = PassVerifier(source, self.graph, target.isa) if opt.verify else None
        self._dump = Dump(Path(opt.dump), source.symbols) if opt.dump else None
        if self._dump:
            self._dump.write(0, "traced", self.graph, self.context.weights)

    def apply(self, number: int, item: Pass) -> None:
        """Run one pass, check it and keep its record."""
        before = GraphState(self.graph)
        self.context.notes = []
        started = time.perf_counter()
        try:
            rewrites = item.run(self.graph, self.context)
        except Exception as error:
            raise PassError(f"pass {item.name} failed: {error}") from error
        milliseconds = (time.perf_counter() - started) * 1e3
        record = PassRecord(
            name=item.name,
            enabled=True,
            rewrites=rewrites,
            nodes_before=len(before),
            nodes_after=len(self.graph.nodes),
            milliseconds=milliseconds,
            notes=tuple(self.context.notes),
            missed=item.expects(self.graph, self.target) if rewrites == 0 else None,
        )
        self._refuse_missed(record)
        self.records.append(self._checked(record, before))
        if self._dump and rewrites:
            self._dump.write(number, item.name, self.graph, self.context.weights)

    def _checked(self, record: PassRecord, before: GraphState) -> PassRecord:
        started = time.perf_counter()
        try:
            self.graph.lint()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]  # the rest is the whole graph
            raise PassError(f"pass {record.name} broke the graph: {reason}") from error
        changed = before.changed(self.graph)
        for node in changed:
            if node not in before:
                node.meta.setdefault("made_by", record.name)
        check_values(record.name, changed)
        text = self._canonical_text()
        check_count(record.name, record.rewrites, text != self._text)
        self._text = text
        verified = None
        if self._verifier and record.rewrites:
            verified = self._verifier.verify(record.name, changed, self.context.weights)
        milliseconds = (time.perf_counter() - started) * 1e3
        return dataclasses.replace(record, check_milliseconds=milliseconds, verified=verified)

    def _refuse_missed(self, record: PassRecord) -> None:
        if self.opt.strict and record.missed:
            refusals = "".join(f"\n  refused {note}" for note in record.notes[:8])
            raise PassError(
                f"pass {record.name} found nothing although {record.missed}{refusals}\n"
                f"opt.strict=false goes on, opt.passes.{record.name}=false switches it off"
            )

    def finish(self) -> Lowered:
        """The result; closes the dump."""
        used = {n.meta["weight"] for n in self.graph.nodes if "weight" in n.meta}
        plan = self.context.weights.restrict(used)
        records = tuple(self.records)
        if self._dump:
            self._dump.close(pass_table(records))
        return Lowered(self.source, self.opt, self.target, self.graph, plan, records)

    def _canonical_text(self) -> str:
        return graph_text(self.graph, SymbolNames(self.source.symbols))


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    new = copy.output(output)
    new.meta.update(next(n for n in graph.nodes if n.op == "output").meta)
    return copy
