"""`trace`: an unmodified Hugging Face model becomes one FX graph.

The model is built on the meta device (no weights, no memory) with functions that leave one opaque
op for each attention, recurrence and expert projection, and exported with symbolic numbers of
tokens:

    ids[T], positions[T], logits_index[S]  ->  logits[S, V]

A model that embeds or classifies gives hidden states or label values instead of logits
(`pooled_model`), and a classifier of pairs takes token_types[T]. Weights are inputs of the graph,
known by their checkpoint names. What stands in for the model's opaque parts is in `capture`, help
for single families in `adaptations`, what must hold of the graph in `fail_closed`; with
`conversions` these are the files that import transformers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from girih.graph.adapt import capture
from girih.graph.adapt.adaptations import Adaptations, attention_classes
from girih.graph.adapt.pooled_model import RowSelection, last_rows, mean_rows
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.order import canonical_order
from girih.graph.ir.text import SymbolNames, digest, graph_text
from girih.graph.ir.trace_lock import one_at_a_time
from girih.graph.ir.weight_plan import CONSTANT, PLAIN, Source, WeightEntry, WeightPlan
from girih.graph.tiles.settings import MAX_STEP_TOKENS
from girih.graph.trace.eager_modules import EagerModules
from girih.graph.trace.fail_closed import check_captured, writes
from girih.graph.trace.stamp import LayerStamps, StampError
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.conversions import plan_sources
from girih.kernels.base.errors import GirihError, TraceError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress

log = logging.getLogger("girih.trace")

INPUT_NAMES = ("ids", "positions", "logits_index", "token_types")
_EXAMPLE_T, _EXAMPLE_S = 37, 5


@dataclass(frozen=True)
class Traced:
    """A model as one graph.

    Attributes:
        spec: the model that was traced.
        graph: placeholders (step inputs, then weights, each with `meta["weight"]` set for a
            weight), calls, one output: logits [S, V].
        weights: the tensors the graph takes, by checkpoint name.
        constants: values of the buffers that no checkpoint holds (RoPE frequencies and the like).
        symbols: names of the symbolic sizes for printing, {"s11": "T", ...}.
        seconds: time spent tracing.
    """

    spec: ModelSpec
    graph: fx.Graph
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    symbols: dict[str, str]
    seconds: float = field(compare=False, default=0.0)

    def as_text(self) -> str:
        """Canonical text of the graph, each node with the module it came from."""
        return graph_text(self.graph, SymbolNames(self.symbols), node_origin)

    @property
    def key(self) -> str:
        """Hash of the graph's text."""
        return digest(graph_text(self.graph, SymbolNames(self.symbols)))


class _StepModule(torch.nn.Module):
    """The model as a function of one packed step."""

    def __init__(self, model: torch.nn.Module, spec: ModelSpec, first_position: int) -> None:
        super().__init__()
        self.model = model
        self.first_position = first_position
        self.task = spec.task
        self.pools_mean = spec.pools_mean
        classifies = spec.task == "classify"
        self.selection = RowSelection(model, spec.pools_mean) if classifies else None
        parameters = inspect.signature(model.forward).parameters.values()
        names = {p.name for p in parameters}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.selects_rows = "logits_to_keep" in names
        self.takes_positions = takes_any or "position_ids" in names
        self.takes_use_cache = takes_any or "use_cache" in names

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits_index: torch.Tensor,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Two symbols are one from here on, so that the first layer is like the others (`stamp`).
        torch._check(positions.shape[0] == ids.shape[0])
        options: dict[str, Any] = {"input_ids": ids[None]}
        if token_types is not None:
            options["token_type_ids"] = token_types[None]
        if self.takes_positions:
            start = self.first_position
            options["position_ids"] = (positions + start if start else positions)[None]
        if self.takes_use_cache:
            options["use_cache"] = False
        if self.task == "generate":
            return self._logits(options, logits_index)
        if self.selection is not None:
            return self.selection.run(self.model, options, logits_index)
        hidden = self.model(**options).last_hidden_state
        select = mean_rows if self.pools_mean else last_rows
        return select(hidden, logits_index)

    def _logits(self, options: dict[str, Any], logits_index: torch.Tensor) -> torch.Tensor:
        if self.selects_rows:
            options["logits_to_keep"] = logits_index
        output = self.model(**options)
        rows = output.logits if "logits" in output else output.last_hidden_state
        return rows[0] if self.selects_rows else rows[0].index_select(0, logits_index)


