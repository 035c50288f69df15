"""The persistent batch: one row per running request in fixed buffers, and the step made of it.

    row r:  token_ids[r] = [prompt | output ....]   block_table[r] = [block ids ....]
                            ╰ num_computed ╯ ╰ this step ╯

A step writes only what changed (rows that come or go, new blocks, sampled tokens) and gathers
the rest, vectorised, into packed arrays without padding. Rows stay dense: the last row moves
into the gap of one that leaves. Knows no model and does not sample. A request that failed on its
own keeps its row until it is gone, but no step is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from girih.graph.execute.step_inputs import StepInputs
from girih.kernels.attention.metadata import AttentionMetadata
from girih.kernels.base.errors import EngineError
from girih.runtime.isolation import RowFailures
from girih.runtime.records.plans import (
    ModelRunnerOutput,
    NewRequest,
    RunningUpdate,
    SchedulerOutput,
)
from girih.runtime.sample.logits_processors import NamedProcessor
from girih.runtime.sample.rows import SamplingRows
from girih.runtime.sample.sampler import SamplerOutput, SamplingInputs

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class PromptRows:
    """Rows of a step's logits that predict prompt tokens (for prompt logprobs).

    Attributes:
        request_id: whose prompt.
        start: first of these rows in the logits.
        stop: one past the last.
        token_ids: int64 [stop - start], the prompt tokens they predict.
        num_logprobs: alternatives to list, -1 for the whole vocabulary.
    """

    request_id: str
    start: int
    stop: int
    token_ids: torch.Tensor
    num_logprobs: int


@dataclass(frozen=True)
class StepBatch:
    """A step of the batch: the tensors of R requests, and which rows they are of.

    Attributes:
        inputs: of the program, whose S + P rows of logits are those to sample from, then those of
            `prompt_rows`.
        request_ids: the R requests in order.
        rows: their rows in the batch.
        sampled_ids: the S requests sampled from, in the order of their logits.
        sampled_rows: their rows in the batch.
        prompt_rows: prompts to score.
    """

    inputs: StepInputs
    request_ids: list[str]
    rows: IntArray
    sampled_ids: list[str]
    sampled_rows: IntArray
    prompt_rows: tuple[PromptRows, ...]


class PersistentBatch:
    """Rows of the running requests.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens per row.
        block_size: token slots per KV block.
        vocab_size: width of the logits.
        num_groups: KV groups; a row's block table has one block of each per `block_size` tokens.
        processors: plug-ins that change logits.
        outputs_of: tokens of a request whose output is needed: the "last" or first ("cls") one, in
            the step with its last known token, or "all" in every step.
        has_token_types: the model reads which text of a pair each token is of.

    Attributes:
        row_of: request id -> row.
        failures: requests that failed on their own.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        processors: Sequence[NamedProcessor] = (),
        outputs_of: str = "last",
        has_token_types: bool = False,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.row_of: dict[str, int] = {}
        self.failures = RowFailures()
        self._ids: list[str] = []  # row -> request id
        # A prompt of full length that is only scored is sampled from too.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        # A table per KV group: blocks come as flat rows of one block per group.
        self._block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self._token_types = np.zeros_like(self._token_ids) if has_token_types else None
        self._outputs_of = outputs_of
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        # Rows move, states do not: a row keeps the number of its state. Always a permutation.
        self._state_slots = np.arange(max_num_seqs, dtype=np.int32)
        self._sampling = SamplingRows(max_num_seqs, vocab_size, processors)
        self._prompt_logprobs: dict[str, int] = {}  # requests whose prompt is still to be scored

    def __len__(self) -> int:
        return len(self._ids)

    def update(self, plan: SchedulerOutput) -> None:
        """Bring the rows up to date.

        Raises:
            EngineError: the plan and the rows disagree about a request.
        """
        gone = (*plan.finished_ids, *plan.preempted_ids)
        for request_id in gone:
            if request_id in self.row_of:
                self._remove(request_id)
        self.failures.forget(gone)
        self.failures.each(((new.request_id, new) for new in plan.new_requests), self._add)
        self.failures.each(((news.request_id, news) for news in plan.running), self._continue)

    def gather(self, plan: SchedulerOutput, request_ids: list[str]) -> StepBatch:
        """Gather the inputs of a step with some requests of `plan`, at least one, in its order."""
        scheduled = plan.num_scheduled_tokens
        rows = np.array([self.row_of[request_id] for request_id in request_ids])
        counts = np.array([scheduled[request_id] for request_id in request_ids], np.int64)
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        computed = self._num_computed_tokens[rows]
        seq_lens = computed + counts.astype(np.int32)
        token_rows = np.repeat(rows, counts)  # [T]
        positions = np.arange(query_start[-1], dtype=np.int64)
        positions += np.repeat(computed - query_start[:-1], counts)
        is_sampled = seq_lens == self._num_tokens[rows]
        sampled_rows = rows[is_sampled]
        if self._outputs_of == "all":
            logits_index = np.arange(len(positions))
        elif self._outputs_of == "cls":
            logits_index = query_start[:-1][is_sampled].astype(np.int64)
        else:
            logits_index = query_start[1:][is_sampled].astype(np.int64) - 1
        prompt_rows: tuple[PromptRows, ...] = ()
        if self._prompt_logprobs:
            prompt_rows, extra = self._prompt_rows(rows, query_start, len(logits_index))
            logits_index = np.concatenate([logits_index, *extra])
        token_types = None
        if self._token_types is not None:
            types = self._token_types[token_rows, positions]
            token_types = torch.from_numpy(types.astype(np.int64))
        blocks, offsets = np.divmod(positions, self.block_size)
        slots = self._block_tables[:, token_rows, blocks].astype(np.int64, order="C")  # [G, T]
        slots *= self.block_size
        slots += offsets
        num_columns = -(-int(seq_lens.max()) // self.block_size)
        tables = self._block_tables[:, rows, :num_columns].copy()  # contiguous
        inputs = StepInputs(
            ids=torch.from_numpy(self._token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            logits_index=torch.from_numpy(logits_index),
            attention=AttentionMetadata(
                query_start=torch.from_numpy(query_start),
                seq_lens=torch.from_numpy(seq_lens),
                block_tables=torch.from_numpy(tables).unbind(),
                slot_mappings=torch.from_numpy(slots).unbind(),
            ),
            state_slots=torch.from_numpy(self._state_slots[rows]),
            token_types=token_types,
        )
        sampled_ids = [self._ids[row] for row in sampled_rows.tolist()]
        return StepBatch(inputs, request_ids, rows, sampled_ids, sampled_rows, prompt_rows)

    def sampling(self, step: StepBatch, part: slice) -> SamplingInputs:
        """Return the sampling inputs of a part of the step's S rows."""
        history = (self._token_ids, self._num_tokens, self._num_prompt_tokens)
        return self._sampling.gather(step.sampled_rows[part], *history)

    def commit(
        self, step: StepBatch, part: slice, output: SamplerOutput, result: ModelRunnerOutput
    ) -> None:
        """Take in what was sampled for a part of the step's S rows, and add it to the result."""
        rows, request_ids = step.sampled_rows[part], step.sampled_ids[part]
        self._token_ids[rows, self._num_tokens[rows]] = output.token_ids.numpy()
        self._num_tokens[rows] += 1
        tokens = [[token_id] for token_id in output.token_ids.tolist()]
        result.sampled_token_ids.update(zip(request_ids, tokens, strict=True))
        for request_id, record in zip(request_ids, output.logprobs or (), strict=False):
            if record is not None:
                result.logprobs[request_id] = [record]

    def advance(self, step: StepBatch) -> None:
        """Take in that the step's tokens are computed."""
        self._num_computed_tokens[step.rows] = step.inputs.attention.seq_lens.numpy()

    # ---- rows ----

    def _continue(self, update: RunningUpdate) -> None:
        row = self.row_of.get(update.request_id)
        if row is None or self._num_computed_tokens[row] != update.num_computed_tokens:
            raise EngineError(
                f"a step continues request {update.request_id!r} at token "
                f"{update.num_computed_tokens}; its row is at "
                f"{None if row is None else self._num_computed_tokens[row]}"
            )
        self._append_blocks(row, update.new_block_ids)

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        blocks = np.reshape(block_ids, (-1, len(self._block_tables))).T
        start = self._num_blocks[row]
        stop = self._num_blocks[row] = start + blocks.shape[1]
        self._block_tables[:, row, start:stop] = blocks

    def _add(self, request: NewRequest) -> None:
        request_id, row = request.request_id, len(self._ids)
        if request_id in self.row_of or row == len(self._num_tokens):
            raise EngineError(
                f"request {request_id!r} cannot be added: its row exists or all "
                f"{len(self._num_tokens)} rows are taken"
            )
        num_tokens = len(request.token_ids)
        self._ids.append(request_id)
        self.row_of[request_id] = row
        self._token_ids[row, :num_tokens] = request.token_ids
        self._num_tokens[row] = num_tokens
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        self._num_computed_tokens[row] = request.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        self._sampling.set(row, request)
        if self._token_types is not None:
            types = request.pooling.token_types if request.pooling else None
            self._token_types[row, :num_tokens] = types or 0
        asked = request.sampling.prompt_logprobs
        if asked is not None and num_tokens == request.num_prompt_tokens:
            self._prompt_logprobs[request_id] = asked

    def _remove(self, request_id: str) -> None:
        row = self.row_of.pop(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self.failures.each([(request_id, row)], self._sampling.drop)
        last = len(self._ids) - 1
        last_id = self._ids.pop()
        if row == last:
            return
        self._ids[row] = last_id
        self.row_of[last_id] = row
        num_tokens, num_blocks = self._num_tokens[last], self._num_blocks[last]
        self._token_ids[row, :num_tokens] = self._token_ids[last, :num_tokens]
        if self._token_types is not None:
            self._token_types[row, :num_tokens] = self._token_types[last, :num_tokens]
        self._block_tables[:, row, :num_blocks] = self._block_tables[:, last, :num_blocks]
        for column in (
            self._num_tokens,
            self._num_prompt_tokens,
            self._num_computed_tokens,
            self._num_blocks,
        ):
            column[row] = column[last]
        self._state_slots[[row, last]] = self._state_slots[[last, row]]
        self.failures.each([(last_id, last)], lambda source: self._sampling.move(source, row))

    # ---- steps ----

    def _prompt_rows(
        self, rows: IntArray, query_start: IntArray, first: int
    ) -> tuple[tuple[PromptRows, ...], list[IntArray]]:
        """Prompt tokens that this step's logits predict; the rows follow row `first`."""
        found, index = [], []
        for place, row in enumerate(rows.tolist()):
            request_id = self._ids[row]
            if request_id not in self._prompt_logprobs:
                continue
            start = int(self._num_computed_tokens[row])
            num_tokens = int(query_start[place + 1] - query_start[place])
            last = int(self._num_prompt_tokens[row]) - 1  # predicts output, not prompt
            count = min(start + num_tokens, last) - start
            if count <= 0:
                continue
            targets = self._token_ids[row, start + 1 : start + 1 + count].astype(np.int64)
            asked = self._prompt_logprobs[request_id]
            found.append(
                PromptRows(request_id, first, first + count, torch.from_numpy(targets), asked)
            )
            index.append(np.arange(query_start[place], query_start[place] + count))
            first += count
        return tuple(found), index
