"""Dumps: the graph after each pass that changed it, for people and for replaying.

000_traced.txt                  text                    000_traced.json   read by girih passes run
003_NAME.txt  003_NAME.diff     text, difference to the one before      003_NAME.json
report.txt                      the pass table
"""

from __future__ import annotations

import difflib
from pathlib import Path

from torch import fx

from girih.graph.ir.text import SymbolNames, graph_text
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.partition.graph_file import write_graph
from girih.graph.trace.trace import node_origin
from girih.kernels.base.errors import ConfigError


class Dump:
    """Writes one directory of dumps."""

    def __init__(self, directory: Path, symbols: dict[str, str]) -> None:
        self._directory, self._symbols = directory, symbols
        self._last: str | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"opt.dump is {directory}, which cannot be written: {error}; name another directory"
            ) from error

    def write(self, number: int, name: str, graph: fx.Graph, weights: WeightPlan) -> None:
        """Write one state of the graph, and what changed since the last."""
        stem = self._directory / f"{number:03d}_{name}"
        symbols = SymbolNames(self._symbols)
        stem.with_suffix(".txt").write_text(graph_text(graph, symbols, node_origin))
        write_graph(graph, weights, stem.with_suffix(".json"))
        named = graph_text(graph, symbols, node_origin, by_name=True)
        if self._last is not None:
            stem.with_suffix(".diff").write_text(text_diff(self._last, named, "before", name))
        self._last = named

    def close(self, report: str) -> None:
        """Write the pass table."""
        (self._directory / "report.txt").write_text(report)


def text_diff(before: str, after: str, name: str, other: str) -> str:
    """Unified difference of two texts written by name, "" when they are equal."""
    old, new = before.splitlines(), after.splitlines()
    lines = difflib.unified_diff(old, new, name, other, lineterm="", n=2)
    text = "\n".join(lines)
    return text + "\n" if text else ""
