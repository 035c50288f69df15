"""Runs plans of requests that want vectors instead of tokens.

    plan → PersistentBatch.prepare → Executable.run (rows of hidden states or label values)
         → Pooler → PersistentBatch.advance

A text may come in several steps; its rows are wanted in the step that holds its last token, or in
every step for one vector per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from girih.graph.executable import Executable, StepInputs
from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput, StepTimes
from girih.runtime.model_runner import CallingThread, step_inputs
from girih.runtime.pooler import Pooler
from girih.runtime.pooling_params import PoolingParams
from girih.runtime.resident import ResidentRunner

Counts = npt.NDArray[np.integer]


@dataclass
class _Text:
    """A request while its text is computed.

    Attributes:
        params: what it asks for.
        rows: one per token computed so far, where all are wanted.
    """

    params: PoolingParams
    rows: list[torch.Tensor] = field(default_factory=list)


class PoolingRunner(ResidentRunner):
    """The runner behind the scheduler of a model that embeds or classifies.

    Args:
        executable: the bound program.
        batch: the rows of running requests.
        pooler: finishes the model's rows.
        threads: compute threads.
    """

    def __init__(
        self, executable: Executable, batch: PersistentBatch, pooler: Pooler, threads: int
    ) -> None:
        self.executable = executable
        self.batch = batch
        self.pooler = pooler
        self._texts: dict[str, _Text] = {}
        self._threads = CallingThread(threads)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; see `ModelRunner.execute`."""
        self._threads.prepare()
        started = time.perf_counter()
        step = self.batch.prepare(plan)
        self._update_texts(plan)
        names, counts = list(plan.num_scheduled_tokens), np.diff(step.query_start.numpy())
        inputs = self._inputs(step, names, counts)
        prepared = time.perf_counter()
        rows = self.executable.run(inputs)
        ran = time.perf_counter()
        rows = self.pooler.finish(rows) if len(inputs.logits_index) else rows
        pooled = self._pooled(step, rows, names, counts)
        self.batch.advance(step)
        times = StepTimes(prepared - started, ran - prepared, time.perf_counter() - ran)
        return ModelRunnerOutput(step.step_id, {}, pooled=pooled, times=times)

    def _update_texts(self, plan: SchedulerOutput) -> None:
        for request_id in (*plan.finished_ids, *plan.preempted_ids):
            self._texts.pop(request_id, None)
        for request in plan.new_requests:
            self._texts[request.request_id] = _Text(request.pooling or PoolingParams())

    def _inputs(self, step: StepBatch, names: list[str], counts: Counts) -> StepInputs:
        inputs = step_inputs(step)
        if "token_types" in self.executable.layout.inputs:
            inputs = replace(inputs, token_types=self._token_types(step, names, counts))
        if self.pooler.mode == "all":
            return replace(inputs, logits_index=torch.arange(len(step.ids)))
        if self.pooler.mode == "cls":
            done = set(step.sampled_ids)
            starts = zip(names, step.query_start.tolist(), strict=False)
            first = [start for request_id, start in starts if request_id in done]
            return replace(inputs, logits_index=torch.tensor(first, dtype=torch.int64))
        return inputs

    def _token_types(self, step: StepBatch, names: list[str], counts: Counts) -> torch.Tensor:
        types = torch.zeros(len(step.ids), dtype=torch.int64)
        starts, ends = step.query_start.tolist(), step.seq_lens.tolist()
        for place, request_id in enumerate(names):
            given = self._texts[request_id].params.token_types
            if given is not None:
                part = given[ends[place] - int(counts[place]) : ends[place]]
                types[starts[place] : starts[place + 1]] = torch.tensor(part)
        return types

    def _pooled(
        self, step: StepBatch, rows: torch.Tensor, names: list[str], counts: Counts
    ) -> dict[str, bytes]:
        if self.pooler.mode != "all":
            return self._finished((i, rows[n : n + 1]) for n, i in enumerate(step.sampled_ids))
        for request_id, part in zip(names, rows.split(counts.tolist()), strict=True):
            self._texts[request_id].rows.append(part.clone())
        return self._finished((i, torch.cat(self._texts[i].rows)) for i in step.sampled_ids)

    def _finished(self, texts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bytes]:
        apply = self.pooler.apply
        vectors = ((i, apply(rows, self._texts[i].params)) for i, rows in texts)
        return {i: rows.numpy().astype("<f4").tobytes() for i, rows in vectors}
