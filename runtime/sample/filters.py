"""Top-k and top-p on weights in [0, 1], without sorting the vocabulary.

Both ask for a limit: keep the largest weights until they amount to a target (their number for
top-k, their sum for top-p). The answer comes from a histogram over the exponent and the first
mantissa bits, refined inside the one bucket where the target is crossed:

    weights ─▶ those above a safe floor ─▶ histogram ─▶ crossing bucket ─▶ exact limit

Rows do not influence each other, and equal weights are kept or dropped together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GROUP = 128  # vocabulary entries per group maximum
_SHIFT = 18  # bits dropped from a float32: 32 buckets per power of two
_NUM_BUCKETS = (0x3F800000 >> _SHIFT) + 1  # of weights in [0, 1]
_SMALLEST = np.float32(1e-45)

FloatArray = npt.NDArray[np.floating]


def keep_top_k(weights: torch.Tensor, top_k: torch.Tensor) -> None:
    """Zero what is smaller than the k-th largest weight of its row, in place.

    Args:
        weights: float32 [S, V] on the CPU.
        top_k: int64 [S], at least 1; V or more keeps the row as it is.
    """
    size = weights.shape[1]
    num_groups = size // _GROUP
    target = torch.where(top_k < size, top_k.double(), torch.inf)
    largest_k = int(torch.where(top_k < size, top_k, 1).max())
    floor = weights.new_zeros(len(weights), 1)
    if largest_k <= num_groups:
        # k groups have a maximum >= the k-th largest maximum, so k weights do
        maxima = weights[:, : num_groups * _GROUP].unflatten(1, (-1, _GROUP)).amax(dim=-1)
        ordered = maxima.topk(largest_k, dim=-1).values
        floor = ordered.gather(1, top_k.clamp(max=largest_k)[:, None] - 1)
    limits = _limits(weights.numpy(), floor.numpy(), target.numpy(), by_weight=False)
    weights *= weights >= torch.from_numpy(limits)[:, None]


def keep_top_p(weights: torch.Tensor, top_p: torch.Tensor, sums: torch.Tensor) -> None:
    """Keep the largest weights of each row until they reach the share `top_p`, in place.

    Args:
        weights: float32 [S, V] on the CPU.
        top_p: float32 [S] in (0, 1]; 1 keeps the row as it is.
        sums: float64 [S], of each row's weights.
    """
    share = top_p.double()
    target = torch.where(share < 1, share * sums, torch.inf)
    # all weights below the floor together are less than what may be dropped
    floor = (0.5 * (1 - share) * sums / weights.shape[1])[:, None]
    limits = _limits(weights.numpy(), floor.float().numpy(), target.numpy(), by_weight=True)
    weights *= weights >= torch.from_numpy(limits)[:, None]


def _limits(
    weights: FloatArray, floor: FloatArray, target: FloatArray, by_weight: bool
) -> npt.NDArray[np.float32]:
    """Per row the smallest weight to keep; 0 when the row does not reach its target.

    Args:
        weights: float32 [S, V] in [0, 1].
        floor: [S, 1]; what is smaller is known to be dropped or not to matter.
        target: float64 [S], infinite for rows to leave alone.
        by_weight: whether the kept weights are summed up, or counted.
    """
    num_rows, size = weights.shape
    is_open = np.isfinite(target)
    floor = np.where(is_open[:, None], np.maximum(floor, _SMALLEST), np.inf).astype(np.float32)
    places = np.flatnonzero(weights >= floor)
    values = weights.reshape(-1)[places]
    rows = places // size
    buckets = _NUM_BUCKETS - 1 - (values.view(np.int32) >> _SHIFT)  # largest weights first
    keys = rows * _NUM_BUCKETS + buckets
    amounts = values.astype(np.float64) if by_weight else None
    shape = (num_rows, _NUM_BUCKETS)
    histogram = np.bincount(keys, amounts, num_rows * _NUM_BUCKETS).reshape(shape)
    reached = np.cumsum(histogram, axis=1, dtype=np.float64)
    crossing = (reached < target[:, None]).sum(axis=1)  # bucket where the target is reached
    is_open &= crossing < _NUM_BUCKETS
    crossing = np.minimum(crossing, _NUM_BUCKETS - 1)
    everyone = np.arange(num_rows)
    before = reached[everyone, crossing] - histogram[everyone, crossing]
    inside = buckets == crossing[rows]
    return _refine(values[inside], rows[inside], target - before, is_open, by_weight)


def _refine(
    values: FloatArray,
    rows: npt.NDArray[np.integer],
    missing: FloatArray,
    is_open: npt.NDArray[np.bool_],
    by_weight: bool,
) -> npt.NDArray[np.float32]:
    """The limits, from the weights of each row's crossing bucket and what it is to add."""
    order = np.lexsort((-values, rows))
    values, rows = values[order], rows[order]
    amounts = values.astype(np.float64) if by_weight else np.ones(len(values))
    counts = np.bincount(rows, minlength=len(is_open))
    starts = np.cumsum(counts) - counts
    larger = np.cumsum(amounts) - amounts
    larger -= larger[starts[rows]]  # amount of the larger ones of the same row
    num_kept = np.bincount(rows, larger < missing[rows], len(is_open)).astype(np.int64)
    limits = np.zeros(len(is_open), np.float32)
    last = starts + np.maximum(num_kept, 1) - 1
    limits[is_open] = values[last[is_open]]
    return limits
