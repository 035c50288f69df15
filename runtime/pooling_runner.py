"""Runs plans of requests that want vectors instead of tokens.

    plan → PersistentBatch.prepare → ReplayManager.run (rows of hidden states or label values)
         → Pooler → PersistentBatch.advance

A text may come in several steps; its rows are wanted in the step that holds its last token, or in
every step for one vector per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from girih.graph.executable import StepInputs
from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput
from girih.runtime.pooler import Pooler
from girih.runtime.pooling_params import PoolingParams
from girih.runtime.replay import ReplayManager
from girih.runtime.step_runner import StepRunner, step_inputs


@dataclass
class _Text:
    """A request while its text is computed.

    Attributes:
        params: what it asks for.
        rows: one per token computed so far, where all are wanted.
    """

    params: PoolingParams
    rows: list[torch.Tensor] = field(default_factory=list)


class PoolingRunner(StepRunner):
    """The runner behind the scheduler of a model that embeds or classifies.

    Args:
        replays: runs the steps of the bound program.
        batch: the rows of running requests.
        pooler: finishes the model's rows.
        threads: compute threads.
    """

    def __init__(
        self, replays: ReplayManager, batch: PersistentBatch, pooler: Pooler, threads: int
    ) -> None:
        super().__init__(replays, batch, threads)
        self.pooler = pooler
        self._texts: dict[str, _Text] = {}

    def inputs(self, plan: SchedulerOutput, step: StepBatch) -> StepInputs:
        """See `StepRunner.inputs`; which rows are wanted depends on the way of pooling."""
        self._update_texts(plan)
        names = list(plan.num_scheduled_tokens)
        inputs = step_inputs(step)
        if "token_types" in self.executable.layout.inputs:
            inputs = replace(inputs, token_types=self._token_types(step, names))
        if self.pooler.mode == "all":
            return replace(inputs, logits_index=torch.arange(len(step.ids)))
        if self.pooler.mode == "cls":
            done = set(step.sampled_ids)
            starts = zip(names, step.query_start.tolist(), strict=False)
            first = [start for request_id, start in starts if request_id in done]
            return replace(inputs, logits_index=torch.tensor(first, dtype=torch.int64))
        return inputs

    def finish(
        self, plan: SchedulerOutput, step: StepBatch, rows: torch.Tensor
    ) -> ModelRunnerOutput:
        """Make vectors of the model's rows."""
        rows = self.pooler.finish(rows) if len(rows) else rows
        pooled = self._pooled(step, rows, list(plan.num_scheduled_tokens))
        self.batch.advance(step)
        return ModelRunnerOutput(step.step_id, {}, pooled=pooled)

    def _update_texts(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            self._texts.pop(request_id, None)
        for request in plan.new_requests:
            self._texts[request.request_id] = _Text(request.pooling or PoolingParams())

    def _token_types(self, step: StepBatch, names: list[str]) -> torch.Tensor:
        types = torch.zeros(len(step.ids), dtype=torch.int64)
        starts, ends = step.query_start.tolist(), step.seq_lens.tolist()
        for place, request_id in enumerate(names):
            given = self._texts[request_id].params.token_types
            if given is not None:
                begin, end = starts[place], starts[place + 1]
                part = given[ends[place] - (end - begin) : ends[place]]
                types[begin:end] = torch.tensor(part)
        return types

    def _pooled(self, step: StepBatch, rows: torch.Tensor, names: list[str]) -> dict[str, bytes]:
        if self.pooler.mode != "all":
            return self._finished((i, rows[n : n + 1]) for n, i in enumerate(step.sampled_ids))
        counts = np.diff(step.query_start.numpy()).tolist()
        for request_id, part in zip(names, rows.split(counts), strict=True):
            self._texts[request_id].rows.append(part.clone())
        return self._finished((i, torch.cat(self._texts[i].rows)) for i in step.sampled_ids)

    def _finished(self, texts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
        apply = self.pooler.apply
        vectors = ((i, apply(rows, self._texts[i].params)) for i, rows in texts)
        return {i: rows.numpy().astype("<f4").tobytes() for i, rows in vectors}
