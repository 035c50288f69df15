"""Runs plans of requests that want tokens: batch rows in, tokens out.

    plan → PersistentBatch.prepare → ReplayManager.run → GrammarRows.constrain → sample
         → GrammarRows.accept → PersistentBatch.commit

Matchers belong to the grammar rows; for the rest see `step_runner.py`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from girih.graph.executable import StepInputs
from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput
from girih.runtime.replay import ReplayManager
from girih.runtime.request import TokenLogprobs
from girih.runtime.sampler import SamplerOutput, sample, score_tokens
from girih.runtime.step_runner import StepRunner, step_inputs
from girih.runtime.structured.rows import GrammarRows


class CompiledModelRunner(StepRunner):
    """The runner behind the scheduler of a model that generates.

    Args:
        replays: runs the steps of the bound program.
        batch: the rows of running requests.
        grammars: matchers of the requests whose output has a form.
        threads: compute threads.
    """

    def __init__(
        self, replays: ReplayManager, batch: PersistentBatch, grammars: GrammarRows, threads: int
    ) -> None:
        super().__init__(replays, batch, threads)
        self.grammars = grammars

    def inputs(self, plan: SchedulerOutput, step: StepBatch) -> StepInputs:
        """See `StepRunner.inputs`."""
        return step_inputs(step)

    def finish(
        self, plan: SchedulerOutput, step: StepBatch, rows: torch.Tensor
    ) -> ModelRunnerOutput:
        """Sample; `rows` are logits [S, V]."""
        output, errors = self._sample(plan, step, rows)
        result = self.batch.commit(step, output, _prompt_logprobs(step, rows))
        return _without(result, errors) if errors else result

    def _sample(
        self, plan: SchedulerOutput, step: StepBatch, logits: torch.Tensor
    ) -> tuple[SamplerOutput, dict[str, str]]:
        """Choose tokens; also returns why some requests cannot keep the form of their output."""
        grammars, sampling = self.grammars, step.sampling
        grammars.update(plan)
        constraint = grammars.constrain(step.sampled_ids)
        if constraint is not None:
            sampling = replace(sampling, grammar=constraint)
        output = sample(logits[: step.num_samples], sampling)
        errors = grammars.accept(step.sampled_ids, output.token_ids)
        if output.errors:
            errors |= {step.sampled_ids[row]: text for row, text in output.errors.items()}
        return output, errors


def _without(result: ModelRunnerOutput, errors: dict[str, str]) -> ModelRunnerOutput:
    sampled = {i: ids for i, ids in result.sampled_token_ids.items() if i not in errors}
    return msgspec.structs.replace(result, sampled_token_ids=sampled, errors=errors)


def _prompt_logprobs(step: StepBatch, logits: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
    return {
        rows.request_id: score_tokens(
            logits[rows.start : rows.stop],
            rows.token_ids,
            [rows.num_logprobs] * (rows.stop - rows.start),
        )
        for rows in step.prompt_rows
    }
