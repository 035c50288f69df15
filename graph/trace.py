"""`trace`: an unmodified Hugging Face model becomes one FX graph.

The model is built on the meta device (no weights, no memory) with an attention function that
leaves one `girih::attention` call per layer, and exported with symbolic numbers of tokens:

    ids[T], positions[T], logits_index[S]  ->  logits[S, V]

Weights are inputs of the graph, known by their checkpoint names. Only this file imports
transformers' modelling code.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import girih.kernels.ops  # registers girih::attention  # noqa: F401
from girih.graph.progress import Progress, ProgressEvent, no_progress
from girih.graph.spec import ModelSpec
from girih.graph.text import SymbolNames, digest, graph_text
from girih.graph.weight_plan import CONSTANT, PLAIN, WeightEntry, WeightPlan
from girih.kernels.errors import TraceError

ATTENTION_NAME = "girih"
INPUT_NAMES = ("ids", "positions", "logits_index")
# Upper bound of T and S in compiled code. A constant of the project, not a runtime option: the
# token budget of a step may change without a recompile.
MAX_STEP_TOKENS = 1 << 16
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

    def __init__(self, model: torch.nn.Module, selects_rows: bool) -> None:
        super().__init__()
        self.model = model
        self.selects_rows = selects_rows

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, logits_index: torch.Tensor
    ) -> torch.Tensor:
        rows = {"logits_to_keep": logits_index} if self.selects_rows else {}
        output = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, **rows
        )
        logits = output.logits[0]
        return logits if self.selects_rows else logits.index_select(0, logits_index)


def trace(spec: ModelSpec, progress: Progress = no_progress) -> Traced:
    """Capture the model of `spec` as one graph.

    Raises:
        TraceError: the architecture is unknown to transformers, or a module cannot be captured;
            the message names the module and the source line.
    """
    started = time.perf_counter()
    progress(ProgressEvent("trace", 0, None, f"import {spec.architecture}"))
    model = _build_on_meta(spec)
    progress(ProgressEvent("trace", 0, None, spec.architecture))
    exported = _export(model, spec)
    graph, weights = _with_named_weights(exported, model, spec)
    constants = _constant_values(model, weights)
    symbols = _symbol_names(graph)
    _check_captured(graph, spec)
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


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for a model's attention while it is traced: one `girih::attention` call.

    Shapes: query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv].
    """
    if attention_mask is not None:
        raise TraceError(
            f"{type(module).__name__} passes its attention a mask tensor; only causal, windowed "
            "and full attention can be captured"
        )
    for name in ("position_bias", "indices", "block_indices", "sinks"):
        if options.get(name) is not None:
            raise TraceError(f"{type(module).__name__} needs attention with {name!r}: unsupported")
    out = torch.ops.girih.attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        float(scaling),
        bool(getattr(module, "is_causal", True)),
        int(options.get("sliding_window") or 0),
        float(options.get("softcap") or 0.0),
        options.get("s_aux"),
    )
    return out[None], None


def _build_on_meta(spec: ModelSpec) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    try:
        config = AutoConfig.from_pretrained(spec.files.path, local_files_only=True)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, spec.dtype), attn_implementation=ATTENTION_NAME
            )
    except (ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        raise TraceError(
            f"{spec.architecture} ({spec.files.path.name}) cannot be built: {_first_line(error)}. "
            "girih runs text models that transformers loads with AutoModelForCausalLM and whose "
            "attention goes through its attention interface"
        ) from error
    result: torch.nn.Module = model.eval()
    return result


def _export(model: torch.nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    import inspect

    selects_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    wrapper = _StepModule(model, selects_rows)
    tokens = torch.export.Dim("T", min=2, max=MAX_STEP_TOKENS)
    rows = torch.export.Dim("S", min=2, max=MAX_STEP_TOKENS)
    sizes = (_EXAMPLE_T, _EXAMPLE_T, _EXAMPLE_S)
    examples = tuple(torch.zeros(n, dtype=torch.int64, device="meta") for n in sizes)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                wrapper,
                examples,
                dynamic_shapes=({0: tokens}, {0: tokens}, {0: rows}),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            return _without_writes(exported)
    except Exception as error:
        raise TraceError(
            f"{spec.architecture} could not be traced: {_first_line(error)} (at {_origin(error)})"
        ) from error


def _without_writes(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Turn in-place writes into values: passes and pieces know data only along edges."""
    writes = any(_writes(node) for node in exported.graph.nodes)
    return exported.run_decompositions({}) if writes else exported


def _writes(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


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
) -> tuple[fx.Graph, WeightPlan]:
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    persistent = set(model.state_dict().keys())
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    graph = exported.graph
    plan = WeightPlan()
    inputs = list(INPUT_NAMES)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node.name in names:
            _name_weight(node, names[node.name].removeprefix("model."), persistent, tied, plan)
        elif node.name in signature.user_inputs:
            node.meta["input"] = inputs.pop(0)
        elif not node.users:
            graph.erase_node(node)
        else:
            raise TraceError(
                f"{spec.architecture} holds a tensor outside its parameters and buffers "
                f"({node.name}): unsupported"
            )
    for node in [n for n in graph.nodes if "weight" in n.meta and not n.users]:
        graph.erase_node(node)
    used = {n.meta["weight"] for n in graph.nodes if "weight" in n.meta}
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = (output.args[0][0],)
    return graph, plan.restrict(used)


def _name_weight(
    node: fx.Node, name: str, persistent: set[str], tied: dict[str, str], plan: WeightPlan
) -> None:
    """Mark a placeholder as a weight; tied parameters share one entry."""
    name = tied.get(name, name)
    value = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    form = PLAIN if name in persistent else CONSTANT
    node.meta["weight"] = name
    plan.add(WeightEntry(name, form, tuple(value.shape), dtype, (name,)))


def _constant_values(model: torch.nn.Module, weights: WeightPlan) -> dict[str, torch.Tensor]:
    """Compute the buffers that are not in checkpoints, with the model's own code."""
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
    buffers = dict(model.named_buffers())
    return {name: buffers[name].detach().clone() for name in wanted}


def _symbol_names(graph: fx.Graph) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in graph.nodes:
        if "input" in node.meta:
            size = node.meta["val"].shape[0]
            label = "S" if node.meta["input"] == "logits_index" else "T"
            names[str(size.node.expr)] = label
    return names


def _check_captured(graph: fx.Graph, spec: ModelSpec) -> None:
    """Refuse graphs that would compute something else than the model, silently."""
    calls = [n for n in graph.nodes if n.target is torch.ops.girih.attention.default]
    if not calls:
        raise TraceError(
            f"{spec.architecture} does not route its attention through transformers' attention "
            "interface, so it cannot be paged; this architecture is not supported"
        )
    for node in graph.nodes:
        if _writes(node):
            raise TraceError(
                f"{spec.architecture} writes to a tensor in place ({node.target} at "
                f"{node_origin(node)}): unsupported"
            )
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _num_token_dims(value) > 1:
            raise TraceError(
                f"{spec.architecture} computes a tokens x tokens tensor outside attention "
                f"({node.name} at {node_origin(node)}): unsupported"
            )


def _num_token_dims(value: torch.Tensor) -> int:
    return sum(1 for size in value.shape if isinstance(size, torch.SymInt))
