"""Runs plans on an executable: batch rows in, tokens out.

    plan → PersistentBatch.prepare → Executable.run → GrammarRows.constrain → sample
         → GrammarRows.accept → PersistentBatch.commit

Owns nothing of its own: rows belong to the batch, device memory to the executable, requests to the
scheduler, matchers to the grammar rows.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import msgspec
import torch

from girih.graph.executable import Executable, StepInputs
from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput, StepTimes
from girih.runtime.request import TokenLogprobs
from girih.runtime.resident import ResidentRunner
from girih.runtime.sampler import SamplerOutput, sample, score_tokens
from girih.runtime.structured.rows import GrammarRows


class CompiledModelRunner(ResidentRunner):
    """The runner behind the scheduler.

    Args:
        executable: the bound program.
        batch: the rows of running requests.
        grammars: matchers of the requests whose output has a form.
        threads: compute threads.
    """

    def __init__(
        self, executable: Executable, batch: PersistentBatch, grammars: GrammarRows, threads: int
    ) -> None:
        self.executable = executable
        self.batch = batch
        self.grammars = grammars
        self._threads = CallingThread(threads)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; see `ModelRunner.execute`."""
        self._threads.prepare()
        started = time.perf_counter()
        step = self.batch.prepare(plan)
        prepared = time.perf_counter()
        logits = self.executable.run(step_inputs(step))
        ran = time.perf_counter()
        output, errors = self._sample(plan, step, logits)
        result = self.batch.commit(step, output, _prompt_logprobs(step, logits))
        times = StepTimes(prepared - started, ran - prepared, time.perf_counter() - ran)
        if errors:
            result = _without(result, errors)
        return msgspec.structs.replace(result, times=times)

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


class CallingThread:
    """OpenMP keeps the thread count per calling thread: it is set where the steps run.

    Args:
        threads: compute threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: int | None = None

    def prepare(self) -> None:
        """Make this thread compute with the wanted number of threads."""
        thread = threading.get_ident()
        if thread != self._known:
            torch.set_num_threads(self._threads)
            self._known = thread


def _without(result: ModelRunnerOutput, errors: dict[str, str]) -> ModelRunnerOutput:
    sampled = {i: ids for i, ids in result.sampled_token_ids.items() if i not in errors}
    return msgspec.structs.replace(result, sampled_token_ids=sampled, errors=errors)


def step_inputs(step: StepBatch) -> StepInputs:
    """What the executable is given of a step."""
    return StepInputs(
        ids=step.ids,
        positions=step.positions,
        logits_index=step.logits_index,
        query_start=step.query_start,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        slot_mapping=step.slot_mapping,
        state_slots=step.state_slots,
    )


def _prompt_logprobs(step: StepBatch, logits: torch.Tensor) -> dict[str, list[TokenLogprobs]]:
    return {
        rows.request_id: score_tokens(
            logits[rows.start : rows.stop],
            rows.token_ids,
            [rows.num_logprobs] * (rows.stop - rows.start),
        )
        for rows in step.prompt_rows
    }