@one_at_a_time
def trace(spec: ModelSpec, progress: Progress = no_progress) -> Traced:
    """Capture the model of `spec` as one graph.

    Raises:
        TraceError: the architecture is unknown to transformers, or a module cannot be captured;
            the message names the module and the source line.
    """
    started = time.perf_counter()
    progress(ProgressEvent("trace", 0, None, f"import {spec.architecture}"))
    model = build_on_meta(spec)
    progress(ProgressEvent("trace", 0, None, spec.architecture))
    with Adaptations(model, spec.longest) as adaptations, _quiet():
        exported = _captured(model, spec, adaptations.first_position())
    graph, weights, written = _with_named_weights(exported, model, spec)
    _on_one_device(graph)
    _number_rows_by_position(graph)
    canonical_order(graph, INPUT_NAMES)
    weights = WeightPlan([weights.entries[name] for name in _weight_names(graph)])
    constants = _constant_values(model, weights, {**written, **adaptations.constants()})
    symbols = _symbol_names(graph)
    check_captured(graph, spec.architecture)
    if spec.task != "generate":
        _require_rows(graph, symbols, spec.architecture)
    progress(ProgressEvent("trace", 1, 1, f"{len(graph.nodes)} nodes"))
    return Traced(spec, graph, weights, constants, symbols, time.perf_counter() - started)


def node_origin(node: fx.Node) -> str:
    """Module a node came from, plus the passes that made it ("layers.0.mlp < pack_linears")."""
    stack = node.meta.get("nn_module_stack")
    module = list(stack.values())[-1][0] if stack else ""
    module = module.removeprefix("L['self'].").removeprefix("model.")
    origin = node.meta.get("weight", module)
    made_by = node.meta.get("made_by")
    return f"{origin} < {made_by}" if made_by else origin


