"""Stand-ins for the primitives of recurrent layers, by the kernel name transformers gives them.

Each takes the arguments of the function it replaces, for a batch of one sequence without a cache,
and leaves one op of `girih.kernels.ops.state` in the graph; what is not recurrent (activations,
skip connections, normalisation of queries) stays ordinary operations of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from girih.kernels.base.errors import TraceError


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """x [1, C, T], weight [C, K] -> [1, C, T]."""
    from transformers.activations import ACT2FN

    out = torch.ops.girih.causal_conv(x[0].t().to(weight.dtype), weight, bias).t()[None]
    return (ACT2FN[activation](out) if activation else out).to(x.dtype)


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes: query, key [1, T, G, D], value [1, T, H, V], g [1, T, H], beta [1, T, H]."""
    return _delta_rule(query, key, value, g[..., None], beta, use_qk_l2norm_in_kernel), None


def chunk_kda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As `chunk_gated_delta_rule` with a decay per key dimension, g [1, T, H, D]."""
    return _delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalize: bool,
) -> torch.Tensor:
    dtype = query.dtype
    q, k = query[0].float(), key[0].float()
    if normalize:
        q, k = _unit_length(q), _unit_length(k)
    q = q * q.shape[-1] ** -0.5
    out = torch.ops.girih.delta_rule(q, k, value[0].float(), g[0].float(), beta[0].float())
    return out[None].to(dtype)


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def mamba_chunk_scan_combined(  # noqa: PLR0913 (the replaced function's arguments)
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> torch.Tensor:
    """x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N] -> [1, T, H, P]."""
    _no_state(return_final_states)
    dt = dt + dt_bias.to(dt.dtype) if dt_bias is not None else dt
    dt = F.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    inner = x.float()
    decay = (A.float() * dt.float())[0, ..., None]
    values = (inner * dt.float()[..., None])[0]
    out = torch.ops.girih.linear_attention(C[0].float(), B[0].float(), values, decay)[None]
    out = out + D.float()[:, None] * inner if D is not None else out
    return out if z is None else out * F.silu(z)


def selective_scan_fn(  # noqa: PLR0913 (the replaced function's arguments)
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> torch.Tensor:
    """x and dt [1, C, T], A [C, N], B and C [1, N, T] -> [1, C, T]."""
    _no_state(return_last_state)
    dt = dt + delta_bias.to(dt.dtype)[..., None] if delta_bias is not None else dt
    dt = F.softplus(dt) if delta_softplus else dt
    rows = (tensor[0].transpose(0, 1) for tensor in (x, dt, B, C))
    inner, steps, b, c = rows
    out = torch.ops.girih.selective_scan(inner, steps, A, b, c).t()[None]
    out = out + x * D[:, None] if D is not None else out
    return out if z is None else out * F.silu(z)


def _no_state(asked_for: bool) -> None:
    if asked_for:
        raise TraceError("a recurrent layer asks for its state while it is traced without a cache")


KERNEL_FUNCTIONS = {
    function.__name__: function
    for function in (
        causal_conv1d_fn,
        chunk_gated_delta_rule,
        chunk_kda,
        mamba_chunk_scan_combined,
        selective_scan_fn,
    )
}
