"""The cost of a step: a sum of non-negative terms of its shape, kept in a JSON file.

    seconds(step) = step + Σ rate of a range × tokens of the step in that range
                    + request × requests + decode × context read + prefill × pairs

Tokens get cheaper or dearer the more there are: a range has its own rate. Fitted by `fit.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from girih.kernels.base.errors import ConfigError
from girih.kernels.kv.groups import KVCacheGroup
from girih.runtime.schedule.step_shape import StepShape

TOKEN_KNOTS = (1, 4, 16, 64, 256)
"""Where one range of tokens ends and the next begins; the first token is part of `step`."""

TERMS = (
    "step",
    *(f"tokens_from_{knot}" for knot in TOKEN_KNOTS),
    "requests",
    "decode_context",
    "prefill_pairs",
)
"""Names of the terms, in the order of `terms_of`."""


def terms_of(shape: StepShape) -> list[float]:
    """The quantity of each of `TERMS` in a step."""
    ends = (*TOKEN_KNOTS[1:], float("inf"))
    ranges = [
        max(0.0, min(shape.tokens, end) - start)
        for start, end in zip(TOKEN_KNOTS, ends, strict=True)
    ]
    return [1.0, *ranges, shape.requests, shape.decode_context, shape.prefill_pairs]


class FitError(msgspec.Struct, frozen=True):
    """The error of a cost on the steps it was fitted to.

    Attributes:
        steps: how many there were.
        seconds: they took together.
        median: median of |cost / measured - 1|.
        p90: its 90th percentile.
        total: cost / measured - 1 of all steps together.
    """

    steps: int
    seconds: float
    median: float
    p90: float
    total: float


class MeasuredEngine(msgspec.Struct, frozen=True):
    """The engine whose steps were measured.

    Attributes:
        num_blocks: KV blocks, the null block included.
        block_size: token slots per block.
        max_model_len: longest prompt + output, in tokens.
        windows: of each KV group, 0 for one that keeps everything.
        chunks: of each KV group, 0 for none.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    windows: tuple[int, ...] = (0,)
    chunks: tuple[int, ...] = (0,)

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV groups, without their layers."""
        pairs = zip(self.windows, self.chunks, strict=True)
        return tuple(KVCacheGroup((), window, chunk) for window, chunk in pairs)


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of steps and of what lies between.

    Attributes:
        terms: name -> seconds per unit, see `TERMS`.
        gap: seconds between two steps that follow each other.
        front: seconds from a client to the core and of its first token back.
        engine: where this was measured.
        error: how well it fits.
    """

    terms: dict[str, float]
    gap: float
    front: float
    engine: MeasuredEngine
    error: FitError

    def rates(self) -> list[float]:
        """Seconds per unit in the order of `TERMS`."""
        return [self.terms[name] for name in TERMS]

    def save(self, file: str) -> None:
        """Write as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error


def load_cost(file: str | None) -> StepCost:
    """Read what `StepCost.save` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if file is None:
        raise ConfigError(
            "simulate.cost names no file; measure one: run `girih serve runtime.trace=TRACE` under "
            "`girih bench serve`, then `girih simulate fit trace=TRACE out=COST`"
        )
    try:
        cost = msgspec.json.decode(Path(file).read_bytes(), type=StepCost)
    except OSError as error:
        raise ConfigError(f"simulate.cost {file} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"simulate.cost {file} is no file of `simulate fit`: {error}") from error
    if set(cost.terms) != set(TERMS):
        raise ConfigError(
            f"simulate.cost {file} has the terms {', '.join(sorted(cost.terms))}; this version "
            f"needs {', '.join(sorted(TERMS))}: fit it again"
        )
    return cost


class StepClock:
    """Evaluates a cost quickly.

    Args:
        cost: seconds per unit.
    """

    def __init__(self, cost: StepCost) -> None:
        rates = cost.rates()
        num_ranges = len(TOKEN_KNOTS)
        self._token_rates = rates[1 : 1 + num_ranges]
        self._request, self._decode, self._prefill = rates[1 + num_ranges :]
        # Cost of all tokens up to each knot, so that a step only looks up its range.
        self._until = [rates[0]]
        for index in range(1, num_ranges):
            width = TOKEN_KNOTS[index] - TOKEN_KNOTS[index - 1]
            self._until.append(self._until[-1] + width * self._token_rates[index - 1])

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds that a step of this shape takes."""
        tokens, index = shape.tokens, len(TOKEN_KNOTS) - 1
        while index and tokens < TOKEN_KNOTS[index]:
            index -= 1
        return (
            self._until[index]
            + (tokens - TOKEN_KNOTS[index]) * self._token_rates[index]
            + shape.requests * self._request
            + shape.decode_context * self._decode
            + shape.prefill_pairs * self._prefill
        )
