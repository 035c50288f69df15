"""Which captured shape a step runs in, and why. No torch.

    tokens, requests, rows of logits ─▶ Dispatcher.choose ─▶ Dispatch: FULL > PIECEWISE > NONE

A step runs in the smallest bucket that holds it. What a mode cannot take falls to the next one; a
miss never fails a step, and says what it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from girih.graph.execute.batch_descriptor import BatchDescriptor
from girih.kernels.base.errors import ConfigError

EIGHTH = 8  # a bucket is at most this part larger than the one before it, from 64 on


class Mode(StrEnum):
    """The way a step runs."""

    FULL = "full"  # all of it as captured: one token per request
    PIECEWISE = "piecewise"  # the pieces as captured; attention and the head as the step is
    NONE = "none"  # nothing captured, nothing padded


@dataclass(frozen=True)
class Miss:
    """Why a step did not run in a better mode.

    Attributes:
        mode: the better mode.
        reason: one word, for counting.
        text: the reason for people, with the limit it met.
    """

    mode: Mode
    reason: str
    text: str


@dataclass(frozen=True)
class Dispatch:
    """The way a step runs.

    Attributes:
        mode: taken.
        descriptor: the padded shape; None where nothing is captured.
        misses: better modes that were asked for, and why they were not taken.
    """

    mode: Mode
    descriptor: BatchDescriptor | None
    misses: tuple[Miss, ...] = ()

    @property
    def bucket(self) -> str:
        """T of the bucket, as a label; empty without one."""
        return str(self.descriptor.tokens) if self.descriptor else ""

    def as_text(self, tokens: int) -> str:
        """The decision over a step of `tokens` tokens, for a trace."""
        taken = (
            f"{self.mode} {self.bucket} ({tokens} tokens)" if self.descriptor else f"{self.mode}"
        )
        return "; ".join([taken, *(f"not {miss.mode}: {miss.text}" for miss in self.misses)])


class Dispatcher:
    """Chooses by the size of a step.

    Args:
        best: the best mode to use.
        token_sizes: buckets of PIECEWISE in tokens, growing.
        request_sizes: buckets of FULL in requests, growing.
        unsupported: modes that the program cannot be captured for, and why.
    """

    def __init__(
        self,
        best: Mode,
        token_sizes: Sequence[int],
        request_sizes: Sequence[int],
        unsupported: dict[Mode, str] | None = None,
    ) -> None:
        self.best = best
        self._token_sizes, self._request_sizes = list(token_sizes), list(request_sizes)
        pieces = [BatchDescriptor(n) for n in token_sizes]
        whole = [BatchDescriptor(n, n, is_uniform=True) for n in request_sizes]
        self._pieces = [Dispatch(Mode.PIECEWISE, shape) for shape in pieces]
        self._whole = [Dispatch(Mode.FULL, shape) for shape in whole]
        self._unsupported = {
            mode: Miss(mode, "unsupported", text) for mode, text in (unsupported or {}).items()
        }

    @property
    def max_tokens(self) -> int:
        """T of the largest bucket of the modes in use; 0 without any."""
        used = [0]
        if self.best is Mode.FULL:
            used += self._request_sizes
        if self.best is not Mode.NONE:
            used += self._token_sizes
        return max(used)

    def choose(self, tokens: int, requests: int, rows: int) -> Dispatch:
        """Choose the way a step runs.

        Args:
            tokens: T, at least 1.
            requests: R.
            rows: S, rows of logits that are wanted.
        """
        misses: tuple[Miss, ...] = ()
        if self.best is Mode.FULL:
            miss = self._not_whole(tokens, requests, rows)
            if miss is None:
                return self._whole[bisect_left(self._request_sizes, requests)]
            misses = (miss,)
        if self.best is not Mode.NONE:
            miss = self._not_pieces(tokens)
            if miss is None:
                taken = self._pieces[bisect_left(self._token_sizes, tokens)]
                return Dispatch(taken.mode, taken.descriptor, misses) if misses else taken
            misses = (*misses, miss)
        return Dispatch(Mode.NONE, None, misses)

    def _not_whole(self, tokens: int, requests: int, rows: int) -> Miss | None:
        if Mode.FULL in self._unsupported:
            return self._unsupported[Mode.FULL]
        if tokens != requests:
            text = f"{requests} requests have {tokens} tokens, not one each"
            return Miss(Mode.FULL, "mixed", text)
        largest = self._request_sizes[-1] if self._request_sizes else 0
        if requests > largest:
            text = f"{requests} requests, the largest bucket holds {largest}"
            return Miss(Mode.FULL, "requests", text)
        if rows > requests:
            text = f"{rows} rows of logits are wanted of {requests} requests"
            return Miss(Mode.FULL, "logits", text)
        return None

    def _not_pieces(self, tokens: int) -> Miss | None:
        if Mode.PIECEWISE in self._unsupported:
            return self._unsupported[Mode.PIECEWISE]
        largest = self._token_sizes[-1] if self._token_sizes else 0
        if tokens > largest:
            text = f"{tokens} tokens, the largest bucket holds {largest}"
            return Miss(Mode.PIECEWISE, "tokens", text)
        return None


def derived_sizes(limit: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, … 64, then an eighth larger each (of the power of two below), to `limit`.

    Padding is thus at most an eighth of a bucket from 64 on, and at most 7 tokens before.
    """
    sizes = [size for size in (1, 2, 4) if size < limit]
    size = 8
    while size < limit:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // EIGHTH)
    return (*sizes, limit)


