"""Chooses the next token of every row, vectorised over the batch. The order is meaning:

    raw logits ─▶ float32 ─▶ grammar ─▶ allowed tokens ─▶ bad words, min_tokens (banned)
      ─▶ logit bias ─▶ plug-ins (logits processors) ─▶ penalties ─▶ greedy result
      ─▶ temperature ─▶ min_p ─▶ top-k, top-p ─▶ sample
      ─▶ where(temperature == 0, greedy, sampled);   logprobs are those of the raw logits

Randomness is one number per row, a hash of (seed of the request, position in its sequence), taken
through the inverse of the cumulative distribution in vocabulary order. Neither the number nor the
filters depend on other rows, so a seeded request gives the same tokens in any batch, and again
after a preemption (as far as its logits are the same). Filters keep or drop *values*: tokens
with equal logits at a limit are kept together.

Pure functions of their arguments; which row wants what is `sampling_rows.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from girih.runtime.records.request import TokenLogprobs
from girih.runtime.sample.filters import keep_top_k, keep_top_p
from girih.runtime.sample.logits_processors import ActiveProcessor
from girih.runtime.sample.mask import masked, revive, unpack_mask

_GROUP = 128  # vocabulary entries that are reduced together (argmax, cumulative sums)
_LOGPROB_ROWS = 64  # rows turned into log-probabilities at once (bounds the memory)


@dataclass(frozen=True)
class PenaltyInputs:
    """Distinct tokens of the rows with penalties; M entries, each with its row's penalties.

    Attributes:
        rows: int64 [M], row in the logits.
        token_ids: int64 [M]; each (row, token) pair occurs once.
        output_counts: float32 [M], how often the token is in the output.
        repetition: float32 [M].
        frequency: float32 [M].
        presence: float32 [M].
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True)
class SamplingInputs:
    """Sampling settings of S rows of logits; None means that no row uses a setting.

    Attributes:
        temperature: float32 [S], 0 for greedy rows; None when all are greedy.
        uniform: float64 [S] in (0, 1), each row's random number (with temperature).
        min_p: float32 [S], 0 off.
        top_k: int64 [S], the vocabulary size for off.
        top_p: float32 [S], 1 off.
        grammar: row numbers int64 [G] and int32 [G, ceil(V / 32)], bit i of word j says whether
            token 32 * j + i may be produced. It wins: what else forbids all that it allows is
            ignored.
        allowed: row numbers int64 [A], and bool [A, V] of what each may produce.
        banned: rows and token ids, int64 [B] each.
        bias: rows, token ids (int64 [C] each) and float32 [C] values; pairs are distinct.
        processors: plug-ins with their rows.
        penalties: see `PenaltyInputs`.
        num_logprobs: per row the alternatives to report (-1 all), None for nothing.
    """

    temperature: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    grammar: tuple[torch.Tensor, torch.Tensor] | None = None
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    processors: tuple[ActiveProcessor, ...] = ()
    penalties: PenaltyInputs | None = None
    num_logprobs: tuple[int | None, ...] | None = None

    @property
    def changes_logits(self) -> bool:
        """True if anything is done to the logits before the greedy result."""
        fields = (self.grammar, self.allowed, self.banned, self.bias, self.penalties)
        return bool(self.processors) or any(value is not None for value in fields)


GREEDY = SamplingInputs()


@dataclass(frozen=True)
class SamplerOutput:
    """Result for S rows.

    Attributes:
        token_ids: int64 [S], on the CPU.
        logprobs: per row its record or None; None when no row asked.
    """

    token_ids: torch.Tensor
    logprobs: list[TokenLogprobs | None] | None


