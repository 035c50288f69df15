"""Sampling settings of the batch's rows, in columns, and what one step asks of the sampler.

A row is written when its request enters; a step only gathers. Loops over requests happen only
for rows with settings that need them (bans, bias, allowed tokens, penalties); a batch of plain
greedy rows costs one look at the flags.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from girih.runtime.records.plans import NewRequest
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.sample.logits_processors import (
    ActiveProcessor,
    NamedProcessor,
    ProcessorRows,
    RowTokens,
)
from girih.runtime.sample.sampler import GREEDY, PenaltyInputs, SamplingInputs, uniform_noise

IntArray = npt.NDArray[np.integer]

RANDOM, MIN_P, TOP_K, TOP_P, PENALTY, EDIT, LOGPROBS, PLUGIN = (1 << bit for bit in range(8))


# Of float32: beyond them 0 or infinity would stand, which make NaN of a banned token's logit.
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


class RowEdits:
    """Settings of one row that change single logits, ready to be put together.

    Attributes:
        allowed: bool [V] of the tokens that may be produced, or None.
        bias_ids: int64 [C] token ids with a bias.
        bias_values: float32 [C].
        bad_words: sequences that are never produced.
        stop_ids: int64, banned before `min_tokens` output tokens.
        min_tokens: output tokens before the stop ids are free.
    """

    __slots__ = ("allowed", "bad_words", "bias_ids", "bias_values", "min_tokens", "stop_ids")

    def __init__(self, request: NewRequest, vocab_size: int) -> None:
        params = request.sampling
        self.allowed: torch.Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = torch.zeros(vocab_size, dtype=torch.bool)
            self.allowed[list(params.allowed_token_ids)] = True
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.bad_words = params.bad_words
        self.stop_ids = np.array(request.stop_token_ids, np.int64)
        self.min_tokens = params.min_tokens if len(self.stop_ids) else 0

    def banned(self, output: IntArray) -> IntArray:
        """Token ids that may not follow the output tokens so far."""
        ids = [self.stop_ids] if len(output) < self.min_tokens else []
        for word in self.bad_words:
            before = len(word) - 1
            if before <= len(output) and tuple(output[len(output) - before :]) == word[:-1]:
                ids.append(np.array(word[-1:], np.int64))
        return np.concatenate(ids) if ids else self.stop_ids[:0]


def _flags(params: SamplingParams, has_stop_ids: bool) -> int:
    """Bits of what a row asks for; 0 is plain greedy."""
    is_random = not params.is_greedy
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    edits = (params.allowed_token_ids, params.logit_bias, params.bad_words)
    asks = {
        RANDOM: is_random,
        MIN_P: is_random and params.min_p > 0,
        TOP_K: is_random and params.top_k > 0,
        TOP_P: is_random and params.top_p < 1,
        PENALTY: penalties != (0.0, 0.0, 1.0),
        EDIT: any(edits) or (params.min_tokens > 0 and has_stop_ids),
        LOGPROBS: params.logprobs is not None,
    }
    return sum(bit for bit, asked in asks.items() if asked)


class SamplingRows:
    """Columns of sampling settings, one entry per row of the batch.

    Args:
        max_num_seqs: rows.
        vocab_size: V, the width of the logits.
        processors: plug-ins that change logits.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, processors: Sequence[NamedProcessor] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self._plugins = ProcessorRows(processors, max_num_seqs) if processors else None
        self._flags = np.zeros(max_num_seqs, np.uint8)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._penalties = np.zeros((max_num_seqs, 3), np.float32)  # repetition, frequency, presence
        self._num_logprobs: list[int | None] = [None] * max_num_seqs
        self._edits: list[RowEdits | None] = [None] * max_num_seqs
        self._columns = (
            self._flags,
            self._temperature,
            self._min_p,
            self._top_k,
            self._top_p,
            self._seeds,
            self._penalties,
        )
        self._entropy = np.random.default_rng()

    def set(self, row: int, request: NewRequest) -> None:
        """Write the settings of `request` to `row`; without a seed it draws one."""
        params = request.sampling
        flags = _flags(params, bool(request.stop_token_ids))
        if self._plugins is not None and self._plugins.add(row, request):
            flags |= PLUGIN
        seed = params.seed
        if seed is None:
            seed = int(self._entropy.integers(2**63))
        self._flags[row] = flags
        self._temperature[row] = 0 if params.is_greedy else min(params.temperature, _LARGEST)
        self._min_p[row] = params.min_p
        self._top_k[row] = min(params.top_k, self.vocab_size)
        if params.top_k <= 0:
            self._top_k[row] = self.vocab_size
        self._top_p[row] = params.top_p
        self._seeds[row] = seed % 2**64
        self._penalties[row] = (
            min(max(params.repetition_penalty, _SMALLEST), _LARGEST),
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._num_logprobs[row] = params.logprobs
        self._edits[row] = RowEdits(request, self.vocab_size) if flags & EDIT else None

    def drop(self, row: int) -> None:
        """The request of `row` leaves."""
        if self._plugins is not None:
            self._plugins.drop(row)

    def move(self, source: int, target: int) -> None:
        """Put the settings of row `source` in the place of row `target`."""
        for column in self._columns:
            column[target] = column[source]
        self._num_logprobs[target] = self._num_logprobs[source]
        self._edits[target] = self._edits[source]
        if self._plugins is not None:
            self._plugins.move(source, target)

    def gather(
        self, rows: IntArray, token_ids: IntArray, num_tokens: IntArray, num_prompt_tokens: IntArray
    ) -> SamplingInputs:
        """Collect the sampling inputs of a step.

        Args:
            rows: [S] rows that are sampled from, in the order of their logits.
            token_ids: [max_num_seqs, max_model_len] tokens of all rows.
            num_tokens: [max_num_seqs] known tokens of all rows.
            num_prompt_tokens: [max_num_seqs].
        """
        flags = int(np.bitwise_or.reduce(self._flags[rows])) if len(rows) else 0
        if flags == 0:
            return GREEDY
        history = (token_ids, num_tokens, num_prompt_tokens)
        temperature = uniform = None
        if flags & RANDOM:
            temperature = torch.from_numpy(self._temperature[rows])
            noise = uniform_noise(self._seeds[rows], num_tokens[rows].astype(np.uint64))
            uniform = torch.from_numpy(noise)
        allowed, banned, bias = self._gather_edits(rows, *history) if flags & EDIT else (None,) * 3
        processors: tuple[ActiveProcessor, ...] = ()
        if flags & PLUGIN and self._plugins is not None:
            processors = self._plugins.active(rows, RowTokens(*history))
        num_logprobs = tuple(self._num_logprobs[row] for row in rows) if flags & LOGPROBS else None
        return SamplingInputs(
            temperature=temperature,
            uniform=uniform,
            min_p=torch.from_numpy(self._min_p[rows]) if flags & MIN_P else None,
            top_k=torch.from_numpy(self._top_k[rows]) if flags & TOP_K else None,
            top_p=torch.from_numpy(self._top_p[rows]) if flags & TOP_P else None,
            allowed=allowed,
            banned=banned,
            bias=bias,
            processors=processors,
            penalties=self._gather_penalties(rows, *history) if flags & PENALTY else None,
            num_logprobs=num_logprobs,
        )

    def _gather_edits(
        self, rows: IntArray, token_ids: IntArray, num_tokens: IntArray, num_prompt: IntArray
    ) -> tuple[
        tuple[torch.Tensor, torch.Tensor] | None,
        tuple[torch.Tensor, torch.Tensor] | None,
        tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ]:
        allowed_rows, allowed, banned, bias_ids, bias_values = [], [], [], [], []
        for index in np.flatnonzero(self._flags[rows] & EDIT).tolist():
            row = rows[index]
            edits = self._edits[row]
            assert edits is not None
            if edits.allowed is not None:
                allowed_rows.append(index)
                allowed.append(edits.allowed)
            banned.append((index, edits.banned(token_ids[row, num_prompt[row] : num_tokens[row]])))
            bias_ids.append((index, edits.bias_ids))
            bias_values.append(edits.bias_values)
        banned_pairs, bias_pairs = _pairs(banned), _pairs(bias_ids)
        return (
            (torch.tensor(allowed_rows), torch.stack(allowed)) if allowed else None,
            banned_pairs,
            (*bias_pairs, torch.from_numpy(np.concatenate(bias_values))) if bias_pairs else None,
        )

    def _gather_penalties(
        self, rows: IntArray, token_ids: IntArray, num_tokens: IntArray, num_prompt: IntArray
    ) -> PenaltyInputs:
        """Distinct (row, token) pairs of the rows with penalties, and their output counts."""
        indexes = np.flatnonzero(self._flags[rows] & PENALTY)
        asked = rows[indexes]
        tokens = np.concatenate([token_ids[row, : num_tokens[row]] for row in asked])
        is_output = np.concatenate([np.arange(num_tokens[row]) >= num_prompt[row] for row in asked])
        keys = np.repeat(indexes, num_tokens[asked]) * self.vocab_size + tokens
        distinct, inverse = np.unique(keys, return_inverse=True)
        counts = np.bincount(inverse[is_output], minlength=len(distinct)).astype(np.float32)
        pair_rows = distinct // self.vocab_size
        repetition, frequency, presence = self._penalties[rows[pair_rows]].T.copy()
        return PenaltyInputs(
            rows=torch.from_numpy(pair_rows),
            token_ids=torch.from_numpy(distinct % self.vocab_size),
            output_counts=torch.from_numpy(counts),
            repetition=torch.from_numpy(repetition),
            frequency=torch.from_numpy(frequency),
            presence=torch.from_numpy(presence),
        )


def _pairs(
    entries: list[tuple[int, IntArray]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[(row, token ids)] -> rows int64 [M] and token ids int64 [M]; None when empty."""
    token_ids = np.concatenate([ids for _, ids in entries])
    if len(token_ids) == 0:
        return None
    rows = np.repeat([index for index, _ in entries], [len(ids) for _, ids in entries])
    return torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(token_ids.astype(np.int64))
