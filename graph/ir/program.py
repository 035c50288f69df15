"""The partitioned program as plain records: what runs in which order, on which values.

A program is a list of steps over numbered values. A tile step calls a compiled region; an attention
step calls the attention backend with its own facts (scale, window, ...), which therefore never make
tiles differ. Everything here is plain data: it is what a bundle stores beside the compiled tiles.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from girih.graph.ir.weight_plan import DTYPE_BYTES, WeightPlan
from girih.kernels.attention.backends import AttentionSpec


@dataclass(frozen=True)
class TileStep:
    """Call a tile.

    Attributes:
        tile: key of the tile.
        piece: number of the piece this call stands for, in program order.
        inputs: numbers of the values passed, in the tile's order.
        outputs: numbers given to the results.
    """

    tile: str
    piece: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class AttentionStep:
    """Call attention on one KV slot.

    Attributes:
        layer: number of the KV slot.
        spec: what is computed.
        q, k, v: value numbers: [T, H, D], [T, Hkv, D], [T, Hkv, Dv].
        sinks: value number of [H], or None.
        output: value number of the result [T, H, Dv].
        slopes: value number of [H], or None.
    """

    layer: int
    spec: AttentionSpec
    q: int
    k: int
    v: int
    sinks: int | None
    output: int
    slopes: int | None = None


@dataclass(frozen=True)
class StateSpec:
    """The state of a recurrent layer, per request.

    Attributes:
        op: name in `girih.kernels.ops.state.STATE_OPS`.
        shapes: of the states of one request.
        dtype: of the states, by name.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of one request."""
        return sum(math.prod(shape) for shape in self.shapes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateStep:
    """Advance a recurrent layer by the tokens of each request.

    Attributes:
        layer: number of the state slot.
        spec: the op and its state.
        inputs: value numbers of the op's arguments; None where one is missing.
        output: value number of the result, one row per token.
    """

    layer: int
    spec: StateSpec
    inputs: tuple[int | None, ...]
    output: int


@dataclass(frozen=True)
class EagerSpec:
    """A module of the model that runs as transformers wrote it.

    Attributes:
        name: it is registered under, in `girih.kernels.ops.eager`.
        kind: its class.
        place: file and line that could not be captured, "modeling_x.py:12".
        reason: why not.
        path: of the module in transformers' model; the first of those that compute alike.
        weights: its parameters and buffers by the module's own names, in the order they are passed.
        call: how it is called, as `CallForm` writes it.
    """

    name: str
    kind: str
    place: str
    reason: str
    path: str
    weights: tuple[str, ...]
    call: str


@dataclass(frozen=True)
class EagerStep:
    """Call a module that stays eager.

    Attributes:
        spec: the module.
        inputs: value numbers of the tensors it is called with.
        weights: value numbers of its weights.
        outputs: numbers given to its results; None where nobody reads one.
    """

    spec: EagerSpec
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    outputs: tuple[int | None, ...]


Step = TileStep | AttentionStep | StateStep | EagerStep


@dataclass(frozen=True)
class ProgramLayout:
    """Steps over numbered values: inputs first, then weights, then results.

    Attributes:
        steps: in the order they run.
        inputs: value number of each step input ("ids", "positions", "logits_index").
        weights: value number of each weight, by plan name.
        num_values: how many numbers are in use.
        result: value number of the logits [S, V].
    """

    steps: tuple[Step, ...]
    inputs: dict[str, int]
    weights: dict[str, int]
    num_values: int
    result: int

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One per KV slot, in slot order."""
        slots = {s.layer: s.spec for s in self.steps if isinstance(s, AttentionStep)}
        return [slots[layer] for layer in sorted(slots)]

    @property
    def state_specs(self) -> list[StateSpec]:
        """One per state slot, in slot order."""
        return [s.spec for s in self.steps if isinstance(s, StateStep)]

    @property
    def eager_specs(self) -> list[EagerSpec]:
        """Modules that stay eager, each once, in order of first use."""
        found = {s.spec.name: s.spec for s in self.steps if isinstance(s, EagerStep)}
        return list(found.values())

    @property
    def is_bidirectional(self) -> bool:
        """True where tokens see later ones: a request must then be in one step as a whole."""
        return any(not spec.causal for spec in self.attention_specs)

    @property
    def tile_counts(self) -> Counter[str]:
        """Number of partitions that each tile stands for, in order of first use."""
        return Counter(s.tile for s in self.steps if isinstance(s, TileStep))

    def to_json(self) -> dict[str, Any]:
        """Plain data for a bundle."""
        steps = [{"kind": type(s).__name__, **asdict(s)} for s in self.steps]
        return {
            "steps": steps,
            "inputs": self.inputs,
            "weights": self.weights,
            "num_values": self.num_values,
            "result": self.result,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProgramLayout:
        """Inverse of `to_json`."""
        return cls(
            steps=tuple(_step_from_json(dict(s)) for s in data["steps"]),
            inputs=data["inputs"],
            weights=data["weights"],
            num_values=data["num_values"],
            result=data["result"],
        )


def _step_from_json(row: dict[str, Any]) -> Step:
    kind = row.pop("kind")
    if kind == "TileStep":
        return TileStep(row["tile"], row["piece"], tuple(row["inputs"]), tuple(row["outputs"]))
    if kind == "StateStep":
        spec = row["spec"]
        shapes = tuple(tuple(shape) for shape in spec["shapes"])
        state = StateSpec(spec["op"], shapes, spec["dtype"])
        return StateStep(row["layer"], state, tuple(row["inputs"]), row["output"])
    if kind == "EagerStep":
        module = EagerSpec(**{**row["spec"], "weights": tuple(row["spec"]["weights"])})
        return EagerStep(module, *(tuple(row[name]) for name in ("inputs", "weights", "outputs")))
    return AttentionStep(**{**row, "spec": AttentionSpec(**row["spec"])})


def program_map(layout: ProgramLayout, tile_notes: dict[str, str], plan: WeightPlan) -> str:
    """The map people read: runs of steps, pieces and the tiles they share."""
    counts = layout.tile_counts
    names = {key: f"tile {i}" for i, key in enumerate(counts)}
    lines = [f"steps {len(layout.steps)}: {_runs(layout, names)}"]
    for key, count in counts.items():
        pieces = "piece" if count == 1 else "pieces"
        lines.append(f"{names[key]} {key}  × {count} {pieces}: {tile_notes.get(key, '')}")
    lines += _eager_lines(layout)
    gib = sum(e.num_bytes for e in plan.entries.values()) / 2**30
    lines.append(f"weights {len(plan.entries)} tensors, {gib:.2f} GiB")
    lines.append(f"kv slots {_spec_counts(layout) or 'none'}")
    if layout.state_specs:
        lines.append(f"state slots {_state_counts(layout)}")
    return "\n".join(lines) + "\n"


def _runs(layout: ProgramLayout, names: dict[str, str]) -> str:
    """ "tile 0, (attention, tile 1) × 29, attention, tile 2"."""
    words = [_word(step, names) for step in layout.steps]
    parts: list[tuple[tuple[str, ...], int]] = []
    i = 0
    while i < len(words):
        pair = tuple(words[i : i + 2])
        repeats = 1
        while len(pair) == 2 and tuple(words[i + 2 * repeats : i + 2 * repeats + 2]) == pair:
            repeats += 1
        step = (pair, repeats) if repeats > 1 else ((words[i],), 1)
        parts.append(step)
        i += 2 * repeats if repeats > 1 else 1
    return ", ".join(f"({', '.join(p)}) × {n}" if n > 1 else p[0] for p, n in parts)


def _eager_lines(layout: ProgramLayout) -> list[str]:
    """The modules that stay eager, where they are written, and why."""
    counts = Counter(s.spec.name for s in layout.steps if isinstance(s, EagerStep))
    return [
        f"eager {spec.kind} ({spec.place}) × {counts[spec.name]} as transformers wrote it: "
        f"{spec.reason}"
        for spec in layout.eager_specs
    ]


def _word(step: Step, names: dict[str, str]) -> str:
    if isinstance(step, TileStep):
        return names[step.tile]
    if isinstance(step, EagerStep):
        return f"eager {step.spec.kind}"
    return "attention" if isinstance(step, AttentionStep) else step.spec.op


def _spec_counts(layout: ProgramLayout) -> str:
    counts = Counter(layout.attention_specs)
    return "; ".join(
        f"{n} × {s.num_heads} heads, {s.num_kv_heads} kv, dim {s.head_dim}"
        + (f", window {s.window}" if s.window else "")
        + (f", soft cap {s.softcap:g}" if s.softcap else "")
        + (f", chunks of {s.chunk}" if s.chunk else "")
        + (", sinks" if s.has_sinks else "")
        + (", ALiBi" if s.has_slopes else "")
        + ("" if s.causal else ", bidirectional")
        for s, n in counts.items()
    )


def _state_counts(layout: ProgramLayout) -> str:
    counts = Counter(layout.state_specs)
    return "; ".join(
        f"{n} × {s.op} {' + '.join(str(list(shape)) for shape in s.shapes)} {s.dtype}"
        for s, n in counts.items()
    )
