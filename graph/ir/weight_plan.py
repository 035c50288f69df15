"""Where every weight of the lowered graph comes from, as data.

A `WeightPlan` lists the tensors the compiled program takes as inputs. Each entry names the
checkpoint tensors whose rows it is made of and the form it is kept in; the loader
(`graph/weights/load.py`) fills entries one checkpoint tensor at a time, so no concatenation or
packing ever happens after loading. Passes rewrite the plan together with the graph.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

PLAIN = "plain"
PACKED = "packed"
CONSTANT = "constant"

DTYPE_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8,
    "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """A model tensor computed from checkpoint tensors (`graph/weights/conversions.py`).

    Attributes:
        name: the model's tensor.
        sources: checkpoint names, in the order the graph takes them.
        graph: the tensor operations, as the text of a graph file.
    """

    name: str
    sources: tuple[str, ...]
    graph: str


Source = str | Conversion


@dataclass(frozen=True)
class WeightEntry:
    """One tensor input of the program.

    Attributes:
        name: unique within the plan; the checkpoint name, or a name covering merged siblings.
        form: "plain" (as the graph saw it), "packed" (kernel layout of a linear weight),
            or "constant" (a buffer computed from the configuration and kept in the bundle).
        shape: logical shape; a packed [N, K] weight keeps its logical shape here.
        dtype: dtype name, e.g. "bfloat16".
        sources: checkpoint names, or conversions of several, whose rows follow each other along
            dimension 0.
    """

    name: str
    form: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[Source, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor (packing may pad by a few rows)."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class WeightPlan:
    """The entries by name, in first-use order."""

    def __init__(self, entries: list[WeightEntry] | None = None) -> None:
        self.entries: dict[str, WeightEntry] = {e.name: e for e in entries or []}

    def add(self, entry: WeightEntry) -> None:
        """Add an entry, or replace the one of the same name."""
        self.entries[entry.name] = entry

    def restrict(self, names: set[str]) -> WeightPlan:
        """A plan of only the entries in `names` (the ones a graph still uses)."""
        return WeightPlan([e for e in self.entries.values() if e.name in names])

    def checkpoint_names(self) -> list[str]:
        """Every checkpoint tensor that is read to fill the plan, once."""
        kept = [e for e in self.entries.values() if e.form != CONSTANT]
        sources = [source for entry in kept for source in entry.sources]
        named = [[s] if isinstance(s, str) else list(s.sources) for s in sources]
        return list(dict.fromkeys(name for names in named for name in names))

    def as_text(self) -> str:
        """One line per entry: name, form, dtype, shape, sources when merged."""
        lines = []
        for e in self.entries.values():
            merged = f"  <- {len(e.sources)} tensors" if len(e.sources) > 1 else ""
            lines.append(f"{e.form:8s} {e.dtype}[{', '.join(map(str, e.shape))}]  {e.name}{merged}")
        return "\n".join(lines)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data for a bundle."""
        return [asdict(e) for e in self.entries.values()]

    @classmethod
    def from_json(cls, rows: list[dict[str, Any]]) -> WeightPlan:
        """Inverse of `to_json`."""
        return cls(
            [
                WeightEntry(
                    r["name"],
                    r["form"],
                    tuple(r["shape"]),
                    r["dtype"],
                    tuple(_source_from_json(s) for s in r["sources"]),
                )
                for r in rows
            ]
        )


def _source_from_json(data: str | dict[str, Any]) -> Source:
    if isinstance(data, str):
        return data
    return Conversion(data["name"], tuple(data["sources"]), data["graph"])
