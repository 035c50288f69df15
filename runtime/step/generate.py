"""Runs plans of requests that want tokens: batch rows in, tokens out.

    plan → GrammarRows.update → PersistentBatch.gather → ReplayManager.run
         → [ PersistentBatch.sampling → GrammarRows.constrain → sample ] → prompt logprobs
             again for each half of the rows where it raises
         → GrammarRows.accept → PersistentBatch.commit

Matchers belong to the grammar rows; for the rest see `step_runner.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput
from girih.runtime.records.request import TokenLogprobs
from girih.runtime.sample.sampler import SamplerOutput, sample, score_tokens
from girih.runtime.step.base import StepRunner
from girih.runtime.step.batch import PersistentBatch, PromptRows, StepBatch
from girih.runtime.step.replay import ReplayManager
from girih.runtime.structured.rows import GrammarRows

Prompts = dict[str, list[TokenLogprobs]]
Sampled = tuple[list[tuple[slice, SamplerOutput]], Prompts]
"""Tokens of parts of a step's rows, and the scores of prompts by request."""


class CompiledModelRunner(StepRunner[Sampled]):
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

    def update(self, plan: SchedulerOutput) -> None:
        """See `StepRunner.update`."""
        self.grammars.update(plan)

    def read(self, step: StepBatch, rows: torch.Tensor) -> Sampled:
        """Sample; `rows` are logits [S + P, V]."""
        failures, prompts = self.batch.failures, Prompts()
        tokens = failures.split(step.sampled_ids, lambda part: self._sample(step, part, rows[part]))

        def score(asked: PromptRows) -> None:
            numbers = [asked.num_logprobs] * (asked.stop - asked.start)
            logits = rows[asked.start : asked.stop]
            prompts[asked.request_id] = score_tokens(logits, asked.token_ids, numbers)

        failures.each(((asked.request_id, asked) for asked in step.prompt_rows), score)
        return tokens, prompts

    def commit(self, step: StepBatch, found: Sampled, result: ModelRunnerOutput) -> None:
        """See `StepRunner.commit`."""
        tokens, prompts = found
        self.batch.advance(step)
        for part, output in tokens:
            self.grammars.accept(step.sampled_ids[part], output.token_ids)
            self.batch.commit(step, part, output, result)
        result.prompt_logprobs.update(prompts)

    def _sample(self, step: StepBatch, part: slice, logits: torch.Tensor) -> SamplerOutput:
        """Choose tokens for a part of the rows."""
        sampling = self.batch.sampling(step, part)
        constraint = self.grammars.constrain(step.sampled_ids[part])
        if constraint is not None:
            sampling = replace(sampling, grammar=constraint)
        return sample(logits, sampling)
