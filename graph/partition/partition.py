"""Split the lowered graph at opaque ops into pieces; equal pieces share a tile.

    piece 0 │ attention │ piece 1 │ attention │ ... │ piece L

A recurrence, and a module that stays eager, split like an attention. A node belongs to the piece
after the last one it depends on, so work that depends on none (RoPE tables, per-layer embeddings)
lands in piece 0 whatever layer uses it. Nodes that depend on weights only, and sizes, are repeated
in each piece that needs them. A piece's inputs are numbered by first use and its text is canonical,
so equal layers have equal tile keys; what differs between them (weights, KV slot, window, scale) is
wiring of the program, not part of a tile.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import fx

from girih.graph.ir.opaque import ATTENTION as ATTENTION
from girih.graph.ir.opaque import is_attention, is_eager, is_opaque, is_result, state_op
from girih.graph.ir.program import (
    AttentionStep,
    EagerStep,
    ProgramLayout,
    StateSpec,
    StateStep,
    Step,
    TileStep,
)
from girih.graph.ir.text import digest, graph_text
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.trace.eager_modules import eager_spec
from girih.graph.trace.trace import INPUT_NAMES
from girih.kernels.attention.backends import AttentionSpec
from girih.kernels.base.errors import TraceError


@dataclass(frozen=True)
class Tile:
    """A distinct compute region.

    Attributes:
        key: hash of the canonical text.
        graph: tensors in, tuple of tensors out.
        text: canonical text.
        note: what makes it different, for people ("first: embedding, ...").
    """

    key: str
    graph: fx.Graph
    text: str
    note: str


@dataclass(frozen=True)
class Program:
    """The partitioned model.

    Attributes:
        layout: the steps and their wiring.
        tiles: distinct regions by key, in order of first use.
        weights: plan of the weights the steps take.
        constants: values of the plan's constant entries.
        rows: the tiles verified on tokens together and apart; None when nobody has.
    """

    layout: ProgramLayout
    tiles: dict[str, Tile]
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    rows: VerifyResult | None = None

    @property
    def num_pieces(self) -> int:
        """Tile calls per step."""
        return sum(self.layout.tile_counts.values())

    @property
    def verified(self) -> tuple[VerifyResult, ...]:
        """The results of verifying its rows."""
        return () if self.rows is None else (self.rows,)


# What a tile's nodes keep: the value's shape, and for messages the module and the source line.
_KEPT = ("val", "nn_module_stack", "stack_trace")


@dataclass
class _Piece:
    """A piece under construction."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def partition(graph: fx.Graph, weights: WeightPlan, constants: dict[str, torch.Tensor]) -> Program:
    """Split a lowered graph into steps.

    Raises:
        TraceError: the graph does not start and end in compute regions, or a piece passes something
            else than tensors.
    """
    levels = _levels(graph, selection_level=max(_levels(graph).values()))
    pieces = _collect_pieces(graph, levels)
    opaque = [n for n in graph.nodes if is_opaque(n)]
    _connect(graph, pieces, opaque)
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    shared = {result, *(n for piece in pieces for n in piece.inputs)}
    values = _Values(graph)
    slots = _Slots()
    tiles: dict[str, Tile] = {}
    steps: list[Step] = []
    for number, piece in enumerate(pieces):
        if piece.nodes:
            tile, inputs = _extract(piece, shared)
            tiles.setdefault(tile.key, tile)
            takes = tuple(values.number(n) for n in inputs)
            gives = tuple(values.number(n) for n in piece.outputs)
            steps.append(TileStep(tile.key, number, takes, gives))
        for node in (n for n in opaque if levels[n] == number):
            steps.append(_opaque_step(node, slots, values))
    layout = ProgramLayout(
        tuple(steps), values.inputs, values.weights, len(values.numbers), values.number(result)
    )
    return Program(layout, tiles, weights, constants)


def _levels(graph: fx.Graph, selection_level: int = 0) -> dict[fx.Node, int]:
    """Number of opaque ops on the longest path to each node; -1: depends on weights only.

    What depends on `logits_index` belongs to the last piece (`selection_level`): selecting rows of
    a residual one piece earlier would make that piece a tile of its own.
    """
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            is_selection = node.meta.get("input") == "logits_index"
            levels[node] = (selection_level if is_selection else 0) if "input" in node.meta else -1
            continue
        level = -1
        for operand in node.all_input_nodes:
            level = max(level, levels[operand] + is_opaque(operand))
        levels[node] = max(level, 0) if is_opaque(node) else level
    return levels


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def _is_repeated(node: fx.Node, levels: dict[fx.Node, int]) -> bool:
    """Sizes and weight-only nodes are copied into each piece that uses them."""
    return node.op == "call_function" and (levels[node] < 0 or _is_size(node))


