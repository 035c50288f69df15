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

from girih.kernels.base.errors import ConfigError
from girih.kernels.base.target import ISAS

PANEL_WIDTH = {"generic": 16, "avx2": 16, "avx512": 32, "avx512_bf16": 32, "amx_bf16": 32}


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
    """Write `rows` [n, K] to the rows [row_start, row_start + n) of `packed` (any device).

    Whole panels are transposed at once; only the rows around them are scattered.
    """
    if packed.dtype == torch.bfloat16:  # from here on a pair is one element
        even = rows.new_zeros(rows.shape[0], 2 * packed.shape[1])
        even[:, : rows.shape[1]] = rows
        packed, rows = packed.view(torch.int32), even.view(torch.int32)
    n, width = rows.shape[0], packed.shape[2]
    head = min(n, -row_start % width)
    tail = (n - head) % width
    first, count = (row_start + head) // width, (n - head - tail) // width
    whole = rows[head : n - tail].unflatten(0, (count, width))
    packed[first : first + count] = whole.transpose(1, 2)
    for part in (range(head), range(n - tail, n)):
        index = torch.arange(part.start, part.stop, device=packed.device) + row_start
        packed[index // width, :, index % width] = rows[part.start : part.stop]


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
    elements = packed.view(torch.int32) if packed.dtype == torch.bfloat16 else packed
    rows = elements.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(0, 1)
    return rows.view(packed.dtype)[:n, :k]
