"""Replacements of a model's attention, masks, experts and recurrences while it is traced.

transformers lets an implementation be registered by name for attention, its masks and mixtures of
experts, and decorates the primitives of recurrent layers with the name of a kernel. Each is given
one opaque op here, so that no model needs code of its own. Everything is in place only inside
`Capture`; outside of it the models run as transformers wrote them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import girih.kernels.ops.experts
import girih.kernels.ops.schemas
import girih.kernels.ops.state  # noqa: F401 (the three register the ops)
from girih.graph.adapt.mask_request import Mask, MaskRequests, read_mask
from girih.graph.adapt.recurrent_functions import KERNEL_FUNCTIONS
from girih.kernels.base.errors import TraceError

NAME = "girih"
# Tensor options of attention that are understood; any other one is refused.
_TENSOR_OPTIONS = {"s_aux", "sinks", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}


class _AllOnes(TorchFunctionMode):
    """Knows which tensors are all ones: a padding mask the model makes when it is given none."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_made = function in (torch.ones, torch.ones_like)
        is_cast = function is torch.Tensor.to and self.knows(args[0])
        if is_made or is_cast:
            self._known.append(result)
        return result

    def knows(self, tensor: Any) -> bool:
        """Return whether a tensor was made as all ones during this trace."""
        return any(tensor is known for known in self._known)


class Capture:
    """Context in which a model leaves opaque ops in the graph.

    Args:
        model: the model to be exported; its modelling modules are the ones prepared.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = _modelling_modules(model)
        self._saved: list[tuple[ModuleType, str, Any]] = []

    def __enter__(self) -> Capture:
        from transformers import masking_utils

        global _requests, _ones
        _requests, _ones = MaskRequests(), _AllOnes()
        _ones.__enter__()
        self._replace(masking_utils, "find_packed_sequence_indices", _packs_nothing)
        for module in self._modules:
            for name, value in list(vars(module).items()):
                replacement = KERNEL_FUNCTIONS.get(_kernel_name(value) or "")
                if replacement is not None:
                    self._replace(module, name, replacement)
        return self

    def _replace(self, module: ModuleType, name: str, replacement: Any) -> None:
        self._saved.append((module, name, getattr(module, name)))
        setattr(module, name, replacement)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _ones.__exit__(kind, error, trace)
        for module, name, value in self._saved:
            setattr(module, name, value)
        self._saved.clear()


def register() -> None:
    """Make the name "girih" known to transformers' attention, mask and experts interfaces."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    ExpertsInterface.register(NAME, _experts)


_requests = MaskRequests()
_ones = _AllOnes()


def _modelling_modules(model: torch.nn.Module) -> list[ModuleType]:
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if ".models." in name]


def _kernel_name(value: Any) -> str | None:
    """The kernel a function was decorated with by transformers, e.g. "causal_conv1d_fn"."""
    code = getattr(value, "__code__", None)
    if code is None or "use_kernel_func_from_hub_with_fallback" not in code.co_qualname:
        return None
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True))
    cell = cells.get("func_name")
    return str(cell.cell_contents) if cell is not None else None


def _packs_nothing(position_ids: torch.Tensor) -> None:
    """Stand in for transformers' search for sequences packed into one row.

    Which tokens of a step belong together is attention's business here, so the answer would be
    computed for nobody, with sums over all tokens that take long to trace.
    """


def _mask(*, mask_function: Callable[..., Any], device: Any = None, **options: Any) -> torch.Tensor:
    """Stand in for transformers' mask builders: read what is asked for, build nothing."""
    padding = options.get("attention_mask")
    if padding is not None and not _ones.knows(padding):
        raise TraceError("the model makes a padding mask of its own: unsupported")
    return _requests.stand_in(read_mask(mask_function), device)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for a model's attention: one `girih::attention` call.

    Shapes: query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv].
    """
    for name, option in options.items():
        if isinstance(option, torch.Tensor) and name not in _TENSOR_OPTIONS:
            raise TraceError(f"{type(module).__name__} needs attention with {name!r}: unsupported")
    mask = _mask_of(module, attention_mask, options)
    sinks = options.get("s_aux")
    out = attention_op(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        mask,
        softcap=float(options.get("softcap") or 0.0),
        sinks=options.get("sinks") if sinks is None else sinks,
    )
    return out[None], None


def attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `girih::attention`, with its rare arguments only where they say something.

    Shapes: query [T, H, D], key [T, Hkv, D], value [T, Hkv, Dv] -> [T, H, Dv].
    """
    common = (query, key, value, scale, mask.causal, mask.window, softcap, sinks)
    if slopes is None and not mask.chunk:
        return torch.ops.girih.attention(*common)
    return torch.ops.girih.attention(*common, slopes, mask.chunk)


def _mask_of(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> Mask:
    """The mask of one attention call: what the model requested, checked against its options."""
    window = int(options.get("sliding_window") or 0)
    if attention_mask is None:
        is_causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return Mask(bool(causal), window)
    found = _requests.find(attention_mask)
    if found is None:
        raise TraceError(
            f"{type(module).__name__} passes its attention a mask of its own making; only causal, "
            "windowed, chunked and full attention can be captured"
        )
    if window and found.causal and found.window not in (0, window):
        raise TraceError(
            f"{type(module).__name__} asks for a window of {window} tokens and for a mask with a "
            f"window of {found.window}"
        )
    return found


def _experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Stand in for a mixture of experts: one op per projection, activation and sum in the graph.

    Shapes: hidden [T, H], index and weights [T, C] -> [T, H].
    """

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        weight = getattr(module, name)
        return torch.ops.girih.expert_linear(x, weight, bias, index, bool(module.is_transposed))

    up = project(hidden, "gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = project(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return (out * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
