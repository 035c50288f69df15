"""Recurrent layers: ops that carry a state from token to token, their states and references.

Traced, each op is a call over the tokens of one sequence that starts from a zero state. Running, it
is a step of the program: the executable gives `StateOp.run` the tokens of one request and that
request's state, which `run` updates in place. All states are float32 except the inputs kept by a
convolution, which have its dtype.

`girih::causal_conv(x, weight, bias) -> y`
    x [T, C], weight [C, K], bias [C] or none -> y [T, C]; each channel over the last K tokens.
`girih::linear_attention(q, k, v, g) -> o`
    q, k [T, G, D], v [T, H, V], g [T, H, 1] or [T, H, D] -> o [T, H, V]; G divides H:
    S = exp(g) * S + k vᵀ;  o = Sᵀ q. Mamba-2, lightning attention and plain linear attention.
`girih::delta_rule(q, k, v, g, beta) -> o`
    As above with S = exp(g) * S, S += beta * k (v - Sᵀ k)ᵀ; beta [T, H]. Gated delta net, KDA.
`girih::selective_scan(x, dt, a, b, c) -> y`
    x, dt [T, C], a [C, N], b, c [T, N] -> y [T, C]: S = exp(dt a) S + dt x bᵀ; y = S c. Mamba.
`girih::gated_sum(x, a) -> h`
    x, a [T, C] -> h [T, C]: h = a * h + x. RG-LRU.
`girih::wkv(k, v, decay, first) -> o`
    k, v [T, C], decay, first [C] -> o [T, C]: the mean of all v so far, weighted by exp(k) and
    exp(decay) per token of distance, the newest by exp(k + first). RWKV-4.
`girih::mlstm(q, k, v, i, f, eps) -> h`
    q, k [T, H, D], v [T, H, V], i, f [T, H], eps [1] -> h [T, H, V]: S = exp(f) S + exp(i) k vᵀ and
    n = exp(f) n + exp(i) k; h = Sᵀ q / max(|n q|, 1), all scaled to stay finite. xLSTM.
`girih::running_mean(x) -> y`
    x [T, C] -> y [T, C]: the mean of all rows so far. Mean pooling, whose result is the last row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
StateShapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StateOp:
    """One recurrent op.

    Attributes:
        name: in the namespace `girih`.
        arguments: names of the op's arguments, a "?" behind those that may be missing.
        per_token: names of the arguments that have one row per token; the others are weights.
        state_shapes: shapes of the states of one sequence, from the arguments.
        run: (arguments of one sequence, its states) -> output; updates the states in place.
        output_like: the argument whose shape the output has.
        keeps_dtype: the state has the dtype of the first argument instead of float32.
    """

    name: str
    arguments: tuple[str, ...]
    per_token: tuple[str, ...]
    state_shapes: Callable[..., StateShapes]
    run: Callable[[Sequence[Any], Tensors], torch.Tensor]
    output_like: str
    keeps_dtype: bool = False

    def new_states(self, arguments: Sequence[Any], *leading: int) -> list[torch.Tensor]:
        """Zero states for these arguments, with `leading` dimensions in front."""
        first = arguments[0]
        dtype = first.dtype if self.keeps_dtype else torch.float32
        shapes = self.state_shapes(*arguments)
        return [torch.zeros((*leading, *s), dtype=dtype, device=first.device) for s in shapes]

    def is_per_token(self, position: int) -> bool:
        """Return whether the argument at `position` has one row per token."""
        return self.arguments[position].rstrip("?") in self.per_token


STATE_OPS: dict[str, StateOp] = {}
_library = torch.library.Library("girih", "FRAGMENT")


def _register(op: StateOp) -> None:
    """Define the op: schema, shape rule, and the run over one sequence from a zero state."""
    parameters = ", ".join(
        f"Tensor? {a[:-1]}" if a.endswith("?") else f"Tensor {a}" for a in op.arguments
    )
    _library.define(f"{op.name}({parameters}) -> Tensor")
    like = op.arguments.index(op.output_like)

    def from_zero(*arguments: torch.Tensor) -> torch.Tensor:
        return op.run(arguments, op.new_states(arguments))

    def fake(*arguments: torch.Tensor) -> torch.Tensor:
        return arguments[like].new_empty(arguments[like].shape)

    _library.impl(op.name, from_zero, "CPU")
    _library.impl(op.name, from_zero, "CUDA")
    torch.library.register_fake(f"girih::{op.name}", fake, lib=_library)
    STATE_OPS[op.name] = op


def _causal_conv(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    x, weight, bias = arguments
    (kept,) = states
    rows = torch.cat((kept.to(x.dtype), x))
    windows = rows.unfold(0, weight.shape[1], 1)  # [T, C, K]
    out = (windows.float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    if kept.shape[0]:
        kept.copy_(rows[-kept.shape[0] :])
    return out.to(x.dtype)


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, G, D] as float32 [T, H, D], each group's row given to its heads."""
    return x.float().repeat_interleave(num_heads // x.shape[1], 1)


def _linear_attention(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    q, k, v, g = arguments
    (state,) = states
    num_heads = v.shape[1]
    q, k, decay, values = _heads(q, num_heads), _heads(k, num_heads), g.float().exp(), v.float()
    out = torch.empty_like(values)
    for t in range(v.shape[0]):
        state.mul_(decay[t, :, :, None]).add_(k[t, :, :, None] * values[t, :, None])
        out[t] = torch.einsum("hd,hdv->hv", q[t], state)
    return out.to(v.dtype)


def _delta_rule(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    q, k, v, g, beta = arguments
    (state,) = states
    num_heads = v.shape[1]
    q, k, decay, values = _heads(q, num_heads), _heads(k, num_heads), g.float().exp(), v.float()
    out = torch.empty_like(values)
    for t in range(v.shape[0]):
        state.mul_(decay[t, :, :, None])
        known = torch.einsum("hd,hdv->hv", k[t], state)
        change = (values[t] - known) * beta[t].float()[:, None]
        state.add_(k[t, :, :, None] * change[:, None])
        out[t] = torch.einsum("hd,hdv->hv", q[t], state)
    return out.to(v.dtype)


def _selective_scan(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    x, dt, a, b, c = (tensor.float() for tensor in arguments)
    (state,) = states
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        state.mul_(torch.exp(dt[t, :, None] * a)).add_((dt[t] * x[t])[:, None] * b[t])
        out[t] = state @ c[t]
    return out.to(arguments[0].dtype)


def _gated_sum(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    x, a = (tensor.float() for tensor in arguments)
    (state,) = states
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        state.mul_(a[t]).add_(x[t])
        out[t] = state
    return out.to(arguments[0].dtype)


def _wkv(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    k, v, decay, first = (tensor.float() for tensor in arguments)
    total, weight, largest = states  # total and weight are scaled by exp(-largest)
    out = torch.empty_like(v)
    for t in range(k.shape[0]):
        known = torch.where(weight > 0, largest, -1e38)
        top = torch.maximum(known, k[t] + first)
        old, new = torch.exp(known - top), torch.exp(k[t] + first - top)
        out[t] = (old * total + new * v[t]) / (old * weight + new)
        top = torch.maximum(known + decay, k[t])
        old, new = torch.exp(known + decay - top), torch.exp(k[t] - top)
        total.mul_(old).add_(new * v[t])
        weight.mul_(old).add_(new)
        largest.copy_(top)
    return out.to(arguments[1].dtype)


def _mlstm(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    q, k, v, i, f, eps = (tensor.float() for tensor in arguments)
    state, norm, largest = states  # state and norm are scaled by exp(-largest)
    out = torch.empty_like(v)
    for t in range(v.shape[0]):
        top = torch.maximum(f[t] + largest, i[t])
        old, new = torch.exp(f[t] + largest - top)[:, None], torch.exp(i[t] - top)[:, None]
        state.mul_(old[..., None]).add_((new * k[t])[:, :, None] * v[t][:, None])
        norm.mul_(old).add_(new * k[t])
        largest.copy_(top)
        size = torch.maximum((q[t] * norm).sum(-1).abs(), torch.exp(-top)) + eps
        out[t] = torch.einsum("hd,hdv->hv", q[t], state) / size[:, None]
    return out.to(arguments[2].dtype)


def _running_mean(arguments: Sequence[Any], states: Tensors) -> torch.Tensor:
    (x,) = arguments
    total, count = states
    sums = x.cumsum(0, dtype=torch.float64).add_(total)
    counts = torch.arange(1, x.shape[0] + 1, dtype=torch.float64, device=x.device) + count
    total.copy_(sums[-1])
    count.add_(x.shape[0])
    return (sums / counts[:, None]).to(x.dtype)


_register(
    StateOp(
        "causal_conv",
        ("x", "weight", "bias?"),
        ("x",),
        lambda x, weight, bias: ((weight.shape[1] - 1, weight.shape[0]),),
        _causal_conv,
        "x",
        keeps_dtype=True,
    )
)
_register(
    StateOp(
        "linear_attention",
        ("q", "k", "v", "g"),
        ("q", "k", "v", "g"),
        lambda q, k, v, g: ((v.shape[1], k.shape[2], v.shape[2]),),
        _linear_attention,
        "v",
    )
)
_register(
    StateOp(
        "delta_rule",
        ("q", "k", "v", "g", "beta"),
        ("q", "k", "v", "g", "beta"),
        lambda q, k, v, g, beta: ((v.shape[1], k.shape[2], v.shape[2]),),
        _delta_rule,
        "v",
    )
)
_register(
    StateOp(
        "selective_scan",
        ("x", "dt", "a", "b", "c"),
        ("x", "dt", "b", "c"),
        lambda x, dt, a, b, c: ((x.shape[1], a.shape[1]),),
        _selective_scan,
        "x",
    )
)
_register(
    StateOp("gated_sum", ("x", "a"), ("x", "a"), lambda x, a: ((x.shape[1],),), _gated_sum, "x")
)
_register(
    StateOp(
        "wkv",
        ("k", "v", "decay", "first"),
        ("k", "v"),
        lambda k, v, decay, first: ((k.shape[1],),) * 3,
        _wkv,
        "v",
    )
)
_register(
    StateOp(
        "mlstm",
        ("q", "k", "v", "i", "f", "eps"),
        ("q", "k", "v", "i", "f"),
        lambda q, k, v, i, f, eps: (
            (v.shape[1], q.shape[2], v.shape[2]),
            (v.shape[1], q.shape[2]),
            (v.shape[1],),
        ),
        _mlstm,
        "v",
    )
)
_register(
    StateOp("running_mean", ("x",), ("x",), lambda x: ((x.shape[1],), (1,)), _running_mean, "x")
)
