"""Which non-negative rates explain measured times best (numpy, no torch)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

REWEIGHTINGS = 3
Array = npt.NDArray[np.float64]


def fit_rates(quantities: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of the relative error with rates that are not negative.

    An error counts relative to the time the fit before gave: relative to the measured time, slow
    steps would count less than fast ones of the same shape, and the fit would be too fast.

    Args:
        quantities: [steps, terms].
        seconds: [steps].

    Returns:
        Seconds per unit, [terms].
    """
    amounts, measured = np.asarray(quantities, np.float64), np.asarray(seconds, np.float64)
    rates = _least_squares(amounts, measured, measured)
    for _ in range(REWEIGHTINGS):
        rates = _least_squares(amounts, measured, np.maximum(amounts @ rates, 1e-9))
    return [float(rate) for rate in rates]


def _least_squares(quantities: Array, seconds: Array, sizes: Array) -> Array:
    """Rates that are not negative and least in the sum of (error / size)².

    The best such rates are the plain least squares over some subset of the terms, so all subsets
    are tried: there are few terms.
    """
    weighted = quantities / sizes[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-30)
    weighted = weighted / scale
    gram, target = weighted.T @ weighted, weighted.T @ (seconds / sizes)
    present = [i for i in range(quantities.shape[1]) if quantities[:, i].any()]
    best, best_loss = np.zeros(quantities.shape[1]), np.inf
    for count in range(1, len(present) + 1):
        for subset in itertools.combinations(present, count):
            chosen = list(subset)
            rates, *_ = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=1e-10)
            if rates.min() < 0:
                continue
            loss = float(rates @ gram[np.ix_(chosen, chosen)] @ rates - 2 * rates @ target[chosen])
            if loss < best_loss - 1e-12:
                best_loss, best = loss, np.zeros(quantities.shape[1])
                best[chosen] = rates
    return np.asarray(best / scale)