def chosen_sizes(name: str, wanted: Sequence[int], limit: int) -> tuple[int, ...]:
    """The bucket sizes of a setting, or those derived from the limit when it names none.

    Args:
        name: of the setting.
        wanted: its value.
        limit: the largest step there can be, in the setting's unit.

    Raises:
        ConfigError: a size that no step reaches.
    """
    if not wanted:
        return derived_sizes(limit)
    if wanted[-1] > limit:
        raise ConfigError(
            f"{name} ends at {wanted[-1]}; the scheduler's limits allow steps of {limit} at most, "
            "so nothing would ever fill that bucket"
        )
    return tuple(wanted)


class ReplayStats(msgspec.Struct, frozen=True):
    """Counters of the steps so far, by mode.

    Attributes:
        steps: mode -> bucket ("" without one) -> steps.
        tokens: mode -> tokens of requests.
        padded_tokens: mode -> rows of padding beside them.
        captures: mode -> steps that were captured while they ran; the others were replays.
        misses: better mode -> reason -> steps that it could not take.
        buffer_bytes: address space of the buffers of captured steps.
    """

    steps: dict[str, dict[str, int]] = {}
    tokens: dict[str, int] = {}
    padded_tokens: dict[str, int] = {}
    captures: dict[str, int] = {}
    misses: dict[str, dict[str, int]] = {}
    buffer_bytes: int = 0

    @property
    def num_steps(self) -> int:
        """All steps."""
        return sum(sum(steps.values()) for steps in self.steps.values())

    @property
    def num_captured(self) -> int:
        """Steps that ran as captured."""
        return self.num_steps - sum(self.steps.get(Mode.NONE.value, {}).values())

    @property
    def num_captured_tokens(self) -> int:
        """Their tokens."""
        return sum(self.tokens.values()) - self.tokens.get(Mode.NONE.value, 0)

    @property
    def num_padded(self) -> int:
        """Their rows of padding."""
        return sum(self.padded_tokens.values())


class ReplayCounts:
    """Counts steps; written by the thread that runs them, read by others."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[str, int]] = {mode.value: {} for mode in Mode}
        self._tokens = dict.fromkeys(self._steps, 0)
        self._padded = dict.fromkeys(self._steps, 0)
        self._captures = dict.fromkeys(self._steps, 0)
        self._misses: dict[str, dict[str, int]] = {}

    def note(self, taken: Dispatch, tokens: int, was_captured: bool) -> None:
        """Count a step."""
        mode, bucket = taken.mode.value, taken.bucket
        by_bucket = self._steps[mode]
        by_bucket[bucket] = by_bucket.get(bucket, 0) + 1
        self._tokens[mode] += tokens
        self._captures[mode] += was_captured
        if taken.descriptor is not None:
            self._padded[mode] += taken.descriptor.tokens - tokens
        for miss in taken.misses:
            reasons = self._misses.setdefault(miss.mode.value, {})
            reasons[miss.reason] = reasons.get(miss.reason, 0) + 1

    def stats(self, buffer_bytes: int) -> ReplayStats:
        """The counts up to now."""
        return ReplayStats(
            {mode: dict(steps) for mode, steps in self._steps.items()},
            dict(self._tokens),
            dict(self._padded),
            dict(self._captures),
            {mode: dict(reasons) for mode, reasons in list(self._misses.items())},
            buffer_bytes,
        )
