"""Mixture of experts as one op per projection, whatever the number of experts.

`girih::expert_linear(x, weight, bias, experts, transposed) -> out`
    x [T, K] (each choice of a token reads the same row) or [T, C, K]; weight [E, N, K], or
    [E, K, N] when transposed; bias [E, N] or none; experts int64 [T, C] -> out [T, C, N] in x's
    dtype. A choice outside 0 … E-1 gives a zero row.
"""

from __future__ import annotations

import torch

_library = torch.library.Library("girih", "FRAGMENT")
_library.define(
    "expert_linear(Tensor x, Tensor weight, Tensor? bias, Tensor experts, bool transposed)"
    " -> Tensor"
)


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    transposed: bool,
) -> torch.Tensor:
    """Reference of `girih::expert_linear`: one product per expert that was chosen."""
    tokens, choices = experts.shape
    rows = x.unsqueeze(1).expand(tokens, choices, x.shape[-1]) if x.ndim == 2 else x
    rows, ids = rows.reshape(tokens * choices, -1), experts.reshape(-1)
    size = weight.shape[2] if transposed else weight.shape[1]
    out = rows.new_zeros(tokens * choices, size)
    for expert in ids.unique().tolist():
        if not 0 <= expert < weight.shape[0]:
            continue
        chosen = (ids == expert).nonzero()[:, 0]
        matrix = weight[expert] if transposed else weight[expert].t()
        product = rows[chosen] @ matrix.to(rows.dtype)
        out[chosen] = product if bias is None else product + bias[expert].to(rows.dtype)
    return out.view(tokens, choices, size)


_library.impl("expert_linear", expert_linear, "CPU")
_library.impl("expert_linear", expert_linear, "CUDA")


@torch.library.register_fake("girih::expert_linear")
def _expert_linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    transposed: bool,
) -> torch.Tensor:
    size = weight.shape[2] if transposed else weight.shape[1]
    return x.new_empty((experts.shape[0], experts.shape[1], size))