def uniform_noise(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per (seed, position): 48 bits of two rounds of splitmix64."""
    mixed = _splitmix(_splitmix(seeds) ^ (positions * np.uint64(0x9E3779B97F4A7C15)))
    result: npt.NDArray[np.float64] = ((mixed >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48
    return result


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> SamplerOutput:
    """Choose one token per row.

    Args:
        logits: [S, V], any float dtype; not modified.
        inputs: what the rows ask for.
    """
    work = _change_logits(logits, inputs) if inputs.changes_logits else logits
    token_ids = argmax(work)
    if inputs.temperature is not None:
        token_ids = _sample_random_rows(work, inputs, token_ids)
    logprobs = None
    if inputs.num_logprobs is not None:
        logprobs = _logprobs_of_rows(logits, token_ids, inputs.num_logprobs)
    return SamplerOutput(token_ids.cpu(), logprobs)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest value per row, the first among equals; [S, V] -> int64 [S].

    Looks for the group with the largest value first: `amax` is vectorised on the CPU,
    `torch.argmax` is not.
    """
    size = logits.shape[1]
    whole = size // _GROUP * _GROUP
    if whole == 0 or logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    maxima = logits[:, :whole].unflatten(1, (-1, _GROUP)).amax(dim=-1)
    if whole < size:
        maxima = torch.cat([maxima, logits[:, whole:].amax(dim=-1, keepdim=True)], dim=1)
    start = (maxima.argmax(dim=-1) * _GROUP).clamp_(max=size - _GROUP)
    window = torch.arange(_GROUP) + start[:, None]
    return start + logits.gather(1, window).argmax(dim=-1)


def _apply_bans(work: torch.Tensor, inputs: SamplingInputs) -> None:
    if inputs.allowed is not None:
        rows, is_allowed = inputs.allowed
        work[rows] = work[rows].masked_fill(~is_allowed, -torch.inf)
    if inputs.banned is not None:
        work[inputs.banned] = -torch.inf


def _apply_processors(work: torch.Tensor, logits: torch.Tensor, inputs: SamplingInputs) -> None:
    """Let plug-ins change `work` in place; grammars keep the last word."""
    for processor in inputs.processors:
        processor.change(work)
    if inputs.grammar is not None:
        rows, words = inputs.grammar
        fits_grammar = unpack_mask(words, logits.shape[1])
        work[rows] = work[rows].masked_fill_(~fits_grammar, -torch.inf)
        revive(work, logits, rows, fits_grammar)


def _change_logits(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Everything up to the penalties, on a float32 copy of `logits` [S, V]."""
    if inputs.grammar is None:
        work = logits.to(torch.float32, copy=True)
        _apply_bans(work, inputs)
    else:
        rows, words = inputs.grammar
        fits_grammar = unpack_mask(words, logits.shape[1])
        work = masked(logits, rows, fits_grammar)
        _apply_bans(work, inputs)
        if inputs.allowed is not None or inputs.banned is not None:
            revive(work, logits, rows, fits_grammar)
    if inputs.bias is not None:
        rows, token_ids, values = inputs.bias
        work[rows, token_ids] += values
    if inputs.processors:
        _apply_processors(work, logits, inputs)
    if inputs.penalties is not None:
        asked = inputs.penalties
        values = work[asked.rows, asked.token_ids]
        values = torch.where(values > 0, values / asked.repetition, values * asked.repetition)
        values.clamp_(max=torch.finfo(torch.float32).max)  # infinite ones could not be compared
        values -= asked.frequency * asked.output_counts
        values -= asked.presence * (asked.output_counts > 0)
        work[asked.rows, asked.token_ids] = values
    return work


def _sample_random_rows(
    work: torch.Tensor, inputs: SamplingInputs, greedy: torch.Tensor
) -> torch.Tensor:
    """The greedy result with the rows of temperature > 0 replaced by samples."""
    assert inputs.temperature is not None and inputs.uniform is not None
    rows = inputs.temperature.nonzero().squeeze(1)
    largest = work[rows, greedy[rows]].float()
    weights = work[rows].to(torch.float32)  # [S', V], a copy: indexed by rows
    weights -= largest[:, None].clamp(min=torch.finfo(torch.float32).min)
    weights /= inputs.temperature[rows, None]
    weights.exp_()  # likelihood relative to the most likely token
    if inputs.min_p is not None:
        weights *= weights >= inputs.min_p[rows, None]
    if inputs.top_k is not None:
        keep_top_k(weights, inputs.top_k[rows])
    if inputs.top_p is not None:
        keep_top_p(weights, inputs.top_p[rows], _row_sums(weights))
    sampled, total = _invert_distribution(weights, inputs.uniform[rows])
    result = greedy.clone()
    result[rows] = torch.where(total > 0, sampled, greedy[rows])
    return result


def _group(weights: torch.Tensor) -> torch.Tensor:
    """[S, V] -> [S, ceil(V / _GROUP), _GROUP], padded with zeros."""
    missing = -weights.shape[1] % _GROUP
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.unflatten(1, (-1, _GROUP))


def _row_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sum per row, float64 [S]; the order of additions does not depend on S."""
    return _group(weights).sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)[:, -1]


def _invert_distribution(
    weights: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """First token whose cumulative weight exceeds `uniform` of the sum.

    First among sums of groups, then inside one group, which reads the row only once.

    Returns:
        Token ids int64 [S] and the sums float64 [S] (0: the row has no token left).
    """
    grouped = _group(weights)
    sums = grouped.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    wanted = uniform[:, None] * total
    index = torch.searchsorted(sums, wanted, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(index > 0, sums.gather(1, (index - 1).clamp(min=0)), 0.0)
    inside = grouped[torch.arange(len(weights)), index[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # rounding may leave more than the group holds: stay below its sum
    below = torch.nextafter(inside[:, -1:], torch.zeros_like(total))
    offset = torch.searchsorted(inside, torch.minimum(wanted - before, below), right=True)
    token_ids = index * _GROUP + offset.clamp_(max=_GROUP - 1)
    return token_ids[:, 0], total[:, 0]


def _logprobs_of_rows(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: tuple[int | None, ...]
) -> list[TokenLogprobs | None]:
    asked = [row for row, number in enumerate(num_logprobs) if number is not None]
    index = torch.tensor(asked)
    numbers = [number for number in num_logprobs if number is not None]
    records = score_tokens(logits[index], token_ids[index], numbers)
    result: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    for row, record in zip(asked, records, strict=True):
        result[row] = record
    return result


def score_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: list[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of given tokens under given logits (also for prompt tokens).

    Args:
        logits: [N, V] raw logits; row i is the distribution of token i.
        token_ids: int64 [N].
        num_logprobs: per row the most likely tokens to list; -1 for the whole vocabulary.
    """
    records: list[TokenLogprobs] = []
    for start in range(0, len(num_logprobs), _LOGPROB_ROWS):
        rows = slice(start, start + _LOGPROB_ROWS)
        records += _score_rows(logits[rows], token_ids[rows], num_logprobs[rows])
    return records


def _score_rows(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: list[int]
) -> list[TokenLogprobs]:
    size = logits.shape[1]
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    numbers = [size if number < 0 else min(number, size) for number in num_logprobs]
    top = logprobs.topk(max(numbers), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token_id, value, rank, ids[:number], values[:number])
        for token_id, value, rank, ids, values, number in zip(
            token_ids.tolist(),
            chosen[:, 0].tolist(),
            ranks,
            top_ids,
            top_values,
            numbers,
            strict=True,
        )
    ]