def _collect_pieces(graph: fx.Graph, levels: dict[fx.Node, int]) -> list[_Piece]:
    depth = max(levels.values()) + 1
    members: list[list[fx.Node]] = [[] for _ in range(depth)]
    for node in graph.nodes:
        computes = node.op == "call_function" and not (is_opaque(node) or is_result(node))
        if computes and not _is_repeated(node, levels):
            members[levels[node]].append(node)
        if is_opaque(node):  # nobody else computes what it reads of the weights
            own = [n for n in node.all_input_nodes if _is_repeated(n, levels)]
            members[levels[node]] += [n for n in own if n not in members[levels[node]]]
    return [_Piece(_with_repeated(nodes, levels)) for nodes in members]


def _with_repeated(nodes: list[fx.Node], levels: dict[fx.Node, int]) -> list[fx.Node]:
    """Put in front of each node the repeated nodes it needs, once per piece.

    A size of a graph input is not repeated as such: `_extract` reads it off a tensor at hand.
    """
    done: set[fx.Node] = set()
    ordered: list[fx.Node] = []

    def visit(node: fx.Node) -> None:
        if node in done:
            return
        done.add(node)
        for operand in node.all_input_nodes:
            if _is_repeated(operand, levels) and not _reads_size(operand):
                visit(operand)
        ordered.append(node)

    for node in nodes:
        visit(node)
    return ordered


def _reads_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _connect(graph: fx.Graph, pieces: list[_Piece], opaque: list[fx.Node]) -> None:
    """Find what each piece takes from outside and gives to others."""
    output = next(n for n in graph.nodes if n.op == "output")
    needed: set[fx.Node] = {*output.all_input_nodes}
    for node in opaque:
        needed.update(node.all_input_nodes)
    for piece in pieces:
        own = set(piece.nodes)
        for node in piece.nodes:
            for operand in node.all_input_nodes:
                if operand not in own and operand not in piece.inputs and not _is_size(operand):
                    piece.inputs.append(operand)
        needed.update(piece.inputs)
    for piece in pieces:
        piece.outputs = [n for n in piece.nodes if n in needed and not _is_size(n)]


def _extract(piece: _Piece, shared: set[fx.Node]) -> tuple[Tile, list[fx.Node]]:
    """Copy a piece into a graph of its own.

    Args:
        piece: its nodes, inputs and outputs.
        shared: values that tiles read. They cross contiguous, because tiles are compiled to take
            that; what only attention reads may be a strided view.

    Returns the tile and the outer nodes its placeholders stand for.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = list(piece.inputs)
    for number, outer in enumerate(inputs):
        copies[outer] = graph.placeholder(f"x{number}")
        copies[outer].meta["val"] = _at_border(outer.meta["val"])
        copies[outer].meta["is_weight"] = "weight" in outer.meta
    sizes: dict[str, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = _local_size(graph, node, inputs, copies, sizes)
        return copies[node]

    for node in piece.nodes:
        new = graph.node_copy(node, copy_of)
        new.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        copies[node] = new
    results = [_contiguous(graph, copies[n]) if n in shared else copies[n] for n in piece.outputs]
    outputs = graph.output(tuple(results))
    outputs.meta["val"] = None
    text = graph_text(graph)
    return Tile(digest(text), graph, text, _describe(piece)), inputs


def _at_border(value: torch.Tensor) -> torch.Tensor:
    """A shared value as tiles see it."""
    return value if value.is_contiguous() else value.contiguous()


def _contiguous(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node, or a contiguous copy of it at the end of the piece."""
    if node.meta["val"].is_contiguous():
        return node
    options = {"memory_format": torch.contiguous_format}
    copy = graph.call_function(torch.ops.aten.clone.default, (node,), options)
    copy.meta["val"] = _at_border(node.meta["val"])
    return copy


