"""A fake runner on the real batch and sampler: only the model is replaced.

The "logits" after a prefix are highest for the token `fake_next_token` gives and fall from there,
so bans lead to the same next choice as in `FakeRunner`.
"""

from __future__ import annotations

import torch
from support_fake_runner import _choose, _extend

from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput
from girih.runtime.sampler import sample, score_tokens


class TensorFakeRunner:
    """Runs plans through `PersistentBatch` and `sample`, with a fake KV memory by slot."""

    def __init__(self, max_num_seqs, max_model_len, block_size, vocab_size):
        self.batch = PersistentBatch(max_num_seqs, max_model_len, block_size, vocab_size)
        self.block_size, self.vocab_size = block_size, vocab_size
        self.memory: dict[int, int] = {}
        self.violations: list[str] = []
        self.steps: list[StepBatch] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        step = self.batch.prepare(plan)
        self.steps.append(step)
        assert len(self.batch) >= len(step.rows)
        logits = self._forward(step)
        output = sample(logits[: step.num_samples], step.sampling)
        prompts = {
            p.request_id: score_tokens(
                logits[p.start : p.stop], p.token_ids, [p.num_logprobs] * (p.stop - p.start)
            )
            for p in step.prompt_rows
        }
        return self.batch.commit(step, output, prompts)

    def _forward(self, step: StepBatch) -> torch.Tensor:
        starts, lens = step.query_start.tolist(), step.seq_lens.tolist()
        table, slots = step.block_table.tolist(), step.slot_mapping.tolist()
        ids, positions = step.ids.tolist(), step.positions.tolist()
        size = self.block_size

        def slot_of(request, position):
            return table[request][position // size] * size + position % size

        request_of = {}
        for request, length in enumerate(lens):
            tokens = range(starts[request], starts[request + 1])
            assert positions[tokens[-1]] == length - 1
            for token in tokens:
                position = positions[token]
                request_of[token] = request
                assert slots[token] == slot_of(request, position) >= size  # not the null block
                before = self.memory.get(slot_of(request, position - 1), -1) if position else 0
                self.memory[slots[token]] = _extend(before, ids[token])
        rows = []
        for token in step.logits_index.tolist():
            request = request_of[token]
            values = [self.memory[slot_of(request, p)] for p in range(positions[token] + 1)]
            best = _choose(values, self.vocab_size, frozenset())
            rows.append(-((torch.arange(self.vocab_size) - best) % self.vocab_size).float())
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)