@one_at_a_time
def build_on_meta(spec: ModelSpec) -> torch.nn.Module:
    """The model of `spec` without weights or memory, in evaluation mode.

    Raises:
        TraceError: transformers cannot build it.
    """
    from transformers import AutoConfig

    capture.register()
    try:
        config = AutoConfig.from_pretrained(spec.files.path, local_files_only=True)
        auto = auto_class(spec)
        with torch.device("meta"), attention_classes(auto, config), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = auto.from_config(
                config,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=capture.NAME,
                experts_implementation=capture.NAME,
            )
    except (ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        raise TraceError(
            f"{spec.architecture} ({spec.files.path.name}) cannot be built: {_first_line(error)}. "
            "girih runs text models that transformers loads with AutoModelForCausalLM, AutoModel "
            "or AutoModelForSequenceClassification, and whose attention goes through its "
            "attention interface"
        ) from error
    result: torch.nn.Module = model.eval()
    return result


def auto_class(spec: ModelSpec) -> Any:
    """The class of transformers that builds a model: with a head for its task, or without one."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto import modeling_auto

    if spec.task != "generate":
        return AutoModel if spec.task == "embed" else AutoModelForSequenceClassification
    architecture = spec.architecture
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()) - causal
    plain = set(modeling_auto.MODEL_MAPPING_NAMES.values()) - causal
    if architecture in masked:
        return AutoModelForMaskedLM
    return AutoModel if architecture in plain else AutoModelForCausalLM


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter logs and prints of a failure off the terminal; errors say it."""
    from torch.export import _trace

    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    vars(_trace)["print"] = lambda *values, **options: None  # the graph up to there, to stderr
    try:
        yield
    finally:
        vars(_trace).pop("print", None)
        logger.setLevel(level)


def _captured(
    model: torch.nn.Module, spec: ModelSpec, first_position: int
) -> torch.export.ExportedProgram:
    """Export a model; what cannot be captured and works token by token stays eager.

    Raises:
        TraceError: names the line, and why no module around it can stay eager.
    """
    eager = EagerModules(model, spec.key[:8])

    def export() -> torch.export.ExportedProgram:
        with capture.Capture(model), eager.in_place():
            return _export(_StepModule(model, spec, first_position), spec)

    while True:
        try:
            return export()
        except TraceError as refusal:
            cause = refusal.__cause__
            if cause is None or isinstance(_cause(cause), GirihError):
                raise
            try:
                eager.take(cause, export)
            except TraceError as why:
                raise TraceError(f"{refusal}; {why}") from cause


def _export(wrapper: torch.nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("T", min=2, max=MAX_STEP_TOKENS)
    rows = torch.export.Dim("S", min=2, max=MAX_STEP_TOKENS)
    sizes, shapes = [_EXAMPLE_T, _EXAMPLE_T, _EXAMPLE_S], [tokens, tokens, rows]
    if spec.has_token_types:
        sizes, shapes = [*sizes, _EXAMPLE_T], [*shapes, tokens]
    examples = tuple(torch.zeros(n, dtype=torch.int64, device="meta") for n in sizes)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _without_writes(_exported(wrapper, examples, tuple({0: d} for d in shapes)))
    except Exception as error:
        cause = _cause(error)
        raise TraceError(
            f"{spec.architecture} could not be traced: {_first_line(cause)} (at {_origin(cause)})"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """girih's own refusal behind an error of the exporter, when there is one."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, GirihError):
        found = found.__cause__ or found.__context__
    return found or error


def _exported(
    wrapper: torch.nn.Module, examples: tuple[torch.Tensor, ...], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    """Export with repeated layers stamped out, or in full when they turn out to differ."""

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(
            wrapper,
            examples,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )

    for hides in (True, False):
        stamps = LayerStamps(wrapper, hides)
        try:
            with stamps:
                exported = export()
            stamps.expand(exported)
            return exported
        except StampError as difference:
            log.info("%s: tracing every layer", difference)
            break
        except Exception as error:
            if not stamps.must_show(error):
                raise
            log.info("%s: tracing with every layer in sight", _first_line(error))
    return export()


def _without_writes(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Turn in-place writes into values: passes and pieces know data only along edges."""
    changes = any(writes(node) for node in exported.graph.nodes)
    return exported.run_decompositions({}) if changes else exported


def _origin(error: BaseException) -> str:
    """File and line of the innermost frame inside transformers' models, e.g. modeling_x.py:12."""
    place = "unknown place"
    trace_back = error.__traceback__
    while trace_back is not None:
        name = trace_back.tb_frame.f_code.co_filename
        if "/models/" in name:
            function = trace_back.tb_frame.f_code.co_qualname
            place = f"{name.rsplit('/', 1)[-1]}:{trace_back.tb_lineno} in {function}"
        trace_back = trace_back.tb_next
    return place


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _with_named_weights(
    exported: torch.export.ExportedProgram, model: torch.nn.Module, spec: ModelSpec
) -> tuple[fx.Graph, WeightPlan, dict[str, torch.Tensor]]:
    """The graph with its inputs named, the plan of its weights, and constants from the code."""
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    constants: dict[str, torch.Tensor] = {}
    persistent = set(model.state_dict().keys())
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    sources = tensor_sources(model, spec)
    graph = exported.graph
    plan = WeightPlan()
    inputs = list(INPUT_NAMES)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node.name in names:
            name = names[node.name].removeprefix("model.")
            _name_weight(node, tied.get(name, name), persistent, sources, plan)
        elif node.name in signature.user_inputs:
            node.meta["input"] = inputs.pop(0)
        elif node.name in lifted:
            _name_lifted(node, exported.constants[lifted[node.name]], plan, constants)
        elif not node.users:
            graph.erase_node(node)
        else:
            raise TraceError(
                f"{spec.architecture} holds a tensor outside its parameters and buffers "
                f"({node.name}): unsupported"
            )
    for node in [n for n in graph.nodes if "weight" in n.meta and not n.users]:
        graph.erase_node(node)
    used = set(_weight_names(graph))
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (output.args[0][0],)
    return graph, plan.restrict(used), {n: v for n, v in constants.items() if n in used}


def _name_lifted(
    node: fx.Node, value: Any, plan: WeightPlan, constants: dict[str, torch.Tensor]
) -> None:
    """Mark a tensor that the model's code writes out (an index list) as a constant."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise TraceError(f"the model holds {node.name} outside its parameters and buffers")
    name = f"code.{len(constants)}"
    dtype = str(value.dtype).removeprefix("torch.")
    node.meta["weight"] = name
    constants[name] = value.detach().clone()
    plan.add(WeightEntry(name, CONSTANT, tuple(value.shape), dtype, (name,)))


def _name_weight(
    node: fx.Node, name: str, persistent: set[str], sources: dict[str, Source], plan: WeightPlan
) -> None:
    """Mark a placeholder as a weight; tied parameters share one entry."""
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    form = PLAIN if name in persistent else CONSTANT
    node.meta["weight"] = name
    plan.add(WeightEntry(name, form, tuple(value.shape), dtype, (sources.get(name, name),)))


def tensor_sources(model: torch.nn.Module, spec: ModelSpec) -> dict[str, Source]:
    """Where the checkpoint keeps each tensor of the model, tied ones under either name."""
    with open_checkpoint(spec.files) as checkpoint:
        sources = plan_sources(model, checkpoint, spec.dtype)
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name, kept in tied.items():
        if kept not in sources and name in sources:
            sources[kept] = sources[name]
    return sources


def _constant_values(
    model: torch.nn.Module, weights: WeightPlan, pinned: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Compute the buffers that are not in checkpoints, with the model's own code.

    `pinned` holds those that are to have other values.
    """
    wanted = [e.name for e in weights.entries.values() if e.form == CONSTANT]
    if not wanted:
        return {}
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in list(model.named_non_persistent_buffers()):  # type: ignore[operator]
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        model.get_submodule(owner)._buffers[leaf] = empty
    model._initialize_missing_keys(False)  # type: ignore[operator]
    buffers = {**dict(model.named_buffers()), **pinned}
    return {name: buffers[name].detach().clone() for name in wanted}


def _on_one_device(graph: fx.Graph) -> None:
    """Have what the model's code makes on the CPU made where its weights are."""
    meta = torch.device("meta")
    moved: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.kwargs.get("device") == torch.device("cpu"):
            node.update_kwarg("device", meta)
        elif not moved.intersection(node.all_input_nodes):
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device != meta:
            node.meta["val"] = value.to(meta)
            moved.add(node)


def _number_rows_by_position(graph: fx.Graph) -> None:
    """Let code that numbers the tokens of its one sequence (`arange(T)`) read their positions."""
    positions = next(n for n in graph.nodes if n.meta.get("input") == "positions")
    tokens = str(positions.meta["val"].shape[0])
    aten = torch.ops.aten
    for target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        for node in graph.find_nodes(op="call_function", target=target):
            value = node.meta["val"]
            starts_at_zero = target is aten.arange.default or node.args[0] == 0
            is_plain = len(node.args) < 3 or node.args[2] == 1
            if not (starts_at_zero and is_plain and str(value.shape[0]) == tokens):
                continue
            with graph.inserting_before(node):
                cast = graph.call_function(aten.to.dtype, (positions, value.dtype))
            cast.meta = {**node.meta, "val": value}
            node.replace_all_uses_with(cast)
            graph.erase_node(node)


def _weight_names(graph: fx.Graph) -> list[str]:
    """Names of the weights, in the graph's order."""
    return [n.meta["weight"] for n in graph.nodes if "weight" in n.meta]


def _require_rows(graph: fx.Graph, symbols: dict[str, str], architecture: str) -> None:
    """Refuse a model whose result has not one row per wanted token."""
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    value = result.meta["val"]
    if value.ndim != 2 or symbols.get(str(value.shape[0])) != "S":
        raise TraceError(
            f"{architecture} gives {list(value.shape)} instead of one row per text: how its head "
            "chooses among tokens is not known"
        )


def _symbol_names(graph: fx.Graph) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in graph.nodes:
        if "input" in node.meta:
            size = node.meta["val"].shape[0]
            label = "S" if node.meta["input"] == "logits_index" else "T"
            names[str(size.node.expr)] = label
    return names