def _local_size(
    graph: fx.Graph,
    node: fx.Node,
    inputs: list[fx.Node],
    copies: dict[fx.Node, fx.Node],
    sizes: dict[str, fx.Node],
) -> fx.Node:
    """A size inside a piece, read off the first input that has it (pieces take tensors only)."""
    wanted = str(node.meta["val"])
    if wanted in sizes:
        return sizes[wanted]
    for outer in inputs:
        for dim, size in enumerate(outer.meta["val"].shape):
            if str(size) == wanted:
                with graph.inserting_after(list(copies.values())[len(inputs) - 1]):
                    new = graph.call_function(torch.ops.aten.sym_size.int, (copies[outer], dim))
                new.meta["val"] = node.meta["val"]
                sizes[wanted] = new
                return new
    raise TraceError(f"a piece needs the size {wanted} ({node.name}), which none of its inputs has")


def _describe(piece: _Piece) -> str:
    """Describe the work of a partition by the modules its nodes came from."""
    modules: list[str] = []
    for node in piece.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = list(stack.values())[-1][0]
            leaf = ".".join(p for p in path.split(".")[-2:] if not p.isdigit())
            if leaf and leaf not in modules:
                modules.append(leaf)
    shown = modules if len(modules) <= 6 else [*modules[:3], "…", *modules[-3:]]
    return ", ".join(shown)


class _Values:
    """Numbers for inputs, weights and results, in that order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.numbers: dict[fx.Node, int] = {}
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        by_input = {n.meta["input"]: n for n in placeholders if "input" in n.meta}
        self.inputs = {
            name: self.number(by_input[name]) for name in INPUT_NAMES if name in by_input
        }
        self.weights = {
            n.meta["weight"]: self.number(n) for n in placeholders if "weight" in n.meta
        }

    def number(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, len(self.numbers))


class _Slots:
    """KV and state slots: one per distinct cached content."""

    def __init__(self) -> None:
        self._kv: dict[Hashable, int] = {}
        self._num_states = 0

    def kv(self, node: fx.Node, spec: AttentionSpec) -> int:
        """The KV slot of an attention: its own, or that of an equal one on the same keys, values.

        What is not causal is attended within one step and read by no later one, so that all such
        layers of one shape may take turns in one slot.
        """
        cached = (node.args[1], node.args[2]) if spec.causal else ()
        return self._kv.setdefault((cached, spec), len(self._kv))

    def state(self) -> int:
        """A state slot of its own."""
        self._num_states += 1
        return self._num_states - 1


def _opaque_step(node: fx.Node, slots: _Slots, values: _Values) -> Step:
    if is_attention(node):
        return _attention_step(node, slots, values)
    if is_eager(node):
        return _eager_step(node, values)
    op = state_op(node)
    assert op is not None
    missing = [None] * (len(op.arguments) - len(node.args))
    arguments = [*node.args, *missing]
    shapes = op.state_shapes(*(n.meta["val"] if n is not None else None for n in arguments))
    dtype = str(node.args[0].meta["val"].dtype).removeprefix("torch.")
    spec = StateSpec(
        op.name,
        tuple(tuple(int(size) for size in shape) for shape in shapes),
        dtype if op.keeps_dtype else "float32",
    )
    numbers = tuple(values.number(n) if n is not None else None for n in arguments)
    return StateStep(slots.state(), spec, numbers, values.number(node))


def _eager_step(node: fx.Node, values: _Values) -> EagerStep:
    inputs, weights, name = node.args[:3]
    results = {user.args[1]: values.number(user) for user in node.users}
    return EagerStep(
        eager_spec(name),
        tuple(values.number(n) for n in inputs),
        tuple(values.number(n) for n in weights),
        tuple(results.get(number) for number in range(len(node.meta["val"]))),
    )


def _attention_step(node: fx.Node, slots: _Slots, values: _Values) -> AttentionStep:
    q, k, v, *facts = node.args
    scale, causal, window, softcap, sinks = facts[:5]
    slopes = facts[5] if len(facts) > 5 else None
    chunk = facts[6] if len(facts) > 6 else 0
    spec = AttentionSpec(
        num_heads=int(q.meta["val"].shape[1]),
        num_kv_heads=int(k.meta["val"].shape[1]),
        head_dim=int(q.meta["val"].shape[2]),
        head_dim_v=int(v.meta["val"].shape[2]),
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        has_sinks=sinks is not None,
        has_slopes=slopes is not None,
        chunk=chunk,
    )
    number = values.number
    return AttentionStep(
        layer=slots.kv(node, spec),
        spec=spec,
        q=number(q),
        k=number(k),
        v=number(v),
        sinks=number(sinks) if sinks is not None else None,
        output=number(node),
        slopes=number(slopes) if slopes is not None else None,
    )
