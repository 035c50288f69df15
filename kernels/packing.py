"""Packed linear weights: the layout that the CPU GEMM reads, as shapes and torch code.

A weight [N, K] becomes column panels of NB outputs, so that one pass over a panel reads memory
in order and every vector load yields NB neighbouring outputs:

    float32, float16   [ceil(N/NB), K, NB]            element (k, c) of a panel at [k][c]
    bfloat16           [ceil(N/NB), ceil(K/2), 2*NB]  k in pairs: [k/2][2*c + k%2]

NB is two vectors: 16 up to AVX2, 32 with AVX-512. Rows beyond N are never read by the caller;
the odd last k of a bfloat16 panel is zero.
"""

from __future__ import annotations

import torch

from girih.kernels.errors import ConfigError
from girih.kernels.target import ISAS

PANEL_WIDTH = {"generic": 16, "avx2": 16, "avx512": 32, "avx512_bf16": 32}


def packed_shape(n: int, k: int, dtype: torch.dtype, isa: str) -> tuple[int, int, int]:
    """Return the shape of a packed [n, k] weight.

    Raises:
        ConfigError: a dtype or instruction set without a packed layout, or an empty weight.
    """
    if isa not in PANEL_WIDTH:
        raise ConfigError(f"isa is {isa!r}; packed weights exist for {', '.join(ISAS)}")
    if n < 1 or k < 1:
        raise ConfigError(f"a packed weight of shape [{n}, {k}] is empty; both must be positive")
    width = PANEL_WIDTH[isa]
    panels = -(-n // width)
    if dtype == torch.bfloat16:
        return (panels, -(-k // 2), 2 * width)
    if dtype in (torch.float16, torch.float32):
        return (panels, k, width)
    raise ConfigError(
        f"weights of {dtype} have no packed layout; allowed are bfloat16, float16, float32"
    )


def pack_rows(packed: torch.Tensor, rows: torch.Tensor, row_start: int) -> None:
    """Write `rows` [n, K] to the rows [row_start, row_start + n) of `packed` (any device)."""
    n, k = rows.shape
    index = torch.arange(row_start, row_start + n, device=packed.device)
    if packed.dtype == torch.bfloat16:
        width = packed.shape[2] // 2
        pairs = torch.nn.functional.pad(rows, (0, k % 2)).view(n, -1, 2)
        view = packed.view(packed.shape[0], packed.shape[1], width, 2)
        view[index // width, :, index % width] = pairs
    else:
        width = packed.shape[2]
        packed[index // width, :, index % width] = rows


def unpack_linear(packed: torch.Tensor, n: int, k: int, isa: str | None = None) -> torch.Tensor:
    """Return the [n, k] weight held by `packed`.

    Args:
        packed: as `packed_shape` describes.
        n: rows of the weight.
        k: columns of the weight.
        isa: checked against the layout when given.

    Raises:
        ConfigError: `packed` was made for another instruction set.
    """
    if isa is not None and tuple(packed.shape) != packed_shape(n, k, packed.dtype, isa):
        raise ConfigError(
            f"packed weight has shape {tuple(packed.shape)}; a [{n}, {k}] weight packed for "
            f"{isa} has {packed_shape(n, k, packed.dtype, isa)}"
        )
    panels, depth, columns = packed.shape
    if packed.dtype == torch.bfloat16:
        pairs = packed.view(panels, depth, columns // 2, 2).permute(0, 2, 1, 3)
        return pairs.reshape(panels * (columns // 2), 2 * depth)[:n, :k]
    return packed.permute(0, 2, 1).reshape(panels * columns, depth)[:n, :k]
