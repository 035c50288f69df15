"""Runs plans of requests that want vectors instead of tokens.

    plan → PersistentBatch.gather → ReplayManager.run (rows of hidden states or label values)
         → Pooler → PersistentBatch.advance

A text may come in several steps; its rows are wanted in the step that holds its last token, or in
every step for one vector per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput
from girih.runtime.records.pooling_params import PoolingParams
from girih.runtime.step.base import StepRunner
from girih.runtime.step.batch import PersistentBatch, StepBatch
from girih.runtime.step.pooler import Pooler
from girih.runtime.step.replay import ReplayManager


@dataclass
class _Text:
    """A request while its text is computed.

    Attributes:
        params: what it asks for.
        rows: one per token computed so far, where all are wanted.
    """

    params: PoolingParams
    rows: list[torch.Tensor] = field(default_factory=list)


Pooled = tuple[dict[str, bytes], dict[str, torch.Tensor]]
"""Vectors of the texts that are done, and the rows of every text where all are wanted."""


class PoolingRunner(StepRunner[Pooled]):
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

    def update(self, plan: SchedulerOutput) -> None:
        """See `StepRunner.update`."""
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            self._texts.pop(request_id, None)
        for request in plan.new_requests:
            self._texts[request.request_id] = _Text(request.pooling or PoolingParams())

    def read(self, step: StepBatch, rows: torch.Tensor) -> Pooled:
        """Make vectors of the model's rows."""
        rows = self.pooler.finish(rows) if len(rows) else rows
        parts: dict[str, torch.Tensor] = {}
        if self.pooler.mode == "all":
            counts = np.diff(step.inputs.attention.query_start.numpy()).tolist()
            split = zip(step.request_ids, rows.split(counts), strict=True)
            parts = {request_id: part.clone() for request_id, part in split}
        vectors: dict[str, bytes] = {}

        def pool(place: int) -> None:
            request_id, own = step.sampled_ids[place], rows[place : place + 1]
            text = self._texts[request_id]
            if parts:
                own = torch.cat([*text.rows, parts[request_id]])
            vector = self.pooler.apply(own, text.params)
            vectors[request_id] = vector.numpy().astype("<f4").tobytes()

        places = ((request_id, n) for n, request_id in enumerate(step.sampled_ids))
        self.batch.failures.each(places, pool)
        return vectors, parts

    def commit(self, step: StepBatch, found: Pooled, result: ModelRunnerOutput) -> None:
        """See `StepRunner.commit`."""
        vectors, parts = found
        for request_id, part in parts.items():
            self._texts[request_id].rows.append(part)
        self.batch.advance(step)
        result.pooled.update(vectors)
